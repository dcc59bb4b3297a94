"""events.jsonl: what happened to a run and what was decided about it, one JSON object a line, never rewritten.

A line is on the disk before `note` returns, so that a decision that others rest on is never forgotten; where the disk
fails, the lines wait for the next note. In a bucket, where nothing can be appended to, a thread uploads the file whole
at once, as long as no other process has written it.
"""

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxscale.monitor.records import Damage, RecordFile, read_records
from jaxscale.monitor.upload import LAST_SECONDS
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.redact import redacted

Note = Callable[..., None]  # note(kind, step=None, **facts); facts are plain JSON values and hold no secrets
NAME = "events.jsonl"
SYNC_SECONDS = 120.0  # for a bucket to take a decision that binds
KINDS = frozenset(
    "started resumed restored saved save_failed fallback set_aside skipped spike alarm lr_cut rewind stopped "
    "lock_stolen hang replicas_differ branch signal profile alert exported overrun early_decay".split()
)


def ignore(kind: str, step: int | None = None, **facts: Any) -> None:
    """The Note that notes nothing."""


class Events:
    """The event log of a run. Any thread may note; making one touches no file."""

    def __init__(self, workdir: Any, *, primary: bool, clock: Callable[[], float] = time.time):
        """primary: False on all processes but one, whose notes go nowhere."""
        self.path, self.primary, self.clock = paths.as_path(workdir) / NAME, primary, clock
        self.file = RecordFile(self.path, mode=0o600, durable=True)
        self.lock = threading.RLock()
        self.begun, self.closed = False, False  # begun: something was noted by this process
        self.bound = 0  # the uploader's version that the last rewind is in

    def note(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Appends an event. After `close` it does nothing: what ends a run may be noted by several.

        What cannot be written is kept and written first at the next note. Raises Stop (STORAGE) only if a rewind, which
        binds all later starts, could not be written for good, and as the folder's fence does.
        """
        assert kind in KINDS, kind
        when = datetime.datetime.fromtimestamp(self.clock(), datetime.UTC).isoformat(timespec="milliseconds")
        event = {"time": when, "event": kind, "step": step} | redacted(facts)
        with self.lock:
            if self.closed or not self.primary:
                return
            self.begun = True
            try:
                written = self.file.write(event)
            except Stop:  # the folder is another's now, and so is its log
                self.closed = True
                raise
            if kind == "rewind" and written and self.file.uploader is not None:
                self.bound = self.file.uploader.version
        if kind == "rewind" and not (written and self.sync(SYNC_SECONDS)):
            cause = self.file.cause or self.file.problem or f"no answer for {SYNC_SECONDS:g} s"
            raise Stop(Exit.STORAGE, f"{self.path} could not be written, and a rewind must be there: {cause}")

    def sync(self, seconds: float) -> bool:
        """True once all that was given to a bucket is where others can read it; False if it did not take it in time."""
        return self.file.uploader is None or self.file.uploader.flush(seconds)

    def close(self) -> None:
        """Ends the log: nothing is written any more. May be called twice."""
        with self.lock:
            if not self.closed and self.file.unwritten:
                self.file.write_out()
            self.closed = True
        if self.file.uploader is not None:
            self.sync(SYNC_SECONDS if self.file.uploader.sent < self.bound else LAST_SECONDS)
        self.file.close()


def read_events(workdir: Any) -> list[dict[str, Any]]:
    """The events of a run, oldest first; [] where there are none. A torn last line is left out.

    Raises BadInput naming the line where another one is damaged: decisions are read from here.
    """
    path, damage, events = paths.as_path(workdir) / NAME, Damage(), []
    for event in read_records(path, damage):
        if damage.lines or not ("event" in event and "step" in event):
            break
        events.append(event)
    else:
        if not damage.lines:
            return events
    number = damage.first or damage.number
    raise BadInput(f"{path}:{number} is no event: damaged, or edited by hand; mend that line")
