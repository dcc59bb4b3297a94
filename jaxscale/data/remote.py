"""Prepared sets in gs:// buckets: each shard is copied when it is first needed, checked by its hash, and mapped.

A cache folder on a local disk, which any number of processes share, never grows beyond its bound:

objects/SHA256/NAME       a whole file, under the hash of its content; used last at the folder's time
objects/SHA256/.part-SIZE one that is coming or was left by a killed process, for which SIZE bytes are set aside
locks/SHA256              held (flock) by the process that fetches it
users/HOST-PID-NUMBER     held by a running process; "+SHA256" and "-SHA256" lines: what it uses and no longer uses
lock                      held for a moment while the two above and what is set aside change
"""

import fcntl
import functools
import hashlib
import itertools
import os
import secrets
import shutil
import socket
import threading
import urllib.parse
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxscale.data.verified import Say, remove
from jaxscale.system.bucket import Bucket
from jaxscale.system.digest import READ_BYTES, file_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import locked, make_private, sync_folder
from jaxscale.system.storage import open_bucket

WRONG_HASHES = 3  # damaged downloads before giving up
COMING = ".part-"  # no file of a set begins with a dot


class Unwritable(BadInput):
    """The cache folder cannot be written, which says nothing about the data."""


class ShardCache:
    """Files of buckets on the local disk. What was asked for stays until it is released or the cache closed."""

    def __init__(self, folder: Path, max_bytes: int, *, bucket: Bucket | None = None, say: Say = print):
        """max_bytes: of all files together, those that are coming included."""
        self.folder, self.max_bytes, self._say = Path(folder), max_bytes, say
        self._bucket = bucket
        self._guard = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        """Makes the cache of a forked process its own: it holds nothing yet."""
        self._pid: int = os.getpid()
        self._user: BinaryIO | None = None
        self._using: set[str] = set()
        self._key_guards: dict[str, threading.Lock] = {}
        self._mapped: dict[str, RemoteIds] = {}

    @property
    def bucket(self) -> Bucket:
        """The client of the buckets, opened at the first use."""
        with self._guard:
            self._bucket = self._bucket or open_bucket()
            return self._bucket

    def local(self, url: str, size: int, sha256: str) -> Path:
        """Where the object lies on the local disk, fetched first if it is not there or no longer what it was.

        It stays there until `release`, or until this cache is closed or its process ends.
        Raises: BadInput telling what is missing, does not fit or cannot be written.
        """
        with self._guard:
            if os.getpid() != self._pid:
                self._forget()
            guard = self._key_guards.setdefault(sha256, threading.Lock())
        path = self.folder / "objects" / sha256 / url.rpartition("/")[2]
        with guard:
            if sha256 in self._using and path.exists():
                os.utime(path.parent)
                return path
            try:
                self._use(sha256)
                if not is_whole(path, size, sha256):
                    self._fetch(url, size, sha256, path)
                os.utime(path.parent)
            except BaseException as error:
                self.release(sha256)
                if isinstance(error, OSError):
                    raise Unwritable(
                        f"the cache {self.folder} cannot be written: {error}; set data.cache_dir"
                    ) from None
                raise
        return path

    def _fetch(self, url: str, size: int, sha256: str, path: Path) -> None:
        """Brings the object, unless another process has just done so."""
        with locked(self.folder / "locks" / sha256, lambda: self._say(f"waiting for another process to fetch {url}")):
            if is_whole(path, size, sha256):
                return
            part = path.with_name(f"{COMING}{size}")
            with locked(self.folder / "lock"):
                if os.path.lexists(path):
                    self._say(f"{path} is damaged, and is fetched again")
                    remove(path)
                self._make_room(size, part)
                path.parent.mkdir(exist_ok=True)
                part.touch()
            download(self.bucket, url, size, sha256, part)
            with locked(self.folder / "lock"):
                os.replace(part, path)
            sync_folder(path.parent)

    def _make_room(self, size: int, part: Path) -> None:
        """Removes what was used longest ago and is not in use, until `size` bytes fit in the place of `part`."""
        entries = list(self._entries(part))
        excess = sum(entry.size for entry in entries) + size - self.max_bytes
        if excess <= 0:
            return
        busy = self._busy()
        for entry in sorted(entries, key=lambda entry: entry.used):
            if excess > 0 and entry.sha256 not in busy:
                shutil.rmtree(self.folder / "objects" / entry.sha256)
                excess -= entry.size
        sizes = {entry.sha256: entry.size for entry in entries}
        for ids in sorted(self._mapped.values(), key=lambda ids: ids.used):  # ours, which can be mapped again
            if excess > 0 and ids.is_mapped and busy[ids.sha256] == {self._user_name}:
                self._write_use(f"-{ids.sha256}")
                ids.drop()
                shutil.rmtree(self.folder / "objects" / ids.sha256)
                excess -= sizes[ids.sha256]
        if excess > 0:
            raise BadInput(
                f"the cache {self.folder} of at most {self.max_bytes:,} bytes has no room for {size:,} more: all "
                f"that is in it is in use; raise data.cache_bytes by {excess:,} or more"
            )

    def _entries(self, but: Path) -> Iterator["Entry"]:
        """Everything in the cache but that file, with what it takes or has set aside."""
        for folder in filter(os.path.isdir, (self.folder / "objects").glob("*")):
            size = 0
            for file in set(folder.iterdir()) - {but}:
                reserved = file.name.removeprefix(COMING)
                size += int(reserved) if file.name != reserved and reserved.isdecimal() else file.lstat().st_size
            yield Entry(folder.name, size, folder.stat().st_mtime_ns)

    def _busy(self) -> dict[str, set[str]]:
        """{sha256: names of the running processes that use it}. Forgets processes that have ended."""
        users: dict[str, set[str]] = {}
        for path in (self.folder / "users").glob("*"):
            if path.name != self._user_name:
                with open(path, "rb") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        pass  # it runs
                    else:
                        path.unlink()
                        continue
            using: set[str] = set()
            for line in path.read_text("utf-8").splitlines():
                (using.add if line[0] == "+" else using.discard)(line[1:])
            for sha256 in using:
                users.setdefault(sha256, set()).add(path.name)
        return users

    @property
    def _user_name(self) -> str:
        return "" if self._user is None else os.path.basename(self._user.name)

    def _use(self, sha256: str) -> None:
        """From here on nobody removes this file."""
        for name in ("", "objects", "locks", "users"):
            make_private(self.folder / name)
        with locked(self.folder / "lock"), self._guard:
            if self._user is None:
                name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
                self._user = open(self.folder / "users" / name, "xb", buffering=0)  # noqa: SIM115 - as long as we run
                fcntl.flock(self._user, fcntl.LOCK_EX)
                weakref.finalize(self, self._user.close)  # also where nobody calls close
            self._write_use(f"+{sha256}")

    def _write_use(self, line: str) -> None:
        """Notes a change of use. The caller holds the cache's lock."""
        assert self._user is not None, "a file is used before its use is noted"
        self._user.write(f"{line}\n".encode())
        (self._using.add if line[0] == "+" else self._using.discard)(line[1:])

    def release(self, sha256: str) -> None:
        """Allows the file to be evicted when room is needed."""
        if sha256 not in self._using:
            return
        with locked(self.folder / "lock"), self._guard:
            if sha256 in self._using:
                self._write_use(f"-{sha256}")

    def close(self) -> None:
        """Releases everything."""
        with self._guard:
            for ids in self._mapped.values():
                ids.drop()
            if self._user is not None and self._pid == os.getpid():
                self._user.close()
            self._forget()

    def ids(self, url: str, size: int, sha256: str, dtype: str) -> "RemoteIds":
        """The ids of a .bin in a bucket, fetched and mapped when they are first read."""
        with self._guard:
            return self._mapped.setdefault(sha256, RemoteIds(self, url, size, sha256, dtype))


