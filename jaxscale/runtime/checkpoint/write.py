"""Writes one step to storage: arrays with Orbax's handler, everything else directly, and one final commit.

Orbax's manager and checkpointer are not used. Both list folders of the storage in the calling thread, wait in barriers
that hide the cause when one process fails, and sync neither their files nor the rename. Their array handler has no
barrier and no other state. The files are those that they would write, so they can read them.
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

OPEN_FILES = "/proc/self/fd"  # links to the open files of this process: proc(5)
HANDLERS = {  # entries that stock Orbax expects in a step
    "run": "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
    "state": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
}
MARGIN = 1.1  # bytes on disk per byte of arrays: names, manifests and blocks of the file system

PIECE_BYTES = 64 << 20  # largest chunk of an array: the unit in which it is read back, by one process
MIN_PART_BYTES = 1 << 20  # smallest part per replica: less is written in less time than a program takes to compile
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space for a file, however small


def prepare_step(directory: Any, step: int) -> None:
    """Removes leftovers and makes the step's folders.

    Raises Stop (STORAGE) if this or a later step exists, FileExistsError for a foreign folder in its place.
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
    """True if the committed step has this record. Raises errors of the storage."""
    try:
        return read_record(folder)["sha256"] == record["sha256"]
    except Exception as error:
        if is_storage_error(error):
            raise
        return False


def array_handler() -> Any:
    """Returns Orbax's array handler. Devices with replicas of an array each write a part, unless parts are small:
    slicing an array compiles a program for its shape at the first save.
    """
    orbax = import_orbax()
    from orbax.checkpoint._src.metadata.array_metadata_store import Store

    kinds = orbax.type_handlers
    arrays = kinds.ArrayHandler(array_metadata_store=Store(), min_slice_bytes_for_replica_parallel=MIN_PART_BYTES)
    numbers = [(kind, kinds.ScalarHandler()) for kind in (int, float, np.number)]
    registry = kinds.create_type_handler_registry(*numbers, (np.ndarray, kinds.NumpyHandler()), (jax.Array, arrays))
    # compressing float32 weights and moments saves 8% of the bytes for twice the CPU time (192 MB, 2 cores)
    return orbax.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)


def write_arrays(directory: Any, step: int, leaves: Mapping[str, Any], process: int) -> None:
    """Writes this process's part of the arrays to the disk. For all processes, after prepare_step."""
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
    """Opens a folder; yields a path that follows moves of it, and below which nothing can be made once it is gone.

    Orbax makes missing folders without asking the fence, so a process that was stopped during a save could otherwise
    write into the folder of the next owner of the lock. On Linux's local paths alone.
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
    """Commits the step, after all processes have written. For the first process.

    may_commit: raises if this process must not write any more. began: time.time() when the save began.
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
    """Writes the record, and the metadata that stock Orbax expects, of a step that will be renamed to `final`."""
    (opened / RECORD).write_text(json.dumps(record), "utf-8")
    crash_point("save/record")
    for item in ("run", "state"):
        (opened / item / folders.COMMITTED).write_text(f"Checkpoint commit was successful to {final}", "utf-8")
    metrics = record.get("metrics", {})
    about = {"item_handlers": HANDLERS, "metrics": metrics, "performance_metrics": {}, "custom_metadata": {}}
    about |= {"init_timestamp_nsecs": int(began * 1e9), "commit_timestamp_nsecs": time.time_ns()}
    (opened / "_CHECKPOINT_METADATA").write_text(json.dumps(about), "utf-8")


def wait_for_record(folder: Any) -> dict[str, Any]:
    """Returns the record of a step that another host has committed, maybe seen late. Raises DamagedCheckpoint."""
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
    """Returns the path as an etils path, as Orbax requires; it reads and writes small files in a bucket with gcsfs."""
    from etils import epath as etils_epath

    if paths.is_remote(path):
        import fsspec.config

        paths.as_path(path)  # checks the environment before gcsfs is imported
        for protocol in ("gs", "gcs"):  # a cached listing would hide what other processes have written since
            fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    return etils_epath.Path(path)


