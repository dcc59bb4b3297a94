"""events.jsonl: events and decisions of a run, one JSON object per line, append-only.

A line is on disk before `note` returns, since later starts depend on decisions. If the disk fails, lines are buffered
until the next note. Objects in a bucket cannot be appended to, so a thread uploads the whole file immediately, unless
another process has written it.
"""

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxscale.runtime.monitor.records import Damage, RecordFile, read_records
from jaxscale.runtime.monitor.upload import LAST_SECONDS
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.redact import redacted

Note = Callable[..., None]  # note(kind, step=None, **facts); facts are JSON values without secrets
NAME = "events.jsonl"
SYNC_SECONDS = 120.0  # timeout for a bucket to accept a rewind
KINDS = frozenset(
    "started resumed restored saved save_failed fallback set_aside skipped spike alarm lr_cut rewind stopped "
    "lock_stolen hang replicas_differ branch signal profile alert exported overrun early_decay".split()
)


def ignore(kind: str, step: int | None = None, **facts: Any) -> None:
    """A Note that does nothing."""


class Events:
    """The event log of a run. Thread-safe; the constructor accesses no file."""

    def __init__(self, workdir: Any, *, primary: bool, clock: Callable[[], float] = time.time):
        """`primary` is True on the process that writes."""
        self.path, self.primary, self.clock = paths.as_path(workdir) / NAME, primary, clock
        self.file = RecordFile(self.path, mode=0o600, durable=True)
        self.lock = threading.RLock()
        self.has_events, self.closed = False, False  # has_events: this process has noted something
        self.rewind_version = 0  # the uploader's version with the last rewind

    def note(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Appends an event. Does nothing after `close`, since several threads may record the end of a run.

        Buffers lines that cannot be written until the next call. Raises Stop (STORAGE) if a rewind cannot be written,
        since later starts depend on it, and Stop if another process owns the folder.
        """
        assert kind in KINDS, kind
        when = datetime.datetime.fromtimestamp(self.clock(), datetime.UTC).isoformat(timespec="milliseconds")
        event = {"time": when, "event": kind, "step": step} | redacted(facts)
        with self.lock:
            if self.closed or not self.primary:
                return
            self.has_events = True
            try:
                written = self.file.write(event)
            except Stop:  # another process owns the folder now
                self.closed = True
                raise
            if kind == "rewind" and written and self.file.uploader is not None:
                self.rewind_version = self.file.uploader.version
        if kind == "rewind" and not (written and self.sync(SYNC_SECONDS)):
            cause = self.file.cause or self.file.problem or f"no response for {SYNC_SECONDS:g} s"
            raise Stop(Exit.STORAGE, f"{self.path}: a rewind cannot be recorded: {cause}; restart when this is fixed")

    def sync(self, seconds: float) -> bool:
        """Waits for pending uploads; returns False on a timeout."""
        return self.file.uploader is None or self.file.uploader.flush(seconds)

    def close(self) -> None:
        """Closes the log. May be called twice."""
        with self.lock:
            if not self.closed and self.file.unwritten:
                self.file.write_out()
            self.closed = True
        if self.file.uploader is not None:
            self.sync(SYNC_SECONDS if self.file.uploader.sent < self.rewind_version else LAST_SECONDS)
        self.file.close()


def read_events(workdir: Any) -> list[dict[str, Any]]:
    """Returns the events of a run, oldest first. Skips an incomplete last line; raises BadInput for damaged lines."""
    path, damage, events = paths.as_path(workdir) / NAME, Damage(), []
    for event in read_records(path, damage):
        if damage.lines or not ("event" in event and "step" in event):
            break
        events.append(event)
    else:
        if not damage.lines:
            return events
    number = damage.first or damage.number
    raise BadInput(f"{path}:{number} is not an event; repair or delete this line")
