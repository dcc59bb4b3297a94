"""Scorer of spans of token ids, which packs them into rows, runs a compiled program and sums the scores by span.

Each row has several spans, packed like documents in training, so that there is little padding and few shapes. The
packing does not depend on the mesh or the batch size.

B batch  T position
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxscale.core.batch import Batch
from jaxscale.core.models.sharded import ShardedModel
from jaxscale.core.shardings import replicated
from jaxscale.runtime.data.best_fit import pack_bins
from jaxscale.runtime.hosts.meshes import one_at_a_time, put_rows

MIN_ROW = 32  # tokens; longer rows have a power of two times as many, so that few programs are compiled


class TokenSpan(NamedTuple):
    """Token ids. Ids at index `first` and later are scored, each given all preceding ids."""

    ids: np.ndarray  # int32[n]
    first: int  # at least 1: the first id is never scored

    @property
    def num_positions(self) -> int:
        """Number of positions of the span in a row: one per id except the last, which is only a target."""
        return max(len(self.ids) - 1, 0)


class Scores(NamedTuple):
    """Scores of n spans."""

    nats: np.ndarray  # float64[n]: minus the log-likelihood
    likeliest: np.ndarray  # bool[n]: True if every scored token is the likeliest at its position
    tokens: np.ndarray  # int64[n]: number of scored tokens


@dataclasses.dataclass(frozen=True)
class PackedSpans:
    """Spans packed into rows of equal length. Equal spans are scored once, so that their scores are bitwise equal."""

    spans: tuple[TokenSpan, ...]
    indices: np.ndarray  # int64[n]: index in `spans` of each requested span
    row_tokens: int
    rows: tuple[tuple[int, ...], ...]  # indices of the spans of each row, in order

    def batches(self, rows: int, multiple: int) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yields (batch of [rows, T], int32[rows, T] with the index of the span at each position, or -1)."""
        for begin in range(0, len(self.rows), rows):
            yield fill(self.spans, self.rows[begin : begin + rows], rows, self.row_tokens + -self.row_tokens % multiple)


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A compiled program that scores rows, and the sharding of the rows. Does not contain model parameters."""

    step: Callable[[Any, Batch], tuple[jax.Array, jax.Array]]  # (params, batch) -> (nats_BT, likeliest_BT), replicated
    sharding: NamedSharding  # sharding of the rows
    shards: int  # number of batch shards
    multiple: int  # the row length must be a multiple of this
    batch_tokens: int  # approximate size of a batch

    @classmethod
    def of(cls, model: ShardedModel, batch_tokens: int) -> "Scorer":
        """Returns a scorer for a model on its mesh. The program is compiled at the first use of each row length."""
        return cls(
            step=one_at_a_time(jax.jit(model.target_scores, out_shardings=replicated(model.mesh)), model.mesh),
            sharding=model.rows_sharding,
            shards=model.plan.batch_axes.num_shards,
            multiple=model.plan.position_multiple,
            batch_tokens=batch_tokens,
        )

    def score(self, params: Any, spans: Sequence[TokenSpan], row_tokens: int | None = None) -> Scores:
        """Returns the same scores in all processes. row_tokens: row length; None: row_length() of the longest span."""
        return self.score_packed(params, pack_spans(spans, row_tokens))

    def score_packed(self, params: Any, packed: PackedSpans) -> Scores:
        """Returns the scores of packed spans, the same in all processes."""
        nats, likeliest = np.zeros(len(packed.spans)), np.ones(len(packed.spans), bool)
        rows = max(1, self.batch_tokens // packed.row_tokens // self.shards) * self.shards
        pending: list[tuple[tuple[jax.Array, jax.Array], np.ndarray]] = []
        for batch, owners_BT in packed.batches(rows, self.multiple):
            sharded = put_rows(batch, rows=list(range(rows)), num_rows=rows, sharding=self.sharding)
            pending.append((self.step(params, sharded), owners_BT))
            if len(pending) > 1:
                add_up(*pending.pop(0), nats, likeliest)  # the previous batch, while the device computes this one
        for last in pending:
            add_up(*last, nats, likeliest)
        tokens = np.array([len(span.ids) - span.first for span in packed.spans], np.int64)
        return Scores(nats[packed.indices], likeliest[packed.indices], tokens[packed.indices])


def pack_spans(spans: Sequence[TokenSpan], row_tokens: int | None = None) -> PackedSpans:
    """Packs spans into rows. row_tokens: row length; None: row_length() of the longest span."""
    longest = max((span.num_positions for span in spans), default=1)
    row_tokens = row_length(longest) if row_tokens is None else row_tokens
    assert longest <= row_tokens, f"a span of {longest} tokens in rows of {row_tokens}"
    numbers: dict[tuple[int, bytes], int] = {}
    indices = [numbers.setdefault((first, np.asarray(ids, np.int32).tobytes()), len(numbers)) for ids, first in spans]
    distinct = tuple(spans[i] for i in np.unique(indices, return_index=True)[1])
    scored = [number for number, (ids, first) in enumerate(distinct) if len(ids) > first]  # other spans are in no row
    assert all(distinct[number].first >= 1 for number in scored), "the first id of a span has nothing before it"
    bins = pack_bins(np.array([distinct[number].num_positions for number in scored], np.int64), row_tokens)
    rows: list[list[int]] = [[] for _ in range(int(bins.max(initial=-1)) + 1)]
    for number, row in zip(scored, bins.tolist()):
        rows[row].append(number)
    return PackedSpans(distinct, np.array(indices, np.int64), row_tokens, tuple(map(tuple, rows)))


def row_length(tokens: int, longest: int | None = None) -> int:
    """Returns a row length for spans of up to `tokens` tokens: MIN_ROW times a power of two, at most `longest`."""
    length = MIN_ROW << (max(tokens - 1, 0) // MIN_ROW).bit_length()
    return max(min(length, longest or length), tokens)


def fill(
    spans: Sequence[TokenSpan], chosen: Sequence[Sequence[int]], rows: int, row_tokens: int
) -> tuple[Batch, np.ndarray]:
    """Returns (batch, index of the span at each position) for the chosen rows, padded with rows of weight 0."""
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
    """Adds the scores of a batch to the sums of its spans, in float64 and in order of position."""
    nats_BT, likeliest_BT = (np.asarray(array)[:, : owners_BT.shape[1]] for array in found)
    scored = owners_BT >= 0
    owners = owners_BT[scored]
    np.add.at(nats, owners, nats_BT[scored].astype(np.float64))
    np.logical_and.at(likeliest, owners, likeliest_BT[scored])
