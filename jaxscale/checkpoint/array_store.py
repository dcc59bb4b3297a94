"""The arrays of a step in its files: read and written a piece at a time, without a device.

TensorStore keeps them in the pieces in which they were written, one per device that held a part, below an index (OCDBT,
a B-tree with checksums) that says which bytes lie in which file. Training reads back by this what it has saved, `ckpt
verify` what lies there, and `ckpt average` and `convert` write by it.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore

from jaxscale.checkpoint.fingerprint import host_fingerprint
from jaxscale.checkpoint.folders import files_under
from jaxscale.checkpoint.storage_errors import is_storage_error, short_reason
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop

READ_AHEAD_BYTES = 64 << 20  # asked for and not yet used: hides the latency of a bucket, and is what memory it takes
CACHE_BYTES = 16 << 20  # of the index of a checkpoint, or every piece would ask a bucket for it again
STATE, TREE = "state", "state/_METADATA"
DIFFERS = "its bits differ from those that were saved"
NUMBERS = {"int": int, "float": float, "bool": bool, "complex": complex}  # Python's: saved as arrays without axes
KEY = "key<"  # how the dtype of random keys begins, which are saved as words, in one axis more
COMMIT_BYTES = 64 << 20  # written at once: each commit writes the index anew, and holds this much memory
# Of a node of the index: a commit writes those that it changes, and all their versions stay in the files. TensorStore's
# default of 8 MB would hold the whole index of 10,000 pieces in one node.
NODE_BYTES = 128 << 10
DICT_KEY = 2  # how Orbax writes that a level of the tree is a dict
MANIFEST = "manifest.ocdbt"
DATA_FILE = re.compile(r"(?:ocdbt\.process_\d+/)?(?:d/[0-9a-f]{16,}|manifest\.ocdbt)")
DESCRIPTIONS = (".zarray", "zarr.json")  # of an array; what else lies below it are its pieces


def compare_leaf(arrays: "Arrays", name: str, shape: list[int], dtype: str, mark: int) -> tuple[str, int]:
    """('' or what is wrong with the leaf, bytes read). Args: shape, dtype, mark: as its record has them."""
    array = arrays.open(name)
    if wrong := misfit(array, shape, dtype):
        return wrong, 0
    total, size, value = 0, 0, None
    for box, value in in_pieces(array, boxes(array)):
        total += host_fingerprint(value, start=[part.start for part in box], shape=array.shape)
        size += value.nbytes
    found = {total % 2**32}
    if dtype in NUMBERS and value is not None and not shape:
        number = NUMBERS[dtype](value.item())
        # a numpy bool and Python's look alike in the record
        found = {zlib.crc32(repr(number).encode())} | (found if dtype == array.dtype.name else set())
    return ("" if mark in found else DIFFERS), size


def misfit(array: Any, shape: list[int], dtype: str) -> str:
    """'' if the array in the files is one of this shape and dtype, as a record has them; else what it is."""
    is_key, own = dtype.startswith(KEY), list(array.shape)
    if (own[:-1] if is_key else own) != shape:
        return f"its shape is {own}, and {shape} was saved"
    if dtype not in NUMBERS and not is_key and array.dtype.name != dtype:
        return f"its dtype is {array.dtype.name}, and {dtype} was saved"
    return ""


class Arrays:
    """The arrays of one step, opened by name and read in pieces. Nothing is kept from one object to the next."""

    def __init__(self, folder: Any):
        self.folder = folder
        self.driver = "zarr"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # who needs the tree finds out by itself
            self.driver = "zarr3" if paths.read_json(folder / TREE).get("use_zarr3") else "zarr"
        self.context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})

    def open(self, name: str) -> Any:
        """The leaf as a tensorstore.TensorStore. Raises ValueError, of many lines, if it is not there."""
        return self.opening(name).result()

    def opening(self, name: str) -> Any:
        """The future of `open`: many leaves of a bucket are opened at once."""
        store = {"driver": "ocdbt", "base": kvstore(self.folder / STATE), "path": f"{stored_name(name)}/"}
        spec = {"driver": self.driver, "kvstore": store, "recheck_cached_data": False}
        return tensorstore.open(spec, open=True, read=True, context=self.context)


def stored_name(leaf: str) -> str:
    """The name under which Orbax keeps a leaf: 'params/w' -> 'params.w'."""
    return leaf.replace("/", ".")


def kvstore(folder: Any) -> dict[str, str]:
    """TensorStore's description of a folder, safe for any name."""
    if paths.is_remote(folder):
        bucket, _, path = os.fspath(folder).removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}
    return {"driver": "file", "path": f"{os.path.abspath(folder)}/"}


