"""Which source each row of the stream is taken from: stated weights, in stages, with caps, by arithmetic.

Within a stage the sources follow a fixed pattern of about a thousand rows in which each has its whole number of places,
spread so evenly that every prefix is less than one row from its share. So any window of rows within a stage holds each
source's share to within two rows, and the row at any place is found in constant time, and the place of any row.

G sources  S stages  L rows of a pattern
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale import units
from jaxscale.data.config import MixtureSetting, Weights, mixture_names, stages_of
from jaxscale.system.exits import BadInput

PATTERN_ROWS = (512, 2048)  # lengths that are tried: the one whose whole numbers come nearest to the weights is taken
LONGEST_PATTERN = 16_384  # where a weight is smaller than one row of the usual ones
NEAR = 1024
Detour = tuple[int, int, str]  # first batch, number of batches, source


class Pattern(NamedTuple):
    """L rows that repeat."""

    sources_L: np.ndarray  # int64: the source of each
    turns_L: np.ndarray  # int64: how many of that source come before it
    counts_G: np.ndarray  # int64: places of each source
    before: np.ndarray  # int64[L + 1, G]: rows of each source before each place

    def place(self, source: int, turns: np.ndarray) -> np.ndarray:
        """Where in the repeated pattern a source's rows 0, 1, 2, ... come."""
        cycles, rest = np.divmod(turns, self.counts_G[source])
        return cycles * len(self.sources_L) + np.flatnonzero(self.sources_L == source)[rest]

    def taken(self, rows: int) -> np.ndarray:
        """int64[G]: rows of each source among the first `rows`."""
        cycles, rest = divmod(rows, len(self.sources_L))
        return cycles * self.counts_G + self.before[rest]


class Stage(NamedTuple):
    """From its first row to the next stage's."""

    first_row: int
    pattern: Pattern


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """The stages of a run as places in its stream of rows; the last one has no end. A source's rows come in one order,
    whatever the weights do: another stage goes on where the one before has stopped."""

    names: tuple[str, ...]  # of the G sources
    stages: tuple[Stage, ...]
    lines: tuple[str, ...] = ()  # what people should know of it
    reported_names: tuple[str, ...] = ()  # mixture_names of the setting
    starts: Mapping[str, int] = dataclasses.field(default_factory=dict)  # first batch of each stage, as it is written

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        return np.array([stage.first_row for stage in self.stages])

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """int64[S, G]: rows of each source before each stage."""
        before = [np.zeros(len(self.names), np.int64)]
        for stage, following in zip(self.stages, self.stages[1:]):
            before.append(before[-1] + stage.pattern.taken(following.first_row - stage.first_row))
        return np.stack(before)

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        """int64[G]; a source that the setting does not name has no rows, and no number."""
        return np.array([self.reported_names.index(name) if name in self.reported_names else -1 for name in self.names])

    def locate(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, how many of its rows came before) of each place int64[m] of the stream."""
        sources, turns = np.empty_like(places), np.empty_like(places)
        numbers = self._starts.searchsorted(places, side="right") - 1
        for number in np.unique(numbers):
            here, (first, pattern) = numbers == number, self.stages[number]
            cycles, rest = np.divmod(places[here] - first, len(pattern.sources_L))
            found = pattern.sources_L[rest]
            sources[here] = found
            turns[here] = self._before[number, found] + cycles * pattern.counts_G[found] + pattern.turns_L[rest]
        return sources, turns

    def source_numbers(self, places: np.ndarray) -> np.ndarray:
        """The number, in mixture_names of the setting, of the source of each place."""
        return self._numbers[self.locate(places)[0]]

    def find(self, source: int, turns: np.ndarray) -> np.ndarray:
        """The places of a source's rows: the inverse of locate. Raises BadInput for one that never comes."""
        places = np.empty_like(turns)
        numbers = self._before[:, source].searchsorted(turns, side="right") - 1
        for number in np.unique(numbers):
            here, (first, pattern) = numbers == number, self.stages[number]
            if not pattern.counts_G[source]:
                raise BadInput(f"the mixture never comes to row {turns[here].min()} of {self.names[source]}")
            places[here] = first + pattern.place(source, turns[here] - self._before[number, source])
        return places

    def taken(self, rows: int) -> np.ndarray:
        """int64[G]: rows of each source among the first `rows` of the stream."""
        number = max(0, int(self._starts.searchsorted(rows, side="left")) - 1)
        first, pattern = self.stages[number]
        return self._before[number] + pattern.taken(int(rows) - first)

    def record(self) -> list[list[Any]]:
        """Plain data that stand for it: [first row, {source: its rows in a pattern}] for each stage."""
        named = lambda counts: {name: int(count) for name, count in zip(self.names, counts) if count}
        return [[stage.first_row, named(stage.pattern.counts_G)] for stage in self.stages]


def from_record(record: Sequence[Sequence[Any]], names: Sequence[str]) -> Mixture:
    """The mixture of this record. names: of the sources, in the corpus's order, and as losses are reported."""
    counts = [np.array([named.get(name, 0) for name in names], np.int64) for _, named in record]
    stages = [Stage(int(first), pattern_of(counts_G)) for (first, _), counts_G in zip(record, counts)]
    return Mixture(tuple(names), tuple(stages), reported_names=tuple(names))


