"""Import of Hugging Face tensors as step 0 of a new work folder, with one tensor in memory at a time.

As in training, the step is atomic: arrays, record and file lists are written to an unfinished folder, and one rename
commits the folder. A killed conversion resumes from its journal.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.runtime.checkpoint import array_store, write
from jaxscale.runtime.checkpoint.array_store import StepArrayWriter, grid_boxes, orbax_array_format, orbax_tree_metadata
from jaxscale.runtime.checkpoint.fingerprint import host_fingerprint
from jaxscale.runtime.checkpoint.folders import COMMITTED, commit, recreate_folder, remove_tree, unfinished_folder
from jaxscale.runtime.checkpoint.record import seal
from jaxscale.runtime.checkpoint.storage_errors import stop_if_unwritable
from jaxscale.runtime.checkpoint.verify import DamagedCheckpoint, verify_leaves, write_main_list
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop
from jaxscale.system.faults import crash_point
from jaxscale.tools.interop import chunking
from jaxscale.tools.interop.families import TensorPair
from jaxscale.tools.interop.journal import Journal, open_journal
from jaxscale.tools.interop.safetensors import DTYPES, Tensor

JOURNAL = "converting.json"
STEP = 0
BFLOAT16 = DTYPES["BF16"]
OnBytes = Callable[[int, int, int], None]  # (bytes done, total bytes, bytes done before this command)


def prepare_workdir(workdir: Any, identity: str) -> tuple[Any, Journal]:
    """Returns (work folder, journal). Raises BadInput if the folder has other files than this conversion's."""
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
    on_bytes: OnBytes,
) -> dict[str, Any]:
    """Writes the tensors as step 0 of the work folder and returns counts.

    Counts: kept_bytes, which an earlier, killed command wrote, and not_finite, the names of tensors with NaN or
    infinity. run: "run" entry of the step's metadata. Raises BadInput if a file does not match its header, and Stop
    (STORAGE) if the folder cannot be written.
    """
    shapes = chunking.array_shapes(pairs)
    total = sum(math.prod(shape) for shape in shapes.values()) * chunking.PARAM_DTYPE.itemsize
    partial, final = unfinished_folder(folder / "checkpoints", STEP), folder / "checkpoints" / str(STEP)
    resumed_bytes = total
    with contextlib.closing(journal):
        if not (final / COMMITTED).exists():
            if not journal.done or not partial.exists():  # the folder may be from a different conversion
                journal.done = {}
                stop_if_unwritable(lambda: recreate_folder(partial), folder)
                try:
                    write.check_room(folder, total)
                except write.NoRoom as error:
                    raise Stop(Exit.STORAGE, f"{folder}: {error}; free disk space, or use a different folder") from None
            resumed_bytes = write_units(partial, journal, pairs, tensors, total, on_bytes)
            marks = journal.fingerprints("marks")
            leaves = {chunking.PARAMS_PREFIX + name: [list(shapes[name]), "float32", marks[name]] for name in shapes}
            try:
                stop_if_unwritable(lambda: finish_step(partial, final, leaves, run), folder)
            except DamagedCheckpoint as damage:
                remove_tree(partial)
                journal.remove()
                reason = f"the data read back differ from the data written: {damage}; run the command again"
                raise Stop(Exit.STORAGE, reason) from None
        journal.remove()
    not_finite = tuple(sorted(name for noted in journal.done.values() for name in noted["odd"]))
    return dict(num_leaves=len(shapes), num_bytes=total, kept_bytes=resumed_bytes, not_finite=not_finite)


