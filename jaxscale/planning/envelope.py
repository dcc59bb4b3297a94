"""The best size for so many operations, read off whole training curves: approach 1 of arXiv:2203.15556, section 3.1.

At each of many amounts of operations one run has the lowest training loss, smoothed and interpolated. As operations
grow, its size climbs a staircase. A line through all of that would be too flat, for it begins and ends with half a
step: by 1 - 1/k^2 for k whole steps. So the line is laid through the edges: where one size takes over from a smaller
one, the best is midway between the two, in log N, if the loss about the best size is as steep on both sides.

N parameters, D tokens, C operations; R curve, C amount of operations in names of arrays. A curve of a decaying schedule
is lowest at its end, so each size wants runs of several lengths.
"""

import bisect
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxscale.planning.isoflop import LEAST_GROUPS, Optimum, SizeLaw, together
from jaxscale.planning.loss_law import SAME, Point
from jaxscale.system.exits import BadInput
from jaxscale.units import count

AMOUNTS = 1500  # of operations, at which curves are compared: as many as in the paper
# Width of the Gaussian window, as a part of the tokens so far. The paper's, 10 steps, is of large batches: a step of a
# small one may be off by more than sizes differ.
SMOOTHED = 0.1
# Part of a run that is left out: so few steps, hardly smoothed, would be lowest by luck where shorter runs are over.
SETTLED = 0.1
BINS = 512  # of a curve, equal in log tokens: longer curves are averaged within
STEEPEST = 10.0  # a of N = k C^a: a draw beyond it says no more
RIDGE = 1e-6  # of a local line's slope: a point that stands alone stays where it is


class Curve(NamedTuple):
    """A run's training loss on its way, or the ends of runs of one size."""

    params: float
    flops_per_token: float
    tokens: Sequence[float]  # growing
    losses: Sequence[float]  # nats a token


def curve_of_run(params: float, flops_per_token: float, tokens: Sequence[float], losses: Sequence[float]) -> Curve:
    """The curve of one run, without its beginning."""
    begin = bisect.bisect_left(tokens, SETTLED * tokens[-1]) if len(tokens) else 0
    return Curve(params, flops_per_token, tokens[begin:], losses[begin:])


def curves_of_ends(points: Sequence[Point]) -> list[Curve]:
    """Curves through the ends of runs, one for each size that has two or more."""
    found = []
    for group in together(points, lambda point: point.params, SAME):
        ordered = sorted(group, key=lambda point: point.compute)
        if len(ordered) > 1:
            per_token = math.exp(float(np.mean([math.log(p.compute / p.tokens) for p in ordered])))
            found.append(Curve(group[0].params, per_token, [p.tokens for p in ordered], [p.loss for p in ordered]))
    return found


def envelope(curves: Sequence[Curve], *, draws: int = 400, seed: int = 0) -> SizeLaw:
    """Approach 1, the same for the same curves and seed. Its optima are the edges.

    Raises BadInput where fewer than three sizes take over from a smaller one.
    """
    known = [curve for curve in curves if len(curve.tokens) > 1]
    edges, left_out = Compared.of(known).edges() if known else ([], [])
    if len(edges) < LEAST_GROUPS:
        raise BadInput(
            f"approach 1 needs {LEAST_GROUPS + 1} sizes, each with the lowest curve for some FLOPs, and "
            f"{len(known)} curves show {len(edges)} of the {LEAST_GROUPS} edges between such sizes"
            + "".join(f"; {reason}" for reason in left_out[:3])
            + "; add sizes between or beside these, or longer runs"
        )
    return SizeLaw(1, tuple(edges), tuple(left_out), tuple(lines_through(edges, draws, np.random.default_rng(seed))))


def lines_through(
    edges: Sequence[Optimum], draws: int, rng: np.random.Generator
) -> list[tuple[float, float, float, float]]:
    """Slope and start of log N over log C, then of log D: of the edges, then of each draw.

    The sizes are what was chosen, and the operations what was found, so log C is fitted over log N and the line is
    turned about. A draw has other residuals, as large as a new edge's, and by Student's factor as uncertain as so few
    edges leave them. D follows from N and C.
    """
    log_flops, log_params, log_tokens = np.log([(e.flops, e.params, e.tokens) for e in edges]).T
    number, middle = len(edges), (log_params.mean(), log_flops.mean())
    x = log_params - middle[0]
    slope = x @ log_flops / (x @ x)
    off = log_flops - middle[1] - slope * x
    free = number - 2
    drawn = rng.choice(off * math.sqrt(number / free), (draws, number))
    drawn *= np.sqrt(free / rng.chisquare(free, (draws, 1)))
    slopes = np.concatenate([[slope], slope + drawn @ x / (x @ x)])
    centres = np.concatenate([[middle[1]], middle[1] + drawn.mean(axis=1)])
    power = 1 / np.maximum(slopes, 1 / STEEPEST)
    per_token = np.polyfit(log_params, log_flops - log_tokens, 1)  # log of operations a token, over log N
    starts = middle[0] - power * centres
    return [
        (float(a), float(s), float(1 - per_token[0] * a), float(-per_token[0] * s - per_token[1]))
        for a, s in zip(power, starts)
    ]


