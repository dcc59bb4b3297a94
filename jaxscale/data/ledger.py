"""Which documents a step has trained on, and which steps saw a document: nothing is logged, both are computed.

A place of the stream leads to a row, a row to its pieces, a piece to its shard and its number there, and the shard's
lineage to source, file, offset and id; each way can be walked back. Places in a row are those of the packed row of
text, before an objective makes inputs and targets of it.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxscale.data.cache import cache_folder
from jaxscale.data.lineage import in_utf8, open_lineage
from jaxscale.data.names import candidates, open_names
from jaxscale.data.order import Batches, batch_index, step_of
from jaxscale.data.pipeline import Corpus
from jaxscale.data.shards import Shard
from jaxscale.system.exits import BadInput
from jaxscale.system.redact import on_one_line

OFFSET_DIGITS = 18  # more are no byte of a file, and beyond the integers of Arrow


@dataclasses.dataclass(frozen=True)
class Entry:
    """A piece of a document in a packed row of a batch."""

    row: int  # in the batch
    begin: int  # in the row, before the objective changes it
    tokens: int
    first_token: int  # of the piece, in its document
    source: str
    shard: str
    number: int  # of the document in its shard
    file: str  # empty where the shard does not tell
    offset: int  # in that file; -1 where the shard does not tell
    id: str

    @property
    def name(self) -> str:
        """The document, as --doc takes it."""
        if self.id:
            return self.id
        return f"{self.file}:{self.offset}" if self.offset >= 0 else f"{self.shard}:{self.number}"


class Ledger:
    """Maps steps to documents and documents to steps. Opening one reads the corpus's indexes alone."""

    def __init__(self, corpus: Corpus, batches: Batches, skipped: Iterable[Sequence[int]] = ()):
        """batches: of the run, with its mixture. skipped: its skipped ranges of batches, as its checkpoint has them."""
        if not corpus.shards:
            raise BadInput(f"data.name={corpus.cfg.name!r} has no documents to list: its tokens are drawn at random")
        self.corpus, self.batches, self.skipped = corpus, batches, tuple(skipped)
        self._rows = corpus.train_rows

    def step(self, step: int) -> list[Entry]:
        """The documents of the batch that a step trains on, row by row and in each row from its start."""
        return self.batch(self.batch_of(step))

    def batch_of(self, step: int) -> int:
        """The number of the batch that a step trains on."""
        return batch_index(step, self.skipped)

    def batch(self, n: int) -> list[Entry]:
        """The documents of batch n."""
        pieces = self._rows.pieces(self.batches.row_numbers(n))
        rows = np.repeat(np.arange(self.batches.sizes.size(n)), np.diff(pieces.first))
        begins = np.cumsum(pieces.lengths) - pieces.lengths
        begins -= begins[pieces.first[:-1]][rows]
        for number in np.unique(pieces.documents).tolist():  # in the order of the lineages, each part of them once
            self.origin(number)
        columns = (rows, begins, pieces.lengths, pieces.skipped, pieces.documents)
        return [self.entry(*(int(value) for value in values)) for values in zip(*columns)]

    def names(self, n: int) -> list[str]:
        """'SOURCE FILE, document 3', counted from 0, of each in batch n, those with the most tokens in it first. Where
        a shard does not name the files that it was made of: 'SOURCE SHARD:NUMBER'.

        From indexes and headers alone: no lineage is read, so that a run may ask while it trains.
        """
        pieces = self._rows.pieces(self.batches.row_numbers(n))
        tokens = collections.Counter()
        for number, length in zip(pieces.documents.tolist(), pieces.lengths.tolist()):
            tokens[number] += length
        return [self.name(number) for number, _ in tokens.most_common()]

    def name(self, number: int) -> str:
        """One line that names a document of the table, whatever characters its file's name has."""
        at, place = self.place(number)
        shard, source = self.corpus.shards[at], self.source(number)
        file, first = file_of(shard, place)
        return on_one_line(f"{source} {file}, document {place - first}" if file else f"{source} {shard.place}:{place}")

    def place(self, number: int) -> tuple[int, int]:
        """(which of the corpus's shards, number in it) of a document of the corpus."""
        firsts = self._rows.documents.files.first_documents
        at = int(firsts.searchsorted(number, side="right")) - 1
        return at, number - int(firsts[at])

    def source(self, number: int) -> str:
        """The source of a document of the corpus."""
        return self.corpus.source_names[int(self._rows.documents.sources(np.array([number]))[0])]

    def tokens(self, n: int) -> np.ndarray:
        """int32[rows, T]: the text of batch n in which entries have their places, before the objective changes it."""
        return self.batches.text(n).tokens

    def steps_of(self, document: str, stop: int) -> list[tuple[int, Entry]]:
        """(step, the piece) for every occurrence of a document in the steps below `stop`, in order.

        document: its id, FILE:OFFSET or SHARD:NUMBER; all that are named so count. Raises BadInput if there is none,
        or none in training.
        """
        stop_place = self.batches.sizes.begin(batch_index(stop - 1, self.skipped) + 1)
        found = self.find(document)
        firsts = self._rows.documents.files.first_documents
        rows = {number: self._rows.rows_of(number) for number in sorted({int(firsts[at]) + n for at, n in found})}
        if not any(map(len, rows.values())):
            at, number = found[0]
            each = f"each of the {len(found)} documents of this name, such as " if len(found) > 1 else ""
            raise BadInput(
                f"--doc={document}: {each}document {number} of {self.corpus.shards[at].place} is empty or held out for "
                "validation: no step trains on it; name one that --step lists"
            )
        sights = []
        for number, own in rows.items():
            for row in own.tolist():
                pieces = self._rows.pieces(np.array([row]))
                ends = np.cumsum(pieces.lengths)
                (at,) = np.flatnonzero(pieces.documents == number)
                begin, length, before = (
                    int(column[at]) for column in (ends - pieces.lengths, pieces.lengths, pieces.skipped)
                )
                for place in self.batches.order.places_of(row, max(0, stop_place)).tolist():
                    n, in_batch = self.batches.sizes.find(place)
                    step = step_of(n, self.skipped)
                    if step is not None and step < stop:
                        sights.append((step, self.entry(in_batch, begin, length, before, number)))
        return sorted(sights, key=lambda sight: (sight[0], sight[1].row))

    def entry(self, row: int, begin: int, tokens: int, skipped: int, number: int) -> Entry:
        """What is known of a piece. skipped: tokens before it. number: of the document in the table."""
        at, place = self.place(number)
        source, shard = self.source(number), self.corpus.shards[at].place
        return Entry(row, begin, tokens, skipped, source, shard, place, *self.origin(number))

    @functools.cache  # noqa: B019 - a ledger lives as long as its command
    def origin(self, number: int) -> tuple[str, int, str]:
        """(file, offset, id) of a document of the corpus, as far as its shard tells."""
        at, place = self.place(number)
        if "docs" not in self.corpus.shards[at].header["sha256"]:
            return file_of(self.corpus.shards[at], place)[0], -1, ""
        firsts = self._groups(at)
        group = int(firsts.searchsorted(place, side="right")) - 1
        table = self._lineage(at, group)
        return tuple(table[name][place - int(firsts[group])].as_py() for name in ("file", "offset", "id"))

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _groups(self, at: int) -> np.ndarray:
        """The first document of each group of rows of a shard's lineage, and the end."""
        with open_lineage(self.corpus.shards[at].lineage_path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        return np.cumsum([0, *sizes])

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def _lineage(self, at: int, group: int) -> Any:
        """A group of rows of a shard's lineage as a pyarrow.Table."""
        with open_lineage(self.corpus.shards[at].lineage_path) as file:
            return file.read_row_group(group, columns=["file", "offset", "id"], use_threads=False)

    @functools.cached_property
    def _names(self) -> Any:
        """The published index of names, or None."""
        cfg, corpus = self.corpus.cfg, self.corpus
        return open_names(corpus.shards, corpus.published, cache_folder(cfg), cfg.cache_bytes, cfg.verify)

    def find(self, document: str) -> list[tuple[int, int]]:
        """(shard, number in it) of every document of this name; several where the corpus has a file or an id twice.

        By the set's index of names; without one, all lineages are looked through. Raises: BadInput if there is none.
        """
        document = in_utf8(document)
        file, _, offset = document.rpartition(":")
        place = int(offset) if offset.isdecimal() and len(offset) <= OFFSET_DIGITS else None
        found = [
            (at, place)
            for at, shard in enumerate(self.corpus.shards)
            if place is not None and place < shard.header["num_documents"]
            if file in (in_utf8(shard.place), on_one_line(shard.place))
        ]
        if self._names is not None:
            for number in candidates(self._names, document, file, place):
                its_file, its_offset, its_id = self.origin(number)
                if its_id == document or (its_offset == place and file in (its_file, on_one_line(its_file)) and file):
                    found.append(self.place(number))
        else:
            for at, shard in enumerate(self.corpus.shards):
                if "docs" in shard.header["sha256"]:
                    found += [(at, number) for number in look_through(shard, document, file, place)]
        if not found and document:
            raise BadInput(
                f"--doc={document}: no document of the corpus has this id or place; write an id, FILE:OFFSET, or "
                "SHARD.bin:NUMBER as --step lists them"
            )
        return sorted(set(found))

    def text(self, entry: Entry, tokens_BT: np.ndarray, characters: int) -> str | None:
        """The beginning of what the piece says, or None where no tokenizer is known."""
        if self.corpus.tokenizer is None:
            return None
        ids = tokens_BT[entry.row, entry.begin : entry.begin + min(entry.tokens, 8 * characters + 8)]
        return self.corpus.tokenizer.decode(ids)[:characters]


def look_through(shard: Shard, document: str, file: str, offset: int | None) -> Iterator[int]:
    """Yields the numbers of a shard's documents with this id, or from this place; offset None: no place is meant."""
    import pyarrow
    import pyarrow.compute

    compute: Any = pyarrow.compute  # whose functions are made while it is imported
    first = 0
    with open_lineage(shard.lineage_path) as lineage:
        for group in range(lineage.num_row_groups):
            table = lineage.read_row_group(group, columns=["file", "offset", "id"], use_threads=False)
            here = compute.equal(table["id"], document)
            if file and offset is not None:
                names = table["file"].cast(pyarrow.string())
                meant = [name for name in names.unique().to_pylist() if on_one_line(name) == file]  # as it is listed
                there = compute.and_(
                    compute.is_in(names, pyarrow.array([file, *meant], pyarrow.string())),
                    compute.equal(table["offset"], offset),
                )
                here = compute.or_(here, there)
            yield from (first + np.flatnonzero(here.to_numpy())).tolist()
            first += table.num_rows


def file_of(shard: Shard, number: int) -> tuple[str, int]:
    """(the file that a document came from, the number of that file's first document in the shard): all that the header
    alone tells; ('', 0) if not that."""
    documents = [file["documents"] for file in shard.header["files"]]
    ends = np.cumsum(documents)
    at = int(np.searchsorted(ends, number, side="right"))
    return (shard.header["files"][at]["name"], int(ends[at]) - documents[at]) if at < len(ends) else ("", 0)
