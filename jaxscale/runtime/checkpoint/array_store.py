"""Reads and writes the arrays of a checkpoint step in chunks, without a device.

TensorStore stores each array as chunks, one for each device that had a part of the array. An OCDBT index (a B-tree with
checksums) maps the chunks to byte ranges in files. Training and `ckpt verify` use this module to read saved steps, and
`ckpt average` and `convert` use it to write arrays.
"""

import collections
import contextlib
import itertools
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore

from jaxscale.runtime.checkpoint.fingerprint import host_fingerprint
from jaxscale.runtime.checkpoint.folders import files_under
from jaxscale.runtime.checkpoint.storage_errors import is_storage_error, short_reason
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop

READ_AHEAD_BYTES = 64 << 20  # bytes in flight: enough to hide the latency of a bucket with bounded memory
CACHE_BYTES = 16 << 20  # cache of the index; without this cache every chunk requests the index from a bucket again
STATE, TREE_METADATA = "state", "state/_METADATA"
DIFFERS = "its bits differ from those that were saved"
PYTHON_SCALARS = {"int": int, "float": float, "bool": bool, "complex": complex}  # saved as 0-d arrays
KEY_DTYPE_PREFIX = "key<"  # prefix of the dtype of random keys, which are saved as uint32 words along an extra axis
COMMIT_BYTES = 64 << 20  # bytes buffered per transaction; each commit rewrites the index
# Size of an index node. A commit rewrites the nodes that it changes, and the old versions stay in the files. With
# TensorStore's default of 8 MB, one node would contain the whole index of 10,000 chunks.
NODE_BYTES = 128 << 10
DICT_KEY = 2  # Orbax's key type for a dict level of the tree
MANIFEST = "manifest.ocdbt"
DATA_FILE = re.compile(r"(?:ocdbt\.process_\d+/)?(?:d/[0-9a-f]{16,}|manifest\.ocdbt)")
ARRAY_METADATA = (".zarray", "zarr.json")  # metadata files of an array; all other entries below the array are chunks


def compare_leaf(arrays: "ArrayReader", name: str, shape: list[int], dtype: str, fingerprint: int) -> tuple[str, int]:
    """Returns (how the leaf differs from its record, or '' if it matches; number of bytes read)."""
    array = arrays.open(name)
    if wrong := format_mismatch(array, shape, dtype):
        return wrong, 0
    total, numbers = sum_boxes(array, chunk_boxes(array))
    found = {total}
    if dtype in PYTHON_SCALARS and not shape:
        number = PYTHON_SCALARS[dtype](array.read().result().item())
        # numpy's bool and Python's have the same dtype in the record
        found = {zlib.crc32(repr(number).encode())} | (found if dtype == array.dtype.name else set())
    return ("" if fingerprint in found else DIFFERS), numbers * array.dtype.numpy_dtype.itemsize


def format_mismatch(array: Any, shape: list[int], dtype: str) -> str:
    """Returns how an array in the files differs from a recorded shape and dtype, or '' if both match."""
    is_key, found = dtype.startswith(KEY_DTYPE_PREFIX), list(array.shape)
    if (found[:-1] if is_key else found) != shape:
        return f"its shape is {found}, but {shape} was saved"
    if dtype not in PYTHON_SCALARS and not is_key and array.dtype.name != dtype:
        return f"its dtype is {array.dtype.name}, but {dtype} was saved"
    return ""


class ArrayReader:
    """Opens the arrays of one step by name."""

    def __init__(self, folder: Any):
        self.folder = folder
        self.driver = "zarr"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # callers that need the tree report it
            self.driver = "zarr3" if paths.read_json(folder / TREE_METADATA).get("use_zarr3") else "zarr"
        self.context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})

    def open(self, name: str) -> Any:
        """Returns the leaf as a tensorstore.TensorStore. Raises ValueError if the leaf is missing."""
        return self.open_async(name).result()

    def open_async(self, name: str) -> Any:
        """Same as `open`, but returns a future, so that many leaves can be opened concurrently."""
        spec = {"driver": self.driver, "kvstore": leaf_kvstore(self.folder, name), "recheck_cached_data": False}
        return tensorstore.open(spec, open=True, read=True, context=self.context)


def stored_name(leaf: str) -> str:
    """Returns Orbax's name for a leaf: 'params/w' -> 'params.w'."""
    return leaf.replace("/", ".")


def leaf_kvstore(folder: Any, leaf: str) -> dict[str, Any]:
    """Returns the TensorStore spec of the key-value store with the metadata and chunks of a leaf."""
    return {"driver": "ocdbt", "base": kvstore_spec(folder / STATE), "path": f"{stored_name(leaf)}/"}


