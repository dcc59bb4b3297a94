"""Mixtures of experts in transformers: Mixtral (arXiv:2401.04088, MixtralForCausalLM), Qwen3-MoE
(arXiv:2505.09388, Qwen3MoeForCausalLM), OLMoE (arXiv:2409.02060, OlmoeForCausalLM), DeepSeek-V2
(arXiv:2405.04434, DeepseekV2ForCausalLM) and DeepSeek-V3 (arXiv:2412.19437, DeepseekV3ForCausalLM).

Files have one tensor per expert and matrix. transformers 5 may save fused tensors for all experts of a layer.
"""

from collections.abc import Mapping
from typing import Any

from jaxscale.core.models.config import ExpertsConfig, LatentConfig
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.tools.interop.families import llama_like as llama
from jaxscale.tools.interop.families.family import TensorSpec
from jaxscale.tools.interop.families.settings import refuse_unless

NAMES = ("num_experts", "num_local_experts")  # aliases, depending on the release that wrote the file
ATTENTION = tuple(row for row in llama.BODY if "mlp" not in row.hf_name)
EXPERT_KEYS = dict(  # {setting: key}
    number="num_experts", chosen="num_experts_per_tok", mlp_dim="intermediate_size", normalised="norm_topk_prob"
)
MIXTRAL_KEYS = dict(number="num_local_experts", chosen="num_experts_per_tok", mlp_dim="intermediate_size")
QWEN3_KEYS = EXPERT_KEYS | dict(mlp_dim="moe_intermediate_size")
DENSE = tuple(
    TensorSpec(f"dense_blocks/mlp/{name}", f"{llama.LAYER}mlp.{name}_proj.weight", 1, transposed=True)
    for name in ("gate", "up", "down")
)


def expert_rows(mlp: str, gate: str, up: str, down: str) -> tuple[tuple[TensorSpec, ...], dict[str, tuple[str, ...]]]:
    """Returns (specs of a router and its experts, {fused name: separate names}). mlp: name of the parent module."""
    names = [f"{llama.LAYER}{mlp}.experts.{{expert}}.{name}.weight" for name in (gate, up, down)]
    rows = (
        TensorSpec("blocks/mlp/router", f"{llama.LAYER}{mlp}.gate.weight", 1, transposed=True),
        *(
            TensorSpec(f"blocks/mlp/{leaf}", name, 1, transposed=True)
            for leaf, name in zip(("gate", "up", "down"), names)
        ),
    )
    experts = f"{llama.LAYER}{mlp}.experts."
    return rows, {f"{experts}gate_up_proj": (names[0], names[1]), f"{experts}down_proj": (names[2],)}


def read_experts(hf: Mapping[str, Any], keys: Mapping[str, str], usual: int, **more: Any) -> dict[str, Any]:
    """Returns the expert settings. Raises BadInput if the keys in NAMES differ. usual: default number of experts."""
    numbers = [hf[name] for name in NAMES if hf.get(name) is not None]
    if len(numbers) == 2 and numbers[0] != numbers[1]:
        raise BadInput(f"{NAMES[0]}={short(numbers[0])} and {NAMES[1]}={short(numbers[1])} must be equal")
    found = {setting: hf[key] for setting, key in keys.items() if setting != "number"}
    return dict(experts=ExpertsConfig(number=numbers[0] if numbers else usual, **found, **more))


