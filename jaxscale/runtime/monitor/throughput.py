"""Tokens per second, step time and model FLOPs utilisation (MFU) between two reports."""

import time
import types
from collections.abc import Callable, Mapping


class Throughput:
    """Counts tokens, steps and data-wait seconds since the last report, except for the first step, which compiles.

    Args: flops_per_token: forward and backward, without recomputation (MFU, not HFU; arXiv:2204.02311, appendix B).
    peak_flops: of one chip per second, or None. num_chips: of all hosts.
    """

    def __init__(
        self,
        flops_per_token: float | None,
        peak_flops: float | None,
        num_chips: int = 1,
        clock: Callable[[], float] = time.monotonic,
        is_excluded: Callable[[], bool] = lambda: False,
        flops_by_row_tokens: Mapping[int, float] = types.MappingProxyType({}),
    ):
        """is_excluded: True if the step that has just finished does not count, as during a profile.
        flops_by_row_tokens: {tokens in a row: FLOPs per token} of shorter rows."""
        self.flops_per_token, self.peak_flops, self.num_chips = flops_per_token, peak_flops, num_chips
        self.clock, self.is_excluded, self.flops_by_row_tokens = clock, is_excluded, flops_by_row_tokens
        self.compiled = False  # a step has finished
        self.start()

    def start(self) -> None:
        """Begins a new interval."""
        self.began, self.tokens, self.steps, self.data_wait_seconds = self.clock(), 0, 0, 0.0
        self.excluded_seconds, self.flops = 0.0, 0.0
        self.step_began, self.excluded_in_step = self.began, 0.0

    def add(
        self, tokens: int, data_wait_seconds: float = 0.0, *, excluded: bool = False, row_tokens: int | None = None
    ) -> None:
        """Counts a finished step of `tokens` (the global batch) in rows of row_tokens. excluded: it compiled."""
        if not self.compiled:
            self.compiled = True
            self.start()
            return
        if excluded or self.is_excluded():
            self.excluded_seconds += self.clock() - self.step_began - self.excluded_in_step
            self.step_began, self.excluded_in_step = self.clock(), 0.0
            return
        self.step_began, self.excluded_in_step = self.clock(), 0.0
        self.tokens, self.steps = self.tokens + tokens, self.steps + 1
        flops_per_token = self.flops_per_token or 0.0
        if row_tokens is not None:
            flops_per_token = self.flops_by_row_tokens.get(row_tokens, flops_per_token)
        self.flops += tokens * flops_per_token
        self.data_wait_seconds += data_wait_seconds

    def exclude(self, seconds: float) -> None:
        """Removes seconds from the interval, such as an evaluation."""
        self.excluded_seconds += seconds
        self.excluded_in_step += seconds

    def report(self) -> dict[str, float | None]:
        """Returns {tokens_per_second, step_seconds, data_wait_seconds (per step), mfu} and begins a new interval.

        mfu is None if the peak or the FLOPs are unknown; all are None if no step was counted.
        """
        seconds = self.clock() - self.began - self.excluded_seconds
        counted = self.steps > 0 and seconds > 0
        report = {
            "tokens_per_second": self.tokens / seconds if counted else None,
            "step_seconds": seconds / self.steps if counted else None,
            "data_wait_seconds": self.data_wait_seconds / self.steps if counted else None,
            "mfu": None,
        }
        if counted and self.flops_per_token and self.peak_flops:
            report["mfu"] = self.flops / seconds / (self.peak_flops * self.num_chips)
        self.start()
        return report
