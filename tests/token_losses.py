"""The loss of each token of any batch, by a loaded model."""

import jax
import jax.numpy as jnp


def make_token_losses(model):
    """token_losses(batch) -> cross-entropy of each target, float32[B, T] [nats]; 0 where the weight is 0.

    Any number of rows of any length: they are padded to what the mesh divides.
    """
    sharded, tensor_size = model.sharded, model.mesh.shape["tensor"]

    @jax.jit
    def padded_losses(params, batch):
        B, T = batch.tokens.shape

        def pad(x):
            x = jnp.pad(x, ((0, -B % sharded.plan.batch_axes.num_shards), (0, -T % tensor_size)))
            return jax.lax.with_sharding_constraint(x, sharded.rows_sharding)

        nats_BT = sharded.token_losses(params, jax.tree.map(pad, batch))[:B, :T]
        return jnp.where(batch.weights > 0, nats_BT, 0.0)

    return lambda batch: padded_losses(model.params, batch)
