"""Verification of files by sha256: hashed before use, once per machine while they are unchanged.

A file counts as unchanged while its size, mtime, ctime and inode are. mtime can be set (`cp -p`, `touch -r`); ctime
cannot. Neither detects bit rot; data.verify='always' hashes everything at each start.
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

HASH_THREADS = 4  # hashlib releases the GIL; more threads would wait for the disk
HASHED = "hashed.json"  # in a cached folder: files that were hashed when it was created
REPORTED_BYTES = 100_000_000  # reading a larger set is logged
LOOK_SECONDS = 1.0  # between checks of a file: each is a round trip on network storage
Say = Callable[[str], None]
Stamp = tuple[int, int, int, int]


class Expected(NamedTuple):
    """The state that a file must keep while a run reads it."""

    stamp: Stamp  # when it was verified
    sha256: str  # '': check only the size


def stamp_of(path: str | Path) -> Stamp:
    """Returns (bytes, mtime_ns, ctime_ns, inode)."""
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
    """Returns {path: problem} of files that do not match their sha256; '' if only the hash differs.

    Args: files: {path: sha256}, with sizes already checked. name: path of the set; verified files are recorded in
    `cache` under this name, even if others fail, so that a large set is not read twice. If the cache cannot be written,
    files are read again next time. say: logs waiting and long reads. remember: False to read everything now. known:
    files verified elsewhere, see `read_verified`.
    Raises: Unreadable naming a file that the storage fails to read.
    """
    key = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    memory = cache / f"verified-{key}.json"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, BadInput):
            make_private(cache)
            waiting = lambda: say and say(f"waiting for another process that verifies {name}")
            stack.enter_context(locked(cache / f"verified-{key}.lock", waiting))
        stamps: dict[str, Any] = {}
        for path, sha256 in files.items():
            with contextlib.suppress(OSError):  # reported when the file is read
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
    """Hashes files concurrently and returns {path: problem}, with errors as `find_damaged`."""

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
    """Reads the record of verified files; empty if it is missing or damaged, so that files are hashed again."""
    try:
        known = read_json(memory)
    except (OSError, BadInput):
        return {}
    return known if isinstance(known, dict) else {}


def snapshot_files(files: Mapping[str, str]) -> dict[str, Expected]:
    """Records the current state of files {path: sha256} for FileWatch. Call it before hashing them."""
    return {path: Expected(stamp_of(path), sha256) for path, sha256 in files.items()}


def size_only(files: Mapping[str, Expected]) -> dict[str, Expected]:
    """Returns the states without hashes, so that only sizes are checked."""
    return {path: known._replace(sha256="") for path, known in files.items()}


class BackgroundHasher:
    """Hashes files one at a time in a background thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._waiting: dict[str, Stamp] = {}
        self._done: dict[str, tuple[Stamp, str | Exception]] = {}

    def result(self, path: str, stamp: Stamp) -> tuple[Stamp, str] | None:
        """Returns (stamp, sha256) once after the first request for a file is done; None until then."""
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
        """Raises as check_file, once per LOOK_SECONDS. Call it before reading: a truncated file ends the process."""
        now = time.monotonic()
        for path in paths:
            if now - self._checked_at.get(path, -math.inf) >= LOOK_SECONDS:
                self._checked_at[path] = now
                self.check_file(path, is_open=True)

    def check_file(self, path: str, *, is_open: bool = False) -> None:
        """Raises Stop(DATA_MISMATCH) for a changed file, Stop(STORAGE) for an unreadable one; ignores unknown files."""
        if (known := self._files.get(path)) is None:
            return
        try:
            now = stamp_of(path)
            if now == known.stamp or (is_open and now[3] != known.stamp[3]):
                return
            same = now[0] == known.stamp[0]
            if same and known.sha256:
                # after chmod or a hard link only ctime differs, almost never after a change of content
                if is_open and (now[:2], now[3]) == (known.stamp[:2], known.stamp[3]):
                    if (result := self._hasher.result(path, now)) is None:
                        return
                    now, sha256 = result
                else:
                    sha256 = file_sha256(path)
                same = sha256 == known.sha256
        except (OSError, BadInput) as error:
            if not is_of_storage(error):
                return  # opening it raises
            raise Stop(Exit.STORAGE, f"{path} can no longer be read: {error}; restart when it can") from None
        if not same:
            size, was = now[0], known.stamp[0]
            what = f"{'truncated' if size < was else 'too long'}, {size:,} bytes of {was:,}"
            what = "a different file of the same size" if size == was else what
            raise Stop(
                Exit.DATA_MISMATCH, f"{path} was changed after the run started: it is {what}; restore it and restart"
            )
        self._files[path] = known._replace(stamp=now)  # touched or restored


def remove(path: Path) -> None:
    """Deletes a file or folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
