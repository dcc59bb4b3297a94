"""Models by name. A model has hidden(tokens, positions, segment_ids, key) and unembedding(h); its file counts
its parameters and FLOPs."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.models import encoder, gpt2, llama, t5
from jaxscale.models.encoder import Encoder, EncoderConfig
from jaxscale.models.gpt2 import Gpt2, Gpt2Config
from jaxscale.models.layers import ModelConfig
from jaxscale.models.llama import Llama, LlamaConfig
from jaxscale.models.t5 import T5, T5Config
from jaxscale.ops.attention import AttentionNeeds
from jaxscale.ops.kernels import Kernels
from jaxscale.sharding.place import Gather, whole_already
from jaxscale.sharding.tensor_axis import ONE, TensorAxis

MODELS = {
    LlamaConfig: (Llama, llama),
    Gpt2Config: (Gpt2, gpt2),
    EncoderConfig: (Encoder, encoder),
    T5Config: (T5, t5),
}
AnyModelConfig = LlamaConfig | Gpt2Config | EncoderConfig | T5Config
DECODERS = (LlamaConfig, Gpt2Config)  # models that read one row from left to right


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


def flops_per_token(cfg: AnyModelConfig, seq_len: int, encoder_len: int | None = None) -> float:
    """Floating-point operations of one training step per token of a row of seq_len, recomputation left out.

    encoder_len: tokens of the encoder's row that goes with it, where the model has an encoder and a decoder.
    """
    if isinstance(cfg, T5Config):
        assert encoder_len is not None, "T5 has two rows, and the length of one is missing"
        return t5.flops_per_token(cfg, seq_len, encoder_len)
    return MODELS[type(cfg)][1].flops_per_token(cfg, seq_len)


def attention_needs(cfg: AnyModelConfig, *, prefix: bool = False) -> AttentionNeeds:
    """What the model asks of its attention kernel. prefix: whether its rows have one."""
    if isinstance(cfg, (Gpt2Config, EncoderConfig)):
        head_dim, bidirectional = cfg.embed_dim // cfg.num_heads, isinstance(cfg, EncoderConfig)
        return AttentionNeeds(head_dim=head_dim, dtype=cfg.compute_dtype, prefix=prefix, bidirectional=bidirectional)
    if isinstance(cfg, T5Config):
        return AttentionNeeds(head_dim=cfg.head_dim, dtype=cfg.compute_dtype, bidirectional=True, bias=True)
    return AttentionNeeds(
        head_dim=cfg.head_dim,
        dtype=cfg.compute_dtype,
        window=cfg.attention_window,
        softcap=cfg.attention_softcap,
        prefix=prefix,
    )


def max_seq_len(cfg: AnyModelConfig) -> int | None:
    """The longest row the model can read, or None where it has no limit of its own."""
    return cfg.max_seq_len if isinstance(cfg, (Gpt2Config, EncoderConfig)) else None


def layer_stacks(cfg: AnyModelConfig) -> dict[str, int]:
    """{name of a stack of blocks among the parameters: its layers}, in the order that a batch goes through them."""
    if isinstance(cfg, T5Config):
        return {"encoder_blocks": cfg.num_layers, "decoder_blocks": cfg.decoder_layers}
    return {"blocks": cfg.num_layers}


def layer_widths(cfg: AnyModelConfig) -> tuple[int, int, int]:
    """Numbers per token in (the queries, the keys, the inner array of the MLP) of a block."""
    if isinstance(cfg, LlamaConfig):
        return cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim, cfg.mlp_dim
    if isinstance(cfg, T5Config):
        return cfg.num_heads * cfg.head_dim, cfg.num_heads * cfg.head_dim, cfg.mlp_dim
    return cfg.embed_dim, cfg.embed_dim, cfg.mlp_dim if isinstance(cfg, EncoderConfig) else 4 * cfg.embed_dim


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
