"""Noise of span corruption (T5, arXiv:1910.10683, section 3.1.4): spans move from the inputs to the targets.

In the inputs a sentinel replaces each span; the targets are the spans, each after its sentinel. The numbers of tokens
and spans depend only on the row's length, so that rows of one length give inputs and targets of one length. Spans are
drawn as in T5's code: noise and remaining tokens are divided into equally many spans and gaps by uniform random
compositions; a document begins with a gap and ends with a span.

R rows  D documents of all rows  P pairs of a gap and a span  L tokens
"""

from typing import NamedTuple

import numpy as np

from jaxscale.runtime.data.objectives.packed_row import aranges


class NoiseBudget(NamedTuple):
    """The D documents of R rows, and the noise of each row."""

    lengths: np.ndarray  # int64[D]
    rows: np.ndarray  # int64[D]: row of each document, sorted; every row has one
    noise: np.ndarray  # int64[R]: noise tokens
    spans: np.ndarray  # int64[R]: spans, if the row is one document
    most_marks: np.ndarray  # int64[R]: capacity for spans plus documents, at least twice the documents
    words: np.ndarray  # uint64[R, 2]


def split_noise(found: NoiseBudget) -> tuple[np.ndarray, np.ndarray]:
    """Returns (noise int64[D], spans int64[D]) of each document.

    The noise of a row is shared in proportion to document lengths. Each document after the first needs two more end
    tokens, of its inputs and targets; without room for them, it has one span less, so that a full row is as long as
    that of a single document.
    """
    lengths, rows, R = found.lengths, found.rows, len(found.noise)
    in_row = lambda values: np.bincount(rows, values, R).astype(np.int64)
    documents = np.bincount(rows, minlength=R)
    noise = np.minimum(found.noise, in_row(lengths) - documents)  # each document keeps one token
    noise_D = systematic_shares(noise, lengths, rows, found.words[:, 0])
    noise_D = adjust_to_totals(noise_D, np.zeros_like(lengths), lengths - 1, noise, rows)
    least, most = np.minimum(noise_D, 1), np.minimum(noise_D, lengths - noise_D)
    spans = np.minimum(np.maximum(found.spans, in_row(least)), in_row(most))
    spans = np.minimum(spans, found.most_marks - documents)
    shares = systematic_shares(spans, noise_D, rows, found.words[:, 1])
    return noise_D, adjust_to_totals(shares, least, most, spans, rows)


class Noise(NamedTuple):
    """The noise tokens of concatenated documents."""

    is_noise: np.ndarray  # bool[L]
    begins: np.ndarray  # bool[L]: first token of a span
    span: np.ndarray  # int64[L]: index of the gap and span within the document


def make_noise(
    lengths: np.ndarray, noise: np.ndarray, spans: np.ndarray, noise_words: np.ndarray, gap_words: np.ndarray
) -> Noise:
    """Draws spans in documents of these lengths. noise, spans: int64[D], counts per document.

    noise_words, gap_words: uint64, one for each noise token and for each other token.
    """
    pairs = np.maximum(spans, 1)  # a document without noise is one gap
    spans_P = np.zeros(int(pairs.sum()), np.int64)
    spans_P[np.repeat(spans > 0, pairs)] = random_compositions(noise, spans, noise_words)
    gaps_P = random_compositions(lengths - noise, pairs, gap_words)
    within_L, gap_L = aranges(gaps_P + spans_P), np.repeat(gaps_P, gaps_P + spans_P)
    span_L = np.repeat(aranges(pairs), gaps_P + spans_P)
    return Noise(within_L >= gap_L, within_L == gap_L, span_L)


def systematic_shares(totals: np.ndarray, sizes: np.ndarray, rows: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Returns int64[D]: each row's total in proportion to the sizes, rounded up or down without bias.

    words: uint64[R]. Systematic sampling: multiples of sum / total, with a random offset, that each size covers.
    """
    row_sizes = np.maximum(np.bincount(rows, sizes, len(totals)).astype(np.int64), 1)
    offsets = (words % row_sizes.astype(np.uint64)).astype(np.int64)
    first = np.diff(rows, prepend=-1) > 0
    ends = np.cumsum(sizes)
    end_in_row = ends - (ends - sizes)[first][rows]
    reached = (totals[rows] * end_in_row + offsets[rows]) // row_sizes[rows]
    return reached - np.where(first, 0, np.roll(reached, 1))


def adjust_to_totals(
    counts: np.ndarray, least: np.ndarray, most: np.ndarray, totals: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Clips counts to their bounds and moves the difference to each row's total to the counts with the most slack."""
    counts = np.clip(counts, least, most)
    missing = totals - np.bincount(rows, counts, len(totals)).astype(np.int64)
    for row in np.flatnonzero(missing):
        inside = slice(*np.searchsorted(rows, [row, row + 1]))
        room = most[inside] - counts[inside] if missing[row] > 0 else counts[inside] - least[inside]
        order = np.argsort(-room, kind="stable")
        before = np.cumsum(room[order]) - room[order]
        moved = np.clip(abs(missing[row]) - before, 0, room[order])
        assert moved.sum() == abs(missing[row]), f"{totals[row]} does not fit between the bounds"
        counts[inside][order] += np.sign(missing[row]) * moved
    return counts


def random_compositions(lengths: np.ndarray, parts: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Returns int64[sum of parts]: a uniform random composition of each length into `parts` positive numbers.

    The first token of a document begins a part, and so do those of the others with the smallest words. words:
    uint64[sum of lengths].
    """
    total = int(lengths.sum())
    document, place = np.repeat(np.arange(len(lengths)), lengths), aranges(lengths)
    # Sort key: the document, then its first token before all others, then 43 random bits.
    key = document.astype(np.uint64) << np.uint64(44) | (place > 0).astype(np.uint64) << np.uint64(43)
    order = np.argsort(key | words >> np.uint64(21), kind="stable")
    begins = np.zeros(total + 1, bool)
    begins[order] = place < np.repeat(parts, lengths)  # sorting preserves documents, so place is the rank
    begins[total] = True
    return np.diff(np.flatnonzero(begins))
