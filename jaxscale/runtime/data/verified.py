"""Verifies files by sha256 before use, once per machine unless a file changes.

A file is considered unchanged if its size, mtime, ctime and inode are unchanged. mtime can be set (`cp -p`, `touch
-r`), ctime cannot. This does not detect bit rot. With data.verify='always', all files are hashed at each start.
"""

import contextlib
import hashlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.system.digest import file_sha256
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.foreign import Unreadable, is_of_storage
from jaxscale.system.paths import locked, make_private, read_json, write_json

HASH_THREADS = 4  # hashlib releases the GIL; with more threads the disk limits the speed
HASHED = "hashed.json"  # list of files in a cached folder that were hashed when the folder was created
REPORTED_BYTES = 100_000_000  # reading at least this number of bytes is logged
LOOK_SECONDS = 1.0  # time between checks of a file, each of which is a round trip on network storage
Say = Callable[[str], None]
Stamp = tuple[int, int, int, int]


class Expected(NamedTuple):
    """The expected state of a file while a run reads the file."""

    stamp: Stamp  # result of stamp_of() when the file was verified
    sha256: str  # '' to check only the size


def stamp_of(path: str | Path) -> Stamp:
    """Returns (bytes, mtime_ns, ctime_ns, inode) of a file."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def find_damaged(
    files: Mapping[str, str],
    cache: Path,
    name: str,
    say: Say | None,
    *,
    remember: bool = True,
    known: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Returns {path: problem} for files that do not match their sha256. A problem is '' for a readable file.

    Verified files are recorded in the cache, and are not read again until they change.
    files: {path: sha256}; sizes must have been checked. name: path of the set, used as the key in the cache. say:
    function that logs a line. remember: False to hash all files again. known: additional records of verified files,
    from read_verified().
    Raises Unreadable, which names the file, if the storage cannot be read.
    """
    key = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    memory = cache / f"verified-{key}.json"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, BadInput):
            make_private(cache)
            waiting = lambda: say and say(f"waiting while another process verifies {name}")
            stack.enter_context(locked(cache / f"verified-{key}.lock", waiting))
        stamps: dict[str, Any] = {}
        for path, sha256 in files.items():
            with contextlib.suppress(OSError):  # reading the file reports the error
                stamps[path] = [*stamp_of(path), sha256]
        before = {**(known or {}), **read_verified(memory)}
        new = [path for path in files if not remember or path not in stamps or before.get(path) != stamps[path]]
        if not new:
            return {}
        size = sum(stamps[path][0] for path in new if path in stamps)
        if say and size >= REPORTED_BYTES:
            once = " once" if remember else ""
            say(f"reading {name}{once}, to verify its hashes ({len(new):,} files, {size / 1e6:,.1f} MB)")
        found = hash_mismatches({path: files[path] for path in new})
        with contextlib.suppress(OSError, BadInput):
            write_json(memory, {path: stamp for path, stamp in {**before, **stamps}.items() if path not in found})
    return found


def hash_mismatches(files: Mapping[str, str]) -> dict[str, str]:
    """Hashes files concurrently; returns {path: problem} as find_damaged() does. Raises Unreadable."""

    def problem(path: str) -> str | None:
        try:
            return None if file_sha256(path) == files[path] else ""
        except Unreadable:
            raise
        except BadInput as error:
            return str(error)

    with ThreadPoolExecutor(min(HASH_THREADS, os.cpu_count() or 1)) as pool:
        problems = dict(zip(files, pool.map(problem, files)))
    return {path: problem for path, problem in problems.items() if problem is not None}


def read_verified(memory: Path) -> dict[str, Any]:
    """Returns the record of verified files, or {} if the record is missing or damaged."""
    try:
        known = read_json(memory)
    except (OSError, BadInput):
        return {}
    return known if isinstance(known, dict) else {}


def snapshot_files(files: Mapping[str, str]) -> dict[str, Expected]:
    """Returns the current state of the files for FileWatch. files: {path: sha256}. Must be called before hashing."""
    return {path: Expected(stamp_of(path), sha256) for path, sha256 in files.items()}


def size_only(files: Mapping[str, Expected]) -> dict[str, Expected]:
    """Returns the expected states without hashes, so that FileWatch checks only sizes."""
    return {path: known._replace(sha256="") for path, known in files.items()}


class BackgroundHasher:
    """Hashes files in a background thread, one at a time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._waiting: dict[str, Stamp] = {}
        self._done: dict[str, tuple[Stamp, str | Exception]] = {}

    def result(self, path: str, stamp: Stamp) -> tuple[Stamp, str] | None:
        """Requests the hash of a file; returns (stamp, sha256) if available, else None. Returns each result once."""
        with self._lock:
            if path not in self._done:
                if path not in self._waiting:
                    self._waiting[path] = stamp
                    if len(self._waiting) == 1:  # a daemon, so that the process can exit
                        threading.Thread(target=self._work, name="rehashing", daemon=True).start()
                return None
            stamp, found = self._done.pop(path)
        if isinstance(found, Exception):
            raise found
        return stamp, found

    def _work(self) -> None:
        path: str | None = next(iter(self._waiting))
        while path is not None:
            try:
                found: str | Exception = file_sha256(path)
            except Exception as error:  # raised in `result`
                found = error
            with self._lock:
                self._done[path] = self._waiting.pop(path), found
                path = next(iter(self._waiting), None)


class FileWatch:
    """Detects changes of files while a run reads them."""

    def __init__(self, files: Mapping[str, Expected]):
        self._files = dict(files)
        self._checked_at: dict[str, float] = {}
        self._hasher = BackgroundHasher()

    def check(self, paths: Collection[str]) -> None:
        """Calls check_file() at most once per LOOK_SECONDS. Call before each read: a truncated map ends the process."""
        now = time.monotonic()
        for path in paths:
            if now - self._checked_at.get(path, -math.inf) >= LOOK_SECONDS:
                self._checked_at[path] = now
                self.check_file(path, is_open=True)

    def check_file(self, path: str, *, is_open: bool = False) -> None:
        """Raises Stop(DATA_MISMATCH) for a changed file, Stop(STORAGE) if reading fails. Ignores unknown files."""
        if (known := self._files.get(path)) is None:
            return
        try:
            now = stamp_of(path)
            if now == known.stamp or (is_open and now[3] != known.stamp[3]):
                return
            same = now[0] == known.stamp[0]
            if same and known.sha256:
                # if only ctime differs, the cause is probably chmod or a hard link, so hash in the background
                if is_open and (now[:2], now[3]) == (known.stamp[:2], known.stamp[3]):
                    if (result := self._hasher.result(path, now)) is None:
                        return
                    now, sha256 = result
                else:
                    sha256 = file_sha256(path)
                same = sha256 == known.sha256
        except (OSError, BadInput) as error:
            if not is_of_storage(error):
                return  # opening the file raises the error
            raise Stop(Exit.STORAGE, f"{path} can no longer be read: {error}; fix the storage and restart") from None
        if not same:
            size, was = now[0], known.stamp[0]
            what = f"{'truncated' if size < was else 'too long'}, {size:,} bytes of {was:,}"
            what = "a different file of the same size" if size == was else what
            raise Stop(
                Exit.DATA_MISMATCH, f"{path} was changed after the run started: it is {what}; restore it and restart"
            )
        self._files[path] = known._replace(stamp=now)  # same content


def remove(path: Path) -> None:
    """Deletes a file or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
