"""The mean of the weights of several steps, written as a checkpoint of weights alone, a piece at a time.

It is kept as its sources are: the same arrays in the same pieces, `_METADATA` with the weights' entries of the newest
source, and a sealed record. What was averaged stands in the record and in config.json as "average". merge.py writes by
the same functions.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore

from jaxscale.checkpoint import array_store
from jaxscale.checkpoint.array_store import Arrays, Box, Output, boxes, layout_of, read_ahead
from jaxscale.checkpoint.fingerprint import host_fingerprint
from jaxscale.checkpoint.folders import COMMITTED, commit, make_anew
from jaxscale.checkpoint.lock_stores import held
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.record import require_step, seal, weight_leaves
from jaxscale.checkpoint.storage_errors import read_optional, short_reason
from jaxscale.checkpoint.verify import list_all_others, require_reachable, verify_folder
from jaxscale.checkpoint.write import describe
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.faults import crash_point

GROWING = "averaging-"  # never a number, so it never counts as a step
WEIGHTS = "params"  # the name under which whoever starts from the average looks for it
AVERAGE = "average"  # under which the record and config.json say what was averaged

LEAVE_OUT = "leave it out"

Combine = Callable[[Box, Iterator[np.ndarray]], np.ndarray]  # (box, its piece in each source) -> the piece to write


@dataclasses.dataclass(frozen=True)
class Averaged:
    """What was written."""

    step: int
    num_leaves: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Weights to be computed from steps of a run, and written as the newest of them in a run folder of its own."""

    source: Checkpoints
    records: Mapping[int, Mapping[str, Any]]  # by step
    what: str  # the part of the sources' state that has the leaves, as record.weight_leaves has it
    leaves: Mapping[str, list]  # {'w' for 'params/w': [shape, dtype]}
    combine: Callable[[str], Combine]  # of a leaf
    made_as: str  # the name under which config.json says what was made
    record: Mapping[str, Any]  # to be sealed with the leaves that are written
    config: Mapping[str, Any] | None  # config.json; None: none is written
    copied: tuple[str, ...] = ()  # folders of the run that are copied, if it has them

    @property
    def step(self) -> int:
        """The newest source."""
        return max(self.records)

    @property
    def num_bytes(self) -> int:
        """What the arrays take."""
        return sum(leaf_bytes(described) for described in self.leaves.values())


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
    Args: what: 'params', or another part of the state with the same leaves, such as averages kept by training: what
    was frozen has none, and the mean of the parameters stands for it.
    Raises: BadInput if the steps do not fit together or the folder is in use; Stop (CHECKPOINT_CORRUPT) naming the
    leaf of a damaged source, (STORAGE) if it cannot be written.
    """
    records = {step: require_step(source.directory / str(step), LEAVE_OUT) for step in sorted(set(steps))}
    leaves, newest, run = common_leaves(records, what), records[max(records)], source.directory.parent
    made = {"of": os.fspath(run), "what": what, "steps": list(records)}
    made["records"] = [record["sha256"] for record in records.values()]
    record = {**newest, "run": newest["run"] | {AVERAGE: made}}
    if "metrics" in record:  # nobody has evaluated the average
        record["metrics"] = {}
    config = run / "config.json"
    config = paths.read_json(config) | {AVERAGE: made} if config.exists() else None
    combine = lambda name: lambda box, pieces: mean(pieces, f"{what}/{name}")
    return write_weights(Recipe(source, records, what, leaves, combine, AVERAGE, record, config), workdir, on_bytes)


def mean(pieces: Iterator[np.ndarray], name: str) -> np.ndarray:
    """The mean in the dtype of the pieces, of which one at a time is read. Raises BadInput for integers that differ."""
    total, dtype, exact, count = None, None, True, 0
    for count, piece in enumerate(pieces, 1):
        dtype, exact = piece.dtype, piece.dtype.kind in "iub"
        if total is None:
            total = piece if exact else piece.astype(np.complex128 if piece.dtype.kind == "c" else np.float64)
        elif not exact:
            total += piece
        elif not np.array_equal(total, piece):
            raise BadInput(f"{name} is {piece.dtype} and not the same in all steps: whole numbers have no mean")
    assert total is not None and dtype is not None, "there is a piece of each step"
    if not exact:
        total /= count
    return total.astype(dtype, copy=False)


def write_weights(recipe: Recipe, workdir: Any, on_bytes: Callable[[int, int], None]) -> Averaged:
    """Writes the run folder: the arrays, which are checked, config.json, and last the step's name.

    Raises as average_steps does.
    """
    run, destination = recipe.source.directory.parent, prepare_folder(workdir, recipe.made_as, recipe.copied)
    final = destination / str(recipe.step)
    growing = final if paths.is_remote(destination) else destination / f"{GROWING}{recipe.step}"
    try:
        with held(destination, "writing into"):
            make_anew(growing)
            marks = write_leaves(recipe, growing, on_bytes)
            write_texts(recipe, growing, final, marks)
            for name in recipe.copied:
                copy_folder(run / name, destination.parent / name)
            list_all_others(growing)
            if damages := verify_folder(growing, finished=False).damages:
                raise Stop(
                    Exit.STORAGE, f"what was written to {growing} reads back otherwise: {damages[0]}; run it again"
                )
            if recipe.config is not None:
                paths.write_json(destination.parent / "config.json", recipe.config)
            crash_point("average.commit")
            commit(growing, final)
    except OSError as error:
        raise Stop(Exit.STORAGE, f"{growing} cannot be written: {error.strerror or error}; run it again") from None
    return Averaged(recipe.step, len(recipe.leaves), recipe.num_bytes)


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
    """The leaves of a part of the state by their name there, with shape and dtype."""
    leaves = record["leaves"]
    return {name: leaves[leaf][:2] for name, leaf in weight_leaves(leaves, what).items()}


def leaf_bytes(described: Sequence[Any]) -> int:
    """What an array of this shape and dtype takes."""
    shape, dtype = described
    return int(np.prod(shape, dtype=np.int64)) * tensorstore.dtype(dtype).numpy_dtype.itemsize


def prepare_folder(workdir: Any, made: str, own: Sequence[str]) -> Any:
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


def copy_folder(source: Any, target: Any) -> None:
    """Copies the files of a folder, if it is there."""
    if source.exists():
        paths.make_run_dir(target)
        for path in source.iterdir():
            (target / path.name).write_bytes(path.read_bytes())


def write_leaves(recipe: Recipe, folder: Any, on_bytes: Callable[[int, int], None]) -> dict[str, int]:
    """{leaf: fingerprint} of the combined leaves, which are in the folder. Raises as average_steps does."""
    inputs = {step: Arrays(recipe.source.directory / str(step)) for step in recipe.records}
    named = {step: weight_leaves(record["leaves"], recipe.what) for step, record in recipe.records.items()}
    newest = {name: open_leaf(inputs[recipe.step], recipe.step, named[recipe.step][name]) for name in recipe.leaves}
    output = Output(folder)
    targets = output.create({f"{WEIGHTS}/{name}": layout_of(array) for name, array in newest.items()})
    marks, done, total = {}, 0, recipe.num_bytes
    for name, target in zip(newest, targets):
        arrays = {step: open_leaf(inputs[step], step, leaves[name]) for step, leaves in named.items()}
        combine, parts = recipe.combine(name), boxes(target)
        pieces = read_ahead((array, box) for box in parts for array in arrays.values())
        seen, marks[name] = dict.fromkeys(recipe.records, 0), 0
        for box in parts:
            place = dict(start=[part.start for part in box], shape=target.shape)
            value = combine(box, fingerprinted(pieces, seen, named[recipe.step][name], place))
            marks[name] = (marks[name] + host_fingerprint(value, **place)) % 2**32
            output.write(target, box, value)
            done += value.nbytes
            on_bytes(done, total)
        for step, record in recipe.records.items():
            check_bits(seen[step], record, step, named[step][name])
    output.commit()
    return marks


def fingerprinted(
    pieces: Iterator[np.ndarray], sums: dict[int, int], name: str, place: Mapping[str, Any]
) -> Iterator[np.ndarray]:
    """Yields the piece of each step; its fingerprint at this place is added to the step's sum."""
    for step in sums:
        piece = read_source(lambda: next(pieces), step, name)
        sums[step] += host_fingerprint(piece, **place)
        yield piece


