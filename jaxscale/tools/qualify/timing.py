"""Timing of calls and of JAX compilations."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"  # event that JAX records for each compilation


class Timed(NamedTuple):
    """Median, minimum and maximum seconds of repeated calls."""

    median: float
    low: float
    high: float

    def rate(self, amount: float) -> tuple[float, float, float]:
        """Returns the amount per second for the median, slowest and fastest call."""
        return amount / self.median, amount / self.high, amount / self.low


def seconds_of(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Any]:
    """Returns (seconds of one call, its result). The call must wait for its result, because JAX is asynchronous."""
    began = clock()
    result = call()
    return clock() - began, result


def timed(call: Callable[[], Any], times: int) -> Timed:
    """Returns the times of several calls, after one warmup call. Waits for the arrays that a call returns."""
    jax.block_until_ready(call())
    seconds = [seconds_of(lambda: jax.block_until_ready(call()))[0] for _ in range(times)]
    return Timed(statistics.median(seconds), min(seconds), max(seconds))


def median_seconds(call: Callable[[], Any], times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the median time of several calls. Each call must wait for its result."""
    return statistics.median(seconds_of(call, clock)[0] for _ in range(times))


class CompileLog:
    """Context manager that records the compilations of JAX."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}  # {function name: seconds of each compiled program}
        self.from_cache = 0

    @property
    def count(self) -> int:
        """Number of programs compiled or read from the compilation cache."""
        return sum(map(len, self.seconds.values()))

    def __enter__(self) -> "CompileLog":
        jax.monitoring.register_event_duration_secs_listener(self.note)
        jax.monitoring.register_event_listener(self.note_hit)
        return self

    def __exit__(self, *exc: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self.note)
        jax.monitoring.unregister_event_listener(self.note_hit)

    def note(self, event: str, duration_secs: float, **facts: Any) -> None:
        """Records a compilation. This is a listener for duration events."""
        if event == COMPILED:
            name = str(facts.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            self.seconds.setdefault(name, []).append(duration_secs)

    def note_hit(self, event: str, **facts: Any) -> None:
        """Event listener that counts hits of the compilation cache."""
        self.from_cache += event == "/jax/compilation_cache/cache_hits"
