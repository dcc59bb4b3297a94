"""Exact deduplication of documents and of lines: sketches of a block, and what is removed from it.

The first copy in the order of the input is kept. Keys are 64-bit hashes: among n different documents or lines about
n^2 / 2^65 pairs are taken for copies by chance, that is 0.03 of 1e9 documents and 3 of 1e10 lines.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxscale.corpus.curate.config import ExactConfig, LineConfig
from jaxscale.corpus.curate.hashes import Sketch, line_hashes, text_hash
from jaxscale.text.document import Document, Outcome

MAX_LINES = 1 << 24  # of a document: an item number has that much room; lines beyond are left as they are


def make_exact_sketch(cfg: ExactConfig) -> Callable[[Sequence[Document]], Sketch]:
    """A function from a block to its sketch: one key for each document that is not blank."""

    def sketch(documents: Sequence[Document]) -> Sketch:
        hashes = [text_hash(document.text, lower=cfg.lower) & (1 << 64) - 1 for document in documents]
        blank = text_hash("") & (1 << 64) - 1
        keys = np.array(hashes, np.uint64)
        owners = np.flatnonzero(keys != np.uint64(blank)).astype(np.uint32)
        return Sketch(keys[owners], owners, np.zeros(len(owners), np.uint32))

    return sketch


def make_line_sketch(cfg: LineConfig) -> Callable[[Sequence[Document]], Sketch]:
    """A function from a block to its sketch: one key for each line that is long enough."""

    def sketch(documents: Sequence[Document]) -> Sketch:
        keys, owners, places = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint32)], [np.zeros(0, np.uint32)]
        for owner, document in enumerate(documents):
            hashes, lines = line_hashes(document.text, cfg.min_line_characters, lower=cfg.lower)
            hashes, lines = hashes[lines < MAX_LINES], lines[lines < MAX_LINES]
            keys.append(hashes)
            owners.append(np.full(len(lines), owner, np.uint32))
            places.append(lines.astype(np.uint32))
        return Sketch(np.concatenate(keys), np.concatenate(owners), np.concatenate(places))

    return sketch


def drop_documents(
    documents: Sequence[Document], removed: np.ndarray, reason: str, details: Sequence[str] | None = None
) -> list[Outcome]:
    """One outcome for each document of a block: those whose places in the block are in `removed` are dropped.

    details: one for each of `removed`, such as which document it is a copy of.
    """
    outcomes = [Outcome(document) for document in documents]
    for i, place in enumerate(np.asarray(removed).tolist()):
        outcomes[place] = Outcome(None, reason, detail=details[i] if details is not None else "")
    return outcomes


def cut_lines(documents: Sequence[Document], owners: np.ndarray, lines: np.ndarray, cfg: LineConfig) -> list[Outcome]:
    """One outcome for each document of a block: line lines[i] of document owners[i] is cut; owners are sorted."""
    outcomes = [Outcome(document) for document in documents]
    owners, lines = np.asarray(owners), np.asarray(lines)
    assert np.all(owners[1:] >= owners[:-1]), "not sorted"
    places, starts = np.unique(owners, return_index=True)
    for place, cut in zip(places.tolist(), np.split(lines, starts[1:])):
        document, gone = documents[place], set(cut.tolist())
        kept = [line for number, line in enumerate(document.text.split("\n")) if number not in gone]
        text = "\n".join(kept)
        if len(text.strip()) < cfg.min_document_characters:
            outcomes[place] = Outcome(None, "repeated lines: too little is left", detail=f"{len(gone)} lines repeated")
        else:
            edited = dataclasses.replace(document, text=text)
            outcomes[place] = Outcome(edited, edits=(("repeated line", len(gone)),))
    return outcomes
