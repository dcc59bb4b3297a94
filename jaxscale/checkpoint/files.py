"""The files of a checkpoint, on a disk or in a bucket: which there are, what they hold, and how one is copied."""

import base64
import contextlib
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.storage import objects_under, open_bucket

READ_BYTES = 1 << 20


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
    """Copies one file, which appears whole. Raises BadInput for a bucket that refuses, OSError's cause as Stop."""
    try:
        if not paths.is_remote(target):
            paths.make_private(target.parent)
            with paths.replacing(target) as file:
                for piece in pieces_of(source):
                    file.write(piece)
            forget(target)
        elif not paths.is_remote(source):
            open_bucket(writing=True).upload(source, os.fspath(target))
        else:
            with tempfile.TemporaryDirectory() as scratch:
                copied = pathlib.Path(scratch) / "object"
                with open(copied, "wb") as file:
                    for piece in pieces_of(source):
                        file.write(piece)
                open_bucket(writing=True).upload(copied, os.fspath(target))
    except FileNotFoundError as error:
        raise BadInput(f"{error.filename or error} is gone: training deletes old steps; pin the step first") from None
    except BadInput:
        raise  # of a bucket, and an OSError too
    except OSError as error:
        raise Stop(Exit.STORAGE, f"{target} cannot be written: {error.strerror or error}; run it again") from None


def pieces_of(path: Any) -> Iterator[bytes]:
    """Yields the content of a file a piece at a time; of an object, going on where a connection broke."""
    if paths.is_remote(path):
        bucket, url = open_bucket(), os.fspath(path)
        yield from bucket.pieces(url, 0, int(path.metadata()["size"]))
        return
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
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
        if paths.is_remote(path) and "md5Hash" in (told := path.metadata()):
            return int(told["size"]), base64.b64decode(told["md5Hash"]).hex()
        size, md5 = 0, hashlib.md5(usedforsecurity=False)  # the one hash that object stores tell as well
        for piece in pieces_of(path):
            md5.update(piece)
            size += len(piece)
    except FileNotFoundError:
        return None
    return size, md5.hexdigest()
