"""Packed rows: windows of T tokens over a stream of documents in a shuffled order, each row found by arithmetic."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from jaxscale.data.batch import Batch
from jaxscale.data.order import document_order


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentTable:
    """Where each of n documents lies: `lengths` ids from `starts` on, in file number `file_ids`."""

    paths: tuple[str, ...]
    dtypes: tuple[str, ...]  # of the ids in each file
    starts: np.ndarray  # int64[n]
    lengths: np.ndarray  # int64[n]
    file_ids: np.ndarray  # uint32[n]
    source_ids: np.ndarray  # uint16[n]

    def __len__(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def select(self, chosen: np.ndarray) -> "DocumentTable":
        """The documents where `chosen` (bool[n]) is true."""
        arrays = (self.starts, self.lengths, self.file_ids, self.source_ids)
        return DocumentTable(self.paths, self.dtypes, *(array[chosen] for array in arrays))

    def clip(self, skipped: np.ndarray, lengths: np.ndarray) -> "DocumentTable":
        """The same documents without their first `skipped` and after `lengths` tokens; empty ones are left out."""
        clipped = dataclasses.replace(self, starts=self.starts + skipped, lengths=lengths)
        return clipped.select(lengths > 0)


def join_tables(tables: Sequence[DocumentTable]) -> DocumentTable:
    """All documents of several tables, in order."""
    first_file = np.cumsum([0, *(len(table.paths) for table in tables)])
    return DocumentTable(
        paths=sum((table.paths for table in tables), ()),
        dtypes=sum((table.dtypes for table in tables), ()),
        starts=np.concatenate([table.starts for table in tables]),
        lengths=np.concatenate([table.lengths for table in tables]),
        file_ids=np.concatenate(
            [table.file_ids + np.uint32(first) for table, first in zip(tables, first_file)], dtype=np.uint32
        ),
        source_ids=np.concatenate([table.source_ids for table in tables]),
    )


class PackedRows:
    """Row r holds tokens [r T, (r + 1) T) of the stream; its targets are the next tokens of the stream.

    Every token but the first of its document is a target with weight 1 exactly once. The last row is padded. A
    grain.sources.RandomAccessDataSource; a pickle of it carries the table, not the tokens.
    """

    def __init__(self, table: DocumentTable, *, seq_len: int, seed: int):
        order = document_order(len(table), seed)
        self.table, self.seq_len, self.seed = table, seq_len, seed
        self._starts, self._file_ids = table.starts[order], table.file_ids[order]
        self._source_ids = table.source_ids[order]
        self._stream = np.zeros(len(table) + 1, np.int64)  # where each document begins in the stream, and the end
        np.cumsum(table.lengths[order], out=self._stream[1:])
        self.num_tokens = int(self._stream[-1])
        self._num_rows = -(-self.num_tokens // seq_len)
        self._ramp_T = np.arange(seq_len, dtype=np.int32)

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for array in (self._starts, self._file_ids, self._stream):
            digest.update(np.ascontiguousarray(array).tobytes())
        return f"PackedRows(seq_len={self.seq_len}, seed={self.seed}, {digest.hexdigest()})"

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "_files"}

    @functools.cached_property
    def _files(self) -> list[np.ndarray]:
        """Ids of each file, memory-mapped at the first read; plain arrays, as slicing an np.memmap costs far more."""
        pairs = zip(self.table.paths, self.table.dtypes)
        return [np.asarray(np.memmap(path, dtype=dtype, mode="r")) for path, dtype in pairs]

    def _window(self, row: int) -> tuple[int, int, list[int]]:
        """(first document, number of documents, where they begin and the last ends, seen from the row's start)."""
        start = row * self.seq_len
        stop = min(start + self.seq_len + 1, self.num_tokens)
        first = int(self._stream.searchsorted(start, side="right")) - 1
        last = int(self._stream.searchsorted(stop, side="left"))
        return first, last - first, (self._stream[first : last + 1] - start).tolist()

    def __getitem__(self, row: int) -> Batch:
        """Row `row` as a Batch of [T]."""
        T, row = self.seq_len, int(row)
        if not 0 <= row < self._num_rows:
            raise IndexError(f"row {row} of {self._num_rows}")
        first, count, bounds = self._window(row)
        files, starts = self._file_ids[first : first + count].tolist(), self._starts[first : first + count].tolist()
        ids = np.zeros(T + 1, np.int32)
        positions_T, segments_T = np.zeros(T, np.int32), np.zeros(T, np.int32)
        weights_T = np.ones(T, np.float32)
        for i in range(count):
            begin, end = bounds[i], bounds[i + 1]
            skipped = -begin if begin < 0 else 0  # the part that lies in earlier rows
            begin += skipped
            offset = starts[i] + skipped
            length = min(end, T + 1) - begin
            ids[begin : begin + length] = self._files[files[i]][offset : offset + length]
            positions_T[begin:end] = self._ramp_T[: min(end, T) - begin] if begin < T else 0
            segments_T[begin:end] = i + 1
            if end <= T:
                weights_T[end - 1] = 0  # what follows belongs to another document
        weights_T[bounds[-1] :] = 0  # past the end of the stream; an empty slice in every row but the last
        return Batch(ids[:-1], ids[1:], positions_T, segments_T, weights_T)

    def row_sources(self, row: int) -> np.ndarray:
        """int32[T]: the source of each token's document, which is its target's document wherever the weight is 1."""
        first, count, bounds = self._window(int(row))
        edges = np.clip(bounds, 0, self.seq_len)
        sources_T = np.zeros(self.seq_len, np.int32)
        sources_T[: edges[-1]] = np.repeat(self._source_ids[first : first + count], np.diff(edges))
        return sources_T
