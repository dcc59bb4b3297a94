"""Means and ratios over items with their standard errors, on the host in float64.

An error is that of drawing another sample of such items; None for a single item.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Numbers: TypeAlias = Sequence[float] | np.ndarray


def mean_error(values: Numbers) -> tuple[float, float | None]:
    """Returns (mean, standard error: the sample's deviation, with n - 1, over sqrt(n))."""
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        return float(array.mean()), None
    return float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array)))


def ratio_error(above: Numbers, below: Numbers) -> tuple[float, float | None]:
    """Returns (sum of `above` / sum of `below`, the standard error of that ratio).

    Items are drawn, and each has both numbers, as a document has nats and bytes: the error is of first order in the
    deviations above - ratio * below (Cochran 1977, Sampling Techniques, chapter 6).
    """
    numerators, denominators = np.asarray(above, np.float64), np.asarray(below, np.float64)
    ratio = float(numerators.sum() / denominators.sum())
    if len(numerators) < 2:
        return ratio, None
    deviations = numerators - ratio * denominators
    n = len(numerators)
    return ratio, float(math.sqrt(n / (n - 1) * np.square(deviations).sum()) / denominators.sum())


def exp_error(mean: float, error: float | None) -> tuple[float, float | None]:
    """Returns (exp of a mean, its standard error to first order): a perplexity."""
    value = math.inf if mean > 700 else math.exp(mean)
    return value, None if error is None or not math.isfinite(value) else value * error
