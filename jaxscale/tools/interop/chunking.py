"""Chunk shapes of imported arrays, and groups of tensors that are read together.

A restore reads whole chunks on any mesh. A chunk is part of one layer or expert, or several whole layers of a small
array. So a device reads little more than its shard, and a bucket receives few requests.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxscale.runtime.checkpoint.array_store import grid_boxes
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop.families import TensorPair
from jaxscale.tools.interop.safetensors import DTYPES, Tensor, conversion_hint

PARAMS_PREFIX = "params/"  # prefix of parameters in a checkpoint
PARAM_DTYPE = np.dtype("<f4")  # dtype of parameters in a checkpoint
CHUNK_BYTES = 32 << 20
TILE = 256  # entries per axis; 2.3 times as fast as numpy's copy of a transposed matrix (one core, 2026-11)


def array_shapes(pairs: Sequence[TensorPair]) -> dict[str, tuple[int, ...]]:
    """Returns {leaf: shape}, including the axes of layers and experts."""
    shapes: dict[str, tuple[int, ...]] = {}
    for pair in pairs:
        for name, shape in zip(pair.leaves, pair.leaf_shapes, strict=True):
            sizes = tuple(at + 1 for at in pair.place)
            shapes[name] = (*map(max, shapes.get(name, sizes), sizes), *shape)
    return shapes


def leading_chunk_shape(pair: TensorPair, leading: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of layers (and experts) in a chunk. It is 1 if a layer or expert is larger than a chunk.

    leading: number of layers (and experts). The number of experts is halved until they fit, as meshes divide it.
    A chunk with several layers has all experts of these layers.
    """
    largest = max(math.prod(shape) for shape in pair.leaf_shapes) * PARAM_DTYPE.itemsize
    room = max(1, CHUNK_BYTES // max(largest, 1))
    if pair.expert is None:
        return tuple(min(room, size) for size in leading)
    *layers, experts = leading
    fit = experts
    while fit > room:
        fit = -(-fit // 2)
    return (*(max(1, min(room // experts, size)) for size in layers), fit)


def chunk_shapes(pairs: Sequence[TensorPair]) -> dict[str, tuple[int, ...]]:
    """Returns {leaf: chunk shape}."""
    shapes, chunks = array_shapes(pairs), {}
    for pair in pairs:
        for name, shape in zip(pair.leaves, pair.leaf_shapes, strict=True):
            leading, inner = shapes[name][: len(pair.place)], list(shape)
            while math.prod(inner) * PARAM_DTYPE.itemsize > CHUNK_BYTES and max(inner) > 1:
                axis = inner.index(max(inner))  # meshes divide axes by powers of two
                inner[axis] = -(-inner[axis] // 2)
            chunks[name] = (*leading_chunk_shape(pair, leading), *inner)
    return chunks


def plan_units(pairs: Sequence[TensorPair]) -> dict[str, list[TensorPair]]:
    """Returns {unit name in the journal: pairs that share chunks}. The pairs of a unit are read and saved together."""
    rows: dict[tuple[str, ...], dict[tuple[int, ...], TensorPair]] = {}
    for pair in pairs:
        rows.setdefault(pair.leaves, {})[pair.place] = pair
    units = {}
    for row in rows.values():
        leading, one = [max(at) + 1 for at in zip(*row)], next(iter(row.values()))
        assert len(row) == math.prod(leading), f"layers or experts of {one.leaves} are missing"
        for box in grid_boxes(leading, leading_chunk_shape(one, leading)):
            group = [row[place] for place in itertools.product(*(range(side.start, side.stop) for side in box))]
            units[f"{group[0].hf_name}+{len(group) - 1}"] = group
    return units


def check_tensors(pairs: Sequence[TensorPair], tensors: Mapping[str, Tensor]) -> None:
    """Raises BadInput if the shape or dtype of a tensor does not match the config."""
    for pair in pairs:
        tensor = tensors[pair.hf_name]
        where = f"{tensor.file.path}: {pair.hf_name}"
        if tensor.shape != pair.hf_shape:
            raise BadInput(
                f"{where} has shape {list(tensor.shape)}, but config.json requires {list(pair.hf_shape)}; "
                "they are from different models: download both again"
            )
        if tensor.dtype_name not in DTYPES:
            raise BadInput(f"{where} is {tensor.dtype_name}; {conversion_hint(tensor.dtype_name)}")


def contiguous(values: np.ndarray) -> np.ndarray:
    """Returns a C-contiguous array. Copies transposed arrays in tiles, since numpy's copy has many cache misses."""
    if values.flags.c_contiguous:
        return values
    fastest, last = min(range(values.ndim), key=lambda axis: (abs(values.strides[axis]), -axis)), values.ndim - 1
    if fastest == last:
        return np.ascontiguousarray(values)
    out = np.empty(values.shape, values.dtype)
    for tile in grid_boxes(values.shape, [TILE if axis in (fastest, last) else 1 for axis in range(values.ndim)]):
        out[tile] = values[tile]
    return out
