"""Mixtures of experts as transformers has them: Mixtral (arXiv:2401.04088, MixtralForCausalLM), Qwen3-MoE
(arXiv:2505.09388, Qwen3MoeForCausalLM), OLMoE (arXiv:2409.02060, OlmoeForCausalLM).

Files have one tensor per expert and matrix; transformers 5 fuses those of a layer, and may save them so.
"""

from collections.abc import Mapping
from typing import Any

from jaxscale.core.models.config import ExpertsConfig
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.tools.interop.families.family import FusedExperts, TensorSpec
from jaxscale.tools.interop.families.llama_like import (
    BIASES,
    BODY,
    LAYER,
    NORMS_BEFORE,
    QK_NORMS,
    QWEN_DEFAULTS,
    SHARED,
    llama_family,
    read_biases,
    write_biases,
)
from jaxscale.tools.interop.families.settings import refuse_unless

NAMES = ("num_experts", "num_local_experts")  # alias; depends on the release that wrote the file
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"  # of all experts of a layer
ATTENTION = tuple(row for row in BODY if "mlp" not in row.hf_name)
DENSE = tuple(
    TensorSpec(f"dense_blocks/mlp/{name}", f"{LAYER}mlp.{name}_proj.weight", 1, transposed=True)
    for name in ("gate", "up", "down")
)


def expert_rows(mlp: str, gate: str, up: str, down: str) -> tuple[tuple[TensorSpec, ...], tuple[FusedExperts, ...]]:
    """Returns (specs of a router and its experts, fused alternatives).

    Args: mlp: their parent module. gate, up, down: modules of an expert.
    """
    names = [f"{LAYER}{mlp}.experts.{{expert}}.{name}.weight" for name in (gate, up, down)]
    rows = (
        TensorSpec("blocks/mlp/router", f"{LAYER}{mlp}.gate.weight", 1, transposed=True),
        *(
            TensorSpec(f"blocks/mlp/{leaf}", name, 1, transposed=True)
            for leaf, name in zip(("gate", "up", "down"), names)
        ),
    )
    fused = (
        FusedExperts(f"{LAYER}{mlp}.{GATE_UP}", (names[0], names[1])),
        FusedExperts(f"{LAYER}{mlp}.{DOWN}", (names[2],)),
    )
    return rows, fused


def number_of(hf: Mapping[str, Any], usual: int) -> int:
    """Returns the number of experts, under either name. Raises BadInput if the two differ."""
    numbers = [hf[name] for name in NAMES if hf.get(name) is not None]
    if len(numbers) == 2 and numbers[0] != numbers[1]:
        raise BadInput(
            f"config.json: {NAMES[0]}={short(numbers[0])} and {NAMES[1]}={short(numbers[1])} must be the same"
        )
    return numbers[0] if numbers else usual


def first_dense(hf: Mapping[str, Any]) -> int:
    """Returns the number of leading dense layers. Raises BadInput for dense layers elsewhere."""
    refuse_unless(hf, decoder_sparse_step=(1,))
    dense = hf["mlp_only_layers"] or []
    if not isinstance(dense, list) or sorted(dense) != list(range(len(dense))):
        raise BadInput(
            f"config.json: mlp_only_layers={short(dense)} is not supported for {hf.get('model_type')}: they must be "
            "the first layers, as in [0, 1]"
        )
    return len(dense)


MIXTRAL_ROWS, MIXTRAL_FUSED = expert_rows("block_sparse_moe", "w1", "w3", "w2")
ROWS, FUSED = expert_rows("mlp", "gate_proj", "up_proj", "down_proj")


def mixtral_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Top-k experts with normalized weights."""
    number = number_of(hf, 8)
    return dict(experts=ExpertsConfig(number=number, chosen=hf["num_experts_per_tok"], mlp_dim=hf["intermediate_size"]))


def mixtral_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Inverse of mixtral_settings; {} for a model without experts, which lost_settings then rejects."""
    experts = cfg.experts
    if experts is None:
        return {}
    return dict(
        intermediate_size=experts.mlp_dim,
        num_local_experts=experts.number,
        num_experts_per_tok=experts.chosen,
    )


