"""Reads prepared sets in gs:// buckets. Each shard is downloaded at first use, hashed, and memory-mapped.

Downloads are stored in an LRU cache, a local folder of bounded size that is shared by processes:

objects/SHA256/NAME       a complete file; the mtime of the folder is the time of last use
objects/SHA256/.part-SIZE an incomplete download, in progress or from a killed process, with SIZE bytes reserved
locks/SHA256              locked (flock) by the process that downloads the file
users/HOST-PID-NUMBER     locked by a running process; lines "+SHA256" and "-SHA256" record starts and ends of use
lock                      locked briefly while users, objects or reservations change
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
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxscale.runtime.data.verified import Say, remove
from jaxscale.system.bucket import Bucket
from jaxscale.system.digest import file_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import locked, make_private, sync_folder
from jaxscale.system.storage import open_bucket

WRONG_HASHES = 3  # number of downloads with a wrong hash before an error is raised
PART_PREFIX = ".part-"  # names in a set do not begin with a dot


class CacheUnwritable(BadInput):
    """Raised if the cache folder cannot be written. The data itself may be valid."""


class ShardCache:
    """Cache of files in buckets. A fetched file is not evicted before `release` or `close`."""

    def __init__(self, folder: Path, max_bytes: int, *, bucket: Bucket | None = None, say: Say = print):
        """max_bytes: size limit of all files, including downloads in progress."""
        self.folder, self.max_bytes, self._say = Path(folder), max_bytes, say
        self._bucket = bucket
        self._thread_lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        """Resets the state, in the constructor and in a forked process, which does not inherit its parent's files."""
        self._pid: int = os.getpid()
        self._user: BinaryIO | None = None
        self._using: set[str] = set()
        self._key_locks: dict[str, threading.Lock] = {}
        self._mapped: dict[str, RemoteIds] = {}

    @property
    def bucket(self) -> Bucket:
        """Returns the client for buckets, which is opened at first use."""
        with self._thread_lock:
            self._bucket = self._bucket or open_bucket()
            return self._bucket

    def fetch(self, url: str, size: int, sha256: str) -> Path:
        """Downloads an object if needed; returns its local path. Prevents eviction until `release` or `close`."""
        with self._thread_lock:
            if os.getpid() != self._pid:
                self._reset()
            key_lock = self._key_locks.setdefault(sha256, threading.Lock())
        path = self.folder / "objects" / sha256 / url.rpartition("/")[2]
        with key_lock:
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
                    raise CacheUnwritable(
                        f"the cache {self.folder} cannot be written: {error}; set data.cache_dir"
                    ) from None
                raise
        return path

    def _fetch(self, url: str, size: int, sha256: str, path: Path) -> None:
        """Downloads the object unless a different process has just downloaded it."""
        with locked(self.folder / "locks" / sha256, lambda: self._say(f"waiting while another process fetches {url}")):
            if is_whole(path, size, sha256):
                return
            part = path.with_name(f"{PART_PREFIX}{size}")
            with locked(self.folder / "lock"):
                if os.path.lexists(path):
                    self._say(f"{path} is damaged; downloading it again")
                    remove(path)
                self._make_room(size, part)
                path.parent.mkdir(exist_ok=True)
                part.touch()
            download(self.bucket, url, size, sha256, part)
            with locked(self.folder / "lock"):
                os.replace(part, path)
            sync_folder(path.parent)

    def _make_room(self, size: int, part: Path) -> None:
        """Evicts unused files, least recently used first, until `size` bytes fit. The file `part` is not counted."""
        folders = list(filter(os.path.isdir, (self.folder / "objects").glob("*")))
        sizes = {folder.name: sum(map(reserved_bytes, set(folder.iterdir()) - {part})) for folder in folders}
        excess = sum(sizes.values()) + size - self.max_bytes
        if excess <= 0:
            return
        busy = self._busy()
        for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime_ns):
            if excess > 0 and folder.name not in busy:
                shutil.rmtree(folder)
                excess -= sizes[folder.name]
        for ids in sorted(self._mapped.values(), key=lambda ids: ids.used):  # can be mapped again
            if excess > 0 and ids.mapped is not None and busy[ids.sha256] == {self._user_name}:
                self._write_use(f"-{ids.sha256}")
                ids.mapped = None
                shutil.rmtree(self.folder / "objects" / ids.sha256)
                excess -= sizes[ids.sha256]
        if excess > 0:
            raise BadInput(
                f"the cache {self.folder} of {self.max_bytes:,} bytes has no space for a file of {size:,} bytes, "
                f"because all cached files are in use; raise data.cache_bytes by at least {excess:,}"
            )

    def _busy(self) -> dict[str, set[str]]:
        """Returns {sha256: user files of the running processes that use it}; deletes user files of ended processes."""
        users: dict[str, set[str]] = {}
        for path in (self.folder / "users").glob("*"):
            if path.name != self._user_name:
                with open(path, "rb") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        pass  # the process is running
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
        """Marks a file as in use, so that no process evicts it."""
        for name in ("", "objects", "locks", "users"):
            make_private(self.folder / name)
        with locked(self.folder / "lock"), self._thread_lock:
            if self._user is None:
                name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
                self._user = open(self.folder / "users" / name, "xb", buffering=0)  # noqa: SIM115 - open until exit
                fcntl.flock(self._user, fcntl.LOCK_EX)
                weakref.finalize(self, self._user.close)  # in case close() is not called
            self._write_use(f"+{sha256}")

    def _write_use(self, line: str) -> None:
        """Appends '+SHA256' or '-SHA256' to the user file. The caller must hold the cache lock."""
        assert self._user is not None, "_use opens the user file"
        self._user.write(f"{line}\n".encode())
        (self._using.add if line[0] == "+" else self._using.discard)(line[1:])

    def release(self, sha256: str) -> None:
        """Allows eviction of a file."""
        if sha256 not in self._using:
            return
        with locked(self.folder / "lock"), self._thread_lock:
            if sha256 in self._using:
                self._write_use(f"-{sha256}")

    def close(self) -> None:
        """Releases all files."""
        with self._thread_lock:
            for ids in self._mapped.values():
                ids.mapped = None
            if self._user is not None and self._pid == os.getpid():
                self._user.close()
            self._reset()

    def ids(self, url: str, size: int, sha256: str, dtype: str) -> "RemoteIds":
        """Returns the ids of a .bin in a bucket, which is downloaded and memory-mapped at the first read."""
        with self._thread_lock:
            return self._mapped.setdefault(sha256, RemoteIds(self, url, size, sha256, dtype))


