"""The sha256 of a file, whatever its size, and of a JSON value."""

import hashlib
import json
from typing import Any

from jaxscale.exits import BadInput
from jaxscale.foreign import open_regular

READ_BYTES = 8 << 20  # at once


def file_sha256(path: str) -> str:
    """The sha256 of a regular file, read a piece at a time. Raises BadInput naming it if it cannot be read."""
    sha256 = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while piece := file.read(READ_BYTES):
                sha256.update(piece)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    return sha256.hexdigest()


def json_sha256(value: Any) -> str:
    """The sha256 of a JSON value, however it is written."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
