"""Span corruption of packed rows, for encoder-decoder models or decoder-only models with a prefix.

In the inputs, a sentinel replaces each span. The targets are the spans, each after its sentinel (T5, arXiv:1910.10683,
section 3.1.4). The numbers of noise tokens and spans depend only on the row's length, so rows of equal length give
inputs and targets of equal lengths. Spans are sampled as in T5's code: uniform random compositions divide the noise
tokens into spans and the remaining tokens into the same number of gaps. A document begins with a gap and ends with a
span.

Inputs and targets of a document have the same segment id. If a row has more documents than the space for sentinels and
end tokens allows, or more than tokens that are not noise, its shortest documents are joined to the preceding document.

B rows  R rows with documents  T tokens of a row  D documents of all rows  P pairs of a gap and a span  L tokens
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.core.batch import Batch, EncoderInput
from jaxscale.runtime.data.objective_config import (
    Denoiser,
    DenoisingConfig,
    RowLengths,
    denoised_lengths,
    denoisers,
    noise_amount,
)
from jaxscale.runtime.data.objectives.ids import SpecialIds
from jaxscale.runtime.data.stacking import aranges, find_documents, padding_row, random_floats, random_words, stack_rows


def split_noise(lengths: np.ndarray, rows: np.ndarray, budgets: np.ndarray, words: np.ndarray) -> tuple:
    """Divides the noise of each row among its documents; returns (noise tokens int64[D], spans int64[D]).

    lengths, rows: length and row of each document, sorted by row. budgets: int64[3, R] with three limits for each row:
    the noise tokens, the spans if the row were a single document, and the sum of spans and documents, which is at least
    twice the number of documents. words: random uint64[R, 2].

    The noise is proportional to the document lengths. Each document after the first adds end tokens to the inputs and
    targets. If there is no space for end tokens, the row has fewer spans.
    """
    (noise, spans, most_marks), R = budgets, budgets.shape[1]
    in_row = lambda values: np.bincount(rows, values, R).astype(np.int64)
    documents = np.bincount(rows, minlength=R)
    noise = np.minimum(noise, in_row(lengths) - documents)  # each document keeps one token
    noise_D = systematic_shares(noise, lengths, rows, words[:, 0])
    noise_D = adjust_to_totals(noise_D, np.zeros_like(lengths), lengths - 1, noise, rows)
    least, most = np.minimum(noise_D, 1), np.minimum(noise_D, lengths - noise_D)
    spans = np.minimum(np.maximum(spans, in_row(least)), in_row(most))
    spans = np.minimum(spans, most_marks - documents)
    shares = systematic_shares(spans, noise_D, rows, words[:, 1])
    return noise_D, adjust_to_totals(shares, least, most, spans, rows)


class TokenNoise(NamedTuple):
    """The noise tokens of concatenated documents."""

    is_noise: np.ndarray  # bool[L]
    begins: np.ndarray  # bool[L]: True for the first token of a span
    span: np.ndarray  # int64[L]: index of the (gap, span) pair within the document


def make_noise(
    lengths: np.ndarray, noise: np.ndarray, spans: np.ndarray, noise_words: np.ndarray, gap_words: np.ndarray
) -> TokenNoise:
    """Samples span positions. noise, spans: int64[D]. noise_words, gap_words: random uint64 per noise and gap token."""
    pairs = np.maximum(spans, 1)  # a document without noise is a single gap
    spans_P = np.zeros(int(pairs.sum()), np.int64)
    spans_P[np.repeat(spans > 0, pairs)] = random_compositions(noise, spans, noise_words)
    gaps_P = random_compositions(lengths - noise, pairs, gap_words)
    within_L, gap_L = aranges(gaps_P + spans_P), np.repeat(gaps_P, gaps_P + spans_P)
    span_L = np.repeat(aranges(pairs), gaps_P + spans_P)
    return TokenNoise(within_L >= gap_L, within_L == gap_L, span_L)


def systematic_shares(totals: np.ndarray, sizes: np.ndarray, rows: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Returns int64[D], each row's total divided among its documents in proportion to size. words: random uint64[R]."""
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
    """Clips counts to [least, most], then adjusts the counts with the most slack so that each row sums to its total."""
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
    """Returns int64[sum of parts], a uniformly random composition of each length into `parts` positive numbers.

    Parts begin at the first token of each document and at the tokens with the smallest words. words: random
    uint64[sum of lengths], one word per token.
    """
    total = int(lengths.sum())
    document, place = np.repeat(np.arange(len(lengths)), lengths), aranges(lengths)
    # Sort by document, with the first token of a document before its other tokens, and by 43 random bits.
    key = document.astype(np.uint64) << np.uint64(44) | (place > 0).astype(np.uint64) << np.uint64(43)
    order = np.argsort(key | words >> np.uint64(21), kind="stable")
    begins = np.zeros(total + 1, bool)
    begins[order] = place < np.repeat(parts, lengths)  # sorting preserves documents, so place is the rank
    begins[total] = True
    return np.diff(np.flatnonzero(begins))


