"""Graceful stop on SIGTERM and SIGINT: the first signal requests a save and a stop, the second stops at once.

A preemption or maintenance notice of the cloud also requests a save and a stop. With several processes, all stop after
the same step, no matter which process received the signal.
"""

import contextlib
import os
import signal
import types
from collections.abc import Iterator
from typing import Any

from jaxscale.runtime.hosts.agree import Board
from jaxscale.runtime.hosts.discovery import Maintenance
from jaxscale.system.exits import Exit, Stop, Terminated

# A process that receives a signal after step n, before step n + 1, posts the step after which all stop. Another process
# may have begun n + 1 by then. But a process that has begun n + 2 has read the metrics of n + 1, which do not exist
# before every process has begun n + 1. So all processes see the post in time, and no device waits.
STEPS_AHEAD = 2


@contextlib.contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raises Terminated in the block on SIGTERM, so that the lock is released and exporters are stopped.

    Used before the first step and after the last step. Between them, StopRequest handles signals. A second signal
    ends the process at once.
    """

    def handle(number: int, frame: types.FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopRequest:
    """Context manager that records the first signal. `requested` is the name of the signal, or None."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, board: Board | None = None):
        """`board` is shared by all processes, or None for a single process. Refresh it before stop_after()."""
        self.board = board
        self.requested: str | None = None
        self.posted = self.signalled = False
        self.previous: dict[signal.Signals, Any] = {}  # previous handlers
        self.maintenance = Maintenance(self.request)

    def __enter__(self) -> "StopRequest":
        self.previous = {number: signal.signal(number, self.handle_signal) for number in self.SIGNALS}
        self.maintenance.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.maintenance.__exit__()
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def stop_after(self, step: int) -> str | None:
        """Returns the signal if the run must save and stop after `step` steps, or None; the same in all processes.

        Call it after each step, when the metrics of the previous step have been read.
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
            raise Stop(
                Exit.PEER_LOST,
                f"all processes must stop after step {last}, but this process is at step {step}; restart all processes",
            )
        return name if step == int(last) else None

    def request(self, reason: str) -> None:
        """Requests that the loop save and stop. Can be called from any thread."""
        self.requested = self.requested or reason

    def handle_signal(self, number: int, frame: types.FrameType | None) -> None:
        """Handles a signal. A second signal restores the default action and is sent again.

        A preemption notice from the cloud does not count as the first signal, because its save is in progress.
        """
        if self.signalled:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signalled = True
        self.request(signal.Signals(number).name)
