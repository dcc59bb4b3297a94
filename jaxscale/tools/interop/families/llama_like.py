"""Llama-like families of transformers, each defined by a table of tensor specs, keys and settings.

Llama 2 and 3 (LlamaForCausalLM). Mistral has a sliding window in all layers or none. OLMo-2 has norms only of outputs,
and QK-norm over all heads. Qwen2 has biases, and Qwen3 has QK-norm. Phi-3 has fused matrices.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop.families.family import HfFamily, TensorSpec
from jaxscale.tools.interop.families.settings import (
    FULL,
    MAX_POSITIONS,
    ORIGINAL_POSITIONS,
    ROPE,
    SLIDING,
    read_rope,
    read_windows,
    refuse_unless,
    write_layer_types,
    write_rope,
)

LAYER = "layers.{layer}."


def linear(leaf: str, module: str, inputs: int = 1, interleaved: bool = False) -> TensorSpec:
    """Returns the spec for the weight of a torch.nn.Linear in each layer. inputs, interleaved: see TensorSpec."""
    return TensorSpec(f"blocks/{leaf}", f"{LAYER}{module}.weight", inputs, transposed=True, interleaved=interleaved)


BODY = (
    TensorSpec("embedding", "embed_tokens.weight", inputs=1),
    *(linear(f"attention/w{name}", f"self_attn.{name}_proj") for name in "qkv"),
    linear("attention/wo", "self_attn.o_proj", inputs=2),
    *(linear(f"mlp/{name}", f"mlp.{name}_proj") for name in ("gate", "up", "down")),
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
LEFT_OUT = (r".*\.rotary_emb\.inv_freq",)  # a buffer in old releases, derived from the config
SHARED = dict(  # defaults of transformers' LlamaConfig, and of most families in this file
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=None, head_dim=None, hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False,
    rope_theta=10_000.0,
)  # fmt: skip
CONFIG_KEYS = dict(  # {setting: key} for all families in this file
    vocab_size="vocab_size", num_layers="num_hidden_layers", embed_dim="hidden_size", num_heads="num_attention_heads",
    num_kv_heads="num_key_value_heads", head_dim="head_dim", mlp_dim="intermediate_size", norm_eps="rms_norm_eps",
    tied_embeddings="tie_word_embeddings",
)  # fmt: skip
SILU = dict(hidden_act=("silu",))
BIASED = dict(qkv_bias="attention_bias", out_bias="attention_bias")  # biases in all attention projections, or none
WINDOW = dict(attention_window="sliding_window")  # window of all layers; None means full attention


def llama_family(
    model_type: str,
    architecture: str,
    rows: tuple[TensorSpec, ...],
    defaults: Mapping[str, Any],
    choices: Mapping[str, tuple] = SILU,
    same: Mapping[str, str] = MappingProxyType({}),
    settings: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda hf: {},
    keys: Callable[[LlamaConfig], dict[str, Any]] = lambda cfg: {},
    **more: Any,
) -> HfFamily:
    """Returns a family of models that LlamaConfig represents.

    defaults: transformers' values for absent keys. choices: {key: supported values}; the first value is written unless
    it is None. same: {setting: key} to copy, in addition to CONFIG_KEYS. settings: returns other settings. They include
    rope_base if read_rope() does not apply. keys: inverse of `settings`. more: other fields of HfFamily.
    """
    names = CONFIG_KEYS | dict(same)

    def read_config(hf: Mapping[str, Any]) -> LlamaConfig:
        hf = {**defaults, **hf}
        refuse_unless(hf, **choices, **(dict(attention_bias=(False, True)) if "qkv_bias" in same else {}))
        found = {setting: hf[key] for setting, key in names.items()}
        found["num_kv_heads"] = found["num_kv_heads"] or found["num_heads"]
        found["head_dim"] = found["head_dim"] or hf["hidden_size"] // found["num_heads"]
        found |= settings(hf)
        if "rope_base" not in found:
            found["rope_base"], found["rope_scaling"] = read_rope(hf)
        return LlamaConfig(**found)

    def write_config(cfg: LlamaConfig) -> dict[str, Any]:
        written = {key: values[0] for key, values in choices.items() if values[0] is not None}
        written |= {key: getattr(cfg, setting) for setting, key in names.items()}
        return written | write_rope(cfg) | keys(cfg)

    known = tuple(dict.fromkeys((*defaults, *choices, *ROPE)))
    return HfFamily(model_type, (architecture,), read_config, write_config, rows, known, left_out=LEFT_OUT, **more)


LLAMA = llama_family(
    "llama",
    "LlamaForCausalLM",
    BODY + NORMS_BEFORE + BIASES,
    SHARED | dict(attention_bias=False, mlp_bias=False),
    SILU | dict(mlp_bias=(False,)),
    BIASED,
)
MISTRAL = llama_family(
    "mistral",
    "MistralForCausalLM",
    BODY + NORMS_BEFORE,
    SHARED | dict(intermediate_size=14336, num_key_value_heads=8, sliding_window=4096),  # defaults
    same=WINDOW,
)
OLMO2 = llama_family(
    "olmo2",
    "Olmo2ForCausalLM",
    BODY + NORMS_AFTER + QK_NORMS + BIASES,
    SHARED | dict(vocab_size=50304, rms_norm_eps=1e-5, attention_bias=False),  # defaults of Olmo2Config
    same=BIASED,
    settings=lambda hf: dict(norm_placement="after", qk_norm=True, qk_norm_over="all_heads"),
)
QWEN_DEFAULTS = dict(  # defaults of transformers' Qwen2Config; Qwen3Config has head_dim 128
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, head_dim=None, hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False,
    rope_theta=10_000.0, use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=None,
    attention_bias=False,
)  # fmt: skip


def qwen_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sliding-window settings of a Qwen model, in which only the last layers may have a window."""
    first, window = hf["max_window_layers"], hf["sliding_window"] if hf["use_sliding_window"] else None
    later = FULL if window is None else SLIDING
    types = hf["layer_types"] or [later if layer >= first else FULL for layer in range(hf["num_hidden_layers"])]
    return read_windows({**hf, "sliding_window": window}, types)


