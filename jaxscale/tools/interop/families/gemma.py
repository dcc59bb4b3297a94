"""Gemma 1, 2 and 3 (GemmaForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM in transformers), and the language model of
Gemma3ForConditionalGeneration without its vision tensors."""

from collections.abc import Mapping
from typing import Any

from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop.families import llama_like as llama
from jaxscale.tools.interop.families import settings
from jaxscale.tools.interop.families.family import HfFamily, TensorSpec

GELU = "gelu_pytorch_tanh"
NORMS_AROUND = (
    TensorSpec("blocks/attention_norm", llama.LAYER + "input_layernorm.weight"),
    TensorSpec("blocks/attention_out_norm", llama.LAYER + "post_attention_layernorm.weight"),
    TensorSpec("blocks/mlp_norm", llama.LAYER + "pre_feedforward_layernorm.weight"),
    TensorSpec("blocks/mlp_out_norm", llama.LAYER + "post_feedforward_layernorm.weight"),
)
# Defaults of transformers' GemmaConfig, Gemma2Config and Gemma3TextConfig. Published Gemma 3 files omit most keys.
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
SOFTCAPS = dict(attention_softcap="attn_logit_softcapping", logit_softcap="final_logit_softcapping")
SHARED_SETTINGS = dict(zero_centred_norms=True, activation="gelu_tanh", scaled_embeddings=True)
GEMMA2_CHOICES = dict(hidden_activation=(GELU,), use_bidirectional_attention=(None, False))


def gemma2_shared_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that Gemma 2 and 3 share."""
    scalar, usual = hf["query_pre_attn_scalar"], hf["sliding_window_pattern"]
    types = hf["layer_types"] or settings.expected_layer_types(hf["num_hidden_layers"], every=usual)
    query_scalar = None if scalar == hf["head_dim"] else settings.number(hf, "query_pre_attn_scalar")
    found = SHARED_SETTINGS | dict(norm_placement="both", query_scalar=query_scalar)
    return found | settings.read_windows(hf, types, usual)


def gemma2_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of Gemma 2. transformers reads sliding_window_pattern only for Gemma 3."""
    if hf["layer_types"] is None:
        settings.refuse_unless(hf, sliding_window_pattern=(2,))
    base, scaling = settings.read_rope(hf)
    return gemma2_shared_settings(hf) | dict(rope_base=base, rope_scaling=scaling)


def gemma3_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of Gemma 3, with QK-norm and a separate RoPE base for sliding-window layers."""
    base, scaling = settings.read_layer_type_rope(hf, settings.FULL)
    found = gemma2_shared_settings(hf) | dict(qk_norm=True)
    local_base, local_scaling = settings.read_layer_type_rope(hf, settings.SLIDING)
    if local_scaling is not None:
        raise BadInput("RoPE scaling of sliding_attention is not supported; set it only for full_attention")
    if "global_every" in found or "global_first" in found:
        found |= dict(local_rope_base=local_base)
    elif "attention_window" in found:  # no layer is global
        base, scaling = local_base, None
    return found | dict(rope_base=base, rope_scaling=scaling)


def gemma2_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns the config.json keys of Gemma 2 or 3, as the inverse of gemma2_shared_settings()."""
    scalar = cfg.head_dim if cfg.query_scalar is None else cfg.query_scalar
    found = dict(
        query_pre_attn_scalar=int(scalar) if scalar == int(scalar) else scalar,
        sliding_window=cfg.attention_window,
        layer_types=settings.write_layer_types(cfg),
    )
    return found if cfg.global_every is None else found | dict(sliding_window_pattern=cfg.global_every)


GEMMA1 = llama.llama_family(  # "gelu" means the tanh approximation in Gemma 1
    "gemma",
    "GemmaForCausalLM",
    llama.BODY + llama.NORMS_BEFORE + llama.BIASES,
    GEMMA1_DEFAULTS,
    dict(hidden_act=(GELU, "gelu"), hidden_activation=(GELU, None), use_bidirectional_attention=(None, False)),
    same=llama.BIASED,
    settings=lambda hf: SHARED_SETTINGS,
)
GEMMA2 = llama.llama_family(
    "gemma2",
    "Gemma2ForCausalLM",
    llama.BODY + NORMS_AROUND + llama.BIASES,
    GEMMA2_DEFAULTS,
    GEMMA2_CHOICES,
    llama.BIASED | SOFTCAPS,
    gemma2_settings,
    gemma2_keys,
)
GEMMA3 = llama.llama_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    llama.BODY + NORMS_AROUND + llama.QK_NORMS + llama.BIASES,
    GEMMA3_DEFAULTS,
    GEMMA2_CHOICES,
    llama.BIASED | SOFTCAPS,
    gemma3_settings,
    lambda cfg: gemma2_keys(cfg) | dict(rope_local_base_freq=cfg.local_rope_base or cfg.rope_base),
)


def read_vision(hf: Mapping[str, Any]) -> LlamaConfig:
    """Returns the settings of the language model of Gemma 3 with vision."""
    text = hf.get("text_config") or {}
    cfg = GEMMA3.read_config({"model_type": GEMMA3.model_type, **text})
    assert isinstance(cfg, LlamaConfig), "llama_family reads LlamaConfig"
    # transformers reads this key, not the key in text_config
    settings.refuse_unless(hf, tie_word_embeddings=(cfg.tied_embeddings,))
    settings.refuse_unread(GEMMA3, text)
    return cfg


IMAGE_TOKENS = (
    "image_token_index", "image_token_id", "boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id",
)  # fmt: skip
GEMMA3_VISION = HfFamily(
    "gemma3",
    ("Gemma3ForConditionalGeneration",),
    read_vision,
    lambda cfg: dict(text_config=GEMMA3.write_config(cfg)),
    GEMMA3.rows,
    keys=("tie_word_embeddings", "vision_config", "mm_tokens_per_image", *IMAGE_TOKENS),
    exported_as=GEMMA3.model_type,
    prefixes=("language_model.model.", "model.language_model."),  # up to transformers 4.51, and later
    left_out=(r"(model\.)?(vision_tower|multi_modal_projector)\..*", *llama.LEFT_OUT),
)
