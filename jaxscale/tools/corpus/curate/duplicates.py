"""Sketches of a block for finding exact, line and near duplicates, and what is removed from it.

The first copy in the order of the input is kept. Keys of exact duplicates are 64-bit hashes: among n different
documents or lines about n^2 / 2^65 pairs are taken for copies by chance, that is 0.03 of 1e9 documents and 3 of 1e10
lines.

Near duplicates are documents whose n-gram sets have a large Jaccard similarity. A MinHash signature holds, for each of
some random orders of all n-grams, the document's smallest one: two documents agree in a number with a probability that
is their Jaccard similarity J (Broder, 1997). Signatures are cut into bands of rows; those that agree in all rows of a
band are candidates, which has the probability 1 - (1 - J^rows)^bands (Indyk and Motwani, 1998; Leskovec, Rajaraman,
Ullman: Mining of Massive Datasets, 3.4). The join verifies them.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import bdtrc

from jaxscale.runtime.text.document import Document, Outcome
from jaxscale.runtime.text.sources.part import importing
from jaxscale.tools.corpus.curate.config import ExactConfig, LineConfig, NearConfig
from jaxscale.tools.corpus.curate.hashes import (
    MULTIPLIER,
    Sketch,
    hash_words,
    line_hashes,
    mix64,
    ngram_hashes,
    ngram_table,
    text_hash,
)


def make_exact_sketch(cfg: ExactConfig) -> Callable[[Sequence[Document]], Sketch]:
    """Returns a function from a block to its sketch: one key for each document that is not blank."""

    def sketch(documents: Sequence[Document]) -> Sketch:
        hashes = [text_hash(document.text, lower=cfg.lower) & (1 << 64) - 1 for document in documents]
        blank = text_hash("") & (1 << 64) - 1
        keys = np.array(hashes, np.uint64)
        places = np.flatnonzero(keys != np.uint64(blank))
        return Sketch(keys[places], places)

    return sketch


def make_line_sketch(cfg: LineConfig) -> Callable[[Sequence[Document]], Sketch]:
    """Returns a function from a block to its sketch: one key for each line that is long enough."""

    def sketch(documents: Sequence[Document]) -> Sketch:
        keys, places = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for start, document in zip(first_lines(documents).tolist(), documents):
            hashes, lines = line_hashes(document.text, cfg.min_line_characters, lower=cfg.lower)
            keys.append(hashes)
            places.append(start + lines)
        return Sketch(np.concatenate(keys), np.concatenate(places))

    return sketch


def first_lines(documents: Sequence[Document]) -> np.ndarray:
    """Returns int64[documents], the index in the block of each document's first line."""
    counts = [document.text.count("\n") + 1 for document in documents]
    return np.cumsum([0, *counts], dtype=np.int64)[:-1]


