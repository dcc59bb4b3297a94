"""Injects the numerical faults of system/faults.py, which environment variables select in tests."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.core.batch import Batch, ReadRows
from jaxscale.core.gradients import Gradients, Metrics
from jaxscale.core.state import TrainState
from jaxscale.core.step import leaf_name
from jaxscale.system import faults


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CorruptedGradients(Gradients):
    """Gradients of which one leaf is NaN at one step."""

    fault: tuple[int, str]  # step and name of the leaf

    def compute(self, state: TrainState, batch: Batch) -> tuple[Metrics, Any]:
        """Returns (means, gradients)."""
        means, grads = super().compute(state, batch)
        step, leaf = self.fault
        at = lambda path, grad: jnp.where(state.step + 1 == step, jnp.nan, grad) if leaf_name(path) == leaf else grad
        return means, jax.tree_util.tree_map_with_path(at, grads)


def make_gradients(**fields: Any) -> Gradients:
    """Returns Gradients(**fields), or CorruptedGradients if JAXSCALE_SPOIL_GRADIENT selects a fault."""
    fault = faults.corrupt_gradient()
    return Gradients(**fields) if fault is None else CorruptedGradients(**fields, fault=fault)


def corrupt_batches(read: ReadRows) -> ReadRows:
    """Returns a reader with NaN weights or random tokens in the batches that JAXSCALE_SPOIL_BATCHES selects."""
    if (fault := faults.corrupt_batches()) is None:
        return read
    start, stop, kind = fault

    def corrupted(n: int, rows: Sequence[int]) -> Batch:
        batch = read(n, rows)
        if not start <= n < stop:
            return batch
        if kind == "nan":
            return batch._replace(weights=batch.weights * np.float32(np.nan))
        vocab_size, width = int(batch.tokens.max()) + 1, batch.tokens.shape[1]
        noise = [np.random.default_rng((n, row)).integers(0, vocab_size, (2, width), np.int32) for row in rows]
        tokens_BT, targets_BT = np.stack(noise, axis=1)
        return batch._replace(tokens=tokens_BT, targets=targets_BT)

    return corrupted
