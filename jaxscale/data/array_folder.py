"""A folder of raw arrays: written piece by piece, sealed by a header with the sum of each, and memory-mapped.

NAME       a large little-endian array, alone in a file
small      all others, one after the other
plan.json  {"arrays": {NAME: {"file", "offset", "dtype", "count"}}, "files": {FILE: {"bytes", "sha256"}}, ..., "own":
           the sum of all else that it says}; written last
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxscale.data.remote import shard_cache
from jaxscale.data.shard_writer import write_synced
from jaxscale.data.verified import Expected, Say, Unchanged, damaged, expected, of_size, remove
from jaxscale.system.digest import json_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import Unreadable, is_of_storage, parse_json
from jaxscale.system.paths import is_remote, read_bytes

HEADER, SMALL = "plan.json", "small"
SMALL_BYTES = 1 << 20  # each file is one more to hash, to map, to fetch and to make safe
FETCHED_AT_ONCE = 8  # files
ALIGNED = 64  # bytes: where an array may begin
BUCKET = 1 << 22  # records sorted at once: 100 MB of 24 bytes each; their files are opened n**2 / 2**43 times


class Growing:
    """An array that is being written: in memory while it is small."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype, self.count = path, dtype, 0
        self.held: list[np.ndarray] = []
        self.file: BinaryIO | None = None
        self.sha256 = hashlib.sha256()

    def append(self, array: np.ndarray) -> None:
        """Adds elements."""
        self.held.append(np.array(array, self.dtype))
        self.count += len(array)
        if self.file or self.count * self.dtype.itemsize > SMALL_BYTES:
            self.file = self.file or open(self.path, "wb")  # noqa: SIM115 - closed by the writer of the folder
            for part in self.held:
                self.file.write(part.data)
                self.sha256.update(part.data)
            self.held.clear()

    def whole(self) -> np.ndarray:
        """What was written so far, mapped if it is large."""
        if self.file is None:
            self.held = [np.concatenate(self.held)]
            return self.held[0]
        self.file.flush()
        return np.asarray(np.memmap(self.path, self.dtype, mode="r"))


class ArrayWriter:
    """Writes the arrays of a folder as their parts come, any number of them at a time. A context manager."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._arrays: dict[str, Growing] = {}

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for array in self._arrays.values():
            if array.file:
                array.file.close()

    def append(self, name: str, array: np.ndarray) -> None:
        """Adds elements to an array; the first ones, of which there may be none, decide its type."""
        if name not in self._arrays:
            self._arrays[name] = Growing(self.folder / name, array.dtype.newbyteorder("<"))
        self._arrays[name].append(array)

    def written(self) -> dict[str, np.ndarray]:
        """What was written so far."""
        return {name: array.whole() for name, array in self._arrays.items()}

    def finish(self, header: Mapping[str, Any]) -> None:
        """Writes the header with these entries, after all arrays are safe against a power cut."""
        arrays, files, small = {}, {}, b""
        for name, array in self._arrays.items():
            about = {"file": name, "offset": 0, "dtype": array.dtype.str, "count": array.count}
            if array.file is None:
                small += bytes(-len(small) % ALIGNED)
                about |= {"file": SMALL, "offset": len(small)}
                small += array.whole().tobytes()
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
    return kind(f"the index {folder} cannot be read: {why}; delete the folder to have it made again")


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of a folder, mapped when one of their file is first asked for. A pickle carries none of them."""

    def __init__(self, folder: str, header: Mapping[str, Any], files: Mapping[str, str], known: Mapping[str, Expected]):
        """files: where each file is. known: what these files must stay while they are read, by path."""
        self.folder, self.header, self.files, self.known = folder, header, dict(files), dict(known)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            self._arrays[name] = self._map(**self.header["arrays"][name])
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.header["arrays"])

    def __len__(self) -> int:
        return len(self.header["arrays"])

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key not in ("_maps", "_arrays", "unchanged")}

    @functools.cached_property
    def _maps(self) -> dict[str, np.ndarray]:
        return {}

    @functools.cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {}

    @functools.cached_property
    def unchanged(self) -> Unchanged:
        """The watch over the files."""
        return Unchanged(self.known)

    def check(self) -> None:
        """Raises Stop if a file is no longer what it was; to be called before mapped arrays are read."""
        self.unchanged.check(self.known)

    def _map(self, file: str, offset: int, dtype: str, count: int) -> np.ndarray:
        if not count:
            return np.zeros(0, dtype)
        if file not in self._maps:
            path = self.files[file]
            self.unchanged.check_unopened([path])
            try:  # indexing an np.memmap itself costs far more
                self._maps[file] = np.asarray(np.memmap(path, np.uint8, mode="r"))
            except (OSError, ValueError) as error:
                raise unusable(self.folder, error) from None
        return self._maps[file][offset : offset + count * np.dtype(dtype).itemsize].view(dtype)


