"""DeepSeek-V2 (arXiv:2405.04434, DeepseekV2ForCausalLM) and DeepSeek-V3 (arXiv:2412.19437, DeepseekV3ForCausalLM) as
transformers has them: latent attention, and experts of which some are for all tokens.

What differs: V2 scores by softmax, and a group is as good as its best expert; V3 by sigmoid, with a bias for the choice
alone, and a group is as good as its best two. V2's router does not read norm_topk_prob in transformers, and does in
DeepSeek's own code: true is refused. The norms of latents have an epsilon of their own (models/latent.py).
"""

from collections.abc import Mapping
from typing import Any

from jaxscale.interop.families.experts import DENSE, JOINED, NAMES, ROWS
from jaxscale.interop.families.family import Row
from jaxscale.interop.families.llama import BODY, LAYER, NORMS_BEFORE, SHARED, relative
from jaxscale.interop.families.settings import refuse_unless
from jaxscale.models.experts_config import ExpertsConfig
from jaxscale.models.latent_config import LatentConfig
from jaxscale.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short

OUTSIDE = tuple(row for row in BODY if not row.per_layer)
ATTENTION = (
    Row("blocks/attention/wq", LAYER + "self_attn.q_proj.weight", 1, turned=True, paired=True),
    Row("blocks/attention/wq_down", LAYER + "self_attn.q_a_proj.weight", 1, turned=True),
    Row("blocks/attention/q_norm", LAYER + "self_attn.q_a_layernorm.weight"),
    Row("blocks/attention/wq_up", LAYER + "self_attn.q_b_proj.weight", 1, turned=True, paired=True),
    Row("blocks/attention/wkv_down", LAYER + "self_attn.kv_a_proj_with_mqa.weight", 1, turned=True, paired=True),
    Row("blocks/attention/kv_norm", LAYER + "self_attn.kv_a_layernorm.weight"),
    Row("blocks/attention/wkv_up", LAYER + "self_attn.kv_b_proj.weight", 1, turned=True),
    Row("blocks/attention/wo", LAYER + "self_attn.o_proj.weight", 2, turned=True),
)
EXPERTS = (
    *DENSE,
    *ROWS,
    Row("blocks/mlp/router_bias", LAYER + "mlp.gate.e_score_correction_bias"),
    *(
        Row(f"blocks/mlp/shared/{name}", f"{LAYER}mlp.shared_experts.{name}_proj.weight", 1, turned=True)
        for name in ("gate", "up", "down")
    ),
)
DEFAULTS = SHARED | dict(  # of both of transformers' configs
    attention_bias=False, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip


def latent_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Attention, whose heads all have keys and values of their own."""
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
    """Raises BadInput for a mscale_all_dim of which our YaRN makes another model, or none."""
    name = rope.get("rope_type", rope.get("type", "default"))
    if not rope.get("mscale_all_dim") or name == "default":
        return
    if name != "yarn" or not rope.get("mscale") or rope.get("attention_factor") is not None:
        raise BadInput(
            f"config.json: mscale_all_dim={short(rope['mscale_all_dim'])} is not supported but with rope_type 'yarn', "
            "with mscale and without attention_factor"
        )


def expert_settings(hf: Mapping[str, Any], **more: Any) -> ExpertsConfig:
    """Experts, of which some are for all tokens. more: the family's own."""
    shared, width = hf["n_shared_experts"], hf["moe_intermediate_size"]
    refuse_unless(hf, **dict.fromkeys(NAMES, (None, hf["n_routed_experts"])))  # other names of it in transformers
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
    """Groups of experts. Raises BadInput where config.json has null."""
    for key in ("n_group", "topk_group"):
        if hf[key] is None:
            raise BadInput(f"config.json: {key}=null is not supported where experts are chosen within groups")
    return dict(groups=hf["n_group"], groups_chosen=hf["topk_group"])


def shared_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """The keys of both families, of a model without latents or experts such that it is seen to be another one. What no
    family says is seen to be lost, as shared experts of no whole number are."""
    latent, own = cfg.latent, cfg.experts
    if latent is None or own is None:
        return dict(num_key_value_heads=None, head_dim=None, first_k_dense_replace=0)
    return dict(
        head_dim=latent.rope_dim, q_lora_rank=latent.q_rank or None, kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.nope_dim, qk_rope_head_dim=latent.rope_dim, v_head_dim=latent.value_dim,
        n_routed_experts=own.number, num_experts_per_tok=own.chosen, moe_intermediate_size=own.mlp_dim,
        n_shared_experts=max(1, own.shared_dim // own.mlp_dim), first_k_dense_replace=own.first_dense,
        routed_scaling_factor=own.scale, n_group=own.groups, topk_group=own.groups_chosen,
    )  # fmt: skip


def v2_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Softmax scores as they are, from all experts or from those of the groups with the best ones."""
    groups = group_settings(hf) if hf["topk_method"] == "group_limited_greedy" else {}
    return latent_settings(hf) | dict(experts=expert_settings(hf, normalised=False, **groups))


def v2_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """The inverse."""
    shared = shared_keys(cfg)
    return shared | dict(topk_method="group_limited_greedy" if shared.get("n_group", 1) > 1 else "greedy")


def v3_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Sigmoid scores, and a bias by which experts are chosen."""
    groups = group_settings(hf) | dict(group_best=2)
    scores = dict(score="sigmoid", normalised=hf["norm_topk_prob"] or False, bias=True)
    return latent_settings(hf) | dict(experts=expert_settings(hf, **groups, **scores))


def v3_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """The inverse. No layers behind the last one are written: transformers 5 takes one where nothing is said."""
    own = cfg.experts
    return shared_keys(cfg) | ({} if own is None else dict(norm_topk_prob=own.normalised, num_nextn_predict_layers=0))


DEEPSEEK_V2 = relative(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    NORMS_BEFORE + ATTENTION + EXPERTS,
    DEFAULTS | dict(  # of DeepseekV2Config
        vocab_size=102400, first_k_dense_replace=0, n_group=None, n_routed_experts=64, n_shared_experts=2,
        routed_scaling_factor=1.0, topk_group=None, topk_method="greedy", norm_topk_prob=False,
        moe_intermediate_size=1407, mlp_bias=False,
        num_experts_per_tok=6,  # as published, large and Lite: transformers has none, and then computes nothing
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
    joined=JOINED,
)  # fmt: skip
DEEPSEEK_V3 = relative(
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
    joined=JOINED,
    beyond="layers that predict further tokens (multi-token prediction)",
)  # fmt: skip
