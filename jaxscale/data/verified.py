"""Files that hold what their sha256 says: hashed before they are used, once on a machine while they stay as they are.

A file counts as the one that was hashed while its size, its times and its inode are. Its time of change can be set at
will, by `cp -p` as by `touch -r`; that of its inode (ctime) cannot. What rots on a medium under a file that nobody
writes to is seen by neither: for that, data.verify='always' reads everything at each start.
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

HASH_THREADS = 4  # hashlib leaves the interpreter to others; more would only wait for the disk
HASHED = "hashed.json"  # in a cached folder: what of its files was hashed while it was made
TOLD_BYTES = 100_000_000  # a smaller set is read before a person would wonder
LOOK_SECONDS = 1.0  # between two looks at a file: each is a round trip where it lies on another machine
Say = Callable[[str], None]
Stamp = tuple[int, int, int, int]


class Expected(NamedTuple):
    """What a file must go on to be while a run reads it."""

    stamp: Stamp  # as it was when it was found good
    sha256: str  # '' where only its size is to stay


def stamp_of(path: str | Path) -> Stamp:
    """(bytes, when its content changed, when anything of it changed, inode)."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def damaged(
    files: Mapping[str, str],
    cache: Path,
    name: str,
    say: Say | None,
    *,
    remember: bool = True,
    known: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """{path: what is wrong} of the files whose content is not of the sha256 given; '' where it is simply another.

    Args: files: {path: sha256}, whose sizes were looked at. name: what they are together, a path: what was found good
    under this name is remembered in `cache`, even where another file is not, so that a large set is not read twice. A
    cache that cannot be written only costs another reading. say: gets lines on waiting and long readings.
    remember: False to read everything now. known: what was found good elsewhere, as `remembered` has it.
    Raises: Unreadable naming a file that the storage does not give.
    """
    key = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    memory = cache / f"verified-{key}.json"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, BadInput):
            make_private(cache)
            waiting = lambda: say and say(f"waiting for another process that reads {name}")
            stack.enter_context(locked(cache / f"verified-{key}.lock", waiting))
        stamps: dict[str, Any] = {}
        for path, sha256 in files.items():
            with contextlib.suppress(OSError):  # reported when it is read
                stamps[path] = [*stamp_of(path), sha256]
        before = {**(known or {}), **remembered(memory)}
        new = [path for path in files if not remember or path not in stamps or before.get(path) != stamps[path]]
        if not new:
            return {}
        size = sum(stamps[path][0] for path in new if path in stamps)
        if say and size >= TOLD_BYTES:
            once = " once" if remember else ""
            say(f"reading {name}{once}, to see that nothing has changed ({len(new):,} files, {size / 1e6:,.1f} MB)")
        found = hashed({path: files[path] for path in new})
        with contextlib.suppress(OSError, BadInput):
            write_json(memory, {path: stamp for path, stamp in {**before, **stamps}.items() if path not in found})
    return found


def hashed(files: Mapping[str, str]) -> dict[str, str]:
    """{path: what is wrong}, as `damaged` has it; several files are read at once. Raises as `damaged` does."""

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


def remembered(memory: Path) -> dict[str, Any]:
    """What was found good, or nothing: a memory that is gone or torn only costs another reading."""
    try:
        known = read_json(memory)
    except (OSError, BadInput):
        return {}
    return known if isinstance(known, dict) else {}


def expected(files: Mapping[str, str]) -> dict[str, Expected]:
    """What `Unchanged` holds these files to, {path: sha256}, as they are now: to be called before they are hashed."""
    return {path: Expected(stamp_of(path), sha256) for path, sha256 in files.items()}


def of_size(files: Mapping[str, Expected]) -> dict[str, Expected]:
    """The same files, held to their sizes alone."""
    return {path: known._replace(sha256="") for path, known in files.items()}


class Rehashing:
    """Hashes files one after the other in a thread, while a run reads them."""

    def __init__(self):
        self._lock = threading.Lock()
        self._waiting: dict[str, Stamp] = {}
        self._done: dict[str, tuple[Stamp, str | Exception]] = {}

    def result(self, path: str, stamp: Stamp) -> tuple[Stamp, str] | None:
        """(its stamp, its sha256) since the file was first asked for, given once; None while that is not known.

        Raises: as file_sha256.
        """
        with self._lock:
            if path not in self._done:
                if path not in self._waiting:
                    self._waiting[path] = stamp
                    if len(self._waiting) == 1:  # a daemon: the end of a run does not wait for it
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
            except Exception as error:  # raised where the result is asked for
                found = error
            with self._lock:
                self._done[path] = self._waiting.pop(path), found
                path = next(iter(self._waiting), None)


class Unchanged:
    """Watches the files of a run while it reads them, which may take weeks."""

    def __init__(self, files: Mapping[str, Expected]):
        self._files = dict(files)
        self._looked: dict[str, float] = {}
        self._rehashing = Rehashing()

    def check(self, paths: Collection[str]) -> None:
        """Raises as check_unopened; to be called before mapped files are read: what was cut off would end the process.

        One that was renamed or deleted since is still there for us. Each is looked at once in LOOK_SECONDS.
        """
        now = time.monotonic()
        for path in paths:
            if now - self._looked.get(path, -math.inf) >= LOOK_SECONDS:
                self._looked[path] = now
                self._check(path, is_open=True)

    def check_unopened(self, paths: Collection[str]) -> None:
        """Raises Stop(DATA_MISMATCH) if one of them holds something else than it did; those not known are passed by.

        And Stop(STORAGE) if the storage does not tell.
        """
        for path in paths:
            self._check(path, is_open=False)

    def _check(self, path: str, *, is_open: bool) -> None:
        if (known := self._files.get(path)) is None:
            return
        try:
            now = stamp_of(path)
            if now == known.stamp or (is_open and now[3] != known.stamp[3]):
                return
            same = now[0] == known.stamp[0]
            if same and known.sha256:
                if only_touched(known.stamp, now) and is_open:
                    if (result := self._rehashing.result(path, now)) is None:
                        return
                    now, sha256 = result
                else:
                    sha256 = file_sha256(path)
                same = sha256 == known.sha256
        except (OSError, BadInput) as error:
            if not is_of_storage(error):
                return  # opening it raises
            raise Stop(Exit.STORAGE, f"{path} cannot be read any more: {error}; start again when it can") from None
        if not same:
            raise Stop(
                Exit.DATA_MISMATCH,
                f"{path} was changed after the run began: it is {self._what(now[0], known.stamp[0])}; bring it back "
                "and start again",
            )
        self._files[path] = known._replace(stamp=now)  # touched, or brought back

    @staticmethod
    def _what(size: int, was: int) -> str:
        if size == was:
            return "another file of the same size"
        return f"{'cut short' if size < was else 'too long'}, {size:,} bytes of {was:,}"


def only_touched(was: Stamp, now: Stamp) -> bool:
    """True where no more than ctime is another: by chmod or a hard link, and hardly ever with another content."""
    return now[:2] == was[:2] and now[3] == was[3]


def remove(path: Path) -> None:
    """Deletes what is under this name, whatever it is; nothing if nothing is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
