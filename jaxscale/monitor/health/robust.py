"""Statistics that one bad value in two does not move, over short windows of a metric."""

import collections
import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from jaxscale.monitor.spikes import SIGMA_OF_MAD, robust_sigma

EVERY = 8  # values between two looks at the noise of the whole window, which costs the most


def deviation(values: Sequence[float], centre: float) -> float:
    """The median absolute deviation from the centre."""
    return median([abs(value - centre) for value in values])


class Judged(NamedTuple):
    """A value beside the values before it."""

    centre: float
    sigma: float
    ratio: float  # of the value to the centre
    sigmas: float  # above the centre


def loss_limit(ratio: float, centre: float) -> float:
    """`ratio` times the centre of a loss; below a nat the rise is that of a nat: a loss near 0 doubles by chance."""
    return centre + (ratio - 1) * max(centre, 1.0)


def many(ratio: float, decimals: int) -> str:
    """'2.67', for people; 'many' where it is of 0."""
    return f"{ratio:.{decimals}f}" if math.isfinite(ratio) else "many"


class Baseline:
    """The accepted values of a metric, by which the next one is judged before it is let in.

    What is refused never enters, so that a spike cannot raise what the next one is measured against.
    """

    def __init__(self, size: int = 50, near: int = 15, enough: int = 10):
        """near: values that the centre is of. size: that the noise is of. enough: before which nothing is judged."""
        self.values: collections.deque[float] = collections.deque(maxlen=size)
        self.near, self.enough = near, enough
        self.known: tuple[float, float] | None = None  # centre and sigma, until another value enters
        self.noise, self.added = 0.0, 0  # by the differences between neighbours; values since the window began

    def add(self, value: float) -> None:
        """Lets a value in."""
        self.values.append(value)
        self.known, self.added = None, self.added + 1

    def restart(self, values: Sequence[float]) -> None:
        """Begins anew with these values."""
        self.values.clear()
        self.values.extend(values)
        self.known, self.added = None, 0

    def usual(self) -> tuple[float, float] | None:
        """(centre, standard deviation of the noise); None while there are too few values.

        The noise is the larger of two estimates: about the centre, which a trend widens, and of the differences between
        neighbours, which it does not.
        """
        if len(self.values) < self.enough:
            return None
        if self.known is None:
            values = list(self.values)
            near = values[-self.near :]
            centre = median(near)
            if self.added % EVERY == 0 or len(values) < 2 * EVERY:
                steps = [abs(after - before) for before, after in zip(values, values[1:])]
                self.noise = SIGMA_OF_MAD * median(steps) / math.sqrt(2)
            self.known = centre, max(robust_sigma(centre, deviation(near, centre)), self.noise)
        return self.known

    def judge(self, value: float) -> Judged | None:
        """The value beside the accepted ones; None while there are too few."""
        if (usual := self.usual()) is None:
            return None
        centre, sigma = usual
        ratio = value / centre if centre > 0 else math.inf
        return Judged(centre, sigma, ratio, (value - centre) / sigma if sigma else math.inf)


class Slope(NamedTuple):
    """A least-squares line."""

    per_x: float
    error: float  # its standard error, widened for neighbours that move together
    level: float  # the mean of y


def slope(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """The line through at least three points, with the standard error of its slope.

    Neighbouring residuals with correlation r count as n (1 - r) / (1 + r) points, as in a first-order autoregression.
    """
    n = len(xs)
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    sum_xx = sum((x - mean_x) ** 2 for x in xs)
    per_x = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum_xx
    rest = [y - mean_y - per_x * (x - mean_x) for x, y in zip(xs, ys)]
    variance = sum(r * r for r in rest)
    together = sum(a * b for a, b in zip(rest, rest[1:])) / variance if variance else 0.0
    fewer = (1 + max(together, 0.0)) / (1 - min(max(together, 0.0), 0.9))
    return Slope(per_x, math.sqrt(variance / (n - 2) / sum_xx * fewer), mean_y)


class Blocks:
    """Means of a metric over equal numbers of records, from the first one on, in at most `most` of them.

    When there are more, neighbours are merged, so that a run of any length takes little room.
    """

    def __init__(self, most: int = 128):
        self.most, self.records = most, 1  # of a block
        self.done: list[tuple[float, float]] = []  # mean step, mean value
        self.open: list[tuple[float, float]] = []

    def add(self, step: float, value: float) -> bool:
        """Adds a value; True if it completed a block."""
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
            self.open = left * (self.records // 2)  # half a block, as if its records had its mean
        return True


def mean_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The means of both."""
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
