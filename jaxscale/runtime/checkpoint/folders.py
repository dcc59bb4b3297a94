"""Lists, commits, moves, copies and removes the folders of checkpoint steps.

On a disk, a step is written under a temporary name and committed by a rename. An object store has no rename, so a step
is written under its final name and committed by the file commit_success.txt, which is written last. A removal first
undoes the commit, so a crash never leaves a partial checkpoint that looks complete.
"""

import base64
import contextlib
import datetime
import hashlib
import itertools
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

from jaxscale.system import fence, paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.faults import crash_point
from jaxscale.system.storage import objects_under, open_bucket

READ_BYTES = 1 << 20
COMMITTED, COMMIT_TEXT = "commit_success.txt", "committed"  # fixed text: the file list contains its md5 in advance
STEP_ENTRIES = ("_CHECKPOINT_METADATA", COMMITTED, "state", "run")
REMOVED_SUFFIX = ".orbax-checkpoint-tmp-removed"  # suffix of a step that is being removed
UNFINISHED_SUFFIX = ".orbax-checkpoint-tmp"  # Orbax's own suffix, so that Orbax's tools do not list such folders
SET_ASIDE = re.compile(r"(rewound|damaged)-\d+-\d{8}T\d{6}Z(-\d+)?")
LEFTOVER = re.compile(r"\d+\.orbax-checkpoint-tmp.*")


def all_steps(directory: Any) -> list[int]:
    """Returns all committed steps in ascending order, including damaged steps, which must not be skipped silently."""
    if not directory.exists():
        return []
    if not directory.is_dir():
        raise BadInput(f"{directory} must be the folder of checkpoints, but is a file; move the file away")
    return sorted(int(child.name) for child in directory.iterdir() if is_committed(child))


def is_committed(folder: Any) -> bool:
    """Returns True if the folder has the name of a step and contains a checkpoint."""
    if not is_step_name(folder.name):
        return False
    if paths.is_remote(folder):
        return (folder / COMMITTED).exists()
    return any((folder / entry).exists() for entry in STEP_ENTRIES)


def is_step_name(name: str) -> bool:
    """Returns True for step names such as '7', False for '07' or '²'."""
    return name.isascii() and name.isdecimal() and name == str(int(name))


def mark_committed(folder: Any, content: bytes = COMMIT_TEXT.encode()) -> None:
    """Writes the file that commits a step."""
    fence.ask(folder)
    (folder / COMMITTED).write_bytes(content)


def recreate_folder(folder: Any) -> None:
    """Creates an empty folder for writing a step. Removes the files of an interrupted save."""
    remove_tree(folder)
    if not paths.is_remote(folder):
        paths.make_private(folder)
        for item in ("state", "run"):
            paths.make_folder(folder / item)


def commit(unfinished: Any, final: Any, content: bytes = COMMIT_TEXT.encode()) -> None:
    """Commits a written step with the commit file and, on a disk, a rename to its final name."""
    mark_committed(unfinished, content)
    if paths.is_remote(final):
        return
    sync_tree(unfinished)
    try:
        unfinished.rename(final)
    except OSError as error:
        cause = error.strerror or error
        raise BadInput(f"{unfinished} cannot be renamed to {final} ({cause}); move {final} away") from None
    paths.sync_folder(final.parent)


def unfinished_folder(directory: Any, step: int) -> Any:
    """Returns the folder into which a step is written before the commit."""
    return directory / (str(step) if paths.is_remote(directory) else f"{step}{UNFINISHED_SUFFIX}")


def remove_leftovers(directory: Any) -> None:
    """Removes the files of interrupted saves and deletions. Call only while no save is in progress."""
    for child in list(directory.iterdir()) if directory.exists() else ():
        is_unfinished = paths.is_remote(child) and is_step_name(child.name) and not (child / COMMITTED).exists()
        if LEFTOVER.fullmatch(child.name) or is_unfinished and any((child / name).exists() for name in STEP_ENTRIES):
            remove_tree(child)


def remove_step(directory: Any, step: int) -> None:
    """Deletes a committed step. If a crash interrupts the deletion, the remaining files are not listed as a step."""
    folder = directory / str(step)
    crash_point("delete/before")
    fence.ask(folder)
    if paths.is_remote(directory):
        (folder / COMMITTED).unlink(missing_ok=True)
    else:
        removed = unfinished_folder(directory, step).with_name(f"{step}{REMOVED_SUFFIX}")
        if removed.exists():
            remove_tree(removed)
        folder = folder.rename(removed)
        paths.sync_folder(directory)
    crash_point("delete/half")
    remove_tree(folder)
    crash_point("delete/after")


