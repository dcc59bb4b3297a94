"""The compute-optimal size from whole training curves: approach 1 of arXiv:2203.15556, section 3.1.

At each of many FLOP counts one run has the lowest training loss, smoothed and interpolated. As FLOPs grow, its size is
a staircase. A line through all of it would be too flat, since it begins and ends with half a step: by 1 - 1/k^2 for k
whole steps. So the line goes through the edges: where one size overtakes a smaller one, the best size is midway between
the two in log N, if the loss around the best size is symmetric.

N parameters, D tokens, C FLOPs; R curve, C FLOP counts in array names. A curve of a decaying schedule is lowest at its
end, so each size needs runs of several lengths.
"""

import bisect
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.isoflop import MIN_GROUPS, BestSize, Lines, SizeLaw, group_by
from jaxscale.tools.planning.loss_law import SAME
from jaxscale.units import count

NUM_FLOPS = 1500  # FLOP counts at which curves are compared, as in the paper
# Width of the Gaussian window, as a fraction of the tokens so far. The paper's 10 steps are of large batches; in small
# batches the noise of a step can exceed the difference between sizes.
SMOOTHED = 0.1
# Fraction of a run left out: its few, hardly smoothed steps would be lowest by chance where shorter runs have ended.
SETTLED = 0.1
BINS = 512  # of a curve, equal in log tokens; longer curves are averaged per bin
MAX_EXPONENT = 10.0  # of N = k C^a in a draw
RIDGE = 1e-6  # of a local line's slope; isolated points are unchanged


class Curve(NamedTuple):
    """Training loss of a run over its tokens, or the ends of runs of one size."""

    params: float
    flops_per_token: float
    tokens: Sequence[float]  # growing
    losses: Sequence[float]  # nats a token


def curve_of_run(params: float, flops_per_token: float, tokens: Sequence[float], losses: Sequence[float]) -> Curve:
    """Returns the curve of one run, without its beginning."""
    begin = bisect.bisect_left(tokens, SETTLED * tokens[-1]) if len(tokens) else 0
    return Curve(params, flops_per_token, tokens[begin:], losses[begin:])


def envelope(curves: Sequence[Curve], *, draws: int = 400, seed: int = 0) -> SizeLaw:
    """Returns approach 1, its optima the edges. Raises BadInput for fewer than three edges."""
    known = [curve for curve in curves if len(curve.tokens) > 1]
    edges, left_out = find_edges(known) if known else ([], [])
    if len(edges) < MIN_GROUPS:
        raise BadInput(
            f"approach 1 needs {MIN_GROUPS + 1} sizes, each with the lowest curve for some FLOPs, and "
            f"{len(known)} curves show {len(edges)} of the {MIN_GROUPS} edges between such sizes"
            + "".join(f"; {reason}" for reason in left_out[:3])
            + "; add sizes between or outside these, or longer runs"
        )
    return SizeLaw(tuple(edges), tuple(left_out), tuple(lines_through(edges, draws, np.random.default_rng(seed))))


def lines_through(edges: Sequence[BestSize], draws: int, rng: np.random.Generator) -> list[Lines]:
    """Returns the lines through the edges, then those of each draw.

    Sizes are chosen and FLOPs observed, so log C is fitted over log N and the line inverted. A draw resamples
    residuals, scaled by Student's factor for the uncertainty of few edges. D follows from N and C.
    """
    log_flops, log_params, log_tokens = np.log([(e.flops, e.params, e.tokens) for e in edges]).T
    number, middle = len(edges), (log_params.mean(), log_flops.mean())
    x = log_params - middle[0]
    slope = x @ log_flops / (x @ x)
    residuals = log_flops - middle[1] - slope * x
    free = number - 2
    drawn = rng.choice(residuals * math.sqrt(number / free), (draws, number))
    drawn *= np.sqrt(free / rng.chisquare(free, (draws, 1)))
    slopes = np.concatenate([[slope], slope + drawn @ x / (x @ x)])
    centres = np.concatenate([[middle[1]], middle[1] + drawn.mean(axis=1)])
    power = 1 / np.maximum(slopes, 1 / MAX_EXPONENT)
    per_token = np.polyfit(log_params, log_flops - log_tokens, 1)  # log of FLOPs per token, over log N
    starts = middle[0] - power * centres
    return [
        (float(a), float(s), float(1 - per_token[0] * a), float(-per_token[0] * s - per_token[1]))
        for a, s in zip(power, starts)
    ]


