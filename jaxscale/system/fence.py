"""Folders that a lock guards: whoever writes below one asks first whether this process still may.

A process can stand still between any two of its lines, and wake when its folder is another's. So the question comes
right before the write, with the file open already: whoever takes a folder over puts other files in the place of those
that grow, and what is written into the old ones is nobody's.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

FENCES: dict[str, Callable[[], None]] = {}  # folder: what raises where it may not be written any more


@contextlib.contextmanager
def fenced(folder: Any, may_write: Callable[[], None]) -> Iterator[None]:
    """Until the block ends, all that `ask` is asked about what lies in the folder is answered by may_write."""
    name = spelt(folder)
    FENCES[name] = may_write
    try:
        yield
    finally:
        FENCES.pop(name, None)


def ask(path: Any) -> bool:
    """True if the path's folder is known to be ours. To be called before the path is written, made or removed.

    Raises: Stop, as the lock of the folder does, if it is ours no more.
    """
    found = False
    if FENCES:
        name = spelt(path)
        for folder, may_write in list(FENCES.items()):
            if name == folder or name.startswith(f"{folder}/"):
                may_write()
                found = True
    return found


def spelt(path: Any) -> str:
    """The path from the root, without links followed: all of a run begin with the folder that it was given."""
    text = os.fspath(path)
    return text.rstrip("/") if "://" in text else os.path.abspath(os.path.expanduser(text))