def same_past(recorded: Sequence[Sequence[Any]] | None, now: Sequence[Sequence[Any]] | None, rows: int) -> bool:
    """True if two records (None: no mixture) give the same first `rows` rows of the stream."""
    past = lambda record: record and [list(stage) for stage in record if stage[0] < rows]
    return rows == 0 or past(recorded) == past(now)


def pattern_of(counts_G: np.ndarray) -> Pattern:
    """The pattern in which each source has its count of places."""
    sources_L = spread(counts_G)
    each_L_G = (sources_L[:, None] == np.arange(len(counts_G))).astype(np.int64)
    before = np.concatenate([np.zeros_like(each_L_G[:1]), np.cumsum(each_L_G, axis=0)])
    return Pattern(sources_L, before[np.arange(len(sources_L)), sources_L], counts_G, before)


def whole_counts(weights_G: np.ndarray) -> np.ndarray:
    """int64[G]: whole numbers in nearly these proportions, by largest remainders, with the sum that suits best.

    Raises: BadInput where a weight is too small for the longest pattern. weights_G: they sum to 1.
    """
    for shortest, longest in (PATTERN_ROWS, (PATTERN_ROWS[1], LONGEST_PATTERN)):
        lengths = np.arange(shortest, longest + 1)
        shares = lengths[:, None] * weights_G
        floors = np.floor(shares + 1e-9).astype(np.int64)
        rank = np.argsort(np.argsort(floors - shares, axis=1, kind="stable"), axis=1, kind="stable")
        counts = floors + (rank < (lengths - floors.sum(axis=1))[:, None])
        lost = ((counts == 0) & (weights_G > 0)).any(axis=1)
        errors = np.abs(counts / lengths[:, None] - weights_G).max(axis=1).round(12) + lost
        best = np.lexsort((np.abs(lengths - NEAR), errors))[0]
        if not lost[best]:
            return counts[best]
    raise BadInput(
        f"a weight of data.mixture is {weights_G[weights_G > 0].min():.2g} of its stage, less than 1 in "
        f"{LONGEST_PATTERN}; raise it or leave the source out"
    )


def spread(counts_G: np.ndarray) -> np.ndarray:
    """int64[L]: each source as often as counted, every prefix less than one row from its share.

    The chairman assignment problem (Tijdeman 1980, doi:10.1016/0012-365X(80)90269-1): of the sources that lag far
    enough behind, the one that would be too late first.
    """
    L, sources = int(counts_G.sum()), np.flatnonzero(counts_G).tolist()
    if len(sources) == 1:
        return np.full(L, sources[0])
    counts, lags = counts_G[sources].tolist(), [0] * len(sources)  # L times the rows that a source is behind its share
    margin = 2 * len(sources) - 2
    latest = L - L / margin
    order = []
    for _ in range(L):
        lags = [lag + count for lag, count in zip(lags, counts)]
        _, chosen = min(
            ((latest - lag) / count, i) for i, (lag, count) in enumerate(zip(lags, counts)) if lag * margin >= L
        )
        lags[chosen] -= L
        order.append(sources[chosen])
    return np.array(order)


