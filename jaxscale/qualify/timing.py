"""Seconds of a call, by any clock."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Clock = Callable[[], float]


class Timed(NamedTuple):
    """Seconds of a call that was made several times."""

    median: float
    low: float
    high: float
    calls: int

    def rate(self, amount: float) -> tuple[float, float, float]:
        """(amount a second at the median, at the slowest call, at the fastest one)."""
        return amount / self.median, amount / self.high, amount / self.low


def seconds_of(call: Callable[[], Any], clock: Clock = time.perf_counter) -> tuple[float, Any]:
    """(seconds of one call, what it returns). JAX's calls are asynchronous: `call` waits for its own result."""
    began = clock()
    result = call()
    return clock() - began, result


def timed(call: Callable[[], Any], times: int, *, clock: Clock = time.perf_counter) -> Timed:
    """Several calls, each waited for, after one that compiles and warms up. `call` returns arrays."""
    jax.block_until_ready(call())
    return timed_warm(lambda: jax.block_until_ready(call()), times, clock)


def timed_warm(call: Callable[[], Any], times: int, clock: Clock = time.perf_counter) -> Timed:
    """Several calls, each of which waits for its own result."""
    seconds = [seconds_of(call, clock)[0] for _ in range(times)]
    return Timed(statistics.median(seconds), min(seconds), max(seconds), times)


def median_seconds(call: Callable[[], Any], times: int, clock: Clock = time.perf_counter) -> float:
    """The median of several calls."""
    return timed_warm(call, times, clock).median