class Compared(NamedTuple):
    """Smoothed curves at common amounts of operations."""

    flops_C: np.ndarray
    params_R: np.ndarray
    per_token_R: np.ndarray  # operations
    losses_RC: np.ndarray  # infinite where a curve has not begun or is over

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> "Compared":
        """The curves. Raises BadInput for a loss or an amount of tokens that has no logarithm."""
        for curve in curves:
            if not (min(*curve.tokens, *curve.losses) > 0 and np.isfinite(curve.losses).all()):
                raise BadInput(
                    f"a curve of {curve.params:.3g} parameters has tokens or losses that are not above 0; leave it out"
                )
        ends = [(curve.flops_per_token * curve.tokens[0], curve.flops_per_token * curve.tokens[-1]) for curve in curves]
        flops_C = np.geomspace(min(begin for begin, _ in ends), max(end for _, end in ends), AMOUNTS)
        losses_RC = np.full((len(curves), AMOUNTS), math.inf)
        for row, (curve, (begin, end)) in enumerate(zip(curves, ends)):
            covers = (flops_C >= begin * (1 - 1e-9)) & (flops_C <= end * (1 + 1e-9))
            losses_RC[row, covers] = np.exp(np.interp(np.log(flops_C[covers] / curve.flops_per_token), *smooth(curve)))
        params_R, per_token_R = (np.array(values, float) for values in zip(*(curve[:2] for curve in curves)))
        return cls(flops_C, params_R, per_token_R, losses_RC)

    def edges(self) -> tuple[list[Optimum], list[str]]:
        """(where a size takes over from a smaller one, reasons for what was left out)."""
        losses_SC, params_S, per_token_S = self.sizes()
        some = np.isfinite(losses_SC).any(axis=0)
        flops_C, losses_SC = self.flops_C[some], losses_SC[:, some]
        best_C, found, left_out = losses_SC.argmin(axis=0), [], []
        won = np.unique(best_C)
        for small, large in pairwise(won):
            above_C = best_C >= large
            # Noise lets sizes take turns about an edge: it is put where the fewest amounts are on its wrong side.
            wrong_C = np.cumsum(np.where(above_C, 1, -1)) - np.where(above_C, 1, -1)  # but for a constant
            at = int(np.argmin(wrong_C))
            both = slice(max(at - 1, 0), at + 1)
            if not 0 < at or not np.isfinite(losses_SC[small : large + 1, both]).all():
                larger, smaller = count(float(params_S[large])), count(float(params_S[small]))
                left_out.append(
                    f"{larger} parameters take over from {smaller} where not all "
                    "curves up to that size have begun, or some are over"
                )
                continue
            flops, params, per_token = map(
                between, (flops_C[both], params_S[[small, large]], per_token_S[[small, large]])
            )
            found.append(Optimum(flops, params, flops / per_token, float(losses_SC[best_C[at], at])))
        for place, which in ((0, "smallest"), (len(params_S) - 1, "largest")):
            if len(won) and place in (won[0], won[-1]):
                part = float(np.mean(best_C == place))
                left_out.append(f"the {which} size is lowest at {part:.0%} of the FLOPs: the best may lie beyond it")
        return found, left_out

    def sizes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(the lowest loss of each size [S, C], its parameters, its operations a token), the smallest size first."""
        groups = together(range(len(self.params_R)), lambda row: self.params_R[row], SAME)
        first = [group[0] for group in groups]
        return np.array([self.losses_RC[g].min(axis=0) for g in groups]), self.params_R[first], self.per_token_R[first]


def between(values: np.ndarray) -> float:
    """The middle of positive numbers, on a logarithmic scale."""
    return float(np.exp(np.log(values).mean()))


def smooth(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """(log tokens, log loss), at each point by a local line under a Gaussian window: a power law stays what it is."""
    x, y = np.log(curve.tokens), np.log(curve.losses)
    bins = np.digitize(x, np.linspace(x[0], x[-1], BINS))
    number = np.bincount(bins)
    kept = number > 0
    number, x, y = number[kept], *(np.bincount(bins, values)[kept] / number[kept] for values in (x, y))
    off = x[None] - x[:, None]
    near = number * np.exp(-0.5 * (off / SMOOTHED) ** 2)
    s0, s1, s2 = ((near * off**power).sum(axis=1) for power in range(3))
    s2 = s2 + RIDGE * SMOOTHED**2 * s0
    t0, t1 = near @ y, (near * off) @ y
    return x, (s2 * t0 - s1 * t1) / (s0 * s2 - s1**2)
