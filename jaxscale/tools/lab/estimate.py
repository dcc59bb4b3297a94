"""Means, optima, power laws and critical batches from a few noisy runs, with 90% intervals.

Intervals assume normal noise between seeds. They cover only the variation between seeds, and not different data, sizes
or training lengths.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from jaxscale.tools.reporting.axes import smooth

CONFIDENCE = 0.9
FLAT = 100.0  # the search for a critical batch extends by this factor below and above the batches


class Undetermined(Exception):
    """Raised if the runs do not determine a value. The message is the last clause of a sentence."""


class Estimate(NamedTuple):
    """A number and its interval. low and high are None if there is too little data for an interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """Returns text with about two significant digits of the interval's width."""
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        width = (self.high - self.low) / max(abs(self.value), 1e-300)
        digits = min(max(2, 1 + math.ceil(-math.log10(width))), 6) if 0 < width < math.inf else 4
        value, low, high = (f"{number:.{digits}g}" for number in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"

    def has(self, value: float) -> bool:
        """Returns True if the value is in the interval, and False without an interval."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high

    def mapped(self, f: Callable[[float], float]) -> "Estimate":
        """Applies the nondecreasing function f to the number and to both ends of its interval."""
        if self.low is None or self.high is None:
            return Estimate(f(self.value))
        return Estimate(f(self.value), f(self.low), f(self.high))


def mean(values: Sequence[float]) -> Estimate:
    """Returns the mean of equally weighted values, with an interval from Student's t-distribution."""
    middle = float(np.mean(values))
    if len(values) < 2:
        return Estimate(middle)
    half = t_of(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(middle, middle - half, middle + half)


def t_of(freedom: int) -> float:
    """Returns the quantile of Student's t for a two-sided interval at CONFIDENCE."""
    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom))


def mean_difference(losses: Mapping[Any, Mapping[int, float]], one: Any, other: Any) -> Estimate:
    """Returns the mean of `one` minus that of `other`, over shared seeds. Pools the noise over all of `losses`."""
    seeds = sorted(set.intersection(*(set(of) for of in losses.values())))
    table = np.array([[of[seed] for seed in seeds] for of in losses.values()])
    means = dict(zip(losses, table.mean(axis=1)))
    value, freedom = float(means[one] - means[other]), (len(seeds) - 1) * (len(losses) - 1)
    if freedom < 1:
        return Estimate(value)
    left = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    half = t_of(freedom) * math.sqrt(2 / len(seeds) * float((left**2).sum()) / freedom)
    return Estimate(value, value - half, value + half)


class Optimum(NamedTuple):
    """The x with the lowest y. If edge is 'lowest' or 'highest', the optimum is at or beyond this end of the range."""

    x: Estimate
    y: Estimate
    edge: str = ""

    def __str__(self) -> str:
        bound = {"lowest": "at most ", "highest": "at least "}.get(self.edge, "")
        return f"{bound}{self.x}"


def optimum(curves: Sequence[Mapping[float, float]]) -> Optimum:
    """Returns the best x, from a parabola in log x through three points of each curve, averaged over curves.

    curves: one {x: y} per seed without diverged runs, with x above 0. If the lowest point is at an end of the range, no
    parabola is fitted and x is this end. Raises Undetermined if no curve has a point.
    """
    lowest = [vertex(curve) for curve in curves if curve]
    if not lowest:
        raise Undetermined("all runs diverged")
    edges = [edge for _, _, edge in lowest]
    logs, values = mean([math.log(x) for x, _, _ in lowest]), mean([y for _, y, _ in lowest])
    edge = max(sorted(edges, reverse=True), key=edges.count)  # a tie counts as an end: the optimum may be beyond
    return Optimum((Estimate(logs.value) if edge else logs).mapped(math.exp), values, edge)


def vertex(curve: Mapping[float, float]) -> tuple[float, float, str]:
    """Returns (x, y, edge) of the lowest point of one curve."""
    xs = sorted(curve)
    place = min(range(len(xs)), key=lambda i: curve[xs[i]])
    if len(xs) < 3 or place in (0, len(xs) - 1):
        return xs[place], curve[xs[place]], "lowest" if place == 0 else "highest"
    around = xs[place - 1 : place + 2]
    a, b, c = np.polyfit(np.log(around), [curve[x] for x in around], 2)
    if a <= 0:
        return xs[place], curve[xs[place]], ""
    at = float(np.clip(-b / (2 * a), math.log(around[0]), math.log(around[-1])))
    return math.exp(at), float(a * at**2 + b * at + c), ""


