"""Spike limits of a loss or gradient norm, relative to the median of the accepted values before it.

Works on Python floats and, with maximum=jnp.maximum, inside a compiled step. Shared by the guard, which decides which
steps are applied (core/guard.py), recovery, and the health rules, which have other ratio limits (health/robust.py).
"""

from collections.abc import Callable
from typing import Any

SIGMA_PER_MAD = 1.4826  # standard deviation over median absolute deviation of a normal distribution
MIN_SIGMA = 1e-3  # relative to the median: in a constant window every rounding error would be a spike
MIN_SPIKE = 0.5  # nats per token above the median: a loss near 0 doubles by chance

Maximum = Callable[[Any, Any], Any]


def ratio_limit(ratio: float, median: Any, maximum: Maximum = max) -> Any:
    """Returns the loss above which it is a spike: `ratio` times the median, and at least half a nat above it."""
    return maximum(ratio * median, median + MIN_SPIKE)


def robust_sigma(median: Any, deviation: Any, maximum: Maximum = max) -> Any:
    """Estimates the standard deviation from the median absolute deviation."""
    return maximum(SIGMA_PER_MAD * deviation, MIN_SIGMA * abs(median))


def sigma_limit(sigmas: float, median: Any, deviation: Any, maximum: Maximum = max) -> Any:
    """Returns the value above which it is a spike: `sigmas` robust standard deviations above the median."""
    return median + sigmas * robust_sigma(median, deviation, maximum)
