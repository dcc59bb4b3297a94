"""Models made of their settings, their logits, and the training objective on a batch: cross-entropy of its targets and
named auxiliary losses, as sums over tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.data.batch import Batch
from jaxscale.models import model_class
from jaxscale.models.config import NO_LORA, LoraConfig, ModelConfig
from jaxscale.models.layers import OneStack
from jaxscale.models.lora import adapting, adapting_groups, add_adapters, frozen_but_adapters
from jaxscale.models.moe_metrics import MoEMetrics, moe_sums
from jaxscale.ops.attention.xla import narrowed
from jaxscale.ops.cross_entropy import LossSettings, summed_cross_entropy, token_nats, token_scores
from jaxscale.ops.kernels import Kernels
from jaxscale.sharding.shardings import Gather, no_gather
from jaxscale.sharding.tensor_axis import NO_TENSOR_AXIS, TensorAxis


class Model(Protocol):
    """The attributes and methods of every model, which is an nnx.Module."""

    @property
    def cfg(self) -> ModelConfig:
        """The settings that it is made of."""
        ...

    @property
    def tensor(self) -> TensorAxis:
        """The axis of devices that share its matrices."""
        ...

    def hidden(self, *inputs: Any, **encoder: Any) -> jax.Array:
        """Returns the last hidden states, compute_dtype[B, T, D], of the device's own positions.

        inputs: tokens_BT, positions_BT, segment_ids_BT and, for dropout, keys_B. encoder: an EncoderInput under this
        name, for a model that has an encoder.
        """
        ...

    def unembedding(self, h_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (h_BTD, the output projection [D, V]), whose product is the logits."""
        ...


def make_model(
    cfg: ModelConfig,
    *,
    key: jax.Array,
    kernels: Kernels,
    gather: Gather = no_gather,
    tensor: TensorAxis = NO_TENSOR_AXIS,
    lora: LoraConfig = NO_LORA,
) -> Model:
    """The model of this config with parameters drawn from `key`. The defaults are for one device.

    lora: with its adapters, the only parameters that a gradient reaches.
    """
    model = model_class(cfg)
    if lora.on:
        experts = kernels.experts._replace(project=adapting_groups(kernels.experts.project))
        kernels = dataclasses.replace(kernels, project=adapting(kernels.project), experts=experts)
        gather = frozen_but_adapters(gather)
        made = model(cfg, rngs=nnx.Rngs(params=key), kernels=kernels, gather=gather, tensor=tensor)
        return add_adapters(made, lora, key)
    return model(cfg, rngs=nnx.Rngs(params=key), kernels=kernels, gather=gather, tensor=tensor)


def logits(model: Model, tokens_BT, positions_BT=None, segment_ids_BT=None, **more) -> jax.Array:
    """All logits, float32[B, T, V]: for tests and small batches. One document a row unless told otherwise.

    segment_ids_BT: or a Scope with a prefix. more: encoder, for a model that has one.
    """
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones_like(tokens_BT)
    return unembed(model, model.tensor.all_gather(model.hidden(tokens_BT, positions_BT, segment_ids_BT, **more)))


def unembed(model: Model, h: jax.Array) -> jax.Array:
    """Logits of hidden states [..., D] of all positions asked for, float32[..., V]."""
    cfg = model.cfg
    h, w_DV = model.unembedding(h)
    h, w_DV = h.astype(cfg.embed_dtype), w_DV.astype(cfg.embed_dtype)
    out = model.tensor.all_gather_last(jnp.einsum("...D,DV->...V", h, w_DV, preferred_element_type=jnp.float32))
    return out if cfg.logit_softcap is None else cfg.logit_softcap * jnp.tanh(out / cfg.logit_softcap)


def summed_loss(
    model: Model,
    batch: Batch,
    keys_B: jax.Array | None,
    aux_weights: Mapping[str, float],
    num_sources: int = 0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(what is minimised, its named parts), float32[] sums over the tokens with weight: the caller divides once.

    num_sources: of the mixture that batch.sources numbers; then source_nats and source_tokens, float32[num_sources],
    are among the parts.
    """
    h_BTD, metrics = states_and_metrics(model, batch, keys_B)
    total, parts = loss_of(model, h_BTD, batch, aux_weights, num_sources)
    if metrics is None:
        return total, parts
    added, more = moe_sums(metrics, aux_weights)
    return total + added, parts | more


def loss_of(
    model: Model, h_BTD: jax.Array, batch: Batch, aux_weights: Mapping[str, float], num_sources: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """summed_loss() from the last hidden state of the device's own positions."""
    sums = summed_cross_entropy(
        *logit_factors(model, h_BTD),
        batch.targets,
        batch.weights,
        loss_settings(model, z_loss=float(aux_weights.get("z_loss", 0.0)), per_row=num_sources > 0),
    )
    parts = {"loss": sums.nats} | ({"z_loss": sums.z} if "z_loss" in aux_weights else {})
    if num_sources:
        per_source = lambda values_B: jax.ops.segment_sum(values_B, batch.sources[:, 0], num_sources)
        parts["source_nats"] = per_source(sums.row_nats)
        parts["source_tokens"] = per_source(jnp.sum(batch.weights, axis=1))
    return sums.total, parts


def token_losses(model: Model, batch: Batch) -> jax.Array:
    """Cross-entropy of each target, float32[B, T] [nats]; where the weight is 0 it means nothing."""
    return token_nats(*logit_factors(model, hidden_states(model, batch, None)), batch.targets, loss_settings(model))[0]


def target_scores(model: Model, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """(cross-entropy of each target [nats], whether no token is likelier than it), [B, T], nothing where the weight
    is 0: nats 0 and true, so that both can be summed up."""
    factors = logit_factors(model, hidden_states(model, batch, None))
    nats_BT, likeliest_BT = token_scores(*factors, batch.targets, loss_settings(model))
    return jnp.where(batch.weights > 0, nats_BT, 0.0), likeliest_BT | (batch.weights == 0)


def loss_settings(model: Model, **more: Any) -> LossSettings:
    """The model's own, and more of them."""
    cfg = model.cfg
    return LossSettings(chunk_tokens=cfg.loss_chunk_tokens, softcap=cfg.logit_softcap, tensor=model.tensor, **more)


def logit_factors(model: Model, h_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the last hidden state of all positions, the output projection or the device's part of it): the logits are their
    product, computed in the former's dtype. h_BTD: of the device's own positions."""
    with jax.named_scope("loss"):
        h_BTD, w_DV = model.unembedding(h_BTD)
        return model.tensor.all_gather(h_BTD.astype(model.cfg.embed_dtype)), w_DV


def hidden_states(model: Model, batch: Batch, keys_B: jax.Array | None) -> jax.Array:
    """model.hidden of a batch, with the prefix and the encoder's input that it may have."""
    return states_and_metrics(model, batch, keys_B)[0]


def states_and_metrics(model: Model, batch: Batch, keys_B: jax.Array | None) -> tuple[jax.Array, MoEMetrics | None]:
    """Returns (hidden_states() of a batch, metrics of its mixture-of-experts layers or None)."""
    segments = narrowed(batch.segment_ids, batch.prefix)
    if isinstance(model, OneStack):
        return model.through(batch.tokens, batch.positions, segments, keys_B)
    encoded = {} if batch.encoder is None else {"encoder": batch.encoder}
    return model.hidden(batch.tokens, batch.positions, segments, keys_B, **encoded), None
