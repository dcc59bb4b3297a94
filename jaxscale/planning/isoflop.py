"""The best size for so many operations, read off runs of equal operations: approach 2 of arXiv:2203.15556, section 3.2.

A parabola of loss in log N has its lowest point where N is best; then come a line through log N over log C, and one
through log D. Approach 1, over whole curves, is envelope.py; neither needs a law of the loss, which is approach 3
(loss_law.py).

N parameters, D tokens, C operations, L nats per token. Where the lowest of a group lies at its edge, the best size is
beyond it: such a group tells nothing and is left out, with its reason. Intervals are those of a bootstrap over runs.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jaxscale.planning.loss_law import INTERVAL, SAME, Point
from jaxscale.system.exits import BadInput

T = TypeVar("T")
LEAST_GROUPS = 3  # two points fix a line and tell nothing of its error


class Interval(NamedTuple):
    """A number with its 90% interval."""

    low: float
    middle: float
    high: float


class Optimum(NamedTuple):
    """The lowest loss for so many operations, and the size that has it."""

    flops: float
    params: float
    tokens: float
    loss: float


@dataclasses.dataclass(frozen=True)
class SizeLaw:
    """log N and log D as lines in log C."""

    approach: int
    optima: tuple[Optimum, ...]
    left_out: tuple[str, ...]  # what fixes no optimum, with the reason
    draws: tuple[tuple[float, float, float, float], ...]  # slope and start of log N, then of log D; the fit comes first

    @property
    def params_exponent(self) -> Interval:
        """a of N = k C^a."""
        return interval([draw[0] for draw in self.draws])

    @property
    def tokens_exponent(self) -> Interval:
        """b of D = k C^b."""
        return interval([draw[2] for draw in self.draws])

    def params(self, flops: float) -> Interval:
        """The best N for so many operations."""
        return interval([math.exp(draw[0] * math.log(flops) + draw[1]) for draw in self.draws])

    def tokens(self, flops: float) -> Interval:
        """The best D for so many operations."""
        return interval([math.exp(draw[2] * math.log(flops) + draw[3]) for draw in self.draws])

    def reach(self, flops: float) -> float:
        """How many times the operations of the largest optimum these are: beyond 10 nothing was tried."""
        return flops / max(optimum.flops for optimum in self.optima)


def interval(values: Sequence[float]) -> Interval:
    """The first value between quantiles of all, which hold it in any case."""
    low, high = np.quantile(values, INTERVAL)
    return Interval(min(float(low), values[0]), values[0], max(float(high), values[0]))


def parabolas(
    points: Sequence[Point],
    *,
    budgets: Sequence[float] = (),
    within: float = 0.1,
    draws: int = 400,
    seed: int = 0,
) -> SizeLaw:
    """Approach 2, over runs of equal operations; the same for the same points and seed.

    budgets: operations of the groups; without them runs are grouped by their own. within: how far, relatively, runs of
    one group may lie from it. Raises BadInput where fewer than three groups have a best size between their smallest
    and largest one.
    """
    rng, groups = np.random.default_rng(seed), groups_of(points, budgets, within)
    found = [(group, lowest_of_group(group, np.ones(len(group)))) for group in groups]
    optima = [optimum for _, optimum in found if isinstance(optimum, Optimum)]
    left_out = [reason for _, reason in found if isinstance(reason, str)]
    if len(optima) < LEAST_GROUPS:
        raise BadInput(
            f"approach 2 needs {LEAST_GROUPS} amounts of FLOPs with a best size, and the runs have {len(optima)}"
            + "".join(f"; {reason}" for reason in left_out[:3])
        )
    used = [group for group, optimum in found if isinstance(optimum, Optimum)]

    def draw() -> list[Optimum]:
        chosen = [used[place] for place in rng.integers(0, len(used), len(used))]
        tried = [lowest_of_group(group, rng.exponential(size=len(group))) for group in chosen]
        return [optimum for optimum in tried if isinstance(optimum, Optimum)]

    return law_of(2, optima, left_out, draw, draws)


def law_of(
    approach: int, optima: Sequence[Optimum], left_out: Sequence[str], draw: Callable[[], list[Optimum]], draws: int
) -> SizeLaw:
    """The lines through the optima, and through those of each draw that has two amounts of operations or more."""
    lines = [lines_through(optima)]
    for _ in range(draws):
        drawn = draw()
        if len({optimum.params for optimum in drawn}) >= 2 and len({optimum.flops for optimum in drawn}) >= 2:
            lines.append(lines_through(drawn))
    return SizeLaw(approach, tuple(optima), tuple(left_out), tuple(lines))


def lines_through(optima: Sequence[Optimum]) -> tuple[float, float, float, float]:
    """Slope and start of log N over log C, then of log D, by least squares."""
    log_flops = np.log([optimum.flops for optimum in optima])
    lines = [np.polyfit(log_flops, np.log(values), 1) for values in zip(*[(o.params, o.tokens) for o in optima])]
    (a, a_start), (b, b_start) = lines
    return float(a), float(a_start), float(b), float(b_start)


def groups_of(points: Sequence[Point], budgets: Sequence[float], within: float) -> list[list[Point]]:
    """Points of equal operations."""
    if budgets:
        near = lambda budget: [point for point in points if abs(point.compute / budget - 1) <= within]
        return [group for budget in budgets if (group := near(budget))]
    return together(points, lambda point: point.compute, within)


def together(points: Iterable[T], key: Callable[[T], float], within: float) -> list[list[T]]:
    """Points in groups: the first of each is within so much of its last, relatively."""
    groups: list[list[T]] = []
    for point in sorted(points, key=key):
        if groups and key(point) <= (1 + within) * key(groups[-1][0]):
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def lowest_of_group(group: Sequence[Point], weights: np.ndarray) -> Optimum | str:
    """The lowest point of a parabola of loss in log N, or why there is none."""
    log_params = np.log([point.params for point in group])
    flops = math.exp(float(np.mean(np.log([point.compute for point in group]))))
    name = f"{flops:.2e} FLOPs"
    if len(together(group, lambda point: point.params, SAME)) < 3:
        return f"{name}: fewer than 3 sizes"
    middle, roots = float(log_params.mean()), np.sqrt(weights)
    bend, slope, start = np.polyfit(log_params - middle, [point.loss for point in group], 2, w=roots)
    if bend <= 0:
        return f"{name}: the losses bend downward"
    best = -slope / (2 * bend)
    if not log_params.min() < best + middle < log_params.max():
        return f"{name}: the lowest loss is at the edge of its sizes"
    line = np.polyfit(log_params - middle, np.log([point.tokens for point in group]), 1, w=roots)
    loss = float(start - slope**2 / (4 * bend))
    return Optimum(flops, math.exp(best + middle), math.exp(float(np.polyval(line, best))), loss)
