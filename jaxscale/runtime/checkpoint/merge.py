"""Merges LoRA adapters into the matrices that they adapt, and writes plain weights as a new work folder.

The result is written as an average is: with the same arrays and chunks, checked while they are read and once they are
written. W + scale A B is summed in float64 and rounded once. config.json describes the merge, and its config has no
adapters.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxscale.core.models.lora import A, B, is_adapter
from jaxscale.core.models.lora_mup_config import NO_LORA, LoraConfig
from jaxscale.runtime.checkpoint.array_store import ArrayReader, Box
from jaxscale.runtime.checkpoint.average import (
    LEAVE_OUT,
    WEIGHTS,
    Combine,
    WeightRecipe,
    WrittenWeights,
    check_fingerprint,
    open_leaf,
    read_source,
    weight_formats,
    write_weights,
)
from jaxscale.runtime.checkpoint.fingerprint import host_fingerprint
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import require_step, weight_leaves
from jaxscale.runtime.checkpoint.storage_errors import read_optional
from jaxscale.schema import from_dict, to_dict
from jaxscale.system.exits import BadInput

MERGED = "merged"
TOKENIZER = "tokenizer"  # folder of a work folder with the tokenizer's files


def merge_lora(
    source: Checkpoints,
    step: int,
    workdir: Any,
    what: str = WEIGHTS,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> WrittenWeights:
    """Writes the weights of a step with its adapters merged into a new work folder.

    Args: what: 'params', or 'ema' for the average of the adapters, if the run has one.
    Raises: BadInput for a run without adapters or a folder in use; Stop (CHECKPOINT_CORRUPT) naming the leaf of a
    damaged source, (STORAGE) if it cannot be written.
    """
    folder, run = source.directory / str(step), source.directory.parent
    record = require_step(folder, LEAVE_OUT)
    lora = from_dict(LoraConfig, record["run"].get("config", {}).get("lora") or {}, f"{folder}: lora")
    adapters = {name: leaf for name, leaf in weight_leaves(record["leaves"], what).items() if is_adapter(name)}
    if not lora.on or not adapters:
        raise BadInput(f"step {step} has no adapters in {what}; merge_lora is for a run with lora.rank above 0")
    leaves = {name: found for name, found in weight_formats(record, WEIGHTS).items() if not is_adapter(name)}
    sources = {"of": os.fspath(run), "what": what, "step": step, "record": record["sha256"], "lora": to_dict(lora)}
    arrays = ArrayReader(folder)

    def combine(name: str) -> Combine:
        if f"{name}{A}" not in adapters:
            return lambda box, pieces: next(pieces)
        a, b = (read_whole(arrays, step, record, adapters[f"{name}{ending}"]) for ending in (A, B))
        return lambda box, pieces: with_adapter(next(pieces), box, a, b, lora.scale)

    recipe = WeightRecipe(
        source,
        {step: record},
        WEIGHTS,
        leaves,
        combine,
        MERGED,
        {**record, "run": without_lora(record["run"]) | {MERGED: sources}},
        without_lora(read_optional(run / "config.json")) | {MERGED: sources},
        (TOKENIZER,),
    )
    return write_weights(recipe, workdir, on_bytes)


def read_whole(arrays: ArrayReader, step: int, record: Mapping[str, Any], name: str) -> np.ndarray:
    """Returns a small leaf, verified."""
    value = read_source(open_leaf(arrays, step, name).read().result, step, name)
    check_fingerprint(host_fingerprint(value), record, step, name)
    return value


def with_adapter(piece: np.ndarray, box: Box, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Returns the box's piece of a matrix, or of a stack of them, plus scale A B, in the piece's dtype.

    A stack (of layers, experts or both) shows in the number of axes: A and B share its axes and the adapter's rank.
    """
    stacked = a.ndim + b.ndim - piece.ndim - 2
    count = a.ndim - stacked - 1
    a_slices, b_slices = box[stacked : stacked + count], box[stacked + count :]
    merged = np.empty_like(piece)
    for index in np.ndindex(*piece.shape[:stacked]):  # one matrix in float64 at a time
        matrix = tuple(part.start + offset for part, offset in zip(box, index))
        merged[index] = piece[index] + adapter_product(a[matrix], b[matrix], a_slices, b_slices, scale)
    return merged


def adapter_product(a: np.ndarray, b: np.ndarray, a_slices: tuple, b_slices: tuple, scale: float) -> np.ndarray:
    """Returns the part of scale A B in these rows of A and columns of B, in float64."""
    a, b = a[a_slices].astype(np.float64), b[(slice(None), *b_slices)].astype(np.float64)
    rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    return (scale * (rows @ b.reshape(b.shape[0], -1))).reshape(*a.shape[:-1], *b.shape[1:])


def without_lora(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the run's part of a record with a config that has no adapters."""
    return {**run, "config": {**run.get("config", {}), "lora": to_dict(NO_LORA)}}
