"""Failed saves, reported to the training threads of all processes at the same step.

A save is the work of all processes, and each of them learns in its saving thread that it failed, but not at the same
moment. The training threads hear of it at one step, so that all retry, or give up, alike.
"""

import json
import threading

import jax

from jaxscale.hosts.agree import Keys, next_key
from jaxscale.system.exits import Exit, Stop

# As for a signal (training/stopping.py): who posts after step n, before it begins n + 1, is read by all after n + 2.
STEPS_AHEAD = 2


class SharedReports:
    """Failed saves of a run of several processes. To be made at the same place of the program by all of them."""

    def __init__(self, keys: Keys | None = None, process: int | None = None, count: int | None = None, root: str = ""):
        """keys, process, count, root: those of jax, and a root that no earlier one had, unless given."""
        self.keys = keys or Keys()
        self.process = jax.process_index() if process is None else process
        self.count = jax.process_count() if count is None else count
        self.root = root or next_key("saves")
        self.reported = 0  # failures that all processes have heard of
        self.own: list[int] = []  # steps of failures here that are not reported yet
        self.lock = threading.Lock()

    def failed(self, step: int, cause: str) -> None:
        """A save of this step has failed. From any thread, in as many processes as know of it.

        What failed only because another had failed is no cause: the first one that was reported stays.
        """
        name = f"process {self.process} of {self.count}"
        self.keys.post(f"{self.root}/failed/{step}", cause if cause.startswith("process ") else f"{name}: {cause}")
        with self.lock:
            self.own.append(step)

    def news(self, now_step: int) -> tuple[int, str] | None:
        """(step of a save that failed, cause with the process), once for each: at the same step in all processes.

        To be asked by the training thread after each step, when the metrics of the step before it have been read.
        Raises: Stop (PEER_LOST) in a process that was too far ahead to hear it in time.
        """
        key = f"{self.root}/news/{self.reported}"
        with self.lock:
            mine = self.own[0] if self.own else None
        if mine is not None:
            cause = self.keys.read(f"{self.root}/failed/{mine}")
            self.keys.post(key, json.dumps([now_step + STEPS_AHEAD, mine, cause]))
        line = self.keys.read(key)
        if line is None:
            return None
        when, step, cause = json.loads(line)
        if now_step > when:
            raise Stop(
                Exit.PEER_LOST,
                f"all were to hear at step {when} that saving step {step} failed ({cause}), and this one is at "
                f"{now_step}; start again",
            )
        if now_step < when:
            return None
        self.reported += 1
        with self.lock:
            self.own = [other for other in self.own if other != step]
        return step, cause
