"""Which documents are held out for validation: decided by name and place alone, so that it never changes."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.data.cache import count
from jaxscale.data.config import DataConfig
from jaxscale.data.packing import DocumentTable, join_tables
from jaxscale.data.permutation import mix
from jaxscale.data.shards import Shard
from jaxscale.system.exits import BadInput

FEWEST_DOCUMENTS = 5  # expected from a source; with fewer, chance would decide whether it has any validation


def hold_out(
    table: DocumentTable,
    files: Sequence[tuple[str, int]],
    source_names: Sequence[str],
    fraction: float,
    *,
    whole: bool = False,
) -> tuple[DocumentTable, DocumentTable, str]:
    """(training, validation, the rule in words).

    A document is held out by a hash of its file's name and its place in the file. Of a source where that would be fewer
    than 5 documents, the last `fraction` of every document is held out instead, so that each source has a loss; or as
    many whole ones as come next to it, those with the smallest hashes, at least one and never all.

    Args: files: (name, number of documents) of each file, in the table's order. whole: whether none may be cut.
    """
    assert sum(number for _, number in files) == len(table), "the files do not account for the documents"
    expected = np.bincount(table.source_ids, minlength=len(source_names)) * fraction
    is_short = expected < FEWEST_DOCUMENTS
    held = np.concatenate([held_out(name, number, fraction) for name, number in files])
    if whole:
        hashes = np.concatenate([place_hashes(name, number) for name, number in files])
        for source in np.flatnonzero(is_short):
            own = np.flatnonzero(table.source_ids == source)
            number = min(max(1, round(len(own) * fraction)), len(own) - 1) if len(own) else 0
            held[own] = False
            held[own[np.argsort(hashes[own], kind="stable")[:number]]] = True
        kept = np.where(held, 0, table.lengths)
        rule = f"{fraction:.3g} of the documents, by a hash of their names"
        return table.clip(np.zeros_like(kept), kept), table.clip(kept, table.lengths - kept), rule
    whole_or_none = np.where(held, 0, table.lengths)
    tails_cut = table.lengths - (table.lengths * fraction).astype(np.int64)
    kept = np.where(is_short[table.source_ids], tails_cut, whole_or_none)

    rules = [] if is_short.all() else [f"{fraction:.3g} of the documents, by a hash of their names"]
    if short := [name for name, few, number in zip(source_names, is_short, expected) if few and number]:
        rules.append(f"the last {fraction:.3g} of each document in {', '.join(short)}, which has few")
    return table.clip(np.zeros_like(kept), kept), table.clip(kept, table.lengths - kept), "; ".join(rules)


def held_out(file_name: str, num_documents: int, fraction: float) -> np.ndarray:
    """bool[num_documents]: which documents of a file are held out, each with probability `fraction`."""
    return place_hashes(file_name, num_documents) < np.uint64(min(int(fraction * 2**64), 2**64 - 1))


def place_hashes(file_name: str, num_documents: int) -> np.ndarray:
    """uint64[num_documents]: a hash of each document's place in the file."""
    seed = int.from_bytes(hashlib.blake2b(file_name.encode(errors="surrogateescape"), digest_size=8).digest(), "little")
    return mix(np.arange(num_documents, dtype=np.uint64) + np.uint64(seed))


class Division(NamedTuple):
    """The documents of training and of validation."""

    train: DocumentTable
    valid: DocumentTable | None
    rule: str  # what validation is
    content: list[str]  # that the fingerprint of the data is made of
    fitted: list[str]  # messages: what became of conversations longer than a row


def divide(
    cfg: DataConfig, trained: Sequence[Shard], held: Sequence[Shard], names: Sequence[str], seq_len: int
) -> Division:
    """The documents of the shards for training and for validation; without the latter, a part of the former.

    Conversations are never cut between training and validation, nor between two rows.
    """
    whole = cfg.name == "chat"
    train, valid, rule = join_tables([shard.table(names) for shard in trained]), None, ""
    content = [*(shard.fingerprint for shard in trained), "validation", *(shard.fingerprint for shard in held)]
    if held:
        valid, rule = join_tables([shard.table(names) for shard in held]), "data.val_files"
    elif cfg.val_fraction:
        files = [named for shard in trained for named in files_of(shard)]
        train, valid, rule = hold_out(train, files, names, cfg.val_fraction, whole=whole)
        content += [str(cfg.val_fraction), *(f"{name}:{documents}" for name, documents in files)]
    fitted = []
    if whole:
        train, cut, dropped = fit_rows(train, cfg.chat.too_long, seq_len)
        if valid is not None:
            valid, *more = fit_rows(valid, cfg.chat.too_long, seq_len)
            cut, dropped = cut + more[0], dropped + more[1]
        content += fitted_content(cfg.chat.too_long, seq_len, dropped)
        if cut:
            fitted = [f"{count(cut, 'document')} longer than a row cut (data.chat.too_long)"]
        if dropped:
            why = ", what is learned lies behind a row's end" if cfg.chat.too_long == "cut" else ""
            fitted += [f"{count(dropped, 'document')} longer than a row dropped (data.chat.too_long{why})"]
    return Division(train, valid, rule, content, fitted)


def files_of(shard: Shard) -> list[tuple[str, int]]:
    """(name, number of documents) of each file of a shard. Raises BadInput if they are not all of its documents."""
    files = [(file["name"], file["documents"]) for file in shard.header["files"]]
    if (told := sum(number for _, number in files)) != shard.header["num_documents"]:
        raise BadInput(
            f"the header of {shard.place} names the files of {told:,} of its {shard.header['num_documents']:,} "
            "documents, and by their names documents are held out; name data.val_files, or set data.val_fraction=0"
        )
    return files


def fit_rows(table: DocumentTable, too_long: str, seq_len: int) -> tuple[DocumentTable, int, int]:
    """(the documents as they fit into a row, how many were cut, how many dropped).

    Where long ones are cut, those are dropped of which nothing would be learned.
    """
    is_long = table.lengths > seq_len
    keep = ~is_long
    if too_long == "cut":
        keep[is_long] = [learned > 0 for learned in learned_in_row(table, np.flatnonzero(is_long), seq_len)]
    kept = table.select(keep)
    fitting = kept.clip(np.zeros_like(kept.lengths), np.minimum(kept.lengths, seq_len))
    return fitting, int((is_long & keep).sum()), int((~keep).sum())


def fitted_content(too_long: str, seq_len: int, dropped: int) -> list[str]:
    """What of fit_rows goes into the fingerprint of the data: all that decides which rows there are."""
    return [too_long, str(seq_len), *([f"dropped {dropped}"] if too_long == "cut" and dropped else [])]


def learned_in_row(table: DocumentTable, documents: np.ndarray, seq_len: int) -> Iterator[int]:
    """Yields for each of these conversations how many of its first seq_len tokens are learned, never the first."""
    marks = [np.memmap(path, np.uint8, mode="r") for path in table.trained]
    for document in documents:
        start = int(table.starts[document])
        yield int(marks[table.file_ids[document]][start + 1 : start + seq_len].sum())
