"""Llama-like families of transformers, each a table of tensor specs, keys and settings.

Llama 2 and 3 (LlamaForCausalLM). Mistral: every layer with a sliding window or none. OLMo-2: norms of outputs only,
QK-norm over all heads. Qwen2 and Qwen3: with biases, or with QK-norm.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.tools.interop.families.family import Family, TensorSpec
from jaxscale.tools.interop.families.rope_scaling import ROPE, read_rope, write_rope
from jaxscale.tools.interop.families.settings import FULL, SLIDING, read_windows, refuse_unless, write_layer_types

LAYER = "layers.{layer}."
BODY = (
    TensorSpec("embedding", "embed_tokens.weight", inputs=1),
    TensorSpec("blocks/attention/wq", LAYER + "self_attn.q_proj.weight", 1, transposed=True),
    TensorSpec("blocks/attention/wk", LAYER + "self_attn.k_proj.weight", 1, transposed=True),
    TensorSpec("blocks/attention/wv", LAYER + "self_attn.v_proj.weight", 1, transposed=True),
    TensorSpec("blocks/attention/wo", LAYER + "self_attn.o_proj.weight", 2, transposed=True),
    TensorSpec("blocks/mlp/gate", LAYER + "mlp.gate_proj.weight", 1, transposed=True),
    TensorSpec("blocks/mlp/up", LAYER + "mlp.up_proj.weight", 1, transposed=True),
    TensorSpec("blocks/mlp/down", LAYER + "mlp.down_proj.weight", 1, transposed=True),
    TensorSpec("final_norm", "norm.weight"),
    TensorSpec("head", "lm_head.weight", 1, transposed=True),
)
NORMS_BEFORE = (
    TensorSpec("blocks/attention_norm", LAYER + "input_layernorm.weight"),
    TensorSpec("blocks/mlp_norm", LAYER + "post_attention_layernorm.weight"),
)
NORMS_AFTER = (
    TensorSpec("blocks/attention_out_norm", LAYER + "post_attention_layernorm.weight"),
    TensorSpec("blocks/mlp_out_norm", LAYER + "post_feedforward_layernorm.weight"),
)
BIASES = tuple(TensorSpec(f"blocks/attention/bias_{name}", f"{LAYER}self_attn.{name}_proj.bias") for name in "qkvo")
QK_NORMS = tuple(TensorSpec(f"blocks/attention/{name}_norm", f"{LAYER}self_attn.{name}_norm.weight") for name in "qk")
LEFT_OUT = (r".*\.rotary_emb\.inv_freq",)  # a buffer of old releases, derived from the config
SHARED = dict(  # defaults of transformers' LlamaConfig and of most families here
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=None, head_dim=None, hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False,
    rope_theta=10_000.0,
)  # fmt: skip
CONFIG_KEYS = dict(  # setting: key, of all families here
    vocab_size="vocab_size", num_layers="num_hidden_layers", embed_dim="hidden_size", num_heads="num_attention_heads",
    num_kv_heads="num_key_value_heads", head_dim="head_dim", mlp_dim="intermediate_size", norm_eps="rms_norm_eps",
    tied_embeddings="tie_word_embeddings",
)  # fmt: skip


def read_biases(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for attention_bias: of QKV and the output projection."""
    refuse_unless(hf, attention_bias=(False, True))
    return dict(qkv_bias=hf["attention_bias"], out_bias=hf["attention_bias"])


def write_biases(cfg: LlamaConfig) -> dict[str, Any]:
    """Inverse of read_biases, for a config with all biases or none."""
    return dict(attention_bias=cfg.out_bias)