MIXTRAL = llama_family(
    "mixtral",
    "MixtralForCausalLM",
    NORMS_BEFORE + MIXTRAL_ROWS,
    SHARED | dict(  # of MixtralConfig
        intermediate_size=14336, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0, sliding_window=None,
        num_experts_per_tok=2, router_jitter_noise=0.0,
    ),
    allowed=dict(hidden_act=("silu",), router_jitter_noise=(None, 0)),
    written=dict(hidden_act="silu"),
    config_keys=dict(attention_window="sliding_window"),
    settings=mixtral_settings,
    keys=mixtral_keys,
    body=ATTENTION,
    more_keys=NAMES,
    fused=MIXTRAL_FUSED,
    renames=((r"\.mlp\.", ".block_sparse_moe."),),
)  # fmt: skip


def qwen3_moe_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Experts with their own mlp_dim, optional weight normalization and sliding window."""
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    if hf["use_sliding_window"]:
        # transformers ignores this key and gives all layers the window.
        refuse_unless(hf, max_window_layers=(None, 0))
    experts = ExpertsConfig(
        number=number_of(hf, 128),
        chosen=hf["num_experts_per_tok"],
        mlp_dim=hf["moe_intermediate_size"],
        normalised=hf["norm_topk_prob"],
        first_dense=first_dense(hf),
    )
    return read_biases(hf) | dict(qk_norm=True, attention_window=window, experts=experts)


def qwen3_moe_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Inverse of qwen3_moe_settings."""
    experts = cfg.experts
    windowed = cfg.attention_window is not None
    found = write_biases(cfg) | dict(use_sliding_window=windowed, sliding_window=cfg.attention_window)
    if experts is None:
        return found
    return found | dict(
        num_experts=experts.number, num_experts_per_tok=experts.chosen, moe_intermediate_size=experts.mlp_dim,
        norm_topk_prob=experts.normalised, decoder_sparse_step=1, mlp_only_layers=list(range(experts.first_dense)),
    )  # fmt: skip


QWEN3_MOE = llama_family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    NORMS_BEFORE + QK_NORMS + BIASES + DENSE + ROWS,
    {key: value for key, value in QWEN_DEFAULTS.items() if key not in ("layer_types", "max_window_layers")}
    | dict(  # of Qwen3MoeConfig
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False, decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    allowed=dict(hidden_act=("silu",)),
    written=dict(hidden_act="silu"),
    settings=qwen3_moe_settings,
    keys=qwen3_moe_keys,
    body=ATTENTION,
    more_keys=(*NAMES, "max_window_layers"),
    fused=FUSED,
)  # fmt: skip


def olmoe_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """QK-norm over all heads; head_dim follows from the model."""
    refuse_unless(hf, head_dim=(None, hf["hidden_size"] // hf["num_attention_heads"]))
    experts = ExpertsConfig(
        number=number_of(hf, 64),
        chosen=hf["num_experts_per_tok"],
        mlp_dim=hf["intermediate_size"],
        normalised=hf["norm_topk_prob"],
    )
    return read_biases(hf) | dict(qk_norm=True, qk_norm_over="all_heads", experts=experts)


def olmoe_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Inverse of olmoe_settings; another head_dim does not round-trip."""
    experts = cfg.experts
    found = write_biases(cfg) | dict(head_dim=cfg.embed_dim // cfg.num_heads)
    if experts is None:
        return found
    return found | dict(
        intermediate_size=experts.mlp_dim, num_experts=experts.number, num_experts_per_tok=experts.chosen,
        norm_topk_prob=experts.normalised,
    )  # fmt: skip


OLMOE = llama_family(
    "olmoe",
    "OlmoeForCausalLM",
    NORMS_BEFORE + QK_NORMS + BIASES + ROWS,
    SHARED | dict(  # of OlmoeConfig
        vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=16,
        rms_norm_eps=1e-5, attention_bias=False, num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None,
    ),
    allowed=dict(hidden_act=("silu",), clip_qkv=(None,)),
    written=dict(hidden_act="silu"),
    settings=olmoe_settings,
    keys=olmoe_keys,
    body=ATTENTION,
    more_keys=NAMES,
    fused=FUSED,
)  # fmt: skip
