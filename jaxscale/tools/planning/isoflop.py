"""The compute-optimal size from runs of equal FLOPs: approach 2 of arXiv:2203.15556, section 3.2.

A parabola of loss in log N has its minimum at the best N; lines are then fitted through log N over log C, and log D
over log C. Approach 1, over whole curves, is envelope.py; neither needs a loss law, which is approach 3 (loss_law.py).

N parameters, D tokens, C FLOPs, L nats per token. A group whose lowest loss is at its edge is left out, with its
reason: the best size is outside. Intervals come from a bootstrap over runs.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.loss_law import INTERVAL, SAME, Interval, Point

T = TypeVar("T")
Lines = tuple[float, float, float, float]  # slope and intercept of log N over log C, then of log D
MIN_GROUPS = 3  # two points determine a line without an error


class BestSize(NamedTuple):
    """The lowest loss for this many FLOPs, and its size."""

    flops: float
    params: float
    tokens: float
    loss: float


@dataclasses.dataclass(frozen=True)
class SizeLaw:
    """Lines of log N and log D over log C."""

    optima: tuple[BestSize, ...]
    left_out: tuple[str, ...]  # groups without an optimum, with the reason
    draws: tuple[Lines, ...]  # the fit is first

    @property
    def params_exponent(self) -> Interval:
        """a of N = k C^a."""
        return interval([draw[0] for draw in self.draws])

    @property
    def tokens_exponent(self) -> Interval:
        """b of D = k C^b."""
        return interval([draw[2] for draw in self.draws])

    def params(self, flops: float) -> Interval:
        """Returns the best N for this many FLOPs."""
        return interval([math.exp(draw[0] * math.log(flops) + draw[1]) for draw in self.draws])

    def tokens(self, flops: float) -> Interval:
        """Returns the best D for this many FLOPs."""
        return interval([math.exp(draw[2] * math.log(flops) + draw[3]) for draw in self.draws])

    def reach(self, flops: float) -> float:
        """Returns these FLOPs over those of the largest optimum; above 10 is far extrapolation."""
        return flops / max(optimum.flops for optimum in self.optima)


def interval(values: Sequence[float]) -> Interval:
    """Returns the first value between quantiles of all, widened to include it."""
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
    """Returns approach 2, over runs of equal FLOPs; deterministic for the same points and seed.

    budgets: FLOPs of the groups; without them runs are grouped by their own. within: relative distance of a group's
    runs from it. Raises BadInput if fewer than three groups have a best size between their smallest and largest one.
    """
    rng, groups = np.random.default_rng(seed), equal_flops_groups(points, budgets, within)
    found = [(group, parabola_minimum(group, np.ones(len(group)))) for group in groups]
    optima = [optimum for _, optimum in found if isinstance(optimum, BestSize)]
    left_out = [reason for _, reason in found if isinstance(reason, str)]
    if len(optima) < MIN_GROUPS:
        raise BadInput(
            f"approach 2 needs {MIN_GROUPS} amounts of FLOPs with a best size, and the runs have {len(optima)}"
            + "".join(f"; {reason}" for reason in left_out[:3])
        )
    used = [group for group, optimum in found if isinstance(optimum, BestSize)]

    lines = [lines_through(optima)]
    for _ in range(draws):
        chosen = [used[place] for place in rng.integers(0, len(used), len(used))]
        tried = [parabola_minimum(group, rng.exponential(size=len(group))) for group in chosen]
        drawn = [optimum for optimum in tried if isinstance(optimum, BestSize)]
        if len({optimum.params for optimum in drawn}) >= 2 and len({optimum.flops for optimum in drawn}) >= 2:
            lines.append(lines_through(drawn))
    return SizeLaw(tuple(optima), tuple(left_out), tuple(lines))


def lines_through(optima: Sequence[BestSize]) -> Lines:
    """Returns lines through the optima, by least squares."""
    log_flops = np.log([optimum.flops for optimum in optima])
    lines = [np.polyfit(log_flops, np.log(values), 1) for values in zip(*[(o.params, o.tokens) for o in optima])]
    (a, a_start), (b, b_start) = lines
    return float(a), float(a_start), float(b), float(b_start)


def equal_flops_groups(points: Sequence[Point], budgets: Sequence[float], within: float) -> list[list[Point]]:
    """Returns points of equal FLOPs."""
    if budgets:
        near = lambda budget: [point for point in points if abs(point.compute / budget - 1) <= within]
        return [group for budget in budgets if (group := near(budget))]
    return group_by(points, lambda point: point.compute, within)


def group_by(points: Iterable[T], key: Callable[[T], float], within: float) -> list[list[T]]:
    """Returns sorted points in groups whose first and last differ by at most `within`, relatively."""
    groups: list[list[T]] = []
    for point in sorted(points, key=key):
        if groups and key(point) <= (1 + within) * key(groups[-1][0]):
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def parabola_minimum(group: Sequence[Point], weights: np.ndarray) -> BestSize | str:
    """Returns the minimum of a parabola of loss in log N, or why there is none."""
    log_params = np.log([point.params for point in group])
    flops = math.exp(float(np.mean(np.log([point.compute for point in group]))))
    name = f"{flops:.2e} FLOPs"
    if len(group_by(group, lambda point: point.params, SAME)) < 3:
        return f"{name}: fewer than 3 sizes"
    center, roots = float(log_params.mean()), np.sqrt(weights)
    curvature, slope, intercept = np.polyfit(log_params - center, [point.loss for point in group], 2, w=roots)
    if curvature <= 0:
        return f"{name}: the losses bend downward"
    best = -slope / (2 * curvature)
    if not log_params.min() < best + center < log_params.max():
        return f"{name}: the lowest loss is at the edge of its sizes"
    line = np.polyfit(log_params - center, np.log([point.tokens for point in group]), 1, w=roots)
    loss = float(intercept - slope**2 / (4 * curvature))
    return BestSize(flops, math.exp(best + center), math.exp(float(np.polyval(line, best))), loss)
