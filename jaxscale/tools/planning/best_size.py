"""Compute-optimal model sizes by the three approaches of arXiv:2203.15556.

N is parameters, D tokens, C FLOPs and L nats per token. In array names, R is a curve, S a size and C a FLOP count.

Approach 1 (section 3.1) compares whole training curves. At each FLOP count, one run has the lowest smoothed loss, and
its size grows with FLOPs as a staircase. The slope of a line through the whole staircase would be too small by a factor
of 1 - 1/k^2 for k whole steps. So the line is fitted through the edges, where one size overtakes a smaller one. The
best size at an edge is midway between the two in log N, if the loss is symmetric around the best size. The curve of a
decaying schedule is lowest at its end, so each size needs runs of several lengths.

Approach 2 (section 3.2) compares runs of equal FLOPs. A parabola of loss in log N has its minimum at the best N, and
lines are fitted to log N and to log D over log C. A group with its lowest loss at an edge is left out with a reason,
since its best size is outside the sizes tried. Intervals come from a bootstrap over runs.

Approach 3 fits the loss law in loss_law.py.
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
# Width of the Gaussian window, as a fraction of the tokens so far. The paper averages over 10 steps of large batches.
# With small batches, the noise of a step can exceed the difference between sizes.
SMOOTHED = 0.1
# Fraction omitted at the start of a run, whose few hardly smoothed steps could be the lowest by chance.
SETTLED = 0.1
BINS = 512  # bins per curve, of equal width in log tokens; points are averaged per bin
MAX_EXPONENT = 10.0  # upper bound of a in N = k C^a for a bootstrap draw
RIDGE = 1e-6  # ridge penalty on the slope of a local line; leaves isolated points unchanged


class BestSize(NamedTuple):
    """The size with the lowest loss at a number of FLOPs."""

    flops: float
    params: float
    tokens: float
    loss: float


@dataclasses.dataclass(frozen=True)
class SizeLaw:
    """Fitted lines of log N and log D over log C."""

    optima: tuple[BestSize, ...]
    left_out: tuple[str, ...]  # one reason per group without an optimum
    draws: tuple[Lines, ...]  # the fit, then the bootstrap draws

    @property
    def params_exponent(self) -> Interval:
        """The exponent a in N = k C^a."""
        return interval([draw[0] for draw in self.draws])

    @property
    def tokens_exponent(self) -> Interval:
        """The exponent b in D = k C^b."""
        return interval([draw[2] for draw in self.draws])

    def params(self, flops: float) -> Interval:
        """Returns the best N for this many FLOPs."""
        return interval([math.exp(draw[0] * math.log(flops) + draw[1]) for draw in self.draws])

    def tokens(self, flops: float) -> Interval:
        """Returns the best D for this many FLOPs."""
        return interval([math.exp(draw[2] * math.log(flops) + draw[3]) for draw in self.draws])


class Curve(NamedTuple):
    """Training loss of one run by tokens, or final losses of several runs of the same size."""

    params: float
    flops_per_token: float
    tokens: Sequence[float]  # increasing
    losses: Sequence[float]  # nats per token


class Approach(NamedTuple):
    """Result of one approach. `text` states the law, or the reason that there is none."""

    name: str
    law: SizeLaw | None  # None for approach 3, or if the runs determine no law
    text: str


def curve_of_run(params: float, flops_per_token: float, tokens: Sequence[float], losses: Sequence[float]) -> Curve:
    """Returns the curve of one run, omitting the first tokens (the fraction SETTLED)."""
    begin = bisect.bisect_left(tokens, SETTLED * tokens[-1]) if len(tokens) else 0
    return Curve(params, flops_per_token, tokens[begin:], losses[begin:])


def envelope(curves: Sequence[Curve], *, draws: int = 400, seed: int = 0) -> SizeLaw:
    """Returns the law of approach 1. Raises BadInput if the best size changes at fewer than three FLOP counts."""
    known = [curve for curve in curves if len(curve.tokens) > 1]
    edges, left_out = find_edges(known) if known else ([], [])
    if len(edges) < MIN_GROUPS:
        raise BadInput(
            f"approach 1 needs {MIN_GROUPS} FLOP counts where the best size changes, so at least {MIN_GROUPS + 1} "
            f"sizes, but the {len(known)} curves have {len(edges)} such FLOP counts"
            + "".join(f"; {reason}" for reason in left_out[:3])
            + "; add runs of other sizes, or longer runs"
        )
    return SizeLaw(tuple(edges), tuple(left_out), tuple(lines_through_edges(edges, draws, np.random.default_rng(seed))))


def lines_through_edges(edges: Sequence[BestSize], draws: int, rng: np.random.Generator) -> list[Lines]:
    """Returns the lines fitted to `edges`, then the lines of each bootstrap draw.

    Only FLOPs have an error, so log C is fitted over log N and the line is inverted. Each bootstrap draw resamples the
    residuals and scales them by Student's factor for few points. D follows from N and C.
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
    """Returns (FLOPs [C], lowest smoothed loss per size [S, C], parameters [S], FLOPs per token [S]).

    Sizes are in increasing order. A loss is infinite where no curve has this FLOP count. Raises BadInput if a loss or
    token count is not finite and positive.
    """
    for curve in curves:
        if not (min(*curve.tokens, *curve.losses) > 0 and np.isfinite(curve.losses).all()):
            raise BadInput(
                f"a run with {curve.params:.3g} parameters has a loss or token count that is not finite and above 0; "
                "exclude this run"
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
    """Returns (optima at the FLOP counts where the best size changes, reasons for excluded FLOP counts)."""
    flops_C, losses_SC, params_S, per_token_S = losses_by_size(curves)
    some = np.isfinite(losses_SC).any(axis=0)
    flops_C, losses_SC = flops_C[some], losses_SC[:, some]
    best_C, found, left_out = losses_SC.argmin(axis=0), [], []
    winners = np.unique(best_C)
    geometric_mean = lambda values: float(np.exp(np.log(values).mean()))
    for small, large in pairwise(winners):
        # Noise makes sizes alternate near an edge: minimise the number of FLOP counts on the wrong side of it.
        sides_C = np.where(best_C >= large, 1, -1)
        at = int(np.argmin(np.cumsum(sides_C) - sides_C))  # that number, up to a constant
        both = slice(max(at - 1, 0), at + 1)
        if not 0 < at or not np.isfinite(losses_SC[small : large + 1, both]).all():
            left_out.append(
                f"{count(float(params_S[large]))} parameters overtake {count(float(params_S[small]))} at a FLOP count "
                "that some curves of these sizes do not cover"
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
    """Returns (log tokens, smoothed log loss). Local linear regression in log-log preserves power laws."""
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
    """Returns the first value, with a quantile interval of all values that includes the first value."""
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
    """Returns the law of approach 2. The result is deterministic for the same points and seed.

    budgets: FLOPs of each group; if empty, groups have similar FLOPs. within: largest relative difference from the
    group's FLOPs. Raises BadInput if fewer than three groups have their best size inside the range of sizes.
    """
    rng, groups = np.random.default_rng(seed), equal_flops_groups(points, budgets, within)
    found = [(group, parabola_minimum(group, np.ones(len(group)))) for group in groups]
    optima = [optimum for _, optimum in found if isinstance(optimum, BestSize)]
    left_out = [reason for _, reason in found if isinstance(reason, str)]
    if len(optima) < MIN_GROUPS:
        raise BadInput(
            f"approach 2 needs {MIN_GROUPS} FLOP budgets whose best size is inside the range of sizes, but only "
            f"{len(optima)} have one; add runs of other sizes" + "".join(f"; {reason}" for reason in left_out[:3])
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
    """Returns the least-squares lines through the optima."""
    log_flops = np.log([optimum.flops for optimum in optima])
    lines = [np.polyfit(log_flops, np.log(values), 1) for values in zip(*[(o.params, o.tokens) for o in optima])]
    (a, a_start), (b, b_start) = lines
    return float(a), float(a_start), float(b), float(b_start)


def equal_flops_groups(points: Sequence[Point], budgets: Sequence[float], within: float) -> list[list[Point]]:
    """Returns the points in groups of nearly equal FLOPs."""
    if budgets:
        near = lambda budget: [point for point in points if abs(point.compute / budget - 1) <= within]
        return [group for budget in budgets if (group := near(budget))]
    return group_by(points, lambda point: point.compute, within)


def group_by(points: Iterable[T], key: Callable[[T], float], within: float) -> list[list[T]]:
    """Returns the sorted points in groups whose keys have a relative difference of at most `within`."""
    groups: list[list[T]] = []
    for point in sorted(points, key=key):
        if groups and key(point) <= (1 + within) * key(groups[-1][0]):
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def parabola_minimum(group: Sequence[Point], weights: np.ndarray) -> BestSize | str:
    """Returns the minimum of a parabola fitted to the loss over log N, or the reason that there is none."""
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
    """Returns the results of all approaches. description: text about `flops`. law: fit of `points`, if known."""
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
    """Returns text with the loss law of approach 3 and the compute-optimal size."""
    try:
        law = law or fit(points)
    except BadInput as error:
        return f"{LOSS} of the loss: {error}."
    terms = law.terms
    if not (terms.A and terms.B):
        term = "parameters" if law.form == "params" else "tokens"
        return f"{LOSS} of the loss: the runs determine only the term in {term}, but a best size needs both terms."
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
