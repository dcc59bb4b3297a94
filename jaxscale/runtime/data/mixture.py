"""Assigns a source to each row of the training stream, from weights in stages with epoch limits, in closed form.

Within a stage the sources follow a repeated pattern of about a thousand rows. In each prefix of the pattern, a source's
number of rows differs from its weight times the length by less than one row, so any window within a stage is correct to
within two rows. The mapping between stream positions and rows of a source takes constant time in both directions.

G sources  S stages  L rows of a pattern
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale import units
from jaxscale.runtime.data.config import MixtureSetting, Weights, mixture_names, mixture_stages
from jaxscale.system.exits import BadInput

PATTERN_ROWS = (512, 2048)  # range of pattern lengths; the length with counts closest to the weights is selected
LONGEST_PATTERN = 16_384  # limit for weights below one row of these patterns
PREFERRED_ROWS = 1024
Detour = tuple[int, int, str]  # first batch, number of batches, source


class MixtureStage(NamedTuple):
    """A pattern of L rows that is repeated from `first_row` to the first row of the next stage."""

    sources_L: np.ndarray  # int64: source of each row
    turns_L: np.ndarray  # int64: number of earlier rows of the same source
    counts_G: np.ndarray  # int64: number of rows of each source
    before: np.ndarray  # int64[L + 1, G]: number of rows of each source before each position
    first_row: int = 0

    def find(self, source: int, turns: np.ndarray) -> np.ndarray:
        """Returns the positions of a source's rows in the stage. turns: indices of the rows within the source."""
        cycles, offset = np.divmod(turns, self.counts_G[source])
        return cycles * len(self.sources_L) + np.flatnonzero(self.sources_L == source)[offset]

    def rows_by_source(self, rows: int) -> np.ndarray:
        """Returns int64[G], the number of rows of each source among the first `rows` rows of the stage."""
        cycles, offset = divmod(rows, len(self.sources_L))
        return cycles * self.counts_G + self.before[offset]


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """The stages of a run. In each stage, every source continues after the rows that earlier stages used."""

    names: tuple[str, ...]  # names of the G sources
    stages: tuple[MixtureStage, ...]
    lines: tuple[str, ...] = ()  # log lines
    reported_names: tuple[str, ...] = ()  # sources named in data.mixture, for which losses are reported
    starts: Mapping[str, int] = dataclasses.field(default_factory=dict)  # {start in data.mixture: first batch}

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        return np.array([stage.first_row for stage in self.stages])

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """Returns int64[S, G], the number of rows of each source before each stage."""
        before = [np.zeros(len(self.names), np.int64)]
        for stage, following in zip(self.stages, self.stages[1:]):
            before.append(before[-1] + stage.rows_by_source(following.first_row - stage.first_row))
        return np.stack(before)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, number of earlier rows of that source) for each position int64[m] in the stream."""
        sources, turns = np.empty_like(positions), np.empty_like(positions)
        numbers = self._starts.searchsorted(positions, side="right") - 1
        for number in np.unique(numbers):
            in_stage, stage = numbers == number, self.stages[number]
            cycles, offset = np.divmod(positions[in_stage] - stage.first_row, len(stage.sources_L))
            sources[in_stage] = found = stage.sources_L[offset]
            turns[in_stage] = self._before[number, found] + cycles * stage.counts_G[found] + stage.turns_L[offset]
        return sources, turns

    def source_numbers(self, positions: np.ndarray) -> np.ndarray:
        """Returns the index of each position's source in reported_names, or -1 for other sources."""
        numbers = {name: number for number, name in enumerate(self.reported_names)}
        return np.array([numbers.get(name, -1) for name in self.names])[self.locate(positions)[0]]

    def find(self, source: int, turns: np.ndarray) -> np.ndarray:
        """Returns the stream positions of a source's rows (inverse of `locate`). turns: indices within the source."""
        positions = np.empty_like(turns)
        numbers = self._before[:, source].searchsorted(turns, side="right") - 1
        for number in np.unique(numbers):
            in_stage, stage = numbers == number, self.stages[number]
            turns_in_stage = turns[in_stage] - self._before[number, source]
            positions[in_stage] = stage.first_row + stage.find(source, turns_in_stage)
        return positions

    def rows_by_source(self, rows: int) -> np.ndarray:
        """Returns int64[G], the number of rows of each source among the first `rows` rows of the stream."""
        number = max(0, int(self._starts.searchsorted(rows, side="left")) - 1)
        return self._before[number] + self.stages[number].rows_by_source(int(rows) - self.stages[number].first_row)

    def record(self) -> list[list[Any]]:
        """Returns the mixture as JSON data: [first row, {source: rows in the pattern}] for each stage."""
        named = lambda counts: {name: int(count) for name, count in zip(self.names, counts) if count}
        return [[stage.first_row, named(stage.counts_G)] for stage in self.stages]


