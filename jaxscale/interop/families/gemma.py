"""Gemma 1, 2 and 3 as transformers' GemmaForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM, and the language model of
Gemma3ForConditionalGeneration, whose vision tensors are left out."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxscale.interop.families import llama
from jaxscale.interop.families.family import Family, Row
from jaxscale.interop.families.qwen import QK_NORMS
from jaxscale.interop.families.settings import FAR, NEAR, ROPE, merged, read_rope, read_rope_of, refuse_unless
from jaxscale.interop.families.unread import refuse_unread
from jaxscale.interop.families.windows import read_windows, types_every, write_types
from jaxscale.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput

GELU = "gelu_pytorch_tanh"
NORMS_AROUND = (
    Row("blocks/attention_norm", llama.LAYER + "input_layernorm.weight"),
    Row("blocks/attention_out_norm", llama.LAYER + "post_attention_layernorm.weight"),
    Row("blocks/mlp_norm", llama.LAYER + "pre_feedforward_layernorm.weight"),
    Row("blocks/mlp_out_norm", llama.LAYER + "post_feedforward_layernorm.weight"),
)
# Of transformers' GemmaConfig, Gemma2Config and Gemma3TextConfig; published Gemma 3 files leave most keys out.
GEMMA1_DEFAULTS = dict(
    vocab_size=256_000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=16, head_dim=256, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_theta=10_000.0,
    attention_bias=False, use_bidirectional_attention=None, hidden_act=GELU,
)  # fmt: skip
GEMMA2_DEFAULTS = dict(
    vocab_size=256_000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
    num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_theta=10_000.0,
    attention_bias=False, use_bidirectional_attention=None, hidden_activation=GELU, query_pre_attn_scalar=256,
    sliding_window=4096, layer_types=None, final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
    sliding_window_pattern=2,
)  # fmt: skip
GEMMA3_DEFAULTS = GEMMA2_DEFAULTS | dict(
    vocab_size=262_208, rope_theta=1_000_000.0, rope_local_base_freq=10_000.0, sliding_window_pattern=6,
    final_logit_softcapping=None, attn_logit_softcapping=None,
)  # fmt: skip
OF_ALL = dict(zero_centred_norms=True, activation="gelu_tanh", scaled_embeddings=True)


def read_gemma1(hf: Mapping[str, Any]) -> LlamaConfig:
    """Our settings for a config.json of Gemma 1. Its "gelu" has always been computed in the tanh form."""
    hf = merged(GEMMA1_DEFAULTS, hf)
    refuse_unless(hf, hidden_act=("gelu", GELU), hidden_activation=(None, GELU), attention_bias=(False,))
    refuse_unless(hf, use_bidirectional_attention=(None, False))
    return llama.read_as_llama(hf, **OF_ALL)


def write_gemma1(cfg: LlamaConfig) -> dict[str, Any]:
    """The config.json of a Gemma 1 of ours."""
    return llama.write_as_llama(cfg, hidden_act=GELU, hidden_activation=GELU, attention_bias=False)


def read_later(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> LlamaConfig:
    """Our settings for a config.json of Gemma 2, or of Gemma 3's text model."""
    hf = merged(defaults, hf)
    refuse_unless(hf, hidden_activation=(GELU,), attention_bias=(False,), use_bidirectional_attention=(None, False))
    third = defaults is GEMMA3_DEFAULTS
    if not third and hf["layer_types"] is None:
        refuse_unless(hf, sliding_window_pattern=(2,))  # transformers reads it for Gemma 3 alone
    base, scaling = read_rope_of(hf, FAR) if third else read_rope(hf)
    usual = hf["sliding_window_pattern"]
    windows = read_windows(hf, hf["layer_types"] or types_every(hf["num_hidden_layers"], usual), usual)
    local = {}
    if third:
        local_base, local_scaling = read_rope_of(hf, NEAR)
        if local_scaling is not None:
            raise BadInput("config.json: a RoPE scaling of sliding_attention is not supported; only full_attention's")
        local = dict(qk_norm=True)
        if "global_every" in windows:
            local |= dict(local_rope_base=local_base)
        elif windows:  # no layer is global
            base, scaling = local_base, None
    scalar = hf["query_pre_attn_scalar"]
    return llama.read_as_llama(
        hf,
        **OF_ALL,
        **windows,
        **local,
        rope_base=base,
        rope_scaling=scaling,
        norm_placement="both",
        query_scalar=None if scalar == hf["head_dim"] else float(scalar),
        attention_softcap=hf["attn_logit_softcapping"],
        logit_softcap=hf["final_logit_softcapping"],
    )


