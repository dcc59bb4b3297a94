"""Whether a checkpoint still is what was saved: every array against its fingerprint, every file against its md5.

A fingerprint tells whether an array came back; a file may change where no array looks, and then its disk is going bad.
So with each step the size and md5 of its files are written: each process lists the data that it has written, the first
one lists all else, the other lists included, at the commit: also the file that will make the step count, whose content
is known. That this list must be there, the record says.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jaxscale.checkpoint.array_store import DICT_KEY, TREE, Arrays, Locations, compare_leaf, index_damages, named_files
from jaxscale.checkpoint.folders import COMMIT_TEXT, COMMITTED, files_under, mark_of
from jaxscale.checkpoint.record import RECORD, is_sealed, read_record, require_record, seal
from jaxscale.checkpoint.storage_errors import is_storage_error, short_reason
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop

VALUE_KINDS = ("jax.Array", "np.ndarray", "scalar")
LISTS, REST = "run", "files.json"  # beside the record, where Orbax lets other files be
LIST = re.compile(r"files\.(\d+\.)?json")
STATE_PREFIX = "state/"
COMMIT_MARK = [len(COMMIT_TEXT), hashlib.md5(COMMIT_TEXT.encode(), usedforsecurity=False).hexdigest()]
DATA_FOLDER = "state/ocdbt.process_{}/d"  # where a process writes its pieces of arrays; they are never touched again


@dataclasses.dataclass(frozen=True)
class Damage:
    """Something that is not as it was saved."""

    what: str  # a leaf, or a file of the step's folder
    cause: str
    files: tuple[str, ...] = ()  # below the step's folder, where the leaf's bytes lie

    def __str__(self):
        return f"{self.what}: {self.cause}" + (f" (in {', '.join(self.files)})" if self.files else "")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the check of a step found."""

    num_leaves: int
    num_bytes: int
    damages: tuple[Damage, ...]


def verify_folder(
    folder: Any, on_bytes: Callable[[int], None] = lambda done: None, *, finished: bool = True
) -> Verdict:
    """Reads the whole step: every leaf against the fingerprint taken on the devices, every file against its md5.

    Raises: Stop (STORAGE) where a bucket or disk does not let itself be read.
    Args: on_bytes: called with the bytes of arrays read so far. finished: False before the step counts.
    """
    try:
        return look_through(folder, on_bytes, finished)
    except Stop:
        raise
    except Exception as error:
        require_reachable(error, folder)
        raise


def look_through(folder: Any, on_bytes: Callable[[int], None], finished: bool) -> Verdict:
    """As verify_folder; what is wrong with the storage itself is raised as it came."""
    try:
        record = require_record(folder)
    except BadInput as error:
        require_reachable(error, folder)
        return Verdict(0, 0, (Damage(RECORD, str(error)),))
    damages, done = [], 0
    damages += tree_damages(folder, record["leaves"])
    arrays, located = Arrays(folder), Locations(folder)
    for name, described in record["leaves"].items():
        try:
            cause, size = compare_leaf(arrays, name, *described)
        except Exception as error:  # whatever TensorStore makes of spoilt bytes
            require_reachable(error, folder)
            cause, size = short_reason(error), 0
        if cause:
            damages.append(Damage(name, cause, located.files(name) or named_files(cause)))
        done += size
        on_bytes(done)
    damages += [Damage(*found) for found in index_damages(folder)]
    named = {file for damage in damages for file in (damage.what, *damage.files)}
    damages += [Damage(*found) for found in changed_files(folder, finished=finished) if found[0] not in named]
    return Verdict(len(record["leaves"]), done, tuple(damages))


def require_reachable(error: Exception, folder: Any) -> None:
    """Raises Stop (STORAGE) if the error says that nothing could be read, which is no word on what is there."""
    if is_storage_error(error):
        raise Stop(
            Exit.STORAGE, f"{folder} cannot be read now: {short_reason(error)}; whether it is whole is not known"
        ) from None


