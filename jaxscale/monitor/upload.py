"""Text that grows in a bucket: a thread of its own brings it there, so that nobody who writes waits for a network."""

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxscale.system import fence
from jaxscale.system.bucket import Bucket
from jaxscale.system.bucket_errors import Changed
from jaxscale.system.exits import BadInput, Stop
from jaxscale.system.storage import open_bucket

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before the second try, and between two tries at most
QUIET_SECONDS = 60.0  # a fault that passes sooner is nobody's concern
BYTES_PER_SECOND = 1e6  # an object cannot be appended to: it is sent again whole, a large one less often
SILENCE_SECONDS = 30.0  # without a byte, after which a try is given up
LAST_SECONDS = 20.0  # for the last lines to reach a bucket that does not answer: machines are taken away after 30


class Taken(BadInput):
    """Another process has written the object, which is its own from then on."""


class Uploader:
    """Keeps an object equal to the text that it was given last; what came in between need never be sent.

    Whatever the service does, there is one copy of the text in memory and one more while it is sent. Of a refusal
    (401, 403) `problem` tells at once, of faults that may pass once they have lasted a minute. All are tried again,
    unless another process has written the object: nothing is sent from then on.

    Args: every_seconds: the pause after an upload; 0: none. write: takes the whole content, in the thread.
    """

    def __init__(
        self,
        path: Any,
        *,
        every_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[bytes], None] | None = None,
    ):
        self.path, self.every_seconds, self.clock = path, every_seconds, clock
        self.write = write or OwnObject(os.fspath(path)).write
        self.pieces: list[str] = []
        self.version = self.sent = 0  # of the text that there is, and of that which the object holds
        self.failures, self.failing_since, self.due = 0, 0.0, 0.0
        self.problem: str | None = None  # why the object is behind, in one line; None while all may well become well
        self.ended = False  # nothing more is sent
        self.changed, self.thread = threading.Condition(), None

    def put(self, text: str) -> None:
        """The object is to hold this text. Never waits."""
        with self.changed:
            self.pieces = [text]
            self.note_change()

    def append(self, text: str) -> None:
        """The object is to hold this text behind what it was given before. Never waits."""
        with self.changed:
            self.pieces.append(text)
            self.note_change()

    def hurry(self) -> None:
        """Leaves out the pause after the last upload, once. Never waits."""
        with self.changed:
            self.due = 0.0
            self.changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """True once the object holds the text that there is now; False if it does not within so many seconds."""
        self.hurry()
        with self.changed:
            wanted = self.version
            self.changed.wait_for(lambda: self.sent >= wanted or self.ended, seconds)
            return self.sent >= wanted

    def close(self) -> None:
        """Begins no other try: what was not sent by now never is. Never waits."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def note_change(self) -> None:
        self.version += 1
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, name=f"upload {self.path}", daemon=True)
            self.thread.start()
        self.changed.notify_all()

    def work(self) -> None:
        """Sends what is new, until the end."""
        while True:
            with self.changed:
                while not self.ended and (self.sent == self.version or self.clock() < self.due):
                    self.changed.wait(None if self.sent == self.version else self.due - self.clock())
                if self.ended:
                    return
                version, text = self.version, "".join(self.pieces)
                self.pieces = [text]
            try:
                self.write(text.encode())
            except (Taken, Stop) as error:  # Stop: the folder is no longer this process's
                with self.changed:
                    self.problem, self.ended = str(error), True
                    self.changed.notify_all()
            except Exception as error:  # of whatever client it is: nothing here may end the thread
                self.failed(error)
            else:
                pause = max(self.every_seconds, len(text) / BYTES_PER_SECOND if self.every_seconds else 0.0)
                with self.changed:
                    self.sent, self.due = version, self.clock() + pause
                    self.failures, self.problem = 0, None
                    self.changed.notify_all()

    def failed(self, error: Exception) -> None:
        """Notes a try that failed, and when the next one is due."""
        with self.changed:
            now = self.clock()
            self.failures += 1
            if self.failures == 1:
                self.failing_since = now
            refused = isinstance(error, (ValueError, FileNotFoundError))  # no right, or no bucket
            if refused or now - self.failing_since >= QUIET_SECONDS:
                self.problem = f"{self.path} is behind and tried again: {' '.join(str(error).split())}"
            longest = min(FIRST_WAIT * 2 ** min(self.failures - 1, 10), LONGEST_WAIT)
            self.due = now + max(getattr(error, "wait", 0.0), longest * random.uniform(0.5, 1.0))


class OwnObject:
    """An object that one process writes again and again. Another that does so puts an end to it.

    A machine that was frozen, whose run has gone on elsewhere, would otherwise replace what that run wrote by its own.
    """

    def __init__(self, url: str):
        self.url = url
        self.door: Bucket | None = None
        self.generation: int | None = None  # as we read it, or left it; None: whatever is there is replaced at first
        self.tried = b""

    def open(self) -> Bucket:
        """The door to the bucket; to look for credentials can take seconds, at the first call."""
        if self.door is None:
            self.door = open_bucket(writing=True, silence=SILENCE_SECONDS)
        return self.door

    def read(self) -> bytes:
        """The content, b"" where there is no object. `write` replaces nothing that comes after it.

        Raises: BadInput if the service does not answer, or refuses.
        """
        found = self.open().look(self.url)
        self.generation, self.tried = (found.generation, found.content) if found else (0, b"")
        return self.tried

    def write(self, content: bytes) -> None:
        """Replaces the object, in one try. Raises as Bucket.put does; Taken if another process has written it.

        Stop if the folder is not this process's any more.
        """
        fence.ask(self.url)
        door = self.open()
        before, self.tried = self.tried, content
        try:
            self.generation = door.put(self.url, content, self.generation)
        except Changed:
            found = door.look(self.url)
            is_ours = found is None or found.content in (before, content)  # a try whose answer was lost
            if not is_ours and not fence.ask(self.url):  # where the folder is ours: a late try of an upload before this
                self.tried = before
                raise Taken(f"another process has written {self.url}; this one leaves it alone") from None
            self.generation = door.put(self.url, content, found.generation if found else 0)
