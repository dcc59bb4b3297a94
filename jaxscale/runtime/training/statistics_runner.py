"""Runs the statistics program of core/statistics.py during training, and flattens its results to metrics."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxscale.core.batch import Batch
from jaxscale.core.state import TrainState
from jaxscale.core.statistics import ZERO_GRAD, Statistics, StatisticsStep


def flatten_statistics(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns Statistics as metrics {'stats/activation_rms/00': number, 'stats/grad_norm/embedding': number, ...}.

    Layer indices are zero-padded, so that names sort by layer. For ZERO_GRAD, only parameters with a zero gradient
    have a metric, such as 'stats/zero_grad/blocks/1/mlp/up', whose value is 1.0.
    """
    zero = statistics.get(ZERO_GRAD, {})
    statistics = {name: parts for name, parts in statistics.items() if name != ZERO_GRAD}
    starts = [(int(key), values) for parts in statistics.values() for key, values in parts.items() if key.isdigit()]
    last = max(start + len(values) for start, values in starts) - 1
    digits = max(2, len(str(last)))
    metrics = {}
    for name, parts in statistics.items():
        for key, values in parts.items():
            if key.isdigit():
                layers = enumerate(values.tolist(), int(key))
                metrics |= {f"stats/{name}/{layer:0{digits}}": value for layer, value in layers}
            else:
                metrics[f"stats/{name}/{key}"] = float(values)
    metrics |= {f"stats/{ZERO_GRAD}/{name}": 1.0 for path, flags in zero.items() for name in flagged_paths(path, flags)}
    return dict(sorted(metrics.items()))


def flagged_paths(path: str, flags: np.ndarray) -> list[str]:
    """Returns the path of a parameter if its flag is set. For stacked parameters, returns a path per flagged layer."""
    if not flags.ndim:
        return [path] * bool(flags)
    stack, _, name = path.partition("/")
    return [f"{stack}/{layer}/{name}" for layer in np.flatnonzero(flags)]


class StatisticsRunner:
    """Runs the statistics program at its interval. Throughput excludes its time."""

    def __init__(
        self, step: StatisticsStep | None, every_steps: int, exclude: Callable[[float], None], phase: Callable
    ):
        """`exclude(seconds)` removes time from the throughput."""
        self.step, self.every_steps, self.exclude, self.phase = step, every_steps, exclude, phase

    def dispatch(self, step: int, state: TrainState, batch: Batch) -> Statistics | None:
        """Dispatches the program if the statistics of this step are due. Compiles at the first call.

        Call it before the training step, which donates the state.
        """
        if self.step is None or not self.every_steps or step % self.every_steps:
            return None
        with self.phase("statistics", step), self.excluded():
            return self.step(state, batch)

    def fetch(self, step: int, statistics: Statistics | None) -> dict[str, float]:
        """Returns the statistics as metrics, or {} if none were due. Blocks until they are computed.

        Call it when the previous step has finished, so that only the time of the statistics is excluded.
        """
        if statistics is None:
            return {}
        with self.phase("statistics", step), self.excluded():
            return flatten_statistics(jax.device_get(statistics))

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Excludes the time of the block from the throughput."""
        began = time.monotonic()
        yield
        self.exclude(time.monotonic() - began)