def losses_by_size(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (FLOPs [C], lowest smoothed loss of each size [S, C], its parameters [S], its FLOPs per token [S]).

    The smallest size is first. Losses are infinite outside the curves. Raises BadInput for a loss or token count
    without a logarithm.
    """
    for curve in curves:
        if not (min(*curve.tokens, *curve.losses) > 0 and np.isfinite(curve.losses).all()):
            raise BadInput(
                f"a curve of {curve.params:.3g} parameters has tokens or losses that are not above 0; leave it out"
            )
    ends = [(curve.flops_per_token * curve.tokens[0], curve.flops_per_token * curve.tokens[-1]) for curve in curves]
    flops_C = np.geomspace(min(begin for begin, _ in ends), max(end for _, end in ends), NUM_FLOPS)
    losses_RC = np.full((len(curves), NUM_FLOPS), math.inf)
    for row, (curve, (begin, end)) in enumerate(zip(curves, ends)):
        covers = (flops_C >= begin * (1 - 1e-9)) & (flops_C <= end * (1 + 1e-9))
        losses_RC[row, covers] = np.exp(np.interp(np.log(flops_C[covers] / curve.flops_per_token), *smooth(curve)))
    rows = group_by(range(len(curves)), lambda row: curves[row].params, SAME)
    first = np.array([curves[group[0]][:2] for group in rows], float)
    return flops_C, np.array([losses_RC[group].min(axis=0) for group in rows]), first[:, 0], first[:, 1]


def find_edges(curves: Sequence[Curve]) -> tuple[list[BestSize], list[str]]:
    """Returns (FLOPs where a size overtakes a smaller one, reasons for what was left out)."""
    flops_C, losses_SC, params_S, per_token_S = losses_by_size(curves)
    some = np.isfinite(losses_SC).any(axis=0)
    flops_C, losses_SC = flops_C[some], losses_SC[:, some]
    best_C, found, left_out = losses_SC.argmin(axis=0), [], []
    winners = np.unique(best_C)
    geometric_mean = lambda values: float(np.exp(np.log(values).mean()))
    for small, large in pairwise(winners):
        # With noise sizes alternate near an edge: minimise the FLOP counts on its wrong side.
        sides_C = np.where(best_C >= large, 1, -1)
        at = int(np.argmin(np.cumsum(sides_C) - sides_C))  # up to a constant
        both = slice(max(at - 1, 0), at + 1)
        if not 0 < at or not np.isfinite(losses_SC[small : large + 1, both]).all():
            left_out.append(
                f"{count(float(params_S[large]))} parameters overtake {count(float(params_S[small]))} where not all "
                "curves up to that size have begun, or some have ended"
            )
            continue
        values = (flops_C[both], params_S[[small, large]], per_token_S[[small, large]])
        flops, params, per_token = map(geometric_mean, values)
        found.append(BestSize(flops, params, flops / per_token, float(losses_SC[best_C[at], at])))
    for index, name in ((0, "smallest"), (len(params_S) - 1, "largest")):
        if len(winners) and index in (winners[0], winners[-1]):
            fraction = float(np.mean(best_C == index))
            left_out.append(f"the {name} size is lowest at {fraction:.0%} of the FLOPs: the best may be outside")
    return found, left_out


def smooth(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Returns (log tokens, log loss): a local line under a Gaussian window, which preserves power laws."""
    x, y = np.log(curve.tokens), np.log(curve.losses)
    bins = np.digitize(x, np.linspace(x[0], x[-1], BINS))
    number = np.bincount(bins)
    occupied = number > 0
    number, x, y = number[occupied], *(np.bincount(bins, values)[occupied] / number[occupied] for values in (x, y))
    distance = x[None] - x[:, None]
    weights = number * np.exp(-0.5 * (distance / SMOOTHED) ** 2)
    s0, s1, s2 = ((weights * distance**power).sum(axis=1) for power in range(3))
    s2 = s2 + RIDGE * SMOOTHED**2 * s0
    t0, t1 = weights @ y, (weights * distance) @ y
    return x, (s2 * t0 - s1 * t1) / (s0 * s2 - s1**2)
