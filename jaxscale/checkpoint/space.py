"""Room for a checkpoint: how much it needs, how much the disk has, and whether it may be written at all."""

import errno
import shlex
import shutil
import tempfile
from collections.abc import Iterable
from typing import Any

from jaxscale.checkpoint import folders
from jaxscale.checkpoint.cause import inodes_told
from jaxscale.checkpoint.record import LAST_GOOD
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop

MARGIN = 1.1  # names, manifests and the blocks of the file system, over the bytes of the arrays

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room for a file, however little it holds


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
    """'needs 1.2 GB, has 0.3 GB'."""
    free = free_bytes(directory)
    return f"needs {size(needed * MARGIN)}" + ("" if free is None else f", has {size(free)}")


def size(number: float) -> str:
    """Bytes for people."""
    return f"{number / 1e9:.3g} GB" if number >= 1e8 else f"{number / 1e6:.3g} MB"


def check_before_run(directory: Any, needed: int, keep: int, steps: list[int]) -> str | None:
    """None, or for a run that goes on a warning: not all of its checkpoints would have room.

    Args: needed: bytes of one. keep: how many stay. steps: those that are there now.
    Raises: Stop (NO_GO) if checkpoints cannot be written in the folder, or if a new run's would not have room. A run
    that goes on may: a save that fails is told and tried again, while nobody starts one again that was refused.
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
            told = inodes_told(directory) if error.errno == errno.ENOSPC else ""
            raise Stop(
                Exit.NO_GO,
                f"no checkpoint can be written in {directory}: {told or error.strerror or error}; "
                "give this user the right to write there, or choose another --workdir",
            ) from None
    number = max(1, keep + 2 - len(steps))  # one is being written while those that stay are all still there
    free, total = free_bytes(directory), number * needed
    if free is None or free >= total * MARGIN:
        return None
    lack = (
        f"{directory} has {size(free)} free, and {number} checkpoints of {size(needed)} need {size(total * MARGIN)}; "
    )
    if not steps and not aside:
        raise Stop(Exit.NO_GO, f"{lack}free some, choose another --workdir, or lower checkpoint.keep_last")
    if not aside:
        return f"{lack}free some, or lower checkpoint.keep_last"
    removal = shlex.join(["rm", "-r", *map(str, aside)])
    return f"{lack}free some: the run reads nothing of what was set aside, and this removes it: {removal}"
