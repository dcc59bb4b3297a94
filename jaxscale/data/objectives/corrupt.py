"""Rows of inputs and targets out of rows of text, for an encoder and its decoder or for a decoder alone.

A document stays closed: its inputs and its targets have one segment number. Where a row has more documents than marks
have room, or than tokens that are not noise, the shortest join the one before them.

B rows  T tokens of a row  D documents of all rows  L tokens of all rows
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.data.batch import Batch, EncoderInput, padding_row, stack_rows
from jaxscale.data.objective_config import (
    Denoiser,
    DenoisingConfig,
    Lengths,
    amount,
    denoised_lengths,
    denoisers,
)
from jaxscale.data.objectives.ids import SpecialIds
from jaxscale.data.objectives.packed_row import draws, find_documents, ramps, unit
from jaxscale.data.objectives.span_corruption import Noise, Rows, divide, make_noise


def most_spans(cfg: DenoisingConfig, seq_len: int) -> int:
    """Spans of a row that is one document, for any of the denoisers: sentinels that are needed."""
    return max(amount(seq_len, d.noise_density, d.mean_span).spans for d in denoisers(cfg))


class Stream(NamedTuple):
    """Inputs or targets, document after document, row after row."""

    ids: np.ndarray
    document: np.ndarray  # number among those of all rows, from 0
    origin: np.ndarray  # number of the token that it was, or that it stands for


class Closed(NamedTuple):
    """The documents of all rows that stay closed, D in all, and what is cut out of them."""

    lengths: np.ndarray  # int64[D]
    rows: np.ndarray  # int64[D]: each one's row, from 0
    noise: Noise
    mode_ids: np.ndarray | None  # int32[D], where there are modes


def corrupted(
    cfg: DenoisingConfig, ids: SpecialIds, batch: Batch, seed: int, n: int, numbers: Sequence[int]
) -> tuple[Batch, np.ndarray]:
    """(the rows with spans cut out, for each target the place in its row of `batch` that it belongs to)."""
    B, T = batch.tokens.shape
    lengths, where = denoised_lengths(cfg, T), np.flatnonzero(batch.segment_ids)
    closed = close_documents(cfg, ids, lengths, batch.segment_ids, seed, n, numbers)
    if closed is None:
        padding = padding_row(lengths.row, prefix=lengths.prefix, encoder_len=lengths.encoder)
        return stack_rows([padding] * B), np.zeros((B, lengths.row), np.int32)
    inputs, targets = split_streams(ids, batch.tokens.ravel()[where], closed)
    inputs, targets = (stream._replace(origin=where[stream.origin] % T) for stream in (inputs, targets))
    return (one_row if lengths.encoder is None else two_rows)(ids, inputs, targets, closed.rows, B, lengths)


def close_documents(
    cfg: DenoisingConfig,
    ids: SpecialIds,
    made: Lengths,
    segment_ids_BT: np.ndarray,
    seed: int,
    n: int,
    numbers: Sequence[int],
) -> Closed | None:
    """What is decided for each row by itself, from its own random words; None if there is nothing but padding."""
    choices = denoisers(cfg)
    lengths, in_rows, limits, modes, first_words, noise_words, gap_words = ([] for _ in range(7))
    for row, (number, segment_ids_T) in enumerate(zip(numbers, segment_ids_BT, strict=True)):
        documents = find_documents(segment_ids_T).lengths
        if not (tokens := int(documents.sum())):
            continue
        words = draws(seed, n, number, tokens + 3)
        denoiser = drawn(choices, words[:1])
        cut = amount(tokens, denoiser.noise_density, denoiser.mean_span)
        room = marks(made, tokens, cut.noise)
        # Each document keeps a token: more of them than there are such would lower the noise, and the inputs outgrow
        # the room that was counted with it.
        documents = join_shortest(documents, max(min(room // 2, tokens - cut.noise), 1))
        lengths.append(documents)
        in_rows.append(row)
        limits.append((cut.noise, cut.spans, room, len(documents)))
        first_words.append(words[1:3])
        noise_words.append(words[3 : 3 + cut.noise])
        gap_words.append(words[3 + cut.noise :])
        modes += [ids.modes.get(denoiser.mode)] * len(documents)
    if not lengths:
        return None
    noise, spans, room, counts = np.array(limits).T
    found = Rows(
        np.concatenate(lengths), np.repeat(np.arange(len(counts)), counts), noise, spans, room, np.stack(first_words)
    )
    cut_out = make_noise(found.lengths, *divide(found), np.concatenate(noise_words), np.concatenate(gap_words))
    modes = np.array(modes, np.int32) if ids.modes else None
    return Closed(found.lengths, np.array(in_rows)[found.rows], cut_out, modes)


def drawn(choices: tuple[Denoiser, ...], word: np.ndarray) -> Denoiser:
    """The denoiser in whose part of all weights the word, uint64[1], falls."""
    if len(choices) == 1:
        return choices[0]
    reached = np.cumsum([choice.weight for choice in choices])
    return choices[int(np.searchsorted(reached, unit(word)[0] * reached[-1], side="right"))]


def marks(lengths: Lengths, tokens: int, noise: int) -> int:
    """How many spans and documents, together, the rows have room for."""
    if lengths.encoder is None:
        return (lengths.row - tokens) // 2
    return min(lengths.encoder - (tokens - noise), lengths.row - noise)


def join_shortest(lengths: np.ndarray, most: int) -> np.ndarray:
    """The lengths of at most `most` documents: the shortest have joined the one before them, but for the first."""
    if len(lengths) <= most:
        return lengths
    longest = np.argsort(-lengths[1:], kind="stable")[: most - 1] + 1
    return np.add.reduceat(lengths, np.sort(np.concatenate([[0], longest])))


def split_streams(ids: SpecialIds, tokens_L: np.ndarray, closed: Closed) -> tuple[Stream, Stream]:
    """(inputs, targets)."""
    lengths, noise = closed.lengths, closed.noise
    document = np.repeat(np.arange(len(lengths)), lengths)
    first, last = np.diff(document, prepend=-1) > 0, np.diff(document, append=len(lengths)) > 0
    sentinel_L = ids.sentinels[noise.span]
    end = np.full_like(tokens_L, ids.end_id)
    shown = np.where(noise.is_noise, sentinel_L, tokens_L), ~noise.is_noise | noise.begins
    marked = (shown, (end, last))
    if closed.mode_ids is not None:
        marked = ((closed.mode_ids[document], first), shown)
    inputs = interleave(document, *marked)
    targets = interleave(document, (sentinel_L, noise.begins), (tokens_L, noise.is_noise), (end, last))
    return inputs, targets


def interleave(document: np.ndarray, *columns: tuple[np.ndarray, np.ndarray]) -> Stream:
    """What is kept of the columns, token after token: each has an id for every token, and whether it is kept."""
    kept = np.flatnonzero(np.stack([keep for _, keep in columns], axis=1))
    ids = np.stack([column for column, _ in columns], axis=1).ravel()[kept]
    origin = kept // len(columns)
    return Stream(ids, document[origin], origin)


def two_rows(
    ids: SpecialIds, inputs: Stream, targets: Stream, rows: np.ndarray, num_rows: int, lengths: Lengths
) -> tuple[Batch, np.ndarray]:
    """The inputs for an encoder, the targets for its decoder, which reads them one place later."""
    assert lengths.encoder is not None, "rows of an encoder have a length"
    first = np.diff(targets.document, prepend=-1) != 0
    read = np.where(first, ids.start_id, np.roll(targets.ids, 1))
    shape, encoder_shape = (num_rows, lengths.row), (num_rows, lengths.encoder)
    place, position, segment = layout(targets.document, rows, shape)
    encoder_place, *encoder_fields = layout(inputs.document, rows, encoder_shape)
    batch = Batch(
        tokens=filled(read, place, shape),
        targets=filled(targets.ids, place, shape),
        positions=filled(position, place, shape),
        segment_ids=filled(segment, place, shape),
        weights=filled(1, place, shape, np.float32),
        encoder=EncoderInput(*(filled(x, encoder_place, encoder_shape) for x in (inputs.ids, *encoder_fields))),
    )
    return batch, filled(targets.origin, place, shape)


def one_row(
    ids: SpecialIds, inputs: Stream, targets: Stream, rows: np.ndarray, num_rows: int, lengths: Lengths
) -> tuple[Batch, np.ndarray]:
    """Each document's inputs, as a prefix, and its targets behind them."""
    order = np.argsort(np.concatenate([inputs.document, targets.document]), kind="stable")
    tokens, document, origin = (np.concatenate(pair)[order] for pair in zip(inputs, targets))
    is_target = np.repeat([0, 1], [len(inputs.ids), len(targets.ids)])[order]
    shape = (num_rows, lengths.row)
    place, position, segment = layout(document, rows, shape)
    ahead = lambda x_BT: np.pad(x_BT[:, 1:], ((0, 0), (0, 1)))  # each one's next; 0 behind the last
    tokens_BT, is_target_BT = filled(tokens, place, shape), filled(is_target, place, shape)
    batch = Batch(
        tokens=tokens_BT,
        targets=ahead(tokens_BT),
        positions=filled(position, place, shape),
        segment_ids=filled(segment, place, shape),
        weights=ahead(is_target_BT).astype(np.float32),
        prefix=filled(1 - is_target, place, shape),
    )
    return batch, ahead(filled(origin, place, shape))


def layout(document: np.ndarray, rows: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(place among all numbers of an array of this shape, position in its document, number of its document in its row,
    from 1) of each token, where each row's documents stand side by side."""
    sizes = np.bincount(document, minlength=len(rows))
    in_row = np.bincount(rows[document], minlength=shape[0])
    assert in_row.max(initial=0) <= shape[1], f"{in_row.max()} tokens for a row of {shape[1]}"
    segments = ramps(np.bincount(rows, minlength=shape[0])) + 1
    return ramps(in_row) + np.repeat(np.arange(shape[0]) * shape[1], in_row), ramps(sizes), segments[document]


def filled(values: np.ndarray | int, place: np.ndarray, shape: tuple[int, int], dtype: type = np.int32) -> np.ndarray:
    """An array of this shape with the values at these places, and zeros elsewhere."""
    array = np.zeros(shape, dtype)
    array.reshape(-1)[place] = values
    return array
