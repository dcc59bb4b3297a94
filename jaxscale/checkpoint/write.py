"""One step written to storage: arrays by Orbax, everything else by us, and one act at the end that makes it count.

Orbax's own manager and checkpointer are left out. Both ask the storage for lists and folders in the calling thread,
meet in barriers whose waiting hides the cause where one process fails, and sync neither their own files nor the rename.
Their handler of arrays has no barrier and no other state; what it and we write is what they would write, so that they
can read it.
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
from jaxscale.checkpoint import folders, read_back, verify
from jaxscale.checkpoint.folders import sync_tree
from jaxscale.checkpoint.record import LAST_GOOD, RECORD, nest, read_record
from jaxscale.checkpoint.storage_errors import is_storage_error, no_inodes_message
from jaxscale.hosts.agree import SEEN_SECONDS
from jaxscale.system import fence, paths
from jaxscale.system.exits import Exit, Stop
from jaxscale.system.faults import crash_point

OWN_FILES = "/proc/self/fd"  # a link to each open file of this process: proc(5)
HANDLERS = {  # what stock Orbax looks for in a step
    "run": "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
    "state": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
}
MARGIN = 1.1  # names, manifests and the blocks of the file system, over the bytes of the arrays

PIECE_BYTES = 64 << 20  # of an array at most, where it can be cut: what is read back at once, and by one process
LEAST_PART_BYTES = 1 << 20  # of an array, for a device of its own: less is written sooner than a program is compiled
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room for a file, however little it holds


def prepare_step(directory: Any, step: int) -> None:
    """Removes leftovers and makes the folders of the new step. For the first process.

    Raises: Stop (STORAGE) if this or a later step is there already. FileExistsError if something else has its name.
    """
    newest = max(folders.all_steps(directory), default=None)
    if newest is not None and newest >= step:
        raise Stop(
            Exit.STORAGE,
            f"step {step} was not saved because {directory} already holds step {newest}; "
            f"move steps {step} and later away, or go on from step {newest}",
        )
    folders.remove_leftovers(directory)
    crash_point("save/cleaned")
    clear_name(directory / str(step))
    folder = folders.unfinished_folder(directory, step)
    for item in ("state", "run"):
        paths.make_folder(folder / item)
    crash_point("save/folder")


def holds(folder: Any, record: Mapping[str, Any]) -> bool:
    """True if the committed step has this very record. Raises what keeps it from being read, if that may pass."""
    try:
        return read_record(folder)["sha256"] == record["sha256"]
    except Exception as error:
        if is_storage_error(error):
            raise
        return False


def clear_name(folder: Any) -> None:
    """Removes an empty folder that has the step's name. Raises FileExistsError for anything else."""
    if not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):  # leftovers of our own are gone already
        raise FileExistsError(f"{folder} is in the way; move it away")
    if not paths.is_remote(folder):
        folder.rmdir()


def array_handler() -> Any:
    """Orbax's writer of arrays. Devices that hold copies of an array each write a part of it, unless parts are small:
    to cut an array takes a program for its shape, which is compiled at the first save.
    """
    orbax = import_orbax()
    from orbax.checkpoint._src.metadata.array_metadata_store import Store

    kinds = orbax.type_handlers
    arrays = kinds.ArrayHandler(array_metadata_store=Store(), min_slice_bytes_for_replica_parallel=LEAST_PART_BYTES)
    numbers = [(kind, kinds.ScalarHandler()) for kind in (int, float, np.number)]
    registry = kinds.create_type_handler_registry(*numbers, (np.ndarray, kinds.NumpyHandler()), (jax.Array, arrays))
    # compressing float32 weights and moments saves 8% of the bytes for twice the CPU time (192 MB, 2 cores)
    return orbax.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)


