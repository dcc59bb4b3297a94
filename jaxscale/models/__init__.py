"""Models by name. A model has hidden(tokens, positions, segment_ids, key) and unembedding(h); its file counts
its parameters and FLOPs."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.models import gpt2, llama
from jaxscale.models.gpt2 import Gpt2, Gpt2Config
from jaxscale.models.layers import ModelConfig
from jaxscale.models.llama import Llama, LlamaConfig
from jaxscale.ops.attention import AttentionNeeds
from jaxscale.ops.kernels import Kernels
from jaxscale.sharding.place import Gather, whole_already
from jaxscale.sharding.tensor_axis import ONE, TensorAxis

MODELS = {LlamaConfig: (Llama, llama), Gpt2Config: (Gpt2, gpt2)}
AnyModelConfig = LlamaConfig | Gpt2Config


def make_model(
    cfg: AnyModelConfig,
    *,
    key: jax.Array,
    kernels: Kernels,
    gather: Gather = whole_already,
    tensor: TensorAxis = ONE,
) -> nnx.Module:
    """The model of this config with parameters drawn from `key`. The defaults are for one device."""
    model, _ = MODELS[type(cfg)]
    return model(cfg, rngs=nnx.Rngs(params=key), kernels=kernels, gather=gather, tensor=tensor)


def num_params(cfg: AnyModelConfig) -> int:
    """Parameters in all."""
    return MODELS[type(cfg)][1].num_params(cfg)


def flops_per_token(cfg: AnyModelConfig, seq_len: int) -> float:
    """Floating-point operations of one training step per token, recomputation left out."""
    return MODELS[type(cfg)][1].flops_per_token(cfg, seq_len)


def attention_needs(cfg: AnyModelConfig) -> AttentionNeeds:
    """What the model asks of its attention kernel."""
    if isinstance(cfg, Gpt2Config):
        return AttentionNeeds(head_dim=cfg.embed_dim // cfg.num_heads, dtype=cfg.compute_dtype)
    return AttentionNeeds(
        head_dim=cfg.head_dim, dtype=cfg.compute_dtype, window=cfg.attention_window, softcap=cfg.attention_softcap
    )


def max_seq_len(cfg: AnyModelConfig) -> int | None:
    """The longest row the model can read, or None where it has no limit of its own."""
    return cfg.max_seq_len if isinstance(cfg, Gpt2Config) else None


def logits(model: nnx.Module, tokens_BT, positions_BT=None, segment_ids_BT=None) -> jax.Array:
    """All logits, float32[B, T, V]: for tests and small batches. One document a row unless told otherwise."""
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones_like(tokens_BT)
    return unembed(model, model.tensor.gather(model.hidden(tokens_BT, positions_BT, segment_ids_BT)))


def unembed(model: nnx.Module, h: jax.Array) -> jax.Array:
    """Logits of hidden states [..., D] of all positions asked for, float32[..., V]."""
    cfg: ModelConfig = model.cfg
    h, w_DV = model.unembedding(h)
    h, w_DV = h.astype(cfg.embed_dtype), w_DV.astype(cfg.embed_dtype)
    out = model.tensor.gather_last(jnp.einsum("...D,DV->...V", h, w_DV, preferred_element_type=jnp.float32))
    return out if cfg.logit_softcap is None else cfg.logit_softcap * jnp.tanh(out / cfg.logit_softcap)
