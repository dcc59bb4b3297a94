"""Validation: loss and bits per byte over a fixed set, in all and for each source."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.data.batch import Batch

EvalStep = Callable[[Any, Batch, jax.Array, jax.Array], jax.Array]


def make_eval_step(token_losses: Callable[[Any, Batch], jax.Array], num_sources: int) -> EvalStep:
    """(params, batch, sources_BT, bytes_BT) -> float32[3, num_sources]: nats, tokens, bytes, summed for each source."""

    def eval_step(params: Any, batch: Batch, sources_BT: jax.Array, bytes_BT: jax.Array) -> jax.Array:
        nats_BT = jnp.where(batch.weights > 0, token_losses(params, batch), 0.0)
        per_source = lambda x_BT: jax.ops.segment_sum(x_BT.reshape(-1), sources_BT.reshape(-1), num_sources)
        return jnp.stack([per_source(nats_BT), per_source(batch.weights), per_source(bytes_BT * batch.weights)])

    return eval_step


def summarise(sums: np.ndarray, source_names: Sequence[str]) -> dict[str, float]:
    """Metrics from float[3, sources] sums: loss [nats/token] and bits per byte, in all and for each source.

    Bits per byte: all nats, those of end-of-document marks too, over the bytes of text; comparable across tokenizers.
    """
    metrics = describe("validation", sums.sum(axis=1))
    if len(source_names) > 1:
        for index, name in enumerate(source_names):
            metrics |= describe(f"validation/{name}", sums[:, index])
    return metrics


def describe(name: str, sums: np.ndarray) -> dict[str, float]:
    """Loss and bits per byte of one source; nothing where it has no tokens."""
    nats, tokens, num_bytes = (float(value) for value in sums)
    if tokens == 0:
        return {}
    found = {f"{name}/loss": nats / tokens}
    if num_bytes:
        found[f"{name}/bits_per_byte"] = nats / math.log(2) / num_bytes
    return found


def evaluate(
    eval_step: EvalStep, params: Any, batches: Sequence[tuple], source_names: Sequence[str]
) -> dict[str, float]:
    """Metrics of the whole set. batches: (Batch, sources_BT, bytes_BT) on the devices."""
    sums = [eval_step(params, *batch) for batch in batches]
    return summarise(np.sum([np.asarray(part, np.float64) for part in sums], axis=0), source_names)
