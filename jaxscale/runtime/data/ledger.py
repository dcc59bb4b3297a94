"""Maps training steps to documents, and documents to training steps. Both mappings are computed without a log.

A position in the stream of rows maps to a row, to pieces of documents, to a shard and document number, and to the
lineage of the document (source, file, offset, id). Each mapping has an inverse. Positions in a row refer to the packed
row, before the objective is applied.

A prepared set may include an index of names for `jaxscale trace --doc`. The index contains sorted 4-byte hashes of ids
and locations FILE:OFFSET, each with a document number (4 bytes; 8 beyond 2**32 documents). Hashes can collide, so the
lineage of each candidate is compared with the name.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.runtime.data.array_folder import Arrays, ArrayWriter, DiskBuckets, find_arrays
from jaxscale.runtime.data.cache import cache_folder, ensure_folder, folder_name
from jaxscale.runtime.data.order import Batches, batch_index, step_of
from jaxscale.runtime.data.permutation import mix64
from jaxscale.runtime.data.pipeline import Corpus
from jaxscale.runtime.data.shard_writer import escape_non_utf8
from jaxscale.runtime.data.shards import Shard, open_lineage
from jaxscale.system.exits import BadInput
from jaxscale.system.redact import on_one_line

if TYPE_CHECKING:
    import pyarrow

OFFSET_DIGITS = 18  # offsets with more digits may exceed Arrow's int64
FACTOR = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: powers of this number spread a byte over 64 bits
LAYOUT = 1  # version of the folder; increase it when the arrays change
KEY_BITS = 32


@dataclasses.dataclass(frozen=True)
class DocumentPiece:
    """A piece of a document in a packed row of a batch."""

    row: int  # index of the row in the batch
    begin: int  # position of the piece in the packed row
    tokens: int
    first_token: int  # offset of the piece in its document
    source: str
    shard: str
    number: int  # number of the document in its shard
    file: str  # empty if unknown
    offset: int  # offset of the document in the file; -1 if unknown
    id: str

    @property
    def name(self) -> str:
        """Returns the document's name in the form that --doc accepts."""
        if self.id:
            return self.id
        return f"{self.file}:{self.offset}" if self.offset >= 0 else f"{self.shard}:{self.number}"