class Power(NamedTuple):
    """Power law y = scale * x**exponent."""

    exponent: Estimate
    scale: float

    def __call__(self, x: float) -> float:
        return self.scale * x**self.exponent.value


def power(xs: Sequence[float], ys: Sequence[float]) -> Power:
    """Returns a power law fitted by least squares in log space. The interval comes from the scatter around the fit."""
    x, y = np.log(xs), np.log(ys)
    found: Any = stats.linregress(x, y)  # scipy is untyped; the result has slope, intercept and stderr
    slope, freedom = float(found.slope), len(xs) - 2
    half = t_of(freedom) * float(found.stderr) if freedom > 0 else 0.0
    exponent = Estimate(slope, slope - half, slope + half) if freedom > 0 else Estimate(slope)
    return Power(exponent, math.exp(found.intercept))


class Critical(NamedTuple):
    """Number of tokens to a loss at batch size B: least * (1 + B / batch) (arXiv:1812.06162, eq. 2.11)."""

    batch: Estimate
    least: float

    def __call__(self, batch: float) -> float:
        return self.least * (1 + batch / self.batch.value)


def critical_batch(batches: Sequence[float], tokens: Sequence[float]) -> Critical:
    """Fits Critical to batch sizes and their numbers of tokens to a loss. Raises Undetermined if no law fits."""
    if len(batches) < 3:
        raise Undetermined("the fit needs three batch sizes that reached the loss")
    x, y = np.asarray(batches, float), np.log(tokens)
    law = lambda x, least, batch: least + np.logaddexp(0.0, np.log(x) - batch)
    least, most = math.log(x.min() / FLAT), math.log(FLAT * x.max())
    start = [y.min(), math.log(np.median(x))]
    fit, covariance = optimize.curve_fit(law, x, y, start, bounds=([-np.inf, least], [np.inf, most]))
    if fit[1] < least + 0.1:
        raise Undetermined("tokens grow as fast as the batch size: all batch sizes are far above the critical batch")
    if fit[1] > most - 0.1:
        raise Undetermined("larger batches need hardly any more tokens: all batch sizes are below the critical batch")
    freedom = len(x) - 2
    half = t_of(freedom) * math.sqrt(covariance[1][1]) if freedom > 0 else math.inf
    known = half < math.log(FLAT)  # a wider interval is not informative
    ends = tuple(math.exp(fit[1] + sign * half) for sign in (-1, 1)) if known else (None, None)
    return Critical(Estimate(math.exp(fit[1]), *ends), math.exp(fit[0]))


def noise_scale(small: float, large: float, norms_small: Sequence[float], norms_large: Sequence[float]) -> Estimate:
    """Returns the gradient noise scale trace(covariance) / |gradient|**2 in tokens, from norms at two batch sizes.

    By arXiv:1812.06162, appendix A.1, E|G_B|**2 = |G|**2 + trace / B. small, large: batch sizes in tokens. Raises
    Undetermined without norms, or if the norms do not separate the gradient from its noise.
    """
    if not (len(norms_small) and len(norms_large)):
        raise Undetermined("no gradient norm was logged")
    squares = [np.square(norms) for norms in (norms_small, norms_large)]

    def scale(small_value: float, large_value: float) -> float:
        gradient = (large * large_value - small * small_value) / (large - small)
        trace = (small_value - large_value) / (1 / small - 1 / large)
        return trace / gradient if gradient > 0 and trace > 0 else math.nan

    value = scale(*(float(np.mean(s)) for s in squares))
    if not math.isfinite(value):
        raise Undetermined("the gradient is too small compared with its noise, or too few gradients were measured")
    random = np.random.default_rng(0)
    drawn = [scale(*(float(np.mean(random.choice(s, len(s)))) for s in squares)) for _ in range(400)]
    drawn = [one for one in drawn if math.isfinite(one)]
    tail = 50 * (1 - CONFIDENCE)
    return Estimate(value, *(float(np.percentile(drawn, at)) for at in (tail, 100 - tail)))


def tokens_to(target: float, tokens: Sequence[float], losses: Sequence[float], half: int = 8) -> float | None:
    """Returns the tokens at which the loss, smoothed over `half` points on each side, reaches `target`, or None."""
    smoothed = smooth(losses, half)
    at = next((i for i, loss in enumerate(smoothed) if loss <= target), None)
    if not at:
        return None if at is None else float(tokens[0])
    part = (smoothed[at - 1] - target) / (smoothed[at - 1] - smoothed[at])
    return float(tokens[at - 1] + part * (tokens[at] - tokens[at - 1]))