def lines_at(documents: Sequence[Document], places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (owners, lines), int64[k] each: document and line in it, for lines given by their index in the block."""
    starts = first_lines(documents)
    owners = np.searchsorted(starts, places, side="right") - 1
    return owners, places - starts[owners]


def drop_documents(documents: Sequence[Document], removed: np.ndarray, reason: str) -> list[Outcome]:
    """Returns an outcome for each document of a block; the documents at indices `removed` are dropped."""
    outcomes = [Outcome(document) for document in documents]
    for place in np.asarray(removed).tolist():
        outcomes[place] = Outcome(None, reason)
    return outcomes


def cut_lines(documents: Sequence[Document], owners: np.ndarray, lines: np.ndarray, cfg: LineConfig) -> list[Outcome]:
    """Returns an outcome for each document of a block; line lines[i] of document owners[i] is cut, owners sorted."""
    outcomes = [Outcome(document) for document in documents]
    owners, lines = np.asarray(owners), np.asarray(lines)
    assert np.all(owners[1:] >= owners[:-1]), "not sorted"
    places, starts = np.unique(owners, return_index=True)
    for place, cut in zip(places.tolist(), np.split(lines, starts[1:])):
        document, cut_numbers = documents[place], set(cut.tolist())
        remaining = [line for number, line in enumerate(document.text.split("\n")) if number not in cut_numbers]
        text = "\n".join(remaining)
        if len(text.strip()) < cfg.min_document_characters:
            outcomes[place] = Outcome(
                None, "repeated lines: too little is left", detail=f"{len(cut_numbers)} lines repeated"
            )
        else:
            edited = document.edited(text)
            outcomes[place] = Outcome(edited, edits=(("repeated line", len(cut_numbers)),))
    return outcomes


def make_near_sketch(cfg: NearConfig) -> Callable[[Sequence[Document]], Sketch]:
    """Returns a function from a block to its sketch: for each document a key per band, and its signature.

    A document with fewer words than an n-gram is one n-gram; one without words has no keys.
    """
    bands, rows = bands_and_rows(cfg)

    def sketch(documents: Sequence[Document]) -> Sketch:
        words = hash_words(documents)
        found = signatures(words, cfg)
        owners = np.flatnonzero([len(row) > 0 for row in words])
        keys = band_keys(found[owners], bands, rows)
        return Sketch(keys.ravel(), np.repeat(owners, bands), found)

    return sketch


def signatures(words: Sequence[np.ndarray], cfg: NearConfig) -> np.ndarray:
    """Returns uint32[documents, permutations], the MinHash signatures. words: hashes of each document's words."""
    with importing("finding near duplicates", "rensa"):
        import rensa
    flat, counts = ngram_table(words, cfg.ngram_words)
    counts = np.asarray(counts, np.int64)
    short = [i for i, row in enumerate(words) if 0 < len(row) < cfg.ngram_words]
    if short:  # each is one n-gram, inserted at its position
        grams = np.concatenate([ngram_hashes(words[i], len(words[i])) for i in short])
        flat = np.insert(flat, (np.cumsum(counts) - counts)[short], grams)
        counts[short] = 1
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    minhash = rensa.RMinHash  # pyright: ignore[reportAttributeAccessIssue] - compiled, without type stubs
    matrix = minhash.digest_matrix_from_flat_token_hashes(flat, offsets, cfg.permutations, cfg.seed)
    numbers = itertools.chain.from_iterable(matrix.to_rows())
    return np.fromiter(numbers, np.uint32, len(words) * cfg.permutations).reshape(len(words), cfg.permutations)


def band_keys(found: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Returns uint64[documents, bands], hashes of the band's index and its rows of the signature."""
    keys = np.tile(mix64(np.arange(bands, dtype=np.uint64)), (len(found), 1))
    for row in range(rows):
        keys = (keys ^ found[:, row : bands * rows : rows]) * np.uint64(MULTIPLIER)
        keys ^= keys >> np.uint64(32)
    return mix64(keys)


def bands_and_rows(cfg: NearConfig) -> tuple[int, int]:
    """Returns (bands, rows) from the settings, or chosen from the threshold."""
    if cfg.bands is not None and cfg.rows is not None:
        return cfg.bands, cfg.rows
    return choose_bands(cfg.threshold, cfg.permutations, cfg.miss_weight)


def detection_curve(jaccard: float | np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Returns the probability that two documents of this similarity become candidates: 1 - (1 - J^rows)^bands."""
    return 1 - (1 - np.asarray(jaccard, np.float64) ** rows) ** bands


def verification_curve(jaccard: float | np.ndarray, threshold: float, permutations: int) -> np.ndarray:
    """Returns the probability that a candidate of this similarity is verified: the upper tail of a binomial."""
    least = math.ceil(threshold * permutations - 1e-9)
    return bdtrc(least - 1, permutations, np.asarray(jaccard, np.float64))


@functools.cache
def choose_bands(threshold: float, permutations: int, miss_weight: float = 0.5) -> tuple[int, int]:
    """Returns (bands, rows) with bands * rows <= permutations that minimize the weighted area of the two errors.

    Misses: the integral of 1 - detection_curve above the threshold. False candidates: that of detection_curve below.
    """
    below, above = ((np.arange(1000) + 0.5) / 1000 * width for width in (threshold, 1 - threshold))
    best = (math.inf, 1, 1)  # (error, bands, rows)
    for rows in range(1, permutations + 1):
        bands = permutations // rows  # for given rows, fewer bands never find more
        for count in range(1, bands + 1):
            false = detection_curve(below, count, rows).mean() * threshold
            missed = (1 - detection_curve(threshold + above, count, rows)).mean() * (1 - threshold)
            error = (1 - miss_weight) * false + miss_weight * missed
            if error < best[0] - 1e-12:
                best = (error, count, rows)
    return best[1], best[2]


def detection_table(cfg: NearConfig) -> list[tuple[float, float, float]]:
    """Returns [(Jaccard similarity, P(candidate), P(verified))] from 0.3 to 1, for reports."""
    jaccard = np.arange(6, 21) / 20
    found = detection_curve(jaccard, *bands_and_rows(cfg))
    passed = verification_curve(jaccard, cfg.threshold, cfg.permutations)
    return list(zip(jaccard.tolist(), found.tolist(), passed.tolist()))