def write_arrays(directory: Any, step: int, leaves: Mapping[str, Any], process: int) -> None:
    """Returns when this process's part of the arrays is on the disk. For all processes, after prepare_step."""
    orbax, folder = import_orbax(), folders.unfinished_folder(directory, step)
    with itself(folder) as opened:
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
        verify.list_own_files(opened, process)
        read_back.forget_files(opened / verify.DATA_FOLDER.format(process))
    crash_point("save/arrays_synced")


@contextlib.contextmanager
def itself(folder: Any) -> Iterator[Any]:
    """A path to this very folder, wherever it is moved; once it is removed, nothing can be made below the path.

    What writes arrays makes the folders that it misses, and is asked by nobody whether it still may: a process that
    wakes up in the middle of a save would go on in the folder of whoever has taken over. On Linux's local paths alone.
    """
    if paths.is_remote(folder) or not os.path.isdir(OWN_FILES):
        yield folder
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield pathlib.Path(OWN_FILES, str(handle))
    finally:
        os.close(handle)


def commit(directory: Any, step: int, record: Mapping[str, Any], may_commit: Callable[[], None], began: float) -> None:
    """Makes the step count, after all processes have written. For the first process.

    may_commit: raises if this process must not write any more. began: time.time() when the save began.
    """
    folder = folders.unfinished_folder(directory, step)
    with itself(folder) as opened:
        fence.ask(folder)
        array_handler().finalize(epath(opened / "state"))
        crash_point("save/finalized")
        fence.ask(folder)
        describe(opened, record, directory / str(step), began)
        fence.ask(folder)
        verify.list_all_others(opened, jax.process_count())
        crash_point("save/described")
        if not paths.is_remote(directory):
            folders.mark_committed(opened)
            sync_tree(opened)
            read_back.forget_files(opened, but="state/ocdbt.process_")
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


def describe(opened: Any, record: Mapping[str, Any], final: Any, began: float) -> None:
    """Writes the record, and what stock Orbax looks for beside it, of a step that will be `final`."""
    (opened / RECORD).write_text(json.dumps(record), "utf-8")
    crash_point("save/record")
    for item in ("run", "state"):
        (opened / item / folders.COMMITTED).write_text(f"Checkpoint commit was successful to {final}", "utf-8")
    metrics = record.get("metrics", {})
    about = {"item_handlers": HANDLERS, "metrics": metrics, "performance_metrics": {}, "custom_metadata": {}}
    about |= {"init_timestamp_nsecs": int(began * 1e9), "commit_timestamp_nsecs": time.time_ns()}
    (opened / "_CHECKPOINT_METADATA").write_text(json.dumps(about), "utf-8")


def wait_for_record(folder: Any) -> dict[str, Any]:
    """The record of a step that another host has just committed; a network file system may show it a little later."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            return read_record(folder)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def give_up(directory: Any, step: int) -> None:
    """Removes what a failed save has written, so that the next one has its room. Never raises for storage's sake."""
    folder = folders.unfinished_folder(directory, step)
    try:
        if not (paths.is_remote(directory) and (folder / folders.COMMITTED).exists()):
            folders.remove_tree(folder)
    except Exception:  # noqa: S110 - the cause of the failed save is the one to tell; the next save cleans up
        return


def epath(path: Any) -> Any:
    """The path in the class that Orbax wants, which reads and writes small files in a bucket by gcsfs."""
    from etils import epath as etils_epath

    if paths.is_remote(path):
        import fsspec.config

        paths.as_path(path)  # the environment is looked through before gcsfs is imported
        for protocol in ("gs", "gcs"):  # a list that is kept would hide what other processes have written since
            fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    return etils_epath.Path(path)


def import_orbax() -> Any:
    """The package orbax.checkpoint (0.5 to 2 s the first time), silenced."""
    import orbax.checkpoint  # here, because a run needs it only at its first save and should not start later for it
    from orbax.checkpoint._src.path import gcs_utils

    # To delete a step it asks the bucket whether it has a hierarchical namespace, by a client that wants a project and
    # the right storage.buckets.get, which an account that may read and write objects lacks: the save then fails.
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False  # there, empty folders stay and count as nothing
    silence()
    return orbax.checkpoint


