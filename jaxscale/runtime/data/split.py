"""Splits documents into training and validation by a hash of file name and position in the file."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.documents import CHUNK_DOCUMENTS, DocumentChunk, SplitRule
from jaxscale.runtime.data.permutation import mix64
from jaxscale.runtime.data.shards import Shard
from jaxscale.system.exits import BadInput
from jaxscale.units import plural

FETCHED_AT_ONCE = 8  # indexes fetched concurrently, with one round trip each
MIN_DOCUMENTS = 5  # expected validation documents of a source below which a random split might select none


class CorpusSplit(NamedTuple):
    """The shards of a corpus, and the rule that splits documents into training and validation."""

    train_shards: Sequence[Shard]
    valid_shards: Sequence[Shard]
    names: Sequence[str]  # names of the sources
    fraction: float  # held-out fraction of the training documents
    content: list[str]  # inputs of the data fingerprint
    conversations: "ConversationSplit | None" = None  # split of conversations, computed at each start

    def rule(self) -> tuple[SplitRule, str]:
        """Returns (rule, description of the validation part). Reads the sources of all documents.

        Documents are held out by a hash of file name and position. If this is expected to select fewer
        than MIN_DOCUMENTS of a source, the last `fraction` of each document of the source is held out instead.
        """
        if self.conversations is not None:
            return self.conversations.rule, self.conversations.description
        if self.valid_shards or not self.fraction:
            return SplitRule(), "data.val_files" if self.valid_shards else ""
        counts = np.zeros(len(self.names))
        for _, sources in read_indexes(self.train_shards, self.names):
            counts += np.bincount(sources, minlength=len(self.names))
        expected = counts * self.fraction
        is_short = expected < MIN_DOCUMENTS
        rules = [] if is_short.all() else [f"{self.fraction:.3g} of the documents, by a hash of their names"]
        if short := [name for name, few, number in zip(self.names, is_short, expected) if few and number]:
            rules.append(
                f"the last {self.fraction:.3g} of each document in {', '.join(short)}, which has few documents"
            )
        return SplitRule(self.fraction, tuple(np.flatnonzero(is_short).tolist())), "; ".join(rules)

    def chunks(self, rule: SplitRule, *, keep_empty: bool) -> Iterator[DocumentChunk]:
        """Yields all documents, with training files first. keep_empty: include empty documents."""
        if self.conversations is not None:
            yield from self.conversations.chunks
            return
        for shard, (lengths, sources) in zip(self.train_shards, read_indexes(self.train_shards, self.names)):
            has_tokens = lengths > 0
            if not self.fraction:
                train = np.ones_like(has_tokens) if keep_empty else has_tokens
                yield DocumentChunk(lengths, sources, train, np.zeros_like(has_tokens))
                continue
            by_file = [file_holdout(name, number, self.fraction) for name, number in source_files(shard)]
            in_valid, is_cut = np.concatenate([np.zeros(0, bool), *by_file]), np.isin(sources, rule.tails)
            tails = rule.lengths(lengths, sources, "valid")[1]
            train = has_tokens & (is_cut | ~in_valid) & (rule.lengths(lengths, sources, "train")[1] > 0)
            yield DocumentChunk(lengths, sources, train, has_tokens & np.where(is_cut, tails > 0, in_valid))
        for lengths, sources in read_indexes(self.valid_shards, self.names):
            yield DocumentChunk(lengths, sources, np.zeros(len(lengths), bool), lengths > 0)


class ConversationSplit(NamedTuple):
    """Split of conversations. A conversation is never divided between training and validation, or between rows."""

    rule: SplitRule
    description: str
    chunks: list[DocumentChunk]
    fitted: list[str]  # log lines about conversations that are longer than seq_len


def read_indexes(shards: Sequence[Shard], names: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (document lengths, document sources as indices into `names`) of each shard."""
    with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:  # downloads indexes in a bucket
        list(pool.map(lambda shard: shard.doc_index.fetch(), shards))
    for shard in shards:
        renumber = np.array([names.index(name) for name in shard.header["sources"]], np.uint16)
        offsets, source_ids = shard.doc_index.read()
        yield np.diff(offsets), renumber[source_ids]


def file_holdout(file_name: str, num_documents: int, fraction: float) -> np.ndarray:
    """Returns bool[num_documents], True for held-out documents of a file, each with probability `fraction`."""
    limit = np.uint64(min(int(fraction * 2**64), 2**64 - 1))
    parts = [
        document_hashes(file_name, first, min(CHUNK_DOCUMENTS, num_documents - first)) < limit
        for first in range(0, num_documents, CHUNK_DOCUMENTS)
    ]
    return np.concatenate([np.zeros(0, bool), *parts])


def document_hashes(file_name: str, first: int, number: int) -> np.ndarray:
    """Returns uint64[number], the hash of file name and position for documents at position `first` and later."""
    seed = int.from_bytes(hashlib.blake2b(file_name.encode(errors="surrogateescape"), digest_size=8).digest(), "little")
    return mix64(np.arange(first, first + number, dtype=np.uint64) + np.uint64(seed))


