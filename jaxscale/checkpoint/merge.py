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

from jaxscale.checkpoint.array_store import Arrays, Output, boxes, layout_of, read_ahead
from jaxscale.checkpoint.average import (
    GROWING,
    WEIGHTS,
    Averaged,
    clear,
    damaged,
    finish,
    leaf_bytes,
    next_piece,
    open_leaf,
    prepare_folder,
    source_record,
    weights_of,
    write_texts,
)
from jaxscale.checkpoint.fingerprint import host_fingerprint
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.record import read_optional, seal
from jaxscale.models.config import NO_LORA, LoraConfig
from jaxscale.models.lora import A, B, is_adapter
from jaxscale.schema import from_dict, to_dict
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop

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
    record = source_record(source, step)
    lora = from_dict(
        LoraConfig, record["run"].get("config", {}).get("lora") or {}, f"{source.directory / str(step)}: lora"
    )
    names = {name for name in record["leaves"] if name.startswith(f"{what}/") and is_adapter(name)}
    if not lora.on or not names:
        raise BadInput(f"step {step} has no adapters in {what}; merge_lora is for a run with lora.rank above 0")
    leaves = {name: found for name, found in weights_of(record, WEIGHTS).items() if not is_adapter(name)}
    destination = prepare_folder(workdir, MADE, (TOKENIZER,))
    final = destination / str(step)
    growing = final if paths.is_remote(destination) else destination / f"{GROWING}{step}"
    made = {"of": os.fspath(source.directory.parent), "what": what, "step": step, "record": record["sha256"]}
    made["lora"] = to_dict(lora)
    try:
        clear(growing)
        marks = write_merged(source, step, record, leaves, what, lora.scale, growing, on_bytes)
        write_texts(source.directory / str(step), growing, merged_record(record, leaves, marks, made), leaves, WEIGHTS)
        copy_tokenizer(source.directory.parent, destination.parent)
        config = without_lora(read_optional(source.directory.parent / "config.json")) | {MADE: made}
        finish(growing, final, destination, lambda: paths.write_json(destination.parent / "config.json", config))
    except OSError as error:
        raise Stop(Exit.STORAGE, f"{growing} cannot be written: {error.strerror or error}; run it again") from None
    return Averaged(step, len(leaves), sum(leaf_bytes(found) for found in leaves.values()))


def write_merged(
    source: Checkpoints,
    step: int,
    record: Mapping[str, Any],
    leaves: Mapping[str, list],
    what: str,
    scale: float,
    folder: Any,
    on_bytes: Callable[[int, int], None],
) -> dict[str, int]:
    """{leaf: fingerprint} of the merged weights, which are in the folder."""
    arrays, output = Arrays(source.directory / str(step)), Output(folder)
    opened = {name: open_leaf(arrays, step, f"{WEIGHTS}/{name}") for name in leaves}
    targets = output.create({f"{WEIGHTS}/{name}": layout_of(array) for name, array in opened.items()})
    marks, done, total = {}, 0, sum(leaf_bytes(found) for found in leaves.values())
    for (name, array), target in zip(opened.items(), targets):
        adapter = None
        if f"{what}/{name}{A}" in record["leaves"]:
            adapter = [read_whole(arrays, step, record, f"{what}/{name}{ending}") for ending in (A, B)]
        parts = boxes(target)
        pieces, seen, marks[name] = read_ahead((array, box) for box in parts), 0, 0
        for box in parts:
            start = [part.start for part in box]
            value = next_piece(pieces, step, f"{WEIGHTS}/{name}")
            seen += host_fingerprint(value, start=start, shape=target.shape)
            if adapter is not None:
                value = with_adapter(value, box, *adapter, scale)
            marks[name] += host_fingerprint(value, start=start, shape=target.shape)
            output.write(target, box, value)
            done += value.nbytes
            on_bytes(done, total)
        if seen % 2**32 != record["leaves"][f"{WEIGHTS}/{name}"][2]:
            raise damaged(step, f"{WEIGHTS}/{name}", "its bits differ from those that were saved")
        marks[name] %= 2**32
    output.commit()
    return marks


def read_whole(arrays: Arrays, step: int, record: Mapping[str, Any], name: str) -> np.ndarray:
    """A small leaf, checked."""
    array = open_leaf(arrays, step, name)
    value = next_piece(read_ahead([(array, tuple(slice(0, size) for size in array.shape))]), step, name)
    if host_fingerprint(value, start=[0] * value.ndim, shape=value.shape) % 2**32 != record["leaves"][name][2]:
        raise damaged(step, name, "its bits differ from those that were saved")
    return value


def with_adapter(piece: np.ndarray, box: Sequence[slice], a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """The piece of a matrix, or of a stack of them, that lies in the box, plus scale A B, in the piece's dtype.

    The sizes tell whether there is a stack: A and B share the rank, and the stack's axis if there is one.
    """
    stacked = a.ndim + b.ndim - piece.ndim - 2
    count = a.ndim - stacked - 1
    of_a, of_b = box[stacked : stacked + count], box[stacked + count :]
    if not stacked:
        return (piece + delta(a, b, of_a, of_b, scale)).astype(piece.dtype)
    merged = np.empty_like(piece)
    for place, layer in enumerate(range(box[0].start, box[0].stop)):  # one in float64 at a time
        merged[place] = piece[place] + delta(a[layer], b[layer], of_a, of_b, scale)
    return merged


def delta(a: np.ndarray, b: np.ndarray, of_a: Sequence[slice], of_b: Sequence[slice], scale: float) -> np.ndarray:
    """float64: the part of scale A B in these rows of A and columns of B."""
    a, b = a[tuple(of_a)].astype(np.float64), b[(slice(None), *of_b)].astype(np.float64)
    rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    return (scale * (rows @ b.reshape(b.shape[0], -1))).reshape(*a.shape[:-1], *b.shape[1:])


def merged_record(
    record: Mapping[str, Any], leaves: Mapping[str, list], marks: Mapping[str, int], made: Mapping[str, Any]
) -> dict[str, Any]:
    """The sealed record of the merged weights."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    content["run"] = without_lora(record["run"]) | {MADE: made}
    content["leaves"] = {f"{WEIGHTS}/{name}": [*found, marks[name]] for name, found in leaves.items()}
    return seal(content)


def without_lora(run: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded of a run, with a config that has no adapters, so that its weights are read as they are."""
    return {**run, "config": {**run.get("config", {}), "lora": to_dict(NO_LORA)}}


def copy_tokenizer(run: Any, folder: Any) -> None:
    """Copies the tokenizer's files of a work folder, if it has them."""
    if not (run / TOKENIZER).exists():
        return
    paths.make_run_dir(folder / TOKENIZER)
    for path in (run / TOKENIZER).iterdir():
        (folder / TOKENIZER / path.name).write_bytes(path.read_bytes())
