"""Tokens per second, step time and model FLOPs utilisation between two reports. The clock is passed in."""

import time
import types
from collections.abc import Callable, Mapping


class Throughput:
    """Counts tokens, steps and seconds spent waiting for data since the last report.

    The first step of all is left out, since it compiles: the clock starts when it is done.

    Args: flops_per_token: forward and backward, of the model alone (recomputation is not counted: MFU, not HFU;
    arXiv:2204.02311, appendix B). peak_flops: of one chip per second, None where unknown. num_chips: all of them.
    """

    def __init__(
        self,
        flops_per_token: float | None,
        peak_flops: float | None,
        num_chips: int = 1,
        clock: Callable[[], float] = time.monotonic,
        leaves_out: Callable[[], bool] = lambda: False,
        shorter: Mapping[int, float] = types.MappingProxyType({}),
    ):
        """leaves_out: whether the step that has just finished counts for nothing, as while a profile is captured.
        shorter: {tokens in a row: FLOPs per token} of rows that are shorter than the others."""
        self.flops_per_token, self.peak_flops, self.num_chips = flops_per_token, peak_flops, num_chips
        self.clock, self.leaves_out, self.shorter = clock, leaves_out, shorter
        self.compiled = False  # whether a step was done
        self.start()

    def start(self) -> None:
        """Begins a new interval now, with nothing counted."""
        self.began, self.tokens, self.steps, self.data_wait_seconds = self.clock(), 0, 0, 0.0
        self.excluded_seconds, self.flops = 0.0, 0.0
        self.step_began, self.excluded_in_step = self.began, 0.0

    def add(
        self, tokens: int, data_wait_seconds: float = 0.0, *, left_out: bool = False, row_tokens: int | None = None
    ) -> None:
        """Counts one finished step of `tokens` tokens (the whole batch, over all hosts), in rows of row_tokens.

        left_out: it counts for nothing, as one that was compiled does.
        """
        if not self.compiled:
            self.compiled = True
            self.start()
            return
        if left_out or self.leaves_out():
            self.excluded_seconds += self.clock() - self.step_began - self.excluded_in_step
            self.step_began, self.excluded_in_step = self.clock(), 0.0
            return
        self.step_began, self.excluded_in_step = self.clock(), 0.0
        self.tokens, self.steps = self.tokens + tokens, self.steps + 1
        flops_per_token = self.flops_per_token or 0.0
        if row_tokens is not None:
            flops_per_token = self.shorter.get(row_tokens, flops_per_token)
        self.flops += tokens * flops_per_token
        self.data_wait_seconds += data_wait_seconds

    def exclude(self, seconds: float) -> None:
        """Takes seconds out of the interval: an evaluation in its midst is no training time."""
        self.excluded_seconds += seconds
        self.excluded_in_step += seconds

    def report(self) -> dict[str, float | None]:
        """{tokens_per_second, step_seconds, data_wait_seconds (per step), mfu} since the last report; then starts anew.

        mfu is a fraction of the peak, None if the peak or the FLOPs are unknown. All are None if no step was counted.
        """
        seconds = self.clock() - self.began - self.excluded_seconds
        report: dict[str, float | None] = dict.fromkeys(
            ("tokens_per_second", "step_seconds", "data_wait_seconds", "mfu")
        )
        if self.steps and seconds > 0:
            report["tokens_per_second"] = self.tokens / seconds
            report["step_seconds"] = seconds / self.steps
            report["data_wait_seconds"] = self.data_wait_seconds / self.steps
            if self.flops_per_token and self.peak_flops:
                report["mfu"] = self.flops / seconds / (self.peak_flops * self.num_chips)
        self.start()
        return report