def same_prefix(recorded: Sequence[Sequence[Any]] | None, now: Sequence[Sequence[Any]] | None, rows: int) -> bool:
    """Returns True if two results of Mixture.record() agree on the first `rows` rows. None means no mixture."""
    past = lambda record: record and [list(stage) for stage in record if stage[0] < rows]
    return rows == 0 or past(recorded) == past(now)


def pattern_of(counts_G: np.ndarray, first_row: int = 0) -> MixtureStage:
    """Returns a stage whose pattern has counts_G[g] rows of source g."""
    sources_L = spread_evenly(counts_G)
    each_L_G = (sources_L[:, None] == np.arange(len(counts_G))).astype(np.int64)
    before = np.concatenate([np.zeros_like(each_L_G[:1]), np.cumsum(each_L_G, axis=0)])
    return MixtureStage(sources_L, before[np.arange(len(sources_L)), sources_L], counts_G, before, first_row)


def whole_counts(weights_G: np.ndarray) -> np.ndarray:
    """Returns int64[G], the rows of each source in the pattern closest to the weights (largest remainder method)."""
    for shortest, longest in (PATTERN_ROWS, (PATTERN_ROWS[1], LONGEST_PATTERN)):
        lengths = np.arange(shortest, longest + 1)
        shares = lengths[:, None] * weights_G
        floors = np.floor(shares + 1e-9).astype(np.int64)
        rank = np.argsort(np.argsort(floors - shares, axis=1, kind="stable"), axis=1, kind="stable")
        counts = floors + (rank < (lengths - floors.sum(axis=1))[:, None])
        is_lost = ((counts == 0) & (weights_G > 0)).any(axis=1)
        errors = np.abs(counts / lengths[:, None] - weights_G).max(axis=1).round(12) + is_lost
        best = np.lexsort((np.abs(lengths - PREFERRED_ROWS), errors))[0]
        if not is_lost[best]:
            return counts[best]
    raise BadInput(
        f"data.mixture has a weight of {weights_G[weights_G > 0].min():.2g} of its stage, which is less than "
        f"1/{LONGEST_PATTERN}; raise the weight, or remove the source"
    )


def spread_evenly(counts_G: np.ndarray) -> np.ndarray:
    """Returns int64[L], a sequence of sources with these counts, spread as evenly as possible.

    Solves the chairman assignment problem (Tijdeman 1980, doi:10.1016/0012-365X(80)90269-1). At each position, selects
    the source with the earliest deadline among the sources that are far enough behind their share.
    """
    L, sources = int(counts_G.sum()), np.flatnonzero(counts_G).tolist()
    if len(sources) == 1:
        return np.full(L, sources[0])
    counts, lags = counts_G[sources].tolist(), [0] * len(sources)  # lags: L times the missing rows
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


class RunBatches(NamedTuple):
    """Sizes and number of the batches of a run."""

    rows: units.BatchSizes
    seq_len: int
    total_steps: int  # 100% for starts in percent
    num_batches: int  # number of batches to the end of the run, including skipped batches


def plan_mixture(
    mixture: MixtureSetting,
    max_epochs: Mapping[str, float],
    run: RunBatches,
    *,
    sizes: Mapping[str, int],
    detours: Sequence[Detour] = (),
    tokens_of: Mapping[str, int] | None = None,
    begun: Mapping[str, int] | None = None,
) -> Mixture:
    """Plans the stages of a run. When a source reaches max_epochs, a new stage starts with the remaining sources.

    sizes: {source: number of rows}. detours: temporary stages with a single source. tokens_of: {source: tokens}, for
    the log. begun: `Mixture.starts` of the stages that have begun, which are fixed even if total_steps changes.
    Raises BadInput for an unknown source, or if all sources reach max_epochs before the end of the run.
    """
    for _, weights in mixture_stages(mixture):
        check_sources("mixture", weights, sizes)
    check_sources("max_epochs", max_epochs, sizes)
    names, batches = tuple(sizes), max(run.num_batches, 1)
    written = start_batches(mixture, run, sizes, begun or {})
    starts = with_detours([(start, weights) for start, weights, _ in written], detours)
    caps = {names.index(name): int(number * sizes[name]) for name, number in max_epochs.items()}
    stages, lines, used_G = [], [], np.zeros(len(names), np.int64)
    for (start, weights), (end, _) in zip(starts, [*starts[1:], (batches, {})]):
        if start and start >= run.num_batches:
            break
        weights_G = np.array([weights.get(name, 0.0) for name in names], np.float64)
        first, end = run.rows.begin(start), run.rows.begin(min(end, batches))
        for row, stage, ended in cut_at_caps(weights_G, caps, used_G, first, end):
            lines += [
                f"{names[source]} reached max_epochs={max_epochs[names[source]]:g} after {row * run.seq_len:,} tokens "
                "of the run; the other sources share its weight"
                for source in ended
            ]
            if stage is None:
                raise BadInput(
                    f"data.max_epochs={dict(max_epochs)} limits data.mixture to "
                    f"{row * run.seq_len:,} tokens, but the run has "
                    f"{run.rows.begin(run.num_batches) * run.seq_len:,} tokens; raise a limit, add a source, or "
                    "reduce train_tokens"
                )
            text = describe_shares(stage, weights_G, sizes, tokens_of or {})
            lines.append(f"mixture from token {row * run.seq_len:,}: {text}")
            stages.append(stage)
    text = ", ".join(f"{name} {used / size:.3g}" for (name, size), used in zip(sizes.items(), used_G) if used)
    lines.append(f"epochs of each source in this run: {text}")
    return Mixture(names, tuple(stages), tuple(lines), mixture_names(mixture), {name: n for n, _, name in written})


