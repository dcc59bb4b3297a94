"""Verifies checkpoints: compares every array with its fingerprint, and every file with its md5.

When a saved step is read back, the chunks of all arrays are divided among the processes, so that all processes read the
same number of bytes. The fingerprints of the chunks sum to the fingerprint of the array. The first process compares
these sums with the record.

Fingerprints do not detect changes of bytes that belong to no array, which may indicate a failing disk. Each step
therefore has lists with the size and md5 of all files. Each process lists the data files that it has written, and the
first process lists all other files, including these lists and the commit file, whose content is fixed.
"""

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax

from jaxscale.runtime.checkpoint import array_store
from jaxscale.runtime.checkpoint.array_store import ArrayReader, chunk_boxes, compare_leaf, format_mismatch
from jaxscale.runtime.checkpoint.folders import COMMIT_TEXT, COMMITTED, drop_page_cache, files_under, size_and_md5
from jaxscale.runtime.checkpoint.record import RECORD, is_sealed, read_record, require_record, seal
from jaxscale.runtime.checkpoint.storage_errors import is_storage_error, short_reason
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop

VALUE_KINDS = ("jax.Array", "np.ndarray", "scalar")
MAIN_LIST = "run/files.json"  # in the folder of the record, where Orbax ignores other files
LIST = re.compile(r"run/files\.(\d+\.)?json")
STATE_PREFIX = "state/"
COMMIT_MARK = [len(COMMIT_TEXT), hashlib.md5(COMMIT_TEXT.encode(), usedforsecurity=False).hexdigest()]
DATA_FOLDER = "state/ocdbt.process_{}/d"  # folder with the chunks of a process, whose files are never modified


class DamagedCheckpoint(Exception):
    """Raised if files of a checkpoint differ from what was saved."""


@dataclasses.dataclass(frozen=True)
class StepDamage:
    """A leaf or file that differs from what was saved."""

    what: str  # name of the leaf, or path of the file in the step's folder
    cause: str
    files: tuple[str, ...] = ()  # files with the leaf's data, relative to the step's folder

    def __str__(self):
        return f"{self.what}: {self.cause}" + (f" (in {', '.join(self.files)})" if self.files else "")


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """The result of verifying a step."""

    num_leaves: int
    num_bytes: int
    damages: tuple[StepDamage, ...]


def verify_folder(
    folder: Any, on_bytes: Callable[[int], None] = lambda done: None, *, finished: bool = True
) -> VerifyResult:
    """Verifies all leaves and files of a step.

    on_bytes: called with the number of array bytes read so far. finished: False before the commit.
    Raises: Stop (STORAGE) if a bucket or disk cannot be read.
    """
    try:
        record = require_record(folder)
    except BadInput as error:
        require_reachable(error, folder)
        return VerifyResult(0, 0, (StepDamage(RECORD, str(error)),))
    damages, done = [*tree_damages(folder, record["leaves"])], 0
    arrays, located = ArrayReader(folder), functools.cache(array_store.leaf_files)
    for name, described in record["leaves"].items():
        try:
            cause, size = compare_leaf(arrays, name, *described)
        except Exception as error:  # TensorStore raises several types for corrupt bytes
            require_reachable(error, folder)
            cause, size = short_reason(error), 0
        if cause:
            files = tuple(sorted(located(folder).get(array_store.stored_name(name), ())))
            damages.append(StepDamage(name, cause, files or array_store.named_files(cause)))
        done += size
        on_bytes(done)
    try:
        damages += [StepDamage(*found) for found in array_store.index_damages(folder)]
        named = {file for damage in damages for file in (damage.what, *damage.files)}
        damages += [StepDamage(*found) for found in changed_files(folder, finished=finished) if found[0] not in named]
    except Exception as error:
        require_reachable(error, folder)
        raise
    return VerifyResult(len(record["leaves"]), done, tuple(damages))


def require_reachable(error: Exception, folder: Any) -> None:
    """Raises Stop (STORAGE) for a storage error, which does not imply that the step is damaged."""
    if is_storage_error(error):
        raise Stop(
            Exit.STORAGE, f"{folder} cannot be read: {short_reason(error)}; it was not verified, so try again later"
        ) from None


