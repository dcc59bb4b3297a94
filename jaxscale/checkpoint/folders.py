"""Folders of checkpoints and their files: committed steps, leftovers, what is moved away, removed or copied.

On a disk a step is written under another name, and one rename commits it. An object store has no rename, so there it is
written in its place and the file commit_success.txt, which comes last, commits it. Every removal goes the other way
round: first what makes it count, so that a crash in the middle leaves no half of a checkpoint that looks whole.
"""

import base64
import contextlib
import datetime
import hashlib
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


def mark_committed(folder: Any, content: bytes = COMMIT_TEXT.encode()) -> None:
    """Writes the file that comes last."""
    fence.ask(folder)
    (folder / COMMITTED).write_bytes(content)


def make_anew(folder: Any) -> None:
    """An empty folder to write a step into, whatever somebody who was killed has left there."""
    remove_tree(folder)
    if not paths.is_remote(folder):
        paths.make_private(folder)
        for item in ("state", "run"):
            paths.make_folder(folder / item)


def commit(growing: Any, final: Any, content: bytes = COMMIT_TEXT.encode()) -> None:
    """Makes what was written count as a step; in a bucket, where it grows in its place, the mark alone does."""
    mark_committed(growing, content)
    if paths.is_remote(final):
        return
    sync_tree(growing)
    try:
        growing.rename(final)
    except OSError as error:
        cause = error.strerror or error
        raise BadInput(f"{final} is in the way of what was written to {growing} ({cause}); move it away") from None
    paths.sync_folder(final.parent)


def unfinished_folder(directory: Any, step: int) -> Any:
    """Where a step is written before it is committed."""
    return directory / (str(step) if paths.is_remote(directory) else f"{step}{UNFINISHED}")


def remove_leftovers(directory: Any) -> None:
    """Removes what killed saves and removals have left behind. To be called while no save is under way."""
    for child in list(directory.iterdir()) if directory.exists() else ():
        if LEFTOVER.fullmatch(child.name):
            remove_tree(child)
        elif paths.is_remote(child) and is_step_name(child.name) and not (child / COMMITTED).exists():
            if any((child / entry).exists() for entry in OWN_ENTRIES):
                remove_tree(child)


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
    target = directory / f"{why}-{step}-{now}"
    number = 1
    while target.exists():
        number += 1
        target = directory / f"{why}-{step}-{now}-{number}"
    folder = directory / str(step)
    crash_point("set_aside/before")
    fence.ask(folder)
    if paths.is_remote(directory):
        copy_objects(folder, target)
        crash_point("gs/set_aside_half")
        (folder / COMMITTED).unlink(missing_ok=True)
        remove_tree(folder)
    else:
        folder.rename(target)
        paths.sync_folder(directory)
    crash_point("set_aside/after")
    return target


def those_set_aside(directory: Any) -> list[Any]:
    """The folders that set_aside has made, by name."""
    return sorted(child for child in directory.iterdir() if ASIDE.fullmatch(child.name))


def copy_objects(source: Any, target: Any) -> None:
    """Copies what is under a folder of an object store, what commits it last."""
    for name in sorted(files_under(source), key=lambda name: name == COMMITTED):
        copied = target / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        (source / name).copy(copied, overwrite=True)


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


def files_under(folder: Any) -> dict[str, int]:
    """{"state/d/abc": bytes} of every file below a folder; in a bucket by one request for a thousand of them."""
    if paths.is_remote(folder):
        return dict(objects_under(os.fspath(folder)))
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            with contextlib.suppress(FileNotFoundError):  # training deletes old steps meanwhile
                found[os.path.relpath(path, folder).replace(os.sep, "/")] = os.stat(path).st_size
    return dict(sorted(found.items()))


def copy_file(source: Any, target: Any) -> None:
    """Copies one file, which appears whole. Raises as `reading` does, or Stop (STORAGE) where it cannot be written."""
    with reading(source):
        size = source.stat().st_size
    try:
        if not paths.is_remote(target):
            paths.make_private(target.parent)
        with paths.growing_file(target, size) as file:
            for piece in pieces_to_copy(source, size):
                file.write(piece)
        if not paths.is_remote(target):
            forget(target)
    except BadInput:
        raise  # of a bucket, and an OSError too
    except OSError as error:
        raise Stop(Exit.STORAGE, f"{target} cannot be written: {error.strerror or error}; run it again") from None


@contextlib.contextmanager
def reading(path: Any) -> Iterator[None]:
    """Raises what keeps a file from being read as one line: BadInput where it is gone, else Stop (STORAGE)."""
    try:
        yield
    except BadInput:
        raise  # of a bucket, and an OSError too
    except FileNotFoundError:
        raise BadInput(f"{path} is gone: training deletes old steps; pin the step first") from None
    except OSError as error:
        cause = error.strerror or error
        raise Stop(Exit.STORAGE, f"{path} cannot be read: {cause}; mend that, then run it again") from None


def pieces_to_copy(path: Any, size: int) -> Iterator[bytes]:
    """As pieces_of. Raises as `reading` does: what is wrong with the source is not told of the copy."""
    with reading(path):
        yield from pieces_of(path, size)


def pieces_of(path: Any, size: int | None = None) -> Iterator[bytes]:
    """Yields the content of a file a piece at a time; of an object, going on where a connection broke.

    size: of one that may grow meanwhile: no more is read.
    """
    if paths.is_remote(path):
        yield from open_bucket().pieces(os.fspath(path), 0, path.stat().st_size if size is None else size)
        return
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size if size is None else size
        while piece := file.read(min(READ_BYTES, left)):
            left -= len(piece)
            yield piece


def forget(path: pathlib.Path) -> None:
    """Drops the pages of a file that is on the disk from memory, so that reading it back reads the disk."""
    if hasattr(os, "posix_fadvise"):  # Linux
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mark_of(path: Any) -> tuple[int, str] | None:
    """(bytes, md5 in hexadecimal) of a file or object; None if there is none.

    Of an object as the service tells it; of one that was composed of parts, read from its bytes.
    """
    try:
        if paths.is_remote(path) and "md5Hash" in (about := path.metadata()):
            return int(about["size"]), base64.b64decode(about["md5Hash"]).hex()
        size, md5 = 0, hashlib.md5(usedforsecurity=False)  # the one hash that object stores tell as well
        for piece in pieces_of(path):
            md5.update(piece)
            size += len(piece)
    except FileNotFoundError:
        return None
    return size, md5.hexdigest()