class Ledger:
    """Maps steps to documents, and documents to steps. The constructor reads no data."""

    def __init__(self, corpus: Corpus, batches: Batches, skipped: Iterable[Sequence[int]] = ()):
        """batches: the run's batches, with its mixture. skipped: ranges of skipped batches, from the checkpoint."""
        if not corpus.shards:
            raise BadInput(f"data.name={corpus.cfg.name!r} generates random tokens, so there are no documents to trace")
        self.corpus, self.batches, self.skipped = corpus, batches, tuple(skipped)
        self._rows = corpus.train_rows

    def batch_of(self, step: int) -> int:
        """Returns the index of the batch that a step trains on."""
        return batch_index(step, self.skipped)

    def batch(self, n: int) -> list[DocumentPiece]:
        """Returns the document pieces of batch n, ordered by row and position."""
        pieces = self._rows.pieces(self.batches.row_numbers(n))
        rows = np.repeat(np.arange(self.batches.sizes.size(n)), np.diff(pieces.first))
        begins = np.cumsum(pieces.lengths) - pieces.lengths
        begins -= begins[pieces.first[:-1]][rows]
        for number in np.unique(pieces.documents).tolist():  # sorted: reads each row group once
            self.origin(number)
        columns = (rows, begins, pieces.lengths, pieces.skipped, pieces.documents)
        return [self.entry(*(int(value) for value in values)) for values in zip(*columns)]

    def names(self, n: int) -> list[str]:
        """Returns the names of the documents in batch n, by decreasing number of tokens. Does not read the lineage."""
        pieces = self._rows.pieces(self.batches.row_numbers(n))
        tokens = collections.Counter()
        for number, length in zip(pieces.documents.tolist(), pieces.lengths.tolist()):
            tokens[number] += length
        return [self.name(number) for number, _ in tokens.most_common()]

    def name(self, number: int) -> str:
        """Returns 'SOURCE FILE, document 3' (zero-based), or 'SOURCE SHARD:NUMBER' if the file is unknown."""
        at, place = self.place(number)
        shard, source = self.corpus.shards[at], self.source(number)
        file, first = source_file(shard, place)
        return on_one_line(f"{source} {file}, document {place - first}" if file else f"{source} {shard.place}:{place}")

    def place(self, number: int) -> tuple[int, int]:
        """Returns (index of the shard, number in the shard) of a document."""
        firsts = self._rows.documents.files.first_documents
        at = int(firsts.searchsorted(number, side="right")) - 1
        return at, number - int(firsts[at])

    def source(self, number: int) -> str:
        """Returns the name of a document's source."""
        return self.corpus.source_names[int(self._rows.documents.sources(np.array([number]))[0])]

    def steps_of(self, document: str, stop: int) -> list[tuple[int, DocumentPiece]]:
        """Returns (step, piece) for each piece of the documents with this name in the steps before `stop`, in order."""
        stop_place = self.batches.sizes.begin(batch_index(stop - 1, self.skipped) + 1)
        found = self.find(document)
        firsts = self._rows.documents.files.first_documents
        rows = {number: self._rows.rows_of(number) for number in sorted({int(firsts[at]) + n for at, n in found})}
        if not any(map(len, rows.values())):
            at, number = found[0]
            which = f"each of the {len(found)} documents of this name, such as " if len(found) > 1 else ""
            raise BadInput(
                f"--doc={document}: {which}document {number} of {self.corpus.shards[at].place} is empty or in the "
                "validation set, so no step trains on it; use a document that --step lists"
            )
        occurrences = []
        for number, document_rows in rows.items():
            for row in document_rows.tolist():
                pieces = self._rows.pieces(np.array([row]))
                ends = np.cumsum(pieces.lengths)
                (at,) = np.flatnonzero(pieces.documents == number)
                length, before = int(pieces.lengths[at]), int(pieces.skipped[at])
                for place in self.batches.order.places_of(row, max(0, stop_place)).tolist():
                    n, in_batch = self.batches.sizes.find(place)
                    step = step_of(n, self.skipped)
                    if step is not None and step < stop:
                        occurrences.append((step, self.entry(in_batch, int(ends[at]) - length, length, before, number)))
        return sorted(occurrences, key=lambda occurrence: (occurrence[0], occurrence[1].row))

    def entry(self, row: int, begin: int, tokens: int, skipped: int, number: int) -> DocumentPiece:
        """Returns a document piece. skipped: number of tokens of the document before it. number: document number."""
        at, place = self.place(number)
        source, shard = self.source(number), self.corpus.shards[at].place
        return DocumentPiece(row, begin, tokens, skipped, source, shard, place, *self.origin(number))

    @functools.cache  # noqa: B019 - a ledger exists until its process ends
    def origin(self, number: int) -> tuple[str, int, str]:
        """Returns (file, offset, id) of a document, with '' or -1 for unknown values."""
        at, place = self.place(number)
        if "docs" not in self.corpus.shards[at].header["sha256"]:
            return source_file(self.corpus.shards[at], place)[0], -1, ""
        firsts = self._groups(at)
        group = int(firsts.searchsorted(place, side="right")) - 1
        table = self._lineage(at, group)
        return tuple(table[name][place - int(firsts[group])].as_py() for name in ("file", "offset", "id"))

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _groups(self, at: int) -> np.ndarray:
        """Returns the first document of each row group in a shard's lineage file, then the number of documents."""
        with open_lineage(self.corpus.shards[at].lineage_path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        return np.cumsum([0, *sizes])

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def _lineage(self, at: int, group: int) -> Any:
        """Returns a row group of a shard's lineage file as a pyarrow.Table."""
        with open_lineage(self.corpus.shards[at].lineage_path) as file:
            return file.read_row_group(group, columns=["file", "offset", "id"], use_threads=False)

    @functools.cached_property
    def _names(self) -> Any:
        """Returns the document name index of a prepared set, or None if the set has no such index."""
        cfg, published = self.corpus.cfg, self.corpus.published
        location = f"{published}/{folder_name('names', names_cache_key(self.corpus.shards))}"
        return find_arrays(location, cache_folder(cfg), cfg.cache_bytes, cfg.verify, None) if published else None

    def find(self, document: str) -> list[tuple[int, int]]:
        """Returns (shard index, number in the shard) of each document with this name. Raises BadInput if none match."""
        document = escape_non_utf8(document)
        file, _, offset = document.rpartition(":")
        place = int(offset) if offset.isdecimal() and len(offset) <= OFFSET_DIGITS else None
        found = [
            (at, place)
            for at, shard in enumerate(self.corpus.shards)
            if place is not None and place < shard.header["num_documents"]
            if file in (escape_non_utf8(shard.place), on_one_line(shard.place))
        ]
        if self._names is not None:
            for number in candidate_documents(self._names, document, file, place):
                its_file, its_offset, its_id = self.origin(number)
                if its_id == document or (its_offset == place and file in (its_file, on_one_line(its_file)) and file):
                    found.append(self.place(number))
        else:
            for at, shard in enumerate(self.corpus.shards):
                if "docs" in shard.header["sha256"]:
                    found += [(at, number) for number in scan_lineage(shard, document, file, place)]
        if not found and document:
            raise BadInput(
                f"--doc={document}: no document of the corpus has this id or location; use an id, FILE:OFFSET or "
                "SHARD.bin:NUMBER that --step lists"
            )
        return sorted(set(found))

    def text(self, entry: DocumentPiece, tokens_BT: np.ndarray, characters: int) -> str | None:
        """Returns the first characters of a document piece, or None if the corpus has no tokenizer."""
        if self.corpus.tokenizer is None:
            return None
        ids = tokens_BT[entry.row, entry.begin : entry.begin + min(entry.tokens, 8 * characters + 8)]
        return self.corpus.tokenizer.decode(ids)[:characters]


def scan_lineage(shard: Shard, document: str, file: str, offset: int | None) -> Iterator[int]:
    """Yields the numbers of the documents in a shard with this id or location. offset: None to match only the id."""
    import pyarrow
    import pyarrow.compute

    compute: Any = pyarrow.compute  # Any, because its functions are created at import
    first = 0
    with open_lineage(shard.lineage_path) as lineage:
        for group in range(lineage.num_row_groups):
            table = lineage.read_row_group(group, columns=["file", "offset", "id"], use_threads=False)
            matches = compute.equal(table["id"], document)
            if file and offset is not None:
                names = table["file"].cast(pyarrow.string())
                same = [name for name in names.unique().to_pylist() if on_one_line(name) == file]  # as listed by --step
                at_location = compute.and_(
                    compute.is_in(names, pyarrow.array([file, *same], pyarrow.string())),
                    compute.equal(table["offset"], offset),
                )
                matches = compute.or_(matches, at_location)
            yield from (first + np.flatnonzero(matches.to_numpy())).tolist()
            first += table.num_rows


def source_file(shard: Shard, number: int) -> tuple[str, int]:
    """Returns (file of a document, first document number in the file) from the shard header, or ('', 0) if unknown."""
    documents = [file["documents"] for file in shard.header["files"]]
    ends = np.cumsum(documents)
    at = int(np.searchsorted(ends, number, side="right"))
    return (shard.header["files"][at]["name"], int(ends[at]) - documents[at]) if at < len(ends) else ("", 0)


def names_cache_key(shards: Sequence[Shard]) -> dict[str, Any]:
    """Returns the cache key of the document name index of these shards."""
    return {"names": [shard.header["sha256"].get("docs", "") for shard in shards], "layout": LAYOUT}


def publish_names(folder: Path, shards: Sequence[Shard]) -> Path:
    """Creates the document name index in the folder of a prepared set if it is missing; returns its path."""
    make = functools.partial(write_names, shards=shards)
    return ensure_folder(folder, "names", names_cache_key(shards), make, is_cache=False)


def write_names(folder: Path, shards: Sequence[Shard]) -> None:
    """Writes the document name index of all shards with a lineage."""
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
    """Returns uint32[n], the hash of each document's location."""
    files = table["file"].combine_chunks()
    files = files if hasattr(files, "dictionary") else files.dictionary_encode()
    hashes = np.array([string_hash(on_one_line(name)) for name in files.dictionary.to_pylist()], np.uint64)
    return high_bits(location_hashes(hashes[files.indices.to_numpy()], table["offset"].to_numpy()))


def id_keys(table: "pyarrow.Table") -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint32[m] hashes of the nonempty ids, int64[m] indices of their documents)."""
    ids = table["id"].combine_chunks()
    _, offsets, content = ids.buffers()
    begin = np.frombuffer(offsets, np.int32, len(ids) + 1, 4 * ids.offset)
    with_id = np.flatnonzero(np.diff(begin))
    text = np.frombuffer(content, np.uint8)[begin[0] : begin[-1]] if len(with_id) else np.zeros(0, np.uint8)
    return high_bits(string_hashes(text, begin[:-1][with_id] - begin[0], np.diff(begin)[with_id])), with_id


def string_hashes(text: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns uint64[n], the hash of each UTF-8 string. `text` must be the concatenation of the nonempty strings."""
    if not len(begins):
        return np.zeros(0, np.uint64)
    positions = np.arange(len(text)) - np.repeat(begins, lengths)
    powers = np.cumprod(np.full(int(lengths.max()), FACTOR, np.uint64))
    sums = np.add.reduceat((text.astype(np.uint64) + np.uint64(1)) * powers[positions], begins)
    return mix64(sums + lengths.astype(np.uint64))