def kvstore_spec(folder: Any) -> dict[str, str]:
    """Returns the TensorStore spec of a folder, whose name may contain special characters."""
    if paths.is_remote(folder):
        bucket, _, path = os.fspath(folder).removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}
    return {"driver": "file", "path": f"{os.path.abspath(folder)}/"}


Box = tuple[slice, ...]
Region = tuple[tuple[int, int], ...]  # (begin, end) along each axis


def chunk_boxes(array: Any, region: Region | None = None) -> list[Box]:
    """Returns the array's chunks as slices, clipped to the region if one is given."""
    sizes = array.chunk_layout.read_chunk.shape or array.shape
    return grid_boxes(array.shape, sizes) if region is None else region_boxes(region, sizes)


def grid_boxes(shape: Sequence[int], sizes: Sequence[int]) -> list[Box]:
    """Returns boxes of the given sizes that cover an array; the last boxes are clipped to its shape."""
    return region_boxes(tuple((0, length) for length in shape), sizes)


def region_boxes(region: Region, sizes: Sequence[int]) -> list[Box]:
    """Returns the intersections of a region with a grid of boxes of the given sizes."""
    cuts = [
        [slice(max(at, begin), min(at + size, end)) for at in range(begin - begin % size, end, size)]
        for (begin, end), size in zip(region, (max(size, 1) for size in sizes), strict=True)
    ]
    return list(itertools.product(*cuts))


def box_bytes(array: Any, box: Box) -> int:
    """Returns the size of a box in memory, in bytes."""
    return math.prod(part.stop - part.start for part in box) * array.dtype.numpy_dtype.itemsize


def read_ahead(requests: Iterable[tuple[Any, Box]], limit: int = READ_AHEAD_BYTES) -> Iterator[np.ndarray]:
    """Yields the values of the boxes in order. Reads at most `limit` bytes ahead, or one larger box."""
    pending: collections.deque = collections.deque()
    in_flight = 0
    for array, box in requests:
        size = box_bytes(array, box)
        while pending and in_flight + size > limit:
            future, read_bytes = pending.popleft()
            yield future.result()
            in_flight -= read_bytes
        pending.append((array[box].read(), size))
        in_flight += size
    while pending:
        future, _ = pending.popleft()
        yield future.result()


def sum_boxes(array: Any, boxes: Sequence[Box]) -> tuple[int, int]:
    """Returns (sum of the fingerprints of the given boxes, number of elements in the boxes)."""
    total = numbers = 0
    for box, value in zip(boxes, read_ahead((array, box) for box in boxes)):
        total += host_fingerprint(value, start=[part.start for part in box], shape=array.shape)
        numbers += value.size
    return total % 2**32, numbers


def array_format(array: Any) -> dict[str, Any]:
    """Returns TensorStore's spec of an existing array without the location."""
    spec = array.spec().to_json()
    config = {key: value for key, value in spec["kvstore"].get("config", {}).items() if key != "uuid"}
    return {"driver": spec["driver"], "metadata": spec["metadata"], "kvstore": {"config": config}}


def orbax_array_format(shape: Sequence[int], chunks: Sequence[int], dtype: np.dtype) -> dict[str, Any]:
    """Returns the TensorStore spec of an array in Orbax's format (zarr 2, uncompressed). It contains no location."""
    metadata = {"zarr_format": 2, "shape": list(shape), "chunks": list(chunks), "dtype": np.dtype(dtype).str}
    metadata |= {"compressor": None, "fill_value": None, "filters": None, "order": "C", "dimension_separator": "."}
    return {"driver": "zarr", "metadata": metadata, "kvstore": {"config": {"max_decoded_node_bytes": NODE_BYTES}}}


