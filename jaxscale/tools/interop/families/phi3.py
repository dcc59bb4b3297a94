"""Phi-3 (arXiv:2404.14219) as transformers' Phi3ForCausalLM: a Llama with fused QKV and fused gate and up
projections, and longrope."""

from collections.abc import Mapping
from typing import Any

from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop.families.family import TensorSpec
from jaxscale.tools.interop.families.llama_like import BODY, LAYER, NORMS_BEFORE, SHARED, llama_family
from jaxscale.tools.interop.families.rope_scaling import MAX_POSITIONS, ORIGINAL_POSITIONS, read_rope, write_rope

FUSED_LEAVES = ("blocks/attention/wq", "blocks/attention/wk", "blocks/attention/wv", "blocks/mlp/gate", "blocks/mlp/up")
FUSED = (
    TensorSpec(FUSED_LEAVES[:3], LAYER + "self_attn.qkv_proj.weight", 1, transposed=True),
    TensorSpec(FUSED_LEAVES[3:], LAYER + "mlp.gate_up_proj.weight", 1, transposed=True),
)
DEFAULTS = SHARED | dict(  # of Phi3Config
    vocab_size=32064, hidden_size=3072, intermediate_size=8192, rms_norm_eps=1e-5, sliding_window=None,
    original_max_position_embeddings=4096, max_position_embeddings=4096,
)  # fmt: skip


def phi3_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of RoPE: longrope, also under its first name 'su', or none."""
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if (name := rope.pop("rope_type", rope.pop("type", "default"))) in (
        "su",
        "yarn",
    ):  # this class computes longrope for both
        name = "longrope"
    if name not in ("default", "longrope"):
        raise BadInput(f"config.json: RoPE scaling {name!r} is not supported for phi3; it may be 'default', 'longrope'")
    base, scaling = read_rope({**hf, "rope_scaling": None, "rope_parameters": {**rope, "rope_type": name}})
    return dict(rope_base=base, rope_scaling=scaling)


def phi3_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """RoPE keys of this class. transformers 4 accepts no others, and takes the factor from the two lengths."""
    scaling = cfg.rope_scaling
    if scaling is None or scaling.name != "longrope":
        return {"rope_scaling": None}  # another scaling does not round-trip
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
    NORMS_BEFORE,
    DEFAULTS,
    allowed=dict(hidden_act=("silu",)),
    written=dict(hidden_act="silu"),
    config_keys=dict(attention_window="sliding_window"),
    settings=phi3_settings,
    keys=phi3_keys,
    body=tuple(row for row in BODY if row.leaf_names not in FUSED_LEAVES) + FUSED,
)
