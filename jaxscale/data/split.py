"""Which documents are held out for validation: decided by name and place alone, so that it never changes."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.cache import count
from jaxscale.data.config import DataConfig
from jaxscale.data.documents import AT_ONCE, Chunk, Rule
from jaxscale.data.permutation import mix
from jaxscale.data.shards import Shard, fetch_indexes
from jaxscale.system.exits import BadInput

FEWEST_DOCUMENTS = 5  # expected from a source; with fewer, chance would decide whether it has any validation


class Division(NamedTuple):
    """The documents of training and of validation."""

    trained: Sequence[Shard]
    held: Sequence[Shard]
    names: Sequence[str]  # of the sources
    fraction: float  # of the documents for training that is held out
    content: list[str]  # that the fingerprint of the data is made of
    conversations: "Conversations | None" = None  # decided one by one, and at each start

    @property
    def has_validation(self) -> bool:
        """True if there is a part for validation."""
        return bool(self.held or self.fraction)

    @property
    def keeps_empty(self) -> bool:
        """True if documents without a token count: where nothing of the training files is held out."""
        return not self.fraction and self.conversations is None

    def rule(self) -> tuple[Rule, str]:
        """(how documents are cut, what validation is in words). Looks at the source of each document."""
        if self.conversations is not None:
            return self.conversations.rule, self.conversations.words
        if self.held or not self.fraction:
            return Rule(), "data.val_files" if self.held else ""
        expected = np.zeros(len(self.names))
        for _, sources in read_indexes(self.trained, self.names):
            expected += np.bincount(sources, minlength=len(self.names))
        return short_rule(expected * self.fraction, self.names, self.fraction)

    def chunks(self, rule: Rule, *, keep_empty: bool) -> Iterator[Chunk]:
        """Yields all documents, those of the files for training first. keep_empty: those without a token count too."""
        if self.conversations is not None:
            yield from self.conversations.chunks
            return
        by_hash = (held_in(shard, self.fraction) for shard in self.trained) if self.fraction else None
        for lengths, sources in read_indexes(self.trained, self.names):
            real = lengths > 0
            if by_hash is None:
                yield Chunk(lengths, sources, np.ones_like(real) if keep_empty else real, np.zeros_like(real))
                continue
            is_held, is_cut = next(by_hash), np.isin(sources, rule.tails)
            tails = rule.lengths(lengths, sources, "valid")[1]
            train = real & (is_cut | ~is_held) & (rule.lengths(lengths, sources, "train")[1] > 0)
            yield Chunk(lengths, sources, train, real & np.where(is_cut, tails > 0, is_held))
        for lengths, sources in read_indexes(self.held, self.names):
            yield Chunk(lengths, sources, np.zeros(len(lengths), bool), lengths > 0)


class Conversations(NamedTuple):
    """Conversations are never cut between training and validation, nor between two rows."""

    rule: Rule
    words: str
    chunks: list[Chunk]
    fitted: list[str]  # messages: what became of those longer than a row


def short_rule(expected: np.ndarray, names: Sequence[str], fraction: float) -> tuple[Rule, str]:
    """A document is held out by a hash of its file's name and its place in the file. Of a source where that would be
    fewer than FEWEST_DOCUMENTS, the last `fraction` of every document is held out instead, so that each has a loss.
    """
    is_short = expected < FEWEST_DOCUMENTS
    rules = [] if is_short.all() else [f"{fraction:.3g} of the documents, by a hash of their names"]
    if short := [name for name, few, number in zip(names, is_short, expected) if few and number]:
        rules.append(f"the last {fraction:.3g} of each document in {', '.join(short)}, which has few")
    return Rule(fraction, tuple(np.flatnonzero(is_short).tolist())), "; ".join(rules)


def read_indexes(shards: Sequence[Shard], names: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (lengths, sources by their places in `names`) of the documents of each shard."""
    fetch_indexes(shards)
    for shard in shards:
        renumber = np.array([names.index(name) for name in shard.header["sources"]], np.uint16)
        offsets, source_ids = shard.doc_index.read()
        yield np.diff(offsets), renumber[source_ids]


def held_in(shard: Shard, fraction: float) -> np.ndarray:
    """bool[documents]: which of a shard's are held out."""
    parts = [held_out(name, number, fraction) for name, number in files_of(shard)]
    return np.concatenate(parts) if parts else np.zeros(0, bool)


def held_out(file_name: str, num_documents: int, fraction: float) -> np.ndarray:
    """bool[num_documents]: which documents of a file are held out, each with probability `fraction`."""
    limit = np.uint64(min(int(fraction * 2**64), 2**64 - 1))
    parts = [
        place_hashes(file_name, first, min(AT_ONCE, num_documents - first)) < limit
        for first in range(0, num_documents, AT_ONCE)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, bool)


def place_hashes(file_name: str, first: int, number: int) -> np.ndarray:
    """uint64[number]: a hash of each document's place in the file, from `first` on."""
    seed = int.from_bytes(hashlib.blake2b(file_name.encode(errors="surrogateescape"), digest_size=8).digest(), "little")
    return mix(np.arange(first, first + number, dtype=np.uint64) + np.uint64(seed))


