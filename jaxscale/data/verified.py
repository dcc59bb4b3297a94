"""Files that hold what their sha256 says: hashed before they are used, once on a machine while they stay as they are.

A file counts as the one that was hashed while its size, its times and its inode are. Its time of change can be set at
will, by `cp -p` as by `touch -r`; that of its inode (ctime) cannot. What rots on a medium under a file that nobody
writes to is seen by neither: for that, data.verify='always' reads everything at each start.
"""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.data.digest import file_sha256
from jaxscale.data.locks import locked
from jaxscale.exits import BadInput, Exit, Stop
from jaxscale.paths import make_private, read_json, write_json

HASH_THREADS = 4  # hashlib leaves the interpreter to others; more would only wait for the disk
CHECKED_AHEAD = 0.05  # seconds; looking at 32 files costs 0.1 ms, and reading 64 rows of them 0.6 ms
Say = Callable[[str], None]
Stamp = tuple[int, int, int, int]


class Expected(NamedTuple):
    """What a file must go on to be while a run reads it."""

    stamp: Stamp  # as it was when it was found good
    sha256: str


def stamp_of(path: str | Path) -> Stamp:
    """(bytes, when its content changed, when anything of it changed, inode)."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def damaged(
    files: Mapping[str, str], cache: Path, name: str, say: Say | None, *, remember: bool = True
) -> dict[str, str]:
    """{path: what is wrong} of the files whose content is not of the sha256 given; '' where it is simply another.

    Args: files: {path: sha256}, whose sizes were looked at. name: what they are together, a path: what was found good
    under this name is remembered in `cache`, even where another file is not, so that a large set is not read twice. A
    cache that cannot be written only costs another reading. say: without it, only waiting is not told.
    remember: False to read everything now.
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
            with contextlib.suppress(OSError):  # told when it is read
                stamps[path] = [*stamp_of(path), sha256]
        known = remembered(memory) if remember else {}
        new = [path for path in files if path not in stamps or known.get(path) != stamps[path]]
        if not new:
            return {}
        if say:
            size = sum(stamps[path][0] for path in new if path in stamps)
            say(f"reading {name} once, to see that nothing has changed ({len(new):,} files, {size / 1e6:,.1f} MB)")
        found = hashed({path: files[path] for path in new})
        with contextlib.suppress(OSError, BadInput):
            write_json(memory, {path: stamp for path, stamp in stamps.items() if path not in found})
    return found


def hashed(files: Mapping[str, str]) -> dict[str, str]:
    """{path: what is wrong}, as `damaged` has it; several files are read at once."""

    def problem(path: str) -> str | None:
        try:
            return None if file_sha256(path) == files[path] else ""
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


class Unchanged:
    """Watches the files of a run while it reads them, which may take weeks."""

    def __init__(self, files: Mapping[str, Expected]):
        self._files = dict(files)
        self._checked: dict[str, float] = {}

    def check_ahead(self, paths: Collection[str]) -> None:
        """As `check` of mapped files, to be called before they are read: what was cut off would end the process.

        Not more often than CHECKED_AHEAD, since `check` tells the rest after each reading.
        """
        late = time.monotonic() - CHECKED_AHEAD
        self.check([path for path in paths if self._checked.get(path, late) <= late], is_open=True)

    def check(self, paths: Collection[str], *, is_open: bool) -> None:
        """Raises Stop(DATA_MISMATCH) if one of them holds something else than it did; those not known are passed by.

        is_open: they are mapped, so that one which was renamed or deleted since is still there for us.
        """
        self._checked.update(dict.fromkeys(paths, time.monotonic()))
        for path in paths:
            if (known := self._files.get(path)) is None:
                continue
            try:
                now = stamp_of(path)
            except OSError:
                continue  # whoever opens it will tell
            if now == known.stamp or (is_open and now[3] != known.stamp[3]):
                continue
            if now[0] != known.stamp[0] or file_sha256(path) != known.sha256:
                raise Stop(
                    Exit.DATA_MISMATCH,
                    f"{path} was changed after the run began: it is {self._what(now[0], known.stamp[0])}; bring it "
                    "back and start again",
                )
            self._files[path] = known._replace(stamp=now)  # touched, or brought back

    @staticmethod
    def _what(size: int, was: int) -> str:
        if size == was:
            return "another file of the same size"
        return f"{'cut short' if size < was else 'too long'}, {size:,} bytes of {was:,}"


def remove(path: Path) -> None:
    """Deletes what is under this name, whatever it is; nothing if nothing is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