def open_leaf(arrays: Arrays, step: int, name: str) -> tensorstore.TensorStore:
    """The leaf's array. Raises Stop (CHECKPOINT_CORRUPT)."""
    return read_source(lambda: arrays.open(name), step, name)


def read_source(read: Callable[[], Any], step: int, name: str) -> Any:
    """What read() gives. Raises Stop: CHECKPOINT_CORRUPT, or STORAGE where the storage does not answer."""
    try:
        return read()
    except Exception as error:  # whatever TensorStore makes of spoilt bytes
        require_reachable(error, f"step {step}")
        raise damaged(step, name, short_reason(error)) from None


def check_bits(found: int, record: Mapping[str, Any], step: int, name: str) -> None:
    """Raises Stop (CHECKPOINT_CORRUPT) if a leaf's fingerprint is not that of its record."""
    if found % 2**32 != record["leaves"][name][2]:
        raise damaged(step, name, "its bits differ from those that were saved")


def damaged(step: int, name: str, cause: str) -> Stop:
    """The error for a source that is not what was saved."""
    return Stop(Exit.CHECKPOINT_CORRUPT, f"step {step} is damaged: {name}: {cause}; leave that step out")


def write_texts(recipe: Recipe, folder: Any, final: Any, marks: Mapping[str, int]) -> None:
    """Writes what belongs to a step besides its arrays, into the folder that will be `final`."""
    newest = recipe.source.directory / str(recipe.step)
    named = weight_leaves(recipe.records[recipe.step]["leaves"], recipe.what)
    sources = {named[name]: name.count("/") + 1 for name in recipe.leaves}  # and how many keys the name has
    tree = paths.read_json(newest / array_store.TREE)
    entries = {}
    for entry in tree["tree_metadata"].values():
        keys = [str(part["key"]) for part in entry["key_metadata"]]
        if count := sources.get("/".join(keys)):
            renamed = [WEIGHTS, *keys[-count:]]
            parts = entry["key_metadata"][-len(renamed) :]
            entries[repr(tuple(renamed))] = entry | {
                "key_metadata": [part | {"key": key} for part, key in zip(parts, renamed, strict=True)]
            }
    paths.write_json(folder / array_store.TREE, tree | {"tree_metadata": entries})
    leaves = {f"{WEIGHTS}/{name}": [*described, marks[name]] for name, described in recipe.leaves.items()}
    content = {key: value for key, value in recipe.record.items() if key != "sha256"}
    describe(folder, seal(content | {"leaves": leaves}), final, time.time())
