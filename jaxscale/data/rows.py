"""Rows of T tokens: out of pieces of documents, where these lie and how they are read; or drawn at random."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.batch import Batch, stack_rows

SYNTHETIC_ROWS = 1 << 24  # an epoch; large enough that no run meets a row twice
OpenIds = Callable[[str, str], Any]  # (path, dtype) -> what gives the ids of the file in slices


class Pieces(NamedTuple):
    """What fills each of m rows: p pieces in all, those of row r from `first[r]` to `first[r + 1]`, side by side from
    the row's start on. What they leave is padding. As arrays.

    A piece is `lengths` tokens of a document from its token `skipped` on. `after` is where the token behind the row is
    found, the target of its last position: a document and its token, or -1.
    """

    first: np.ndarray  # int64[m + 1]
    documents: np.ndarray  # int64[p]
    skipped: np.ndarray  # int64[p]
    lengths: np.ndarray  # int64[p]
    ended: np.ndarray  # bool[p]: the document ends with the piece
    after_documents: np.ndarray  # int64[m]
    after_skipped: np.ndarray  # int64[m]


class Located(NamedTuple):
    """The same with offsets in files, as lists where a loop goes over them: Python reads these faster."""

    first: list[int]
    files: list[int]
    offsets: list[int]  # in the file
    begins: list[int]  # in the row
    lengths: list[int]
    ended: list[bool]
    after_files: list[int]  # -1: there is nothing behind the row
    after_offsets: list[int]
    depths: np.ndarray  # int64[m]: tokens of the first piece's document that lie before the row


class TokenFiles(dict):
    """{file number: its ids}, each opened when it is first asked for."""

    def __init__(self, paths: Sequence[str], dtypes: Sequence[str], open_ids: OpenIds):
        super().__init__()
        self.paths, self.dtypes, self.open_ids = paths, dtypes, open_ids

    def __missing__(self, number: int) -> Any:
        self[number] = self.open_ids(self.paths[number], self.dtypes[number])
        return self[number]


def locate(pieces: Pieces, where: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]) -> Located:
    """The pieces in their files. where(documents): (file, place of the first token in it) of each."""
    first, documents = pieces.first, pieces.documents
    ends = np.cumsum(pieces.lengths)
    rows_begin = np.concatenate([[0], ends])[first[:-1]]
    begins = ends - pieces.lengths - np.repeat(rows_begin, np.diff(first))
    behind = pieces.after_documents
    nothing = behind < 0
    files, starts = where(documents)
    after_files, after_starts = where(np.maximum(behind, 0))
    return Located(
        first.tolist(),
        files.tolist(),
        (starts + pieces.skipped).tolist(),
        begins.tolist(),
        pieces.lengths.tolist(),
        pieces.ended.tolist(),
        np.where(nothing, -1, after_files).tolist(),
        np.where(nothing, 0, after_starts + pieces.after_skipped).tolist(),
        pieces.skipped[first[:-1]],
    )


def read_rows(
    located: Located,
    chosen: Sequence[int],
    T: int,
    files: TokenFiles,
    ramp_T: np.ndarray,
    marks: TokenFiles | None = None,
) -> Batch:
    """The chosen rows as a Batch of [len(chosen), T]: each token is copied once, straight to its place.

    ramp_T: 0, 1, 2, ...: it is asked for so that it is made once. marks: of each file, 1 for every token that is
    learned: a weight is that of its target. None, or '' for a file: all are.
    """
    first, of_file, offsets, begins, lengths, ended, after_files, after_offsets, _ = located
    fields_FBT = np.empty((5, len(chosen), T), np.int32)  # one block, which malloc keeps for the next
    tokens_BT, targets_BT, positions_BT, segments_BT = fields_FBT[:4]
    weights_BT = fields_FBT[4].view(np.float32)
    weights_BT[:] = 1
    tokens, positions, segments, weights = (  # flat: a slice of one dimension costs half of one of two
        array.reshape(-1) for array in (tokens_BT, positions_BT, segments_BT, weights_BT)
    )
    last = []
    for place, row in enumerate(chosen):
        base = stop = place * T
        number = 0
        for piece in range(first[row], first[row + 1]):
            number += 1
            length, offset = lengths[piece], offsets[piece]
            start = base + begins[piece]
            stop = start + length
            tokens[start:stop] = files[of_file[piece]][offset : offset + length]
            positions[start:stop] = ramp_T[:length]
            segments[start:stop] = number
            if marks is not None and len(learned := marks[of_file[piece]]):
                learned = learned[offset + 1 : offset + 1 + length]
                weights[start : start + len(learned)] = learned
            if ended[piece]:
                weights[stop - 1] = 0  # what follows belongs to another document
        if stop < base + T:
            for array in (tokens, positions, segments, weights):
                array[stop : base + T] = 0
        file = after_files[row]
        last.append(0 if file < 0 else files[file][after_offsets[row]])
    targets_BT[:, :-1] = tokens_BT[:, 1:]
    targets_BT[:, -1] = last
    return Batch(tokens_BT, targets_BT, positions_BT, segments_BT, weights_BT)


def broken_piece(located: Located, chosen: Sequence[int], files: TokenFiles) -> str:
    """The line for a file that was there when the run began and cannot give these rows; '' if all of them can."""
    for row in chosen:
        for piece in range(located.first[row], located.first[row + 1]):
            path, begin = files.paths[located.files[piece]].partition("#")[0], located.offsets[piece]
            where = f"tokens {begin:,} to {begin + located.lengths[piece]:,}"
            try:
                size = len(files[located.files[piece]])
            except OSError as error:
                return f"{path}: {where} cannot be read: {error.strerror or error}; bring the file back and start again"
            if size < begin + located.lengths[piece]:
                return (
                    f"{path}: {where} are not there, it ends after {size:,}: it was cut short after the run began; "
                    "bring it back and start again"
                )
    return ""


class SyntheticRows:
    """Rows of tokens drawn uniformly from [0, vocab_size), each from its own (seed, row) key. Picklable.

    For throughput: it needs no file and no tokenizer.
    """

    def __init__(self, *, seq_len: int, vocab_size: int, seed: int, num_rows: int = SYNTHETIC_ROWS):
        self.seq_len, self.vocab_size, self.seed, self.num_rows = seq_len, vocab_size, seed, num_rows
        digest = hashlib.blake2b(f"synthetic tokens {seed}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little")

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Batch:
        """Row `row` as a Batch of [T]: one document, every target counts."""
        T, row = self.seq_len, int(row) % self.num_rows
        raw = np.random.Philox(key=self._key + (row << 64)).random_raw(T // 2 + 1).view(np.uint32)[: T + 1]
        drawn = ((raw.astype(np.uint64) * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int32)
        ones_T = np.ones(T, np.int32)
        return Batch(drawn[:-1], drawn[1:], np.arange(T, dtype=np.int32), ones_T, np.ones(T, np.float32))

    def locate(self, rows: np.ndarray) -> np.ndarray:
        """The rows themselves: they are nowhere but in their numbers."""
        return rows

    def read(self, located: np.ndarray, chosen: Sequence[int]) -> Batch:
        """Some of the located rows, by their places among them: a Batch of [len(chosen), T]."""
        return stack_rows([self[located[place]] for place in chosen])

    def row_sources(self, row: int) -> np.ndarray:
        """int32[T]: there is one source, 0."""
        return np.zeros(self.seq_len, np.int32)
