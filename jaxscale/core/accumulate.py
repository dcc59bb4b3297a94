"""Gradient accumulation over microbatches and devices, equal to the gradient of one pass over the whole batch.

B batch (of this device)  T position
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.core.batch import Batch
from jaxscale.core.recorder import SOWN

# (parameters, rows, a random key per row) -> (the minimized sum, named sums)
LossFn = Callable[[Any, Batch, jax.Array], tuple[jax.Array, dict[str, Any]]]
identity = lambda tree: tree


class Reduction(NamedTuple):
    """Reductions over the devices that share a batch, each a function from tree to tree. Default: one device."""

    num_shards: int = 1  # devices that the batch is sharded over
    first_row: Callable[[int], jax.Array | int] = lambda num_rows: 0  # index in the batch of this device's first row
    microbatch_grads: Callable[[Any], Any] = identity  # applied to the gradients of each microbatch
    total_grads: Callable[[Any], Any] = identity  # applied to their sum
    scalars: Callable[[Any], Any] = identity


ONE_DEVICE = Reduction()


def accumulate(
    loss_fn: LossFn,
    params: Any,
    batch: Batch,
    key: jax.Array,
    *,
    num_microbatches: int,
    scale: jax.Array | float = 1.0,
    reduction: Reduction = ONE_DEVICE,
) -> tuple[dict[str, jax.Array], Any]:
    """Returns (mean of each named loss over the target tokens, gradient of the mean loss), all float32.

    Losses, gradients and token weights are summed over the microbatches and divided once, so that padding does not
    bias the mean. They are reduced over devices once, at the end, except what the loss reduces. Intermediates under
    SOWN are returned with a leading axis of microbatches.
    Args: batch: the rows of this device. scale: loss scale, divided out again in float32 (for float16).
    """
    scale, keys_B = per_token_scale(scale, batch, reduction), row_keys(key, batch, reduction)

    def scaled_loss(params, rows, keys_B):
        total, sums = loss_fn(params, rows, keys_B)
        return total * scale, sums | {"objective": total, "real_tokens": jnp.sum(rows.weights)}

    def microbatch_sums(rows, keys_B):
        (_, sums), grads = jax.value_and_grad(scaled_loss, has_aux=True)(params, rows, keys_B)
        sown = {name: sums.pop(name) for name in (SOWN,) if name in sums}
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        with jax.named_scope("reduce_gradients"):
            return (sums, reduction.microbatch_grads(grads)), sown

    if num_microbatches == 1:
        (sums, grads), sown = microbatch_sums(batch, keys_B)
        sown = jax.tree.map(lambda array: array[None], sown)
    else:
        microbatches = jax.tree.map(lambda field: split_microbatches(field, num_microbatches), (batch, keys_B))
        shapes, _ = jax.eval_shape(microbatch_sums, *jax.tree.map(lambda field: field[0], microbatches))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def add(totals, rows):
            # XLA unrolls a loop of two, and would then hold the activations of both microbatches (libtpu 0.0.51).
            totals, rows = jax.lax.optimization_barrier((totals, rows))
            sums, sown = microbatch_sums(*rows)
            return jax.tree.map(jnp.add, totals, sums), sown

        (sums, grads), sown = jax.lax.scan(add, zeros, microbatches)
    means, grads = reduce_and_divide(sums, grads, scale, reduction)
    return means | sown, grads


def per_token_scale(scale: jax.Array | float, batch: Batch, reduction: Reduction) -> jax.Array | float:
    """Divides the loss scale by the batch's positions, so that sums stay inside float16's range (exact for 2**n)."""
    return scale / (batch.weights.size * reduction.num_shards)


def row_keys(key: jax.Array, batch: Batch, reduction: Reduction) -> jax.Array:
    """Returns a random key for each row by its index in the batch, independent of devices and microbatches."""
    num_rows = batch.weights.shape[0]
    row_key = lambda row: jax.random.fold_in(key, row)
    return jax.vmap(row_key)(reduction.first_row(num_rows) + jnp.arange(num_rows))


def reduce_and_divide(
    sums: dict[str, jax.Array], grads: Any, scale: jax.Array | float, reduction: Reduction
) -> tuple[dict[str, jax.Array], Any]:
    """Returns (means, gradients of the mean) over all devices, from the sums of this device."""
    with jax.named_scope("reduce_gradients"):
        sums, grads = reduction.scalars(sums), reduction.total_grads(grads)
    total_weight = sums.pop("real_tokens")
    tokens = jnp.maximum(total_weight, 1.0)
    # integers are counts, not sums over tokens
    mean = lambda value: value if jnp.issubdtype(value.dtype, jnp.integer) else value / tokens
    means = {name: mean(value) for name, value in sums.items()}
    return means | {"real_tokens": total_weight}, jax.tree.map(lambda grad: grad / (scale * tokens), grads)


def split_microbatches(rows: jax.Array, number: int) -> jax.Array:
    """[B, ...] -> [number, B / number, ...]: row i goes to microbatch i mod number, on any number of devices."""
    return jnp.swapaxes(rows.reshape(rows.shape[0] // number, number, *rows.shape[1:]), 0, 1)