def write_later(cfg: LlamaConfig, third: bool) -> dict[str, Any]:
    """The config.json of a Gemma 2 or 3 of ours."""
    scalar = cfg.head_dim if cfg.query_scalar is None else cfg.query_scalar
    written = llama.write_as_llama(cfg, hidden_activation=GELU, attention_bias=False)
    written |= dict(
        query_pre_attn_scalar=int(scalar) if scalar == int(scalar) else scalar,
        sliding_window=cfg.attention_window,
        layer_types=write_types(cfg),
        attn_logit_softcapping=cfg.attention_softcap,
        final_logit_softcapping=cfg.logit_softcap,
    )
    if cfg.global_every is not None:
        written |= dict(sliding_window_pattern=cfg.global_every)
    if third:
        written |= dict(rope_local_base_freq=cfg.local_rope_base or cfg.rope_base)
    return written


GEMMA1 = Family(
    "gemma",
    ("GemmaForCausalLM",),
    read_gemma1,
    write_gemma1,
    llama.BODY + llama.NORMS_BEFORE,
    keys=(*GEMMA1_DEFAULTS, "hidden_activation", *ROPE),
    left_out=llama.LEFT_OUT,
)
GEMMA2 = Family(
    "gemma2",
    ("Gemma2ForCausalLM",),
    functools.partial(read_later, defaults=GEMMA2_DEFAULTS),
    functools.partial(write_later, third=False),
    llama.BODY + NORMS_AROUND,
    keys=(*GEMMA2_DEFAULTS, *ROPE),
    left_out=llama.LEFT_OUT,
)
GEMMA3 = Family(
    "gemma3_text",
    ("Gemma3ForCausalLM",),
    functools.partial(read_later, defaults=GEMMA3_DEFAULTS),
    functools.partial(write_later, third=True),
    llama.BODY + NORMS_AROUND + QK_NORMS,
    keys=(*GEMMA3_DEFAULTS, *ROPE),
    left_out=llama.LEFT_OUT,
)


def read_vision(hf: Mapping[str, Any]) -> LlamaConfig:
    """Our settings for the language model in a config.json of Gemma 3 with vision."""
    text = hf.get("text_config") or {}
    cfg = GEMMA3.read_config({"model_type": GEMMA3.model_type, **text})
    refuse_unless(hf, tie_word_embeddings=(cfg.tied_embeddings,))  # of the two, transformers reads this one
    refuse_unread(GEMMA3, text)
    return cfg


IMAGE_TOKENS = (
    "image_token_index", "image_token_id", "boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id",
)  # fmt: skip
GEMMA3_VISION = Family(
    "gemma3",
    ("Gemma3ForConditionalGeneration",),
    read_vision,
    lambda cfg: dict(text_config=GEMMA3.write_config(cfg)),
    GEMMA3.rows,
    keys=("tie_word_embeddings", "vision_config", "mm_tokens_per_image", *IMAGE_TOKENS),
    goes_out_as=GEMMA3.model_type,
    bases=("language_model.model.", "model.language_model."),  # transformers 4 up to 4.51, and later
    left_out=(r"(model\.)?(vision_tower|multi_modal_projector)\..*", *llama.LEFT_OUT),
)
