"""Gradients of a batch taken in microbatches: the same mathematics as one pass, in less memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.data.batch import Batch

LossFn = Callable[[Any, Batch, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


def accumulate(
    loss_fn: LossFn,
    params: Any,
    batch: Batch,
    key: jax.Array,
    *,
    num_microbatches: int,
    scale: jax.Array | float = 1.0,
    place_grads: Callable[[Any], Any] = lambda grads: grads,
) -> tuple[dict[str, jax.Array], Any]:
    """(mean of each named loss over the real tokens, gradient of the mean loss), all float32.

    Sums of losses, gradients and token weights run over the microbatches and are divided once, so that padding cannot
    tilt the mean. scale: multiplied into the loss and divided out again in float32 (float16 needs it).
    """
    scale = scale / batch.weights.size  # near a mean already inside float16's range; exact for powers of two

    def scaled(params, rows, key):
        total, parts = loss_fn(params, rows, key)
        return total * scale, parts | {"objective": total, "real_tokens": jnp.sum(rows.weights)}

    def sums_of(rows, key):
        (_, parts), grads = jax.value_and_grad(scaled, has_aux=True)(params, rows, key)
        return parts, place_grads(jax.tree.map(lambda grad: grad.astype(jnp.float32), grads))

    if num_microbatches == 1:
        sums, grads = sums_of(batch, key)
    else:
        micro = jax.tree.map(lambda field: split_rows(field, num_microbatches), batch)
        keys = jax.random.split(key, num_microbatches)
        first = jax.eval_shape(sums_of, jax.tree.map(lambda field: field[0], micro), keys[0])
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)
        add = lambda so_far, rows: (jax.tree.map(jnp.add, so_far, sums_of(*rows)), None)
        (sums, grads), _ = jax.lax.scan(add, (zeros[0], place_grads(zeros[1])), (micro, keys))
    tokens = jnp.maximum(sums.pop("real_tokens"), 1.0)
    means = {name: value / tokens for name, value in sums.items()}
    return means | {"real_tokens": tokens}, jax.tree.map(lambda grad: grad / (scale * tokens), grads)


def split_rows(rows_BT: jax.Array, parts: int) -> jax.Array:
    """[B, T] -> [parts, B / parts, T]: row i goes to part i mod parts.

    Each device keeps its own rows that way; contiguous parts of a sharded batch would cost an all-to-all.
    """
    B, T = rows_BT.shape
    return jnp.swapaxes(rows_BT.reshape(B // parts, parts, T), 0, 1)