def write_experts(cfg: LlamaConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    """Returns the config.json keys of the experts (inverse of read_experts), or {} for a dense model."""
    return {} if cfg.experts is None else {key: getattr(cfg.experts, setting) for setting, key in keys.items()}


MIXTRAL_ROWS, MIXTRAL_FUSED = expert_rows("block_sparse_moe", "w1", "w3", "w2")
ROWS, FUSED = expert_rows("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = llama.llama_family(
    "mixtral",
    "MixtralForCausalLM",
    ATTENTION + llama.NORMS_BEFORE + MIXTRAL_ROWS,
    llama.SHARED | dict.fromkeys(NAMES) | dict(  # defaults of MixtralConfig
        intermediate_size=14336, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0, sliding_window=None,
        num_experts_per_tok=2, router_jitter_noise=0.0,
    ),
    llama.SILU | dict(router_jitter_noise=(None, 0)),
    same=llama.WINDOW,
    settings=lambda hf: read_experts(hf, MIXTRAL_KEYS, 8),
    keys=lambda cfg: write_experts(cfg, MIXTRAL_KEYS),
    fused=MIXTRAL_FUSED,
    renames=((r"\.mlp\.", ".block_sparse_moe."),),
)  # fmt: skip


def qwen3_moe_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of Qwen3-MoE: experts, sliding window and leading dense layers."""
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    if hf["use_sliding_window"]:
        # transformers ignores this key and applies the window to all layers.
        refuse_unless(hf, max_window_layers=(None, 0))
    refuse_unless(hf, decoder_sparse_step=(1,))
    dense = hf["mlp_only_layers"] or []
    if not isinstance(dense, list) or sorted(dense) != list(range(len(dense))):
        raise BadInput(
            f"mlp_only_layers={short(dense)} is not supported for {hf.get('model_type')}; it must "
            "list the first layers, such as [0, 1]"
        )
    experts = read_experts(hf, QWEN3_KEYS, 128, first_dense=len(dense))
    return dict(qk_norm=True, attention_window=window) | experts


def qwen3_moe_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns the config.json keys of Qwen3-MoE, as the inverse of qwen3_moe_settings()."""
    windowed = dict(use_sliding_window=cfg.attention_window is not None, sliding_window=cfg.attention_window)
    found = windowed | write_experts(cfg, QWEN3_KEYS)
    if cfg.experts is not None:
        found |= dict(decoder_sparse_step=1, mlp_only_layers=list(range(cfg.experts.first_dense)))
    return found


QWEN3_MOE = llama.llama_family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ATTENTION + llama.NORMS_BEFORE + llama.QK_NORMS + llama.BIASES + DENSE + ROWS,
    {key: value for key, value in llama.QWEN_DEFAULTS.items() if key != "layer_types"}
    | dict.fromkeys(NAMES)
    | dict(  # defaults of Qwen3MoeConfig
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False, decoder_sparse_step=1,
        mlp_only_layers=None, max_window_layers=None,
    ),
    same=llama.BIASED,
    settings=qwen3_moe_settings,
    keys=qwen3_moe_keys,
    fused=FUSED,
)  # fmt: skip


