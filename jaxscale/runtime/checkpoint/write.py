"""Writes one step to storage: arrays with Orbax's array handler, all other files directly, and one final commit.

Orbax's manager and checkpointer are not used, because they list folders in the calling thread, wait in barriers that
hide the cause of a failure, and do not sync files or the rename. The array handler has no barriers. Orbax can read the
written files.
"""

import contextlib
import errno
import functools
import json
import logging
import os
import pathlib
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxscale import units
from jaxscale.runtime.checkpoint import folders, verify
from jaxscale.runtime.checkpoint.folders import sync_tree
from jaxscale.runtime.checkpoint.record import LAST_GOOD, RECORD, nest, read_record
from jaxscale.runtime.checkpoint.storage_errors import is_storage_error, no_inodes_message
from jaxscale.runtime.hosts.agree import SEEN_SECONDS
from jaxscale.system import fence, paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.faults import crash_point

OPEN_FILES = "/proc/self/fd"  # links to the open files of this process, see proc(5)
HANDLERS = {  # entries that stock Orbax expects in a step
    "run": "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
    "state": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
}
MARGIN = 1.1  # bytes on disk per byte of arrays, including names, manifests and file system blocks

PIECE_BYTES = 64 << 20  # largest chunk of an array; a process reads whole chunks back
MIN_PART_BYTES = 1 << 20  # smallest part per replica; smaller parts are written faster than their slicing is compiled
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors for a small file on a full disk


def prepare_step(directory: Any, step: int) -> None:
    """Removes the files of interrupted saves, and creates the folders of a step.

    Raises Stop (STORAGE) if this or a later step exists, FileExistsError if an unrelated file or folder has its name.
    """
    newest = max(folders.all_steps(directory), default=None)
    if newest is not None and newest >= step:
        raise Stop(
            Exit.STORAGE,
            f"step {step} was not saved because {directory} already has step {newest}; "
            f"move steps {step} and later away, or resume from step {newest}",
        )
    folders.remove_leftovers(directory)
    crash_point("save/cleaned")
    final = directory / str(step)
    if final.exists():
        if not final.is_dir() or any(final.iterdir()):  # remove_leftovers has removed unfinished saves
            raise FileExistsError(f"{final} already exists; move it away")
        if not paths.is_remote(final):
            fence.ask(final)
            final.rmdir()
    folder = folders.unfinished_folder(directory, step)
    for item in ("state", "run"):
        paths.make_folder(folder / item)
    crash_point("save/folder")


def has_record(folder: Any, record: Mapping[str, Any]) -> bool:
    """Returns True if the committed step has this record. Raises storage errors."""
    try:
        return read_record(folder)["sha256"] == record["sha256"]
    except Exception as error:
        if is_storage_error(error):
            raise
        return False


def array_handler() -> Any:
    """Returns Orbax's array handler. Each replica of an array writes a part of it, unless the array is small."""
    orbax = import_orbax()
    from orbax.checkpoint._src.metadata.array_metadata_store import Store

    kinds = orbax.type_handlers
    arrays = kinds.ArrayHandler(array_metadata_store=Store(), min_slice_bytes_for_replica_parallel=MIN_PART_BYTES)
    numbers = [(kind, kinds.ScalarHandler()) for kind in (int, float, np.number)]
    registry = kinds.create_type_handler_registry(*numbers, (np.ndarray, kinds.NumpyHandler()), (jax.Array, arrays))
    # compression would save 8% of the bytes of float32 weights and moments for twice the CPU time (192 MB, 2 cores)
    return orbax.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)


def write_arrays(directory: Any, step: int, leaves: Mapping[str, Any], process: int) -> None:
    """Writes this process's part of the arrays, and syncs it to the disk. Call in all processes, after prepare_step."""
    orbax, folder = import_orbax(), folders.unfinished_folder(directory, step)
    with open_folder(folder) as opened:
        fence.ask(folder)
        pieces = nest({name: orbax.SaveArgs(chunk_byte_size=PIECE_BYTES) for name in leaves})
        array_handler().save(epath(opened / "state"), args=orbax.args.PyTreeSave(nest(leaves), pieces))
        crash_point("save/arrays")
        fence.ask(folder)
        if not paths.is_remote(directory):
            for part in (f"ocdbt.process_{process}", "array_metadatas"):
                if (opened / "state" / part).exists():
                    sync_tree(opened / "state" / part)
        fence.ask(folder)
        verify.write_data_list(opened, process)
        verify.drop_page_caches(opened / verify.DATA_FOLDER.format(process))
    crash_point("save/arrays_synced")


