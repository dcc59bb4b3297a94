"""Reading back what was saved, shared between processes by pieces of arrays.

The fingerprints of pieces add up to that of their array (fingerprint.py). So each process reads equally many bytes,
however large one array is, a few pieces at a time, and the first one compares the sums with the record.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxscale.checkpoint.array_store import DIFFERS, KEY, NUMBERS, Arrays, boxes, compare_leaf, in_pieces, misfit
from jaxscale.checkpoint.fingerprint import host_fingerprint
from jaxscale.checkpoint.folders import files_under, forget
from jaxscale.checkpoint.storage_errors import is_storage_error, short_reason
from jaxscale.system import paths
from jaxscale.system.exits import BadInput


class Damaged(Exception):
    """What lies in the files is not what was saved."""


def verify_leaves(folder: Any, leaves: Mapping[str, list]) -> None:
    """Returns if each leaf of a step has its fingerprint; reads the files, not what the system remembers.

    Args: leaves: {name: [shape, dtype, fingerprint]} of its record.
    Raises: Damaged with the name of the first leaf that differs or is not there.
    """
    forget_files(folder)
    if wrong := what_differs(leaves, [piece_sums(folder, leaves)]):
        raise Damaged(wrong)


def piece_sums(folder: Any, leaves: Mapping[str, list], share: int = 0, shares: int = 1) -> dict[str, list[int]]:
    """{leaf: [sum of the fingerprints of some of its pieces, how many numbers they hold]} of one process's share.

    The shares are of equally many bytes, to one piece, whichever leaves those belong to. A process opens the leaves
    that its share touches, and no other.
    Raises: Damaged with the name of the first leaf that cannot be read, or is of another shape or type.
    """
    arrays, found, begin = Arrays(folder), {}, 0
    weights = {name: weight(*leaves[name][:2]) for name in sorted(leaves)}
    first, last = (sum(weights.values()) * number // shares for number in (share, share + 1))
    for name, size in weights.items():
        if begin < last and begin + size > first:
            try:
                if sums := sums_of(arrays, name, leaves[name], first - begin, last - begin):
                    found[name] = sums
            except Exception as error:
                if is_storage_error(error) or isinstance(error, Damaged):
                    raise
                raise Damaged(f"{name} cannot be read back: {short_reason(error)}") from error
        begin += size
    return found


def weight(shape: list[int], dtype: str) -> int:
    """Bytes of a leaf, at least 1, where the type's size is known: only how even the shares are depends on it."""
    try:
        item = jax.numpy.dtype(dtype).itemsize
    except TypeError:  # of random keys, and Python's own
        item = 8
    return max(1, math.prod(shape) * item)


def sums_of(arrays: Arrays, name: str, described: list, begin: int, end: int) -> list[int]:
    """As piece_sums, of those pieces of one leaf that begin in [begin, end) of its bytes; [] if none does."""
    array = arrays.open(name)
    if wrong := misfit(array, *described[:2]):
        raise Damaged(f"{name}: {wrong}")
    pieces, size = boxes(array), weight(*described[:2])
    mine = [box for number, box in enumerate(pieces) if begin <= number * size // len(pieces) < end]
    if mine and described[1] in NUMBERS:
        if wrong := compare_leaf(arrays, name, *described)[0]:
            raise Damaged(f"{name}: {wrong}")
        return []
    total = numbers = 0
    for box, value in in_pieces(array, mine):
        total += host_fingerprint(value, start=[part.start for part in box], shape=array.shape)
        numbers += value.size
    return [total % 2**32, numbers] if mine else []


def what_differs(leaves: Mapping[str, list], found: Iterable[Mapping[str, list[int]]]) -> str:
    """The first leaf of which the shares of all processes do not add up to what its record says; '' if none."""
    totals = {name: [0, 0] for name in leaves}
    for sums in found:
        for name, (part, numbers) in sums.items():
            totals[name] = [(totals[name][0] + part) % 2**32, totals[name][1] + numbers]
    for name, (shape, dtype, mark) in sorted(leaves.items()):
        total, numbers = totals[name]
        if dtype in NUMBERS:
            continue  # compared where it was read
        if not (numbers == math.prod(shape) or dtype.startswith(KEY) and numbers):
            return f"{name}: {numbers:,} of its {math.prod(shape):,} numbers were read back"
        if total != mark:
            return f"{name}: {DIFFERS}"
    return ""


def forget_files(folder: Any, but: str = "/") -> None:
    """Drops the files below a local folder from memory, so that reading them back reads the disk.

    but: how the names of those begin that others have dropped.
    """
    if not paths.is_remote(folder):
        for name in files_under(folder):
            if not name.startswith(but):
                forget(folder / name)


def sealed_record(folder: Any, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """The record as `read` gives it. Raises Damaged if one bit of it is another."""
    try:
        return read(folder)
    except BadInput as error:
        if is_storage_error(error):
            raise
        raise Damaged(f"its record cannot be read back: {error}") from error
