"""Uploads of growing text to a bucket in a thread, so that writers never wait for the network."""

import functools
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

FIRST_WAIT, MAX_WAIT = 1.0, 60.0  # seconds before the first retry, and the maximum between retries
QUIET_SECONDS = 60.0  # shorter outages are not reported
BYTES_PER_SECOND = 1e6  # limits the average speed: each upload sends the whole text again
SILENCE_SECONDS = 30.0  # timeout of an attempt that receives no data
LAST_SECONDS = 20.0  # timeout of the last upload: preempted machines stop after 30


class WrittenElsewhere(BadInput):
    """Raised if another process has written the object and now owns it."""


class Uploader:
    """Uploads the latest text to an object in a bucket. May skip intermediate versions.

    Stores one copy of the text, and a second copy during an upload. `problem` reports a refusal (401, 403) at once and
    transient errors after a minute. Every failure is retried unless another process has written the object. The thread
    calls `write` with the whole text, and pauses for `every_seconds` after each upload.
    """

    def __init__(self, path: Any, write: Callable[[bytes], None], *, every_seconds: float = 0.0, clock=time.monotonic):
        self.path, self.every_seconds, self.clock, self.write = path, every_seconds, clock, write
        self.pieces: list[str] = []
        self.version = self.sent = 0  # versions of the latest text and of the object
        self.failures, self.failing_since, self.due = 0, 0.0, 0.0
        self.problem: str | None = None  # why the object is out of date, in one line; None during short outages
        self.ended = False
        self.changed, self.thread = threading.Condition(), None

    def put(self, text: str) -> None:
        """Sets the text, without blocking."""
        with self.changed:
            self.pieces.clear()
            self.append(text)

    def append(self, text: str) -> None:
        """Appends to the text, without blocking."""
        with self.changed:
            self.pieces.append(text)
            self.version += 1
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name=f"upload {self.path}", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def skip_pause(self) -> None:
        """Skips the pause after the last upload once, without blocking."""
        with self.changed:
            self.due = 0.0
            self.changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Waits until the object contains the current text. Returns False on a timeout."""
        self.skip_pause()
        with self.changed:
            target = self.version
            self.changed.wait_for(lambda: self.sent >= target or self.ended, seconds)
            return self.sent >= target

    def close(self) -> None:
        """Stops uploads without blocking; unsent text is dropped."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def work(self) -> None:
        """Uploads new text until `close`."""
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
            except (WrittenElsewhere, Stop) as error:  # Stop: this process no longer owns the folder
                with self.changed:
                    self.problem, self.ended = str(error), True
                    self.changed.notify_all()
            except Exception as error:  # any exception of the client: the thread must survive
                self.failed(error)
            else:
                pause = max(self.every_seconds, len(text) / BYTES_PER_SECOND if self.every_seconds else 0.0)
                with self.changed:
                    self.sent, self.due = version, self.clock() + pause
                    self.failures, self.problem = 0, None
                    self.changed.notify_all()

    def failed(self, error: Exception) -> None:
        """Records a failed attempt and schedules the next."""
        with self.changed:
            now = self.clock()
            self.failures += 1
            if self.failures == 1:
                self.failing_since = now
            refused = isinstance(error, (ValueError, FileNotFoundError))  # no permission, or no bucket
            if refused or now - self.failing_since >= QUIET_SECONDS:
                self.problem = f"{self.path} could not be uploaded and will be retried: {' '.join(str(error).split())}"
            longest = min(FIRST_WAIT * 2 ** min(self.failures - 1, 10), MAX_WAIT)
            self.due = now + max(getattr(error, "wait", 0.0), longest * random.uniform(0.5, 1.0))


class ExclusiveObject:
    """An object in a bucket with a single writer. `write` raises if another process has written the object.

    This protects a run that was resumed elsewhere: a suspended machine cannot overwrite the object when it wakes up.
    """

    def __init__(self, url: str):
        self.url = url
        self.generation: int | None = None  # at our last read or write; None: the first write replaces any object
        self.tried = b""

    @functools.cached_property
    def bucket(self) -> Bucket:
        """The bucket client; the first use may take seconds to find credentials."""
        return open_bucket(writing=True, silence=SILENCE_SECONDS)

    def read(self) -> bytes:
        """Returns the content, or b"" if no object exists. Later writes expect this generation. Raises BadInput."""
        found = self.bucket.look(self.url)
        self.generation, self.tried = (found.generation, found.content) if found else (0, b"")
        return self.tried

    def write(self, content: bytes) -> None:
        """Tries once to replace the object. Raises WrittenElsewhere, Stop without the lock, or errors of Bucket.put."""
        fence.ask(self.url)
        before, self.tried = self.tried, content
        try:
            self.generation = self.bucket.put(self.url, content, self.generation)
        except Changed:
            found = self.bucket.look(self.url)
            is_ours = found is None or found.content in (before, content)  # an earlier attempt whose response was lost
            if not is_ours and not fence.ask(self.url):  # while we hold the lock, it is a late retry of our own upload
                self.tried = before
                raise WrittenElsewhere(
                    f"another process has written {self.url}; this process no longer writes it"
                ) from None
            self.generation = self.bucket.put(self.url, content, found.generation if found else 0)
