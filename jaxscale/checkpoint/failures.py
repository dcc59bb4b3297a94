"""News of saves that failed, from the thread that saves to the loop that trains."""

import threading
from typing import Protocol


class Reports(Protocol):
    """How the processes of a run learn of a failed save: all of them after the same step."""

    def failed(self, step: int, cause: str) -> None:
        """Says that the save of `step` has failed. In any thread, in as many processes as know of it."""

    def news(self, now_step: int) -> tuple[int, str] | None:
        """(step, cause) of a save that failed, once; asked after every step, and the same answer in all processes."""


class Failures:
    """The reports of a single process."""

    def __init__(self):
        self.lock = threading.Lock()
        self.waiting: list[tuple[int, str]] = []

    def failed(self, step: int, cause: str) -> None:
        """Says that the save of `step` has failed."""
        with self.lock:
            self.waiting.append((step, cause))

    def news(self, now_step: int) -> tuple[int, str] | None:
        """(step, cause) of a save that failed, once."""
        if not self.waiting:  # without the lock: asked after every step
            return None
        with self.lock:
            return self.waiting.pop(0)
