"""Reads saved steps back, with the chunks of all arrays divided among the processes.

The fingerprints of chunks add up to that of their array (fingerprint.py). So every process reads equally many bytes,
even of one large array, a few chunks at a time, and the first process compares the sums with the record.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxscale.runtime.checkpoint import array_store
from jaxscale.runtime.checkpoint.array_store import ArrayReader, chunk_boxes, compare_leaf, format_mismatch, read_boxes
from jaxscale.runtime.checkpoint.fingerprint import host_fingerprint
from jaxscale.runtime.checkpoint.folders import drop_page_cache, files_under
from jaxscale.runtime.checkpoint.storage_errors import is_storage_error, short_reason
from jaxscale.system import paths
from jaxscale.system.exits import BadInput


class DamagedCheckpoint(Exception):
    """The files differ from what was saved."""


def verify_leaves(folder: Any, leaves: Mapping[str, list]) -> None:
    """Compares each leaf of a step with its fingerprint; reads the disk rather than the page cache.

    Args: leaves: {name: [shape, dtype, fingerprint]} of its record.
    Raises: DamagedCheckpoint naming the first leaf that differs or is missing.
    """
    drop_page_caches(folder)
    if wrong := first_difference(leaves, [piece_sums(folder, leaves)]):
        raise DamagedCheckpoint(wrong)


def piece_sums(folder: Any, leaves: Mapping[str, list], share: int = 0, shares: int = 1) -> dict[str, list[int]]:
    """Returns {leaf: [sum of its chunks' fingerprints, number of their elements]} for one process's chunks.

    The shares differ in bytes by at most one chunk, and a process opens only the leaves in its share.
    Raises: DamagedCheckpoint naming the first leaf that is unreadable or of another shape or dtype.
    """
    arrays, found, begin = ArrayReader(folder), {}, 0
    sizes = {name: leaf_bytes(*leaves[name][:2]) for name in sorted(leaves)}
    first, last = (sum(sizes.values()) * number // shares for number in (share, share + 1))
    for name, size in sizes.items():
        if begin < last and begin + size > first:
            try:
                if sums := leaf_piece_sums(arrays, name, leaves[name], first - begin, last - begin):
                    found[name] = sums
            except Exception as error:
                if is_storage_error(error) or isinstance(error, DamagedCheckpoint):
                    raise
                raise DamagedCheckpoint(f"{name} cannot be read back: {short_reason(error)}") from error
        begin += size
    return found


def leaf_bytes(shape: list[int], dtype: str) -> int:
    """Returns the bytes of a leaf, at least 1. An estimate is enough: it only balances the shares."""
    try:
        item = jax.numpy.dtype(dtype).itemsize
    except TypeError:  # random keys and Python scalars
        item = 8
    return max(1, math.prod(shape) * item)


def leaf_piece_sums(arrays: ArrayReader, name: str, described: list, begin: int, end: int) -> list[int]:
    """Returns piece_sums of those chunks of one leaf that begin in [begin, end) of its bytes; [] if none does."""
    array = arrays.open(name)
    if wrong := format_mismatch(array, *described[:2]):
        raise DamagedCheckpoint(f"{name}: {wrong}")
    pieces, size = chunk_boxes(array), leaf_bytes(*described[:2])
    mine = [box for number, box in enumerate(pieces) if begin <= number * size // len(pieces) < end]
    if mine and described[1] in array_store.PYTHON_SCALARS:
        if wrong := compare_leaf(arrays, name, *described)[0]:
            raise DamagedCheckpoint(f"{name}: {wrong}")
        return []
    total = numbers = 0
    for box, value in read_boxes(array, mine):
        total += host_fingerprint(value, start=[part.start for part in box], shape=array.shape)
        numbers += value.size
    return [total % 2**32, numbers] if mine else []


def first_difference(leaves: Mapping[str, list], found: Iterable[Mapping[str, list[int]]]) -> str:
    """Returns the first leaf whose sums over all processes do not match its record; '' if none."""
    totals = {name: [0, 0] for name in leaves}
    for sums in found:
        for name, (part, numbers) in sums.items():
            totals[name] = [(totals[name][0] + part) % 2**32, totals[name][1] + numbers]
    for name, (shape, dtype, fingerprint) in sorted(leaves.items()):
        total, numbers = totals[name]
        if dtype in array_store.PYTHON_SCALARS:
            continue  # compared when it was read
        if not (numbers == math.prod(shape) or dtype.startswith(array_store.KEY_DTYPE_PREFIX) and numbers):
            return f"{name}: {numbers:,} of its {math.prod(shape):,} numbers were read back"
        if total != fingerprint:
            return f"{name}: {array_store.DIFFERS}"
    return ""


def drop_page_caches(folder: Any, other_files: str = "/") -> None:
    """Drops the files below a local folder from the page cache, so that reading them back reads the disk.

    other_files: prefix of the names of files that other processes drop.
    """
    if not paths.is_remote(folder):
        for name in files_under(folder):
            if not name.startswith(other_files):
                drop_page_cache(folder / name)


def read_sealed_record(folder: Any, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Returns read(folder). Raises DamagedCheckpoint if the record was changed."""
    try:
        return read(folder)
    except BadInput as error:
        if is_storage_error(error):
            raise
        raise DamagedCheckpoint(f"its record cannot be read back: {error}") from error
