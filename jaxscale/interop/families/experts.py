"""Mixtures of experts as transformers has them: Mixtral (arXiv:2401.04088, MixtralForCausalLM), Qwen3-MoE
(arXiv:2505.09388, Qwen3MoeForCausalLM), OLMoE (arXiv:2409.02060, OlmoeForCausalLM).

Files have a tensor for each matrix of each expert. transformers 5 holds those of a layer in one, and may save it so.
"""

from collections.abc import Mapping
from typing import Any

from jaxscale.interop.families.family import Joined, Row
from jaxscale.interop.families.llama import (
    BIASES,
    BODY,
    LAYER,
    NORMS_BEFORE,
    QK_NORMS,
    QWEN_DEFAULTS,
    SHARED,
    read_biases,
    relative,
    write_biases,
)
from jaxscale.interop.families.settings import refuse_unless
from jaxscale.models.experts_config import ExpertsConfig
from jaxscale.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short

NAMES = ("num_experts", "num_local_experts")  # which of the two a file has depends on the release that wrote it
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"  # of a layer, in one tensor
ATTENTION = tuple(row for row in BODY if "mlp" not in row.theirs)
DENSE = tuple(
    Row(f"dense_blocks/mlp/{name}", f"{LAYER}mlp.{name}_proj.weight", 1, turned=True) for name in ("gate", "up", "down")
)


def expert_rows(mlp: str, gate: str, up: str, down: str) -> tuple[tuple[Row, ...], tuple[Joined, ...]]:
    """(rows of a router and its experts, the tensors that may stand for those of the experts).

    Args: mlp: the module that has both. gate, up, down: modules of an expert.
    """
    own = [f"{LAYER}{mlp}.experts.{{expert}}.{name}.weight" for name in (gate, up, down)]
    rows = (
        Row("blocks/mlp/router", f"{LAYER}{mlp}.gate.weight", 1, turned=True),
        *(Row(f"blocks/mlp/{name}", theirs, 1, turned=True) for name, theirs in zip(("gate", "up", "down"), own)),
    )
    together = Joined(f"{LAYER}{mlp}.{GATE_UP}", (own[0], own[1])), Joined(f"{LAYER}{mlp}.{DOWN}", (own[2],))
    return rows, together


def number_of(hf: Mapping[str, Any], usual: int) -> int:
    """Returns the number of experts of a layer, under either name. Raises BadInput where the two differ."""
    said = [hf[name] for name in NAMES if hf.get(name) is not None]
    if len(said) == 2 and said[0] != said[1]:
        raise BadInput(f"config.json: {NAMES[0]}={short(said[0])} and {NAMES[1]}={short(said[1])} must be the same")
    return said[0] if said else usual


def first_dense(hf: Mapping[str, Any]) -> int:
    """Returns how many of the first layers have no experts. Raises BadInput for any but the first ones."""
    refuse_unless(hf, decoder_sparse_step=(1,))
    dense = hf["mlp_only_layers"] or []
    if not isinstance(dense, list) or sorted(dense) != list(range(len(dense))):
        raise BadInput(
            f"config.json: mlp_only_layers={short(dense)} is not supported for {hf.get('model_type')}: they must be "
            "the first layers, as in [0, 1]"
        )
    return len(dense)


MIXTRAL_ROWS, MIXTRAL_JOINED = expert_rows("block_sparse_moe", "w1", "w3", "w2")
ROWS, JOINED = expert_rows("mlp", "gate_proj", "up_proj", "down_proj")


def mixtral_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of which each token has a few, whose weights add up to 1."""
    number = number_of(hf, 8)
    return dict(experts=ExpertsConfig(number=number, chosen=hf["num_experts_per_tok"], mlp_dim=hf["intermediate_size"]))


def mixtral_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """The inverse; nothing for a model without experts, which then is seen to be another."""
    own = cfg.experts
    if own is None:
        return {}
    return dict(intermediate_size=own.mlp_dim, num_local_experts=own.number, num_experts_per_tok=own.chosen)


MIXTRAL = relative(
    "mixtral",
    "MixtralForCausalLM",
    NORMS_BEFORE + MIXTRAL_ROWS,
    SHARED | dict(  # of MixtralConfig
        intermediate_size=14336, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0, sliding_window=None,
        num_experts_per_tok=2, router_jitter_noise=0.0,
    ),
    allowed=dict(hidden_act=("silu",), router_jitter_noise=(None, 0)),
    written=dict(hidden_act="silu"),
    spelt=dict(attention_window="sliding_window"),
    settings=mixtral_settings,
    keys=mixtral_keys,
    body=ATTENTION,
    more_keys=NAMES,
    joined=MIXTRAL_JOINED,
    renamed=((r"\.mlp\.", ".block_sparse_moe."),),
)  # fmt: skip


def qwen3_moe_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of a width of their own, weights that add up to 1 or do not, and perhaps a window in all layers."""
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    if hf["use_sliding_window"]:
        # transformers gives all layers the window, whatever this key says.
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
    """The inverse."""
    own = cfg.experts
    windowed = cfg.attention_window is not None
    found = write_biases(cfg) | dict(use_sliding_window=windowed, sliding_window=cfg.attention_window)
    if own is None:
        return found
    return found | dict(
        num_experts=own.number, num_experts_per_tok=own.chosen, moe_intermediate_size=own.mlp_dim,
        norm_topk_prob=own.normalised, decoder_sparse_step=1, mlp_only_layers=list(range(own.first_dense)),
    )  # fmt: skip


QWEN3_MOE = relative(
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
    joined=JOINED,
)  # fmt: skip


def olmoe_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """QK-norm over all heads together, whose widths follow from the model's."""
    refuse_unless(hf, head_dim=(None, hf["hidden_size"] // hf["num_attention_heads"]))
    experts = ExpertsConfig(
        number=number_of(hf, 64),
        chosen=hf["num_experts_per_tok"],
        mlp_dim=hf["intermediate_size"],
        normalised=hf["norm_topk_prob"],
    )
    return read_biases(hf) | dict(qk_norm=True, qk_norm_over="all_heads", experts=experts)


def olmoe_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """The inverse; heads of another width are seen to be lost."""
    own = cfg.experts
    found = write_biases(cfg) | dict(head_dim=cfg.embed_dim // cfg.num_heads)
    if own is None:
        return found
    return found | dict(
        intermediate_size=own.mlp_dim, num_experts=own.number, num_experts_per_tok=own.chosen,
        norm_topk_prob=own.normalised,
    )  # fmt: skip


OLMOE = relative(
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
    joined=JOINED,
)  # fmt: skip