def plan_mixture(
    mixture: MixtureSetting,
    max_epochs: Mapping[str, float],
    *,
    sizes: Mapping[str, int],
    seq_len: int,
    rows_per_batch: units.BatchSizes | int,
    total_steps: int,
    num_batches: int,
    detours: Sequence[Detour] = (),
    tokens_of: Mapping[str, int] | None = None,
    begun: Mapping[str, int] | None = None,
) -> Mixture:
    """The stages of a run, with one more wherever a source has used up its epochs and leaves its share to the others.

    Args: sizes: {source: its rows}. total_steps: what '80%' refers to. num_batches: batches up to the run's end.
    detours: stages of one source in between. tokens_of: {source: its tokens}, for the message alone. begun: `starts` of
    stages that have begun, which stay there: those written in '%' follow total_steps until then.
    Raises: BadInput for a source that is not there, and where all have used up their epochs before the end.
    """
    rows = units.BatchSizes.of(rows_per_batch)
    tokens = rows.times(seq_len)
    for _, weights in stages_of(mixture):
        check_sources("mixture", weights, sizes)
    check_sources("max_epochs", max_epochs, sizes)
    names = tuple(sizes)
    known = dict(
        batch_tokens=None if rows.vary else tokens.largest,
        train_tokens=tokens.begin(total_steps),
        epoch_tokens=sum(sizes.values()) * seq_len,
    )
    written = start_batches(mixture, tokens, begun or {}, seq_len=seq_len, **known)
    starts = with_detours([(start, weights) for start, weights, _ in written], detours)
    caps = {names.index(name): int(number * sizes[name]) for name, number in max_epochs.items()}
    ends = [start for start, _ in starts[1:]] + [max(num_batches, starts[-1][0] + 1)]
    stages: list[Stage] = []
    lines, taken = [], np.zeros(len(names), np.int64)
    for (start, weights), end in zip(starts, ends):
        if start and start >= num_batches:
            break
        row, end_row = rows.begin(start), rows.begin(min(end, max(num_batches, 1)))
        weights_G = np.array([weights.get(name, 0.0) for name in names], np.float64)
        while row < end_row:
            for source in [source for source, cap in caps.items() if weights_G[source] and taken[source] >= cap]:
                weights_G[source] = 0
                lines.append(
                    f"{names[source]} has had its {max_epochs[names[source]]:g} epochs after {row * seq_len:,} tokens "
                    "of the run; its share goes to the others"
                )
            if not weights_G.any():
                raise BadInput(
                    f"data.max_epochs={dict(max_epochs)} lets every source of data.mixture run out after "
                    f"{row * seq_len:,} tokens, and the run has {tokens.begin(num_batches):,}; raise a cap, add a "
                    "source, or lower train_tokens"
                )
            pattern = pattern_of(whole_counts(weights_G / weights_G.sum()))
            told = realised(pattern, names, weights_G) + shares_in_tokens(pattern, sizes, tokens_of or {})
            lines.append(f"mixture from token {row * seq_len:,}: {told}")
            stop = end_row
            for source, cap in caps.items():
                if weights_G[source]:
                    stop = min(stop, row + int(pattern.place(source, np.array([cap - taken[source]]))[0]))
            stages.append(Stage(row, pattern))
            taken = taken + pattern.taken(stop - row)
            row = stop
    epochs = ", ".join(f"{name} {had / size:.3g}" for (name, size), had in zip(sizes.items(), taken) if had)
    lines.append(f"epochs of each source in this run: {epochs}")
    first_batches = {as_written: start for start, _, as_written in written}
    return Mixture(names, tuple(stages), tuple(lines), mixture_names(mixture), first_batches)


def start_batches(
    mixture: MixtureSetting, batches: units.BatchSizes, begun: Mapping[str, int], *, seq_len: int, **known: int | None
) -> list[tuple[int, Weights, str]]:
    """(first batch, weights, start as it is written) of each stage, in order.

    Args: batches: in tokens. begun: first batches that stay. seq_len, known: arguments of units.resolve.
    Raises: BadInput unless the first is batch 0, and where two are the same.
    """

    def first_batch(start: str) -> int:
        tokens = units.resolve("data.mixture's start", start, seq_len=seq_len, **known)
        return begun.get(start, batches.holding(tokens))

    starts = sorted(
        ((first_batch(start), weights, start) for start, weights in stages_of(mixture)), key=lambda stage: stage[0]
    )
    if starts[0][0] != 0:
        raise BadInput(f"data.mixture begins at batch {starts[0][0]}; its first stage must start at '0'")
    if len({start for start, *_ in starts}) < len(starts):
        raise BadInput(f"data.mixture has two stages that start at one batch: {[start for start, *_ in starts]}")
    return starts


def with_detours(starts: list[tuple[int, Weights]], detours: Sequence[Detour]) -> list[tuple[int, Weights]]:
    """The stages with one of a single source for each detour, after which what would be then goes on."""
    for first, batches, source in detours:
        before = [stage for stage in starts if stage[0] < first]
        after = [stage for stage in starts if stage[0] > first + batches]
        back = [weights for start, weights in starts if start <= first + batches][-1]
        starts = [*before, (first, {source: 1.0}), (first + batches, back), *after]
    return starts


def realised(pattern: Pattern, names: Sequence[str], weights_G: np.ndarray) -> str:
    """The shares that the whole numbers of a pattern give: 'web 0.7, code 0.3'; with the wish where it differs."""
    shares, L = [], len(pattern.sources_L)
    for name, count, wish in zip(names, pattern.counts_G, weights_G / weights_G.sum()):
        if count:
            given = f"{name} {count / L:.5g}"
            shares.append(given if f"{wish:.5g}" == f"{count / L:.5g}" else f"{given} (wished {wish:.5g})")
    return f"rows {', '.join(shares)}, exact in every {L}"


def shares_in_tokens(pattern: Pattern, sizes: Mapping[str, int], tokens_of: Mapping[str, int]) -> str:
    """'; in tokens web 0.71, code 0.29': a row of one source may hold more padding than a row of another."""
    names = [name for name, count in zip(sizes, pattern.counts_G) if count]
    if len(names) < 2 or not all(tokens_of.get(name) for name in names):
        return ""
    rows = dict(zip(sizes, pattern.counts_G.tolist()))
    given = {name: rows[name] * tokens_of[name] / sizes[name] for name in names}
    return "; in tokens " + ", ".join(f"{name} {one / sum(given.values()):.4f}" for name, one in given.items())


def check_sources(setting: str, named: Mapping[str, float], sizes: Mapping[str, int]) -> None:
    """Raises BadInput for a name that is no source of the training data."""
    having = [name for name, size in sizes.items() if size]
    if unknown := [name for name in named if name not in having]:
        raise BadInput(
            f"data.{setting} names {unknown[0]!r}, which is no source of the training data; there are "
            f"{', '.join(having)}"
        )
