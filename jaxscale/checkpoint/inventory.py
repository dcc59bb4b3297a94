"""The size and md5 of every file of a checkpoint, written with it, so that a bit no array is read from is watched too.

A fingerprint tells whether an array came back; a file may change where no array looks, and then its disk is going bad.
Each process lists the data that it has written, the first one lists all else, the other lists included, at the commit:
also the file that will make the step count, whose content is known. That this list must be there, the record says.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jaxscale.checkpoint.cause import is_trouble, short_cause
from jaxscale.checkpoint.files import files_under, mark_of
from jaxscale.checkpoint.folders import COMMIT_TEXT, COMMITTED
from jaxscale.checkpoint.record import is_sealed, read_record, seal
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

LISTS, REST = "run", "files.json"  # beside the record, where Orbax lets other files be
LIST = re.compile(r"files\.(\d+\.)?json")
STATE_PREFIX = "state/"
COMMIT_MARK = [len(COMMIT_TEXT), hashlib.md5(COMMIT_TEXT.encode(), usedforsecurity=False).hexdigest()]
DATA_FOLDER = "state/ocdbt.process_{}/d"  # where a process writes its pieces of arrays; they are never touched again


def list_own_files(folder: Any, process: int) -> None:
    """Writes down the data files of one process. Returns when the list is on the disk."""
    data = DATA_FOLDER.format(process)
    write_list(folder, f"files.{process}.json", (f"{data}/{name}" for name in files_under(folder / data)))


def list_all_others(folder: Any, num_processes: int = 0) -> None:
    """Writes down every file but the data of the processes. To be called last, before what makes the step count."""
    listed = tuple(f"{DATA_FOLDER.format(process)}/" for process in range(num_processes))
    others = (name for name in files_under(folder) if not name.startswith(listed) and name != f"{LISTS}/{REST}")
    write_list(folder, REST, others, {COMMITTED: COMMIT_MARK})


def write_list(folder: Any, name: str, files: Iterable[str], known: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Writes {files: {name: [bytes, md5]}, sha256} whole or not at all. known: marks of files that come later."""
    marks = {file: mark_of(folder / file) for file in files} | dict(known)
    paths.write_json(folder / LISTS / name, seal({"files": marks}))


def changed_files(
    folder: Any, share: int = 0, shares: int = 1, *, finished: bool = True, small: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields (file, what is wrong with it) of those that are not as they were written; of what has no list nothing.

    Args: share: which of `shares` equal parts of the files to look at. finished: False before the step counts. small:
    leave out what lies beside the arrays, so that little is read.
    Raises: what says that the storage cannot be asked.
    """
    lists = [name for name in files_under(folder / LISTS) if LIST.fullmatch(name)]
    wanted: dict[str, list] = {}
    if share == 0 and REST not in lists and (lists or must_be_listed(folder)):
        yield f"{LISTS}/{REST}", "it is missing, and with it the marks of the other files"
    for name in lists:
        found = read_list(folder / LISTS / name)
        if found is None and share == 0:
            yield f"{LISTS}/{name}", "it cannot be read as it was written"
        wanted |= found or {}
    if not finished:
        wanted.pop(COMMITTED, None)
    if small:
        wanted = {name: mark for name, mark in wanted.items() if not name.startswith(STATE_PREFIX)}
    for name in sorted(wanted)[share::shares]:
        if cause := compare(folder / name, wanted[name]):
            yield name, cause


def must_be_listed(folder: Any) -> bool:
    """True if the step was saved by a version that lists the files: its record names the step."""
    try:
        return "step" in read_record(folder)
    except (OSError, BadInput) as error:
        if is_trouble(error):
            raise
        return False  # which is told as damage of the record


def read_list(path: Any) -> dict[str, list] | None:
    """{file: [bytes, md5]} of a list; None if one bit of it has changed."""
    try:
        found = paths.read_json(path)
    except (OSError, BadInput) as error:
        if is_trouble(error):
            raise
        return None
    return found["files"] if is_sealed(found) else None


def compare(path: Any, mark: list) -> str:
    """What is wrong with a file, in words; empty if nothing is."""
    try:
        found = mark_of(path)
    except OSError as error:
        if is_trouble(error):
            raise
        return f"it cannot be read: {short_cause(error)}"
    if found is None:
        return "it is missing"
    return "" if list(found) == mark else "its md5 is not that of what was written"