class Entry(NamedTuple):
    """An object in the cache."""

    sha256: str
    size: int
    used: int  # nanoseconds


class RemoteIds:
    """The ids of a .bin in a bucket, read as an array is. Fetched and mapped at the first read.

    The cache may drop the mapping of what was used longest ago, to make room; the next read fetches it again.
    """

    _ticks = itertools.count()

    def __init__(self, cache: ShardCache, url: str, size: int, sha256: str, dtype: str):
        self.sha256, self.used = sha256, 0
        self._cache, self._url, self._size, self._dtype = cache, url, size, np.dtype(dtype)
        self._ids: np.ndarray | None = None

    def __len__(self) -> int:
        return self._size // self._dtype.itemsize

    def __getitem__(self, window: slice | int) -> Any:
        ids = self._ids  # ours from here on, even if the cache drops it: a mapped file stays readable when removed
        if ids is None:
            path = self._cache.local(self._url, self._size, self.sha256)
            ids = self._ids = np.asarray(np.memmap(path, self._dtype, mode="r"))
        self.used = next(self._ticks)
        return ids[window]

    @property
    def is_mapped(self) -> bool:
        """True while it holds its file."""
        return self._ids is not None

    def drop(self) -> None:
        """Drops the mapping."""
        self._ids = None


def map_ids(path: str, dtype: str) -> Any:
    """What gives the ids of a .bin in slices: an array over a local file, or RemoteIds for an address of `locator`."""
    little = np.dtype(dtype).newbyteorder("<")
    if "://" not in path:
        if not os.path.getsize(path):
            return np.zeros(0, little)  # which cannot be mapped
        return np.asarray(np.memmap(path, little, mode="r"))  # slicing an np.memmap itself costs far more
    url, _, fields = path.rpartition("#")
    about = dict(urllib.parse.parse_qsl(fields))
    cache = shard_cache(about["cache"], int(about["cache_bytes"]))
    return cache.ids(url, int(about["bytes"]), about["sha256"], little.str)


