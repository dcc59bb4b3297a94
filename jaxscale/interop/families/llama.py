"""Llama and its relatives in transformers that our Llama computes: one table of rows, keys and settings for each.

Llama 2 and 3 (LlamaForCausalLM). Mistral: every layer with a sliding window or none. OLMo-2: norms of results alone,
QK-norm over all heads together. Qwen2 and Qwen3: with biases, or with QK-norm.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.interop.families.family import Family, Row
from jaxscale.interop.families.rope import ROPE, read_rope, write_rope
from jaxscale.interop.families.settings import FAR, NEAR, read_windows, refuse_unless, write_types
from jaxscale.models.llama_config import LlamaConfig

LAYER = "layers.{layer}."
BODY = (
    Row("embedding", "embed_tokens.weight", inputs=1),
    Row("blocks/attention/wq", LAYER + "self_attn.q_proj.weight", 1, turned=True),
    Row("blocks/attention/wk", LAYER + "self_attn.k_proj.weight", 1, turned=True),
    Row("blocks/attention/wv", LAYER + "self_attn.v_proj.weight", 1, turned=True),
    Row("blocks/attention/wo", LAYER + "self_attn.o_proj.weight", 2, turned=True),
    Row("blocks/mlp/gate", LAYER + "mlp.gate_proj.weight", 1, turned=True),
    Row("blocks/mlp/up", LAYER + "mlp.up_proj.weight", 1, turned=True),
    Row("blocks/mlp/down", LAYER + "mlp.down_proj.weight", 1, turned=True),
    Row("final_norm", "norm.weight"),
    Row("head", "lm_head.weight", 1, turned=True),
)
NORMS_BEFORE = (
    Row("blocks/attention_norm", LAYER + "input_layernorm.weight"),
    Row("blocks/mlp_norm", LAYER + "post_attention_layernorm.weight"),
)
NORMS_AFTER = (
    Row("blocks/attention_out_norm", LAYER + "post_attention_layernorm.weight"),
    Row("blocks/mlp_out_norm", LAYER + "post_feedforward_layernorm.weight"),
)
BIASES = tuple(Row(f"blocks/attention/bias_{name}", f"{LAYER}self_attn.{name}_proj.bias") for name in "qkvo")
QK_NORMS = tuple(Row(f"blocks/attention/{name}_norm", f"{LAYER}self_attn.{name}_norm.weight") for name in "qk")
LEFT_OUT = (r".*\.rotary_emb\.inv_freq",)  # a buffer that old releases wrote: the config tells it
SHARED = dict(  # of transformers' LlamaConfig, for keys that a config.json leaves out, and of most of its relatives
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=None, head_dim=None, hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False,
    rope_theta=10_000.0,
)  # fmt: skip
SPELT = dict(  # ours: theirs, of all relatives
    vocab_size="vocab_size", num_layers="num_hidden_layers", embed_dim="hidden_size", num_heads="num_attention_heads",
    num_kv_heads="num_key_value_heads", head_dim="head_dim", mlp_dim="intermediate_size", norm_eps="rms_norm_eps",
    tied_embeddings="tie_word_embeddings",
)  # fmt: skip


def read_biases(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings for attention_bias: of queries, keys, values and what attention adds."""
    refuse_unless(hf, attention_bias=(False, True))
    return dict(qkv_bias=hf["attention_bias"], out_bias=hf["attention_bias"])


def write_biases(cfg: LlamaConfig) -> dict[str, Any]:
    """The inverse, of a config that has all of them or none."""
    return dict(attention_bias=cfg.out_bias)


