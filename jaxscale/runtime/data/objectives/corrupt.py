"""Span corruption of packed rows, for encoder-decoder models or decoder-only models with a prefix.

Inputs and targets of a document have the same segment id. If a row has more documents than its sentinels and end tokens
have room for, or than tokens that are not noise, the shortest documents are joined to the previous one.

B rows  T tokens of a row  D documents of all rows  L tokens of all rows
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.core.batch import Batch, EncoderInput, padding_row, stack_rows
from jaxscale.runtime.data.objective_config import (
    Denoiser,
    DenoisingConfig,
    RowLengths,
    denoised_lengths,
    denoisers,
    noise_amount,
)
from jaxscale.runtime.data.objectives.ids import SpecialIds
from jaxscale.runtime.data.objectives.packed_row import aranges, find_documents, random_floats, random_words
from jaxscale.runtime.data.objectives.span_corruption import Noise, NoiseBudget, make_noise, split_noise


def max_spans(cfg: DenoisingConfig, seq_len: int) -> int:
    """Returns the largest number of spans of a row of one document, which is the number of sentinels needed."""
    return max(noise_amount(seq_len, d.noise_density, d.mean_span).spans for d in denoisers(cfg))


class TokenStream(NamedTuple):
    """Inputs or targets of all rows, concatenated."""

    ids: np.ndarray
    document: np.ndarray  # index among the documents of all rows
    origin: np.ndarray  # index of the original token


class NoisyDocuments(NamedTuple):
    """The D documents of all rows after joining, and their noise."""

    lengths: np.ndarray  # int64[D]
    rows: np.ndarray  # int64[D]: row of each document
    noise: Noise
    mode_ids: np.ndarray | None  # int32[D], or None without modes


def corrupt_rows(
    cfg: DenoisingConfig, ids: SpecialIds, batch: Batch, seed: int, n: int, numbers: Sequence[int]
) -> tuple[Batch, np.ndarray]:
    """Returns (rows with spans cut out, position of each target in its row of `batch`)."""
    B, T = batch.tokens.shape
    lengths, where = denoised_lengths(cfg, T), np.flatnonzero(batch.segment_ids)
    noisy = plan_noise(cfg, ids, lengths, batch.segment_ids, seed, n, numbers)
    if noisy is None:
        padding = padding_row(lengths.row, prefix=lengths.prefix, encoder_len=lengths.encoder)
        return stack_rows([padding] * B), np.zeros((B, lengths.row), np.int32)
    inputs, targets = split_streams(ids, batch.tokens.ravel()[where], noisy)
    inputs, targets = (stream._replace(origin=where[stream.origin] % T) for stream in (inputs, targets))
    make_rows = decoder_rows if lengths.encoder is None else encoder_decoder_rows
    return make_rows(ids, inputs, targets, noisy.rows, B, lengths)


def plan_noise(
    cfg: DenoisingConfig,
    ids: SpecialIds,
    made: RowLengths,
    segment_ids_BT: np.ndarray,
    seed: int,
    n: int,
    numbers: Sequence[int],
) -> NoisyDocuments | None:
    """Draws the noise of each row from the row's own random words; None if all rows are padding."""
    choices = denoisers(cfg)
    lengths, in_rows, limits, modes, first_words, noise_words, gap_words = ([] for _ in range(7))
    for row, (number, segment_ids_T) in enumerate(zip(numbers, segment_ids_BT, strict=True)):
        documents = find_documents(segment_ids_T).lengths
        if not (tokens := int(documents.sum())):
            continue
        words = random_words(seed, n, number, tokens + 3)
        denoiser = draw_denoiser(choices, words[:1])
        cut = noise_amount(tokens, denoiser.noise_density, denoiser.mean_span)
        capacity = max_marks(made, tokens, cut.noise)
        # Each document needs one token that is not noise. With more documents than such tokens the noise would shrink
        # and the inputs would exceed the row length, which assumes the full noise.
        documents = join_shortest(documents, max(min(capacity // 2, tokens - cut.noise), 1))
        lengths.append(documents)
        in_rows.append(row)
        limits.append((cut.noise, cut.spans, capacity, len(documents)))
        first_words.append(words[1:3])
        noise_words.append(words[3 : 3 + cut.noise])
        gap_words.append(words[3 + cut.noise :])
        modes += [ids.modes.get(denoiser.mode)] * len(documents)
    if not lengths:
        return None
    noise, spans, capacity, counts = np.array(limits).T
    rows = np.repeat(np.arange(len(counts)), counts)
    budget = NoiseBudget(np.concatenate(lengths), rows, noise, spans, capacity, np.stack(first_words))
    cut_out = make_noise(budget.lengths, *split_noise(budget), np.concatenate(noise_words), np.concatenate(gap_words))
    modes = np.array(modes, np.int32) if ids.modes else None
    return NoisyDocuments(budget.lengths, np.array(in_rows)[budget.rows], cut_out, modes)


def draw_denoiser(choices: tuple[Denoiser, ...], word: np.ndarray) -> Denoiser:
    """Draws a denoiser by weight with the random word uint64[1]."""
    if len(choices) == 1:
        return choices[0]
    reached = np.cumsum([choice.weight for choice in choices])
    return choices[int(np.searchsorted(reached, random_floats(word)[0] * reached[-1], side="right"))]


def max_marks(lengths: RowLengths, tokens: int, noise: int) -> int:
    """Returns the number of spans plus documents that the rows have room for."""
    if lengths.encoder is None:
        return (lengths.row - tokens) // 2
    return min(lengths.encoder - (tokens - noise), lengths.row - noise)


def join_shortest(lengths: np.ndarray, most: int) -> np.ndarray:
    """Joins the shortest documents, except the first, to the previous one until at most `most` remain."""
    if len(lengths) <= most:
        return lengths
    longest = np.argsort(-lengths[1:], kind="stable")[: most - 1] + 1
    return np.add.reduceat(lengths, np.sort(np.concatenate([[0], longest])))


def split_streams(ids: SpecialIds, tokens_L: np.ndarray, noisy: NoisyDocuments) -> tuple[TokenStream, TokenStream]:
    """Returns (inputs, targets)."""
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
    """Interleaves (ids, mask) columns token by token, and drops masked-out ids."""
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
    """Returns decoder-only rows: each document's inputs as a prefix, then its targets."""
    order = np.argsort(np.concatenate([inputs.document, targets.document]), kind="stable")
    tokens, document, origin = (np.concatenate(pair)[order] for pair in zip(inputs, targets))
    is_target = np.repeat([0, 1], [len(inputs.ids), len(targets.ids)])[order]
    shape = (num_rows, lengths.row)
    index, position, segment = row_layout(document, rows, shape)
    shift_left = lambda x_BT: np.pad(x_BT[:, 1:], ((0, 0), (0, 1)))  # shifts left by one; 0 at the end
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
    """Returns (flat index in an array of this shape, position in its document, segment id) of each token."""
    sizes = np.bincount(document, minlength=len(rows))
    in_row = np.bincount(rows[document], minlength=shape[0])
    assert in_row.max(initial=0) <= shape[1], f"{in_row.max()} tokens for a row of {shape[1]}"
    segments = aranges(np.bincount(rows, minlength=shape[0])) + 1
    return aranges(in_row) + np.repeat(np.arange(shape[0]) * shape[1], in_row), aranges(sizes), segments[document]


def scatter(values: np.ndarray | int, index: np.ndarray, shape: tuple[int, int], dtype: type = np.int32) -> np.ndarray:
    """Returns an array of this shape with the values at these flat indices, and zeros elsewhere."""
    array = np.zeros(shape, dtype)
    array.reshape(-1)[index] = values
    return array