def orbax_tree_metadata(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Returns Orbax's `_METADATA` for a tree of nested dicts. `shapes`: {name of an array: shape}."""
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


class StepArrayWriter:
    """Writes arrays into a step's folder, with many boxes per transaction."""

    def __init__(self, folder: Any):
        self.folder = folder
        self.transaction, self.pending, self.bytes = None, [], 0
        self.context = tensorstore.Context()

    def create(self, formats: Mapping[str, dict[str, Any]]) -> list[Any]:
        """Creates or opens arrays and returns them in order; writes the index once. Raises Stop (STORAGE)."""
        transaction = tensorstore.Transaction()
        options: dict[str, Any] = dict(open=True, create=True, context=self.context, transaction=transaction)
        try:
            futures = [tensorstore.open(self.spec(name, fmt), **options) for name, fmt in formats.items()]
            arrays = [future.result() for future in futures]
            transaction.commit_sync()
        except ValueError as error:
            raise self.failure(error) from None
        return [array.with_transaction(None) for array in arrays]

    def spec(self, name: str, fmt: dict[str, Any]) -> dict[str, Any]:
        """Returns TensorStore's spec of a new array."""
        store = leaf_kvstore(self.folder, name) | fmt["kvstore"]
        # without this option chunks of zeros are not stored, so a lost chunk would be read as zeros
        return fmt | {"kvstore": store, "store_data_equal_to_fill_value": True}

    def write(self, array: Any, box: Box, value: np.ndarray) -> bool:
        """Queues a box for writing; returns True if all queued boxes are now stored. commit() stores the others."""
        if self.transaction is None:
            self.transaction = tensorstore.Transaction()
        self.pending.append(array.with_transaction(self.transaction)[box].write(value))
        self.bytes += box_bytes(array, box)
        if self.bytes >= COMMIT_BYTES:
            self.commit()
        return self.transaction is None

    def commit(self) -> None:
        """Waits until all queued boxes are stored. Raises Stop (STORAGE)."""
        if self.transaction is None:
            return
        try:
            for future in self.pending:
                future.copy.result()  # commit_sync waits for the rest of the write
            self.transaction.commit_sync()
        except ValueError as error:
            raise self.failure(error) from None
        self.transaction, self.pending, self.bytes = None, [], 0

    def failure(self, error: BaseException) -> Stop:
        """Returns the error for a failed write."""
        return Stop(Exit.STORAGE, f"{self.folder} cannot be written: {short_reason(error)}; run the command again")


def leaf_files(folder: Any) -> dict[str, set[str]]:
    """Returns {stored name of a leaf: its data files in the step's folder}, up to the first damaged index node."""
    found: dict[str, set[str]] = {}
    with contextlib.suppress(Exception):  # the index itself may be damaged
        base = open_kvstore(folder / STATE)
        newest = tensorstore.ocdbt.dump(base).result()["versions"][-1]
        for key, location in index_entries(base, newest["root"].get("location")):
            name, _, piece = key.decode().rpartition("/")
            if piece not in ARRAY_METADATA:  # location: 'value:ocdbt.process_0/:d/12ab:0:64'
                found.setdefault(name, set()).add(f"{STATE}/{''.join(location.split(':')[1:-2])}")
    return found


def index_damages(folder: Any) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yields (index file, cause, data files named in the error) for each OCDBT index with an unreadable version."""
    for name in files_under(folder / STATE):
        if name.rpartition("/")[2] == MANIFEST:
            subfolder = name.removesuffix(MANIFEST).rstrip("/")
            try:
                base = open_kvstore(folder / STATE / subfolder if subfolder else folder / STATE)
                manifest = tensorstore.ocdbt.dump(base).result()
                seen: set[str] = set()
                for root in index_roots(base, manifest):
                    for _ in index_entries(base, root, seen=seen):
                        pass
            except Exception as error:  # TensorStore raises several types for corrupt bytes
                if is_storage_error(error):
                    raise
                yield f"{STATE}/{name}", short_reason(error), named_files(str(error))


def open_kvstore(folder: Any) -> Any:
    """Opens a folder that contains an OCDBT index."""
    return tensorstore.KvStore.open(kvstore_spec(folder)).result()


def index_roots(base: Any, node: dict[str, Any]) -> Iterator[str | None]:
    """Yields the location of the root node of every version listed in a manifest or a node of its version tree."""
    for version in node["versions"] if "versions" in node else node["entries"]:
        if "root" in version:
            yield version["root"].get("location")
        else:
            yield from index_roots(base, tensorstore.ocdbt.dump(base, version["location"]).result())
    for older in node.get("version_tree_nodes", ()):
        yield from index_roots(base, tensorstore.ocdbt.dump(base, older["location"]).result())


def index_entries(
    base: Any, location: str | None, prefix: bytes = b"", seen: set[str] | None = None
) -> Iterator[tuple[bytes, str]]:
    """Yields (key, location of the value) of all entries below a node. Skips nodes in `seen`; adds visited nodes."""
    if location is None or seen is not None and location in seen:
        return
    if seen is not None:
        seen.add(location)
    for entry in tensorstore.ocdbt.dump(base, location).result()["entries"]:
        if "location" in entry:
            yield from index_entries(base, entry["location"], prefix + entry["subtree_common_prefix"], seen)
        else:
            yield prefix + entry["key"], entry.get("indirect_value", location)


def named_files(text: str) -> tuple[str, ...]:
    """Returns the data files named in a TensorStore error message."""
    return tuple(sorted({f"{STATE}/{name}" for name in DATA_FILE.findall(text)}))
