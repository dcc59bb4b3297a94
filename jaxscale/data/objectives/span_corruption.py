"""Span corruption (T5, arXiv:1910.10683, section 3.1.4): spans of text are cut out of the inputs and are the targets.

Each span leaves one sentinel behind. The targets are the spans, each after its sentinel. How many tokens and spans are
cut out depends on the row's length alone, so that rows of one length make inputs and targets of one length. Which ones
is drawn as T5's own code does it: the noise is divided into spans, and the rest into as many gaps, by uniform
compositions; a document begins with a gap and ends with a span.

R rows  D documents of all rows  P pairs of a gap and a span  L tokens
"""

from typing import NamedTuple

import numpy as np

from jaxscale.data.objectives.packed_row import ramps


class Rows(NamedTuple):
    """The documents of R rows, D in all, and what each row is to lose."""

    lengths: np.ndarray  # int64[D]
    rows: np.ndarray  # int64[D]: each document's row, from 0, in order; every row has one
    noise: np.ndarray  # int64[R]: tokens to be cut out
    spans: np.ndarray  # int64[R]: number of spans, if the row is one document
    most_marks: np.ndarray  # int64[R]: spans and documents that there is room for, at least twice the documents
    words: np.ndarray  # uint64[R, 2]


def divide(found: Rows) -> tuple[np.ndarray, np.ndarray]:
    """(noise int64[D], spans int64[D]) of each document.

    The noise of a row's documents has the row's sum, and each document's share is as large as it is. A document beyond
    the first costs a mark for the end of its inputs and one for that of its targets: where there is no other room it
    takes the place of one span, so that a full row has the length of a single document's.
    """
    lengths, rows, R = found.lengths, found.rows, len(found.noise)
    in_row = lambda values: np.bincount(rows, values, R).astype(np.int64)
    documents = np.bincount(rows, minlength=R)
    noise = np.minimum(found.noise, in_row(lengths) - documents)  # a document keeps a token
    noise_D = share(noise, lengths, rows, found.words[:, 0])
    noise_D = settle(noise_D, np.zeros_like(lengths), lengths - 1, noise, rows)
    least, most = np.minimum(noise_D, 1), np.minimum(noise_D, lengths - noise_D)
    spans = np.minimum(np.maximum(found.spans, in_row(least)), in_row(most))
    spans = np.minimum(spans, found.most_marks - documents)
    return noise_D, settle(share(spans, noise_D, rows, found.words[:, 1]), least, most, spans, rows)


class Noise(NamedTuple):
    """Which tokens of documents, one after another, are cut out."""

    is_noise: np.ndarray  # bool[L]
    begins: np.ndarray  # bool[L]: the first of a span
    span: np.ndarray  # int64[L]: number of the gap and span within the document, from 0


def make_noise(
    lengths: np.ndarray, noise: np.ndarray, spans: np.ndarray, noise_words: np.ndarray, gap_words: np.ndarray
) -> Noise:
    """Draws noise and spans in documents of these lengths. noise, spans: int64[D], their numbers in each.

    noise_words, gap_words: uint64, one for each token that is noise and that is not.
    """
    pairs = np.maximum(spans, 1)  # a document without noise is one gap
    spans_P = np.zeros(int(pairs.sum()), np.int64)
    spans_P[np.repeat(spans > 0, pairs)] = random_parts(noise, spans, noise_words)
    gaps_P = random_parts(lengths - noise, pairs, gap_words)
    within_L, gap_L = ramps(gaps_P + spans_P), np.repeat(gaps_P, gaps_P + spans_P)
    span_L = np.repeat(ramps(pairs), gaps_P + spans_P)
    return Noise(within_L >= gap_L, within_L == gap_L, span_L)


def share(totals: np.ndarray, sizes: np.ndarray, rows: np.ndarray, words: np.ndarray) -> np.ndarray:
    """int64[D]: each row's total in proportion to the sizes, rounded up or down, and right on average.

    words: uint64[R]. Systematic sampling: how many multiples of sum / total, shifted by chance, each size covers.
    """
    whole = np.maximum(np.bincount(rows, sizes, len(totals)).astype(np.int64), 1)
    shift = (words % whole.astype(np.uint64)).astype(np.int64)
    first = np.diff(rows, prepend=-1) > 0
    ends = np.cumsum(sizes)
    within = ends - (ends - sizes)[first][rows]
    reached = (totals[rows] * within + shift[rows]) // whole[rows]
    return reached - np.where(first, 0, np.roll(reached, 1))


def settle(counts: np.ndarray, least: np.ndarray, most: np.ndarray, totals: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The counts within their bounds, with each row's total as their sum: what is over or missing goes where there is
    most room."""
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


def random_parts(lengths: np.ndarray, parts: np.ndarray, words: np.ndarray) -> np.ndarray:
    """int64[sum of parts]: each length as a sum of `parts` numbers above 0, all such sums equally likely.

    The first token of a document begins a part; of the others those begin one whose words are the least. words:
    uint64[sum of lengths].
    """
    total = int(lengths.sum())
    owner, place = np.repeat(np.arange(len(lengths)), lengths), ramps(lengths)
    # One number to sort by: the document, then the first token before all others, then 43 bits of chance.
    key = owner.astype(np.uint64) << np.uint64(44) | (place > 0).astype(np.uint64) << np.uint64(43)
    order = np.argsort(key | words >> np.uint64(21), kind="stable")
    begins = np.zeros(total + 1, bool)
    begins[order] = place < np.repeat(parts, lengths)  # sorted, owners stand where they stood: place is the rank
    begins[total] = True
    return np.diff(np.flatnonzero(begins))
