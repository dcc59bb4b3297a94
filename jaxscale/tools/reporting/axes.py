"""Axes with ticks, and thinning of series to the resolution of a plot. page.js has the same code for zoomed plots."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Points = list[tuple[float, float]]
STEPS = (1.0, 2.0, 5.0, 10.0)
LEAST = 1e-100  # smaller numbers are drawn as 0, so that ratios and logarithms are finite


class Axis(NamedTuple):
    """A range of values. Both ends of a logarithmic axis are positive."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Returns the relative position of a value, 0 at the low end and 1 at the high end, clipped to [-1, 2]."""
        if self.log:
            value = max(value, self.low * 1e-9, 1e-300)
            at = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            at = (value - self.low) / (self.high - self.low)
        return min(max(at, -1.0), 2.0)

    def ticks(self, most: int = 7) -> list[float]:
        """Returns about `most` round values within the range."""
        return log_ticks(self.low, self.high, most) if self.log else linear_ticks(self.low, self.high, most)


def size_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Returns ticks for memory sizes within [low, high]: multiples of a power of two."""
    if not high > low:
        return [low]
    step = 2.0 ** math.ceil(math.log2((high - low) / max(most, 1)) - 1e-9)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def linear_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Returns ticks within [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * s for s in STEPS if power * s >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12 - math.floor(math.log10(step))) for n in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Returns powers of ten within [low, high]. If fewer than 3, adds 2 and 5 times each, or uses linear ticks."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / max(most, 1)))
    within = lambda factors: [
        factor * 10.0**n
        for n in range(first, last + 1, stride)
        for factor in factors
        if low * (1 - 1e-9) <= factor * 10.0**n <= high * (1 + 1e-9)
    ]
    for factors in ((1.0,), (1.0, 2.0, 5.0)):
        if len(found := within(factors)) >= 3:
            return found
    return linear_ticks(low, high, most)


def axis_over(values: Iterable[float], *, log: bool = False, zero: bool = False) -> Axis:
    """Returns an axis over the values, without a few outliers. log: logarithmic axis. zero: axis starts at 0."""
    known = sorted(value if abs(value) > LEAST else 0.0 for value in values if not log or value > LEAST)
    if not known:
        return Axis(0.1, 1.0, True) if log else Axis(0.0, 1.0)
    low, high = known[0], known[-1]
    if log:
        room = (high / low) ** 0.04 if high > low else 1.5
        return Axis(low / room, high * room, True)
    if zero:
        low = min(low, 0.0)
    if len(known) >= 50:
        small, large = (known[int(quantile * len(known))] for quantile in (0.05, 0.95))
        limit = large + max(large - small, 1e-12)
        if high - low > 3 * (limit - low):
            high = limit
    room = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return Axis(low if zero and low == 0.0 else low - room, high + room)


def thin_columns(steps: Sequence[float], values: Sequence[float], columns: int) -> Points:
    """Returns the first, lowest, highest and last point of each pixel column. The drawn line looks the same."""
    points = list(zip(steps, values))
    if len(points) <= 2 * columns:
        return points
    first, last = steps[0], steps[-1]
    width = (last - first) / columns or 1.0
    thinned: Points = []
    for _, group in itertools.groupby(enumerate(points), key=lambda item: int((item[1][0] - first) / width)):
        column = list(group)
        ends = (column[0], column[-1])
        extremes = (min(column, key=lambda item: item[1][1]), max(column, key=lambda item: item[1][1]))
        thinned += [point for _, point in sorted({*ends, *extremes})]
    return thinned


def smooth(values: Sequence[float], half: int, *, steep: bool = False) -> list[float]:
    """Returns a moving average over up to `half` values on each side. steep: symmetric windows at the start."""
    total, means = [0.0, *itertools.accumulate(values)], []
    for i in range(len(values)):
        first, stop = max(i - half, 0), min(i + (min(half, i) if steep else half) + 1, len(values))
        means.append((total[stop] - total[first]) / (stop - first))
    return means
