"""Sketches for finding exact, line and near duplicates, and functions that remove duplicates from a block.

The first copy in input order is kept. Exact duplicates are found by 64-bit hashes. Among n distinct documents or lines,
about n^2 / 2^65 pairs collide and are treated as duplicates: 0.03 for 1e9 documents, 3 for 1e10 lines.

Near duplicates are documents whose sets of n-grams have a large Jaccard similarity J. A MinHash signature stores the
smallest n-gram of the document under each of several random orders; two documents agree in each number with
probability J (Broder, 1997). Signatures are cut into bands of rows. Two documents that agree in all rows of any band
are candidates, which has probability 1 - (1 - J^rows)^bands (Indyk and Motwani, 1998; Leskovec, Rajaraman, Ullman:
Mining of Massive Datasets, 3.4). dedup.py verifies candidates.

Repeated passages are found within a block by a suffix array (Lee et al., arXiv:2107.06499, section 4.1): adjacent
suffixes in sorted order that share their first K bytes are two occurrences of a substring. Every occurrence except the
first is cut. Overlapping cuts are merged, so a longer repeated passage is cut as a whole. Peak memory is about 15 bytes
per byte of text (suffix array, inverse and common prefixes: 4 bytes each), or 23 if all of the text is repeated.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import bdtrc

from jaxscale.runtime.text.document import Document, Outcome, Stage
from jaxscale.runtime.text.sources.part import importing
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate import hashes
from jaxscale.tools.corpus.curate.config import ExactConfig, LineConfig, NearConfig, SubstringConfig

SEPARATOR = 0xFF  # a byte that never occurs in UTF-8
MAX_BLOCK_BYTES = 1 << 30  # suffix arrays are int32


def exact_sketch(documents: Sequence[Document], cfg: ExactConfig) -> hashes.Sketch:
    """Returns the sketch of a block, with one key for each non-blank document."""
    found = [hashes.text_hash(document.text, lower=cfg.lower) & (1 << 64) - 1 for document in documents]
    keys = np.array(found, np.uint64)
    places = np.flatnonzero(keys != np.uint64(hashes.text_hash("") & (1 << 64) - 1))  # not blank
    return hashes.Sketch(keys[places], places)


def line_sketch(documents: Sequence[Document], cfg: LineConfig) -> hashes.Sketch:
    """Returns the sketch of a block, with one key for each line of at least cfg.min_line_characters."""
    keys, places = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for start, document in zip(first_lines(documents).tolist(), documents):
        found, lines = hashes.line_hashes(document.text, cfg.min_line_characters, lower=cfg.lower)
        keys.append(found)
        places.append(start + lines)
    return hashes.Sketch(np.concatenate(keys), np.concatenate(places))


def first_lines(documents: Sequence[Document]) -> np.ndarray:
    """Returns int64[documents], the index within the block of each document's first line."""
    counts = [document.text.count("\n") + 1 for document in documents]
    return np.cumsum([0, *counts], dtype=np.int64)[:-1]