def divide(
    cfg: DataConfig, trained: Sequence[Shard], held: Sequence[Shard], names: Sequence[str], seq_len: int
) -> Division:
    """The documents of the shards for training and for validation; without the latter, a part of the former."""
    content = [*(shard.fingerprint for shard in trained), "validation", *(shard.fingerprint for shard in held)]
    fraction = 0.0 if held else cfg.val_fraction
    if fraction:
        files = [named for shard in trained for named in files_of(shard)]
        content += [str(cfg.val_fraction), *(f"{name}:{documents}" for name, documents in files)]
    if cfg.name != "chat":
        return Division(trained, held, names, fraction, content)
    conversations, more = divide_conversations(trained, held, names, fraction, cfg.chat.too_long, seq_len)
    return Division(trained, held, names, fraction, content + more, conversations)


def files_of(shard: Shard) -> list[tuple[str, int]]:
    """(name, number of documents) of each file of a shard. Raises BadInput if they are not all of its documents."""
    files = [(file["name"], file["documents"]) for file in shard.header["files"]]
    if (told := sum(number for _, number in files)) != shard.header["num_documents"]:
        raise BadInput(
            f"the header of {shard.place} names the files of {told:,} of its {shard.header['num_documents']:,} "
            "documents, and by their names documents are held out; name data.val_files, or set data.val_fraction=0"
        )
    return files


def divide_conversations(
    trained: Sequence[Shard], held: Sequence[Shard], names: Sequence[str], fraction: float, too_long: str, seq_len: int
) -> tuple[Conversations, list[str]]:
    """(the conversations, what of this goes into the fingerprint of the data), all of them looked at.

    Of a source with few, as many whole ones as come next to `fraction` are held out, those with the smallest hashes, at
    least one and never all. Those longer than a row are cut or dropped.
    """
    found = [list(zip(some, read_indexes(some, names))) for some in (trained, held)]
    sources = [sources for shard, (_, sources) in found[0]]
    is_held = hold_out_whole(trained, np.concatenate(sources), names, fraction) if fraction else None
    bounds = np.cumsum([0, *map(len, sources)])
    chunks, cut, dropped = [], np.zeros(2, np.int64), np.zeros(2, np.int64)  # of training and of validation
    for is_valid, shards in enumerate(found):
        for number, (shard, (lengths, own)) in enumerate(shards):
            valid = np.full(len(lengths), bool(is_valid))
            if is_held is not None:
                valid = is_held[bounds[number] : bounds[number + 1]]
            keep, is_long = fits_row(shard, lengths, too_long, seq_len)
            for part, members in enumerate((~valid, valid)):
                cut[part] += (members & is_long & keep).sum()
                dropped[part] += (members & ~keep).sum()
            keep &= lengths > 0
            chunks.append(Chunk(lengths, own, keep & ~valid, keep & valid))
    fitted = []
    if cut.sum():
        fitted = [f"{count(int(cut.sum()), 'document')} longer than a row cut (data.chat.too_long)"]
    if dropped.sum():
        why = ", what is learned lies behind a row's end" if too_long == "cut" else ""
        fitted += [f"{count(int(dropped.sum()), 'document')} longer than a row dropped (data.chat.too_long{why})"]
    words = "data.val_files" if held else f"{fraction:.3g} of the documents, by a hash of their names" * bool(fraction)
    return Conversations(Rule(clip=seq_len), words, chunks, fitted), fitted_content(
        too_long, seq_len, int(dropped.sum())
    )


def fitted_content(too_long: str, seq_len: int, dropped: int) -> list[str]:
    """What of fitting goes into the fingerprint of the data: all that decides which rows there are."""
    return [too_long, str(seq_len), *([f"dropped {dropped}"] if too_long == "cut" and dropped else [])]


def hold_out_whole(trained: Sequence[Shard], sources: np.ndarray, names: Sequence[str], fraction: float) -> np.ndarray:
    """bool[documents]: which are held out."""
    files = [named for shard in trained for named in files_of(shard)]
    held = np.concatenate([held_out(name, number, fraction) for name, number in files])
    hashes = np.concatenate([place_hashes(name, 0, number) for name, number in files])
    expected = np.bincount(sources, minlength=len(names)) * fraction
    for source in np.flatnonzero(expected < FEWEST_DOCUMENTS):
        own = np.flatnonzero(sources == source)
        number = min(max(1, round(len(own) * fraction)), len(own) - 1) if len(own) else 0
        held[own] = False
        held[own[np.argsort(hashes[own], kind="stable")[:number]]] = True
    return held


def fits_row(shard: Shard, lengths: np.ndarray, too_long: str, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(bool[n]: documents that are kept, bool[n]: those longer than a row). Of those that are cut, something must be
    learned from what is left."""
    is_long = lengths > seq_len
    keep = ~is_long
    if too_long == "cut" and is_long.any():
        marks: Any = np.memmap(shard.trained_path, np.uint8, mode="r")
        starts = (np.cumsum(lengths) - lengths)[is_long]
        keep[is_long] = [marks[start + 1 : start + seq_len].any() for start in starts]  # never the first token
    return keep, is_long
