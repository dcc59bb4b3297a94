"""A folder of raw arrays: written piece by piece, sealed by a header with the sum of each, and memory-mapped.

NAME       a little-endian array, whole in one file
plan.json  {"arrays": {NAME: {"dtype", "count", "sha256"}}, ..., "own": the sum of all else that it says}; written last
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxscale.data.shards import write_synced
from jaxscale.data.verified import Expected, Say, Unchanged, damaged, expected, of_size, remove
from jaxscale.system.digest import json_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import Unreadable, is_of_storage, parse_json
from jaxscale.system.paths import read_bytes

HEADER = "plan.json"
BUCKET = 1 << 22  # records sorted at once: 100 MB of 24 bytes each


class ArrayWriter:
    """Writes the arrays of a folder as their parts come, any number of them at a time. A context manager."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, tuple[BinaryIO, np.dtype, Any]] = {}

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file, _, _ in self._files.values():
            file.close()

    def append(self, name: str, array: np.ndarray) -> None:
        """Adds elements to an array; the first ones, of which there may be none, decide its type."""
        if name not in self._files:
            dtype = array.dtype.newbyteorder("<")
            self._files[name] = open(self.folder / name, "wb"), dtype, hashlib.sha256()  # noqa: SIM115 - see __exit__
        file, dtype, sha256 = self._files[name]
        content = np.ascontiguousarray(array, dtype).data
        file.write(content)
        sha256.update(content)

    def written(self) -> dict[str, np.ndarray]:
        """What was written so far, mapped."""
        found = {}
        for name, (file, dtype, _) in self._files.items():
            file.flush()
            found[name] = map_array(str(self.folder / name), dtype.str, file.tell() // dtype.itemsize, str(self.folder))
        return found

    def finish(self, header: Mapping[str, Any]) -> None:
        """Writes the header with these entries, after all arrays are safe against a power cut."""
        arrays = {}
        for name, (file, dtype, sha256) in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            count = file.tell() // dtype.itemsize
            arrays[name] = {"dtype": dtype.str, "count": count, "sha256": sha256.hexdigest()}
        whole = json.loads(json.dumps({**header, "arrays": arrays}))
        write_synced(self.folder / HEADER, json.dumps({**whole, "own": json_sha256(whole)}).encode())


def parse_header(folder: str, content: bytes) -> dict[str, Any]:
    """What the header of a folder says. Raises BadInput that names the folder unless it is as it was written."""
    try:
        header = parse_json(content)
    except BadInput as error:
        raise unusable(folder, error) from None
    if not isinstance(header, dict) or header.pop("own", None) != json_sha256(header):
        raise unusable(folder, f"{HEADER} was changed after it was written")
    return header


def read_folder(folder: Path) -> dict[str, Any]:
    """The header in a local folder. Raises as parse_header."""
    try:
        content = read_bytes(folder / HEADER)
    except (OSError, BadInput) as error:
        raise unusable(folder, error) from None
    return parse_header(str(folder), content)


def unusable(folder: Path | str, why: str | Exception) -> BadInput:
    """The error for a folder that is not whole, or that the storage does not give."""
    kind = Unreadable if isinstance(why, Exception) and is_of_storage(why) else BadInput
    return kind(f"the row plan {folder} cannot be read: {why}; delete the folder to have it made again")


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of a folder, each mapped when it is first asked for. A pickle carries none of them."""

    def __init__(self, folder: str, header: Mapping[str, Any], files: Mapping[str, str], known: Mapping[str, Expected]):
        """files: where each array is. known: what these files must stay while they are read, by path."""
        self.folder, self.header, self.files, self.known = folder, header, dict(files), dict(known)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._mapped(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header["arrays"])

    def __len__(self) -> int:
        return len(self.header["arrays"])

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key not in ("_maps", "unchanged")}

    @functools.cached_property
    def _maps(self) -> dict[str, np.ndarray]:
        return {}

    @functools.cached_property
    def unchanged(self) -> Unchanged:
        """The watch over the files."""
        return Unchanged(self.known)

    def check(self) -> None:
        """Raises Stop if a file is no longer what it was; to be called before mapped arrays are read."""
        self.unchanged.check(self.known)

    def _mapped(self, name: str) -> np.ndarray:
        if name not in self._maps:
            about, path = self.header["arrays"][name], self.files[name]
            self.unchanged.check_unopened([path])
            self._maps[name] = map_array(path, about["dtype"], about["count"], self.folder)
        return self._maps[name]


def map_array(path: str, dtype: str, count: int, folder: str) -> np.ndarray:
    """A whole file as an array. Raises BadInput naming the folder if it cannot be mapped."""
    if not count:
        return np.zeros(0, dtype)  # which cannot be mapped
    try:
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))  # indexing an np.memmap itself costs far more
    except (OSError, ValueError) as error:
        raise unusable(folder, error) from None


def open_arrays(folder: Path, cache: Path, verify: str = "hash", say: Say | None = None) -> Arrays:
    """The arrays of a local folder, verified. Raises BadInput if one is not as it was written.

    Args: cache: where it is remembered what was found good, as `damaged` has it. verify: data.verify.
    """
    header = read_folder(folder)
    paths = {name: str(folder / name) for name in header["arrays"]}
    sums = {paths[name]: about["sha256"] for name, about in header["arrays"].items()}
    try:
        known = expected(sums)
    except OSError as error:
        raise unusable(folder, error) from None
    for name, about in header["arrays"].items():
        size = np.dtype(about["dtype"]).itemsize * about["count"]
        if known[paths[name]].stamp[0] != size:
            raise unusable(folder, f"{paths[name]} was changed after it was written: it has not {size:,} bytes")
    if verify == "size":
        return Arrays(str(folder), header, paths, of_size(known))
    for path, problem in damaged(sums, cache, str(folder), say, remember=verify == "hash").items():
        raise unusable(folder, problem or f"{path} was changed after it was written")
    return Arrays(str(folder), header, paths, known)


class Buckets:
    """Records on the way to the bucket of their number, in temporary files: memory holds one bucket at a time.

    Within a bucket they keep the order in which they came. Of one bucket alone nothing is written.
    """

    def __init__(self, folder: Path, dtype: Any, number: int):
        """number: of buckets."""
        self._folder, self._dtype, self.number = folder / "buckets", np.dtype(dtype), number
        self._held: list[np.ndarray] = []

    @classmethod
    def of(cls, folder: Path, dtype: Any, records: int) -> "Buckets":
        """Buckets of about BUCKET records each."""
        return cls(folder, dtype, max(1, -(-records // BUCKET)))

    def add(self, buckets: np.ndarray | None, **fields: np.ndarray) -> None:
        """Puts each record, of these fields, into its bucket; where there is one alone, it need not be named."""
        records = np.empty(len(next(iter(fields.values()))), self._dtype)
        for name, values in fields.items():
            records[name] = values
        if buckets is None or self.number == 1:
            self._held.append(records)
            return
        self._folder.mkdir(exist_ok=True)
        order = np.argsort(buckets, kind="stable")
        present, firsts = np.unique(buckets[order], return_index=True)
        for bucket, part in zip(present.tolist(), np.split(records[order], firsts[1:])):
            with open(self._folder / str(bucket), "ab") as file:  # opened anew: thousands are too many to keep open
                part.tofile(file)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yields the records of each bucket, and forgets them."""
        if self.number == 1:
            yield np.concatenate(self._held or [np.zeros(0, self._dtype)])
            self._held.clear()
            return
        for bucket in range(self.number):
            path = self._folder / str(bucket)
            yield np.fromfile(path, self._dtype) if path.exists() else np.zeros(0, self._dtype)
            path.unlink(missing_ok=True)
        remove(self._folder)