def set_aside(directory: Any, step: int, reason: str) -> Any:
    """Moves a step to the folder '<reason>-<step>-<UTC time>', which is not listed as a step; returns that folder."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    names = (f"{reason}-{step}-{now}{f'-{number}' * (number > 1)}" for number in itertools.count(1))
    target = next(directory / name for name in names if not (directory / name).exists())
    folder = directory / str(step)
    crash_point("set_aside/before")
    fence.ask(folder)
    if paths.is_remote(directory):
        for name in sorted(files_under(folder), key=lambda name: name == COMMITTED):  # the commit last
            (folder / name).copy(target / name)
        crash_point("gs/set_aside_half")
        (folder / COMMITTED).unlink(missing_ok=True)
        remove_tree(folder)
    else:
        folder.rename(target)
        paths.sync_folder(directory)
    crash_point("set_aside/after")
    return target


def set_aside_folders(directory: Any) -> list[Any]:
    """Returns the folders of set-aside steps, sorted by name."""
    return sorted(child for child in directory.iterdir() if SET_ASIDE.fullmatch(child.name))


def remove_tree(folder: Any) -> None:
    """Removes a folder or file if it exists."""

    def failed(function: Any, path: str, caught: Any) -> None:
        if not isinstance(caught[1], FileNotFoundError):  # another process may have removed the file
            raise caught[1]

    fence.ask(folder)
    if not paths.is_remote(folder):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, onerror=failed)
        else:
            folder.unlink(missing_ok=True)
    elif folder.exists():
        folder.rmtree()


def sync_tree(folder: pathlib.Path) -> None:
    """Syncs a local folder to the disk, including all files and subfolders."""
    for parent, _, files in os.walk(folder):
        for path in (*(os.path.join(parent, name) for name in files), parent):
            paths.sync_folder(path)


def files_under(folder: Any) -> dict[str, int]:
    """Returns {relative path: bytes} for all files below a folder. In a bucket, each request lists 1,000 files."""
    if paths.is_remote(folder):
        return dict(objects_under(os.fspath(folder)))
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            with contextlib.suppress(FileNotFoundError):  # training may delete old steps during the listing
                found[os.path.relpath(path, folder).replace(os.sep, "/")] = os.stat(path).st_size
    return dict(sorted(found.items()))


def copy_file(source: Any, target: Any) -> None:
    """Copies one file atomically. Raises Stop (STORAGE) if writing fails, and the errors of translate_read_errors."""

    def pieces() -> Iterator[bytes]:
        with translate_read_errors(source):  # otherwise read errors would be reported as errors of the target
            yield from read_chunks(source, size)

    with translate_read_errors(source):
        size = source.stat().st_size
    try:
        if not paths.is_remote(target):
            paths.make_private(target.parent)
        with paths.growing_file(target, size) as file:
            for piece in pieces():
                file.write(piece)
        if not paths.is_remote(target):
            drop_page_cache(target)
    except BadInput:
        raise  # errors of a bucket are both BadInput and OSError
    except OSError as error:
        raise Stop(
            Exit.STORAGE, f"{target} cannot be written: {error.strerror or error}; fix this and run the command again"
        ) from None


@contextlib.contextmanager
def translate_read_errors(path: Any) -> Iterator[None]:
    """Converts read errors to BadInput if the file is missing, else to Stop (STORAGE)."""
    try:
        yield
    except BadInput:
        raise  # errors of a bucket are both BadInput and OSError
    except FileNotFoundError:
        raise BadInput(f"{path} no longer exists, because training deletes old steps; pin the step first") from None
    except OSError as error:
        cause = error.strerror or error
        raise Stop(Exit.STORAGE, f"{path} cannot be read: {cause}; fix this and run the command again") from None


def read_chunks(path: Any, size: int | None = None) -> Iterator[bytes]:
    """Yields a file in pieces, up to `size` bytes. Resumes the read of an object after a lost connection."""
    if paths.is_remote(path):
        yield from open_bucket().pieces(os.fspath(path), 0, path.stat().st_size if size is None else size)
        return
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size if size is None else size
        while piece := file.read(min(READ_BYTES, left)):
            left -= len(piece)
            yield piece


def drop_page_cache(path: pathlib.Path) -> None:
    """Drops a synced file from the page cache, so that it is next read from the disk."""
    if hasattr(os, "posix_fadvise"):  # Linux
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def size_and_md5(path: Any) -> tuple[int, str] | None:
    """Returns (bytes, md5 in hexadecimal) of a file or object, from object metadata if available; None if missing."""
    try:
        if paths.is_remote(path) and "md5Hash" in (about := path.metadata()):
            return int(about["size"]), base64.b64decode(about["md5Hash"]).hex()
        size, md5 = 0, hashlib.md5(usedforsecurity=False)  # md5, because object stores report it
        for piece in read_chunks(path):
            md5.update(piece)
            size += len(piece)
    except FileNotFoundError:
        return None
    return size, md5.hexdigest()
