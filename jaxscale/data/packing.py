"""Documents as rows of T tokens: what any packing offers, and the windows over a stream of shuffled documents.

A packing is planned once, into the folder of arrays that holds the index of the documents; row r is then found by
looking at a few places of the mapped arrays, whatever their size.
"""

import abc
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxscale.data.array_folder import Arrays, ArrayWriter, Buckets
from jaxscale.data.batch import Batch
from jaxscale.data.documents import Documents, TokenSet, bisect
from jaxscale.data.remote import map_ids
from jaxscale.data.rows import Located, Pieces, TokenFiles, broken_piece, locate, read_rows
from jaxscale.data.verified import Unchanged
from jaxscale.system.exits import Exit, Stop

MADE_ANEW = ("_files", "_marks", "_ramp_T", "_unchanged")  # what a pickle of rows leaves out
SAMPLED = 16  # documents of a stream between two whose place in it is kept


class DocumentRows(abc.ABC):
    """Rows by number, read in any order; a pickle carries neither tokens nor plan. What all packings have in common.

    The rows of group g are numbers [group_rows[g], group_rows[g + 1]): one group of all documents, or one per source.
    """

    def __init__(self, documents: Documents, arrays: Arrays, part: str):
        """The rows of a part of the documents, which are planned in `arrays`."""
        plan = arrays.header["parts"][part]
        self.documents, self.arrays, self.part = documents, arrays, part
        self.seq_len, self.seed = plan["seq_len"], plan["seed"]
        self.group_rows = np.array(plan["group_rows"], np.int64)
        self._groups = len(self.group_rows) - 1

    @abc.abstractmethod
    def pieces(self, rows: np.ndarray) -> Pieces:
        """What the rows int64[m] are made of."""

    @abc.abstractmethod
    def rows_of(self, document: int) -> np.ndarray:
        """int64: the rows that hold a piece of the document, in order; none where the part does not have it."""

    def __len__(self) -> int:
        return int(self.group_rows[-1])

    @property
    def num_documents(self) -> int:
        """How many documents the part has something of."""
        return sum(self.documents.about["members"][self.part])

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, without their padding."""
        return sum(self.documents.about["tokens"][self.part])

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key not in MADE_ANEW}

    @property
    def _token_set(self) -> TokenSet:
        """Where the tokens are, which is not known while rows are planned."""
        assert self.documents.files is not None, "rows are read of documents that have files"
        return self.documents.files

    @functools.cached_property
    def _unchanged(self) -> Unchanged:
        return Unchanged(self._token_set.expected)

    def _map(self, path: str, dtype: str) -> Any:
        """The ids or marks in a file that is still the one that was verified."""
        self._unchanged.check_unopened([path])
        return map_ids(path, dtype)

    @functools.cached_property
    def _files(self) -> TokenFiles:
        return TokenFiles(self._token_set.paths, self._token_set.dtypes, self._map)

    @functools.cached_property
    def _marks(self) -> TokenFiles | None:
        files = self._token_set
        if not any(files.trained):
            return None
        return TokenFiles(files.trained, ["|u1"] * len(files.paths), lambda *file: file[0] and self._map(*file))

    @functools.cached_property
    def _ramp_T(self) -> np.ndarray:
        return np.arange(self.seq_len, dtype=np.int32)

    def locate(self, rows: np.ndarray) -> Located:
        """Where the rows int64[m] lie in the files, for `read`."""
        return locate(self.pieces(rows), functools.partial(self.documents.locate, part=self.part))

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
        first, files, tokens = located.first, located.files, self._token_set
        numbers = {file for row in chosen for file in files[first[row] : first[row + 1]]}
        numbers |= {located.after_files[row] for row in chosen} - {-1}
        return [path for number in numbers for path in (tokens.paths[number], *tokens.trained[number : number + 1])]

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
        sources_T[: pieces.lengths.sum()] = np.repeat(self.documents.sources(pieces.documents), pieces.lengths)
        return sources_T

    def _group_of(self, rows: np.ndarray) -> np.ndarray:
        """The group of each row."""
        return self.group_rows.searchsorted(rows, side="right") - 1


def order_generator(seed: int | str) -> np.random.Philox:
    """Whose raw output is the keys by which documents are put in order.

    numpy promises the raw output of Philox for good, but not the method of Generator.permutation.
    """
    key = int.from_bytes(hashlib.blake2b(f"document order {seed}".encode(), digest_size=16).digest(), "little")
    return np.random.Philox(key=key)


def order_key(seed: int | str, turn: int) -> int:
    """The key of one document: the raw output number `turn`, of which the generator makes four at a time."""
    generator = order_generator(seed)
    generator.advance(turn // 4)
    return int(generator.random_raw(4)[turn % 4])


def document_order(num_documents: int, seed: int | str) -> np.ndarray:
    """int64[num_documents]: a permutation that depends on the seed and the count alone, whatever the numpy version."""
    return np.argsort(order_generator(seed).random_raw(num_documents), kind="stable")


def order_name(seed: int, group: int, num_groups: int) -> str:
    """What the order of a group's documents hangs on."""
    return str(seed) if num_groups == 1 else f"{seed} {group}"


