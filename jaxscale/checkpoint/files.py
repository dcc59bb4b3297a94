"""The files of a checkpoint, on a disk or in a bucket: which there are, what they hold, and how one is copied."""

import base64
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator
from typing import Any

from jaxscale.system import paths
from jaxscale.system.bucket import Bucket, Transient, open_bucket
from jaxscale.system.exits import BadInput, Exit, Stop

READ_BYTES = 1 << 20


def files_under(folder: Any) -> dict[str, int]:
    """{"state/d/abc": bytes} of every file below a folder; in a bucket by one request for a thousand of them."""
    if paths.is_remote(folder):
        return {name: size for name, size in objects_under(os.fspath(folder))}
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            with contextlib.suppress(FileNotFoundError):  # training deletes old steps meanwhile
                found[os.path.relpath(path, folder).replace(os.sep, "/")] = os.stat(path).st_size
    return dict(sorted(found.items()))


def objects_under(url: str) -> Iterator[tuple[str, int]]:
    """Yields (name below `url`, bytes) of the objects of a bucket. cloud.google.com/storage/docs/json_api/v1/objects"""
    bucket, _, prefix = url.removeprefix("gs://").rstrip("/").partition("/")
    door, query = open_bucket(), {"prefix": f"{prefix}/", "fields": "items(name,size),nextPageToken"}

    def ask() -> dict[str, Any]:
        where = f"{door.endpoint}/storage/v1/b/{urllib.parse.quote(bucket)}/o?{urllib.parse.urlencode(query)}"
        with door.request("GET", where, url, "read") as response:
            return json.load(response)

    while True:
        try:
            page = door.patiently(ask, url)
        except FileNotFoundError as error:
            raise BadInput(f"{str(error).partition(';')[0]}; does the bucket exist?") from None
        for item in page.get("items", ()):
            if not item["name"].endswith("/"):  # a folder, as some tools write it
                yield item["name"][len(prefix) + 1 :], int(item["size"])
        if "nextPageToken" not in page:
            return
        query["pageToken"] = page["nextPageToken"]


def file_mark(path: Any) -> tuple[int, str]:
    """(bytes, md5 in hexadecimal) of a file."""
    size, md5 = 0, hashlib.md5(usedforsecurity=False)  # the one hash that object stores tell as well
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            md5.update(piece)
            size += len(piece)
    return size, md5.hexdigest()


def copy_file(source: Any, target: Any) -> None:
    """Copies one file, which appears whole. Raises BadInput for a bucket that refuses, OSError's cause as Stop."""
    try:
        if not paths.is_remote(target):
            paths.make_private(target.parent)
        if not paths.is_remote(source):
            if paths.is_remote(target):
                open_bucket(writing=True).upload(source, os.fspath(target))
            else:
                with open(source, "rb") as content, paths.replacing(target) as file:
                    shutil.copyfileobj(content, file, READ_BYTES)
                forget(target)
        elif paths.is_remote(target):
            with tempfile.TemporaryDirectory() as scratch:
                download(os.fspath(source), pathlib.Path(scratch) / "object")
                open_bucket(writing=True).upload(pathlib.Path(scratch) / "object", os.fspath(target))
        else:
            with paths.replacing(target) as file:
                fetch(open_bucket(), os.fspath(source), file)
            forget(target)
    except FileNotFoundError as error:
        raise BadInput(f"{error.filename or error} is gone: training deletes old steps; pin the step first") from None
    except OSError as error:
        raise Stop(Exit.STORAGE, f"{target} cannot be written: {error.strerror or error}; run it again") from None


def download(url: str, path: pathlib.Path) -> None:
    """Copies an object to a local file."""
    with open(path, "wb") as file:
        fetch(open_bucket(), url, file)


def fetch(bucket: Bucket, url: str, file: Any) -> None:
    """Writes an object into a file, and goes on where a connection broke."""
    told = bucket.metadata(url)
    if told is None:
        raise FileNotFoundError(2, "", url)
    size, done, failures = int(told["size"]), 0, 0
    while done < size:
        try:
            for piece in bucket.stream(url, done, size):
                file.write(piece)
                done, failures = done + len(piece), 0
        except Transient as fault:
            failures += 1
            bucket.wait(fault, failures, url)


def forget(path: pathlib.Path) -> None:
    """Drops the pages of a file that is on the disk from memory, so that reading it back reads the disk."""
    if hasattr(os, "posix_fadvise"):  # Linux
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mark_of(path: Any) -> tuple[int, str] | None:
    """(bytes, md5) of a file or object; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return remote_mark(path) if paths.is_remote(path) else file_mark(path)
    return None


def remote_mark(path: Any) -> tuple[int, str]:
    """(bytes, md5) of an object as the service tells it; of one that was composed of parts, read from its bytes."""
    bucket, url = open_bucket(), os.fspath(path)
    told = bucket.metadata(url)
    if told is None:
        raise FileNotFoundError(2, "", url)
    if "md5Hash" in told:
        return int(told["size"]), base64.b64decode(told["md5Hash"]).hex()
    sink = Hashing()
    fetch(bucket, url, sink)
    return int(told["size"]), sink.md5.hexdigest()


class Hashing:
    """A file that keeps nothing but the md5 of what is written into it."""

    def __init__(self):
        self.md5 = hashlib.md5(usedforsecurity=False)

    def write(self, piece: bytes) -> None:
        """Takes the next bytes."""
        self.md5.update(piece)
