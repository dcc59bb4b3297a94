"""The training objective on a batch: cross-entropy of its targets and named auxiliary losses, as sums over tokens."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.data.batch import Batch
from jaxscale.ops.attention.scope import narrowed
from jaxscale.ops.cross_entropy import summed_cross_entropy, token_nats, token_scores


def summed_loss(
    model: nnx.Module,
    batch: Batch,
    keys_B: jax.Array | None,
    aux_weights: Mapping[str, float],
    num_sources: int = 0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(what is minimised, its named parts), float32[] sums over the tokens with weight: the caller divides once.

    num_sources: of the mixture that batch.sources numbers; then source_nats and source_tokens, float32[num_sources],
    are among the parts.
    """
    sums = summed_cross_entropy(
        *logit_factors(model, batch, keys_B),
        batch.targets,
        batch.weights,
        chunk_tokens=model.cfg.loss_chunk_tokens,
        z_loss=aux_weights.get("z_loss", 0.0),
        softcap=model.cfg.logit_softcap,
        tensor=model.tensor,
        per_row=num_sources > 0,
    )
    parts = {"loss": sums.nats} | ({"z_loss": sums.z} if "z_loss" in aux_weights else {})
    if num_sources:
        per_source = lambda values_B: jax.ops.segment_sum(values_B, batch.sources[:, 0], num_sources)
        parts["source_nats"] = per_source(sums.row_nats)
        parts["source_tokens"] = per_source(jnp.sum(batch.weights, axis=1))
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


def target_scores(model: nnx.Module, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """(cross-entropy of each target [nats], whether no token is likelier than it), [B, T], nothing where the weight
    is 0: nats 0 and true, so that both can be summed up."""
    nats_BT, likeliest_BT = token_scores(
        *logit_factors(model, batch, None),
        batch.targets,
        chunk_tokens=model.cfg.loss_chunk_tokens,
        softcap=model.cfg.logit_softcap,
        tensor=model.tensor,
    )
    return jnp.where(batch.weights > 0, nats_BT, 0.0), likeliest_BT | (batch.weights == 0)


def logit_factors(model: nnx.Module, batch: Batch, keys_B: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(the last hidden state of all positions, the output projection or the device's part of it): the logits are their
    product, computed in the former's dtype."""
    h_BTD = hidden_states(model, batch, keys_B)
    with jax.named_scope("loss"):
        h_BTD, w_DV = model.unembedding(h_BTD)
        return model.tensor.gather(h_BTD.astype(model.cfg.embed_dtype)), w_DV


def hidden_states(model: nnx.Module, batch: Batch, keys_B: jax.Array | None) -> jax.Array:
    """model.hidden of a batch, with the prefix and the encoder's input that it may have."""
    segments = narrowed(batch.segment_ids, batch.prefix)
    encoded = {} if batch.encoder is None else {"encoder": batch.encoder}
    return model.hidden(batch.tokens, batch.positions, segments, keys_B, **encoded)
