"""Adapters added to the matrices that they are for: plain weights, written as a work folder of their own.

It is written as an average is: the same arrays in the same pieces, a piece at a time, checked as they are read and once
they are written. W + scale A B is summed in float64 and rounded once. config.json tells what was merged, and its config
has no adapters.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.checkpoint.array_store import Arrays, Box
from jaxscale.checkpoint.average import (
    LEAVE_OUT,
    WEIGHTS,
    Averaged,
    Combine,
    Recipe,
    check_bits,
    open_leaf,
    read_source,
    weights_of,
    write_weights,
)
from jaxscale.checkpoint.fingerprint import host_fingerprint
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.record import require_step, weight_leaves
from jaxscale.checkpoint.storage_errors import read_optional
from jaxscale.models.config import NO_LORA, LoraConfig
from jaxscale.models.lora import A, B, is_adapter
from jaxscale.schema import from_dict, to_dict
from jaxscale.system.exits import BadInput

MADE = "merged"
TOKENIZER = "tokenizer"  # the folder of a work folder with the tokenizer's files


def merge_lora(
    source: Checkpoints,
    step: int,
    workdir: Any,
    what: str = WEIGHTS,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Averaged:
    """Writes the weights of a step with its adapters merged into a new work folder.

    Args: what: 'params', or 'ema': with the average of the adapters, where the run keeps one.
    Raises: BadInput for a run without adapters or a folder in use; Stop (CHECKPOINT_CORRUPT) naming the leaf of a
    damaged source, (STORAGE) if it cannot be written.
    """
    folder, run = source.directory / str(step), source.directory.parent
    record = require_step(folder, LEAVE_OUT)
    lora = from_dict(LoraConfig, record["run"].get("config", {}).get("lora") or {}, f"{folder}: lora")
    adapters = {name: leaf for name, leaf in weight_leaves(record["leaves"], what).items() if is_adapter(name)}
    if not lora.on or not adapters:
        raise BadInput(f"step {step} has no adapters in {what}; merge_lora is for a run with lora.rank above 0")
    leaves = {name: found for name, found in weights_of(record, WEIGHTS).items() if not is_adapter(name)}
    made = {"of": os.fspath(run), "what": what, "step": step, "record": record["sha256"], "lora": to_dict(lora)}
    arrays = Arrays(folder)

    def combine(name: str) -> Combine:
        if f"{name}{A}" not in adapters:
            return lambda box, pieces: next(pieces)
        a, b = (read_whole(arrays, step, record, adapters[f"{name}{ending}"]) for ending in (A, B))
        return lambda box, pieces: with_adapter(next(pieces), box, a, b, lora.scale)

    recipe = Recipe(
        source,
        {step: record},
        WEIGHTS,
        leaves,
        combine,
        MADE,
        {**record, "run": without_lora(record["run"]) | {MADE: made}},
        without_lora(read_optional(run / "config.json")) | {MADE: made},
        (TOKENIZER,),
    )
    return write_weights(recipe, workdir, on_bytes)


def read_whole(arrays: Arrays, step: int, record: Mapping[str, Any], name: str) -> np.ndarray:
    """A small leaf, checked."""
    value = read_source(open_leaf(arrays, step, name).read().result, step, name)
    check_bits(host_fingerprint(value), record, step, name)
    return value


def with_adapter(piece: np.ndarray, box: Box, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """The piece of a matrix, or of a stack of them, that lies in the box, plus scale A B, in the piece's dtype.

    The sizes tell whether there is a stack, of layers, experts or both: A and B share the rank, and the stack's axes.
    """
    stacked = a.ndim + b.ndim - piece.ndim - 2
    count = a.ndim - stacked - 1
    of_a, of_b = box[stacked : stacked + count], box[stacked + count :]
    merged = np.empty_like(piece)
    for place in np.ndindex(*piece.shape[:stacked]):  # one in float64 at a time
        one = tuple(of_axis.start + offset for of_axis, offset in zip(box, place))
        merged[place] = piece[place] + delta(a[one], b[one], of_a, of_b, scale)
    return merged


def delta(a: np.ndarray, b: np.ndarray, of_a: Sequence[slice], of_b: Sequence[slice], scale: float) -> np.ndarray:
    """float64: the part of scale A B in these rows of A and columns of B."""
    a, b = a[tuple(of_a)].astype(np.float64), b[(slice(None), *of_b)].astype(np.float64)
    rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    return (scale * (rows @ b.reshape(b.shape[0], -1))).reshape(*a.shape[:-1], *b.shape[1:])


def without_lora(run: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded of a run, with a config that has no adapters, so that its weights are read as they are."""
    return {**run, "config": {**run.get("config", {}), "lora": to_dict(NO_LORA)}}
