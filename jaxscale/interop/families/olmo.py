"""OLMo-2 as transformers' Olmo2ForCausalLM: norms of results alone, QK-norm over all heads together."""

from collections.abc import Mapping
from typing import Any

from jaxscale.interop.families import llama
from jaxscale.interop.families.family import Family, Row
from jaxscale.interop.families.qwen import QK_NORMS
from jaxscale.interop.families.settings import ROPE, merged, refuse_unless
from jaxscale.models.llama_config import LlamaConfig

NORMS_AFTER = (
    Row("blocks/attention_out_norm", llama.LAYER + "post_attention_layernorm.weight"),
    Row("blocks/mlp_out_norm", llama.LAYER + "post_feedforward_layernorm.weight"),
)
DEFAULTS = llama.SHARED | dict(vocab_size=50304, rms_norm_eps=1e-5, attention_bias=False)  # transformers' Olmo2Config


def read_config(hf: Mapping[str, Any]) -> LlamaConfig:
    """Our settings for a config.json of OLMo-2."""
    hf = merged(DEFAULTS, hf)
    refuse_unless(hf, hidden_act=("silu",), attention_bias=(False,))
    return llama.read_as_llama(hf, norm_placement="after", qk_norm=True, qk_norm_over="all_heads")


def write_config(cfg: LlamaConfig) -> dict[str, Any]:
    """The config.json of an OLMo-2 of ours."""
    return llama.write_as_llama(cfg, hidden_act="silu", attention_bias=False)


OLMO2 = Family(
    "olmo2",
    ("Olmo2ForCausalLM",),
    read_config,
    write_config,
    llama.BODY + NORMS_AFTER + QK_NORMS,
    keys=(*DEFAULTS, *ROPE),
    left_out=llama.LEFT_OUT,
)
