"""Validation: loss and bits per byte of a fixed set, in total and by source, and the loss by position.

B batch  T position
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.core.batch import Batch


class Sums(NamedTuple):
    """Sums over the tokens of a batch or of the whole set."""

    sources: jax.Array  # float32[3, sources]: nats, tokens, bytes
    positions: jax.Array  # float32[2, ranges]: nats, tokens


EvalStep = Callable[[Any, Batch, jax.Array, jax.Array], Sums]


def make_eval_step(token_losses: Callable[[Any, Batch], jax.Array], num_sources: int) -> EvalStep:
    """Returns a function (params, batch, sources_BT, bytes_BT) -> Sums by source and by position range."""

    def eval_step(params: Any, batch: Batch, sources_BT: jax.Array, bytes_BT: jax.Array) -> Sums:
        nats_BT = jnp.where(batch.weights > 0, token_losses(params, batch), 0.0)
        ranges_BT = 32 - jax.lax.clz(batch.positions.astype(jnp.int32))  # bit length of the position in its document
        num_ranges = len(position_ranges(batch.positions.shape[1]))
        by_source = lambda x_BT: jax.ops.segment_sum(x_BT.reshape(-1), sources_BT.reshape(-1), num_sources)
        by_range = lambda x_BT: jax.ops.segment_sum(x_BT.reshape(-1), ranges_BT.reshape(-1), num_ranges)
        sources = (nats_BT, batch.weights, bytes_BT * batch.weights)
        return Sums(jnp.stack(list(map(by_source, sources))), jnp.stack(list(map(by_range, sources[:2]))))

    return eval_step


def position_ranges(seq_len: int) -> list[tuple[int, int]]:
    """Returns ranges [(first, last)] of the number of input tokens of a document up to a target: 1, 2, 3-4, ..."""
    ends = [2**power for power in range((seq_len - 1).bit_length() + 1)]
    return [(end // 2 + 1, min(end, seq_len)) for end in ends]


def summarise(sums: np.ndarray, source_names: Sequence[str]) -> dict[str, float]:
    """Returns metrics from float[3, sources] sums: loss [nats/token] and bits per byte, in total and by source.

    Bits per byte includes the loss of end-of-document tokens, and is comparable across tokenizers.
    """
    metrics = describe("validation", sums.sum(axis=1))
    if len(source_names) > 1:
        for index, name in enumerate(source_names):
            metrics |= describe(f"validation/{name}", sums[:, index])
    return metrics


def describe(name: str, sums: np.ndarray) -> dict[str, float]:
    """Returns the loss and bits per byte of one source, or {} if it has no tokens."""
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
    """Returns the metrics of the whole set. batches: (Batch, sources_BT, bytes_BT) tuples on the devices."""
    parts = [eval_step(params, *batch) for batch in batches]
    total = lambda *arrays: np.sum([np.asarray(array, np.float64) for array in arrays], axis=0)
    sums = jax.tree.map(total, *parts)
    ranges = zip(position_ranges(batches[0][0].positions.shape[1]), *sums.positions.tolist(), strict=True)
    by_position = {f"validation_by_position/{a}-{b}/loss": nats / tokens for (a, b), nats, tokens in ranges if tokens}
    return summarise(sums.sources, source_names) | by_position