def tree_damages(folder: Any, leaves: Mapping[str, Any]) -> Iterator[Damage]:
    """Yields what would make Orbax read other leaves than the record has."""
    name = TREE
    try:
        tree = paths.read_json(folder / name)
        if not isinstance(tree, dict) or tree.get("use_ocdbt") is not True or type(tree.get("use_zarr3")) is not bool:
            yield Damage(name, "it does not say how the arrays are kept")
        described = {}
        for entry in tree["tree_metadata"].values():
            if any(part["key_type"] != DICT_KEY for part in entry["key_metadata"]):
                yield Damage(name, f"a level of {entry['key_metadata']} is no dict")
            value = entry["value_metadata"]
            if value["value_type"] not in VALUE_KINDS or value["skip_deserialize"] is not False:
                yield Damage(name, f"a leaf is described as {value}")
            described["/".join(str(part["key"]) for part in entry["key_metadata"])] = entry
        if wrong := sorted(set(described) ^ set(leaves)):
            yield Damage(name, f"its leaves are not those of the record: {', '.join(wrong[:4])}")
    except (OSError, BadInput, KeyError, TypeError, AttributeError) as error:
        require_reachable(error, folder)
        yield Damage(name, f"it cannot be understood: {short_reason(error)}")


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

    Args: share: which of `shares` parts of the files to look at: the first process's list is read by all, any other by
    one, or by several that share its files. finished: False before the step counts. small: leave out what lies beside
    the arrays, so that little is read.
    Raises: what says that the storage cannot be asked.
    """
    rest = read_list(folder / LISTS / REST)
    if rest is not None:
        lists = sorted(name for name in rest if LIST.fullmatch(name.removeprefix(f"{LISTS}/")))
    else:
        found = files_under(folder / LISTS)
        lists = [f"{LISTS}/{name}" for name in found if LIST.fullmatch(name) and name != REST]
        if share == 0 and REST in found:
            yield f"{LISTS}/{REST}", "it cannot be read as it was written"
        elif share == 0 and (lists or must_be_listed(folder)):
            yield f"{LISTS}/{REST}", "it is missing, and with it the marks of the other files"
    wanted = dict(sorted((rest or {}).items())[share::shares])
    for number, name in enumerate(() if small else lists):
        if (number - share) % min(shares, len(lists)) == 0:
            if (found := read_list(folder / name)) is None:
                yield name, "it cannot be read as it was written"
            first, step = share // len(lists), max(1, -(-(shares - number) // len(lists)))  # of those who share it
            wanted |= dict(sorted((found or {}).items())[first::step])
    if not finished:
        wanted.pop(COMMITTED, None)
    if small:
        wanted = {name: mark for name, mark in wanted.items() if not name.startswith(STATE_PREFIX)}
    for name in sorted(wanted):
        if cause := compare(folder / name, wanted[name]):
            yield name, cause


def must_be_listed(folder: Any) -> bool:
    """True if the step was saved by a version that lists the files: its record names the step."""
    try:
        return "step" in read_record(folder)
    except (OSError, BadInput) as error:
        if is_storage_error(error):
            raise
        return False  # which is reported as damage of the record


def read_list(path: Any) -> dict[str, list] | None:
    """{file: [bytes, md5]} of a list; None if one bit of it has changed."""
    try:
        found = paths.read_json(path)
    except (OSError, BadInput) as error:
        if is_storage_error(error):
            raise
        return None
    return found["files"] if is_sealed(found) else None


def compare(path: Any, mark: list) -> str:
    """What is wrong with a file, in words; empty if nothing is."""
    try:
        found = mark_of(path)
    except OSError as error:
        if is_storage_error(error):
            raise
        return f"it cannot be read: {short_reason(error)}"
    if found is None:
        return "it is missing"
    return "" if list(found) == mark else "its md5 is not that of what was written"
