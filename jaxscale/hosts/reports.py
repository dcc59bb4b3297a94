"""Failed saves, reported to the training threads of all processes at the same step.

A save is the work of all processes, and each of them learns in its saving thread that it failed, but not at the same
moment. The training threads hear of it at one step, so that all retry, or give up, alike.
"""

import json
import threading

from jaxscale.hosts.agree import Board
from jaxscale.system.exits import Exit, Stop

# As for a signal (training/stopping.py): who posts after step n, before it begins n + 1, is read by all after n + 2.
STEPS_AHEAD = 2


class SharedReports:
    """Failed saves of a run of several processes."""

    def __init__(self, board: Board):
        """board: which the training thread looks at after each step, before it asks for news."""
        self.board = board
        self.reported = 0  # failures that all processes have heard of
        self.last_step = -1  # of the last one of these
        self.own: list[int] = []  # steps of failures here that are not reported yet
        self.lock = threading.Lock()

    def failed(self, step: int, cause: str) -> None:
        """A save of this step has failed. From any thread, in as many processes as know of it.

        What failed only because another had failed is no cause: the first one that was reported stays.
        """
        name = f"process {self.board.peer.process} of {self.board.peer.count}"
        self.board.post(f"failed/{step}", cause if cause.startswith("process ") else f"{name}: {cause}")
        with self.lock:
            self.own.append(step)

    def news(self, now_step: int) -> tuple[int, str] | None:
        """(step of a save that failed, cause with the process), once for each: at the same step in all processes.

        To be asked by the training thread after each step, when the metrics of the step before it have been read.
        Raises: Stop (PEER_LOST) in a process that was too far ahead to hear it in time.
        """
        name = f"news/{self.reported}"
        with self.lock:
            mine = self.own[0] if self.own else None
        line = self.board.read(name)
        if line is None:
            if mine is not None and (cause := self.board.read(f"failed/{mine}")):  # else it is there at the next look
                self.board.post(name, json.dumps([now_step + STEPS_AHEAD, mine, cause]))
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
            self.own = [other for other in self.own if other != step]
        return step, cause

    def forget_last(self) -> None:
        """Takes the lines of the news before these away: two steps have passed since, so that all have heard them."""
        if self.reported and self.board.peer.process == 0:
            self.board.remove(f"news/{self.reported - 1}")
            self.board.remove(f"failed/{self.last_step}")
