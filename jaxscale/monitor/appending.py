"""Text at the end of a local file: all of it or nothing, whatever the disk does."""

import contextlib
import os
from typing import Any

from jaxscale.system import fence, paths


def append(path: Any, content: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Adds the content to the file, which is made with this mode if it is missing.

    Args: durable: returns when it would survive a power cut.
    Raises: OSError, after what was written of the content is taken away again, unless the disk refuses that as well;
    BadInput where the path is no file; Stop where its folder is not this process's any more.
    """
    is_new = not os.path.exists(path)
    if is_new:
        fence.ask(path)
    handle = paths.open_to_write(path, os.O_WRONLY | os.O_APPEND | (os.O_CREAT if is_new else 0), mode)
    try:
        fence.ask(path)  # this very file
        before, written = os.fstat(handle).st_size, 0
        try:
            while written < len(content):  # once, unless the disk is full: other writers' lines stay whole
                written += os.write(handle, content[written:])
            if durable:
                os.fsync(handle)
            if durable and is_new:
                paths.sync_folder(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                if os.fstat(handle).st_size == before + written:  # nobody has written behind it
                    os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def renew(path: Any) -> None:
    """Puts a copy in the place of a local file: what another process still appends to the old one is nobody's."""
    with contextlib.suppress(FileNotFoundError):
        paths.write_bytes_atomic(path, paths.read_bytes(path))
