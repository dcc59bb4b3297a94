"""Folders of raw arrays that are written by appending, verified by sha256, and read by memory mapping.

NAME       a large little-endian array
small      all small arrays, concatenated
plan.json  {"arrays": {NAME: {"file", "offset", "dtype", "count"}}, "files": {FILE: {"bytes", "sha256"}}, ..., "own":
           sha256 of all other entries}; written last
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxscale.runtime.data.remote import shard_cache
from jaxscale.runtime.data.shard_writer import write_synced
from jaxscale.runtime.data.verified import Expected, FileWatch, Say, find_damaged, remove, size_only, snapshot_files
from jaxscale.system.digest import json_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import Unreadable, is_of_storage, parse_json
from jaxscale.system.paths import is_remote, read_bytes

HEADER, SMALL = "plan.json", "small"
SMALL_BYTES = 1 << 20  # smaller arrays share a file, because each file costs a hash, a mapping, a fetch and an fsync
FETCHED_AT_ONCE = 8  # files fetched concurrently
ALIGNMENT = 64  # bytes
BUCKET_RECORDS = 1 << 22  # records sorted in memory (100 MB at 24 bytes each); n records open files n**2 / 2**43 times


class GrowingArray:
    """An array to which elements are appended. A small array is in memory, and a large array in a file."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype, self.count = path, dtype, 0
        self.buffered: list[np.ndarray] = []
        self.file: BinaryIO | None = None
        self.sha256 = hashlib.sha256()

    def append(self, array: np.ndarray) -> None:
        """Appends elements."""
        self.buffered.append(np.array(array, self.dtype))
        self.count += len(array)
        if self.file or self.count * self.dtype.itemsize > SMALL_BYTES:
            self.file = self.file or open(self.path, "wb")  # noqa: SIM115 - closed by ArrayWriter
            for part in self.buffered:
                self.file.write(part.data)
                self.sha256.update(part.data)
            self.buffered.clear()

    def to_array(self) -> np.ndarray:
        """Returns all appended elements; memory-mapped if they are in a file."""
        if self.file is None:
            self.buffered = [np.concatenate(self.buffered)]
            return self.buffered[0]
        self.file.flush()
        return np.asarray(np.memmap(self.path, self.dtype, mode="r"))


class ArrayWriter:
    """Context manager that writes the arrays of a folder. Calls to append() for different arrays may alternate."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._arrays: dict[str, GrowingArray] = {}

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for array in self._arrays.values():
            if array.file:
                array.file.close()

    def append(self, name: str, array: np.ndarray) -> None:
        """Appends elements to an array. The first call sets the dtype, even if it appends no elements."""
        if name not in self._arrays:
            self._arrays[name] = GrowingArray(self.folder / name, array.dtype.newbyteorder("<"))
        self._arrays[name].append(array)

    def written(self) -> dict[str, np.ndarray]:
        """Returns the arrays with all elements appended so far."""
        return {name: array.to_array() for name, array in self._arrays.items()}

    def finish(self, header: Mapping[str, Any]) -> None:
        """Syncs all arrays to the disk, and writes the header with the given additional entries."""
        arrays, files, small = {}, {}, b""
        for name, array in self._arrays.items():
            about = {"file": name, "offset": 0, "dtype": array.dtype.str, "count": array.count}
            if array.file is None:
                small += bytes(-len(small) % ALIGNMENT)
                about |= {"file": SMALL, "offset": len(small)}
                small += array.to_array().tobytes()
            else:
                array.file.flush()
                os.fsync(array.file.fileno())
                files[name] = {"bytes": array.file.tell(), "sha256": array.sha256.hexdigest()}
            arrays[name] = about
        write_synced(self.folder / SMALL, small)
        files[SMALL] = {"bytes": len(small), "sha256": hashlib.sha256(small).hexdigest()}
        whole = json.loads(json.dumps({**header, "arrays": arrays, "files": files}))
        write_synced(self.folder / HEADER, json.dumps({**whole, "own": json_sha256(whole)}).encode())


def parse_header(folder: str, content: bytes) -> dict[str, Any]:
    """Parses the content of plan.json. Raises BadInput, with the folder name, if the content was changed."""
    try:
        header = parse_json(content)
        if not isinstance(header, dict) or header.pop("own", None) != json_sha256(header):
            raise BadInput(f"{HEADER} was changed after it was written")
    except BadInput as error:
        raise unreadable_folder(folder, error) from None
    return header


def unreadable_folder(folder: Path | str, reason: str | Exception) -> BadInput:
    """Returns the error for a folder that is damaged or cannot be read from storage."""
    kind = Unreadable if isinstance(reason, Exception) and is_of_storage(reason) else BadInput
    return kind(f"the index {folder} cannot be read: {reason}; delete the folder to recreate it")


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of a folder, by name. Each file is memory-mapped on first use. Memory maps are not pickled."""

    def __init__(self, folder: str, header: Mapping[str, Any], files: Mapping[str, str], known: Mapping[str, Expected]):
        """files: {file name: path}. known: {path: expected state}, with which the files are compared."""
        self.folder, self.header, self.files, self.known = folder, header, dict(files), dict(known)
        self._maps: dict[str, np.ndarray] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._unchanged = FileWatch(self.known)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            self._arrays[name] = self._map(**self.header["arrays"][name])
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.header["arrays"])

    def __len__(self) -> int:
        return len(self.header["arrays"])

    def __reduce__(self) -> tuple:
        return Arrays, (self.folder, self.header, self.files, self.known)

    def check(self) -> None:
        """Raises Stop if a file has changed. Call this method before reading mapped arrays."""
        self._unchanged.check(self.known)

    def _map(self, file: str, offset: int, dtype: str, count: int) -> np.ndarray:
        if not count:
            return np.zeros(0, dtype)
        if file not in self._maps:
            path = self.files[file]
            self._unchanged.check_file(path)
            try:  # indexing an np.memmap is much slower
                self._maps[file] = np.asarray(np.memmap(path, np.uint8, mode="r"))
            except (OSError, ValueError) as error:
                raise unreadable_folder(self.folder, error) from None
        return self._maps[file][offset : offset + count * np.dtype(dtype).itemsize].view(dtype)