class TokenStream(NamedTuple):
    """Concatenated inputs or targets of all rows."""

    ids: np.ndarray
    document: np.ndarray  # index among the documents of all rows
    origin: np.ndarray  # index of the original token


class NoisyDocuments(NamedTuple):
    """The D documents of all rows with their noise, after short documents were joined."""

    lengths: np.ndarray  # int64[D]
    rows: np.ndarray  # int64[D]: row of each document
    noise: TokenNoise
    mode_ids: np.ndarray | None  # int32[D]; None without modes


def corrupt_rows(
    cfg: DenoisingConfig, ids: SpecialIds, batch: Batch, seed: int, n: int, numbers: Sequence[int]
) -> tuple[Batch, np.ndarray]:
    """Returns (rows with corrupted spans, position of each target in its row of `batch`)."""
    B, T = batch.tokens.shape
    lengths, where = denoised_lengths(cfg, T), np.flatnonzero(batch.segment_ids)
    noisy = plan_noise(cfg, ids, lengths, batch.segment_ids, [(seed, n, number) for number in numbers])
    if noisy is None:
        padding = padding_row(lengths.row, prefix=lengths.prefix, encoder_len=lengths.encoder)
        return stack_rows([padding] * B), np.zeros((B, lengths.row), np.int32)
    inputs, targets = split_streams(ids, batch.tokens.ravel()[where], noisy)
    inputs, targets = (stream._replace(origin=where[stream.origin] % T) for stream in (inputs, targets))
    make_rows = decoder_rows if lengths.encoder is None else encoder_decoder_rows
    return make_rows(ids, inputs, targets, noisy.rows, B, lengths)


class NoisyRow(NamedTuple):
    """The documents of a row, after short documents were joined, and the amount of noise."""

    lengths: np.ndarray  # int64[documents]
    denoiser: Denoiser
    noise: int  # number of noise tokens
    spans: int  # number of spans if the row is a single document
    most_marks: int  # largest number of spans plus documents
    words: np.ndarray  # random uint64[2 + tokens]


