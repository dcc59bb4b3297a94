"""Fencing of locked folders: checks before each write that this process still holds the lock.

A process can be suspended and resume after another process has locked its folder. The check is therefore made just
before the write, with the file already open. A new owner replaces growing files, so late writes go to unlinked files.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

FENCES: dict[str, Callable[[], None]] = {}  # {folder: function that raises if the lock is lost}


@contextlib.contextmanager
def fenced(folder: Any, may_write: Callable[[], None]) -> Iterator[None]:
    """Fences a folder for the duration of the block: `ask` calls may_write() for each path in it."""
    name = absolute_text(folder)
    FENCES[name] = may_write
    try:
        yield
    finally:
        FENCES.pop(name, None)


def ask(path: Any) -> bool:
    """Returns True if the path is in a fenced folder. Call it before each write. Raises Stop if the lock is lost."""
    found = False
    if FENCES:
        name = absolute_text(path)
        for folder, may_write in list(FENCES.items()):
            if name == folder or name.startswith(f"{folder}/"):
                may_write()
                found = True
    return found


def absolute_text(path: Any) -> str:
    """Returns the absolute path without following links, so that all paths of a run start with its folder."""
    text = os.fspath(path)
    return text.rstrip("/") if "://" in text else os.path.abspath(os.path.expanduser(text))