def reserved_bytes(file: Path) -> int:
    """Returns the size of a cached file, or the reserved size of an incomplete download."""
    reserved = file.name.removeprefix(PART_PREFIX)
    return int(reserved) if file.name != reserved and reserved.isdecimal() else file.lstat().st_size


class RemoteIds:
    """Array-like token ids of a .bin in a bucket. The file is downloaded at the first read and after an eviction."""

    _ticks = itertools.count()

    def __init__(self, cache: ShardCache, url: str, size: int, sha256: str, dtype: str):
        self.sha256, self.used = sha256, 0
        self._cache, self._url, self._size, self._dtype = cache, url, size, np.dtype(dtype)
        self.mapped: np.ndarray | None = None

    def __len__(self) -> int:
        return self._size // self._dtype.itemsize

    def __getitem__(self, window: slice | int) -> Any:
        ids = self.mapped  # a local reference, with which a mapped file is readable even after an eviction
        if ids is None:
            path = self._cache.fetch(self._url, self._size, self.sha256)
            ids = self.mapped = np.asarray(np.memmap(path, self._dtype, mode="r"))
        self.used = next(self._ticks)
        return ids[window]


def map_ids(path: str, dtype: str) -> Any:
    """Returns the ids of a .bin: a memory map of a local file, or RemoteIds for a URL from locator()."""
    little = np.dtype(dtype).newbyteorder("<")
    if "://" not in path:  # an empty file cannot be mapped, and slicing an np.memmap is much slower
        return np.asarray(np.memmap(path, little, mode="r")) if os.path.getsize(path) else np.zeros(0, little)
    url, _, fields = path.rpartition("#")
    about = dict(urllib.parse.parse_qsl(fields))
    cache = shard_cache(about["cache"], int(about["cache_bytes"]))
    return cache.ids(url, int(about["bytes"]), about["sha256"], little.str)


def locator(url: str, size: int, sha256: str, cache: ShardCache) -> str:
    """Returns a URL with all download arguments in its fragment, so that a TokenSet can be pickled."""
    about = {"bytes": size, "sha256": sha256, "cache": cache.folder, "cache_bytes": cache.max_bytes}
    return f"{url}#{urllib.parse.urlencode(about)}"


@functools.lru_cache(maxsize=8)
def shard_cache(folder: str, max_bytes: int) -> ShardCache:
    """Returns the ShardCache of this process for a folder. Each process has at most one per folder."""
    return ShardCache(Path(folder), max_bytes)


def download(bucket: Bucket, url: str, size: int, sha256: str, part: Path) -> None:
    """Downloads an object to `part` and checks the hash. Resumes an incomplete download in `part`."""
    for _ in range(WRONG_HASHES):
        with open(part, "r+b") as file:
            found = hashlib.file_digest(file, "sha256")
            try:
                for piece in bucket.pieces(url, file.tell(), size):
                    file.write(piece)
                    found.update(piece)
            except FileNotFoundError as error:
                raise BadInput(str(error)) from None
            file.flush()
            os.fsync(file.fileno())
        if found.hexdigest() == sha256:
            return
        os.truncate(part, 0)  # outdated beginning or damaged download: download again
    raise BadInput(
        f"{url} does not match the sha256 in its manifest after {WRONG_HASHES} downloads: it was changed after the "
        "manifest was written; publish the set again"
    )


def is_whole(path: Path, size: int, sha256: str) -> bool:
    """Returns True if the file exists and has this size and hash. Reads the whole file."""
    try:
        return path.stat().st_size == size and file_sha256(str(path)) == sha256
    except FileNotFoundError:
        return False
