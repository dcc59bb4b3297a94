"""The sha256 of a file, whatever its size."""

import hashlib

from jaxscale.exits import BadInput

READ_BYTES = 8 << 20  # at once


def file_sha256(path: str) -> str:
    """The sha256 of a file, read a piece at a time. Raises BadInput naming it if it cannot be read."""
    sha256 = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(READ_BYTES):
                sha256.update(piece)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    return sha256.hexdigest()
