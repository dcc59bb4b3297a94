"""Models by name. A model has hidden(tokens, positions, segment_ids, key) and unembedding(h); its file counts
its parameters and FLOPs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.models import encoder, gpt2, llama, t5
from jaxscale.models.encoder import Encoder, EncoderConfig
from jaxscale.models.gpt2 import Gpt2, Gpt2Config
from jaxscale.models.layers import ModelConfig, split_model
from jaxscale.models.llama import Llama, LlamaConfig
from jaxscale.models.lora import NO_LORA, LoraConfig, adapter_params, add_adapters, frozen_but_adapters
from jaxscale.models.t5 import T5, T5Config
from jaxscale.ops.adapted import adapting
from jaxscale.ops.attention import AttentionNeeds
from jaxscale.ops.attention.mixed import Mix
from jaxscale.ops.kernels import PLAIN, Kernels
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
    lora: LoraConfig = NO_LORA,
) -> nnx.Module:
    """The model of this config with parameters drawn from `key`. The defaults are for one device.

    lora: with its adapters, the only parameters that a gradient reaches.
    """
    model, _ = MODELS[type(cfg)]
    if lora.on:
        kernels = dataclasses.replace(kernels, project=adapting(kernels.project))
        gather = frozen_but_adapters(gather)
        made = model(cfg, rngs=nnx.Rngs(params=key), kernels=kernels, gather=gather, tensor=tensor)
        return add_adapters(made, lora, key)
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


def lora_flops(cfg: AnyModelConfig, lora: LoraConfig) -> float:
    """What adapters change in flops_per_token: no gradient of the frozen matrices, 2 each, and 6 for their own."""
    return 6 * lora_params(cfg, lora) - 2 * MODELS[type(cfg)][1].matmul_params(cfg)


@functools.lru_cache(maxsize=64)
def lora_params(cfg: AnyModelConfig, lora: LoraConfig) -> int:
    """Parameters in the adapters of a model."""
    make = lambda key: make_model(cfg, key=key, kernels=PLAIN, lora=lora)
    _, shapes, axes = split_model(jax.eval_shape(make, jax.random.key(0)))
    return adapter_params(axes, shapes)


def attention_needs(cfg: AnyModelConfig, *, prefix: bool = False) -> AttentionNeeds:
    """What the model asks of its attention kernel. prefix: whether its rows have one."""
    if isinstance(cfg, (Gpt2Config, EncoderConfig)):
        head_dim, bidirectional = cfg.embed_dim // cfg.num_heads, isinstance(cfg, EncoderConfig)
        return AttentionNeeds(head_dim=head_dim, dtype=cfg.compute_dtype, prefix=prefix, bidirectional=bidirectional)
    if isinstance(cfg, T5Config):
        return AttentionNeeds(head_dim=cfg.head_dim, dtype=cfg.compute_dtype, bidirectional=True, bias=True)
    num_local = int(llama.local_layers(cfg).sum())
    return AttentionNeeds(
        head_dim=cfg.head_dim,
        dtype=cfg.compute_dtype,
        window=cfg.attention_window,
        mixed=None if cfg.global_every is None else Mix(num_local, cfg.num_layers),
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
