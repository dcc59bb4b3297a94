"""Leaving well on SIGTERM and SIGINT: the first asks the loop to save and leave, the second leaves at once."""

import os
import signal
import types


class StopRequest:
    """Remembers the first signal while it is entered; `requested` holds its name, else None."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self):
        self.requested: str | None = None
        self.previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        self.previous = {number: signal.signal(number, self.note) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: types.FrameType | None) -> None:
        """The handler. A second signal restores the default action and raises it again."""
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = signal.Signals(number).name
