"""Locates and reads rows of T tokens from pieces of documents, or generates rows of random tokens."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.core.batch import Batch
from jaxscale.runtime.data.documents import TokenSet
from jaxscale.runtime.data.stacking import stack_rows

SYNTHETIC_ROWS = 1 << 24  # rows per epoch, enough to avoid repetitions in a run


class RowPieces(NamedTuple):
    """The p document pieces of m rows. Row r consists of the pieces [first[r], first[r + 1]) and padding."""

    first: np.ndarray  # int64[m + 1]
    documents: np.ndarray  # int64[p]
    skipped: np.ndarray  # int64[p]: number of tokens of the document before the piece
    lengths: np.ndarray  # int64[p]: number of tokens of the piece
    ended: np.ndarray  # bool[p]: True if the document ends with the piece
    after_documents: np.ndarray  # int64[m]: document of the last position's target; -1: no target
    after_skipped: np.ndarray  # int64[m]: token in that document


class LocatedPieces(NamedTuple):
    """Pieces with their file offsets. Fields are lists, which are faster than arrays in Python loops."""

    first: list[int]
    files: list[int]
    offsets: list[int]  # offset of the piece in the file
    begins: list[int]  # position of the piece in the row
    lengths: list[int]
    ended: list[bool]
    after_files: list[int]  # file of the last position's target; -1: no target
    after_offsets: list[int]
    depths: np.ndarray  # int64[m]: number of tokens of the row's first document before the row


def locate(pieces: RowPieces, where: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]) -> LocatedPieces:
    """Returns the locations of pieces in files. where: function documents -> (files, offsets of their first tokens)."""
    first, documents = pieces.first, pieces.documents
    ends = np.cumsum(pieces.lengths)
    rows_begin = np.concatenate([[0], ends])[first[:-1]]
    begins = ends - pieces.lengths - np.repeat(rows_begin, np.diff(first))
    next_documents = pieces.after_documents
    no_next = next_documents < 0
    files, starts = where(documents)
    after_files, after_starts = where(np.maximum(next_documents, 0))
    return LocatedPieces(
        first.tolist(),
        files.tolist(),
        (starts + pieces.skipped).tolist(),
        begins.tolist(),
        pieces.lengths.tolist(),
        pieces.ended.tolist(),
        np.where(no_next, -1, after_files).tolist(),
        np.where(no_next, 0, after_starts + pieces.after_skipped).tolist(),
        pieces.skipped[first[:-1]],
    )


def read_rows(located: LocatedPieces, chosen: Sequence[int], T: int, files: TokenSet) -> Batch:
    """Reads the rows `chosen` of `located` as a Batch of [len(chosen), T]."""
    fields_FBT = np.empty((5, len(chosen), T), np.int32)  # one allocation, which malloc reuses for the next batch
    tokens_BT, targets_BT, positions_BT, segments_BT = fields_FBT[:4]
    weights_BT = fields_FBT[4].view(np.float32)
    weights_BT[:] = 1
    ramp_T = np.arange(T, dtype=np.int32)
    for row, *fields in zip(chosen, tokens_BT, positions_BT, segments_BT, weights_BT):
        fill_row(located, row, fields, files, ramp_T)
    after = [(located.after_files[row], located.after_offsets[row]) for row in chosen]
    targets_BT[:, :-1] = tokens_BT[:, 1:]
    targets_BT[:, -1] = [0 if file < 0 else files.ids[file][offset] for file, offset in after]
    return Batch(tokens_BT, targets_BT, positions_BT, segments_BT, weights_BT)


def fill_row(
    located: LocatedPieces, row: int, fields: Sequence[np.ndarray], files: TokenSet, ramp_T: np.ndarray
) -> None:
    """Reads a row into `fields`: tokens, positions, segment ids and weights of [T]. ramp_T: arange(T)."""
    tokens_T, positions_T, segments_T, weights_T = fields
    first, piece_files, offsets, begins, lengths, ended, *_ = located
    ids, stop = files.ids, 0
    for number, piece in enumerate(range(first[row], first[row + 1]), 1):
        length, offset, start = lengths[piece], offsets[piece], begins[piece]
        stop = start + length
        tokens_T[start:stop] = ids[piece_files[piece]][offset : offset + length]
        positions_T[start:stop] = ramp_T[:length]
        segments_T[start:stop] = number
        if files.has_masks and len(mask := files.masks[piece_files[piece]]):
            mask = mask[offset + 1 : offset + 1 + length]
            weights_T[start : start + len(mask)] = mask
        if ended[piece]:
            weights_T[stop - 1] = 0  # the next token belongs to a different document
    if stop < len(tokens_T):
        for field_T in fields:
            field_T[stop:] = 0


def missing_tokens(located: LocatedPieces, chosen: Sequence[int], files: TokenSet) -> str:
    """Returns an error message if a file was truncated or removed after the run started, else ''."""
    for row in chosen:
        for piece in range(located.first[row], located.first[row + 1]):
            path, begin = files.paths[located.files[piece]].partition("#")[0], located.offsets[piece]
            where = f"tokens {begin:,} to {begin + located.lengths[piece]:,}"
            try:
                size = len(files.ids[located.files[piece]])
            except OSError as error:
                return f"{path}: {where} cannot be read: {error.strerror or error}; restore the file and restart"
            if size < begin + located.lengths[piece]:
                return (
                    f"{path}: {where} are missing: the file was truncated to {size:,} tokens after the run started; "
                    "restore the file and restart"
                )
    return ""


class SyntheticRows:
    """Rows of uniform random tokens below vocab_size, as a function of (seed, row), for throughput measurements."""

    def __init__(self, *, seq_len: int, vocab_size: int, seed: int, num_rows: int = SYNTHETIC_ROWS):
        self.seq_len, self.vocab_size, self.seed, self.num_rows = seq_len, vocab_size, seed, num_rows
        digest = hashlib.blake2b(f"synthetic tokens {seed}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little")

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Batch:
        """Returns a row as a Batch of [T], with a single document and weights of 1."""
        T, row = self.seq_len, int(row) % self.num_rows
        raw = np.random.Philox(key=self._key + (row << 64)).random_raw(T // 2 + 1).view(np.uint32)[: T + 1]
        drawn = ((raw.astype(np.uint64) * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int32)
        ones_T = np.ones(T, np.int32)
        return Batch(drawn[:-1], drawn[1:], np.arange(T, dtype=np.int32), ones_T, np.ones(T, np.float32))

    def locate(self, rows: np.ndarray) -> np.ndarray:
        """Returns the row numbers unchanged, because they are the locations of synthetic rows."""
        return rows

    def read(self, located: np.ndarray, chosen: Sequence[int]) -> Batch:
        """Returns the rows `chosen` of `located` as a Batch of [len(chosen), T]."""
        return stack_rows([self[located[place]] for place in chosen])

    def row_sources(self, row: int) -> np.ndarray:
        """Returns zeros, int32[T], because there is a single source."""
        return np.zeros(self.seq_len, np.int32)