def tree_damages(folder: Any, leaves: Mapping[str, Any]) -> Iterator[StepDamage]:
    """Yields differences between Orbax's tree metadata and the record, which would make Orbax read wrong leaves."""
    name = array_store.TREE_METADATA
    try:
        tree = paths.read_json(folder / name)
        if not isinstance(tree, dict) or tree.get("use_ocdbt") is not True or type(tree.get("use_zarr3")) is not bool:
            yield StepDamage(name, "it does not describe an OCDBT store")
        described = {}
        for entry in tree["tree_metadata"].values():
            if any(part["key_type"] != array_store.DICT_KEY for part in entry["key_metadata"]):
                yield StepDamage(name, f"a level of {entry['key_metadata']} is not a dict")
            value = entry["value_metadata"]
            if value["value_type"] not in VALUE_KINDS or value["skip_deserialize"] is not False:
                yield StepDamage(name, f"a leaf is described as {value}")
            described["/".join(str(part["key"]) for part in entry["key_metadata"])] = entry
        if wrong := sorted(set(described) ^ set(leaves)):
            yield StepDamage(name, f"its leaves differ from the leaves in the record: {', '.join(wrong[:4])}")
    except (OSError, BadInput, KeyError, TypeError, AttributeError) as error:
        require_reachable(error, folder)
        yield StepDamage(name, f"it cannot be parsed: {short_reason(error)}")


def write_data_list(folder: Any, process: int) -> None:
    """Writes the list of the data files of one process, and syncs the list to the disk."""
    data = DATA_FOLDER.format(process)
    write_list(folder, f"run/files.{process}.json", (f"{data}/{name}" for name in files_under(folder / data)))


def write_main_list(folder: Any, num_processes: int = 0) -> None:
    """Writes the list of all other files of a step. Call after these files are written."""
    listed = tuple(f"{DATA_FOLDER.format(process)}/" for process in range(num_processes))
    others = (name for name in files_under(folder) if not name.startswith(listed) and name != MAIN_LIST)
    write_list(folder, MAIN_LIST, others, {COMMITTED: COMMIT_MARK})


