"""Documents as rows of T tokens: what any packing offers, and the windows over a stream of shuffled documents."""

import abc
import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.data.batch import Batch
from jaxscale.data.remote import map_ids
from jaxscale.data.rows import Located, Pieces, TokenFiles, broken_piece, locate, read_rows
from jaxscale.data.verified import Expected, Unchanged
from jaxscale.system.exits import Exit, Stop

MADE_ANEW = ("_files", "_marks", "_ramp_T", "_plan", "_unchanged")  # what a pickle of rows leaves out


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentTable:
    """Where each of n documents lies: `lengths` ids from `starts` on, in file number `file_ids`."""

    paths: tuple[str, ...]
    dtypes: tuple[str, ...]  # of the ids in each file
    starts: np.ndarray  # int64[n]
    lengths: np.ndarray  # int64[n]
    file_ids: np.ndarray  # uint32[n]
    source_ids: np.ndarray  # uint16[n]
    trained: tuple[str, ...] = ()  # of each file, that of its marks, see shards.py; '' or (): every token is learned
    expected: Mapping[str, Expected] = dataclasses.field(default_factory=dict)  # what these files must stay

    def __len__(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def select(self, chosen: np.ndarray) -> "DocumentTable":
        """The documents where `chosen` (bool[n]) is true."""
        names = ("starts", "lengths", "file_ids", "source_ids")
        return dataclasses.replace(self, **{name: getattr(self, name)[chosen] for name in names})

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
        trained=sum((table.trained or ("",) * len(table.paths) for table in tables), ()),
        expected={path: known for table in tables for path, known in table.expected.items()},
    )


class DocumentRows(abc.ABC):
    """Rows by number, read in any order; a pickle carries the table, not the tokens. What all packings have in common.

    The rows of group g are numbers [group_rows[g], group_rows[g + 1]): one group of all documents, or one per source.
    """

    table: DocumentTable
    seq_len: int
    group_rows: np.ndarray  # int64[groups + 1]

    @abc.abstractmethod
    def pieces(self, rows: np.ndarray) -> Pieces:
        """What the rows int64[m] are made of."""

    @abc.abstractmethod
    def rows_of(self, document: int) -> np.ndarray:
        """int64: the rows that hold a piece of the table's document, in order. Looks through all documents."""

    def __len__(self) -> int:
        return int(self.group_rows[-1])

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key not in MADE_ANEW}

    @functools.cached_property
    def _unchanged(self) -> Unchanged:
        return Unchanged(self.table.expected)

    def _map(self, path: str, dtype: str) -> Any:
        """The ids or marks in a file that is still the one that was verified."""
        self._unchanged.check_unopened([path])
        return map_ids(path, dtype)

    @functools.cached_property
    def _files(self) -> TokenFiles:
        return TokenFiles(self.table.paths, self.table.dtypes, self._map)

    @functools.cached_property
    def _marks(self) -> TokenFiles | None:
        if not any(self.table.trained):
            return None
        types = ["|u1"] * len(self.table.paths)
        return TokenFiles(self.table.trained, types, lambda *file: file[0] and self._map(*file))

    @functools.cached_property
    def _ramp_T(self) -> np.ndarray:
        return np.arange(self.seq_len, dtype=np.int32)

    def locate(self, rows: np.ndarray) -> Located:
        """Where the rows int64[m] lie in the files, for `read`."""
        return locate(self.pieces(rows), self.table.starts, self.table.file_ids)

    def read(self, located: Located, chosen: Sequence[int]) -> Batch:
        """Some of the located rows, by their places among them: a Batch of [len(chosen), T].

        Raises Stop(DATA_MISMATCH) if a file of theirs is no longer what it was when the run began.
        """
        paths = self._paths(located, chosen)
        self._unchanged.check(paths)
        try:
            return read_rows(located, chosen, self.seq_len, self._files, self._ramp_T, self._marks)
        except Stop:
            raise
        except Exception as error:  # whatever it is: of a file that was cut short, that is the cause
            if problem := broken_piece(located, chosen, self._files):
                raise Stop(Exit.DATA_MISMATCH, problem) from error
            raise

    def _paths(self, located: Located, chosen: Sequence[int]) -> list[str]:
        """The files that the rows are read from."""
        first, files, table = located.first, located.files, self.table
        numbers = {file for row in chosen for file in files[first[row] : first[row + 1]]}
        numbers |= {located.after_files[row] for row in chosen} - {-1}
        return [path for number in numbers for path in (table.paths[number], *table.trained[number : number + 1])]

    def __getitem__(self, row: int) -> Batch:
        """Row `row` as a Batch of [T]."""
        if not 0 <= int(row) < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        batch = self.read(self.locate(np.array([int(row)])), [0])
        return Batch(*(field if field is None else field[0] for field in batch))

    def row_sources(self, row: int) -> np.ndarray:
        """int32[T]: the source of each token's document, which is its target's document wherever the weight is 1."""
        pieces = self.pieces(np.array([int(row)]))
        sources_T = np.zeros(self.seq_len, np.int32)
        sources_T[: pieces.lengths.sum()] = np.repeat(self.table.source_ids[pieces.documents], pieces.lengths)
        return sources_T


