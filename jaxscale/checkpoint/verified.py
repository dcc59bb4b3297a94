"""A checkpoint read back after it was written: is every bit of it in the files?"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.checkpoint.array_store import Arrays, compare_leaf
from jaxscale.checkpoint.cause import is_trouble, short_cause
from jaxscale.system import paths
from jaxscale.system.exits import BadInput


class Damaged(Exception):
    """What lies in the files is not what was saved."""


def verify_leaves(folder: Any, leaves: Mapping[str, list], share: int = 0, shares: int = 1) -> None:
    """Returns if each leaf of a committed step has its fingerprint; reads the files, not what the system remembers.

    Args: leaves: {name: [shape, dtype, fingerprint]} of its record. share: which of the `shares` this process reads.
    Raises: Damaged with the name of the first leaf that differs or is not there.
    """
    forget_cached(folder)
    arrays = Arrays(folder)
    for name in sorted(leaves)[share::shares]:
        try:
            wrong, _ = compare_leaf(arrays, name, *leaves[name])
        except Exception as error:
            if is_trouble(error):
                raise
            raise Damaged(f"{name} cannot be read back: {short_cause(error)}") from error
        if wrong:
            raise Damaged(f"{name}: {wrong}")


def sealed_record(folder: Any, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """The record as `read` gives it. Raises Damaged if one bit of it is another."""
    try:
        return read(folder)
    except BadInput as error:
        if is_trouble(error):
            raise
        raise Damaged(f"its record cannot be read back: {error}") from error


def forget_cached(folder: Any) -> None:
    """Makes the system read the files from the disk the next time, where it can be asked to."""
    if paths.is_remote(folder) or not hasattr(os, "posix_fadvise"):
        return
    for parent, _, files in os.walk(folder):
        for name in files:
            handle = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