@functools.cache
def silence() -> None:
    """Keeps from stderr what Orbax logs and what its unfinished reads and writes complain of after one has failed.

    After the import, not before: absl makes a logger of its own kind, which knows who called it.
    """
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: not is_leftover(record.getMessage()))
    # a failed read leaves coroutines that nobody waits for; Python complains when it collects them
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        # a read or write that ends after another has failed finds the event loop closed, or is ended where it waits;
        # the failure itself is raised
        code = getattr(unraisable.object, "cr_code", None)
        leftover = code is not None and is_leftover(code.co_filename)
        if not (leftover or isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = hook


def is_leftover(message: str) -> bool:
    """True for asyncio's complaint about reads and writes that failed beside the one whose error is raised.

    Nothing else in this program uses asyncio.
    """
    return "orbax" in message or "never retrieved" in message


class NoRoom(OSError):
    """The disk has less than a checkpoint needs."""


def state_bytes(leaves: Iterable[Any]) -> int:
    """The bytes of all arrays, each counted once however many devices hold it."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if hasattr(leaf, "dtype"))


def free_bytes(directory: Any) -> int | None:
    """What is free for this user where the folder is or will be; None for an object store."""
    if paths.is_remote(directory):
        return None
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def check_room(directory: Any, needed: float) -> None:
    """Raises NoRoom with what is needed and what is there."""
    free = free_bytes(directory)
    if free is not None and free < needed * MARGIN:
        raise NoRoom(f"No space left on device: {room_text(directory, needed)}")


def room_text(directory: Any, needed: float) -> str:
    """'needs 1.2 GiB, has 307.2 MiB'."""
    free = free_bytes(directory)
    return f"needs {units.size(needed * MARGIN)}" + ("" if free is None else f", has {units.size(free)}")


def check_before_run(directory: Any, needed: int, keep: int, steps: list[int]) -> str | None:
    """None, or for a run that goes on a warning: not all of its checkpoints would have room.

    Args: needed: bytes of one. keep: how many stay. steps: those that are there now.
    Raises: Stop (NO_GO) if checkpoints cannot be written in the folder, or if a new run's would not have room. A run
    that goes on may: a save that fails is reported and tried again, while nobody starts one again that was refused.
    """
    if paths.is_remote(directory):
        return None  # a bucket has no free space to ask for; that it can be written shows at the first file of the run
    aside: list[Any] = []
    try:
        paths.make_folder(directory)
        aside = folders.those_set_aside(directory)
        paths.remove_temporaries(directory, (LAST_GOOD, ".probe-*"))  # the second: of versions that left some
        with tempfile.TemporaryFile(dir=directory) as probe:  # without a name, where the system can
            probe.write(b"x")
    except OSError as error:
        if error.errno not in FULL or not (steps or aside):
            cause = no_inodes_message(directory) if error.errno == errno.ENOSPC else ""
            raise Stop(
                Exit.NO_GO,
                f"no checkpoint can be written in {directory}: {cause or error.strerror or error}; "
                "give this user the right to write there, or choose another --workdir",
            ) from None
    number = max(1, keep + 2 - len(steps))  # one is being written while those that stay are all still there
    free, total = free_bytes(directory), number * needed
    if free is None or free >= total * MARGIN:
        return None
    need = f"{number} checkpoints of {units.size(needed)} need {units.size(total * MARGIN)}"
    lack = f"{directory} has {units.size(free)} free, and {need}; "
    if not steps and not aside:
        raise Stop(Exit.NO_GO, f"{lack}free some, choose another --workdir, or lower checkpoint.keep_last")
    if not aside:
        return f"{lack}free some, or lower checkpoint.keep_last"
    removal = shlex.join(["rm", "-r", *map(str, aside)])
    return f"{lack}free some: the run reads nothing of what was set aside, and this removes it: {removal}"
