"""Folders of checkpoints: which are committed steps, which are leftovers, and how one is moved away or removed.

On a disk a step is written under another name, and one rename commits it. An object store has no rename, so there it is
written in its place and the file commit_success.txt, which comes last, commits it. Every removal goes the other way
round: first what makes it count, so that a crash in the middle leaves no half of a checkpoint that looks whole.
"""

import datetime
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

from jaxscale.checkpoint.files import files_under
from jaxscale.system import fence, paths
from jaxscale.system.exits import BadInput
from jaxscale.system.faults import crash_point

COMMITTED, COMMIT_TEXT = "commit_success.txt", "committed"  # what is in it is known before it is written, and listed
OWN_ENTRIES = ("_CHECKPOINT_METADATA", COMMITTED, "state", "run")
REMOVED = ".orbax-checkpoint-tmp-removed"  # on its way out
UNFINISHED = ".orbax-checkpoint-tmp"  # Orbax's own name for it, so that its tools do not take such a folder for a step
ASIDE = re.compile(r"(rewound|damaged)-\d+-\d{8}T\d{6}Z(-\d+)?")
LEFTOVER = re.compile(r"\d+\.orbax-checkpoint-tmp.*")


def all_steps(directory: Any) -> list[int]:
    """All committed steps, ascending, from a fresh look. Unfinished saves and foreign folders do not count.

    A number that holds only a part of our files was damaged later, so it does count: reading it says so, where going
    on from an older step, or from nothing, would lose work without a word.
    """
    if not directory.exists():
        return []
    if not directory.is_dir():
        raise BadInput(f"{directory} is a file where the folder of checkpoints belongs; move it away")
    return sorted(int(child.name) for child in directory.iterdir() if is_committed(child))


def is_committed(folder: Any) -> bool:
    """True if the folder is named by a step and holds a checkpoint of ours."""
    if not is_step_name(folder.name):
        return False
    if paths.is_remote(folder):
        return (folder / COMMITTED).exists()
    return any((folder / entry).exists() for entry in OWN_ENTRIES)


def is_step_name(name: str) -> bool:
    """True for '7', not for '07' or '²'."""
    return name.isascii() and name.isdecimal() and name == str(int(name))


def mark_committed(folder: Any) -> None:
    """Writes the file that comes last."""
    fence.ask(folder)
    (folder / COMMITTED).write_text(COMMIT_TEXT)


def unfinished_folder(directory: Any, step: int) -> Any:
    """Where a step is written before it is committed."""
    return directory / (str(step) if paths.is_remote(directory) else f"{step}{UNFINISHED}")


def leftovers(directory: Any) -> Iterator[Any]:
    """Yields what killed saves and removals have left behind."""
    if not directory.exists():
        return
    for child in list(directory.iterdir()):
        if LEFTOVER.fullmatch(child.name):
            yield child
        elif paths.is_remote(child) and is_step_name(child.name) and not (child / COMMITTED).exists():
            if any((child / entry).exists() for entry in OWN_ENTRIES):
                yield child


def remove_leftovers(directory: Any) -> None:
    """Removes what killed saves and removals have left behind. To be called while no save is under way."""
    for folder in leftovers(directory):
        remove_tree(folder)


def remove_step(directory: Any, step: int) -> None:
    """Removes a committed step. A crash in the middle leaves a leftover, never a step."""
    folder = directory / str(step)
    crash_point("delete/before")
    fence.ask(folder)
    if paths.is_remote(directory):
        (folder / COMMITTED).unlink(missing_ok=True)
    else:
        doomed = unfinished_folder(directory, step).with_name(f"{step}{REMOVED}")
        if doomed.exists():
            remove_tree(doomed)
        folder = folder.rename(doomed)
        paths.sync_folder(directory)
    crash_point("delete/half")
    remove_tree(folder)
    crash_point("delete/after")


def set_aside(directory: Any, step: int, why: str) -> Any:
    """The new place of a step that must not count any more but is kept: '<why>-<step>-<UTC time>' beside it."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    place = directory / f"{why}-{step}-{now}"
    number = 1
    while place.exists():
        number += 1
        place = directory / f"{why}-{step}-{now}-{number}"
    folder = directory / str(step)
    crash_point("set_aside/before")
    fence.ask(folder)
    if paths.is_remote(directory):
        copy_objects(folder, place)
        crash_point("gs/set_aside_half")
        (folder / COMMITTED).unlink(missing_ok=True)
        remove_tree(folder)
    else:
        folder.rename(place)
        paths.sync_folder(directory)
    crash_point("set_aside/after")
    return place


def those_set_aside(directory: Any) -> list[Any]:
    """The folders that set_aside has made, by name."""
    return sorted(child for child in directory.iterdir() if ASIDE.fullmatch(child.name))


def copy_objects(source: Any, target: Any) -> None:
    """Copies what is under a folder of an object store, what commits it last."""
    for name in sorted(files_under(source), key=lambda name: name == COMMITTED):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (source / name).copy(place, overwrite=True)


def remove_tree(folder: Any) -> None:
    """Removes a folder or a file and what is below it; what is gone already is no error."""
    fence.ask(folder)
    if not paths.is_remote(folder):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, onerror=pass_over_missing)
        else:
            folder.unlink(missing_ok=True)
    elif folder.exists():
        folder.rmtree()


def pass_over_missing(function: Any, path: str, caught: Any) -> None:
    """Raises again what rmtree met, unless somebody else has removed it."""
    if not isinstance(caught[1], FileNotFoundError):
        raise caught[1]


def sync_tree(folder: pathlib.Path) -> None:
    """Returns when all files below a local folder, and the folders' own lists of names, are on the disk."""
    for parent, _, files in os.walk(folder):
        for name in files:
            handle = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        paths.sync_folder(pathlib.Path(parent))