def olmoe_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of OLMoE: experts, and QK-norm over all heads."""
    refuse_unless(hf, head_dim=(None, hf["hidden_size"] // hf["num_attention_heads"]))
    return dict(qk_norm=True, qk_norm_over="all_heads") | read_experts(hf, EXPERT_KEYS, 64)


OLMOE = llama.llama_family(
    "olmoe",
    "OlmoeForCausalLM",
    ATTENTION + llama.NORMS_BEFORE + llama.QK_NORMS + llama.BIASES + ROWS,
    llama.SHARED | dict.fromkeys(NAMES) | dict(  # defaults of OlmoeConfig
        vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=16,
        rms_norm_eps=1e-5, attention_bias=False, num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None,
    ),
    llama.SILU | dict(clip_qkv=(None,)),
    same=llama.BIASED,
    settings=olmoe_settings,
    # a different head_dim does not round-trip
    keys=lambda cfg: dict(head_dim=cfg.embed_dim // cfg.num_heads) | write_experts(cfg, EXPERT_KEYS),
    fused=FUSED,
)  # fmt: skip
# DeepSeek-V2 has softmax scores, and the score of a group is the score of its best expert. V3 has sigmoid scores, a
# bias that affects only the selection, and the score of a group is the sum of its two best scores. V2's router ignores
# norm_topk_prob in transformers but not in DeepSeek's code, so true is refused. The norms of latents use a different
# epsilon (core/models/latent_attention.py).
OUTSIDE = tuple(row for row in llama.BODY if not row.per_layer)
LATENT_ATTENTION = (
    llama.linear("attention/wq", "self_attn.q_proj", interleaved=True),
    llama.linear("attention/wq_down", "self_attn.q_a_proj"),
    TensorSpec("blocks/attention/q_norm", llama.LAYER + "self_attn.q_a_layernorm.weight"),
    llama.linear("attention/wq_up", "self_attn.q_b_proj", interleaved=True),
    llama.linear("attention/wkv_down", "self_attn.kv_a_proj_with_mqa", interleaved=True),
    TensorSpec("blocks/attention/kv_norm", llama.LAYER + "self_attn.kv_a_layernorm.weight"),
    llama.linear("attention/wkv_up", "self_attn.kv_b_proj"),
    llama.linear("attention/wo", "self_attn.o_proj", inputs=2),
)
DEEPSEEK_EXPERTS = (
    *DENSE,
    *ROWS,
    TensorSpec("blocks/mlp/router_bias", llama.LAYER + "mlp.gate.e_score_correction_bias"),
    *(llama.linear(f"mlp/shared/{name}", f"mlp.shared_experts.{name}_proj") for name in ("gate", "up", "down")),
)
DEEPSEEK_DEFAULTS = llama.SHARED | dict.fromkeys(("qk_head_dim", *NAMES)) | dict(  # defaults of V2 and V3
    attention_bias=False, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip
DEEPSEEK_KEYS = dict(  # {setting: key}
    number="n_routed_experts", chosen="num_experts_per_tok", mlp_dim="moe_intermediate_size",
    first_dense="first_k_dense_replace", scale="routed_scaling_factor",
)  # fmt: skip


def latent_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of latent attention."""
    nope, rope, heads = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["num_attention_heads"]
    refuse_unless(hf, num_key_value_heads=(None, heads), head_dim=(None, rope), qk_head_dim=(None, nope + rope))
    if hf["q_lora_rank"] == 0:
        raise BadInput("q_lora_rank=0 is not supported; use null for a full-rank query projection")
    yarn = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    name = yarn.get("rope_type", yarn.get("type", "default"))
    if yarn.get("mscale_all_dim") and name != "default":  # our YaRN differs in other cases
        if name != "yarn" or not yarn.get("mscale") or yarn.get("attention_factor") is not None:
            raise BadInput(
                f"mscale_all_dim={short(yarn['mscale_all_dim'])} is supported only for rope_type 'yarn' "
                "with mscale and without attention_factor"
            )
    ranks = dict(kv_rank=hf["kv_lora_rank"], q_rank=hf["q_lora_rank"] or 0)
    latent = LatentConfig(**ranks, nope_dim=nope, rope_dim=rope, value_dim=hf["v_head_dim"])
    return dict(latent=latent, head_dim=latent.head_dim)


def expert_settings(hf: Mapping[str, Any], **more: Any) -> ExpertsConfig:
    """Returns the settings of routed and shared experts. more: additional fields of ExpertsConfig."""
    shared = hf["n_shared_experts"]
    refuse_unless(hf, **dict.fromkeys(NAMES, (None, hf["n_routed_experts"])))  # aliases in transformers
    if not shared:
        raise BadInput(f"n_shared_experts={short(shared)} is not supported; it must be at least 1")
    found = {setting: hf[key] for setting, key in DEEPSEEK_KEYS.items()}
    return ExpertsConfig(**found, shared_dim=shared * hf["moe_intermediate_size"], **more)


