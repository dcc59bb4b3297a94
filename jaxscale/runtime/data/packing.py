"""Base class of packed rows of T tokens, and packing of concatenated shuffled documents.

A packing is planned once and stored in the folder of the document index. A row is then located with a few reads of
memory-mapped arrays, independent of their size.
"""

import abc
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxscale.core.batch import Batch
from jaxscale.runtime.data.array_folder import Arrays, ArrayWriter, DiskBuckets
from jaxscale.runtime.data.documents import DocumentIndex, bisect_right
from jaxscale.runtime.data.rows import LocatedPieces, RowPieces, locate, missing_tokens, read_rows
from jaxscale.system.exits import Exit, Stop

SAMPLE_EVERY = 16  # number of documents per stored stream position


class DocumentRows(abc.ABC):
    """Random access to rows. Group g (a source, or all rows) has the rows [group_rows[g], group_rows[g + 1])."""

    def __init__(self, documents: DocumentIndex, arrays: Arrays, part: str):
        plan = arrays.header["parts"][part]
        self.documents, self.arrays, self.part = documents, arrays, part
        self.seq_len, self.seed = plan["seq_len"], plan["seed"]
        self.group_rows = np.array(plan["group_rows"], np.int64)
        self._groups = len(self.group_rows) - 1

    @abc.abstractmethod
    def pieces(self, rows: np.ndarray) -> RowPieces:
        """Returns the document pieces of rows int64[m]."""

    @abc.abstractmethod
    def _rows_of_member(self, group: int, rank: int, document: int) -> np.ndarray:
        """Returns int64, the sorted rows that contain a piece of the document. rank: its rank in the group."""

    def rows_of(self, document: int) -> np.ndarray:
        """Returns int64, the sorted rows that contain a piece of the document; empty for a document of another part."""
        self.arrays.check()
        for group in range(self._groups):
            if (rank := self.documents.rank(self.part, group, document)) is not None:
                return self._rows_of_member(group, rank, document)
        return np.zeros(0, np.int64)

    def __len__(self) -> int:
        return int(self.group_rows[-1])

    @property
    def num_documents(self) -> int:
        """Returns the number of documents in this part (training or validation)."""
        return sum(self.documents.metadata["members"][self.part])

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens in all rows, without padding."""
        return sum(self.documents.metadata["tokens"][self.part])

    def locate(self, rows: np.ndarray) -> LocatedPieces:
        """Returns the locations in the token files of rows int64[m], for `read`."""
        return locate(self.pieces(rows), functools.partial(self.documents.locate, part=self.part))

    def read(self, located: LocatedPieces, chosen: Sequence[int]) -> Batch:
        """Reads the rows `chosen` of `located` as a Batch of [len(chosen), T]. Raises Stop if a file has changed."""
        first, files = located.first, self.documents.files
        assert files is not None, "reading rows needs the token files"
        numbers = {file for row in chosen for file in located.files[first[row] : first[row + 1]]}
        for file in numbers | {located.after_files[row] for row in chosen} - {-1}:
            files.check(file)
        try:
            return read_rows(located, chosen, self.seq_len, files)
        except Stop:
            raise
        except Exception as error:  # a truncated file can cause any type of error
            if problem := missing_tokens(located, chosen, files):
                raise Stop(Exit.DATA_MISMATCH, problem) from error
            raise

    def __getitem__(self, row: int) -> Batch:
        """Returns a row as a Batch of [T]."""
        if not 0 <= int(row) < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        batch = self.read(self.locate(np.array([int(row)])), [0])
        return Batch(*(field if field is None else field[0] for field in batch))

    def row_sources(self, row: int) -> np.ndarray:
        """Returns int32[T], the source of each token, which is also the source of its target if the weight is 1."""
        pieces = self.pieces(np.array([int(row)]))
        sources_T = np.zeros(self.seq_len, np.int32)
        sources_T[: pieces.lengths.sum()] = np.repeat(self.documents.sources(pieces.documents), pieces.lengths)
        return sources_T


def order_generator(seed: int | str) -> np.random.Philox:
    """Returns the generator of document sort keys. NumPy guarantees that the raw output of Philox never changes."""
    key = int.from_bytes(hashlib.blake2b(f"document order {seed}".encode(), digest_size=16).digest(), "little")
    return np.random.Philox(key=key)


def order_key(seed: int | str, rank: int) -> int:
    """Returns the sort key of the document with this rank in its group: raw output number `rank` of the generator."""
    generator = order_generator(seed)
    generator.advance(rank // 4)
    return int(generator.random_raw(4)[rank % 4])


def order_seed(seed: int, group: int, num_groups: int) -> str:
    """Returns the seed for the order of a group's documents."""
    return str(seed) if num_groups == 1 else f"{seed} {group}"


