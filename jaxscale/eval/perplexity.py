"""Validation: loss and bits per byte over a fixed set, in all and for each source."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.data.batch import Batch
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

EvalStep = Callable[[Any, Batch, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When and on how much held-out text the model is measured."""

    every_steps: int = setting(
        200,
        "steps between validations; 0: only at the end",
        may_change=True,
        read_if="eval.num_rows or not eval.every_steps",
    )
    num_rows: int = setting(
        64,
        "rows of seq_len held-out tokens, always the same ones; 0: no validation",
        read_if="data.val_fraction or data.val_files or data.name=synthetic or not eval.num_rows",
    )

    def __post_init__(self):
        if self.every_steps < 0 or self.num_rows < 0:
            raise BadInput("every_steps and num_rows must be at least 0")


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
