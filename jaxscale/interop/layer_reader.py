"""Reads one layer, or one expert of it, of an array of a checkpoint without the others, in little memory.

Training writes an array in pieces that hold the same part of every layer. TensorStore reads a piece whole; here only
the bytes that are wanted are read from the file that holds them, which the index tells: pieces are not compressed.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorstore

from jaxscale.checkpoint.array_store import (
    ARRAY_METADATA,
    STATE,
    ArrayReader,
    Box,
    grid_boxes,
    index_entries,
    open_kvstore,
    stored_name,
)
from jaxscale.checkpoint.fingerprint import host_fingerprint
from jaxscale.interop.chunking import OURS
from jaxscale.interop.ranges import File, look_at

READ_BYTES = 32 << 20  # of float32 in memory at one time, beside the result


class Leaves:
    """The arrays below a step's folder."""

    def __init__(self, folder: Any):
        self.folder, self.arrays = folder, ArrayReader(folder)
        self.opened: dict[str, Any] = {}
        self.files: dict[str, File] = {}
        self.located = locations(folder)

    def read(self, name: str, at: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, int]:
        """(what lies at this place of the leading axes, as `dtype`; what it adds to the array's fingerprint).

        Args: at: (layer,), (layer, expert), or () for all of an array without layers.

        Raises whatever TensorStore and the files raise of what cannot be read.
        """
        array = self.open(name)
        out, mark = np.empty(tuple(array.shape[len(at) :]), dtype), 0
        for box in boxes_at(array, at):
            for part, value in self.parts(name, array, box, at):
                mark += host_fingerprint(value, start=[side.start for side in part], shape=array.shape)
                out[part[len(at) :]] = value.reshape(value.shape[len(at) :]).astype(dtype)
        return out, mark % 2**32

    def open(self, name: str) -> Any:
        """The array, opened once."""
        if name not in self.opened:
            self.opened[name] = self.arrays.open(name)
        return self.opened[name]

    def parts(self, name: str, array: Any, box: Box, at: tuple[int, ...]) -> Iterator[tuple[Box, np.ndarray]]:
        """Yields (where, values) of what lies at this place in a piece, in parts of at most READ_BYTES."""
        sizes = array.chunk_layout.read_chunk.shape
        key = ".".join(str(side.start // size) for side, size in zip(box, sizes)) or "0"
        found = self.located.get(f"{stored_name(name)}/{key}")
        lead = tuple(slice(one, one + 1) for one in at)
        inner, bound = tuple(sizes)[len(lead) :], box[len(lead) :]
        # the last pieces of an axis are as long in the file, whatever the array needs
        if found is None or not is_plain(array) or found[2] != math.prod(sizes) * OURS.itemsize:
            wanted = (*lead, *bound)
            yield wanted, array[wanted].read().result()
            return
        file, offset, _ = found
        before = 0  # of the piece: whole places of the leading axes
        for one, side, size in zip(at, box, sizes):
            before = before * size + one - side.start
        begin = offset + before * math.prod(inner) * OURS.itemsize
        rows = bound[0].stop - bound[0].start if inner else 1
        row_bytes = math.prod(inner[1:]) * OURS.itemsize
        step = max(1, READ_BYTES // max(row_bytes, 1))
        for row in range(0, rows, step):
            count = min(step, rows - row)
            values = np.empty((count, *inner[1:]) if inner else (), OURS)
            self.file(file).read_into(begin + row * row_bytes, values.reshape(-1).view(np.uint8))
            part = lead
            if inner:
                values = values[(slice(None), *(slice(0, side.stop - side.start) for side in bound[1:]))]
                part = (*lead, slice(bound[0].start + row, bound[0].start + row + count), *bound[1:])
            yield part, values.reshape((1,) * len(lead) + values.shape)

    def file(self, name: str) -> File:
        """A file of the step, looked at once."""
        if name not in self.files:
            self.files[name] = look_at(self.folder / name)
        return self.files[name]


def boxes_at(array: tensorstore.TensorStore, at: tuple[int, ...]) -> Iterator[Box]:
    """Yields the pieces in which a place of the leading axes lies: of a hundred experts there are very many."""
    shape, chunk = array.shape, array.chunk_layout.read_chunk.shape or array.shape
    sizes = [size or length for size, length in zip(chunk, shape)]
    lead = []
    for one, length, size in zip(at, shape, sizes):
        begin = one // size * size
        lead.append(slice(begin, min(begin + size, length)))
    for inner in grid_boxes(shape[len(at) :], sizes[len(at) :]):
        yield (*lead, *inner)


def is_plain(array: tensorstore.TensorStore) -> bool:
    """True if a piece in a file is the array's float32 numbers in order, and nothing else."""
    spec = array.spec().to_json()
    metadata = spec["metadata"]
    return (
        spec["driver"] == "zarr"
        and metadata["dtype"] == OURS.str
        and metadata["order"] == "C"
        and metadata["compressor"] is None
        and not metadata.get("filters")
    )


def locations(folder: Any) -> dict[str, tuple[str, int, int]]:
    """{'params.w/0.0': (file below the step's folder, first byte, bytes)} of pieces that lie in files of their own."""
    base = open_kvstore(folder / STATE)
    newest = tensorstore.ocdbt.dump(base).result()["versions"][-1]
    found = {}
    for key, location in index_entries(base, newest["root"].get("location")):
        name, _, piece = key.decode().rpartition("/")
        if piece in ARRAY_METADATA or not location.startswith("value:"):
            continue  # small ones lie in the index itself
        _, *file, offset, length = location.split(":")
        found[f"{name}/{piece}"] = (f"{STATE}/{''.join(file)}", int(offset), int(length))
    return found
