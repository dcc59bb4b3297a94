"""DeepSeek-V2 (arXiv:2405.04434, DeepseekV2ForCausalLM) and DeepSeek-V3 (arXiv:2412.19437, DeepseekV3ForCausalLM) as
transformers has them: latent attention, routed and shared experts.

V2 has softmax scores, and a group's score is that of its best expert. V3 has sigmoid scores, a bias that affects only
the selection, and a group's score is the sum of its best two. V2's router ignores norm_topk_prob in transformers but
not in DeepSeek's code, so true is refused. The norms of latents use another epsilon (core/models/latent_attention.py).
"""

from collections.abc import Mapping
from typing import Any

from jaxscale.core.models.config import ExpertsConfig, LatentConfig
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.tools.interop.families.experts import DENSE, FUSED, NAMES, ROWS
from jaxscale.tools.interop.families.family import TensorSpec
from jaxscale.tools.interop.families.llama_like import BODY, LAYER, NORMS_BEFORE, SHARED, llama_family
from jaxscale.tools.interop.families.settings import refuse_unless

OUTSIDE = tuple(row for row in BODY if not row.per_layer)
ATTENTION = (
    TensorSpec("blocks/attention/wq", LAYER + "self_attn.q_proj.weight", 1, transposed=True, interleaved=True),
    TensorSpec("blocks/attention/wq_down", LAYER + "self_attn.q_a_proj.weight", 1, transposed=True),
    TensorSpec("blocks/attention/q_norm", LAYER + "self_attn.q_a_layernorm.weight"),
    TensorSpec("blocks/attention/wq_up", LAYER + "self_attn.q_b_proj.weight", 1, transposed=True, interleaved=True),
    TensorSpec(
        "blocks/attention/wkv_down", LAYER + "self_attn.kv_a_proj_with_mqa.weight", 1, transposed=True, interleaved=True
    ),
    TensorSpec("blocks/attention/kv_norm", LAYER + "self_attn.kv_a_layernorm.weight"),
    TensorSpec("blocks/attention/wkv_up", LAYER + "self_attn.kv_b_proj.weight", 1, transposed=True),
    TensorSpec("blocks/attention/wo", LAYER + "self_attn.o_proj.weight", 2, transposed=True),
)
EXPERTS = (
    *DENSE,
    *ROWS,
    TensorSpec("blocks/mlp/router_bias", LAYER + "mlp.gate.e_score_correction_bias"),
    *(
        TensorSpec(f"blocks/mlp/shared/{name}", f"{LAYER}mlp.shared_experts.{name}_proj.weight", 1, transposed=True)
        for name in ("gate", "up", "down")
    ),
)
DEFAULTS = SHARED | dict(  # of both of transformers' configs
    attention_bias=False, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip


def latent_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of latent attention."""
    nope, rope, heads = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["num_attention_heads"]
    refuse_unless(hf, num_key_value_heads=(None, heads), head_dim=(None, rope), qk_head_dim=(None, nope + rope))
    if hf["q_lora_rank"] == 0:
        raise BadInput("config.json: q_lora_rank=0 is not supported; null stands for none")
    check_yarn(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    latent = LatentConfig(
        kv_rank=hf["kv_lora_rank"],
        q_rank=hf["q_lora_rank"] or 0,
        nope_dim=nope,
        rope_dim=rope,
        value_dim=hf["v_head_dim"],
    )
    return dict(latent=latent, head_dim=latent.head_dim)


def check_yarn(rope: Mapping[str, Any]) -> None:
    """Raises BadInput for a mscale_all_dim that our YaRN would compute differently."""
    name = rope.get("rope_type", rope.get("type", "default"))
    if not rope.get("mscale_all_dim") or name == "default":
        return
    if name != "yarn" or not rope.get("mscale") or rope.get("attention_factor") is not None:
        raise BadInput(
            f"config.json: mscale_all_dim={short(rope['mscale_all_dim'])} is only supported for rope_type 'yarn' "
            "with mscale and without attention_factor"
        )


def expert_settings(hf: Mapping[str, Any], **more: Any) -> ExpertsConfig:
    """Settings of routed and shared experts. more: further settings of the family."""
    shared, width = hf["n_shared_experts"], hf["moe_intermediate_size"]
    refuse_unless(hf, **dict.fromkeys(NAMES, (None, hf["n_routed_experts"])))  # aliases in transformers
    if not shared:
        raise BadInput(f"config.json: n_shared_experts={short(shared)} is not supported: it must be 1 or more")
    return ExpertsConfig(
        number=hf["n_routed_experts"],
        chosen=hf["num_experts_per_tok"],
        mlp_dim=width,
        shared_dim=shared * width,
        first_dense=hf["first_k_dense_replace"],
        scale=hf["routed_scaling_factor"],
        **more,
    )


def group_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of expert groups. Raises BadInput for null."""
    for key in ("n_group", "topk_group"):
        if hf[key] is None:
            raise BadInput(f"config.json: {key}=null is not supported where experts are chosen within groups")
    return dict(groups=hf["n_group"], groups_chosen=hf["topk_group"])


def shared_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Keys of both families. A model without latents or experts gets keys that do not round-trip, so that lost_settings
    rejects it; the same holds for a shared_dim that is not a multiple of mlp_dim."""
    latent, experts = cfg.latent, cfg.experts
    if latent is None or experts is None:
        return dict(num_key_value_heads=None, head_dim=None, first_k_dense_replace=0)
    return dict(
        head_dim=latent.rope_dim, q_lora_rank=latent.q_rank or None, kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.nope_dim, qk_rope_head_dim=latent.rope_dim, v_head_dim=latent.value_dim,
        n_routed_experts=experts.number, num_experts_per_tok=experts.chosen, moe_intermediate_size=experts.mlp_dim,
        n_shared_experts=max(1, experts.shared_dim // experts.mlp_dim), first_k_dense_replace=experts.first_dense,
        routed_scaling_factor=experts.scale, n_group=experts.groups, topk_group=experts.groups_chosen,
    )  # fmt: skip


def v2_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Unnormalized softmax scores, over all experts or group-limited."""
    groups = group_settings(hf) if hf["topk_method"] == "group_limited_greedy" else {}
    return latent_settings(hf) | dict(experts=expert_settings(hf, normalised=False, **groups))


def v2_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Inverse of v2_settings."""
    shared = shared_keys(cfg)
    return shared | dict(topk_method="group_limited_greedy" if shared.get("n_group", 1) > 1 else "greedy")


def v3_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Sigmoid scores with a selection bias."""
    groups = group_settings(hf) | dict(group_best=2)
    scores = dict(score="sigmoid", normalised=hf["norm_topk_prob"] or False, bias=True)
    return latent_settings(hf) | dict(experts=expert_settings(hf, **groups, **scores))


def v3_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Inverse of v3_settings. num_nextn_predict_layers is 0: the default of transformers 5 is 1."""
    experts = cfg.experts
    return shared_keys(cfg) | (
        {} if experts is None else dict(norm_topk_prob=experts.normalised, num_nextn_predict_layers=0)
    )


DEEPSEEK_V2 = llama_family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    NORMS_BEFORE + ATTENTION + EXPERTS,
    DEFAULTS | dict(  # of DeepseekV2Config
        vocab_size=102400, first_k_dense_replace=0, n_group=None, n_routed_experts=64, n_shared_experts=2,
        routed_scaling_factor=1.0, topk_group=None, topk_method="greedy", norm_topk_prob=False,
        moe_intermediate_size=1407, mlp_bias=False,
        num_experts_per_tok=6,  # as published, both sizes; transformers has no default
    ),
    allowed=dict(
        hidden_act=("silu",), attention_bias=(False,), mlp_bias=(False,), norm_topk_prob=(False, None),
        topk_method=("greedy", "group_limited_greedy"), scoring_func=("softmax",), moe_layer_freq=(1,),
    ),
    written=dict(
        hidden_act="silu", attention_bias=False, norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1,
    ),
    settings=v2_settings,
    keys=v2_keys,
    body=OUTSIDE,
    more_keys=("qk_head_dim", *NAMES),
    fused=FUSED,
)  # fmt: skip
DEEPSEEK_V3 = llama_family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    NORMS_BEFORE + ATTENTION + EXPERTS,
    DEFAULTS | dict(  # of DeepseekV3Config
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=128, first_k_dense_replace=3, n_group=8, n_routed_experts=256, n_shared_experts=1,
        routed_scaling_factor=2.5, topk_group=4, norm_topk_prob=True, num_experts_per_tok=8,
        moe_intermediate_size=2048, rope_interleave=True,
    ),
    allowed=dict(
        hidden_act=("silu",), attention_bias=(False,), rope_interleave=(True,), topk_method=("noaux_tc",),
        scoring_func=("sigmoid",), moe_layer_freq=(1,),
    ),
    written=dict(
        hidden_act="silu", attention_bias=False, rope_interleave=True, topk_method="noaux_tc", scoring_func="sigmoid",
        moe_layer_freq=1,
    ),
    settings=v3_settings,
    keys=v3_keys,
    body=OUTSIDE,
    more_keys=("qk_head_dim", *NAMES),
    fused=FUSED,
    extra_layers="layers that predict further tokens (multi-token prediction)",
)  # fmt: skip
