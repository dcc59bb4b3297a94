"""The training objective on a batch: next-token cross-entropy and named auxiliary losses, as sums over real tokens."""

from collections.abc import Mapping

import jax
from flax import nnx

from jaxscale.data.batch import Batch
from jaxscale.ops.cross_entropy import summed_cross_entropy, token_nats

AUX_LOSSES = ("z_loss",)  # z_loss: the squared log-partition keeps logits near 0 (arXiv:2204.02311, section 5)


def summed_loss(
    model: nnx.Module, batch: Batch, keys_B: jax.Array | None, aux_weights: Mapping[str, float]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(what is minimised, its named parts), float32[] sums over the tokens with weight: the caller divides once."""
    sums = summed_cross_entropy(
        *logit_factors(model, batch, keys_B),
        batch.targets,
        batch.weights,
        chunk_tokens=model.cfg.loss_chunk_tokens,
        z_loss=aux_weights.get("z_loss", 0.0),
        softcap=model.cfg.logit_softcap,
        tensor=model.tensor,
    )
    parts = {"loss": sums.nats} | ({"z_loss": sums.z} if "z_loss" in aux_weights else {})
    return sums.total, parts


def token_losses(model: nnx.Module, batch: Batch) -> jax.Array:
    """Cross-entropy of each target, float32[B, T] [nats]; where the weight is 0 it means nothing."""
    nats_BT, _ = token_nats(
        *logit_factors(model, batch, None),
        batch.targets,
        chunk_tokens=model.cfg.loss_chunk_tokens,
        softcap=model.cfg.logit_softcap,
        tensor=model.tensor,
    )
    return nats_BT


def logit_factors(model: nnx.Module, batch: Batch, keys_B: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(the last hidden state of all positions, the output projection or the device's part of it): the logits are their
    product, computed in the former's dtype."""
    h_BTD, w_DV = model.unembedding(model.hidden(batch.tokens, batch.positions, batch.segment_ids, keys_B))
    return model.tensor.gather(h_BTD.astype(model.cfg.embed_dtype)), w_DV
