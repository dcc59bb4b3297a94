"""Reads one layer, or one expert of it, of an array of a checkpoint without the others, in little memory.

Training writes arrays in chunks that span all layers. TensorStore reads whole chunks; here only the requested bytes
are read from the file that the OCDBT index names: chunks are not compressed.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorstore

from jaxscale.runtime.checkpoint.array_store import (
    ARRAY_METADATA,
    STATE,
    ArrayReader,
    Box,
    grid_boxes,
    index_entries,
    open_kvstore,
    stored_name,
)
from jaxscale.runtime.checkpoint.fingerprint import host_fingerprint
from jaxscale.tools.interop.chunking import PARAM_DTYPE
from jaxscale.tools.interop.ranges import File, stat_file

READ_BYTES = 32 << 20  # of float32 in memory at a time, besides the result


class LayerReader:
    """Reads the arrays of a step's folder."""

    def __init__(self, folder: Any):
        self.folder, self.arrays = folder, ArrayReader(folder)
        self.opened: dict[str, Any] = {}
        self.files: dict[str, File] = {}
        self.chunk_locations = read_chunk_locations(folder)

    def read(self, name: str, index: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, int]:
        """Returns (the slice at `index` of the leading axes as `dtype`, its partial fingerprint).

        Args: index: (layer,), (layer, expert), or () for an array without layers. Raises as TensorStore and files do.
        """
        array = self.open(name)
        out, mark = np.empty(tuple(array.shape[len(index) :]), dtype), 0
        for box in chunks_at(array, index):
            for part, value in self.read_parts(name, array, box, index):
                mark += host_fingerprint(value, start=[side.start for side in part], shape=array.shape)
                out[part[len(index) :]] = value.reshape(value.shape[len(index) :]).astype(dtype)
        return out, mark % 2**32

    def open(self, name: str) -> Any:
        """Returns the array, opened once."""
        if name not in self.opened:
            self.opened[name] = self.arrays.open(name)
        return self.opened[name]

    def read_parts(self, name: str, array: Any, box: Box, index: tuple[int, ...]) -> Iterator[tuple[Box, np.ndarray]]:
        """Yields (box, values) of `index` in a chunk, in parts of at most READ_BYTES."""
        sizes = array.chunk_layout.read_chunk.shape
        key = ".".join(str(side.start // size) for side, size in zip(box, sizes)) or "0"
        found = self.chunk_locations.get(f"{stored_name(name)}/{key}")
        leading = tuple(slice(one, one + 1) for one in index)
        inner, bound = tuple(sizes)[len(leading) :], box[len(leading) :]
        # edge chunks have the full chunk shape in the file
        if found is None or not is_raw_float32(array) or found[2] != math.prod(sizes) * PARAM_DTYPE.itemsize:
            box_in_array = (*leading, *bound)
            yield box_in_array, array[box_in_array].read().result()
            return
        file, offset, _ = found
        before = 0  # entries of the leading axes before `index` in the chunk
        for one, side, size in zip(index, box, sizes):
            before = before * size + one - side.start
        begin = offset + before * math.prod(inner) * PARAM_DTYPE.itemsize
        rows = bound[0].stop - bound[0].start if inner else 1
        row_bytes = math.prod(inner[1:]) * PARAM_DTYPE.itemsize
        step = max(1, READ_BYTES // max(row_bytes, 1))
        for row in range(0, rows, step):
            count = min(step, rows - row)
            values = np.empty((count, *inner[1:]) if inner else (), PARAM_DTYPE)
            self.file(file).read_into(begin + row * row_bytes, values.reshape(-1).view(np.uint8))
            part = leading
            if inner:
                values = values[(slice(None), *(slice(0, side.stop - side.start) for side in bound[1:]))]
                part = (*leading, slice(bound[0].start + row, bound[0].start + row + count), *bound[1:])
            yield part, values.reshape((1,) * len(leading) + values.shape)

    def file(self, name: str) -> File:
        """Returns a file of the step, with its size and version read once."""
        if name not in self.files:
            self.files[name] = stat_file(self.folder / name)
        return self.files[name]


def chunks_at(array: tensorstore.TensorStore, index: tuple[int, ...]) -> Iterator[Box]:
    """Yields the chunks that contain `index` of the leading axes."""
    shape, chunk = array.shape, array.chunk_layout.read_chunk.shape or array.shape
    sizes = [size or length for size, length in zip(chunk, shape)]
    leading = []
    for one, length, size in zip(index, shape, sizes):
        begin = one // size * size
        leading.append(slice(begin, min(begin + size, length)))
    for inner in grid_boxes(shape[len(index) :], sizes[len(index) :]):
        yield (*leading, *inner)


def is_raw_float32(array: tensorstore.TensorStore) -> bool:
    """True if a chunk in a file is raw float32 in C order."""
    spec = array.spec().to_json()
    metadata = spec["metadata"]
    return (
        spec["driver"] == "zarr"
        and metadata["dtype"] == PARAM_DTYPE.str
        and metadata["order"] == "C"
        and metadata["compressor"] is None
        and not metadata.get("filters")
    )


def read_chunk_locations(folder: Any) -> dict[str, tuple[str, int, int]]:
    """Returns {'params.w/0.0': (file below the step's folder, offset, bytes)} of chunks outside the index."""
    base = open_kvstore(folder / STATE)
    newest = tensorstore.ocdbt.dump(base).result()["versions"][-1]
    found = {}
    for key, location in index_entries(base, newest["root"].get("location")):
        name, _, chunk = key.decode().rpartition("/")
        if chunk in ARRAY_METADATA or not location.startswith("value:"):
            continue  # small values are inline in the index
        _, *file, offset, length = location.split(":")
        found[f"{name}/{chunk}"] = (f"{STATE}/{''.join(file)}", int(offset), int(length))
    return found