def shuffled_members(
    folder: Any, documents: Documents, part: str, group: int, name: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (numbers, lengths) of a group's documents in the order of document_order, a bucket at a time."""
    buckets = Buckets.of(folder, [("key", "<u8"), ("number", "<i8"), ("length", "<i8")], documents.size(part, group))
    generator, width = order_generator(name), -(-(1 << 64) // buckets.number)
    for numbers, lengths in documents.members(part, group):
        keys = generator.random_raw(len(numbers))
        buckets.add(keys // np.uint64(width) if buckets.number > 1 else None, key=keys, number=numbers, length=lengths)
    for records in buckets:
        order = np.argsort(records["key"], kind="stable")
        yield records["number"][order], records["length"][order]


def write_concat(out: ArrayWriter, documents: Documents, part: str, *, seq_len: int, seed: int) -> dict[str, Any]:
    """Plans the rows of a part one document after the other, and returns what PackedRows needs to know of it.

    Of each document there are 4 bytes of its number (5 beyond 2**32 of them), of each SAMPLED-th 8 of its place.
    """
    num_groups = len(documents.about["members"][part])
    group_rows, samples = [0], [0]
    out.append(f"{part}.order", np.zeros(0, np.uint32))
    out.append(f"{part}.begins", np.zeros(0, np.int64))
    for group in range(num_groups):
        begin, place, count = group_rows[-1] * seq_len, 0, 0
        name = order_name(seed, group, num_groups)
        for numbers, lengths in shuffled_members(out.folder, documents, part, group, name):
            out.append(f"{part}.order", (numbers & 0xFFFFFFFF).astype(np.uint32))
            if len(documents) > 1 << 32:
                out.append(f"{part}.order_high", (numbers >> 32).astype(np.uint8))
            begins = begin + np.cumsum(lengths) - lengths
            sampled = begins[-place % SAMPLED :: SAMPLED]
            out.append(f"{part}.begins", sampled)
            place, count, begin = place + len(numbers), count + len(sampled), begin + int(lengths.sum())
        group_rows.append(-(-begin // seq_len))
        samples.append(samples[-1] + count)
    return {"packing": "concat", "seq_len": seq_len, "seed": seed, "group_rows": group_rows, "samples": samples}


class PackedRows(DocumentRows):
    """`concat`: row r holds tokens [r T, (r + 1) T) of the stream; its targets are the next tokens of the stream.

    Every token but the first of its document is a target with weight 1 exactly once. The last row of a group is padded,
    and a group begins with a row.
    """

    def __init__(self, documents: Documents, arrays: Arrays, part: str):
        super().__init__(documents, arrays, part)
        sizes = [documents.size(part, group) for group in range(self._groups)]
        self._firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)  # in the order, of each group
        self._samples = np.array(arrays.header["parts"][part]["samples"], np.int64)

    def _numbers(self, places: np.ndarray) -> np.ndarray:
        """The documents at places of the order."""
        found = self.arrays[f"{self.part}.order"][places].astype(np.int64)
        if f"{self.part}.order_high" in self.arrays:
            found += self.arrays[f"{self.part}.order_high"][places].astype(np.int64) << 32
        return found

    def pieces(self, rows: np.ndarray) -> Pieces:
        """What the rows int64[m] are made of."""
        self.arrays.check()
        T, starts, group = self.seq_len, rows * self.seq_len, self._group_of(rows)
        places, documents, begins, lengths, row = self._around(starts, group)
        inside = (begins < starts[row] + T) & (begins + lengths > starts[row])
        places, documents, row = places[inside], documents[inside], row[inside]
        begin = begins[inside] - starts[row]
        end = begin + lengths[inside]
        bounds = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(rows)))])
        skipped = np.maximum(-begin, 0)
        lengths = np.minimum(end, T) - np.maximum(begin, 0)
        last = bounds[1:] - 1
        goes_on = end[last] > T
        behind = np.where(goes_on, places[last], places[last] + 1)
        something = behind < self._firsts[group + 1]
        return Pieces(
            first=bounds,
            documents=documents,
            skipped=skipped,
            lengths=lengths,
            ended=end <= T,
            after_documents=np.where(something, self._numbers(np.where(something, behind, 0)), -1),
            after_skipped=np.where(goes_on, (skipped + lengths)[last], 0),
        )

    def _around(self, starts: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, ...]:
        """(place in the order, document, where it begins in the stream, its length, which of the rows) of all documents
        from the last sampled one before each row to the first one behind it."""
        sampled = self.arrays[f"{self.part}.begins"]
        low, high = self._samples[group], self._samples[group + 1]
        first = bisect(sampled, low, high, starts) - 1
        last = bisect(sampled, low, high, starts + self.seq_len - 1)
        sizes = self._firsts[group + 1] - self._firsts[group]
        begin, end = (first - low) * SAMPLED, np.minimum((last - low) * SAMPLED, sizes)
        bounds, places = ranges(self._firsts[group] + begin, self._firsts[group] + end)
        row = np.repeat(np.arange(len(starts)), np.diff(bounds))
        documents = self._numbers(places)
        lengths = self.documents.lengths(documents, self.part)
        before = np.cumsum(lengths) - lengths
        return places, documents, before - (before[bounds[:-1]] - sampled[first])[row], lengths, row

    def rows_of(self, document: int) -> np.ndarray:
        """int64: the rows that hold a piece of the document, in order; none where the part does not have it."""
        self.arrays.check()
        for group in range(self._groups):
            turn = self.documents.rank(self.part, group, document)
            if turn is not None:
                place = self._place(group, turn)
                numbers = np.arange(place - place % SAMPLED, place + 1)
                lengths = self.documents.lengths(self._numbers(self._firsts[group] + numbers), self.part)
                sample = int(self._samples[group]) + place // SAMPLED
                begin = int(self.arrays[f"{self.part}.begins"][sample]) + int(lengths[:-1].sum())
                return np.arange(begin // self.seq_len, -(-(begin + int(lengths[-1])) // self.seq_len))
        return np.zeros(0, np.int64)

    def _place(self, group: int, turn: int) -> int:
        """Where the order has a group's document, counted from the group's first: by its key, as in document_order."""
        name = order_name(self.seed, group, self._groups)
        key = (order_key(name, turn), turn)
        low, high = 0, self.documents.size(self.part, group)
        while low < high:
            middle = (low + high) // 2
            number = int(self._numbers(self._firsts[group] + np.array([middle]))[0])
            other = self.documents.rank(self.part, group, number)
            assert other is not None
            low, high = (middle + 1, high) if (order_key(name, other), other) < key else (low, middle)
        return low


def ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(where each range's part begins in what follows, and the end; the numbers of all ranges [first, last))."""
    bounds = np.concatenate([[0], np.cumsum(last - first)])
    return bounds, np.arange(bounds[-1]) + np.repeat(first - bounds[:-1], last - first)
