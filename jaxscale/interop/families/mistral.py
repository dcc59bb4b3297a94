"""Mistral as transformers' MistralForCausalLM: a Llama, every layer with a sliding window or none."""

from collections.abc import Mapping
from typing import Any

from jaxscale.interop.families import llama
from jaxscale.interop.families.family import Family
from jaxscale.interop.families.settings import ROPE, merged, refuse_unless
from jaxscale.models.llama_config import LlamaConfig

DEFAULTS = llama.SHARED | dict(  # of transformers' MistralConfig
    intermediate_size=14336, num_key_value_heads=8, sliding_window=4096
)


def read_config(hf: Mapping[str, Any]) -> LlamaConfig:
    """Our settings for a config.json of Mistral."""
    hf = merged(DEFAULTS, hf)
    refuse_unless(hf, hidden_act=("silu",))
    return llama.read_as_llama(hf, attention_window=hf["sliding_window"])


def write_config(cfg: LlamaConfig) -> dict[str, Any]:
    """The config.json of a Mistral of ours."""
    return llama.write_as_llama(cfg, hidden_act="silu") | dict(sliding_window=cfg.attention_window)


MISTRAL = Family(
    "mistral",
    ("MistralForCausalLM",),
    read_config,
    write_config,
    llama.BODY + llama.NORMS_BEFORE,
    keys=(*DEFAULTS, *ROPE),
    left_out=llama.LEFT_OUT,
)