@contextlib.contextmanager
def open_folder(folder: Any) -> Iterator[Any]:
    """Opens a folder and yields a path to it, which is valid after the folder is moved, and invalid after its removal.

    Orbax creates missing folders without checking the run's lock, so a process that was suspended during a save could
    otherwise write to the folder after another run has taken the lock. Only implemented for local paths on Linux.
    """
    if paths.is_remote(folder) or not os.path.isdir(OPEN_FILES):
        yield folder
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield pathlib.Path(OPEN_FILES, str(handle))
    finally:
        os.close(handle)


def commit(directory: Any, step: int, record: Mapping[str, Any], may_commit: Callable[[], None], began: float) -> None:
    """Commits a step after all processes have written their arrays. Call in the first process only.

    may_commit: raises if this process must not write to the folder. began: time.time() at the start of the save.
    """
    folder = folders.unfinished_folder(directory, step)
    with open_folder(folder) as opened:
        fence.ask(folder)
        array_handler().finalize(epath(opened / "state"))
        crash_point("save/finalized")
        fence.ask(folder)
        write_step_metadata(opened, record, directory / str(step), began)
        fence.ask(folder)
        verify.write_main_list(opened, jax.process_count())
        crash_point("save/described")
        if not paths.is_remote(directory):
            folders.mark_committed(opened)
            sync_tree(opened)
            verify.drop_page_caches(opened, other_files="state/ocdbt.process_")
            crash_point("save/synced")
    may_commit()
    crash_point("save/before_commit")
    if paths.is_remote(directory):
        folders.mark_committed(folder)
    else:
        folder.rename(directory / str(step))
        crash_point("save/renamed")
        paths.sync_folder(directory)
    crash_point("save/after_commit")


def write_step_metadata(opened: Any, record: Mapping[str, Any], final: Any, began: float) -> None:
    """Writes the record and Orbax's metadata into the open folder of a step, which will be renamed to `final`."""
    (opened / RECORD).write_text(json.dumps(record), "utf-8")
    crash_point("save/record")
    for item in ("run", "state"):
        (opened / item / folders.COMMITTED).write_text(f"Checkpoint commit was successful to {final}", "utf-8")
    metrics = record.get("metrics", {})
    about = {"item_handlers": HANDLERS, "metrics": metrics, "performance_metrics": {}, "custom_metadata": {}}
    about |= {"init_timestamp_nsecs": int(began * 1e9), "commit_timestamp_nsecs": time.time_ns()}
    (opened / "_CHECKPOINT_METADATA").write_text(json.dumps(about), "utf-8")