def cut_at_caps(
    weights_G: np.ndarray, caps: Mapping[int, int], used_G: np.ndarray, row: int, end_row: int
) -> Iterator[tuple[int, MixtureStage | None, list[int]]]:
    """Splits rows [row, end_row) where a source reaches its cap; yields (first row, stage, sources that end there).

    The stage is None if all sources have ended. caps: {source: largest number of rows}. used_G: number of rows of each
    source so far, updated in place. weights_G: updated in place to 0 for sources that have ended.
    """
    while row < end_row:
        ended = [source for source, cap in caps.items() if weights_G[source] and used_G[source] >= cap]
        weights_G[ended] = 0
        if not weights_G.any():
            yield row, None, ended
            return
        stage = pattern_of(whole_counts(weights_G / weights_G.sum()), row)
        yield row, stage, ended
        left = {source: np.array([cap - used_G[source]]) for source, cap in caps.items() if weights_G[source]}
        stop = min([end_row, *(row + int(stage.find(source, rows)[0]) for source, rows in left.items())])
        used_G += stage.rows_by_source(stop - row)
        row = stop


def start_batches(
    mixture: MixtureSetting, run: RunBatches, sizes: Mapping[str, int], begun: Mapping[str, int]
) -> list[tuple[int, Weights, str]]:
    """Returns (first batch, weights, start as in data.mixture) of each stage, in order. begun: as in plan_mixture()."""
    tokens = run.rows.times(run.seq_len)
    known: dict[str, Any] = dict(
        seq_len=run.seq_len,
        batch_tokens=None if run.rows.vary else tokens.largest,
        train_tokens=tokens.begin(run.total_steps),
        epoch_tokens=sum(sizes.values()) * run.seq_len,
    )
    found = {start: units.resolve("data.mixture's start", start, **known) for start, _ in mixture_stages(mixture)}
    first = {start: begun.get(start, tokens.holding(amount)) for start, amount in found.items()}
    starts = [(first[start], weights, start) for start, weights in mixture_stages(mixture)]
    starts.sort(key=lambda stage: stage[0])
    if starts[0][0] != 0:
        raise BadInput(f"data.mixture starts at batch {starts[0][0]}; set the start of its first stage to '0'")
    if len({start for start, *_ in starts}) < len(starts):
        raise BadInput(f"stages of data.mixture start at the same batch: {[start for start, *_ in starts]}; change one")
    return starts


def with_detours(starts: list[tuple[int, Weights]], detours: Sequence[Detour]) -> list[tuple[int, Weights]]:
    """Inserts a stage with a single source for each detour, and resumes the planned weights after each detour."""
    for first, batches, source in detours:
        before = [stage for stage in starts if stage[0] < first]
        after = [stage for stage in starts if stage[0] > first + batches]
        back = [weights for start, weights in starts if start <= first + batches][-1]
        starts = [*before, (first, {source: 1.0}), (first + batches, back), *after]
    return starts


def describe_shares(
    stage: MixtureStage, weights_G: np.ndarray, sizes: Mapping[str, int], tokens_of: Mapping[str, int]
) -> str:
    """Returns a text such as 'rows web 0.7 (requested 0.71), code 0.3, exact in every 10; in tokens web 0.69, ...'."""
    L, rows, tokens = len(stage.sources_L), [], {}
    for (name, size), count, weight in zip(sizes.items(), stage.counts_G.tolist(), weights_G / weights_G.sum()):
        if count:
            given, requested = f"{count / L:.5g}", f"{weight:.5g}"
            rows.append(f"{name} {given}" + (f" (requested {requested})" if requested != given else ""))
            tokens[name] = count * tokens_of.get(name, 0) / size
    text, total = f"rows {', '.join(rows)}, exact in every {L}", sum(tokens.values())
    if len(tokens) < 2 or not all(tokens.values()):
        return text
    return f"{text}; in tokens {', '.join(f'{name} {number / total:.4f}' for name, number in tokens.items())}"


def check_sources(setting: str, named: Mapping[str, float], sizes: Mapping[str, int]) -> None:
    """Raises BadInput for a name that is not a source of the training data. sizes: {source: number of rows}."""
    known_sources = [name for name, size in sizes.items() if size]
    if unknown := [name for name in named if name not in known_sources]:
        raise BadInput(
            f"data.{setting} names {unknown[0]!r}, which is not a source of the training data; the sources are "
            f"{', '.join(known_sources)}"
        )
