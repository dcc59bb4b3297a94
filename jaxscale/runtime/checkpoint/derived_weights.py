"""Writes weights computed from steps of a run: the mean of several steps, or one step with its LoRA adapters merged.

The result is a checkpoint in a new run folder, with the array formats and chunks of the newest source. Its record and
config.json list the sources under "average" or "merged". The sources are verified while they are read, chunk by chunk,
and the result is verified before the commit.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore

from jaxscale.core.models.lora import A, B, is_adapter
from jaxscale.core.models.lora_mup_config import NO_LORA, LoraConfig
from jaxscale.runtime.checkpoint import array_store
from jaxscale.runtime.checkpoint.array_store import ArrayReader, Box, chunk_boxes
from jaxscale.runtime.checkpoint.fingerprint import host_fingerprint
from jaxscale.runtime.checkpoint.folders import COMMITTED, commit, recreate_folder
from jaxscale.runtime.checkpoint.lock_stores import folder_lock
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import require_step, seal, weight_leaves
from jaxscale.runtime.checkpoint.storage_errors import read_optional, short_reason
from jaxscale.runtime.checkpoint.verify import leaf_bytes, require_reachable, verify_folder, write_main_list
from jaxscale.runtime.checkpoint.write import write_step_metadata
from jaxscale.schema import from_dict, to_dict
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.faults import crash_point

UNFINISHED_PREFIX = "averaging-"  # prefix of the unfinished folder; with this prefix the folder is not listed as a step
WEIGHTS = "params"  # group of the written leaves
AVERAGE, MERGED = "average", "merged"  # keys of the sources in the record and config.json
TOKENIZER = "tokenizer"  # subfolder of a work folder with the tokenizer's files
LEAVE_OUT = "leave it out"
DAMAGED = "step {} is damaged: {}: {}; exclude that step"

Combine = Callable[[Box, Iterator[np.ndarray]], np.ndarray]  # (box, values of the box in each source) -> value to write


@dataclasses.dataclass(frozen=True)
class WrittenWeights:
    """The step, number of leaves and number of bytes that were written."""

    step: int
    num_leaves: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class DerivedWeights:
    """Weights computed from steps of a run, and written to a new run folder under the number of the newest step."""

    source: Checkpoints
    records: Mapping[int, Mapping[str, Any]]  # records of the source steps, by step
    what: str  # group of the sources' leaves, such as 'params' or 'ema'
    leaves: Mapping[str, list]  # {'w' for 'params/w': [shape, dtype]}
    combine: Callable[[str], Combine]  # (name of a leaf) -> function that computes the leaf
    sources_key: str  # key of the sources in config.json
    record: Mapping[str, Any]  # record to write, without the leaves
    config: Mapping[str, Any] | None  # content of config.json; None: not written
    copied: tuple[str, ...] = ()  # subfolders of the run folder to copy if they exist

    @property
    def step(self) -> int:
        """Newest source step."""
        return max(self.records)

    @property
    def num_bytes(self) -> int:
        """Size of the written arrays in bytes."""
        return sum(leaf_bytes(*described) for described in self.leaves.values())


def average_steps(
    source: Checkpoints,
    steps: Sequence[int],
    workdir: Any,
    what: str = WEIGHTS,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> WrittenWeights:
    """Writes the mean weights of several steps to a new run folder, under the number of the newest step.

    The mean is computed in float64 and rounded once to the leaf's dtype. Integer leaves must be equal in all steps.
    what: 'params', or 'ema' for the mean of the moving averages. For frozen parameters, which have no moving average,
    'ema' uses the parameter values. on_bytes: called with (bytes written, total bytes).
    Raises: BadInput if the steps do not match or the folder is in use, Stop (CHECKPOINT_CORRUPT) if a source is
    damaged, Stop (STORAGE) if the result cannot be written.
    """
    records = {step: require_step(source.directory / str(step), LEAVE_OUT) for step in sorted(set(steps))}
    leaves, newest, run = common_leaves(records, what), records[max(records)], source.directory.parent
    sources = {"of": os.fspath(run), "what": what, "steps": list(records)}
    sources["records"] = [record["sha256"] for record in records.values()]
    record = {**newest, "run": newest["run"] | {AVERAGE: sources}}
    if "metrics" in record:  # the average has not been evaluated
        record["metrics"] = {}
    config = run / "config.json"
    config = paths.read_json(config) | {AVERAGE: sources} if config.exists() else None
    combine = lambda name: lambda box, pieces: mean(pieces, f"{what}/{name}")
    recipe = DerivedWeights(source, records, what, leaves, combine, AVERAGE, record, config)
    return write_weights(recipe, workdir, on_bytes)


def mean(pieces: Iterator[np.ndarray], name: str) -> np.ndarray:
    """Returns the mean of the pieces in their dtype. Raises BadInput if integer pieces differ."""
    total, dtype, exact, count = None, None, True, 0
    for count, piece in enumerate(pieces, 1):
        dtype, exact = piece.dtype, piece.dtype.kind in "iub"
        if total is None:
            total = piece if exact else piece.astype(np.complex128 if piece.dtype.kind == "c" else np.float64)
        elif not exact:
            total += piece
        elif not np.array_equal(total, piece):
            raise BadInput(f"{name} ({piece.dtype}) cannot be averaged and must be equal in all steps; use other steps")
    assert total is not None and dtype is not None, "there is a piece of each step"
    if not exact:
        total /= count
    return total.astype(dtype, copy=False)


def merge_lora(
    source: Checkpoints,
    step: int,
    workdir: Any,
    what: str = WEIGHTS,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> WrittenWeights:
    """Writes a step with merged LoRA adapters to a new run folder, whose config has no adapters.

    The merged weights W + scale A B are computed in float64 and rounded once.
    what: 'params', or 'ema' to merge the moving average of the adapters. on_bytes: called with (bytes written, total).
    Raises: BadInput if the run has no adapters or the folder is in use, Stop (CHECKPOINT_CORRUPT) if the step is
    damaged, Stop (STORAGE) if the result cannot be written.
    """
    folder, run = source.directory / str(step), source.directory.parent
    record = require_step(folder, LEAVE_OUT)
    lora = from_dict(LoraConfig, record["run"].get("config", {}).get("lora") or {}, f"{folder}: lora")
    adapters = {name: leaf for name, leaf in weight_leaves(record["leaves"], what).items() if is_adapter(name)}
    if not lora.on or not adapters:
        raise BadInput(f"step {step} has no LoRA adapters in {what}; choose a run with lora.rank above 0")
    leaves = {name: found for name, found in weight_formats(record, WEIGHTS).items() if not is_adapter(name)}
    sources = {"of": os.fspath(run), "what": what, "step": step, "record": record["sha256"], "lora": to_dict(lora)}
    arrays = ArrayReader(folder)

    def read_whole(leaf: str) -> np.ndarray:
        value = read_source(open_leaf(arrays, step, leaf).read().result, step, leaf)
        check_fingerprint(host_fingerprint(value), record, step, leaf)
        return value

    def combine(name: str) -> Combine:
        if f"{name}{A}" not in adapters:
            return lambda box, pieces: next(pieces)
        a, b = (read_whole(adapters[f"{name}{ending}"]) for ending in (A, B))
        return lambda box, pieces: with_adapter(next(pieces), box, a, b, lora.scale)

    recipe = DerivedWeights(
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


def with_adapter(piece: np.ndarray, box: Box, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Returns one box of W + scale A B in the dtype of W. piece: the values of W in the box.

    W may have leading axes for layers and experts. A and B have the same leading axes.
    """
    stacked = a.ndim + b.ndim - piece.ndim - 2
    count = a.ndim - stacked - 1
    a_slices, b_slices = box[stacked : stacked + count], box[stacked + count :]
    merged = np.empty_like(piece)
    for index in np.ndindex(*piece.shape[:stacked]):  # converts only one matrix at a time to float64
        matrix = tuple(part.start + offset for part, offset in zip(box, index))
        rows, columns = a[matrix][a_slices].astype(np.float64), b[matrix][:, *b_slices].astype(np.float64)
        merged[index] = piece[index] + scale * np.tensordot(rows, columns, axes=1)
    return merged