def shuffled_members(
    folder: Any, documents: DocumentIndex, part: str, group: int, name: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (numbers, lengths) of a group's documents in the order of their sort keys, one bucket at a time."""
    dtype = [("key", "<u8"), ("number", "<i8"), ("length", "<i8")]
    buckets = DiskBuckets(folder, dtype, documents.size(part, group))
    generator, width = order_generator(name), -(-(1 << 64) // buckets.number)
    for numbers, lengths in documents.members(part, group):
        keys = generator.random_raw(len(numbers))
        buckets.add(keys // np.uint64(width) if buckets.number > 1 else None, key=keys, number=numbers, length=lengths)
    for records in buckets:
        order = np.argsort(records["key"], kind="stable")
        yield records["number"][order], records["length"][order]


def write_concat(out: ArrayWriter, documents: DocumentIndex, part: str, *, seq_len: int, seed: int) -> dict[str, Any]:
    """Plans rows of concatenated documents; returns the header entry. A plan takes 4.5 or 5.5 bytes per document."""
    num_groups = len(documents.metadata["members"][part])
    group_rows, samples = [0], [0]
    out.append(f"{part}.order", np.zeros(0, np.uint32))
    out.append(f"{part}.begins", np.zeros(0, np.int64))
    for group in range(num_groups):
        begin, position, count = group_rows[-1] * seq_len, 0, 0
        name = order_seed(seed, group, num_groups)
        for numbers, lengths in shuffled_members(out.folder, documents, part, group, name):
            out.append(f"{part}.order", (numbers & 0xFFFFFFFF).astype(np.uint32))
            if len(documents) > 1 << 32:
                out.append(f"{part}.order_high", (numbers >> 32).astype(np.uint8))
            begins = begin + np.cumsum(lengths) - lengths
            sampled = begins[-position % SAMPLE_EVERY :: SAMPLE_EVERY]
            out.append(f"{part}.begins", sampled)
            position, count, begin = position + len(numbers), count + len(sampled), begin + int(lengths.sum())
        group_rows.append(-(-begin // seq_len))
        samples.append(samples[-1] + count)
    return {"packing": "concat", "seq_len": seq_len, "seed": seed, "group_rows": group_rows, "samples": samples}


class PackedRows(DocumentRows):
    """Rows of `concat` packing. Row r contains tokens [r T, (r + 1) T) of the concatenated documents.

    Every token except the first token of each document is a target with weight 1 exactly once. Each group starts with a
    new row, and the last row of a group is padded.
    """

    def __init__(self, documents: DocumentIndex, arrays: Arrays, part: str):
        super().__init__(documents, arrays, part)
        sizes = [documents.size(part, group) for group in range(self._groups)]
        self._firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)  # first document position of each group
        self._samples = np.array(arrays.header["parts"][part]["samples"], np.int64)

    def _numbers(self, positions: np.ndarray) -> np.ndarray:
        """Returns the documents at the given positions of the shuffled order."""
        found = self.arrays[f"{self.part}.order"][positions].astype(np.int64)
        if f"{self.part}.order_high" in self.arrays:
            found += self.arrays[f"{self.part}.order_high"][positions].astype(np.int64) << 32
        return found

    def pieces(self, rows: np.ndarray) -> RowPieces:
        self.arrays.check()
        T, starts = self.seq_len, rows * self.seq_len
        group = self.group_rows.searchsorted(rows, side="right") - 1
        positions, documents, begins, lengths, row = self._around(starts, group)
        inside = (begins < starts[row] + T) & (begins + lengths > starts[row])
        positions, documents, row = positions[inside], documents[inside], row[inside]
        begin = begins[inside] - starts[row]
        end = begin + lengths[inside]
        bounds = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(rows)))])
        skipped = np.maximum(-begin, 0)
        lengths = np.minimum(end, T) - np.maximum(begin, 0)
        last = bounds[1:] - 1
        continues = end[last] > T
        next_positions = np.where(continues, positions[last], positions[last] + 1)
        has_next = next_positions < self._firsts[group + 1]
        return RowPieces(
            first=bounds,
            documents=documents,
            skipped=skipped,
            lengths=lengths,
            ended=end <= T,
            after_documents=np.where(has_next, self._numbers(np.where(has_next, next_positions, 0)), -1),
            after_skipped=np.where(continues, (skipped + lengths)[last], 0),
        )

    def _around(self, starts: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns (position, document, start in the stream, length, row) of all documents that may overlap each row."""
        sampled = self.arrays[f"{self.part}.begins"]
        low, high = self._samples[group], self._samples[group + 1]
        first = bisect_right(sampled, low, high, starts) - 1
        last = bisect_right(sampled, low, high, starts + self.seq_len - 1)
        sizes = self._firsts[group + 1] - self._firsts[group]
        begin, end = (first - low) * SAMPLE_EVERY, np.minimum((last - low) * SAMPLE_EVERY, sizes)
        bounds, positions = concat_ranges(self._firsts[group] + begin, self._firsts[group] + end)
        row = np.repeat(np.arange(len(starts)), np.diff(bounds))
        documents = self._numbers(positions)
        lengths = self.documents.lengths(documents, self.part)
        before = np.cumsum(lengths) - lengths
        return positions, documents, before - (before[bounds[:-1]] - sampled[first])[row], lengths, row

    def _rows_of_member(self, group: int, rank: int, document: int) -> np.ndarray:
        position = self._position(group, rank)
        numbers = np.arange(position - position % SAMPLE_EVERY, position + 1)
        lengths = self.documents.lengths(self._numbers(self._firsts[group] + numbers), self.part)
        sample = int(self._samples[group]) + position // SAMPLE_EVERY
        begin = int(self.arrays[f"{self.part}.begins"][sample]) + int(lengths[:-1].sum())
        return np.arange(begin // self.seq_len, -(-(begin + int(lengths[-1])) // self.seq_len))

    def _position(self, group: int, rank: int) -> int:
        """Returns the position of the document with this rank in its group's shuffled order, by binary search."""
        name = order_seed(self.seed, group, self._groups)
        key = (order_key(name, rank), rank)
        low, high = 0, self.documents.size(self.part, group)
        while low < high:
            middle = (low + high) // 2
            number = int(self._numbers(self._firsts[group] + np.array([middle]))[0])
            other = self.documents.rank(self.part, group, number)
            assert other is not None
            low, high = (middle + 1, high) if (order_key(name, other), other) < key else (low, middle)
        return low


def concat_ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (bounds, concatenation of the ranges [first, last)). Range i is at [bounds[i], bounds[i + 1])."""
    bounds = np.concatenate([[0], np.cumsum(last - first)])
    return bounds, np.arange(bounds[-1]) + np.repeat(first - bounds[:-1], last - first)