def write_list(folder: Any, name: str, files: Iterable[str], known: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Writes {files: {name: [bytes, md5]}, sha256} atomically. known: entries for files that are written later."""
    entries = {file: size_and_md5(folder / file) for file in files} | dict(known)
    paths.write_json(folder / name, seal({"files": entries}))


def changed_files(
    folder: Any, share: int = 0, shares: int = 1, *, finished: bool = True, small: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields (file, problem) for listed files that differ from what was written. Ignores unlisted files.

    share, shares: check only part `share` of `shares` parts of the files. finished: False before the commit. small:
    skip the array files, so that few bytes are read.
    Raises: storage errors.
    """
    main_list = read_list(folder / MAIN_LIST)
    if main_list is not None:
        lists = sorted(name for name in main_list if LIST.fullmatch(name))
    else:
        found = [f"run/{name}" for name in files_under(folder / "run")]
        lists = [name for name in found if LIST.fullmatch(name) and name != MAIN_LIST]
        if share == 0 and MAIN_LIST in found:
            yield MAIN_LIST, "it differs from what was written"
        elif share == 0 and (lists or has_file_lists(folder)):
            yield MAIN_LIST, "it is missing, so the other files cannot be verified"
    expected = dict(sorted((main_list or {}).items())[share::shares])
    for number, name in enumerate(() if small else lists):
        if (number - share) % min(shares, len(lists)) == 0:
            if (found := read_list(folder / name)) is None:
                yield name, "it differs from what was written"
            first, step = share // len(lists), max(1, -(-(shares - number) // len(lists)))  # of its readers
            expected |= dict(sorted((found or {}).items())[first::step])
    if not finished:
        expected.pop(COMMITTED, None)
    if small:
        expected = {name: entry for name, entry in expected.items() if not name.startswith(STATE_PREFIX)}
    for name in sorted(expected):
        if cause := file_problem(folder / name, expected[name]):
            yield name, cause


def has_file_lists(folder: Any) -> bool:
    """Returns True if the step was saved by a version that writes file lists and a record with the key `step`."""
    try:
        return "step" in read_record(folder)
    except (OSError, BadInput) as error:
        if is_storage_error(error):
            raise
        return False  # the caller reports the damaged record


def read_list(path: Any) -> dict[str, list] | None:
    """Returns {file: [bytes, md5]}, or None if the list is missing or was changed."""
    try:
        found = paths.read_json(path)
    except (OSError, BadInput) as error:
        if is_storage_error(error):
            raise
        return None
    return found["files"] if is_sealed(found) else None


def file_problem(path: Any, expected: list) -> str:
    """Returns the problem of a file, or '' if it matches `expected`, [bytes, md5]."""
    try:
        found = size_and_md5(path)
    except OSError as error:
        if is_storage_error(error):
            raise
        return f"it cannot be read: {short_reason(error)}"
    if found is None:
        return "it is missing"
    return "" if list(found) == expected else "its md5 differs from what was written"


def verify_leaves(folder: Any, leaves: Mapping[str, list]) -> None:
    """Compares each leaf on the disk with its fingerprint. Raises DamagedCheckpoint naming the first damaged leaf."""
    drop_page_caches(folder)
    if wrong := first_difference(leaves, [piece_sums(folder, leaves)]):
        raise DamagedCheckpoint(wrong)


def piece_sums(folder: Any, leaves: Mapping[str, list], share: int = 0, shares: int = 1) -> dict[str, list[int]]:
    """Returns {leaf: [sum of fingerprints, number of elements]} for part `share` of `shares` parts of all chunks."""
    arrays, found, begin = ArrayReader(folder), {}, 0
    sizes = {name: leaf_bytes(*leaves[name][:2]) for name in sorted(leaves)}
    first, last = (sum(sizes.values()) * number // shares for number in (share, share + 1))
    for name, size in sizes.items():
        if begin < last and begin + size > first:
            try:
                if sums := leaf_piece_sums(arrays, name, leaves[name], first - begin, last - begin):
                    found[name] = sums
            except Exception as error:
                if is_storage_error(error) or isinstance(error, DamagedCheckpoint):
                    raise
                raise DamagedCheckpoint(f"{name} cannot be read back: {short_reason(error)}") from error
        begin += size
    return found


def leaf_bytes(shape: list[int], dtype: str) -> int:
    """Returns the size of a leaf in bytes, at least 1; an estimate for random keys and Python scalars."""
    try:
        item = jax.numpy.dtype(dtype).itemsize
    except TypeError:  # random keys and Python scalars
        item = 8
    return max(1, math.prod(shape) * item)


def leaf_piece_sums(arrays: ArrayReader, name: str, described: list, begin: int, end: int) -> list[int]:
    """Returns the piece_sums() of the chunks that start in the bytes [begin, end) of a leaf, or [] without chunks."""
    array = arrays.open(name)
    if wrong := format_mismatch(array, *described[:2]):
        raise DamagedCheckpoint(f"{name}: {wrong}")
    pieces, size = chunk_boxes(array), leaf_bytes(*described[:2])
    mine = [box for number, box in enumerate(pieces) if begin <= number * size // len(pieces) < end]
    if mine and described[1] in array_store.PYTHON_SCALARS:
        if wrong := compare_leaf(arrays, name, *described)[0]:
            raise DamagedCheckpoint(f"{name}: {wrong}")
        return []
    return [*array_store.sum_boxes(array, mine)] if mine else []


def first_difference(leaves: Mapping[str, list], found: Iterable[Mapping[str, list[int]]]) -> str:
    """Returns an error for the first leaf whose sum over all processes differs from its record, or ''."""
    totals = {name: [0, 0] for name in leaves}
    for sums in found:
        for name, (part, numbers) in sums.items():
            totals[name] = [(totals[name][0] + part) % 2**32, totals[name][1] + numbers]
    for name, (shape, dtype, fingerprint) in sorted(leaves.items()):
        total, numbers = totals[name]
        if dtype in array_store.PYTHON_SCALARS:
            continue  # leaf_piece_sums() has compared the value
        if not (numbers == math.prod(shape) or dtype.startswith(array_store.KEY_DTYPE_PREFIX) and numbers):
            return f"{name}: {numbers:,} of its {math.prod(shape):,} numbers were read back"
        if total != fingerprint:
            return f"{name}: {array_store.DIFFERS}"
    return ""


def drop_page_caches(folder: Any, other_files: str = "/") -> None:
    """Drops local files from the page cache, so that they are next read from the disk. other_files: prefix to skip."""
    if not paths.is_remote(folder):
        for name in files_under(folder):
            if not name.startswith(other_files):
                drop_page_cache(folder / name)
