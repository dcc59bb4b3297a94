"""Gradients of a batch taken in microbatches and over devices: the same mathematics as one pass, in less memory.

B batch (of this device)  T position
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.data.batch import Batch
from jaxscale.ops.recorder import SOWN

# (parameters, rows, a random key for each row) -> (sum that is minimised, named sums)
LossFn = Callable[[Any, Batch, jax.Array], tuple[jax.Array, dict[str, Any]]]
same = lambda tree: tree


class Reduction(NamedTuple):
    """How the sums of this device become those of all; each a function from a tree to a tree. Default: one device."""

    num_shards: int = 1  # devices that the batch is spread over
    first_row: Callable[[int], jax.Array | int] = lambda num_rows: 0  # where this device's rows begin in the batch
    each: Callable[[Any], Any] = same  # gradients of one microbatch
    last: Callable[[Any], Any] = same  # gradients of all of them
    sums: Callable[[Any], Any] = same  # scalars


ALONE = Reduction()


def accumulate(
    loss_fn: LossFn,
    params: Any,
    batch: Batch,
    key: jax.Array,
    *,
    num_microbatches: int,
    scale: jax.Array | float = 1.0,
    reduction: Reduction = ALONE,
) -> tuple[dict[str, jax.Array], Any]:
    """(mean of each named loss over the real tokens, gradient of the mean loss), all float32.

    Sums of losses, gradients and token weights run over the microbatches and are divided once, so that padding cannot
    tilt the mean. Over devices they are summed once, at the end, but for what a loss has gathered by itself. What it
    returns under the name SOWN comes back as it is, with a leading axis of microbatches.
    Args: batch: the rows of this device. scale: multiplied into the loss and divided out again in float32 (float16
    needs it).
    """
    scale, keys_B = near_mean(scale, batch, reduction), row_keys(key, batch, reduction)

    def scaled(params, rows, keys_B):
        total, parts = loss_fn(params, rows, keys_B)
        return total * scale, parts | {"objective": total, "real_tokens": jnp.sum(rows.weights)}

    def sums_of(rows, keys_B):
        (_, parts), grads = jax.value_and_grad(scaled, has_aux=True)(params, rows, keys_B)
        sown = {name: parts.pop(name) for name in (SOWN,) if name in parts}
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        with jax.named_scope("reduce_gradients"):
            return (parts, reduction.each(grads)), sown

    if num_microbatches == 1:
        (sums, grads), sown = sums_of(batch, keys_B)
        sown = jax.tree.map(lambda array: array[None], sown)
    else:
        micro = jax.tree.map(lambda field: split_rows(field, num_microbatches), (batch, keys_B))
        first, _ = jax.eval_shape(sums_of, *jax.tree.map(lambda field: field[0], micro))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)

        def add(so_far, rows):
            # Or XLA, which unrolls a loop of two, would hold the activations of both at a time (libtpu 0.0.51).
            so_far, rows = jax.lax.optimization_barrier((so_far, rows))
            found, sown = sums_of(*rows)
            return jax.tree.map(jnp.add, so_far, found), sown

        (sums, grads), sown = jax.lax.scan(add, zeros, micro)
    means, grads = divided(sums, grads, scale, reduction)
    return means | sown, grads


def near_mean(scale: jax.Array | float, batch: Batch, reduction: Reduction) -> jax.Array | float:
    """The scale by which a sum over tokens is near a mean already, inside float16's range; exact for powers of two."""
    return scale / (batch.weights.size * reduction.num_shards)


def row_keys(key: jax.Array, batch: Batch, reduction: Reduction) -> jax.Array:
    """A random key for each row, by its place in the batch: it may be on any device, in any microbatch."""
    num_rows = batch.weights.shape[0]
    row_key = lambda row: jax.random.fold_in(key, row)
    return jax.vmap(row_key)(reduction.first_row(num_rows) + jnp.arange(num_rows))


def divided(
    sums: dict[str, jax.Array], grads: Any, scale: jax.Array | float, reduction: Reduction
) -> tuple[dict[str, jax.Array], Any]:
    """(means, gradients of the mean) from the sums of this device."""
    with jax.named_scope("reduce_gradients"):
        sums, grads = reduction.sums(sums), reduction.last(grads)
    real_tokens = sums.pop("real_tokens")
    tokens = jnp.maximum(real_tokens, 1.0)
    # Integers are counts, and stay what they are.
    mean = lambda value: value if jnp.issubdtype(value.dtype, jnp.integer) else value / tokens
    means = {name: mean(value) for name, value in sums.items()}
    return means | {"real_tokens": real_tokens}, jax.tree.map(lambda grad: grad / (scale * tokens), grads)


def split_rows(rows: jax.Array, parts: int) -> jax.Array:
    """[B, ...] -> [parts, B / parts, ...]: row i goes to part i mod parts, on one device as on many."""
    return jnp.swapaxes(rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]), 0, 1)
