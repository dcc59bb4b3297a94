"""Model construction, logits, and the training objective: cross-entropy and auxiliary losses, summed over tokens."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.core.batch import Batch
from jaxscale.core.models import model_class
from jaxscale.core.models.config import ModelConfig
from jaxscale.core.models.layers import StackedModel
from jaxscale.core.models.lora import (
    add_adapters,
    make_adapter_only_gather,
    make_lora_grouped_project,
    make_lora_project,
)
from jaxscale.core.models.lora_mup_config import NO_LORA, LoraConfig
from jaxscale.core.models.moe_balance import moe_sums
from jaxscale.core.plan import UNSHARDED, ParallelPlan
from jaxscale.kernels.attention.xla import make_mask_spec
from jaxscale.kernels.vocabulary import LossSettings, summed_cross_entropy, token_nats, token_nats_and_greedy


class Model(Protocol):
    """Attributes and methods of every model, an nnx.Module."""

    @property
    def cfg(self) -> ModelConfig:
        """The settings of the model."""
        ...

    @property
    def plan(self) -> ParallelPlan:
        """The kernels and shardings of the model."""
        ...

    def hidden(self, *inputs: Any, **encoder: Any) -> jax.Array:
        """Returns the last hidden states of local positions, compute_dtype[B, T, D].

        inputs: tokens_BT, positions_BT, segment_ids_BT and, for dropout, keys_B. encoder: keyword argument `encoder` of
        encoder-decoders, an EncoderInput.
        """
        ...

    def unembedding(self, h_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (h_BTD, output projection [D, V]), whose product is the logits."""
        ...


def make_model(
    cfg: ModelConfig, *, key: jax.Array, plan: ParallelPlan = UNSHARDED, lora: LoraConfig = NO_LORA
) -> Model:
    """Returns the model for a config, with parameters drawn from `key`.

    lora: settings of adapters. If the model has adapters, all other parameters are frozen.
    """
    model = model_class(cfg)
    if lora.on:
        kernels = plan.expert_kernels
        plan = plan.replace(
            project=make_lora_project(plan.project),
            expert_kernels=kernels._replace(project=make_lora_grouped_project(kernels.project)),
            gather=make_adapter_only_gather(plan.gather),
        )
    made = model(cfg, rngs=nnx.Rngs(params=key), plan=plan)
    return add_adapters(made, lora, key) if lora.on else made


def logits(model: Model, tokens_BT, positions_BT=None, segment_ids_BT=None, **inputs) -> jax.Array:
    """Returns all logits, float32[B, T, V], for tests and small batches.

    segment_ids_BT: segment ids, or a MaskSpec with a prefix; by default each sequence is one document. inputs: the
    keyword argument `encoder` of encoder-decoders.
    """
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones_like(tokens_BT)
    return unembed(model, model.plan.tensor.all_gather(model.hidden(tokens_BT, positions_BT, segment_ids_BT, **inputs)))


def unembed(model: Model, h: jax.Array) -> jax.Array:
    """Returns the logits float32[..., V] of hidden states [..., D]."""
    cfg = model.cfg
    h, w_DV = model.unembedding(h)
    h, w_DV = h.astype(cfg.embed_dtype), w_DV.astype(cfg.embed_dtype)
    out = model.plan.tensor.all_gather_last(jnp.einsum("...D,DV->...V", h, w_DV, preferred_element_type=jnp.float32))
    return out if cfg.logit_softcap is None else cfg.logit_softcap * jnp.tanh(out / cfg.logit_softcap)


def summed_loss(
    model: Model, batch: Batch, keys_B: jax.Array | None, aux_weights: Mapping[str, float], num_sources: int = 0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (objective, named parts of the objective), as weighted sums over tokens, float32[].

    num_sources: number of data sources in batch.sources. If positive, the parts include source_nats and source_tokens,
    float32[num_sources].
    """
    if not isinstance(model, StackedModel):
        return loss_from_hidden(model, hidden_states(model, batch, keys_B), batch, aux_weights, num_sources)
    segments = make_mask_spec(batch.segment_ids, batch.prefix)
    h_BTD, metrics = model.hidden_and_metrics(batch.tokens, batch.positions, segments, keys_B)
    total, parts = loss_from_hidden(model, h_BTD, batch, aux_weights, num_sources)
    if metrics is None:
        return total, parts
    moe_loss, moe_parts = moe_sums(metrics, aux_weights)
    return total + moe_loss, parts | moe_parts


def loss_from_hidden(
    model: Model, h_BTD: jax.Array, batch: Batch, aux_weights: Mapping[str, float], num_sources: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns summed_loss() without auxiliary losses of experts, given the last hidden states of local positions."""
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
    """Returns the cross-entropy of each target in nats, float32[B, T]. Values of tokens with weight 0 are undefined."""
    return token_nats(*logit_factors(model, hidden_states(model, batch, None)), batch.targets, loss_settings(model))[0]


def target_scores(model: Model, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns (cross-entropy of each target in nats, True if no other token is more likely), both [B, T].
    For targets with weight 0, the values are 0 and True."""
    factors = logit_factors(model, hidden_states(model, batch, None))
    nats_BT, likeliest_BT = token_nats_and_greedy(*factors, batch.targets, loss_settings(model))
    return jnp.where(batch.weights > 0, nats_BT, 0.0), likeliest_BT | (batch.weights == 0)


def loss_settings(model: Model, **changes: Any) -> LossSettings:
    """Returns the model's loss settings with these changes."""
    cfg, tensor = model.cfg, model.plan.tensor
    return LossSettings(chunk_tokens=cfg.loss_chunk_tokens, softcap=cfg.logit_softcap, tensor=tensor, **changes)


def logit_factors(model: Model, h_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (last hidden states of all positions, output projection or its local shard). Their product is the logits.
    h_BTD: last hidden states of local positions."""
    with jax.named_scope("loss"):
        h_BTD, w_DV = model.unembedding(h_BTD)
        return model.plan.tensor.all_gather(h_BTD.astype(model.cfg.embed_dtype)), w_DV


def hidden_states(model: Model, batch: Batch, keys_B: jax.Array | None) -> jax.Array:
    """Returns model.hidden() of a batch, including its prefix and encoder input, if any."""
    segments = make_mask_spec(batch.segment_ids, batch.prefix)
    encoder = {} if batch.encoder is None else {"encoder": batch.encoder}
    return model.hidden(batch.tokens, batch.positions, segments, keys_B, **encoder)