Box = tuple[slice, ...]


def boxes(array: Any) -> list[Box]:
    """The pieces in which the array was written, as slices that cover it."""
    return cut(array.shape, array.chunk_layout.read_chunk.shape or array.shape)


def cut(shape: Sequence[int], sizes: Sequence[int]) -> list[Box]:
    """Pieces of these sizes that cover an array, as slices."""
    ranges = [
        [slice(begin, min(begin + size, length)) for begin in range(0, length, max(size, 1))]
        for length, size in zip(shape, sizes, strict=True)
    ]
    return list(itertools.product(*ranges))


def box_bytes(array: Any, box: Box) -> int:
    """What a piece takes in memory."""
    return math.prod(part.stop - part.start for part in box) * array.dtype.numpy_dtype.itemsize


def read_ahead(wanted: Iterable[tuple[Any, Box]], limit: int = READ_AHEAD_BYTES) -> Iterator[np.ndarray]:
    """Yields the pieces in order. At most `limit` bytes are asked for ahead, or one piece that is larger."""
    pending: collections.deque = collections.deque()
    in_flight = 0
    for array, box in wanted:
        size = box_bytes(array, box)
        while pending and in_flight + size > limit:
            future, taken = pending.popleft()
            yield future.result()
            in_flight -= taken
        pending.append((array[box].read(), size))
        in_flight += size
    while pending:
        future, _ = pending.popleft()
        yield future.result()