def lines_at(documents: Sequence[Document], places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns int64[k] document indices and int64[k] line numbers for lines given by their index in the block."""
    starts = first_lines(documents)
    owners = np.searchsorted(starts, places, side="right") - 1
    return owners, places - starts[owners]


def drop_documents(documents: Sequence[Document], removed: np.ndarray, reason: str) -> list[Outcome]:
    """Returns the outcome of each document in a block. Documents whose indices are in `removed` are dropped."""
    outcomes = [Outcome(document) for document in documents]
    for place in np.asarray(removed).tolist():
        outcomes[place] = Outcome(None, reason)
    return outcomes


def cut_lines(documents: Sequence[Document], owners: np.ndarray, lines: np.ndarray, cfg: LineConfig) -> list[Outcome]:
    """Returns the outcomes of cutting line lines[i] from document owners[i], for all i. `owners` must be sorted."""
    outcomes = [Outcome(document) for document in documents]
    owners, lines = np.asarray(owners), np.asarray(lines)
    assert np.all(owners[1:] >= owners[:-1]), "not sorted"
    places, starts = np.unique(owners, return_index=True)
    for place, cut in zip(places.tolist(), np.split(lines, starts[1:])):
        document, cut_numbers = documents[place], set(cut.tolist())
        number, lines_of_text = len(cut_numbers), enumerate(document.text.split("\n"))
        text = "\n".join(line for i, line in lines_of_text if i not in cut_numbers)
        if len(text.strip()) < cfg.min_document_characters:
            outcomes[place] = Outcome(None, "repeated lines: too little is left", detail=f"{number} lines repeated")
        else:
            outcomes[place] = Outcome(document.edited(text), edits=(("repeated line", number),))
    return outcomes


def near_sketch(documents: Sequence[Document], cfg: NearConfig) -> hashes.Sketch:
    """Returns the sketch of a block, with the signatures. Each document that has words has one key per band."""
    bands, rows = bands_and_rows(cfg)
    words = hashes.hash_words(documents)
    found = signatures(words, cfg)
    owners = np.flatnonzero([len(row) > 0 for row in words])
    keys = np.tile(hashes.mix64(np.arange(bands, dtype=np.uint64)), (len(owners), 1))  # hash of the band and its rows
    for row in range(rows):
        keys = (keys ^ found[owners, row : bands * rows : rows]) * np.uint64(hashes.MULTIPLIER)
        keys ^= keys >> np.uint64(32)
    return hashes.Sketch(hashes.mix64(keys).ravel(), np.repeat(owners, bands), found)


def signatures(words: Sequence[np.ndarray], cfg: NearConfig) -> np.ndarray:
    """Returns the MinHash signatures, uint32[documents, permutations]. `words` has the word hashes of each document."""
    with importing("finding near duplicates", "rensa"):
        import rensa
    flat, counts = hashes.ngram_table(words, cfg.ngram_words)
    counts = np.asarray(counts, np.int64)
    short = [i for i, row in enumerate(words) if 0 < len(row) < cfg.ngram_words]
    if short:  # a document with fewer than cfg.ngram_words words is one n-gram
        grams = np.concatenate([hashes.ngram_hashes(words[i], len(words[i])) for i in short])
        flat = np.insert(flat, (np.cumsum(counts) - counts)[short], grams)
        counts[short] = 1
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    minhash = rensa.RMinHash  # pyright: ignore[reportAttributeAccessIssue] - compiled, without type stubs
    matrix = minhash.digest_matrix_from_flat_token_hashes(flat, offsets, cfg.permutations, cfg.seed)
    numbers = itertools.chain.from_iterable(matrix.to_rows())
    return np.fromiter(numbers, np.uint32, len(words) * cfg.permutations).reshape(len(words), cfg.permutations)


def bands_and_rows(cfg: NearConfig) -> tuple[int, int]:
    """Returns (bands, rows) from the settings, or chosen from the threshold."""
    if cfg.bands is not None and cfg.rows is not None:
        return cfg.bands, cfg.rows
    return choose_bands(cfg.threshold, cfg.permutations, cfg.miss_weight)


def detection_curve(jaccard: float | np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Returns the probability that two documents with this similarity are candidates: 1 - (1 - J^rows)^bands."""
    return 1 - (1 - np.asarray(jaccard, np.float64) ** rows) ** bands


def verification_curve(jaccard: float | np.ndarray, threshold: float, permutations: int) -> np.ndarray:
    """Returns the probability that a candidate with this similarity passes verification (a binomial tail)."""
    least = math.ceil(threshold * permutations - 1e-9)
    return bdtrc(least - 1, permutations, np.asarray(jaccard, np.float64))


@functools.cache
def choose_bands(threshold: float, permutations: int, miss_weight: float = 0.5) -> tuple[int, int]:
    """Returns (bands, rows) with bands * rows <= permutations that minimize the weighted sum of two errors.

    The errors are the integral of 1 - detection_curve above the threshold (missed duplicates), and the integral of
    detection_curve below the threshold (false candidates).
    """
    below, above = ((np.arange(1000) + 0.5) / 1000 * width for width in (threshold, 1 - threshold))
    best = (math.inf, 1, 1)  # (error, bands, rows)
    for rows in range(1, permutations + 1):
        bands = permutations // rows
        for count in range(1, bands + 1):
            false = detection_curve(below, count, rows).mean() * threshold
            missed = (1 - detection_curve(threshold + above, count, rows)).mean() * (1 - threshold)
            error = (1 - miss_weight) * false + miss_weight * missed
            if error < best[0] - 1e-12:
                best = (error, count, rows)
    return best[1], best[2]


def detection_table(cfg: NearConfig) -> list[tuple[float, float, float]]:
    """Returns [(Jaccard similarity, P(candidate), P(verified))] for similarities from 0.3 to 1, for reports."""
    jaccard = np.arange(6, 21) / 20
    found = detection_curve(jaccard, *bands_and_rows(cfg))
    passed = verification_curve(jaccard, cfg.threshold, cfg.permutations)
    return list(zip(jaccard.tolist(), found.tolist(), passed.tolist()))


def make_substring(cfg: SubstringConfig) -> Stage:
    """Returns a stage that cuts passages that occurred earlier in the block."""

    def stage(documents: Sequence[Document]) -> list[Outcome]:
        encoded = [document.text.encode("utf-8", "surrogatepass") for document in documents]
        ends = np.cumsum([len(data) + 1 for data in encoded]) - 1  # position of the separator after each text
        flat = np.frombuffer(b"".join(data + b"\xff" for data in encoded), np.uint8)
        starts, stops = repeated_passages(flat, cfg.min_bytes)
        owners = np.searchsorted(ends, starts, side="right")
        outcomes = [Outcome(document) for document in documents]
        for owner in np.unique(owners).tolist():
            mask, begin = owners == owner, int(ends[owner]) - len(encoded[owner])
            spans = list(zip((starts[mask] - begin).tolist(), (stops[mask] - begin).tolist()))
            outcomes[owner] = cut_passages(documents[owner], encoded[owner], spans, cfg)
        return outcomes

    return stage


def cut_passages(document: Document, data: bytes, spans: Sequence[tuple[int, int]], cfg: SubstringConfig) -> Outcome:
    """Cuts the given spans of UTF-8 bytes from a document, or drops the document if too little text is left."""
    text, place = "", 0
    for start, stop in [*spans, (len(data), len(data))]:
        piece = data[place:start].decode("utf-8", "surrogatepass")
        text += ("\n" if text[-1:].isalnum() and piece[:1].isalnum() else "") + piece
        place = stop
    detail = f"{sum(stop - start for start, stop in spans)} bytes repeated"
    if len(text.strip()) < cfg.min_document_characters:
        return Outcome(None, "repeated passages: too little is left", detail=detail)
    return Outcome(document.edited(text), edits=(("repeated passage", len(spans)),), detail=detail)


def repeated_passages(flat: np.ndarray, min_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns sorted int64[k] starts and int64[k] stops of the bytes to cut from UTF-8 texts with separators.

    Each span is within one text, and begins and ends at character boundaries. If a passage overlaps its own first
    occurrence ("ha ha ha ..."), the cut begins at the end of that occurrence.
    """
    if len(flat) > MAX_BLOCK_BYTES:
        raise BadInput(f"a block of {len(flat):,} bytes exceeds the limit of {MAX_BLOCK_BYTES:,}; reduce block_bytes")
    places, first = repeated_windows(flat, min_bytes)
    if not len(places):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    starts, stops = merge_spans(np.maximum(places, first + min_bytes), places + min_bytes)
    for _ in range(3):  # a UTF-8 character has at most three continuation bytes
        starts += (flat[starts] & 0xC0) == 0x80
        stops -= (flat[stops] & 0xC0) == 0x80
    nonempty = starts < stops
    return starts[nonempty], stops[nonempty]


def merge_spans(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns sorted (begins, ends), with overlapping and touching spans merged."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    splits = np.flatnonzero(begins[1:] > ends[:-1]) + 1
    return begins[np.append(0, splits)], ends[np.append(splits - 1, len(ends) - 1)]


def repeated_windows(flat: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (positions, first occurrences), int32[k] each, of repeated windows of `size` bytes."""
    with importing("finding repeated passages", "pydivsufsort"):
        import pydivsufsort
    nothing = np.zeros(0, np.int32), np.zeros(0, np.int32)
    if len(flat) <= size:
        return nothing
    flat = np.array(flat)  # the package requires a writable array
    order = pydivsufsort.divsufsort(flat)
    linked = pydivsufsort.kasai(flat, order)[:-1] >= size  # sorted suffixes i and i + 1 share their first `size` bytes
    if not linked.any():
        return nothing
    member = np.zeros(len(order), bool)
    member[:-1] |= linked
    member[1:] |= linked
    places = order[member]
    del order
    begins = np.append(True, ~linked)[member]  # True where the window differs from the previous one
    group = np.flatnonzero(begins)
    first = np.repeat(np.minimum.reduceat(places, group), np.diff(np.append(group, len(places))))
    later = places > first
    places, first = places[later], first[later]
    stop = np.flatnonzero(flat == SEPARATOR).astype(np.int32)
    inside = places + np.int32(size) <= stop[np.searchsorted(stop, places)]
    return places[inside], first[inside]