def relative(
    model_type: str,
    architecture: str,
    rows: tuple[Row, ...],
    defaults: Mapping[str, Any],
    *,
    allowed: Mapping[str, tuple],
    written: Mapping[str, Any],
    spelt: Mapping[str, str] | None = None,
    settings: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda hf: {},
    keys: Callable[[LlamaConfig], dict[str, Any]] = lambda cfg: {},
    body: tuple[Row, ...] = BODY,
    more_keys: tuple[str, ...] = (),
    **more: Any,
) -> Family:
    """A family whose models are Llamas of ours, with `rows` beside those of `body`, which nearly all share.

    Args: defaults: transformers' own, for keys that a config.json leaves out. allowed: values of keys that our model
    computes. written: keys that are always the same. spelt: {ours: theirs} beside SPELT. settings: ours that follow
    from the keys otherwise, rope_base among them where RoPE is not that of all. keys: the inverse. more_keys: others
    that `settings` looks at. more: fields of the family.
    """
    spelt = {**SPELT, **(spelt or {})}

    def read_config(hf: Mapping[str, Any]) -> LlamaConfig:
        hf = {**defaults, **hf}
        refuse_unless(hf, **allowed)
        found = {ours: hf[theirs] for ours, theirs in spelt.items()}
        found["num_kv_heads"] = found["num_kv_heads"] or found["num_heads"]
        found["head_dim"] = found["head_dim"] or hf["hidden_size"] // found["num_heads"]
        found |= settings(hf)
        if "rope_base" not in found:
            found["rope_base"], found["rope_scaling"] = read_rope(hf)
        return LlamaConfig(**found)

    def write_config(cfg: LlamaConfig) -> dict[str, Any]:
        return {
            **written,
            **{theirs: getattr(cfg, ours) for ours, theirs in spelt.items()},
            **write_rope(cfg),
            **keys(cfg),
        }

    known = tuple(dict.fromkeys((*defaults, *allowed, *ROPE, *more_keys)))
    rows, names = body + rows, (architecture,)
    return Family(model_type, names, read_config, write_config, rows, known, left_out=LEFT_OUT, **more)


LLAMA = relative(
    "llama",
    "LlamaForCausalLM",
    NORMS_BEFORE + BIASES,
    SHARED | dict(attention_bias=False, mlp_bias=False),
    allowed=dict(hidden_act=("silu",), mlp_bias=(False,)),
    written=dict(hidden_act="silu", mlp_bias=False),
    settings=read_biases,
    keys=write_biases,
)
MISTRAL = relative(
    "mistral",
    "MistralForCausalLM",
    NORMS_BEFORE,
    SHARED | dict(intermediate_size=14336, num_key_value_heads=8, sliding_window=4096),  # of MistralConfig
    allowed=dict(hidden_act=("silu",)),
    written=dict(hidden_act="silu"),
    spelt=dict(attention_window="sliding_window"),
)
OLMO2 = relative(
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
    """attention_window, global_every and global_first of a Qwen, whose later layers alone may have a window."""
    first, window = hf["max_window_layers"], hf["sliding_window"] if hf["use_sliding_window"] else None
    later = FAR if window is None else NEAR
    types = hf["layer_types"] or [later if layer >= first else FAR for layer in range(hf["num_hidden_layers"])]
    return read_windows({**hf, "sliding_window": window}, types)


def qwen_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """The keys that qwen_windows reads."""
    windowed = cfg.attention_window is not None
    found = dict(use_sliding_window=windowed, sliding_window=cfg.attention_window, layer_types=write_types(cfg))
    return found | dict(max_window_layers=cfg.global_first if windowed else cfg.num_layers)


QWEN2 = relative(
    "qwen2",
    "Qwen2ForCausalLM",
    NORMS_BEFORE + BIASES,
    QWEN_DEFAULTS,
    allowed=dict(hidden_act=("silu",), attention_bias=(False,)),
    written=dict(hidden_act="silu"),
    settings=lambda hf: qwen_windows(hf) | dict(qkv_bias=True),
    keys=qwen_keys,
)
QWEN3 = relative(
    "qwen3",
    "Qwen3ForCausalLM",
    NORMS_BEFORE + QK_NORMS + BIASES,
    QWEN_DEFAULTS | dict(head_dim=128),
    allowed=dict(hidden_act=("silu",)),
    written=dict(hidden_act="silu"),
    settings=lambda hf: qwen_windows(hf) | read_biases(hf) | dict(qk_norm=True),
    keys=lambda cfg: qwen_keys(cfg) | write_biases(cfg),
)