def open_arrays(folder: Path, cache: Path, verify: str = "hash", say: Say | None = None) -> Arrays:
    """Opens the arrays of a local folder. verify: see data.verify. Raises BadInput if a file was changed."""
    try:
        content = read_bytes(folder / HEADER)
    except (OSError, BadInput) as error:
        raise unreadable_folder(folder, error) from None
    header = parse_header(str(folder), content)
    paths = {name: str(folder / name) for name in header["files"]}
    sums = {paths[name]: about["sha256"] for name, about in header["files"].items()}
    try:
        known = snapshot_files(sums)
    except OSError as error:
        raise unreadable_folder(folder, error) from None
    changed = lambda path: f"{path} was changed after it was written"
    for name, about in header["files"].items():
        if known[paths[name]].stamp[0] != about["bytes"]:
            raise unreadable_folder(folder, f"{changed(paths[name])}: its size is not {about['bytes']:,} bytes")
    if verify == "size":
        return Arrays(str(folder), header, paths, size_only(known))
    for path, problem in find_damaged(sums, cache, str(folder), say, remember=verify == "hash").items():
        raise unreadable_folder(folder, problem or changed(path))
    return Arrays(str(folder), header, paths, known)


def find_arrays(location: str, cache: Path, cache_bytes: int, verify: str, say: Say | None) -> Arrays | None:
    """Opens the arrays of a local folder, or of a gs:// URL, which is downloaded; None if the folder is missing."""
    if not is_remote(location):
        return open_arrays(Path(location), cache, verify, say) if os.path.exists(f"{location}/{HEADER}") else None
    copies = shard_cache(str(cache / "bucket"), cache_bytes)
    if copies.bucket.metadata(f"{location}/{HEADER}") is None:
        return None
    header = parse_header(location, copies.bucket.read(f"{location}/{HEADER}"))
    about = header["files"]
    local = lambda name: str(copies.fetch(f"{location}/{name}", about[name]["bytes"], about[name]["sha256"]))
    with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
        files = dict(zip(about, pool.map(local, about)))
    known = snapshot_files({files[name]: about[name]["sha256"] for name in about})
    return Arrays(location, header, files, size_only(known) if verify == "size" else known)


class DiskBuckets:
    """Partitions records into ordered buckets. Several buckets are stored on disk, with one in memory at a time."""

    def __init__(self, folder: Path, dtype: Any, records: int):
        self._folder, self._dtype = folder / "buckets", np.dtype(dtype)
        self.number = max(1, -(-records // BUCKET_RECORDS))
        self._buffered: list[tuple[np.ndarray | None, np.ndarray]] = []
        self._count = 0

    def add(self, buckets: np.ndarray | None, **fields: np.ndarray) -> None:
        """Adds records with the given fields. buckets: bucket index of each record; None for a single bucket."""
        records = np.empty(len(next(iter(fields.values()))), self._dtype)
        for name, values in fields.items():
            records[name] = values
        self._buffered.append((buckets, records))
        self._count += len(records)
        if self.number > 1 and self._count >= BUCKET_RECORDS // 2:
            self._flush()

    def _flush(self) -> None:
        """Writes the buffered records in large batches, with one open file at a time."""
        buckets, records = (np.concatenate(column) for column in zip(*self._buffered))
        self._buffered.clear()
        self._count = 0
        self._folder.mkdir(exist_ok=True)
        order = np.argsort(buckets, kind="stable")
        present, firsts = np.unique(buckets[order], return_index=True)
        for bucket, part in zip(present.tolist(), np.split(records[order], firsts[1:])):
            with open(self._folder / str(bucket), "ab") as file:
                part.tofile(file)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yields the records of each bucket, and deletes the bucket."""
        if self.number == 1:
            yield np.concatenate([np.zeros(0, self._dtype), *(records for _, records in self._buffered)])
            self._buffered.clear()
            return
        if self._buffered:
            self._flush()
        for bucket in range(self.number):
            path = self._folder / str(bucket)
            yield np.fromfile(path, self._dtype) if path.exists() else np.zeros(0, self._dtype)
            path.unlink(missing_ok=True)
        remove(self._folder)