def locator(url: str, size: int, sha256: str, cache: ShardCache) -> str:
    """The address of an object with all that is needed to fetch it, so that a table of documents can be pickled."""
    about = {"bytes": size, "sha256": sha256, "cache": cache.folder, "cache_bytes": cache.max_bytes}
    return f"{url}#{urllib.parse.urlencode(about)}"


@functools.lru_cache(maxsize=8)
def shard_cache(folder: str, max_bytes: int) -> ShardCache:
    """The process's cache in this folder: kept, since what it holds open is what keeps others from removing it."""
    return ShardCache(Path(folder), max_bytes)


def download(bucket: Bucket, url: str, size: int, sha256: str, part: Path) -> None:
    """Completes the local file `part`, which may hold the beginning of the object, until its hash agrees.

    Raises: BadInput if the object is not there, may not be read, or is another one.
    """
    for _ in range(WRONG_HASHES):
        if fetch_rest(bucket, url, size, part) == sha256:
            return
        os.truncate(part, 0)  # the beginning of a killed process, or damaged on its way: once more from the start
    raise BadInput(
        f"{url} arrived {WRONG_HASHES} times with another sha256 than its manifest tells: it was changed after the "
        "manifest; publish the set again"
    )


def fetch_rest(bucket: Bucket, url: str, size: int, part: Path) -> str:
    """The sha256 of the file once it has all bytes of the object. It is hashed as it is written."""
    sha256 = hashlib.sha256()
    with open(part, "r+b") as file:
        while piece := file.read(READ_BYTES):
            sha256.update(piece)
        done = file.tell()
        try:
            for piece in bucket.pieces(url, done, size):
                file.write(piece)
                sha256.update(piece)
        except FileNotFoundError as error:
            raise BadInput(str(error)) from None
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


def is_whole(path: Path, size: int, sha256: str) -> bool:
    """True if the file is there with this size and content; the whole of it is read."""
    try:
        return path.stat().st_size == size and file_sha256(str(path)) == sha256
    except FileNotFoundError:
        return False