def string_hash(text: str) -> int:
    """Returns the same hash as string_hashes() for a single string, or 0 for an empty string."""
    content = np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)
    return int(string_hashes(content, np.zeros(1, np.int64), np.array([len(content)]))[0]) if len(content) else 0


def location_hashes(files: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns uint64[n], the hash of each location. files: hashes of the file names."""
    return mix64(files ^ mix64(offsets.astype(np.uint64) + np.uint64(1)))


def high_bits(hashes: np.ndarray) -> np.ndarray:
    """Returns uint32[n], the upper KEY_BITS bits of each hash."""
    return (hashes >> np.uint64(64 - KEY_BITS)).astype(np.uint32)


def candidate_documents(names: Arrays, document: str, file: str, offset: int | None) -> list[int]:
    """Returns sorted numbers of documents with the hash of this id or location. offset: None to match only the id."""
    keys = [high_bits(np.array([string_hash(document)], np.uint64))]
    if file and offset is not None:
        file_hash = np.array([string_hash(on_one_line(file))], np.uint64)
        keys.append(high_bits(location_hashes(file_hash, np.array([offset]))))
    found: set[int] = set()
    for key in np.concatenate(keys):
        first, last = (int(names["keys"].searchsorted(key, side=side)) for side in ("left", "right"))
        found.update(names["numbers"][first:last].tolist())
    return sorted(found)