def plan_row(cfg: DenoisingConfig, made: RowLengths, lengths: np.ndarray, key: tuple[int, int, int]) -> NoisyRow:
    """Plans the noise of a row with documents of the given lengths. key: (seed, batch, row)."""
    tokens, choices = int(lengths.sum()), denoisers(cfg)
    words = random_words(*key, tokens + 3)
    reached = np.cumsum([choice.weight for choice in choices])
    drawn = np.searchsorted(reached, random_floats(words[:1])[0] * reached[-1], side="right")
    denoiser = choices[0] if len(choices) == 1 else choices[int(drawn)]
    noise, spans = noise_amount(tokens, denoiser.noise_density, denoiser.mean_span)
    if made.encoder is None:  # space for sentinels and end tokens
        most_marks = (made.row - tokens) // 2
    else:
        most_marks = min(made.encoder - (tokens - noise), made.row - noise)
    # Each document needs at least one token that is not noise. With more documents than such tokens there would be
    # less noise, and the inputs would exceed the row length, which is computed for the full noise.
    joined = join_shortest(lengths, max(min(most_marks // 2, tokens - noise), 1))
    return NoisyRow(joined, denoiser, noise, spans, most_marks, words[1:])


def plan_noise(
    cfg: DenoisingConfig, ids: SpecialIds, made: RowLengths, segment_ids_BT: np.ndarray, keys: Sequence[tuple]
) -> NoisyDocuments | None:
    """Samples the noise of each row; returns None if all rows are padding. keys: (seed, batch, row) of each row."""
    lengths_B = [find_documents(segment_ids_T)[1] for segment_ids_T in segment_ids_BT]
    used = [row for row, lengths in enumerate(lengths_B) if len(lengths)]
    if not used:
        return None
    found = [plan_row(cfg, made, lengths_B[row], keys[row]) for row in used]
    lengths, counts = np.concatenate([row.lengths for row in found]), [len(row.lengths) for row in found]
    rows, words = np.repeat(np.arange(len(found)), counts), np.stack([row.words[:2] for row in found])
    budgets = np.array([(row.noise, row.spans, row.most_marks) for row in found]).T
    noise_words = np.concatenate([row.words[2 : 2 + row.noise] for row in found])
    gap_words = np.concatenate([row.words[2 + row.noise :] for row in found])
    modes = [ids.modes.get(row.denoiser.mode) for row in found]
    mode_ids = np.repeat(np.array(modes, np.int32), counts) if ids.modes else None
    noise_D, spans_D = split_noise(lengths, rows, budgets, words)
    token_noise = make_noise(lengths, noise_D, spans_D, noise_words, gap_words)
    return NoisyDocuments(lengths, np.repeat(used, counts), token_noise, mode_ids)


def join_shortest(lengths: np.ndarray, most: int) -> np.ndarray:
    """Joins each of the shortest documents to its preceding document, so that at most `most` remain."""
    if len(lengths) <= most:
        return lengths
    longest = np.argsort(-lengths[1:], kind="stable")[: most - 1] + 1
    return np.add.reduceat(lengths, np.sort(np.concatenate([[0], longest])))


def split_streams(ids: SpecialIds, tokens_L: np.ndarray, noisy: NoisyDocuments) -> tuple[TokenStream, TokenStream]:
    """Returns the concatenated (inputs, targets) of all rows."""
    lengths, noise = noisy.lengths, noisy.noise
    document = np.repeat(np.arange(len(lengths)), lengths)
    first, last = np.diff(document, prepend=-1) > 0, np.diff(document, append=len(lengths)) > 0
    sentinel_L = ids.sentinels[noise.span]
    end = np.full_like(tokens_L, ids.end_id)
    visible = np.where(noise.is_noise, sentinel_L, tokens_L), ~noise.is_noise | noise.begins
    input_columns = (visible, (end, last))
    if noisy.mode_ids is not None:
        input_columns = ((noisy.mode_ids[document], first), visible)
    inputs = interleave(document, *input_columns)
    targets = interleave(document, (sentinel_L, noise.begins), (tokens_L, noise.is_noise), (end, last))
    return inputs, targets


def interleave(document: np.ndarray, *columns: tuple[np.ndarray, np.ndarray]) -> TokenStream:
    """Interleaves (ids, mask) columns token by token, and removes ids whose mask is False."""
    selected = np.flatnonzero(np.stack([keep for _, keep in columns], axis=1))
    ids = np.stack([column for column, _ in columns], axis=1).ravel()[selected]
    origin = selected // len(columns)
    return TokenStream(ids, document[origin], origin)


def encoder_decoder_rows(
    ids: SpecialIds, inputs: TokenStream, targets: TokenStream, rows: np.ndarray, num_rows: int, lengths: RowLengths
) -> tuple[Batch, np.ndarray]:
    """Returns encoder rows of inputs and decoder rows of shifted targets."""
    assert lengths.encoder is not None, "encoder rows need a length"
    first = np.diff(targets.document, prepend=-1) != 0
    read = np.where(first, ids.start_id, np.roll(targets.ids, 1))
    shape, encoder_shape = (num_rows, lengths.row), (num_rows, lengths.encoder)
    index, position, segment = row_layout(targets.document, rows, shape)
    encoder_index, *encoder_fields = row_layout(inputs.document, rows, encoder_shape)
    batch = Batch(
        tokens=scatter(read, index, shape),
        targets=scatter(targets.ids, index, shape),
        positions=scatter(position, index, shape),
        segment_ids=scatter(segment, index, shape),
        weights=scatter(1, index, shape, np.float32),
        encoder=EncoderInput(*(scatter(x, encoder_index, encoder_shape) for x in (inputs.ids, *encoder_fields))),
    )
    return batch, scatter(targets.origin, index, shape)


def decoder_rows(
    ids: SpecialIds, inputs: TokenStream, targets: TokenStream, rows: np.ndarray, num_rows: int, lengths: RowLengths
) -> tuple[Batch, np.ndarray]:
    """Returns decoder-only rows with each document's inputs as a prefix, followed by its targets."""
    order = np.argsort(np.concatenate([inputs.document, targets.document]), kind="stable")
    tokens, document, origin = (np.concatenate(pair)[order] for pair in zip(inputs, targets))
    is_target = np.repeat([0, 1], [len(inputs.ids), len(targets.ids)])[order]
    shape = (num_rows, lengths.row)
    index, position, segment = row_layout(document, rows, shape)
    shift_left = lambda x_BT: np.pad(x_BT[:, 1:], ((0, 0), (0, 1)))  # pads with 0
    tokens_BT, is_target_BT = scatter(tokens, index, shape), scatter(is_target, index, shape)
    batch = Batch(
        tokens=tokens_BT,
        targets=shift_left(tokens_BT),
        positions=scatter(position, index, shape),
        segment_ids=scatter(segment, index, shape),
        weights=shift_left(is_target_BT).astype(np.float32),
        prefix=scatter(1 - is_target, index, shape),
    )
    return batch, shift_left(scatter(origin, index, shape))


def row_layout(document: np.ndarray, rows: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Returns (flat index in an array of the given shape, position in the document, segment id) of each token."""
    sizes = np.bincount(document, minlength=len(rows))
    in_row = np.bincount(rows[document], minlength=shape[0])
    assert in_row.max(initial=0) <= shape[1], f"{in_row.max()} tokens for a row of {shape[1]}"
    segments = aranges(np.bincount(rows, minlength=shape[0])) + 1
    return aranges(in_row) + np.repeat(np.arange(shape[0]) * shape[1], in_row), aranges(sizes), segments[document]


def scatter(values: np.ndarray | int, index: np.ndarray, shape: tuple[int, int], dtype: type = np.int32) -> np.ndarray:
    """Returns an array of the given shape with the values at the flat indices, and zeros elsewhere."""
    array = np.zeros(shape, dtype)
    array.reshape(-1)[index] = values
    return array
