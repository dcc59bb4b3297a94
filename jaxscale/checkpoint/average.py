"""The mean of the weights of several steps, written as a checkpoint of weights alone, a piece at a time.

It is kept as its sources are: the same arrays in the same pieces, `_METADATA` with the weights' entries of the newest
source, and a sealed record. What was averaged stands in the record and in config.json as "average".
"""

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore

from jaxscale.checkpoint import array_store, retention
from jaxscale.checkpoint.array_store import Arrays, Output, boxes, layout_of, read_ahead
from jaxscale.checkpoint.fingerprint import host_fingerprint
from jaxscale.checkpoint.folders import COMMITTED, mark_committed, sync_tree
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.record import RECORD, read_optional, require_record, seal
from jaxscale.checkpoint.storage_errors import short_reason
from jaxscale.checkpoint.verify import list_all_others, require_reachable, verify_folder
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.faults import crash_point

GROWING = "averaging-"  # never a number, so it never counts as a step
WEIGHTS = "params"  # the name under which whoever starts from the average looks for it


@dataclasses.dataclass(frozen=True)
class Averaged:
    """What was written."""

    step: int
    num_leaves: int
    num_bytes: int


def average_steps(
    source: Checkpoints,
    steps: Sequence[int],
    workdir: Any,
    what: str = WEIGHTS,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Averaged:
    """Writes the mean of the leaves below `what` into a new run folder, as the step of the newest source.

    The sum is taken in float64 in the order of the steps and rounded once to the leaves' own dtype. Leaves of whole
    numbers must be equal in all steps. Sources are checked as they are read, the result once it is written.
    Args: what: 'params', or another part of the state with the same leaves, such as averages kept by training.
    Raises: BadInput if the steps do not fit together or the folder is in use; Stop (CHECKPOINT_CORRUPT) naming the
    leaf of a damaged source, (STORAGE) if it cannot be written.
    """
    steps = sorted(set(steps))
    records = {step: source_record(source, step) for step in steps}
    leaves = common_leaves(records, what)
    destination = prepare_folder(workdir)
    final = destination / str(steps[-1])
    growing = final if paths.is_remote(destination) else destination / f"{GROWING}{steps[-1]}"
    try:
        clear(growing)
        marks = write_means(source, records, leaves, what, growing, on_bytes)
        record = make_record(source, records, leaves, marks, what)
        write_texts(source.directory / str(steps[-1]), growing, record, leaves, what)
        made = record["run"]["average"]
        finish(growing, final, destination, lambda: write_config(source.directory.parent, destination.parent, made))
    except OSError as error:
        raise Stop(Exit.STORAGE, f"{growing} cannot be written: {error.strerror or error}; run it again") from None
    num_bytes = sum(leaf_bytes(described) for described in leaves.values())
    return Averaged(steps[-1], len(leaves), num_bytes)


def finish(growing: Any, final: Any, destination: Any, write_config: Callable[[], None]) -> None:
    """Checks what was written, writes config.json, and gives the step its name. Raises Stop (STORAGE)."""
    list_all_others(growing)
    if damages := verify_folder(growing, finished=False).damages:
        raise Stop(Exit.STORAGE, f"what was written to {growing} reads back otherwise: {damages[0]}; run it again")
    write_config()
    crash_point("average.commit")
    mark_committed(growing)
    if not paths.is_remote(final):
        sync_tree(growing)
        os.rename(growing, final)
        paths.sync_folder(destination)


def source_record(source: Checkpoints, step: int) -> dict[str, Any]:
    """The record of a step. Raises Stop (CHECKPOINT_CORRUPT) if it changed."""
    try:
        return require_record(source.directory / str(step))
    except BadInput as error:
        raise Stop(Exit.CHECKPOINT_CORRUPT, f"step {step} cannot be read: {error}; leave it out") from None


def common_leaves(records: Mapping[int, Mapping[str, Any]], what: str) -> dict[str, list]:
    """{'w' for 'params/w': [shape, dtype]}. Raises BadInput if steps differ in them, or have none."""
    newest = max(records)
    below = {step: weights_of(record, what) for step, record in records.items()}
    if not below[newest]:
        tops = sorted({name.partition("/")[0] for name in records[newest]["leaves"]})
        raise BadInput(f"--what={what}: step {newest} has no such leaves; it has {', '.join(tops)}")
    for step, leaves in below.items():
        if wrong := sorted(name for name in leaves | below[newest] if leaves.get(name) != below[newest].get(name)):
            raise BadInput(
                f"steps {step} and {newest} differ in the shape or dtype of {what}/{wrong[0]}; leave one out"
            )
    return below[newest]


def weights_of(record: Mapping[str, Any], what: str) -> dict[str, list]:
    """The leaves below `what` by their name there, with shape and dtype."""
    prefix = f"{what}/"
    return {
        name.removeprefix(prefix): described[:2]
        for name, described in record["leaves"].items()
        if name.startswith(prefix)
    }


def leaf_bytes(described: Sequence[Any]) -> int:
    """What an array of this shape and dtype takes."""
    shape, dtype = described
    return int(np.prod(shape, dtype=np.int64)) * tensorstore.dtype(dtype).numpy_dtype.itemsize


def prepare_folder(workdir: Any, made: str = "average", own: Sequence[str] = ()) -> Any:
    """The folder of checkpoints of a new run. Raises BadInput if anything but an unfinished one is there.

    made: under which config.json tells what it is. own: other names that one which was killed may have left.
    """
    folder = paths.as_path(workdir)
    folder = folder if paths.is_remote(workdir) else folder.absolute()
    if used := what_is_in(folder, made, own):
        raise BadInput(f"--to={workdir} is in use, it holds {used}; name a new folder")
    paths.make_run_dir(folder)
    paths.make_run_dir(folder / "checkpoints")
    return folder / "checkpoints"


def what_is_in(folder: Any, made: str, own: Sequence[str]) -> str | None:
    """The name of something in the folder that one which was killed would not have left there."""
    checkpoints, config = folder / "checkpoints", folder / "config.json"
    if not folder.exists():
        return None
    if others := sorted({path.name for path in folder.iterdir()} - {checkpoints.name, config.name, *own}):
        return others[0]
    if config.exists() and made not in read_optional(config):
        return config.name
    for path in checkpoints.iterdir() if checkpoints.exists() else ():
        unfinished = path.name.isdecimal() if paths.is_remote(path) else path.name.startswith(GROWING)
        if not unfinished or (path / COMMITTED).exists() and path.name.isdecimal():
            return f"{checkpoints.name}/{path.name}"
    return None


def clear(folder: Any) -> None:
    """Removes what an average that was killed left behind."""
    if folder.exists():
        folder.rmtree() if paths.is_remote(folder) else shutil.rmtree(folder)
    if not paths.is_remote(folder):
        paths.make_private(folder)


def write_means(
    source: Checkpoints,
    records: Mapping[int, Mapping[str, Any]],
    leaves: Mapping[str, list],
    what: str,
    folder: Any,
    on_bytes: Callable[[int, int], None],
) -> dict[str, int]:
    """{leaf: fingerprint} of the means, which are in the folder. Raises as average_steps does."""
    inputs = {step: Arrays(source.directory / str(step)) for step in records}
    output = Output(folder)
    newest = {name: open_leaf(inputs[max(records)], max(records), f"{what}/{name}") for name in leaves}
    targets = output.create({f"{WEIGHTS}/{name}": layout_of(array) for name, array in newest.items()})
    marks, done, total = {}, 0, sum(leaf_bytes(described) for described in leaves.values())
    for name, target in zip(leaves, targets):
        arrays = {step: open_leaf(inputs[step], step, f"{what}/{name}") for step in records}
        parts = boxes(target)
        pieces = read_ahead((array, box) for box in parts for array in arrays.values())
        seen, marks[name] = dict.fromkeys(records, 0), 0
        for box in parts:
            start = [part.start for part in box]
            mean = Mean()
            for step in records:
                piece = next_piece(pieces, step, f"{what}/{name}")
                seen[step] += host_fingerprint(piece, start=start, shape=target.shape)
                mean.add(piece, f"{what}/{name}")
            value = mean.value(len(records))
            marks[name] += host_fingerprint(value, start=start, shape=target.shape)
            output.write(target, box, value)
            done += value.nbytes
            on_bytes(done, total)
        for step, record in records.items():
            if seen[step] % 2**32 != record["leaves"][f"{what}/{name}"][2]:
                raise damaged(step, f"{what}/{name}", "its bits differ from those that were saved")
        marks[name] %= 2**32
    output.commit()
    return marks


def open_leaf(arrays: Arrays, step: int, name: str) -> tensorstore.TensorStore:
    """The leaf's array. Raises Stop (CHECKPOINT_CORRUPT)."""
    try:
        return arrays.open(name)
    except Exception as error:  # whatever TensorStore makes of spoilt bytes
        require_reachable(error, f"step {step}")
        raise damaged(step, name, short_reason(error)) from None


def next_piece(pieces: Any, step: int, name: str) -> np.ndarray:
    """The next piece. Raises Stop (CHECKPOINT_CORRUPT) if its bytes cannot be read."""
    try:
        return next(pieces)
    except Exception as error:  # whatever TensorStore makes of spoilt bytes
        require_reachable(error, f"step {step}")
        raise damaged(step, name, short_reason(error)) from None


def damaged(step: int, name: str, cause: str) -> Stop:
    """The error for a source that is not what was saved."""
    return Stop(Exit.CHECKPOINT_CORRUPT, f"step {step} is damaged: {name}: {cause}; leave that step out")


class Mean:
    """The sum of one piece over the steps."""

    def __init__(self):
        self.total, self.dtype = None, None

    def add(self, piece: np.ndarray, name: str) -> None:
        """Takes the piece of one more step. Raises BadInput for whole numbers that differ."""
        exact = piece.dtype.kind in "iub"
        if self.total is None:
            self.dtype = piece.dtype
            self.total = piece if exact else piece.astype(np.complex128 if piece.dtype.kind == "c" else np.float64)
        elif not exact:
            self.total += piece
        elif not np.array_equal(self.total, piece):
            raise BadInput(f"{name} is {self.dtype} and not the same in all steps: whole numbers have no mean")

    def value(self, count: int) -> np.ndarray:
        """The mean in the dtype of the pieces."""
        if self.total.dtype != self.dtype or self.dtype.kind not in "iub":
            self.total /= count
        return self.total.astype(self.dtype, copy=False)


def make_record(
    source: Checkpoints,
    records: Mapping[int, Mapping[str, Any]],
    leaves: Mapping[str, list],
    marks: Mapping[str, int],
    what: str,
) -> dict[str, Any]:
    """The sealed record of the average: that of the newest source with other leaves, and what was averaged."""
    newest = records[max(records)]
    made = {"of": os.fspath(source.directory.parent), "what": what, "steps": sorted(records)}
    made["records"] = [records[step]["sha256"] for step in sorted(records)]
    content = {key: value for key, value in newest.items() if key != "sha256"}
    content["run"] = newest["run"] | {"average": made}
    content["leaves"] = {f"{WEIGHTS}/{name}": [*described, marks[name]] for name, described in leaves.items()}
    if "metrics" in content:  # nobody has evaluated the average
        content["metrics"] = {}
    return seal(content)


def write_texts(newest: Any, folder: Any, record: Mapping[str, Any], leaves: Mapping[str, list], what: str) -> None:
    """Writes what belongs to a step besides its arrays."""
    tree = paths.read_json(newest / array_store.TREE)
    entries = {}
    for entry in tree["tree_metadata"].values():
        keys = [str(part["key"]) for part in entry["key_metadata"]]
        if "/".join(keys).startswith(f"{what}/") and "/".join(keys).removeprefix(f"{what}/") in leaves:
            renamed = [*WEIGHTS.split("/"), *keys[len(what.split("/")) :]]
            parts = entry["key_metadata"][-len(renamed) :]
            entries[repr(tuple(renamed))] = entry | {
                "key_metadata": [part | {"key": key} for part, key in zip(parts, renamed, strict=True)]
            }
    write_json(folder / array_store.TREE, tree | {"tree_metadata": entries})
    write_json(folder / RECORD, record)
    times, now = read_optional(newest / retention.TIMES), time.time_ns()
    if times:
        times |= {"init_timestamp_nsecs": now, "commit_timestamp_nsecs": now, "metrics": {}}
        write_json(folder / retention.TIMES, times)


def write_json(path: Any, value: Any) -> None:
    """Writes a small file, in a folder that is made if it is not there."""
    if not paths.is_remote(path):
        paths.make_private(path.parent)
    paths.write_json(path, value)


def write_config(run: Any, folder: Any, made: Mapping[str, Any]) -> None:
    """Writes config.json as the run has it, and what was averaged, unless it has none."""
    with contextlib.suppress(FileNotFoundError):
        paths.write_json(folder / "config.json", paths.read_json(run / "config.json") | {"average": made})
