"""Times calls with a given clock."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Clock = Callable[[], float]


class Timed(NamedTuple):
    """Median, minimum and maximum seconds of repeated calls."""

    median: float
    low: float
    high: float
    calls: int

    def rate(self, amount: float) -> tuple[float, float, float]:
        """Returns amount per second for the median, the slowest and the fastest call."""
        return amount / self.median, amount / self.high, amount / self.low


def seconds_of(call: Callable[[], Any], clock: Clock = time.perf_counter) -> tuple[float, Any]:
    """Returns (seconds of one call, its result). JAX dispatches asynchronously, so `call` must wait for its result."""
    began = clock()
    result = call()
    return clock() - began, result


def timed(call: Callable[[], Any], times: int, *, clock: Clock = time.perf_counter) -> Timed:
    """Times several calls, waiting for the arrays that each returns, after one that compiles and warms up."""
    jax.block_until_ready(call())
    return timed_warm(lambda: jax.block_until_ready(call()), times, clock)


def timed_warm(call: Callable[[], Any], times: int, clock: Clock = time.perf_counter) -> Timed:
    """Times several calls without a warm-up; each must wait for its result."""
    seconds = [seconds_of(call, clock)[0] for _ in range(times)]
    return Timed(statistics.median(seconds), min(seconds), max(seconds), times)


def median_seconds(call: Callable[[], Any], times: int, clock: Clock = time.perf_counter) -> float:
    """Returns the median seconds of several calls, each of which must wait for its result."""
    return timed_warm(call, times, clock).median
