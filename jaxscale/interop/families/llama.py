"""Llama 2 and 3 as transformers' LlamaForCausalLM, and the rows and settings that its relatives share."""

from collections.abc import Mapping
from typing import Any

from jaxscale.interop.families.family import Family, Row
from jaxscale.interop.families.settings import ROPE, merged, read_rope, refuse_unless, write_rope
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
LEFT_OUT = (r".*\.rotary_emb\.inv_freq",)  # a buffer that old releases wrote: the config tells it
SHARED = dict(  # of transformers' LlamaConfig, for keys that a config.json leaves out, and of most of its relatives
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=None, head_dim=None, hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False,
    rope_theta=10_000.0,
)  # fmt: skip
DEFAULTS = SHARED | dict(attention_bias=False, mlp_bias=False)


SPELT = dict(  # ours: theirs, of all relatives
    vocab_size="vocab_size", num_layers="num_hidden_layers", embed_dim="hidden_size", num_heads="num_attention_heads",
    num_kv_heads="num_key_value_heads", head_dim="head_dim", mlp_dim="intermediate_size", norm_eps="rms_norm_eps",
    tied_embeddings="tie_word_embeddings",
)  # fmt: skip


def read_as_llama(hf: Mapping[str, Any], **more: Any) -> LlamaConfig:
    """Our settings for a config.json, as all relatives spell them. Args: more: of this one, over RoPE's."""
    found = {ours: hf[theirs] for ours, theirs in SPELT.items()}
    found["num_kv_heads"] = found["num_kv_heads"] or found["num_heads"]
    found["head_dim"] = found["head_dim"] or hf["hidden_size"] // found["num_heads"]
    if "rope_base" not in more:
        found["rope_base"], found["rope_scaling"] = read_rope(hf)
    return LlamaConfig(**found, **more)


def write_as_llama(cfg: LlamaConfig, **more: Any) -> dict[str, Any]:
    """The config.json of a model of ours, as all relatives spell it. Args: more: keys of this one."""
    return more | {theirs: getattr(cfg, ours) for ours, theirs in SPELT.items()} | write_rope(cfg)


def read_config(hf: Mapping[str, Any]) -> LlamaConfig:
    """Our settings for a config.json of Llama."""
    hf = merged(DEFAULTS, hf)
    refuse_unless(hf, hidden_act=("silu",), attention_bias=(False,), mlp_bias=(False,))
    return read_as_llama(hf)


def write_config(cfg: LlamaConfig) -> dict[str, Any]:
    """The config.json of a Llama of ours."""
    return write_as_llama(cfg, hidden_act="silu", attention_bias=False, mlp_bias=False)


LLAMA = Family(
    "llama",
    ("LlamaForCausalLM",),
    read_config,
    write_config,
    BODY + NORMS_BEFORE,
    keys=(*DEFAULTS, *ROPE),
    left_out=LEFT_OUT,
)