def write_units(
    partial: Any,
    journal: Journal,
    pairs: Sequence[TensorPair],
    tensors: Mapping[str, Tensor],
    total: int,
    on_bytes: OnBytes,
) -> int:
    """Writes all units that are not in the journal. Returns the number of bytes that were already written."""
    shapes, chunks = chunking.array_shapes(pairs), chunking.chunk_shapes(pairs)
    output = StepArrayWriter(partial)
    array_format = lambda name: orbax_array_format(shapes[name], chunks[name], chunking.PARAM_DTYPE)
    made = output.create({f"{chunking.PARAMS_PREFIX}{name}": array_format(name) for name in shapes})
    arrays = dict(zip(shapes, made, strict=True))
    done = resumed_bytes = 0
    for part, unit in chunking.plan_units(pairs).items():
        size = sum(math.prod(shape) for pair in unit for shape in pair.leaf_shapes) * chunking.PARAM_DTYPE.itemsize
        done += size
        if part in journal.done:
            resumed_bytes += size
            continue
        marks, odd = write_unit(unit, tensors, output, arrays, chunks)
        journal.pending[part] = {"marks": marks, "odd": odd}
        if output.transaction is None:
            flush(output, journal)
        on_bytes(done, total, resumed_bytes)
    flush(output, journal)
    return resumed_bytes


def flush(output: StepArrayWriter, journal: Journal) -> None:
    """Commits the arrays, then the journal that lists them."""
    output.commit()
    crash_point("convert/written")
    stop_if_unwritable(journal.flush, journal.path.parent)
    crash_point("convert/noted")


def write_unit(
    unit: Sequence[TensorPair],
    tensors: Mapping[str, Tensor],
    output: StepArrayWriter,
    arrays: Mapping[str, Any],
    chunks: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, int], list[str]]:
    """Writes one unit in chunks. Returns ({leaf: partial fingerprint}, names of tensors with NaN or infinity)."""
    marks, finite = {}, np.ones(len(unit), bool)
    first, last = unit[0].place, unit[-1].place
    leading = tuple(slice(begin, end + 1) for begin, end in zip(first, last))
    layers = [pair.to_leaves(tensors[pair.hf_name].read()) for pair in unit]
    for index, name in enumerate(unit[0].leaves):
        leaves = [layer[index] for layer in layers]
        values = np.stack([chunking.contiguous(leaf) for leaf in leaves]) if len(leaves) > 1 else leaves[0]
        total = 0
        for box in grid_boxes(leaves[0].shape, chunks[name][len(leading) :]):
            value, place = to_float32(values[(..., *box)]), (*leading, *box)
            finite &= np.isfinite(value).reshape(len(finite), -1).all(axis=1)
            value = value.reshape([side.stop - side.start for side in place])
            total += host_fingerprint(value, start=[side.start for side in place], shape=arrays[name].shape)
            output.write(arrays[name], place, value)
        marks[name] = total % 2**32
    return marks, [pair.hf_name for pair, is_finite in zip(unit, finite) if not is_finite]


def to_float32(values: np.ndarray) -> np.ndarray:
    """Returns an exact float32 copy of bfloat16, float16 or float32 values."""
    if values.dtype == BFLOAT16:
        words = chunking.contiguous(values.view(np.uint16)).astype(np.uint32)  # the upper half of a float32
        words <<= 16
        return words.view(np.float32)
    return chunking.contiguous(values).astype(np.float32)


def finish_step(partial: Any, final: Any, leaves: Mapping[str, list], run: Mapping[str, Any]) -> None:
    """Writes the metadata, verifies the arrays and commits the step. Raises DamagedCheckpoint if an array differs."""
    began = time.time()
    metadata = orbax_tree_metadata({name: leaf[0] for name, leaf in leaves.items()})
    paths.write_json(partial / array_store.TREE_METADATA, metadata)
    record = seal({"step": STEP, "run": dict(run), "leaves": dict(leaves), "health": "clean", "metrics": {}})
    write.write_step_metadata(partial, record, final, began)
    crash_point("convert/read_back")
    verify_leaves(partial, leaves)
    write_main_list(partial)
    crash_point("convert/commit")
    commit(partial, final)
    crash_point("convert/done")
