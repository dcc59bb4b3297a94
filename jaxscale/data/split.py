"""Which documents are held out for validation: decided by name and place alone, so that it never changes."""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxscale.data.packing import DocumentTable
from jaxscale.data.permutation import mix

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
            held[own] = False
            held[own[np.argsort(hashes[own], kind="stable")[: fewest_held(len(own), fraction)]]] = True
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


def fewest_held(documents: int, fraction: float) -> int:
    """How many of a few documents are held out."""
    return min(max(1, round(documents * fraction)), documents - 1) if documents else 0


def place_hashes(file_name: str, num_documents: int) -> np.ndarray:
    """uint64[num_documents]: a hash of each document's place in the file."""
    seed = int.from_bytes(hashlib.blake2b(file_name.encode(errors="surrogateescape"), digest_size=8).digest(), "little")
    return mix(np.arange(num_documents, dtype=np.uint64) + np.uint64(seed))
