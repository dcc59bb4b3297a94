"""Seconds of a call, by any clock."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def seconds_of(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Any]:
    """(seconds of one call, what it returns). JAX's calls are asynchronous: `call` waits for its own result."""
    began = clock()
    result = call()
    return clock() - began, result


def median_seconds(call: Callable[[], Any], times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """The median of several calls."""
    return statistics.median(seconds_of(call, clock)[0] for _ in range(times))
