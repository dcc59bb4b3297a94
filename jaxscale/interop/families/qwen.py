"""Qwen2 and Qwen3 as transformers' Qwen2ForCausalLM and Qwen3ForCausalLM: a Llama with biases, or with QK-norm."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxscale.interop.families import llama
from jaxscale.interop.families.family import Family, Row
from jaxscale.interop.families.settings import FAR, NEAR, ROPE, merged, refuse_unless
from jaxscale.interop.families.windows import read_windows, write_types
from jaxscale.models.llama_config import LlamaConfig

BIASES = tuple(
    Row(f"blocks/attention/bias_{name}", f"{llama.LAYER}self_attn.{name}_proj.bias") for name in ("q", "k", "v")
)
QK_NORMS = tuple(
    Row(f"blocks/attention/{name}_norm", f"{llama.LAYER}self_attn.{name}_norm.weight") for name in ("q", "k")
)
DEFAULTS = dict(  # of transformers' Qwen2Config and Qwen3Config
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False, rope_theta=10_000.0,
    use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=None, attention_bias=False,
)  # fmt: skip
HEAD_DIM = {"qwen2": None, "qwen3": 128}  # None: hidden_size / num_attention_heads


def read_config(hf: Mapping[str, Any], kind: str) -> LlamaConfig:
    """Our settings for a config.json of Qwen2 or Qwen3."""
    hf = merged(DEFAULTS | dict(head_dim=HEAD_DIM[kind]), hf)
    refuse_unless(hf, hidden_act=("silu",), attention_bias=(False,))
    length, first = hf["num_hidden_layers"], hf["max_window_layers"]
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    later = FAR if window is None else NEAR
    types = hf["layer_types"] or [later if layer >= first else FAR for layer in range(length)]
    windows = read_windows(hf | dict(sliding_window=window), types)
    return llama.read_as_llama(hf, **windows, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3")


def write_config(cfg: LlamaConfig, kind: str) -> dict[str, Any]:
    """The config.json of a Qwen of ours."""
    common = llama.write_as_llama(cfg, hidden_act="silu")
    windowed = cfg.attention_window is not None
    common |= dict(use_sliding_window=windowed, sliding_window=cfg.attention_window, layer_types=write_types(cfg))
    common |= dict(max_window_layers=0 if windowed else cfg.num_layers)
    return common if kind == "qwen2" else common | dict(attention_bias=False)


def family(kind: str, architecture: str, more: tuple[Row, ...]) -> Family:
    """One of the two."""
    return Family(
        kind,
        (architecture,),
        functools.partial(read_config, kind=kind),
        functools.partial(write_config, kind=kind),
        llama.BODY + llama.NORMS_BEFORE + more,
        keys=(*DEFAULTS, "head_dim", *ROPE),
        left_out=llama.LEFT_OUT,
    )


QWEN2 = family("qwen2", "Qwen2ForCausalLM", BIASES)
QWEN3 = family("qwen3", "Qwen3ForCausalLM", QK_NORMS)
