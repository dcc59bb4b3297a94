"""events.jsonl: what happened to a run and what was decided about it, one JSON object a line, never rewritten.

A line is on the disk before `note` returns, so that a decision that others rest on is never forgotten; where the disk
fails, the lines wait for the next note. In a bucket, where nothing can be appended to, a thread uploads the file whole
at once, as long as no other process has written it.
"""

import datetime
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxscale.monitor.appending import append
from jaxscale.monitor.upload import LAST_SECONDS, Uploader, take_up
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.foreign import parse_json
from jaxscale.system.redact import redacted

Note = Callable[..., None]  # note(kind, step=None, **facts); facts are plain JSON values and hold no secrets
NAME = "events.jsonl"
SYNC_SECONDS = 120.0  # for a bucket to take a decision that binds
MOST_UNWRITTEN = 10_000  # lines that are kept in memory, a few MB
KINDS = frozenset(
    "started resumed restored saved save_failed fallback set_aside skipped spike alarm lr_cut rewind stopped "
    "lock_stolen hang replicas_differ branch signal profile alert exported".split()
)


def ignore(kind: str, step: int | None = None, **facts: Any) -> None:
    """The Note that notes nothing."""


class Events:
    """The event log of a run. Any thread may note; making one touches no file."""

    def __init__(self, workdir: Any, *, primary: bool, clock: Callable[[], float] = time.time):
        """primary: False on all processes but one, whose notes go nowhere."""
        self.path, self.primary, self.clock = paths.as_path(workdir) / NAME, primary, clock
        self.lock = threading.RLock()
        self.begun, self.closed = False, False  # begun: something was noted by this process
        self.mended = False  # the local file ends in a whole line
        self.unwritten: list[str] = []
        self.problem: str | None = None  # why they are
        self.uploader: Uploader | None = None
        self.bound = 0  # the uploader's version that the last rewind is in

    def note(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Appends an event. After `close` it does nothing: what ends a run may be noted by several.

        What cannot be written is kept and written first at the next note. Raises Stop (STORAGE) only if a rewind, which
        binds all later starts, could not be written for good, and as the folder's fence does.
        """
        assert kind in KINDS, kind
        when = datetime.datetime.fromtimestamp(self.clock(), datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": when, "event": kind, "step": step} | redacted(facts), allow_nan=False) + "\n"
        with self.lock:
            if self.closed or not self.primary:
                return
            self.begun = True
            self.unwritten = [*self.unwritten, line][-MOST_UNWRITTEN:]
            written = self.write()
            if kind == "rewind" and written and self.uploader is not None:
                self.bound = self.uploader.version
        if kind == "rewind" and not (written and self.sync(SYNC_SECONDS)):
            cause = self.problem or self.uploader and self.uploader.problem or f"no answer for {SYNC_SECONDS:g} s"
            raise Stop(Exit.STORAGE, f"{self.path} could not be written, and a rewind must be there: {cause}")

    def write(self) -> bool:
        """True if the lines are in the file, or on their way to the bucket; else they are kept, `problem` being why."""
        text = "".join(self.unwritten)
        try:
            if not paths.is_remote(self.path):
                self.append(text)
            elif self.uploader is None:
                found, replace = take_up(self.path)
                self.uploader = Uploader(self.path, write=replace)
                self.uploader.append(whole_lines(found.decode("utf-8", "replace")) + text)
            else:
                self.uploader.append(text)
        except Stop:  # the folder is another's now, and so is its log
            self.closed, self.unwritten = True, []
            raise
        except (OSError, BadInput) as error:
            self.problem = getattr(error, "strerror", None) or str(error)
            return False
        self.unwritten, self.problem = [], None
        return True

    def append(self, text: str) -> None:
        """Adds to the local file. A torn last line goes first, lest the next one be glued to it."""
        if not self.mended:
            found, whole = read_text(self.path)
            if found != whole:
                paths.write_text_atomic(self.path, whole)
        self.mended = False  # if this fails
        append(self.path, text.encode(), mode=0o600, durable=True)
        self.mended = True

    def sync(self, seconds: float) -> bool:
        """True once all that was given to a bucket is where others can read it; False if it did not take it in time."""
        return self.uploader is None or self.uploader.flush(seconds)

    def close(self) -> None:
        """Ends the log: nothing is written any more. May be called twice."""
        with self.lock:
            if not self.closed and self.unwritten:
                self.write()
            self.closed = True
        if self.uploader is not None:
            self.sync(SYNC_SECONDS if self.uploader.sent < self.bound else LAST_SECONDS)
            self.uploader.close()


def read_events(workdir: Any) -> list[dict[str, Any]]:
    """The events of a run, oldest first; [] where there are none. A torn last line is left out.

    Raises BadInput naming the line where another one is damaged: decisions are read from here.
    """
    path = paths.as_path(workdir) / NAME
    events = []
    for number, line in enumerate(read_text(path)[1].splitlines(), 1):
        try:
            event = parse_json(line)
            events.append(event | {"event": event["event"], "step": event["step"]})
        except (BadInput, TypeError, KeyError):
            raise BadInput(f"{path}:{number} is no event: damaged, or edited by hand; mend that line") from None
    return events


def read_text(path: Any) -> tuple[str, str]:
    """(the file's text, its part up to the last newline)."""
    try:
        text = paths.read_bytes(path).decode("utf-8", "replace")
    except FileNotFoundError:
        return "", ""
    return text, whole_lines(text)


def whole_lines(text: str) -> str:
    """The text up to its last newline."""
    return text[: text.rfind("\n") + 1]