def split_corpus(
    cfg: DataConfig, train_shards: Sequence[Shard], valid_shards: Sequence[Shard], names: Sequence[str], seq_len: int
) -> CorpusSplit:
    """Returns the split of a corpus. Validation uses valid_shards or, if empty, some of the training documents."""
    train, valid = ([shard.fingerprint for shard in shards] for shards in (train_shards, valid_shards))
    content = [*train, "validation", *valid]
    fraction = 0.0 if valid_shards else cfg.val_fraction
    if fraction:
        files = [named for shard in train_shards for named in source_files(shard)]
        content += [str(cfg.val_fraction), *(f"{name}:{documents}" for name, documents in files)]
    if cfg.name != "chat":
        return CorpusSplit(train_shards, valid_shards, names, fraction, content)
    shards, num_train = [*train_shards, *valid_shards], len(train_shards)
    conversations, more = split_conversations(shards, num_train, names, fraction, cfg.chat.too_long, seq_len)
    return CorpusSplit(train_shards, valid_shards, names, fraction, content + more, conversations)


def source_files(shard: Shard) -> list[tuple[str, int]]:
    """Returns (name, number of documents) of each text file of a shard. Raises BadInput if the list is incomplete."""
    files = [(file["name"], file["documents"]) for file in shard.header["files"]]
    if (listed := sum(number for _, number in files)) != shard.header["num_documents"]:
        raise BadInput(
            f"the header of {shard.place} lists files for {listed:,} documents, but there are "
            f"{shard.header['num_documents']:,}, so they cannot be split; set data.val_files, or data.val_fraction=0"
        )
    return files


def split_conversations(
    shards: Sequence[Shard], num_train: int, names: Sequence[str], fraction: float, too_long: str, seq_len: int
) -> tuple[ConversationSplit, list[str]]:
    """Returns (split, inputs of the data fingerprint). The first num_train shards are training shards.

    In a source with few conversations, the conversations with the smallest hashes are held out: at least one, but never
    all. Conversations longer than seq_len are truncated or dropped (data.chat.too_long).
    """
    indexes = list(read_indexes(shards, names))
    in_valid = [np.full(len(lengths), number >= num_train) for number, (lengths, _) in enumerate(indexes)]
    if fraction:  # without validation shards
        in_validation = conversation_holdout(
            shards, np.concatenate([sources for _, sources in indexes]), names, fraction
        )
        in_valid = np.split(in_validation, np.cumsum([len(lengths) for lengths, _ in indexes])[:-1])
    chunks, cut, dropped = [], 0, 0
    for shard, (lengths, sources), valid in zip(shards, indexes, in_valid):
        is_long = lengths > seq_len
        keep = ~is_long
        if too_long == "cut" and is_long.any():  # keeps truncated conversations with targets
            marks: Any = np.memmap(shard.loss_mask_path, np.uint8, mode="r")
            starts = (np.cumsum(lengths) - lengths)[is_long]
            keep[is_long] = [marks[start + 1 : start + seq_len].any() for start in starts]
        cut, dropped = cut + int((is_long & keep).sum()), dropped + int((~keep).sum())
        keep &= lengths > 0
        chunks.append(DocumentChunk(lengths, sources, keep & ~valid, keep & valid))
    fitted = [f"{plural(cut, 'document')} longer than seq_len truncated (data.chat.too_long)"] if cut else []
    if dropped:
        reason = ", all targets are after the end" if too_long == "cut" else ""
        fitted += [f"{plural(dropped, 'document')} longer than seq_len dropped (data.chat.too_long{reason})"]
    by_hash = f"{fraction:.3g} of the documents, by a hash of their names" * bool(fraction)
    description = "data.val_files" if num_train < len(shards) else by_hash
    split = ConversationSplit(SplitRule(clip=seq_len), description, chunks, fitted)
    return split, fitted_content(too_long, seq_len, dropped)


def fitted_content(too_long: str, seq_len: int, dropped: int) -> list[str]:
    """Returns the inputs of the data fingerprint that describe the truncation."""
    return [too_long, str(seq_len), *([f"dropped {dropped}"] if too_long == "cut" and dropped else [])]


def conversation_holdout(
    train_shards: Sequence[Shard], sources: np.ndarray, names: Sequence[str], fraction: float
) -> np.ndarray:
    """Returns bool[documents], True for held-out conversations."""
    files = [named for shard in train_shards for named in source_files(shard)]
    validation = np.concatenate([file_holdout(name, number, fraction) for name, number in files])
    hashes = np.concatenate([document_hashes(name, 0, number) for name, number in files])
    expected = np.bincount(sources, minlength=len(names)) * fraction
    for source in np.flatnonzero(expected < MIN_DOCUMENTS):
        members = np.flatnonzero(sources == source)
        number = min(max(1, round(len(members) * fraction)), len(members) - 1) if len(members) else 0
        validation[members] = False
        validation[members[np.argsort(hashes[members], kind="stable")[:number]]] = True
    return validation