def group_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of expert groups. Raises BadInput for null."""
    for key in ("n_group", "topk_group"):
        if hf[key] is None:
            raise BadInput(f"{key}=null is not supported with grouped routing")
    return dict(groups=hf["n_group"], groups_chosen=hf["topk_group"])


def shared_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns the config.json keys that DeepSeek-V2 and V3 share. For other models, the result is incomplete."""
    latent, experts = cfg.latent, cfg.experts
    if latent is None or experts is None:
        return dict(num_key_value_heads=None, head_dim=None, first_k_dense_replace=0)
    return {key: getattr(experts, setting) for setting, key in DEEPSEEK_KEYS.items()} | dict(
        head_dim=latent.rope_dim, q_lora_rank=latent.q_rank or None, kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.nope_dim, qk_rope_head_dim=latent.rope_dim, v_head_dim=latent.value_dim,
        n_shared_experts=max(1, experts.shared_dim // experts.mlp_dim), n_group=experts.groups,
        topk_group=experts.groups_chosen,
    )  # fmt: skip


def v2_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of DeepSeek-V2: unnormalized softmax scores, optionally with group-limited routing."""
    refuse_unless(hf, mlp_bias=(False,))
    groups = group_settings(hf) if hf["topk_method"] == "group_limited_greedy" else {}
    return latent_settings(hf) | dict(experts=expert_settings(hf, normalised=False, **groups))


def v2_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns the config.json keys of DeepSeek-V2, as the inverse of v2_settings()."""
    shared = shared_keys(cfg)
    return shared | dict(topk_method="group_limited_greedy" if shared.get("n_group", 1) > 1 else "greedy")


def v3_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of DeepSeek-V3: sigmoid scores with a selection bias."""
    groups = group_settings(hf) | dict(group_best=2)
    scores = dict(score="sigmoid", normalised=hf["norm_topk_prob"] or False, bias=True)
    return latent_settings(hf) | dict(experts=expert_settings(hf, **groups, **scores))


def v3_keys(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns the config.json keys of DeepSeek-V3. Sets num_nextn_predict_layers=0, as transformers 5 defaults to 1."""
    if cfg.experts is None:
        return shared_keys(cfg)
    return shared_keys(cfg) | dict(norm_topk_prob=cfg.experts.normalised, num_nextn_predict_layers=0)


DEEPSEEK_V2 = llama.llama_family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    OUTSIDE + llama.NORMS_BEFORE + LATENT_ATTENTION + DEEPSEEK_EXPERTS,
    DEEPSEEK_DEFAULTS | dict(  # defaults of DeepseekV2Config
        vocab_size=102400, first_k_dense_replace=0, n_group=None, n_routed_experts=64, n_shared_experts=2,
        routed_scaling_factor=1.0, topk_group=None, topk_method="greedy", norm_topk_prob=False,
        moe_intermediate_size=1407, mlp_bias=False,
        num_experts_per_tok=6,  # published for both sizes; transformers has no default
    ),
    llama.SILU | dict(
        attention_bias=(False,), norm_topk_prob=(False, None), topk_method=("greedy", "group_limited_greedy"),
        scoring_func=("softmax",), moe_layer_freq=(1,),
    ),
    settings=v2_settings,
    keys=v2_keys,
    fused=FUSED,
)  # fmt: skip
DEEPSEEK_V3 = llama.llama_family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    OUTSIDE + llama.NORMS_BEFORE + LATENT_ATTENTION + DEEPSEEK_EXPERTS,
    DEEPSEEK_DEFAULTS | dict(  # defaults of DeepseekV3Config
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=128, first_k_dense_replace=3, n_group=8, n_routed_experts=256, n_shared_experts=1,
        routed_scaling_factor=2.5, topk_group=4, norm_topk_prob=True, num_experts_per_tok=8,
        moe_intermediate_size=2048, rope_interleave=True,
    ),
    llama.SILU | dict(
        attention_bias=(False,), rope_interleave=(True,), topk_method=("noaux_tc",), scoring_func=("sigmoid",),
        moe_layer_freq=(1,),
    ),
    settings=v3_settings,
    keys=v3_keys,
    fused=FUSED,
    extra_layers="layers that predict additional tokens (multi-token prediction)",
)  # fmt: skip
