"""Imports Hugging Face tensors as step 0 of a new work folder, with one tensor in memory at a time.

It is complete or not a step at all: arrays, record and lists of files lie in a folder that counts for nothing until
one act commits it, as when training saves. A killed conversion goes on where its journal says.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.checkpoint import array_store, write
from jaxscale.checkpoint.array_store import StepArrayWriter, grid_boxes, orbax_array_format, orbax_tree_metadata
from jaxscale.checkpoint.fingerprint import host_fingerprint
from jaxscale.checkpoint.folders import COMMITTED, commit, recreate_folder, remove_tree, unfinished_folder
from jaxscale.checkpoint.read_back import DamagedCheckpoint, verify_leaves
from jaxscale.checkpoint.record import seal
from jaxscale.checkpoint.storage_errors import stop_if_unwritable
from jaxscale.checkpoint.verify import write_main_list
from jaxscale.interop.chunking import OURS, PREFIX, array_shapes, chunk_shapes, in_order, plan_units
from jaxscale.interop.families import TensorPair
from jaxscale.interop.journal import Journal, open_journal
from jaxscale.interop.safetensors import DTYPES, Tensor
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop
from jaxscale.system.faults import crash_point

JOURNAL = "converting.json"
STEP = 0
BFLOAT16 = DTYPES["BF16"]
OnBytes = Callable[[int, int, int], None]  # (bytes done, bytes in all, of the done those of an earlier start)


def prepare_workdir(workdir: Any, identity: str) -> tuple[Any, Journal]:
    """(the work folder, its journal). Raises BadInput if anything but this conversion is in the folder."""
    folder = paths.absolute(workdir)
    journal, _ = open_journal(folder, JOURNAL, identity, f"--workdir={workdir}")
    paths.make_run_dir(folder / "checkpoints")
    return folder, journal


def import_tensors(
    folder: Any,
    journal: Journal,
    pairs: Sequence[TensorPair],
    tensors: Mapping[str, Tensor],
    run: Mapping[str, Any],
    on_bytes: OnBytes = lambda done, total, kept: None,
) -> dict[str, Any]:
    """Writes the tensors as step 0 of the work folder and returns what was written.

    kept_bytes are of an earlier, killed start; not_finite are tensors with a NaN or infinity.
    Args: run: what the record says beside the arrays.
    Raises: BadInput for a file that cannot be read as its header says, Stop (STORAGE) if it cannot be written.
    """
    shapes = array_shapes(pairs)
    total = sum(math.prod(shape) for shape in shapes.values()) * OURS.itemsize
    growing, final = unfinished_folder(folder / "checkpoints", STEP), folder / "checkpoints" / str(STEP)
    with contextlib.closing(journal):
        if not (final / COMMITTED).exists():
            if not journal.done or not growing.exists():  # nothing there is known to be of this conversion
                journal.done = {}
                stop_if_unwritable(lambda: recreate_folder(growing), folder)
                check_room(folder, total)
            marks, kept, odd = write_units(growing, journal, pairs, tensors, total, on_bytes)
            leaves = {f"{PREFIX}{name}": [list(shapes[name]), "float32", marks[name]] for name in shapes}
            try:
                stop_if_unwritable(lambda: complete(growing, final, leaves, run), folder)
            except DamagedCheckpoint as damage:
                remove_tree(growing)
                journal.remove()
                raise Stop(Exit.STORAGE, f"what was written reads back otherwise: {damage}; run it again") from None
        else:
            kept, odd = total, odd_ones(journal.done)
        journal.remove()
        return dict(num_leaves=len(shapes), num_bytes=total, kept_bytes=kept, not_finite=tuple(odd))


def check_room(folder: Any, needed: int) -> None:
    """Raises Stop (STORAGE) if the disk has no room."""
    try:
        write.check_room(folder, needed)
    except write.NoRoom as error:
        raise Stop(Exit.STORAGE, f"{folder}: {error}; make room, or name another folder") from None


def write_units(
    growing: Any,
    journal: Journal,
    pairs: Sequence[TensorPair],
    tensors: Mapping[str, Tensor],
    total: int,
    on_bytes: OnBytes,
) -> tuple[dict[str, int], int, list[str]]:
    """({leaf: fingerprint} of what is there then, bytes that were there before, tensors that are not finite)."""
    shapes, chunks = array_shapes(pairs), chunk_shapes(pairs)
    output = StepArrayWriter(growing)
    made = output.create({f"{PREFIX}{name}": orbax_array_format(shapes[name], chunks[name], OURS) for name in shapes})
    arrays = dict(zip(shapes, made, strict=True))
    done = kept = 0
    for part, unit in plan_units(pairs).items():
        size = sum(math.prod(shape) for pair in unit for shape in pair.our_shapes) * OURS.itemsize
        done += size
        if part in journal.done:
            kept += size
            continue
        marks, odd = write_unit(unit, tensors, output, arrays, chunks)
        journal.note(part, {"marks": marks, "odd": odd})
        if output.transaction is None:
            settle(output, journal)
        on_bytes(done, total, kept)
    settle(output, journal)
    return journal.fingerprints("marks"), kept, odd_ones(journal.done)


def settle(output: StepArrayWriter, journal: Journal) -> None:
    """What was written and noted so far is safe."""
    output.commit()
    crash_point("convert/written")
    stop_if_unwritable(journal.settle, journal.path.parent)
    crash_point("convert/noted")


def odd_ones(done: Mapping[str, Any]) -> list[str]:
    """The tensors with a NaN or infinity, by the journal."""
    return sorted(name for noted in done.values() for name in noted["odd"])


def write_unit(
    unit: Sequence[TensorPair],
    tensors: Mapping[str, Tensor],
    output: StepArrayWriter,
    arrays: Mapping[str, Any],
    chunks: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, int], list[str]]:
    """({leaf: what these layers and experts add to its fingerprint}, tensors that are not finite).

    A tensor with a unit of its own is written piece by piece, and given up on return: the only large one.
    """
    marks, finite = {}, np.ones(len(unit), bool)
    first, last = unit[0].place, unit[-1].place
    lead = tuple(slice(begin, end + 1) for begin, end in zip(first, last))
    layers = [pair.to_ours(tensors[pair.theirs].read()) for pair in unit]
    for index, name in enumerate(unit[0].ours):
        leaves = [layer[index] for layer in layers]
        values = np.stack([in_order(leaf) for leaf in leaves]) if len(leaves) > 1 else leaves[0]
        total = 0
        for box in grid_boxes(leaves[0].shape, chunks[name][len(lead) :]):
            value, place = widened(values[(..., *box)]), (*lead, *box)
            finite &= np.isfinite(value).reshape(len(finite), -1).all(axis=1)
            value = value.reshape([side.stop - side.start for side in place])
            total += host_fingerprint(value, start=[side.start for side in place], shape=arrays[name].shape)
            output.write(arrays[name], place, value)
        marks[name] = total % 2**32
    return marks, [pair.theirs for pair, is_finite in zip(unit, finite) if not is_finite]


def widened(values: np.ndarray) -> np.ndarray:
    """The values as float32 in memory of their own, exactly: bfloat16 and float16 are among them."""
    if values.dtype == BFLOAT16:
        words = in_order(values.view(np.uint16)).astype(np.uint32)  # the upper half of a float32
        words <<= 16
        return words.view(np.float32)
    return in_order(values).astype(np.float32)


def complete(growing: Any, final: Any, leaves: Mapping[str, list], run: Mapping[str, Any]) -> None:
    """Writes what belongs to a step beside its arrays, reads the arrays back, and makes it count.

    Raises: DamagedCheckpoint if an array is not what was written.
    """
    began = time.time()
    paths.write_json(
        growing / array_store.TREE_METADATA, orbax_tree_metadata({name: leaf[0] for name, leaf in leaves.items()})
    )
    record = seal({"step": STEP, "run": dict(run), "leaves": dict(leaves), "health": "clean", "metrics": {}})
    write.write_step_metadata(growing, record, final, began)
    crash_point("convert/read_back")
    verify_leaves(growing, leaves)
    write_main_list(growing)
    crash_point("convert/commit")
    commit(growing, final)
    crash_point("convert/done")
