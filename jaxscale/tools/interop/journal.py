"""The progress journal of a conversion, from which an interrupted conversion resumes without repeating work."""

import contextlib
import time
import weakref
from collections.abc import Callable
from typing import Any

from jaxscale.runtime.checkpoint.lock_stores import folder_lock
from jaxscale.runtime.checkpoint.storage_errors import read_optional, stop_if_unwritable
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

REMOTE_SECONDS = 5.0  # between writes to a bucket, which accepts about one write per second to an object


def open_journal(folder: Any, name: str, identity: str, flag: str) -> tuple["Journal", bool]:
    """Returns (journal, True if its file existed). Raises BadInput if the folder has other files or is in use."""
    journal = Journal(folder / name, identity)
    existing = [path.name for path in folder.iterdir()] if folder.exists() and not journal.path.exists() else []
    if existing:
        raise BadInput(f"{flag} is not empty: it contains {min(existing)}; give a new folder")
    paths.make_run_dir(folder)
    return journal, stop_if_unwritable(journal.begin, folder)


class Journal:
    """JSON file {what: identity, done: {part: results}}, deleted at the end. identity: hash of the input and plan."""

    def __init__(self, path: Any, identity: str):
        self.path, self.identity = path, identity
        self.done: dict[str, Any] = {}
        self.pending: dict[str, Any] = {}  # done but not yet durable; recorded by the next flush
        self.last_write = 0.0
        self.close: Callable[[], Any] = lambda: None  # releases the folder lock

    def begin(self) -> bool:
        """Locks the folder and reads the journal. Returns True if it exists. Raises BadInput for another identity."""
        stack = contextlib.ExitStack()
        stack.enter_context(folder_lock(self.path.parent, "converting into"))
        self.close = weakref.finalize(self, stack.close)  # the system releases the lock when the process dies
        found = read_optional(self.path)
        if found:
            if found.get("what") != self.identity:
                self.close()
                raise BadInput(
                    f"{self.path} is from a different conversion, or the source files have changed; give a new folder, "
                    f"or remove {self.path.parent} to start again"
                )
            self.done = dict(found.get("done", {}))
            return True
        self.write()
        return False

    def flush(self) -> None:
        """Records the pending parts, whose data must already be durable. Limits the rate of writes to a bucket."""
        self.done |= self.pending
        self.pending = {}
        if not paths.is_remote(self.path) or time.monotonic() - self.last_write >= REMOTE_SECONDS:
            self.write()

    def write(self) -> None:
        """Writes the journal file."""
        paths.write_json(self.path, {"what": self.identity, "done": self.done})
        self.last_write = time.monotonic()

    def fingerprints(self, key: str) -> dict[str, int]:
        """Returns {leaf: sum of its partial fingerprints}. key: entry of each part that has the fingerprints."""
        found: dict[str, int] = {}
        for noted in self.done.values():
            for name, mark in noted[key].items():
                found[name] = (found.get(name, 0) + mark) % 2**32
        return found

    def remove(self) -> None:
        """Deletes the journal file."""
        self.path.unlink(missing_ok=True)
