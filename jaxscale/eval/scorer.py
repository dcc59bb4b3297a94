"""Likelihoods of pieces of text: spans of token ids laid into rows, read by a compiled program, summed for each span.

Rows are filled with several spans each, as documents are in training, so that little is padding and one shape serves
all. Which spans share a row does not depend on the mesh or on how many rows are read at a time.

B batch  T position
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxscale.data.batch import Batch
from jaxscale.data.bins import pack_bins
from jaxscale.models.sharded import ShardedModel
from jaxscale.sharding.shardings import put_rows, replicated

LEAST_ROW = 32  # tokens; a longer row has twice as many, and so on: few shapes, and few programs


class Span(NamedTuple):
    """Token ids, of which those from `first` on are scored, each by all that stand before it here."""

    ids: np.ndarray  # int32[n]
    first: int  # 1 or more: the first id of all is never scored

    @property
    def places(self) -> int:
        """Positions that it takes in a row: every id but the last is read."""
        return max(len(self.ids) - 1, 0)


class Scores(NamedTuple):
    """Of each span."""

    nats: np.ndarray  # float64[n]: minus the log-likelihood
    likeliest: np.ndarray  # bool[n]: whether no scored token had a likelier one in its place
    tokens: np.ndarray  # int64[n]: that were scored


@dataclasses.dataclass(frozen=True)
class Laid:
    """Spans in rows of one length. Equal ones are there once, so that equal answers are equally likely to the bit."""

    spans: tuple[Span, ...]
    places: np.ndarray  # int64[n]: where each span that was asked for is among these
    row_tokens: int
    rows: tuple[tuple[int, ...], ...]  # of each row the numbers of its spans, in order

    def batches(self, rows: int, multiple: int) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yields (batch [rows, T], int32[rows, T]: the number of the span that a position is of, -1 for none)."""
        for begin in range(0, len(self.rows), rows):
            yield fill(self.spans, self.rows[begin : begin + rows], rows, self.row_tokens + -self.row_tokens % multiple)


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A compiled program that scores rows, and how rows are put before it. The parameters are handed over anew."""

    step: Callable[[Any, Batch], tuple[jax.Array, jax.Array]]  # (params, batch) -> (nats_BT, likeliest_BT), replicated
    sharding: NamedSharding  # of the rows
    shards: int  # that rows are cut into
    multiple: int  # of a row's length
    batch_tokens: int  # about as many are read at a time

    @classmethod
    def of(cls, model: ShardedModel, batch_tokens: int) -> "Scorer":
        """Of a model on its mesh, compiled for each row length when it is first met."""
        return cls(
            step=jax.jit(model.target_scores, out_shardings=replicated(model.mesh)),
            sharding=model.rows_sharding,
            shards=model.batch_axes.num_shards,
            multiple=model.position_multiple,
            batch_tokens=batch_tokens,
        )

    def rows_of(self, row_tokens: int) -> int:
        """Rows that are read at a time."""
        return max(1, self.batch_tokens // row_tokens // self.shards) * self.shards

    def score(self, params: Any, spans: Sequence[Span], row_tokens: int | None = None) -> Scores:
        """What the model makes of the spans. The same in all processes, which call it with the same spans.

        row_tokens: of the rows; none: what the longest span needs, as row_length has it.
        """
        return self.score_laid(params, lay(spans, row_tokens))

    def score_laid(self, params: Any, laid: Laid) -> Scores:
        """As score()."""
        nats, likeliest = np.zeros(len(laid.spans)), np.ones(len(laid.spans), bool)
        rows = self.rows_of(laid.row_tokens)
        pending = None
        for batch, owners_BT in laid.batches(rows, self.multiple):
            placed = put_rows(batch, rows=list(range(rows)), num_rows=rows, sharding=self.sharding)
            started = self.step(params, placed), owners_BT
            if pending is not None:
                add_up(*pending, nats, likeliest)  # of the rows before: the device is not idle meanwhile
            pending = started
        if pending is not None:
            add_up(*pending, nats, likeliest)
        tokens = np.array([len(span.ids) - span.first for span in laid.spans], np.int64)
        return Scores(nats[laid.places], likeliest[laid.places], tokens[laid.places])


def lay(spans: Sequence[Span], row_tokens: int | None = None) -> Laid:
    """The spans in rows of so many tokens, to be scored once or again and again; none: what the longest one needs."""
    longest = max((span.places for span in spans), default=1)
    row_tokens = row_length(longest) if row_tokens is None else row_tokens
    assert longest <= row_tokens, f"a span of {longest} tokens in rows of {row_tokens}"
    numbers: dict[tuple[int, bytes], int] = {}
    places = [numbers.setdefault((first, np.asarray(ids, np.int32).tobytes()), len(numbers)) for ids, first in spans]
    kept = tuple(spans[i] for i in np.unique(places, return_index=True)[1])
    return Laid(kept, np.array(places, np.int64), row_tokens, place_spans(kept, row_tokens))


def row_length(tokens: int, longest: int | None = None) -> int:
    """The length of rows for spans of up to so many tokens: one of few, and not more than `longest`."""
    length = LEAST_ROW
    while length < tokens:
        length *= 2
    return max(min(length, longest or length), tokens)


def place_spans(spans: Sequence[Span], row_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Which spans lie in which row. A span with nothing to score is in none."""
    kept = [number for number, span in enumerate(spans) if len(span.ids) > span.first]
    if not kept:
        return ()
    assert all(spans[number].first >= 1 for number in kept), "the first id of a span has nothing before it"
    bins = pack_bins(np.array([spans[number].places for number in kept], np.int64), row_tokens)
    rows: list[list[int]] = [[] for _ in range(int(bins.max()) + 1)]
    for number, row in zip(kept, bins.tolist()):
        rows[row].append(number)
    return tuple(map(tuple, rows))


def fill(
    spans: Sequence[Span], chosen: Sequence[Sequence[int]], rows: int, row_tokens: int
) -> tuple[Batch, np.ndarray]:
    """(batch, the span of each position) of these rows; those that are missing weigh nothing."""
    make = functools.partial(np.zeros, (rows, row_tokens))
    tokens, targets, positions, segments = (make(np.int32) for _ in range(4))
    weights, owners = make(np.float32), np.full((rows, row_tokens), -1, np.int32)
    for row, numbers in enumerate(chosen):
        begin = 0
        for segment, number in enumerate(numbers, 1):
            ids, first = spans[number]
            end = begin + len(ids) - 1
            tokens[row, begin:end], targets[row, begin:end] = ids[:-1], ids[1:]
            positions[row, begin:end] = np.arange(len(ids) - 1)
            segments[row, begin:end] = segment
            weights[row, begin + first - 1 : end] = 1.0
            owners[row, begin + first - 1 : end] = number
            begin = end
    return Batch(tokens, targets, positions, segments, weights), owners


def add_up(found: tuple[jax.Array, jax.Array], owners_BT: np.ndarray, nats: np.ndarray, likeliest: np.ndarray) -> None:
    """Adds what the device found to the sums of the spans, in float64, position after position."""
    nats_BT, likeliest_BT = (np.asarray(array)[:, : owners_BT.shape[1]] for array in found)
    scored = owners_BT >= 0
    owners = owners_BT[scored]
    np.add.at(nats, owners, nats_BT[scored].astype(np.float64))
    np.logical_and.at(likeliest, owners, likeliest_BT[scored])
