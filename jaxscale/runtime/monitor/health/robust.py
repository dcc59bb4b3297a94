"""Robust statistics (median and median absolute deviation) over short windows of a metric."""

import collections
import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from jaxscale.core.config import SIGMA_PER_MAD, robust_sigma

NOISE_EVERY = 8  # values between updates of the noise of the whole window, the most expensive part


def absolute_deviation(values: Sequence[float], centre: float) -> float:
    """Returns the median absolute deviation from the centre."""
    return median([abs(value - centre) for value in values])


class Comparison(NamedTuple):
    """A value compared with the values before it."""

    centre: float
    sigma: float
    ratio: float  # of the value to the centre
    sigmas: float  # above the centre


def loss_limit(ratio: float, centre: float) -> float:
    """Returns `ratio` times the centre of a loss; below 1 nat, the rise of 1 nat: a loss near 0 doubles by chance."""
    return centre + (ratio - 1) * max(centre, 1.0)


def format_ratio(ratio: float, decimals: int) -> str:
    """Returns '2.67', or 'many' for an infinite ratio."""
    return f"{ratio:.{decimals}f}" if math.isfinite(ratio) else "many"


class Baseline:
    """Accepted values of a metric, with which the next one is compared before it is added.

    Callers do not add rejected values, so a spike cannot raise the baseline of the next one.
    """

    def __init__(self, size: int = 50, near: int = 15, enough: int = 10):
        """near: window of the centre. size: window of the noise. enough: least number of values for a comparison."""
        self.values: collections.deque[float] = collections.deque(maxlen=size)
        self.near, self.enough = near, enough
        self.cached: tuple[float, float] | None = None  # centre and sigma, until a value is added
        self.noise, self.added = 0.0, 0  # from differences of neighbours; values since the last reset

    def add(self, value: float) -> None:
        """Adds a value."""
        self.values.append(value)
        self.cached, self.added = None, self.added + 1

    def reset(self, values: Sequence[float]) -> None:
        """Replaces all values."""
        self.values.clear()
        self.values.extend(values)
        self.cached, self.added = None, 0

    def center_and_noise(self) -> tuple[float, float] | None:
        """Returns (centre, standard deviation of the noise); None while there are too few values.

        The noise is the larger of two estimates: deviations from the centre, which a trend increases, and differences
        between neighbours, which it does not.
        """
        if len(self.values) < self.enough:
            return None
        if self.cached is None:
            values = list(self.values)
            near = values[-self.near :]
            centre = median(near)
            if self.added % NOISE_EVERY == 0 or len(values) < 2 * NOISE_EVERY:
                steps = [abs(after - before) for before, after in zip(values, values[1:])]
                self.noise = SIGMA_PER_MAD * median(steps) / math.sqrt(2)
            self.cached = centre, max(robust_sigma(centre, absolute_deviation(near, centre)), self.noise)
        return self.cached

    def compare(self, value: float) -> Comparison | None:
        """Compares a value with the accepted ones; None while there are too few."""
        if (usual := self.center_and_noise()) is None:
            return None
        centre, sigma = usual
        ratio = value / centre if centre > 0 else math.inf
        return Comparison(centre, sigma, ratio, (value - centre) / sigma if sigma else math.inf)


class Slope(NamedTuple):
    """A least-squares line."""

    per_x: float
    error: float  # its standard error, increased for correlated neighbours
    level: float  # the mean of y


def slope(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """Fits a line to at least three points, with the standard error of its slope.

    Neighbouring residuals with correlation r count as n (1 - r) / (1 + r) points, as in a first-order autoregression.
    """
    n = len(xs)
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    sum_xx = sum((x - mean_x) ** 2 for x in xs)
    per_x = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum_xx
    residuals = [y - mean_y - per_x * (x - mean_x) for x, y in zip(xs, ys)]
    variance = sum(r * r for r in residuals)
    correlation = sum(a * b for a, b in zip(residuals, residuals[1:])) / variance if variance else 0.0
    inflation = (1 + max(correlation, 0.0)) / (1 - min(max(correlation, 0.0), 0.9))
    return Slope(per_x, math.sqrt(variance / (n - 2) / sum_xx * inflation), mean_y)


class BlockMeans:
    """Means of a metric over blocks of equal numbers of records.

    Above `most` blocks neighbours are merged, so that memory is bounded.
    """

    def __init__(self, most: int = 128):
        self.most, self.records = most, 1  # of a block
        self.done: list[tuple[float, float]] = []  # mean step, mean value
        self.open: list[tuple[float, float]] = []

    def add(self, step: float, value: float) -> bool:
        """Adds a value; returns True if it completed a block."""
        self.open.append((step, value))
        if len(self.open) < self.records:
            return False
        self.done.append(mean_of(self.open))
        self.open = []
        if len(self.done) > self.most:
            pairs = zip(self.done[0::2], self.done[1::2])
            left = self.done[-1:] if len(self.done) % 2 else []
            self.done = [mean_of(pair) for pair in pairs]
            self.records *= 2
            self.open = left * (self.records // 2)  # an odd block becomes half of the next
        return True


def mean_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns (mean x, mean y)."""
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