def import_orbax() -> Any:
    """Imports orbax.checkpoint (0.5 to 2 s the first time) and silences it."""
    import orbax.checkpoint  # here, because a run needs it only at its first save and should not start later for it
    from orbax.checkpoint._src.path import gcs_utils

    # To delete a step Orbax asks the bucket whether it has a hierarchical namespace, with a client that requires a
    # project and the permission storage.buckets.get. An account for objects alone lacks it, and the save would fail.
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False  # then empty folders stay, which are harmless
    silence_orbax()
    return orbax.checkpoint


@functools.cache
def silence_orbax() -> None:
    """Filters Orbax's log and the complaints of its unfinished reads and writes after one has failed.

    Call after the import: absl installs a logger class that knows the caller.
    """
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: not is_leftover(record.getMessage()))
    # a failed read leaves coroutines that are never awaited; Python warns when it collects them
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        # a read or write that ends after another has failed finds the event loop closed, or is cancelled;
        # the failure itself is raised
        code = getattr(unraisable.object, "cr_code", None)
        leftover = code is not None and is_leftover(code.co_filename)
        if not (leftover or isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = hook


def is_leftover(message: str) -> bool:
    """True for asyncio's messages about reads and writes that failed together with the one that is raised.

    Nothing else in this program uses asyncio.
    """
    return "orbax" in message or "never retrieved" in message


class NoRoom(OSError):
    """The disk has less space than a checkpoint needs."""


def state_bytes(leaves: Iterable[Any]) -> int:
    """Returns the bytes of all arrays, each counted once however many devices hold it."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if hasattr(leaf, "dtype"))


def free_bytes(directory: Any) -> int | None:
    """Returns the bytes available to this user at the folder; None for an object store."""
    if paths.is_remote(directory):
        return None
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def check_room(directory: Any, needed: float) -> None:
    """Raises NoRoom with the bytes needed and available."""
    free = free_bytes(directory)
    if free is not None and free < needed * MARGIN:
        raise NoRoom(f"No space left on device: {room_text(directory, needed)}")


def room_text(directory: Any, needed: float) -> str:
    """Returns 'needs 1.2 GiB, has 307.2 MiB'."""
    free = free_bytes(directory)
    return f"needs {units.size(needed * MARGIN)}" + ("" if free is None else f", has {units.size(free)}")


def check_before_run(directory: Any, needed: int, keep: int, steps: list[int]) -> str | None:
    """Returns a warning if not all checkpoints of a resumed run would fit on the disk, else None.

    Args: needed: bytes of one. keep: number of checkpoints that stay. steps: existing ones.
    Raises: Stop (NO_GO) if checkpoints cannot be written in the folder, or if those of a new run would not fit. A
    resumed run is not refused: a failed save is reported and retried, whereas a refused run does not train at all.
    """
    if paths.is_remote(directory):
        return None  # a bucket has no limit of space, and its permissions show at the first file of the run
    aside: list[Any] = []
    try:
        paths.make_folder(directory)
        aside = folders.set_aside_folders(directory)
        paths.remove_temporaries(directory, (LAST_GOOD, ".probe-*"))  # ".probe-*": left by older versions
        with tempfile.TemporaryFile(dir=directory) as probe:  # unnamed, if the system supports it
            probe.write(b"x")
    except OSError as error:
        if error.errno not in NO_SPACE_ERRNOS or not (steps or aside):
            cause = no_inodes_message(directory) if error.errno == errno.ENOSPC else ""
            raise Stop(
                Exit.NO_GO,
                f"no checkpoint can be written in {directory}: {cause or error.strerror or error}; "
                "give this user write permission, or choose another --workdir",
            ) from None
    number = max(1, keep + 2 - len(steps))  # all that stay, and the one that is being written
    free, total = free_bytes(directory), number * needed
    if free is None or free >= total * MARGIN:
        return None
    need = f"{number} checkpoints of {units.size(needed)} need {units.size(total * MARGIN)}"
    lack = f"{directory} has {units.size(free)} free, but {need}; "
    if not steps and not aside:
        raise Stop(Exit.NO_GO, f"{lack}free space, choose another --workdir, or lower checkpoint.keep_last")
    if not aside:
        return f"{lack}free space, or lower checkpoint.keep_last"
    removal = shlex.join(["rm", "-r", *map(str, aside)])
    return f"{lack}free some: the run does not need the folders that were set aside, which this removes: {removal}"
