"""What a spike is: how far above the median of the good values before it a loss or a gradient norm lies.

The same arithmetic for all who ask, on Python floats and, with maximum=jnp.maximum, in a compiled step. The guard
decides by it which steps are applied (training/guard.py), recovery describes by it. Health has the same noise and a
limit of its own for every ratio (health/robust.py).
"""

from collections.abc import Callable
from typing import Any

SIGMA_OF_MAD = 1.4826  # of a normal distribution: its standard deviation by its median absolute deviation
LEAST_SIGMA = 1e-3  # of the median: a window may be so even that the next rounding error would be a spike
LEAST_SPIKE = 0.5  # nats per token above the median: a loss near 0 doubles by chance

Maximum = Callable[[Any, Any], Any]


def ratio_limit(ratio: float, median: Any, maximum: Maximum = max) -> Any:
    """The loss above which it is a spike: `ratio` times the median, and half a nat above it."""
    return maximum(ratio * median, median + LEAST_SPIKE)


def robust_sigma(median: Any, deviation: Any, maximum: Maximum = max) -> Any:
    """The standard deviation that a median absolute deviation stands for."""
    return maximum(SIGMA_OF_MAD * deviation, LEAST_SIGMA * abs(median))


def sigma_limit(sigmas: float, median: Any, deviation: Any, maximum: Maximum = max) -> Any:
    """The value above which it is a spike: so many robust standard deviations above the median."""
    return median + sigmas * robust_sigma(median, deviation, maximum)
