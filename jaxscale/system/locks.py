"""A lock that processes share: a file, whose lock the system takes back from a process that dies."""

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxscale.system.paths import open_to_write


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds the lock of this file, which is made if it is not there. waiting: called if another holds it now.

    Raises: BadInput where something else has its name.
    """
    with open(path, "ab", opener=open_to_write) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
