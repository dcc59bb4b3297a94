"""The progress journal of a conversion, so that an interrupted one resumes and repeats nothing."""

import contextlib
import time
import weakref
from collections.abc import Callable
from typing import Any

from jaxscale.checkpoint.lock_stores import folder_lock
from jaxscale.checkpoint.storage_errors import read_optional, stop_if_unwritable
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

REMOTE_SECONDS = 5.0  # between two writes to a bucket, which takes about one a second of the same object


def open_journal(folder: Any, name: str, identity: str, flag: str) -> tuple["Journal", bool]:
    """(the journal of the folder that a flag gave, whether this very conversion was begun before).

    Raises BadInput if anything but this conversion is in there.
    """
    journal = Journal(folder / name, identity)
    there = [path.name for path in folder.iterdir()] if folder.exists() and not journal.path.exists() else []
    if there:
        raise BadInput(f"{flag} is in use, it holds {min(there)}; name a new folder")
    paths.make_run_dir(folder)
    return journal, stop_if_unwritable(journal.begin, folder)


class Journal:
    """A JSON file {what: identity, done: {part: whatever is to be known of it}}, removed at the end.

    Args: identity: of the conversion; another one's journal is another conversion.
    """

    def __init__(self, path: Any, identity: str):
        self.path, self.identity = path, identity
        self.done: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}  # done, and not yet safe on the disk
        self.written = 0.0
        self.close: Callable[[], Any] = lambda: None  # gives the folder back

    def begin(self) -> bool:
        """True if this very conversion was begun before: `done` then tells what of it is there. Else notes that it is.

        Raises: BadInput if another one was, or if another process is at it.
        """
        self.hold()
        found = read_optional(self.path)
        if found:
            if found.get("what") != self.identity:
                self.close()
                raise BadInput(
                    f"{self.path} is of another conversion, or of files that have changed since; name a new folder, "
                    f"or remove {self.path.parent} to begin again"
                )
            self.done = dict(found.get("done", {}))
            return True
        self.write()
        return False

    def hold(self) -> None:
        """Takes the folder for this process, on a disk that has locks; the system takes it back from one that dies."""
        stack = contextlib.ExitStack()
        stack.enter_context(folder_lock(self.path.parent, "converting into"))
        self.close = weakref.finalize(self, stack.close)

    def note(self, part: str, value: Any) -> None:
        """A part is done once the data behind it are safe, which `settle` tells."""
        self.waiting[part] = value

    def settle(self) -> None:
        """All that was noted is safe. Writes it down, into a bucket not more often than it likes."""
        self.done |= self.waiting
        self.waiting = {}
        if not paths.is_remote(self.path) or time.monotonic() - self.written >= REMOTE_SECONDS:
            self.write()

    def write(self) -> None:
        """Writes down what is done."""
        paths.write_json(self.path, {"what": self.identity, "done": self.done})
        self.written = time.monotonic()

    def fingerprints(self, key: str) -> dict[str, int]:
        """{leaf: its fingerprint}: the sum of what the parts that are done have noted under the key."""
        found: dict[str, int] = {}
        for noted in self.done.values():
            for name, mark in noted[key].items():
                found[name] = (found.get(name, 0) + mark) % 2**32
        return found

    def remove(self) -> None:
        """Ends the journal: the result speaks for itself."""
        self.path.unlink(missing_ok=True)
