"""The sha256 of a file, whatever its size, and of a JSON value."""

import hashlib
import json
from typing import Any

from jaxscale.system.foreign import cannot_read, open_regular

READ_BYTES = 8 << 20  # at once


def file_sha256(path: str) -> str:
    """The sha256 of a regular file, read a piece at a time.

    Raises: BadInput naming it if it is no such file; Unreadable, which is one, if the storage does not give it.
    """
    sha256 = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while piece := file.read(READ_BYTES):
                sha256.update(piece)
    except OSError as error:
        raise cannot_read(path, error) from None
    return sha256.hexdigest()


def json_sha256(value: Any) -> str:
    """The sha256 of a JSON value, however it is written."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
