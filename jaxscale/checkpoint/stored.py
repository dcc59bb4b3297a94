"""The arrays of a step, read from its files without any device and without holding more than a few pieces in memory.

TensorStore reads them in the pieces in which they were written, one per device that held a part. Training reads back by
this what it has saved, and `ckpt verify` what lies there.
"""

import collections
import contextlib
import itertools
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxscale.checkpoint.fingerprint import host_fingerprint
from jaxscale.system import paths

READ_AHEAD_BYTES = 64 << 20  # asked for and not yet used: hides the latency of a bucket, and is what memory it takes
CACHE_BYTES = 16 << 20  # of the index of a checkpoint, or every piece would ask a bucket for it again
STATE, TREE = "state", "state/_METADATA"
NUMBERS = {"int": int, "float": float, "bool": bool, "complex": complex}  # Python's: saved as arrays without axes
KEY = "key<"  # how the dtype of random keys begins, which are saved as words, in one axis more


def tensorstore() -> Any:
    """The library, which is needed with the first save only; Orbax loads it then."""
    import tensorstore as library

    return library


def compare_leaf(arrays: "Arrays", name: str, shape: list[int], dtype: str, mark: int) -> tuple[str, int]:
    """('' or what is wrong with the leaf, bytes read). Args: shape, dtype, mark: as its record has them."""
    array = arrays.open(name)
    is_key, own = dtype.startswith(KEY), list(array.shape)
    if (own[:-1] if is_key else own) != shape:
        return f"its shape is {own}, and {shape} was saved", 0
    if dtype not in NUMBERS and not is_key and array.dtype.name != dtype:
        return f"its dtype is {array.dtype.name}, and {dtype} was saved", 0
    total = size = 0
    value = None
    for box, value in zip(boxes(array), read_ahead((array, box) for box in boxes(array))):
        total += host_fingerprint(value, start=[part.start for part in box], shape=array.shape)
        size += value.nbytes
    found = {total % 2**32}
    if dtype in NUMBERS and value is not None and not shape:
        number = NUMBERS[dtype](value.item())
        # a numpy bool and Python's look alike in the record
        found = {zlib.crc32(repr(number).encode())} | (found if dtype == array.dtype.name else set())
    return ("" if mark in found else "its bits differ from those that were saved"), size


class Arrays:
    """The arrays of one step, opened by name and read in pieces. Nothing is kept from one object to the next."""

    def __init__(self, folder: Any):
        self.folder = folder
        self.driver = "zarr"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # who needs the tree finds out by itself
            self.driver = "zarr3" if paths.read_json(folder / TREE).get("use_zarr3") else "zarr"
        self.context = tensorstore().Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})

    def open(self, name: str) -> Any:
        """The leaf as a tensorstore.TensorStore. Raises BadInput (its own, of many lines) if it is not there."""
        store = {"driver": "ocdbt", "base": kvstore(self.folder / STATE), "path": f"{stored_name(name)}/"}
        spec = {"driver": self.driver, "kvstore": store, "recheck_cached_data": False}
        return tensorstore().open(spec, open=True, read=True, context=self.context).result()


def stored_name(leaf: str) -> str:
    """The name under which Orbax keeps a leaf: 'params/w' -> 'params.w'."""
    return leaf.replace("/", ".")


def kvstore(folder: Any) -> dict[str, str]:
    """TensorStore's description of a folder, safe for any name."""
    if paths.is_remote(folder):
        bucket, _, path = os.fspath(folder).removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}
    return {"driver": "file", "path": f"{os.path.abspath(folder)}/"}


Box = tuple[slice, ...]


def boxes(array: Any) -> list[Box]:
    """The pieces in which the array was written, as slices that cover it."""
    sizes = array.chunk_layout.read_chunk.shape
    ranges = [
        [slice(begin, min(begin + size, length)) for begin in range(0, length, max(size, 1))]
        for length, size in zip(array.shape, sizes or array.shape)
    ]
    return list(itertools.product(*ranges))


def box_bytes(array: Any, box: Box) -> int:
    """What a piece takes in memory."""
    return math.prod(part.stop - part.start for part in box) * array.dtype.numpy_dtype.itemsize


def read_ahead(wanted: Iterable[tuple[Any, Box]], limit: int = READ_AHEAD_BYTES) -> Iterator[np.ndarray]:
    """Yields the pieces in order. At most `limit` bytes are asked for ahead, or one piece that is larger."""
    pending: collections.deque = collections.deque()
    in_flight = 0
    for array, box in wanted:
        size = box_bytes(array, box)
        while pending and in_flight + size > limit:
            future, taken = pending.popleft()
            yield future.result()
            in_flight -= taken
        pending.append((array[box].read(), size))
        in_flight += size
    while pending:
        future, _ = pending.popleft()
        yield future.result()
