"""The documents of a prepared set by their names, for `jaxscale trace --doc`: sorted hashes on disk, and mapped.

A name is a document's own id, or its place, FILE:OFFSET. Of each there are 4 bytes of a hash and 4 of the document's
number (8 beyond 2**32 documents). Two names may share a hash: who asks looks into the lineage of what is found.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.data.array_folder import Arrays, ArrayWriter, Buckets, find_arrays
from jaxscale.data.cache import folder_name, made_folder
from jaxscale.data.lineage import open_lineage
from jaxscale.data.permutation import mix
from jaxscale.data.shards import Shard
from jaxscale.system.redact import on_one_line

if TYPE_CHECKING:
    import pyarrow

FACTOR = 0x9E3779B97F4A7C15  # odd, its powers spread a byte over the 64 bits (2**64 over the golden ratio)
LAYOUT = 1  # of the folder: another number where it holds other arrays
KEY_BITS = 32


def made_from(shards: Sequence[Shard]) -> dict[str, Any]:
    """What the index of these shards is found by."""
    return {"names": [shard.header["sha256"].get("docs", "") for shard in shards], "layout": LAYOUT}


def publish_names(folder: Path, shards: Sequence[Shard]) -> Path:
    """Makes the index in a set's folder, unless it is there, and returns where it is."""
    make = functools.partial(write_names, shards=shards)
    return made_folder(folder, "names", made_from(shards), make, is_cache=False)


def write_names(folder: Path, shards: Sequence[Shard]) -> None:
    """Writes the index of all shards that have a lineage."""
    total = sum(shard.header["num_documents"] for shard in shards)
    buckets = Buckets.of(folder, [("key", "<u4"), ("number", "<i8")], 2 * total)
    width, first = -(-(1 << KEY_BITS) // buckets.number), 0
    for shard in shards:
        if "docs" in shard.header["sha256"]:
            with open_lineage(shard.lineage_path) as file:
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, columns=["file", "offset", "id"], use_threads=False)
                    numbers = first + np.arange(table.num_rows)
                    for keys, chosen in ((place_keys(table), slice(None)), id_keys(table)):
                        buckets.add(keys.astype(np.int64) // width, key=keys, number=numbers[chosen])
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


def place_keys(table: "pyarrow.Table") -> np.ndarray:
    """uint32[n]: the hash of each document's place."""
    files = table["file"].combine_chunks()
    files = files if hasattr(files, "dictionary") else files.dictionary_encode()
    hashes = np.array([text_hash(on_one_line(name)) for name in files.dictionary.to_pylist()], np.uint64)
    return top(place_hashes(hashes[files.indices.to_numpy()], table["offset"].to_numpy()))


def id_keys(table: "pyarrow.Table") -> tuple[np.ndarray, np.ndarray]:
    """(uint32[m], int64[m]: the hashes of the ids, and which documents have one)."""
    ids = table["id"].combine_chunks()
    _, offsets, content = ids.buffers()
    begin = np.frombuffer(offsets, np.int32, len(ids) + 1, 4 * ids.offset)
    having = np.flatnonzero(np.diff(begin))
    text = np.frombuffer(content, np.uint8)[begin[0] : begin[-1]] if len(having) else np.zeros(0, np.uint8)
    return top(hashes_of(text, begin[:-1][having] - begin[0], np.diff(begin)[having])), having


def hashes_of(text: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """uint64[n]: a hash of each string of UTF-8 bytes that begins there; none is empty and they fill the text."""
    if not len(begins):
        return np.zeros(0, np.uint64)
    places = np.arange(len(text)) - np.repeat(begins, lengths)
    powers = np.cumprod(np.full(int(lengths.max()), FACTOR, np.uint64))
    sums = np.add.reduceat((text.astype(np.uint64) + np.uint64(1)) * powers[places], begins)
    return mix(sums + lengths.astype(np.uint64))


def text_hash(text: str) -> int:
    """The same hash of one string."""
    content = np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)
    return int(hashes_of(content, np.zeros(1, np.int64), np.array([len(content)]))[0]) if len(content) else 0


def place_hashes(files: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """uint64[n]: a hash of each place. files: hashes of their names."""
    return mix(files ^ mix(offsets.astype(np.uint64) + np.uint64(1)))


def top(hashes: np.ndarray) -> np.ndarray:
    """uint32[n]: the upper half of each."""
    return (hashes >> np.uint64(64 - KEY_BITS)).astype(np.uint32)


def open_names(shards: Sequence[Shard], place: str, cache: Path, cache_bytes: int, verify: str) -> Arrays | None:
    """The index of these shards that is published in their set's folder or gs:// address, or None."""
    if not place:
        return None
    return find_arrays(f"{place}/{folder_name('names', made_from(shards))}", cache, cache_bytes, verify, None)


def candidates(names: Arrays, document: str, file: str, offset: int | None) -> list[int]:
    """Numbers of the documents that may have this id, or be from this place, in order; offset None: no place."""
    keys = [top(np.array([text_hash(document)], np.uint64))]
    if file and offset is not None:
        of_file = np.array([text_hash(on_one_line(file))], np.uint64)
        keys.append(top(place_hashes(of_file, np.array([offset]))))
    found: set[int] = set()
    for key in np.concatenate(keys):
        first, last = (int(names["keys"].searchsorted(key, side=side)) for side in ("left", "right"))
        found.update(names["numbers"][first:last].tolist())
    return sorted(found)
