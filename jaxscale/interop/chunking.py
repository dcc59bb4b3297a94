"""Chunk shapes of imported arrays, and which tensors are read together.

A piece is what a restore reads at once, on whatever mesh: it lies in one layer, or in one expert of it, or holds some
whole ones of a small array, so that a device that wants a part of an array reads little else, and a bucket is not asked
a thousand times.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxscale.checkpoint.array_store import grid_boxes
from jaxscale.interop.families import TensorPair
from jaxscale.interop.safetensors import DTYPES, Tensor, how_to_widen
from jaxscale.system.exits import BadInput

PREFIX = "params/"  # before our names, in a checkpoint
OURS = np.dtype("<f4")  # parameters are float32 in our checkpoints
PIECE_BYTES = 32 << 20
TILE = 256  # entries of each of two axes: 2.3 times as fast as numpy's own copy of a turned matrix (one core, 2026-11)


def array_shapes(pairs: Sequence[TensorPair]) -> dict[str, tuple[int, ...]]:
    """{name of a leaf: its shape, the axes of layers and experts included}."""
    leads: dict[str, tuple[int, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for pair in pairs:
        for name, shape in zip(pair.ours, pair.our_shapes, strict=True):
            sizes = tuple(at + 1 for at in pair.place)
            leads[name] = tuple(map(max, leads.get(name, sizes), sizes))
            shapes[name] = shape
    return {name: (*leads[name], *shape) for name, shape in shapes.items()}


def piece_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Of the pieces of an array: its longest axis is halved until a piece has at most PIECE_BYTES.

    Halves of axes are what meshes divide them into, so that a device rarely reads more than its own part.
    """
    sizes = list(shape)
    while math.prod(sizes) * OURS.itemsize > PIECE_BYTES and max(sizes) > 1:
        axis = sizes.index(max(sizes))
        sizes[axis] = -(-sizes[axis] // 2)
    return tuple(sizes)


def together(pair: TensorPair, lead: Sequence[int]) -> tuple[int, ...]:
    """How many layers, and experts of each, of a row fit into one piece; 1 where what one has is cut into several.

    lead: how many there are. Experts are halved, as meshes divide them; several layers go with all of their experts.
    """
    largest = max(math.prod(shape) for shape in pair.our_shapes) * OURS.itemsize
    room = max(1, PIECE_BYTES // max(largest, 1))
    if pair.expert is None:
        return tuple(min(room, size) for size in lead)
    *layers, experts = lead
    fit = experts
    while fit > room:
        fit = -(-fit // 2)
    return (*(max(1, min(room // experts, size)) for size in layers), fit)


def chunk_shapes(pairs: Sequence[TensorPair]) -> dict[str, tuple[int, ...]]:
    """{name of a leaf: shape of its pieces}."""
    shapes, chunks = array_shapes(pairs), {}
    for pair in pairs:
        for name, shape in zip(pair.ours, pair.our_shapes, strict=True):
            lead = shapes[name][: len(pair.place)]
            chunks[name] = (*together(pair, lead), *piece_shape(shape))
    return chunks


def plan_units(pairs: Sequence[TensorPair]) -> dict[str, list[TensorPair]]:
    """{name in the journal: layers and experts of a row that lie in the same pieces, in order}: read, written and noted
    as done together."""
    rows: dict[tuple[str, ...], dict[tuple[int, ...], TensorPair]] = {}
    for pair in pairs:
        rows.setdefault(pair.ours, {})[pair.place] = pair
    units = {}
    for row in rows.values():
        lead, one = [max(at) + 1 for at in zip(*row)], next(iter(row.values()))
        assert len(row) == math.prod(lead), f"layers or experts are missing of {one.ours}"
        for box in grid_boxes(lead, together(one, lead)):
            group = [row[place] for place in itertools.product(*(range(side.start, side.stop) for side in box))]
            units[f"{group[0].theirs}+{len(group) - 1}"] = group
    return units


def check_tensors(pairs: Sequence[TensorPair], tensors: Mapping[str, Tensor]) -> None:
    """Raises BadInput, one line, for a tensor whose shape or dtype is not what the config asks for."""
    for pair in pairs:
        tensor = tensors[pair.theirs]
        where = f"{tensor.file.path}: {pair.theirs}"
        if tensor.shape != pair.their_shape:
            raise BadInput(
                f"{where} has shape {list(tensor.shape)}, and by config.json it is {list(pair.their_shape)}; "
                "the two belong to different models: fetch both again"
            )
        if tensor.kind not in DTYPES:
            raise BadInput(f"{where} is {tensor.kind}; {how_to_widen(tensor.kind)}")


def in_order(values: np.ndarray) -> np.ndarray:
    """The same array, contiguous. One whose last axis is not the one that lies closest in memory is copied in tiles.

    Numpy copies a turned matrix line by line, and each number of a line is in another page.
    """
    if values.flags.c_contiguous:
        return values
    near, last = min(range(values.ndim), key=lambda axis: (abs(values.strides[axis]), -axis)), values.ndim - 1
    if near == last:
        return np.ascontiguousarray(values)
    out = np.empty(values.shape, values.dtype)
    for tile in grid_boxes(values.shape, [TILE if axis in (near, last) else 1 for axis in range(values.ndim)]):
        out[tile] = values[tile]
    return out