def llama_family(
    model_type: str,
    architecture: str,
    rows: tuple[TensorSpec, ...],
    defaults: Mapping[str, Any],
    *,
    allowed: Mapping[str, tuple],
    written: Mapping[str, Any],
    config_keys: Mapping[str, str] | None = None,
    settings: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda hf: {},
    keys: Callable[[LlamaConfig], dict[str, Any]] = lambda cfg: {},
    body: tuple[TensorSpec, ...] = BODY,
    more_keys: tuple[str, ...] = (),
    **more: Any,
) -> Family:
    """Returns a family whose models are a LlamaConfig, with `rows` in addition to `body`.

    Args: defaults: transformers' values of absent keys. allowed: supported values of keys. written: constant keys.
    config_keys: {setting: key} in addition to CONFIG_KEYS. settings: computes further settings, with rope_base if RoPE
    is not read by read_rope. keys: its inverse. more_keys: further keys that `settings` reads. more: fields of Family.
    """
    config_keys = {**CONFIG_KEYS, **(config_keys or {})}

    def read_config(hf: Mapping[str, Any]) -> LlamaConfig:
        hf = {**defaults, **hf}
        refuse_unless(hf, **allowed)
        found = {setting: hf[key] for setting, key in config_keys.items()}
        found["num_kv_heads"] = found["num_kv_heads"] or found["num_heads"]
        found["head_dim"] = found["head_dim"] or hf["hidden_size"] // found["num_heads"]
        found |= settings(hf)
        if "rope_base" not in found:
            found["rope_base"], found["rope_scaling"] = read_rope(hf)
        return LlamaConfig(**found)

    def write_config(cfg: LlamaConfig) -> dict[str, Any]:
        return {
            **written,
            **{key: getattr(cfg, setting) for setting, key in config_keys.items()},
            **write_rope(cfg),
            **keys(cfg),
        }

    known = tuple(dict.fromkeys((*defaults, *allowed, *ROPE, *more_keys)))
    rows, names = body + rows, (architecture,)
    return Family(model_type, names, read_config, write_config, rows, known, left_out=LEFT_OUT, **more)


LLAMA = llama_family(
    "llama",
    "LlamaForCausalLM",
    NORMS_BEFORE + BIASES,
    SHARED | dict(attention_bias=False, mlp_bias=False),
    allowed=dict(hidden_act=("silu",), mlp_bias=(False,)),
    written=dict(hidden_act="silu", mlp_bias=False),
    settings=read_biases,
    keys=write_biases,
)
MISTRAL = llama_family(
    "mistral",
    "MistralForCausalLM",
    NORMS_BEFORE,
    SHARED | dict(intermediate_size=14336, num_key_value_heads=8, sliding_window=4096),  # of MistralConfig
    allowed=dict(hidden_act=("silu",)),
    written=dict(hidden_act="silu"),
    config_keys=dict(attention_window="sliding_window"),
)
OLMO2 = llama_family(
    "olmo2",
    "Olmo2ForCausalLM",
    NORMS_AFTER + QK_NORMS + BIASES,
    SHARED | dict(vocab_size=50304, rms_norm_eps=1e-5, attention_bias=False),  # of Olmo2Config
    allowed=dict(hidden_act=("silu",)),
    written=dict(hidden_act="silu"),
    settings=lambda hf: read_biases(hf) | dict(norm_placement="after", qk_norm=True, qk_norm_over="all_heads"),
    keys=write_biases,
)
QWEN_DEFAULTS = dict(  # of transformers' Qwen2Config; Qwen3Config has heads of 128
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, head_dim=None, hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False,
    rope_theta=10_000.0, use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=None,
    attention_bias=False,
)  # fmt: skip


def qwen_windows(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Sliding-window settings of a Qwen, whose later layers may have a window."""
    first, window = hf["max_window_layers"], hf["sliding_window"] if hf["use_sliding_window"] else None
    later = FULL if window is None else SLIDING
    types = hf["layer_types"] or [later if layer >= first else FULL for layer in range(hf["num_hidden_layers"])]
    return read_windows({**hf, "sliding_window": window}, types)


def qwen_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Inverse of qwen_windows."""
    windowed = cfg.attention_window is not None
    found = dict(use_sliding_window=windowed, sliding_window=cfg.attention_window, layer_types=write_layer_types(cfg))
    return found | dict(max_window_layers=cfg.global_first if windowed else cfg.num_layers)


QWEN2 = llama_family(
    "qwen2",
    "Qwen2ForCausalLM",
    NORMS_BEFORE + BIASES,
    QWEN_DEFAULTS,
    allowed=dict(hidden_act=("silu",), attention_bias=(False,)),
    written=dict(hidden_act="silu"),
    settings=lambda hf: qwen_windows(hf) | dict(qkv_bias=True),
    keys=qwen_keys,
)
QWEN3 = llama_family(
    "qwen3",
    "Qwen3ForCausalLM",
    NORMS_BEFORE + QK_NORMS + BIASES,
    QWEN_DEFAULTS | dict(head_dim=128),
    allowed=dict(hidden_act=("silu",)),
    written=dict(hidden_act="silu"),
    settings=lambda hf: qwen_windows(hf) | read_biases(hf) | dict(qk_norm=True),
    keys=lambda cfg: qwen_keys(cfg) | write_biases(cfg),
)