def in_pieces(array: Any, wanted: Sequence[Box]) -> Iterator[tuple[Box, np.ndarray]]:
    """Yields (piece, its values) of one array, read ahead."""
    return zip(wanted, read_ahead((array, box) for box in wanted))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How TensorStore keeps an array: its driver, that driver's metadata, and the index's settings."""

    driver: str
    metadata: Mapping[str, Any]
    index: Mapping[str, Any]


def layout_of(array: Any) -> Layout:
    """That of an array that is there."""
    spec = array.spec().to_json()
    index = {key: value for key, value in spec["kvstore"].get("config", {}).items() if key != "uuid"}
    return Layout(spec["driver"], spec["metadata"], index)


def new_layout(shape: Sequence[int], chunks: Sequence[int], dtype: np.dtype) -> Layout:
    """That of an array as Orbax makes it (zarr 2, not compressed), in pieces of `chunks`."""
    metadata = {"zarr_format": 2, "shape": list(shape), "chunks": list(chunks), "dtype": np.dtype(dtype).str}
    metadata |= {"compressor": None, "fill_value": None, "filters": None, "order": "C", "dimension_separator": "."}
    return Layout("zarr", metadata, {"max_decoded_node_bytes": NODE_BYTES})


def tree_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What Orbax writes of a tree of nested dicts into its `_METADATA`, for arrays of these names and shapes."""
    entries = {}
    for name, shape in shapes.items():
        keys = name.split("/")
        entries[repr(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": DICT_KEY} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(shape)},
        }
    return {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


class Output:
    """Arrays below a step's folder, many of them written in one transaction."""

    def __init__(self, folder: Any):
        self.folder = folder
        self.transaction, self.pending, self.bytes = None, [], 0
        self.context = tensorstore.Context()

    def create(self, layouts: Mapping[str, Layout]) -> list[Any]:
        """Arrays of these names and layouts, in order; the index is written once for all.

        One that is there already, of the same layout, is opened. Raises Stop (STORAGE).
        """
        transaction = tensorstore.Transaction()
        how: dict[str, Any] = dict(open=True, create=True, context=self.context, transaction=transaction)
        try:
            made = [tensorstore.open(self.spec(name, layout), **how) for name, layout in layouts.items()]
            arrays = [future.result() for future in made]
            transaction.commit_sync()
        except ValueError as error:
            raise self.failure(error) from None
        return [array.with_transaction(None) for array in arrays]

    def spec(self, name: str, layout: Layout) -> dict[str, Any]:
        """TensorStore's description of a new array."""
        base = kvstore(self.folder / STATE)
        store = {"driver": "ocdbt", "base": base, "config": dict(layout.index), "path": f"{stored_name(name)}/"}
        wanted = {"driver": layout.driver, "kvstore": store, "metadata": dict(layout.metadata)}
        # or a piece of zeros would be left out, and a lost one would read as zeros
        return wanted | {"store_data_equal_to_fill_value": True}

    def write(self, array: Any, box: Box, value: np.ndarray) -> bool:
        """Takes a piece, which is on the disk at the latest after `commit`; True if it and all before it are now."""
        if self.transaction is None:
            self.transaction = tensorstore.Transaction()
        self.pending.append(array.with_transaction(self.transaction)[box].write(value))
        self.bytes += box_bytes(array, box)
        if self.bytes >= COMMIT_BYTES:
            self.commit()
        return self.transaction is None

    def commit(self) -> None:
        """Returns when all pieces so far are on the disk. Raises Stop (STORAGE)."""
        if self.transaction is None:
            return
        try:
            for future in self.pending:
                future.copy.result()  # the commit waits for the rest
            self.transaction.commit_sync()
        except ValueError as error:
            raise self.failure(error) from None
        self.transaction, self.pending, self.bytes = None, [], 0

    def failure(self, error: BaseException) -> Stop:
        """The error for what could not be written."""
        return Stop(Exit.STORAGE, f"{self.folder} cannot be written: {short_reason(error)}; run it again")


class Locations:
    """In which files the bytes of a leaf lie, looked up when the first one is asked for."""

    def __init__(self, folder: Any):
        self.folder, self.found = folder, None

    def files(self, leaf: str) -> tuple[str, ...]:
        """The files, below the step's folder; none where the index itself cannot be read."""
        if self.found is None:
            self.found = {}
            with contextlib.suppress(Exception):  # the index may be what is damaged
                base = open_base(self.folder / STATE)
                newest = tensorstore.ocdbt.dump(base).result()["versions"][-1]
                for key, location in entries(base, newest["root"].get("location")):
                    name, _, piece = key.decode().rpartition("/")
                    if piece not in DESCRIPTIONS:
                        self.found.setdefault(name, set()).add(location_file(location))
        return tuple(sorted(self.found.get(stored_name(leaf), ())))


def index_damages(folder: Any) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yields (file, cause, files it names) of each index below a step's folder of which any version cannot be read.

    A process keeps an index of its own, and every version of it as it grew. A restore uses the last version of the
    common one; but a disk that lost a bit of the others may lose more.
    """
    for name in files_under(folder / STATE):
        if name.rpartition("/")[2] == MANIFEST:
            inner = name.removesuffix(MANIFEST).rstrip("/")
            try:
                base = open_base(folder / STATE / inner if inner else folder / STATE)
                manifest = tensorstore.ocdbt.dump(base).result()
                seen: set[str] = set()
                for root in roots(base, manifest):
                    for _ in entries(base, root, seen=seen):
                        pass
            except Exception as error:  # whatever TensorStore makes of spoilt bytes
                if is_storage_error(error):
                    raise
                yield f"{STATE}/{name}", short_reason(error), named_files(str(error))


def open_base(folder: Any) -> Any:
    """The folder that an index lies in."""
    return tensorstore.KvStore.open(kvstore(folder)).result()


def roots(base: Any, node: dict[str, Any]) -> Iterator[str | None]:
    """Yields the location of the tree of every version that a manifest, or a node of its own tree, tells of."""
    for version in node["versions"] if "versions" in node else node["entries"]:
        if "root" in version:
            yield version["root"].get("location")
        else:
            yield from roots(base, tensorstore.ocdbt.dump(base, version["location"]).result())
    for older in node.get("version_tree_nodes", ()):
        yield from roots(base, tensorstore.ocdbt.dump(base, older["location"]).result())


def entries(
    base: Any, location: str | None, prefix: bytes = b"", seen: set[str] | None = None
) -> Iterator[tuple[bytes, str]]:
    """Yields (key, where its bytes lie) below a node, whose keys all begin with `prefix`. Each node has a checksum.

    Args: seen: nodes that are left out, to which those that are visited are added.
    """
    if location is None or seen is not None and location in seen:
        return
    if seen is not None:
        seen.add(location)
    for entry in tensorstore.ocdbt.dump(base, location).result()["entries"]:
        if "location" in entry:
            yield from entries(base, entry["location"], prefix + entry["subtree_common_prefix"], seen)
        else:
            yield prefix + entry["key"], entry.get("indirect_value", location)


def location_file(location: str) -> str:
    """'value:ocdbt.process_0/:d/12ab:0:64' -> 'state/ocdbt.process_0/d/12ab'."""
    _, *file, _, _ = location.split(":")
    return f"{STATE}/{''.join(file)}"


def named_files(text: str) -> tuple[str, ...]:
    """The data files that an error of TensorStore names."""
    return tuple(sorted({f"{STATE}/{name}" for name in DATA_FILE.findall(text)}))
