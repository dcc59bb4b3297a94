"""Index from document names to document numbers, for `jaxscale trace --doc`: sorted hashes, memory-mapped.

A name is a document's id, or its location FILE:OFFSET. Each entry has a 4-byte hash and a 4-byte document number (8
bytes beyond 2**32 documents). Hashes can collide: the caller checks the lineage of each candidate.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.runtime.data.array_folder import Arrays, ArrayWriter, DiskBuckets
from jaxscale.runtime.data.cache import ensure_folder
from jaxscale.runtime.data.document_lineage import open_lineage
from jaxscale.runtime.data.permutation import mix64
from jaxscale.runtime.data.shards import Shard
from jaxscale.system.redact import on_one_line

if TYPE_CHECKING:
    import pyarrow

FACTOR = 0x9E3779B97F4A7C15  # odd, so that its powers spread a byte over 64 bits (2**64 / golden ratio)
LAYOUT = 1  # of the folder; raise it when the arrays change
KEY_BITS = 32


def names_cache_key(shards: Sequence[Shard]) -> dict[str, Any]:
    """Returns the cache key of the index of these shards."""
    return {"names": [shard.header["sha256"].get("docs", "") for shard in shards], "layout": LAYOUT}


def publish_names(folder: Path, shards: Sequence[Shard]) -> Path:
    """Creates the index in a set's folder unless it exists, and returns its path."""
    make = functools.partial(write_names, shards=shards)
    return ensure_folder(folder, "names", names_cache_key(shards), make, is_cache=False)


def write_names(folder: Path, shards: Sequence[Shard]) -> None:
    """Writes the index of the shards that have a lineage."""
    total = sum(shard.header["num_documents"] for shard in shards)
    buckets = DiskBuckets(folder, [("key", "<u4"), ("number", "<i8")], 2 * total)
    width, first = -(-(1 << KEY_BITS) // buckets.number), 0
    for shard in shards:
        if "docs" in shard.header["sha256"]:
            with open_lineage(shard.lineage_path) as file:
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, columns=["file", "offset", "id"], use_threads=False)
                    numbers = first + np.arange(table.num_rows)
                    for keys, selected in ((location_keys(table), slice(None)), id_keys(table)):
                        buckets.add(keys.astype(np.int64) // width, key=keys, number=numbers[selected])
                    first += table.num_rows
        else:
            first += shard.header["num_documents"]
    with ArrayWriter(folder) as out:
        out.append("keys", np.zeros(0, np.uint32))
        out.append("numbers", np.zeros(0, np.uint32 if total <= 1 << 32 else np.int64))
        for records in buckets:
            order = np.argsort(records["key"], kind="stable")
            out.append("keys", records["key"][order])
            out.append("numbers", records["number"][order])
        out.finish({"documents": total})


def location_keys(table: "pyarrow.Table") -> np.ndarray:
    """Returns uint32[n]: the hash of each document's location."""
    files = table["file"].combine_chunks()
    files = files if hasattr(files, "dictionary") else files.dictionary_encode()
    hashes = np.array([string_hash(on_one_line(name)) for name in files.dictionary.to_pylist()], np.uint64)
    return high_bits(location_hashes(hashes[files.indices.to_numpy()], table["offset"].to_numpy()))


def id_keys(table: "pyarrow.Table") -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint32[m] hashes of the ids, int64[m] documents that have one)."""
    ids = table["id"].combine_chunks()
    _, offsets, content = ids.buffers()
    begin = np.frombuffer(offsets, np.int32, len(ids) + 1, 4 * ids.offset)
    with_id = np.flatnonzero(np.diff(begin))
    text = np.frombuffer(content, np.uint8)[begin[0] : begin[-1]] if len(with_id) else np.zeros(0, np.uint8)
    return high_bits(string_hashes(text, begin[:-1][with_id] - begin[0], np.diff(begin)[with_id])), with_id


def string_hashes(text: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns uint64[n]: the hash of each UTF-8 string. The strings are not empty and cover the text."""
    if not len(begins):
        return np.zeros(0, np.uint64)
    positions = np.arange(len(text)) - np.repeat(begins, lengths)
    powers = np.cumprod(np.full(int(lengths.max()), FACTOR, np.uint64))
    sums = np.add.reduceat((text.astype(np.uint64) + np.uint64(1)) * powers[positions], begins)
    return mix64(sums + lengths.astype(np.uint64))


def string_hash(text: str) -> int:
    """Returns string_hashes of one string."""
    content = np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)
    return int(string_hashes(content, np.zeros(1, np.int64), np.array([len(content)]))[0]) if len(content) else 0


def location_hashes(files: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns uint64[n]: the hash of each location. files: hashes of the file names."""
    return mix64(files ^ mix64(offsets.astype(np.uint64) + np.uint64(1)))


def high_bits(hashes: np.ndarray) -> np.ndarray:
    """Returns uint32[n]: the upper KEY_BITS bits of each hash."""
    return (hashes >> np.uint64(64 - KEY_BITS)).astype(np.uint32)


def candidate_documents(names: Arrays, document: str, file: str, offset: int | None) -> list[int]:
    """Returns sorted numbers of documents that may have this id or location; offset None: no location."""
    keys = [high_bits(np.array([string_hash(document)], np.uint64))]
    if file and offset is not None:
        file_hash = np.array([string_hash(on_one_line(file))], np.uint64)
        keys.append(high_bits(location_hashes(file_hash, np.array([offset]))))
    found: set[int] = set()
    for key in np.concatenate(keys):
        first, last = (int(names["keys"].searchsorted(key, side=side)) for side in ("left", "right"))
        found.update(names["numbers"][first:last].tolist())
    return sorted(found)
