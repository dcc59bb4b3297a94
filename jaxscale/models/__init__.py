"""Models by name. A model has hidden(tokens, positions, segment_ids, key) and unembedding(); its file counts
its parameters and FLOPs."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.models import gpt2, llama
from jaxscale.models.gpt2 import Gpt2, Gpt2Config
from jaxscale.models.layers import ModelConfig
from jaxscale.models.llama import Llama, LlamaConfig
from jaxscale.ops.kernels import Kernels
from jaxscale.sharding.place import Constrain, unconstrained

MODELS = {LlamaConfig: (Llama, llama), Gpt2Config: (Gpt2, gpt2)}
AnyModelConfig = LlamaConfig | Gpt2Config


def make_model(
    cfg: AnyModelConfig, *, key: jax.Array, kernels: Kernels, constrain: Constrain = unconstrained
) -> nnx.Module:
    """The model of this config with parameters drawn from `key`."""
    model, _ = MODELS[type(cfg)]
    return model(cfg, rngs=nnx.Rngs(params=key), kernels=kernels, constrain=constrain)


def num_params(cfg: AnyModelConfig) -> int:
    """Parameters in all."""
    return MODELS[type(cfg)][1].num_params(cfg)


def flops_per_token(cfg: AnyModelConfig, seq_len: int) -> float:
    """Floating-point operations of one training step per token, recomputation left out."""
    return MODELS[type(cfg)][1].flops_per_token(cfg, seq_len)


def max_seq_len(cfg: AnyModelConfig) -> int | None:
    """The longest row the model can read, or None where it has no limit of its own."""
    return cfg.max_seq_len if isinstance(cfg, Gpt2Config) else None


def logits(model: nnx.Module, tokens_BT, positions_BT=None, segment_ids_BT=None) -> jax.Array:
    """All logits, float32[B, T, V]: for tests, sampling and small batches. One document a row unless told otherwise."""
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones_like(tokens_BT)
    return unembed(model, model.hidden(tokens_BT, positions_BT, segment_ids_BT))


def unembed(model: nnx.Module, h: jax.Array) -> jax.Array:
    """Logits of hidden states [..., D], float32[..., V]."""
    cfg: ModelConfig = model.cfg
    dtype = cfg.embed_compute_dtype or cfg.compute_dtype
    w_DV = model.unembedding().astype(dtype)
    out = jnp.einsum("...D,DV->...V", h.astype(dtype), w_DV, preferred_element_type=jnp.float32)
    return out if cfg.logit_softcap is None else cfg.logit_softcap * jnp.tanh(out / cfg.logit_softcap)
