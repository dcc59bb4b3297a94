"""A checkpoint read back after it was written: is every bit of it in the files, and which step is the last good one?"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.checkpoint.cause import is_trouble, reached, short_cause
from jaxscale.checkpoint.stored import Arrays, compare_leaf
from jaxscale.system import fence, paths
from jaxscale.system.exits import BadInput
from jaxscale.system.faults import crash_point

LAST_GOOD = "last_good.json"
KINDS = {"step": int, "verified": bool, "health": str, "sha256": str}  # what it holds


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


def write_last_good(directory: Any, step: int, *, verified: bool, health: str, sha256: str) -> None:
    """Records the step in last_good.json. sha256: of its record."""
    content = {"step": step, "verified": verified, "health": health, "sha256": sha256}
    crash_point("last_good/before")
    paths.write_text_atomic(directory / LAST_GOOD, json.dumps(content) + "\n")
    crash_point("last_good/after")


def forget_last_good(directory: Any, step: int) -> None:
    """Removes last_good.json if it names this step, which will not count any more: a later look would miss it."""
    found = read_last_good(directory)
    if found and found["step"] == step:
        fence.ask(directory)
        (directory / LAST_GOOD).unlink(missing_ok=True)


def read_last_good(directory: Any) -> dict[str, Any] | None:
    """What last_good.json says; None if it is missing or odd, for it can be made again. Raises Stop as look_up does."""
    found = look_up_last_good(directory)
    return found if isinstance(found, dict) else None


def look_up_last_good(directory: Any) -> dict[str, Any] | str | None:
    """What last_good.json says, or in words what is odd about it; None if it is missing.

    Raises Stop (STORAGE) where its bucket cannot be reached: that says nothing about it.
    """
    path = directory / LAST_GOOD
    try:
        found = reached(lambda: paths.read_json(path), path)
    except FileNotFoundError:
        return None
    except (OSError, BadInput) as error:
        return str(error)
    whole = isinstance(found, dict) and all(type(found.get(name)) is kind for name, kind in KINDS.items())
    return found if whole else f"{path} does not name a step as a save writes it"