def without_lora(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `run` data of a record with LoRA disabled in its config."""
    return {**run, "config": {**run.get("config", {}), "lora": to_dict(NO_LORA)}}


def write_weights(recipe: DerivedWeights, workdir: Any, on_bytes: Callable[[int, int], None]) -> WrittenWeights:
    """Writes and verifies the new run folder, and commits the step. Raises the errors of average_steps."""
    run, destination = recipe.source.directory.parent, prepare_folder(workdir, recipe.sources_key, recipe.copied)
    final = destination / str(recipe.step)
    unfinished = final if paths.is_remote(destination) else destination / f"{UNFINISHED_PREFIX}{recipe.step}"
    try:
        with folder_lock(destination, "writing into"):
            recreate_folder(unfinished)
            fingerprints = write_leaves(recipe, unfinished, on_bytes)
            write_metadata(recipe, unfinished, final, fingerprints)
            for name in recipe.copied:
                if (run / name).exists():
                    paths.make_run_dir(destination.parent / name)
                    for path in (run / name).iterdir():
                        (destination.parent / name / path.name).write_bytes(path.read_bytes())
            write_main_list(unfinished)
            if damages := verify_folder(unfinished, finished=False).damages:
                raise Stop(
                    Exit.STORAGE, f"{unfinished} differs from what was written: {damages[0]}; check the disk and retry"
                )
            if recipe.config is not None:
                paths.write_json(destination.parent / "config.json", recipe.config)
            crash_point("average.commit")
            commit(unfinished, final)
    except OSError as error:
        raise Stop(
            Exit.STORAGE, f"{unfinished} cannot be written: {error.strerror or error}; fix this and retry the command"
        ) from None
    return WrittenWeights(recipe.step, len(recipe.leaves), recipe.num_bytes)


def common_leaves(records: Mapping[int, Mapping[str, Any]], what: str) -> dict[str, list]:
    """Same as weight_formats() for several steps. Raises BadInput if the steps differ or have no leaves."""
    newest = max(records)
    below = {step: weight_formats(record, what) for step, record in records.items()}
    if not below[newest]:
        tops = sorted({name.partition("/")[0] for name in records[newest]["leaves"]})
        raise BadInput(f"--what={what}: step {newest} contains only {', '.join(tops)}; use --what=params")
    for step, leaves in below.items():
        if wrong := sorted(name for name in leaves | below[newest] if leaves.get(name) != below[newest].get(name)):
            raise BadInput(
                f"steps {step} and {newest} differ in the shape or dtype of {what}/{wrong[0]}; exclude one of them"
            )
    return below[newest]


def weight_formats(record: Mapping[str, Any], what: str) -> dict[str, list]:
    """Returns {name: [shape, dtype]} of the leaves in the group `what`. Names exclude the group: 'w' for 'params/w'."""
    leaves = record["leaves"]
    return {name: leaves[leaf][:2] for name, leaf in weight_leaves(leaves, what).items()}


def prepare_folder(workdir: Any, sources_key: str, copied: Sequence[str]) -> Any:
    """Makes and returns the checkpoint folder of a new run. Raises BadInput if the run folder has unrelated files."""
    folder = paths.absolute(workdir)
    if used := foreign_entry(folder, sources_key, copied):
        raise BadInput(f"--to={workdir} is not empty: it contains {used}; choose a new folder")
    paths.make_run_dir(folder)
    paths.make_run_dir(folder / "checkpoints")
    return folder / "checkpoints"


def foreign_entry(folder: Any, sources_key: str, copied: Sequence[str]) -> str | None:
    """Returns the name of a folder entry that an interrupted attempt did not write, or None."""
    checkpoints, config = folder / "checkpoints", folder / "config.json"
    if not folder.exists():
        return None
    if others := sorted({path.name for path in folder.iterdir()} - {checkpoints.name, config.name, *copied}):
        return others[0]
    if config.exists() and sources_key not in read_optional(config):
        return config.name
    for path in checkpoints.iterdir() if checkpoints.exists() else ():
        unfinished = path.name.isdecimal() if paths.is_remote(path) else path.name.startswith(UNFINISHED_PREFIX)
        if not unfinished or (path / COMMITTED).exists() and path.name.isdecimal():
            return f"{checkpoints.name}/{path.name}"
    return None


def write_leaves(recipe: DerivedWeights, folder: Any, on_bytes: Callable[[int, int], None]) -> dict[str, int]:
    """Writes the combined leaves; returns {leaf: fingerprint}. Raises the errors of average_steps."""
    inputs = {step: ArrayReader(recipe.source.directory / str(step)) for step in recipe.records}
    named = {step: weight_leaves(record["leaves"], recipe.what) for step, record in recipe.records.items()}
    newest = {name: open_leaf(inputs[recipe.step], recipe.step, named[recipe.step][name]) for name in recipe.leaves}
    output = array_store.StepArrayWriter(folder)
    targets = output.create({f"{WEIGHTS}/{name}": array_store.array_format(array) for name, array in newest.items()})
    fingerprints, done, total = {}, 0, recipe.num_bytes
    for name, target in zip(newest, targets):
        arrays = {step: open_leaf(inputs[step], step, leaves[name]) for step, leaves in named.items()}
        combine, parts = recipe.combine(name), chunk_boxes(target)
        pieces = array_store.read_ahead((array, box) for box in parts for array in arrays.values())
        sums, fingerprints[name] = dict.fromkeys(recipe.records, 0), 0
        for box in parts:
            position = dict(start=[part.start for part in box], shape=target.shape)
            value = combine(box, add_fingerprints(pieces, sums, named[recipe.step][name], position))
            fingerprints[name] = (fingerprints[name] + host_fingerprint(value, **position)) % 2**32
            output.write(target, box, value)
            done += value.nbytes
            on_bytes(done, total)
        for step, record in recipe.records.items():
            check_fingerprint(sums[step], record, step, named[step][name])
    output.commit()
    return fingerprints


def add_fingerprints(
    pieces: Iterator[np.ndarray], sums: dict[int, int], name: str, position: Mapping[str, Any]
) -> Iterator[np.ndarray]:
    """Yields the piece of each step, and adds the fingerprint of the piece to `sums[step]`."""
    for step in sums:
        piece = read_source(lambda: next(pieces), step, name)
        sums[step] += host_fingerprint(piece, **position)
        yield piece


def open_leaf(arrays: ArrayReader, step: int, name: str) -> tensorstore.TensorStore:
    """Returns the array of a leaf. Raises Stop (CHECKPOINT_CORRUPT)."""
    return read_source(lambda: arrays.open(name), step, name)


def read_source(read: Callable[[], Any], step: int, name: str) -> Any:
    """Returns read(). On errors raises Stop: STORAGE if the storage cannot be reached, else CHECKPOINT_CORRUPT."""
    try:
        return read()
    except Exception as error:  # TensorStore raises several types for corrupt bytes
        require_reachable(error, f"step {step}")
        raise Stop(Exit.CHECKPOINT_CORRUPT, DAMAGED.format(step, name, short_reason(error))) from None


def check_fingerprint(found: int, record: Mapping[str, Any], step: int, name: str) -> None:
    """Raises Stop (CHECKPOINT_CORRUPT) if a leaf's fingerprint differs from its record."""
    if found % 2**32 != record["leaves"][name][2]:
        raise Stop(Exit.CHECKPOINT_CORRUPT, DAMAGED.format(step, name, array_store.DIFFERS))


def write_metadata(recipe: DerivedWeights, folder: Any, final: Any, fingerprints: Mapping[str, int]) -> None:
    """Writes all files of a step except the arrays into `folder`, which will be renamed to `final`."""
    newest = recipe.source.directory / str(recipe.step)
    named = weight_leaves(recipe.records[recipe.step]["leaves"], recipe.what)
    sources = {named[name]: name.count("/") + 1 for name in recipe.leaves}  # leaf -> number of keys in its name
    tree = paths.read_json(newest / array_store.TREE_METADATA)
    entries = {}
    for entry in tree["tree_metadata"].values():
        keys = [str(part["key"]) for part in entry["key_metadata"]]
        if count := sources.get("/".join(keys)):
            renamed = [WEIGHTS, *keys[-count:]]
            parts = entry["key_metadata"][-len(renamed) :]
            entries[repr(tuple(renamed))] = entry | {
                "key_metadata": [part | {"key": key} for part, key in zip(parts, renamed, strict=True)]
            }
    paths.write_json(folder / array_store.TREE_METADATA, tree | {"tree_metadata": entries})
    leaves = {f"{WEIGHTS}/{name}": [*described, fingerprints[name]] for name, described in recipe.leaves.items()}
    content = {key: value for key, value in recipe.record.items() if key != "sha256"}
    write_step_metadata(folder, seal(content | {"leaves": leaves}), final, time.time())