def qwen_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns the config.json keys of sliding windows, as the inverse of qwen_settings()."""
    windowed = cfg.attention_window is not None
    found = dict(use_sliding_window=windowed, sliding_window=cfg.attention_window, layer_types=write_layer_types(cfg))
    return found | dict(max_window_layers=cfg.global_first if windowed else cfg.num_layers)


def qwen2_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of Qwen2, which always has QKV biases."""
    refuse_unless(hf, attention_bias=(False,))
    return qwen_settings(hf) | dict(qkv_bias=True)


QWEN2 = llama_family(
    "qwen2",
    "Qwen2ForCausalLM",
    BODY + NORMS_BEFORE + BIASES,
    QWEN_DEFAULTS,
    settings=qwen2_settings,
    keys=qwen_keys,
)
QWEN3 = llama_family(
    "qwen3",
    "Qwen3ForCausalLM",
    BODY + NORMS_BEFORE + QK_NORMS + BIASES,
    QWEN_DEFAULTS | dict(head_dim=128),
    same=BIASED,
    settings=lambda hf: qwen_settings(hf) | dict(qk_norm=True),
    keys=qwen_keys,
)
# Phi-3 (arXiv:2404.14219): fused QKV, fused gate and up projections, and longrope.
PHI3_LEAVES = ("blocks/attention/wq", "blocks/attention/wk", "blocks/attention/wv", "blocks/mlp/gate", "blocks/mlp/up")
PHI3_FUSED = (
    TensorSpec(PHI3_LEAVES[:3], LAYER + "self_attn.qkv_proj.weight", 1, transposed=True),
    TensorSpec(PHI3_LEAVES[3:], LAYER + "mlp.gate_up_proj.weight", 1, transposed=True),
)
PHI3_DEFAULTS = SHARED | dict(  # defaults of Phi3Config
    vocab_size=32064, hidden_size=3072, intermediate_size=8192, rms_norm_eps=1e-5, sliding_window=None,
    original_max_position_embeddings=4096, max_position_embeddings=4096,
)  # fmt: skip


def phi3_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the RoPE settings of Phi-3: longrope (also named 'su') or no scaling."""
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    name = rope.pop("rope_type", rope.pop("type", "default"))
    if name in ("su", "yarn"):  # this class computes longrope for both
        name = "longrope"
    if name not in ("default", "longrope"):
        raise BadInput(f"RoPE scaling {name!r} is not supported for phi3; supported: 'default', 'longrope'")
    base, scaling = read_rope({**hf, "rope_scaling": None, "rope_parameters": {**rope, "rope_type": name}})
    return dict(rope_base=base, rope_scaling=scaling)


def phi3_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns the RoPE keys that transformers 4 accepts for Phi-3. It derives the factor from the context lengths."""
    scaling = cfg.rope_scaling
    if scaling is None or scaling.name != "longrope":
        return {"rope_scaling": None}  # other scalings do not round-trip
    written = write_rope(cfg)
    rope = {"type": "longrope"} | {name: written["rope_scaling"][name] for name in ("short_factor", "long_factor")}
    if scaling.attention_factor is not None:
        rope["attention_factor"] = scaling.attention_factor
    if written[MAX_POSITIONS] / scaling.original_max_len != scaling.factor:
        rope["factor"] = scaling.factor
    return {"rope_scaling": rope, ORIGINAL_POSITIONS: scaling.original_max_len}


PHI3 = llama_family(
    "phi3",
    "Phi3ForCausalLM",
    tuple(row for row in BODY if row.leaf_names not in PHI3_LEAVES) + PHI3_FUSED + NORMS_BEFORE,
    PHI3_DEFAULTS,
    same=WINDOW,
    settings=phi3_settings,
    keys=phi3_keys,
)