def wait_for_record(folder: Any) -> dict[str, Any]:
    """Waits until a different host commits a step, and returns its record. Raises DamagedCheckpoint."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            return read_record(folder)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        except BadInput as error:
            if is_storage_error(error):
                raise
            raise verify.DamagedCheckpoint(f"its record cannot be read back: {error}") from error


def epath(path: Any) -> Any:
    """Returns the path as an etils path for Orbax, which accesses small files in a bucket with gcsfs."""
    from etils import epath as etils_epath

    if paths.is_remote(path):
        import fsspec.config

        paths.as_path(path)  # checks the environment before gcsfs is imported
        for protocol in ("gs", "gcs"):  # a cached listing would hide new files of other processes
            fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    return etils_epath.Path(path)


def import_orbax() -> Any:
    """Imports orbax.checkpoint (0.5 to 2 s in the first call) and silences its log."""
    import orbax.checkpoint  # a local import, because only the first save needs Orbax
    from orbax.checkpoint._src.path import gcs_utils

    # Before deleting a step, Orbax requests whether the bucket has a hierarchical namespace. This request requires the
    # permission storage.buckets.get, and the save would fail for an account that has only permissions for objects.
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False  # leaves empty folders, which are harmless
    silence_orbax()
    return orbax.checkpoint


@functools.cache
def silence_orbax() -> None:
    """Filters Orbax's log, and asyncio's messages about unfinished reads and writes after a failure.

    Call after importing Orbax, because absl installs the logger class with `pathname`.
    """
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: not is_leftover(record.getMessage()))
    # after a failed read some coroutines are never awaited, and Python warns when it collects these
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        # after a failure, other reads and writes end with a closed event loop or are cancelled; only the first
        # failure is raised
        code = getattr(unraisable.object, "cr_code", None)
        leftover = code is not None and is_leftover(code.co_filename)
        if not (leftover or isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = hook


def is_leftover(message: str) -> bool:
    """Returns True for asyncio's messages about Orbax's reads and writes. Nothing else uses asyncio in this program."""
    return "orbax" in message or "never retrieved" in message


class NoRoom(OSError):
    """Raised if the disk has less space than a checkpoint needs."""


def state_bytes(leaves: Iterable[Any]) -> int:
    """Returns the total size of the arrays in bytes, without counting replicas."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if hasattr(leaf, "dtype"))


def free_bytes(directory: Any) -> int | None:
    """Returns the bytes available to this user on the disk of the folder; None for an object store."""
    if paths.is_remote(directory):
        return None
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def check_room(directory: Any, needed: float) -> None:
    """Raises NoRoom if the disk of the folder has less space than needed."""
    free = free_bytes(directory)
    if free is not None and free < needed * MARGIN:
        raise NoRoom(f"No space left on device: {room_text(directory, needed)}")


def room_text(directory: Any, needed: float) -> str:
    """Returns a text such as 'needs 1.2 GiB, has 307.2 MiB'."""
    free = free_bytes(directory)
    return f"needs {units.size(needed * MARGIN)}" + ("" if free is None else f", has {units.size(free)}")


def check_before_run(directory: Any, needed: int, keep: int, steps: list[int]) -> str | None:
    """Returns a warning if the disk lacks space for the checkpoints of a resumed run, else None.

    needed: bytes per checkpoint. keep: number of newest checkpoints to keep. steps: existing steps.
    Raises: Stop (NO_GO) if the folder cannot be written, or if the disk lacks space for the checkpoints of a new run. A
    resumed run only gets a warning, because failed saves are reported and retried.
    """
    if paths.is_remote(directory):
        return None  # a bucket has no space limit, and the first file of the run shows missing permissions
    aside: list[Any] = []
    try:
        paths.make_folder(directory)
        aside = folders.set_aside_folders(directory)
        paths.remove_temporaries(directory, (LAST_GOOD, ".probe-*"))  # ".probe-*": files of older versions
        with tempfile.TemporaryFile(dir=directory) as probe:  # without a name if the system supports it
            probe.write(b"x")
    except OSError as error:
        if error.errno not in NO_SPACE_ERRNOS or not (steps or aside):
            cause = no_inodes_message(directory) if error.errno == errno.ENOSPC else ""
            raise Stop(
                Exit.NO_GO,
                f"no checkpoint can be written in {directory}: {cause or error.strerror or error}; "
                "give this user write permission, or choose another --workdir",
            ) from None
    number = max(1, keep + 2 - len(steps))  # all checkpoints to keep, and the checkpoint that is being written
    free, total = free_bytes(directory), number * needed
    if free is None or free >= total * MARGIN:
        return None
    need = f"{number} checkpoints of {units.size(needed)} need {units.size(total * MARGIN)}"
    lack = f"{directory} has {units.size(free)} free, but {need}; "
    if not steps and not aside:
        raise Stop(Exit.NO_GO, f"{lack}delete files, choose a different --workdir, or reduce checkpoint.keep_last")
    if not aside:
        return f"{lack}delete files, or reduce checkpoint.keep_last"
    removal = shlex.join(["rm", "-r", *map(str, aside)])
    return f"{lack}remove the folders that were set aside, which the run does not need: {removal}"
