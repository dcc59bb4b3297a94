"""Models made of their settings, and their logits.

A model has hidden(tokens, positions, segment_ids, keys), which is the residual stream, and unembedding(h), which is
(h, the output projection).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.models import model_class
from jaxscale.models.config import NO_LORA, LoraConfig, ModelConfig
from jaxscale.models.lora import add_adapters, frozen_but_adapters
from jaxscale.ops.adapted import adapting
from jaxscale.ops.kernels import Kernels
from jaxscale.sharding.shardings import Gather, whole_already
from jaxscale.sharding.tensor_axis import ONE, TensorAxis


def make_model(
    cfg: ModelConfig,
    *,
    key: jax.Array,
    kernels: Kernels,
    gather: Gather = whole_already,
    tensor: TensorAxis = ONE,
    lora: LoraConfig = NO_LORA,
) -> nnx.Module:
    """The model of this config with parameters drawn from `key`. The defaults are for one device.

    lora: with its adapters, the only parameters that a gradient reaches.
    """
    model = model_class(cfg)
    if lora.on:
        kernels = dataclasses.replace(kernels, project=adapting(kernels.project))
        gather = frozen_but_adapters(gather)
        made = model(cfg, rngs=nnx.Rngs(params=key), kernels=kernels, gather=gather, tensor=tensor)
        return add_adapters(made, lora, key)
    return model(cfg, rngs=nnx.Rngs(params=key), kernels=kernels, gather=gather, tensor=tensor)


def logits(model: nnx.Module, tokens_BT, positions_BT=None, segment_ids_BT=None, **more) -> jax.Array:
    """All logits, float32[B, T, V]: for tests and small batches. One document a row unless told otherwise.

    segment_ids_BT: or a Scope with a prefix. more: encoder, for a model that has one.
    """
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones_like(tokens_BT)
    return unembed(model, model.tensor.gather(model.hidden(tokens_BT, positions_BT, segment_ids_BT, **more)))


def unembed(model: nnx.Module, h: jax.Array) -> jax.Array:
    """Logits of hidden states [..., D] of all positions asked for, float32[..., V]."""
    cfg: ModelConfig = model.cfg
    h, w_DV = model.unembedding(h)
    h, w_DV = h.astype(cfg.embed_dtype), w_DV.astype(cfg.embed_dtype)
    out = model.tensor.gather_last(jnp.einsum("...D,DV->...V", h, w_DV, preferred_element_type=jnp.float32))
    return out if cfg.logit_softcap is None else cfg.logit_softcap * jnp.tanh(out / cfg.logit_softcap)
