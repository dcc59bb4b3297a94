"""SHA-256 of files of any size and of JSON values."""

import hashlib
import json
from typing import Any

from jaxscale.system.foreign import cannot_read, open_regular

READ_BYTES = 8 << 20  # bytes per read


def file_sha256(path: str) -> str:
    """Returns the SHA-256 of a regular file. Raises BadInput, or its subclass Unreadable for a storage error."""
    sha256 = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while piece := file.read(READ_BYTES):
                sha256.update(piece)
    except OSError as error:
        raise cannot_read(path, error) from None
    return sha256.hexdigest()


def json_sha256(value: Any) -> str:
    """Returns the SHA-256 of a JSON value, independent of formatting and key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
