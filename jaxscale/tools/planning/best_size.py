"""The compute-optimal size by the three approaches of arXiv:2203.15556.

N parameters, D tokens, C FLOPs, L nats per token; R curve, S size, C FLOP counts in array names.

Approach 1 (section 3.1), whole training curves: at each of many FLOP counts one run has the lowest training loss,
smoothed and interpolated. As FLOPs grow, its size is a staircase. A line through all of it would be too flat, since it
begins and ends with half a step: by 1 - 1/k^2 for k whole steps. So the line goes through the edges: where one size
overtakes a smaller one, the best size is midway between the two in log N, if the loss around the best size is
symmetric. A curve of a decaying schedule is lowest at its end, so each size needs runs of several lengths.

Approach 2 (section 3.2), runs of equal FLOPs: a parabola of loss in log N has its minimum at the best N; lines are then
fitted through log N over log C, and log D over log C. A group whose lowest loss is at its edge is left out, with its
reason: the best size is outside. Intervals come from a bootstrap over runs.

Approach 3 is the loss law of loss_law.py.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.loss_law import INTERVAL, SAME, Interval, LossLaw, Point, fit
from jaxscale.units import count

T = TypeVar("T")
Lines = tuple[float, float, float, float]  # slope and intercept of log N over log C, then of log D
MIN_GROUPS = 3  # two points determine a line without an error
CURVES, EQUAL, LOSS = "Approach 1, the envelope of curves", "Approach 2, parabolas at equal FLOPs", "Approach 3, a law"
NUM_FLOPS = 1500  # FLOP counts at which curves are compared, as in the paper
# Width of the Gaussian window, as a fraction of the tokens so far. The paper's 10 steps are of large batches; in small
# batches the noise of a step can exceed the difference between sizes.
SMOOTHED = 0.1
# Fraction of a run left out: its few, hardly smoothed steps would be lowest by chance where shorter runs have ended.
SETTLED = 0.1
BINS = 512  # of a curve, equal in log tokens; longer curves are averaged per bin
MAX_EXPONENT = 10.0  # of N = k C^a in a draw
RIDGE = 1e-6  # of a local line's slope; isolated points are unchanged


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


class Curve(NamedTuple):
    """Training loss of a run over its tokens, or the ends of runs of one size."""

    params: float
    flops_per_token: float
    tokens: Sequence[float]  # growing
    losses: Sequence[float]  # nats per token


class Approach(NamedTuple):
    """The result of one approach. text: with its name, or why it has no result."""

    name: str
    law: SizeLaw | None  # of approaches 1 and 2, if the runs determine one
    text: str


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
            f"approach 1 needs {MIN_GROUPS + 1} sizes, each with the lowest curve over some range of FLOPs, and "
            f"{len(known)} curves show {len(edges)} of the {MIN_GROUPS} crossings between such sizes"
            + "".join(f"; {reason}" for reason in left_out[:3])
            + "; add sizes between or outside these, or longer runs"
        )
    return SizeLaw(tuple(edges), tuple(left_out), tuple(lines_through_edges(edges, draws, np.random.default_rng(seed))))


def lines_through_edges(edges: Sequence[BestSize], draws: int, rng: np.random.Generator) -> list[Lines]:
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
                f"a curve of {curve.params:.3g} parameters has tokens or losses that are not finite and above 0; "
                "exclude it"
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
                f"{count(float(params_S[large]))} parameters overtake {count(float(params_S[small]))} at FLOPs that "
                "not all curves of these sizes cover"
            )
            continue
        values = (flops_C[both], params_S[[small, large]], per_token_S[[small, large]])
        flops, params, per_token = map(geometric_mean, values)
        found.append(BestSize(flops, params, flops / per_token, float(losses_SC[best_C[at], at])))
    for index, name in ((0, "smallest"), (len(params_S) - 1, "largest")):
        if len(winners) and index in (winners[0], winners[-1]):
            fraction = float(np.mean(best_C == index))
            left_out.append(f"the {name} size is lowest at {fraction:.0%} of the FLOPs: the best size may be outside")
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
            f"approach 2 needs {MIN_GROUPS} FLOP budgets with a best size inside the sizes tried, and the runs have "
            f"{len(optima)}" + "".join(f"; {reason}" for reason in left_out[:3])
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
        return f"{name}: the parabola has no minimum"
    best = -slope / (2 * curvature)
    if not log_params.min() < best + center < log_params.max():
        return f"{name}: the minimum is outside the sizes tried"
    line = np.polyfit(log_params - center, np.log([point.tokens for point in group]), 1, w=roots)
    loss = float(intercept - slope**2 / (4 * curvature))
    return BestSize(flops, math.exp(best + center), math.exp(float(np.polyval(line, best))), loss)


def three_approaches(
    points: Sequence[Point],
    curves: Sequence[Curve],
    flops: float,
    *,
    description: str,
    budgets: Sequence[float] = (),
    within: float = 0.1,
    law: LossLaw | None = None,
) -> list[Approach]:
    """Returns each result for these FLOPs, named `description`. points: ends of runs. law: of them, if fitted."""
    found = []
    for name, make in (
        (CURVES, lambda: envelope(curves)),
        (EQUAL, lambda: parabolas(points, budgets=budgets, within=within)),
    ):
        try:
            size_law = make()
        except BadInput as error:
            found.append(Approach(name, None, f"{name}: {error}."))
            continue
        a, size, tokens = size_law.params_exponent, size_law.params(flops), size_law.tokens(flops)
        text = (
            f"{name}: the best size grows as C ** {a.middle:.2f} ({a.low:.2f} to {a.high:.2f}); at {flops:.2g} FLOPs, "
            f"{description}, it is {count(size.middle)} ({count(size.low)} to {count(size.high)}) parameters and "
            f"{count(tokens.middle)} tokens."
        )
        found.append(Approach(name, size_law, text))
    return [*found, Approach(LOSS, None, loss_law_text(points, flops, law))]


def loss_law_text(points: Sequence[Point], flops: float, law: LossLaw | None = None) -> str:
    """Returns approach 3 as text: the loss law, and its compute-optimal size."""
    try:
        law = law or fit(points)
    except BadInput as error:
        return f"{LOSS} of the loss: {error}."
    terms = law.terms
    if not (terms.A and terms.B):
        term = "parameters" if law.form == "params" else "tokens"
        return f"{LOSS} of the loss: the runs determine only the term in {term}, and a best size needs both."
    exponent = terms.beta / (terms.alpha + terms.beta)
    log_ratio = math.log(terms.alpha * terms.A / (terms.beta * terms.B)) / (terms.alpha + terms.beta)
    log_params = log_ratio + exponent * math.log(flops / 6)
    text = (
        f"{LOSS} of the loss: L = {terms.E:.3g} + {terms.A:.3g} / N ** {terms.alpha:.2f} + {terms.B:.3g} / "
        f"D ** {terms.beta:.2f}, so the best size grows as C ** {exponent:.2f}; at {flops:.2g} FLOPs "
    )
    if not 0 <= log_params <= math.log(flops / 6):
        return f"{text}the best size is below one parameter or one token: these runs determine no best size."
    params = math.exp(log_params)
    loss = law.predict(params, flops / 6 / params)
    return f"{text}it is {count(params)} parameters, with {loss.middle:.3f} nats ({loss.low:.3f} to {loss.high:.3f})."
