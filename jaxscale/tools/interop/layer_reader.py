"""Reads one layer, or one expert of it, of an array of a checkpoint without the others, in little memory.

Training writes arrays in chunks that span all layers. TensorStore reads whole chunks; here only the requested bytes
are read from the file that the OCDBT index names: chunks are not compressed.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorstore

from jaxscale.runtime.checkpoint import array_store
from jaxscale.runtime.checkpoint.fingerprint import host_fingerprint
from jaxscale.tools.interop.chunking import PARAM_DTYPE
from jaxscale.tools.interop.safetensors import stat_file

READ_BYTES = 32 << 20  # of float32 in memory at a time, besides the result


class LayerReader:
    """Reads the arrays of a step's folder."""

    def __init__(self, folder: Any):
        self.folder, self.arrays = folder, array_store.ArrayReader(folder)
        self.open = functools.cache(self.arrays.open)
        self.file = functools.cache(lambda name: stat_file(folder / name))  # size and version are read once
        self.chunk_locations = read_chunk_locations(folder)

    def read(self, name: str, index: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, int]:
        """Returns (the slice at `index`, (), (layer,) or (layer, expert), as `dtype`; its partial fingerprint)."""
        array = self.open(name)  # opened once
        out, mark = np.empty(tuple(array.shape[len(index) :]), dtype), 0
        for box in chunks_at(array, index):
            for part, value in self.read_parts(name, array, box, index):
                mark += host_fingerprint(value, start=[side.start for side in part], shape=array.shape)
                out[part[len(index) :]] = value.reshape(value.shape[len(index) :]).astype(dtype)
        return out, mark % 2**32

    def read_parts(
        self, name: str, array: Any, box: array_store.Box, index: tuple[int, ...]
    ) -> Iterator[tuple[array_store.Box, np.ndarray]]:
        """Yields (box, values) of `index` in a chunk, in parts of at most READ_BYTES."""
        sizes = tuple(array.chunk_layout.read_chunk.shape)
        key = ".".join(str(side.start // size) for side, size in zip(box, sizes)) or "0"
        found = self.chunk_locations.get(f"{array_store.stored_name(name)}/{key}")
        leading, bound = tuple(slice(one, one + 1) for one in index), box[len(index) :]
        # edge chunks have the full chunk shape in the file
        if found is None or not is_raw_float32(array) or found[2] != math.prod(sizes) * PARAM_DTYPE.itemsize:
            yield (*leading, *bound), array[(*leading, *bound)].read().result()
            return
        inner = sizes[len(index) :]
        before = 0  # entries of the leading axes before `index` in the chunk
        for one, side, size in zip(index, box, sizes):
            before = before * size + one - side.start
        begin = found[1] + before * math.prod(inner) * PARAM_DTYPE.itemsize
        file, ones = self.file(found[0]), (1,) * len(index)
        if not inner:
            value = np.empty(ones, PARAM_DTYPE)
            file.read_into(begin, value.reshape(-1).view(np.uint8))
            yield leading, value
            return
        row_bytes = math.prod(inner[1:]) * PARAM_DTYPE.itemsize
        step = max(1, READ_BYTES // max(row_bytes, 1))
        for row in range(bound[0].start, bound[0].stop, step):
            values = np.empty((min(step, bound[0].stop - row), *inner[1:]), PARAM_DTYPE)
            file.read_into(begin + (row - bound[0].start) * row_bytes, values.reshape(-1).view(np.uint8))
            values = values[(slice(None), *(slice(0, side.stop - side.start) for side in bound[1:]))]
            yield (*leading, slice(row, row + len(values)), *bound[1:]), values.reshape(ones + values.shape)


def chunks_at(array: tensorstore.TensorStore, index: tuple[int, ...]) -> Iterator[array_store.Box]:
    """Yields the chunks that contain `index` of the leading axes."""
    shape, chunk = array.shape, array.chunk_layout.read_chunk.shape or array.shape
    sizes = [size or length for size, length in zip(chunk, shape)]
    leading = []
    for one, length, size in zip(index, shape, sizes):
        begin = one // size * size
        leading.append(slice(begin, min(begin + size, length)))
    for inner in array_store.grid_boxes(shape[len(index) :], sizes[len(index) :]):
        yield (*leading, *inner)


def is_raw_float32(array: tensorstore.TensorStore) -> bool:
    """True if a chunk in a file is raw float32 in C order."""
    spec = array.spec().to_json()
    if spec["driver"] != "zarr":
        return False
    dtype, order, compressor = (spec["metadata"][key] for key in ("dtype", "order", "compressor"))
    return (dtype, order, compressor) == (PARAM_DTYPE.str, "C", None) and not spec["metadata"].get("filters")


def read_chunk_locations(folder: Any) -> dict[str, tuple[str, int, int]]:
    """Returns {'params.w/0.0': (file below the step's folder, offset, bytes)} of chunks outside the index."""
    base = array_store.open_kvstore(folder / array_store.STATE)
    newest = tensorstore.ocdbt.dump(base).result()["versions"][-1]
    found = {}
    for key, location in array_store.index_entries(base, newest["root"].get("location")):
        name, _, chunk = key.decode().rpartition("/")
        if chunk in array_store.ARRAY_METADATA or not location.startswith("value:"):
            continue  # small values are inline in the index
        _, *file, offset, length = location.split(":")
        found[f"{name}/{chunk}"] = (f"{array_store.STATE}/{''.join(file)}", int(offset), int(length))
    return found
