"""Leaving well on SIGTERM and SIGINT: the first asks the loop to save and leave, the second leaves at once.

Word from a cloud that the machine is about to be taken away asks for the same. Where there are several processes, all
leave after the same step, whichever of them was told.
"""

import contextlib
import os
import signal
import types
from collections.abc import Iterator
from typing import Any

from jaxscale.hosts.agree import Board
from jaxscale.hosts.maintenance import Maintenance
from jaxscale.system.exits import Exit, Stop, Terminated

# Whoever is signalled after step n, before it begins n + 1, posts the step after which all leave. Another process may
# have begun n + 1 by then, but when it looks at the board after having begun n + 2 it has read the metrics of n + 1,
# which do not exist before every process has begun that step: so all see the line in time, and no device waits.
STEPS_AHEAD = 2


@contextlib.contextmanager
def terminated_well() -> Iterator[None]:
    """SIGTERM raises Terminated in the block, so that what stands around a run is put away: its lock, its exports.

    For before the first step and after the last; in between StopRequest takes the signals. A second one ends at once.
    """

    def note(number: int, frame: types.FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopRequest:
    """Remembers the first signal while it is entered; `requested` holds its name, else None."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, board: Board | None = None):
        """board: shared by all processes, and looked at before each question; None where there is one."""
        self.board = board
        self.requested: str | None = None
        self.posted = self.signalled = False
        self.previous: dict[signal.Signals, Any] = {}  # their handlers
        self.maintenance = Maintenance(self.request)

    def __enter__(self) -> "StopRequest":
        self.previous = {number: signal.signal(number, self.note) for number in self.SIGNALS}
        self.maintenance.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.maintenance.__exit__()
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def leave_after(self, step: int) -> str | None:
        """The signal for which to save and leave after `step` steps, or None: the same answer in every process.

        To be asked after each step, when the metrics of the step before it have been read.
        """
        if self.board is None:
            return self.requested
        if self.requested and not self.posted:
            self.posted = True
            self.board.post("leave", f"{step + STEPS_AHEAD} {self.requested}")
        line = self.board.read("leave")
        if line is None:
            return None
        last, _, name = line.partition(" ")
        if step > int(last):
            raise Stop(Exit.PEER_LOST, f"all were to leave after step {last}, and this one is at {step}; start again")
        return name if step == int(last) else None

    def request(self, reason: str) -> None:
        """Asks the loop to save and leave; from any thread."""
        self.requested = self.requested or reason

    def note(self, number: int, frame: types.FrameType | None) -> None:
        """The handler. A second signal restores the default action and raises it again.

        The first after word of the machine's end is not yet a second one: the save it asked for is under way.
        """
        if self.signalled:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signalled = True
        self.request(signal.Signals(number).name)