def open_arrays(folder: Path, cache: Path, verify: str = "hash", say: Say | None = None) -> Arrays:
    """The arrays of a local folder, verified. Raises BadInput if one is not as it was written.

    Args: cache: where it is remembered what was found good, as `damaged` has it. verify: data.verify.
    """
    header = read_folder(folder)
    paths = {name: str(folder / name) for name in header["files"]}
    sums = {paths[name]: about["sha256"] for name, about in header["files"].items()}
    try:
        known = expected(sums)
    except OSError as error:
        raise unusable(folder, error) from None
    for name, about in header["files"].items():
        if known[paths[name]].stamp[0] != about["bytes"]:
            raise unusable(
                folder, f"{paths[name]} was changed after it was written: it has not {about['bytes']:,} bytes"
            )
    if verify == "size":
        return Arrays(str(folder), header, paths, of_size(known))
    for path, problem in damaged(sums, cache, str(folder), say, remember=verify == "hash").items():
        raise unusable(folder, problem or f"{path} was changed after it was written")
    return Arrays(str(folder), header, paths, known)


def find_arrays(place: str, cache: Path, cache_bytes: int, verify: str, say: Say | None) -> Arrays | None:
    """The arrays of a folder or at a gs:// address, verified; None if there are none.

    What lies in a bucket is copied into the cache, where it is checked by its hashes. Raises as open_arrays.
    """
    if not is_remote(place):
        return open_arrays(Path(place), cache, verify, say) if os.path.exists(f"{place}/{HEADER}") else None
    copies = shard_cache(str(cache / "bucket"), cache_bytes)
    if copies.bucket.metadata(f"{place}/{HEADER}") is None:
        return None
    header = parse_header(place, copies.bucket.read(f"{place}/{HEADER}"))
    about = header["files"]
    local = lambda name: str(copies.local(f"{place}/{name}", about[name]["bytes"], about[name]["sha256"]))
    with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
        files = dict(zip(about, pool.map(local, about)))
    known = expected({files[name]: about[name]["sha256"] for name in about})
    return Arrays(place, header, files, of_size(known) if verify == "size" else known)


class Buckets:
    """Records on the way to the bucket of their number, in temporary files: memory holds a bucket at a time.

    Within a bucket they keep the order in which they came. Of one bucket alone nothing is written.
    """

    def __init__(self, folder: Path, dtype: Any, number: int):
        """number: of buckets."""
        self._folder, self._dtype, self.number = folder / "buckets", np.dtype(dtype), number
        self._held: list[tuple[np.ndarray | None, np.ndarray]] = []
        self._count = 0

    @classmethod
    def of(cls, folder: Path, dtype: Any, records: int) -> "Buckets":
        """Buckets of about BUCKET records each."""
        return cls(folder, dtype, max(1, -(-records // BUCKET)))

    def add(self, buckets: np.ndarray | None, **fields: np.ndarray) -> None:
        """Puts each record, of these fields, into its bucket; where there is one alone, it need not be named."""
        records = np.empty(len(next(iter(fields.values()))), self._dtype)
        for name, values in fields.items():
            records[name] = values
        self._held.append((buckets, records))
        self._count += len(records)
        if self.number > 1 and self._count >= BUCKET // 2:
            self._flush()

    def _flush(self) -> None:
        """Writes what is held: many at once, so that a file is opened seldom, and one by one, for thousands of open
        files are too many."""
        if not self._held:
            return
        buckets, records = (np.concatenate(column) for column in zip(*self._held))
        self._held.clear()
        self._count = 0
        self._folder.mkdir(exist_ok=True)
        order = np.argsort(buckets, kind="stable")
        present, firsts = np.unique(buckets[order], return_index=True)
        for bucket, part in zip(present.tolist(), np.split(records[order], firsts[1:])):
            with open(self._folder / str(bucket), "ab") as file:
                part.tofile(file)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yields the records of each bucket, and forgets them."""
        if self.number == 1:
            yield np.concatenate([np.zeros(0, self._dtype), *(records for _, records in self._held)])
            self._held.clear()
            return
        self._flush()
        for bucket in range(self.number):
            path = self._folder / str(bucket)
            yield np.fromfile(path, self._dtype) if path.exists() else np.zeros(0, self._dtype)
            path.unlink(missing_ok=True)
        remove(self._folder)
