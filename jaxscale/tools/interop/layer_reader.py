"""Reads one layer or one expert of an array in a checkpoint without reading the rest of the array.

Training writes arrays in chunks that span all layers, and TensorStore reads whole chunks. Since chunks are not
compressed, only the requested bytes are read from the file that the OCDBT index names.
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

READ_BYTES = 32 << 20  # float32 buffer in memory, in addition to the result


class LayerReader:
    """Reads layers of the arrays in the folder of a step."""

    def __init__(self, folder: Any):
        self.folder, self.arrays = folder, array_store.ArrayReader(folder)
        self.open = functools.cache(self.arrays.open)
        self.file = functools.cache(lambda name: stat_file(folder / name))  # reads size and version only once
        self.chunk_locations = read_chunk_locations(folder)

    def read(self, name: str, index: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, int]:
        """Returns (values at `index` as `dtype`, partial fingerprint). index: (), (layer,) or (layer, expert)."""
        array = self.open(name)
        out, mark = np.empty(tuple(array.shape[len(index) :]), dtype), 0
        for box in chunks_at(array, index):
            for part, value in self.read_parts(name, array, box, index):
                mark += host_fingerprint(value, start=[side.start for side in part], shape=array.shape)
                out[part[len(index) :]] = value.reshape(value.shape[len(index) :]).astype(dtype)
        return out, mark % 2**32

    def read_parts(
        self, name: str, array: Any, box: array_store.Box, index: tuple[int, ...]
    ) -> Iterator[tuple[array_store.Box, np.ndarray]]:
        """Yields (box, values) for `index` in a chunk, in parts of at most READ_BYTES."""
        sizes = tuple(array.chunk_layout.read_chunk.shape)
        key = ".".join(str(side.start // size) for side, size in zip(box, sizes)) or "0"
        found = self.chunk_locations.get(f"{array_store.stored_name(name)}/{key}")
        leading, bound = tuple(slice(one, one + 1) for one in index), box[len(index) :]
        # edge chunks have the full chunk shape in the file
        if found is None or not is_raw_float32(array) or found[2] != math.prod(sizes) * PARAM_DTYPE.itemsize:
            yield (*leading, *bound), array[(*leading, *bound)].read().result()
            return
        inner = sizes[len(index) :]
        before = 0  # number of entries of the leading axes before `index` in the chunk
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
    """Yields the chunks that contain `index` on the leading axes."""
    shape, chunk = array.shape, array.chunk_layout.read_chunk.shape or array.shape
    sizes = [size or length for size, length in zip(chunk, shape)]
    leading = []
    for one, length, size in zip(index, shape, sizes):
        begin = one // size * size
        leading.append(slice(begin, min(begin + size, length)))
    for inner in array_store.grid_boxes(shape[len(index) :], sizes[len(index) :]):
        yield (*leading, *inner)


def is_raw_float32(array: tensorstore.TensorStore) -> bool:
    """Returns True if chunks are stored as raw float32 in C order."""
    spec = array.spec().to_json()
    if spec["driver"] != "zarr":
        return False
    dtype, order, compressor = (spec["metadata"][key] for key in ("dtype", "order", "compressor"))
    return (dtype, order, compressor) == (PARAM_DTYPE.str, "C", None) and not spec["metadata"].get("filters")


def read_chunk_locations(folder: Any) -> dict[str, tuple[str, int, int]]:
    """Returns {chunk, such as 'params.w/0.0': (path, offset, bytes)}. Omits chunks that are stored in the index."""
    base = array_store.open_kvstore(folder / array_store.STATE)
    newest = tensorstore.ocdbt.dump(base).result()["versions"][-1]
    found = {}
    for key, location in array_store.index_entries(base, newest["root"].get("location")):
        name, _, chunk = key.decode().rpartition("/")
        if chunk in array_store.ARRAY_METADATA or not location.startswith("value:"):
            continue  # small values are stored in the index
        _, *file, offset, length = location.split(":")
        found[f"{name}/{chunk}"] = (f"{array_store.STATE}/{''.join(file)}", int(offset), int(length))
    return found