def group_members(table: DocumentTable, num_groups: int) -> list[np.ndarray]:
    """The documents of each group, by number: all in one, or those of each source. Empty documents are in none."""
    real = table.lengths > 0
    if num_groups == 1:
        return [np.flatnonzero(real)]
    return [np.flatnonzero(real & (table.source_ids == group)) for group in range(num_groups)]


def document_order(num_documents: int, seed: int | str) -> np.ndarray:
    """int64[num_documents]: a permutation that depends on the seed and the count alone, whatever the numpy version.

    numpy promises the raw output of Philox for good, but not the method of Generator.permutation.
    """
    key = int.from_bytes(hashlib.blake2b(f"document order {seed}".encode(), digest_size=16).digest(), "little")
    return np.argsort(np.random.Philox(key=key).random_raw(num_documents), kind="stable")


class PackedRows(DocumentRows):
    """`concat`: row r holds tokens [r T, (r + 1) T) of the stream; its targets are the next tokens of the stream.

    Every token but the first of its document is a target with weight 1 exactly once. The last row of a group is padded.
    """

    def __init__(self, table: DocumentTable, *, seq_len: int, seed: int, num_groups: int = 1):
        members = group_members(table, num_groups)
        names = [str(seed)] if num_groups == 1 else [f"{seed} {group}" for group in range(num_groups)]
        orders = [documents[document_order(len(documents), name)] for documents, name in zip(members, names)]
        self.table, self.seq_len, self.seed = table, seq_len, seed
        self._order = np.concatenate(orders)
        lengths = table.lengths[self._order]
        tokens = np.array([table.lengths[documents].sum() for documents in members], np.int64)
        self.group_rows = np.concatenate([[0], np.cumsum(-(-tokens // seq_len))])
        shifts = self.group_rows[:-1] * seq_len - (np.cumsum(tokens) - tokens)  # a group begins with a row
        self._begins = np.cumsum(lengths) - lengths + np.repeat(shifts, [len(order) for order in orders])

    def pieces(self, rows: np.ndarray) -> Pieces:
        """What the rows int64[m] are made of."""
        T, begins = self.seq_len, self._begins
        starts = rows * T
        first, last = begins.searchsorted(starts, side="right") - 1, begins.searchsorted(starts + T, side="left")
        bounds, places = ranges(first, last)
        documents = self._order[places]
        begin = begins[places] - np.repeat(starts, last - first)
        end = begin + self.table.lengths[documents]
        skipped = np.maximum(-begin, 0)
        lengths = np.minimum(end, T) - np.maximum(begin, 0)
        goes_on = end[bounds[1:] - 1] > T
        group = self.group_rows.searchsorted(rows, side="right") - 1
        something = goes_on | (rows + 1 < self.group_rows[group + 1])
        behind = np.minimum(np.where(goes_on, last - 1, last), len(begins) - 1)
        return Pieces(
            first=bounds,
            documents=documents,
            skipped=skipped,
            lengths=lengths,
            ended=end <= T,
            after_documents=np.where(something, self._order[behind], -1),
            after_skipped=np.where(goes_on, (skipped + lengths)[bounds[1:] - 1], 0),
        )

    def rows_of(self, document: int) -> np.ndarray:
        """int64: the rows that hold a piece of the table's document, in order. Looks through all documents."""
        begins = self._begins[self._order == document]
        ends = begins + self.table.lengths[document]
        return np.concatenate(
            [np.arange(a // self.seq_len, -(-b // self.seq_len)) for a, b in zip(begins, ends)] or [[]]
        )


def ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(where each range's part begins in what follows, and the end; the numbers of all ranges [first, last))."""
    bounds = np.concatenate([[0], np.cumsum(last - first)])
    return bounds, np.arange(bounds[-1]) + np.repeat(first - bounds[:-1], last - first)
