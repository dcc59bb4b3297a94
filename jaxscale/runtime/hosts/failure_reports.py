"""Failed saves, reported to the training threads of all processes at the same step.

Saves are collective, and the saving threads learn of a failure at different times. The training threads get it at one
step, so that all retry or give up together.
"""

import json
import threading

from jaxscale.runtime.hosts.agree import Board
from jaxscale.system.exits import Exit, Stop

# As for a signal (runtime/training/stopping.py): all read after step n + 2 what was posted between steps n and n + 1.
STEPS_AHEAD = 2


class SharedReports:
    """Failed saves of a run of several processes."""

    def __init__(self, board: Board):
        """board: the training thread refreshes it after each step, before it calls `news`."""
        self.board = board
        self.reported = 0  # failures delivered to all processes
        self.last_step = -1  # step of the last delivered failure
        self.pending: list[int] = []  # steps of local failures that are not delivered yet
        self.lock = threading.Lock()

    def failed(self, step: int, cause: str) -> None:
        """Reports a failed save of this step, from any thread and any number of processes.

        The first reported cause wins, since later failures may be its consequences.
        """
        name = f"process {self.board.peer.process} of {self.board.peer.count}"
        self.board.post(f"failed/{step}", cause if cause.startswith("process ") else f"{name}: {cause}")
        with self.lock:
            self.pending.append(step)

    def news(self, now_step: int) -> tuple[int, str] | None:
        """Returns (step of a failed save, cause with the process), once for each, at the same step in all processes.

        The training thread calls it after each step, when the metrics of the previous step have been read.
        Raises: Stop (PEER_LOST) in a process that is too far ahead.
        """
        name = f"news/{self.reported}"
        with self.lock:
            failed_step = self.pending[0] if self.pending else None
        line = self.board.read(name)
        if line is None:
            # without a cause yet, the next refresh has it
            if failed_step is not None and (cause := self.board.read(f"failed/{failed_step}")):
                self.board.post(name, json.dumps([now_step + STEPS_AHEAD, failed_step, cause]))
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
        self.forget_last()
        self.reported, self.last_step = self.reported + 1, step
        with self.lock:
            self.pending = [other for other in self.pending if other != step]
        return step, cause

    def forget_last(self) -> None:
        """Removes the lines of the previous failure, which all processes have read since two steps ago."""
        if self.reported and self.board.peer.process == 0:
            self.board.remove(f"news/{self.reported - 1}")
            self.board.remove(f"failed/{self.last_step}")
