"""A config.json says the same after a way through our settings, and what we do not compute is refused in one line."""

import dataclasses
import pathlib

import pytest

from jaxscale.kernels.config import RopeScaling
from jaxscale.settings.config_file import load_config
from jaxscale.tools.interop import families
from jaxscale.tools.interop.families.settings import UNSUPPORTED

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"
LLAMA31 = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=128256, hidden_size=4096,
    intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_act="silu",
    rms_norm_eps=1e-5, rope_theta=500000.0, attention_bias=False, mlp_bias=False, tie_word_embeddings=False,
    max_position_embeddings=131072, torch_dtype="bfloat16", bos_token_id=128000, eos_token_id=[128001, 128008, 128009],
    rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=8192),
)  # fmt: skip
QWEN3 = dict(
    model_type="qwen3", architectures=["Qwen3ForCausalLM"], vocab_size=151936, hidden_size=4096, head_dim=128,
    intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, hidden_act="silu",
    rms_norm_eps=1e-6, rope_theta=1000000, rope_scaling=None, tie_word_embeddings=False, attention_bias=False,
    use_sliding_window=False, sliding_window=None, max_window_layers=36, torch_dtype="bfloat16",
)  # fmt: skip
GEMMA3 = dict(  # as published: what transformers has as its default is not there
    model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], torch_dtype="bfloat16",
    eos_token_id=[1, 106],
    text_config=dict(model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
                     sliding_window=1024, rope_scaling=dict(factor=8.0, rope_type="linear")),
)  # fmt: skip
MIXTRAL = dict(
    model_type="mixtral", architectures=["MixtralForCausalLM"], vocab_size=32000, hidden_size=4096,
    intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_act="silu",
    rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, num_experts_per_tok=2, num_local_experts=8,
    output_router_logits=False, router_aux_loss_coef=0.02, tie_word_embeddings=False, max_position_embeddings=32768,
)  # fmt: skip
QWEN3_MOE = QWEN3 | dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], hidden_size=2048, intermediate_size=6144,
    num_hidden_layers=48, num_key_value_heads=4, max_window_layers=48, decoder_sparse_step=1, mlp_only_layers=[],
    moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, router_aux_loss_coef=0.001,
    output_router_logits=False, max_position_embeddings=40960,
)  # fmt: skip
OLMOE = dict(
    model_type="olmoe", architectures=["OlmoeForCausalLM"], vocab_size=50304, hidden_size=2048, intermediate_size=1024,
    num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, rms_norm_eps=1e-5, rope_theta=10000.0,
    attention_bias=False, clip_qkv=None, norm_topk_prob=False, num_experts=64, num_experts_per_tok=8,
    router_aux_loss_coef=0.01, tie_word_embeddings=False, max_position_embeddings=4096,
)  # fmt: skip
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], vocab_size=129280, hidden_size=7168,
    intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128,
    num_key_value_heads=128, n_shared_experts=1, n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4,
    routed_scaling_factor=2.5, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1,
    first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, hidden_act="silu", attention_bias=False, rms_norm_eps=1e-6, rope_theta=10000,
    max_position_embeddings=163840, tie_word_embeddings=False,
    rope_scaling=dict(rope_type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1,
                      mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
DEEPSEEK_V2_LITE = {key: value for key, value in DEEPSEEK_V3.items() if key != "n_group"} | dict(
    model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], vocab_size=102400, hidden_size=2048,
    intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27, num_attention_heads=16,
    num_key_value_heads=16, n_shared_experts=2, n_routed_experts=64, num_experts_per_tok=6, n_group=1, topk_group=1,
    routed_scaling_factor=1.0, norm_topk_prob=False, scoring_func="softmax", topk_method="greedy",
    first_k_dense_replace=1, q_lora_rank=None,
    rope_scaling=DEEPSEEK_V3["rope_scaling"] | dict(mscale=0.707, mscale_all_dim=0.707),
)  # fmt: skip
# Parameters of the published checkpoints. Where a config is not given above: what differs from transformers' defaults.
# SigLIP and the projector of Gemma 3 4B are 419,816,304 of the 4,300,079,472 in its files.
PUBLISHED = {
    "Llama-3.1-8B": (LLAMA31, 8_030_261_248),
    "Llama-2-7b": (dict(model_type="llama", rms_norm_eps=1e-5), 6_738_415_616),
    "Qwen3-8B": (QWEN3, 8_190_735_360),
    "Qwen2.5-7B": (
        dict(model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
             num_attention_heads=28, num_key_value_heads=4, vocab_size=152064), 7_615_616_512),
    "Mistral-7B-v0.1": (dict(model_type="mistral"), 7_241_732_096),
    "OLMo-2-1124-7B": (dict(model_type="olmo2", vocab_size=100352), 7_298_617_344),
    "gemma-2b": (
        dict(model_type="gemma", hidden_size=2048, intermediate_size=16384, num_hidden_layers=18,
             num_attention_heads=8, num_key_value_heads=1), 2_506_172_416),
    "gemma-2-2b": (dict(model_type="gemma2"), 2_614_341_888),
    "gemma-2-9b": (
        dict(model_type="gemma2", hidden_size=3584, intermediate_size=14336, num_hidden_layers=42,
             num_attention_heads=16, num_key_value_heads=8), 9_241_705_984),
    "gemma-3-1b": (
        dict(model_type="gemma3_text", hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
             num_attention_heads=4, num_key_value_heads=1, vocab_size=262144, sliding_window=512), 999_885_952),
    "gemma-3-4b": (GEMMA3, 4_300_079_472 - 419_816_304),
    "Phi-3-mini-128k": (
        dict(model_type="phi3", max_position_embeddings=131072, original_max_position_embeddings=4096,
             sliding_window=262144,
             rope_scaling=dict(type="longrope", short_factor=[1.0 + pair / 50 for pair in range(48)],
                               long_factor=[1.0 + pair for pair in range(48)])), 3_821_079_552),
    "gpt2": (dict(model_type="gpt2"), 124_439_808),
    "Mixtral-8x7B-v0.1": (MIXTRAL, 46_702_792_704),
    "Qwen3-30B-A3B": (QWEN3_MOE, 30_532_122_624),
    "OLMoE-1B-7B-0924": (OLMOE, 6_919_161_856),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15_706_484_224),
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_404_352),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_size_and_its_config_comes_back(name):
    hf, total = PUBLISHED[name]
    _, cfg, kept = families.read(hf)
    assert cfg.num_params == total
    origin = hf["model_type"] if hf["model_type"] == "phi3" else None  # of no origin it would go out as a Mistral
    family = families.family_for(cfg, origin)
    assert family.model_type == {"gemma3": "gemma3_text"}.get(hf["model_type"], hf["model_type"])
    written = families.write(family, cfg, kept)
    again, cfg_again, kept_again = families.read(written)
    assert (again, cfg_again, kept_again) == (family, cfg, kept)
    told = hf | hf.get("text_config", {}) | dict(model_type=family.model_type, architectures=[family.architectures[0]])
    told.pop("text_config", None)
    for key in ("max_window_layers", "sliding_window") if hf["model_type"] in ("qwen3", "qwen3_moe") else ():
        told.pop(key)  # of no effect without use_sliding_window
    if "clip_qkv" in told:
        assert told.pop("clip_qkv") is None  # no clipping: what it is where nothing is said
    assert {key: written[key] for key in told} == told  # nothing said is lost


@pytest.mark.parametrize("name, hf", [("llama3_8b", LLAMA31), ("qwen3_8b", QWEN3), ("gemma3_4b", GEMMA3)])
def test_our_config_has_the_shape_of_the_published_one(name, hf):
    ours, (_, theirs, _) = load_config(str(CONFIGS / f"{name}.py")).model, families.read(hf)
    same = {setting: getattr(ours, setting) for setting in families.EXECUTION if setting != "dropout"}
    assert dataclasses.replace(theirs, **same) == ours


def test_siglip_and_the_projector_are_what_is_left_out_of_gemma3():
    D, F, layers, patches, text = 1152, 4304, 27, (896 // 14) ** 2, 2560
    block = 4 * (D * D + D) + 2 * D * F + F + D + 4 * D
    vision = layers * block + 14 * 14 * 3 * D + D + patches * D + 2 * D
    assert vision + D * text + D == 419_816_304


@pytest.mark.parametrize(
    "old, new",
    [
        (dict(rope_theta=5e5, rope_scaling=None), dict(rope_parameters=dict(rope_type="default", rope_theta=5e5))),
        (
            dict(rope_theta=5e5, rope_scaling=dict(type="linear", factor=2.0)),
            dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=5e5)),
        ),
    ],
)
def test_rope_is_read_in_the_words_of_old_and_new_releases(old, new):
    read = lambda more: families.read(dict(model_type="llama") | more)[1]
    assert read(old) == read(new) != read({})


def test_each_kind_of_layer_of_gemma3_has_its_rope_in_both_spellings():
    old = dict(model_type="gemma3_text", rope_theta=2e6, rope_local_base_freq=3e4)
    old |= dict(rope_scaling=dict(rope_type="linear", factor=4.0))
    of_full, of_sliding = (
        dict(rope_type="linear", factor=4.0, rope_theta=2e6),
        dict(rope_type="default", rope_theta=3e4),
    )
    new = dict(model_type="gemma3_text", rope_parameters=dict(full_attention=of_full, sliding_attention=of_sliding))
    (_, cfg, _), (_, cfg_new, _) = families.read(old), families.read(new)
    assert cfg == cfg_new and (cfg.rope_base, cfg.local_rope_base, cfg.rope_scaling.factor) == (2e6, 3e4, 4.0)


@pytest.mark.parametrize(
    "hf, window, every, first",
    [
        (dict(model_type="qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=0), 9, None, 0),
        (dict(model_type="qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=32), None, None, 0),
        (dict(model_type="qwen2", sliding_window=9), None, None, 0),
        (dict(model_type="mistral", sliding_window=9), 9, None, 0),
        (dict(model_type="mistral", sliding_window=None), None, None, 0),
        (dict(model_type="gemma3_text", num_hidden_layers=4, sliding_window=9), 9, 6, 0),  # no layer of 4 is global
        (dict(model_type="gemma3_text", num_hidden_layers=4, layer_types=["full_attention"] * 4), None, None, 0),
        (dict(model_type="gemma3_text", sliding_window_pattern=3, sliding_window=9), 9, 3, 0),
        (dict(model_type="gemma2", num_hidden_layers=3, sliding_window=9,
              layer_types=["sliding_attention", "sliding_attention", "full_attention"]), 9, 3, 0),
        (dict(model_type="qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=3), 9, None, 3),
        (dict(model_type="qwen3", use_sliding_window=True, sliding_window=9, num_hidden_layers=6, layer_types=[
            "full_attention"] + ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2), 9, 4, 1),
        (dict(model_type="gemma3_text", num_hidden_layers=2, sliding_window=9,
              layer_types=["full_attention", "sliding_attention"]), 9, 6, 1),
    ],
)  # fmt: skip
def test_windows_are_those_of_the_layers_and_come_back(hf, window, every, first):
    _, cfg, _ = families.read(hf)
    assert (cfg.attention_window, cfg.global_every, cfg.global_first) == (window, every, first)
    family = families.family_for(cfg)
    again = families.read(families.write(family, cfg))[1]
    assert again == cfg and (again.local_layers == cfg.local_layers).all()


@pytest.mark.parametrize(
    "hf, told",
    [
        (dict(model_type="bert"), "model_type='bert' is not supported; supported:"),
        (dict(model_type="gpt_oss"), "model_type='gpt_oss' is not supported: it has attention sinks"),
        (dict(model_type="llama4"), "it has layers without RoPE, and experts with inputs"),
        (dict(model_type="qwen2_moe"), "it has a gated shared expert"),
        (dict(model_type="qwen3_next"), "it has layers without attention .a hybrid"),
        (dict(model_type="qwen3_moe", decoder_sparse_step=2), "decoder_sparse_step=2 is not supported for qwen3_moe"),
        (dict(model_type="qwen3_moe", mlp_only_layers=[1]), r"mlp_only_layers=\[1\] is not supported for qwen3_moe"),
        (dict(model_type="qwen3_moe", mlp_only_layers=[0, 0]), r"mlp_only_layers=\[0, 0\] is not supported"),
        (dict(model_type="qwen3_moe", use_sliding_window=True, max_window_layers=3), "max_window_layers=3 is not supp"),
        (dict(model_type="qwen3_moe", num_experts=4, num_local_experts=5), "num_experts=4 and num_local_experts=5 m"),
        (dict(model_type="mixtral", router_jitter_noise=0.1), "router_jitter_noise=0.1 is not supported for mixtral"),
        (dict(model_type="deepseek_v32"), "it has sparse attention with an indexer"),
        (dict(model_type="deepseek_v3", rope_interleave=False), "rope_interleave=False is not supported"),
        (dict(model_type="deepseek_v3", num_key_value_heads=64), "num_key_value_heads=64 is not supported"),
        (dict(model_type="deepseek_v3", attention_bias=True), "attention_bias=True is not supported"),
        (dict(model_type="deepseek_v3", quantization_config=dict(quant_method="fp8")), "quantization_config is"),
        (dict(model_type="deepseek_v3", n_shared_experts=0), "n_shared_experts=0 is not supported"),
        (dict(model_type="deepseek_v3", topk_group=None), "topk_group=null is not supported with grouped routing"),
        (dict(model_type="deepseek_v2", topk_method="group_limited_greedy"), "n_group=null is not supported"),
        (dict(model_type="deepseek_v3", q_lora_rank=0), "q_lora_rank=0 is not supported; use null"),
        (dict(model_type="deepseek_v3", rope_scaling=YARN | dict(mscale_all_dim=1.0)), "mscale_all_dim=1.0 is"),
        (dict(model_type="deepseek_v2", norm_topk_prob=True), "norm_topk_prob=True is not supported for deepseek_v2"),
        (dict(model_type="deepseek_v2", topk_method="noaux_tc"), "topk_method='noaux_tc' is not supported"),
        (dict(model_type="olmoe", clip_qkv=8.0), "clip_qkv=8.0 is not supported for olmoe; supported: None"),
        (dict(model_type="olmoe", head_dim=64), "head_dim=64 is not supported for olmoe; supported: None or 128"),
        (dict(model_type="llama", architectures=["LlamaForTokens"]), "'LlamaForTokens' is not supported; supported:"),
        (dict(model_type="llama", quantization_config=dict(quant_method="awq")), "quantization_config is not"),
        (dict(model_type="qwen2", attention_bias=True), "attention_bias=True is not supported for qwen2; supported"),
        (dict(model_type="llama", mlp_bias=True), "mlp_bias=True"),
        (dict(model_type="llama", hidden_act="gelu"), "hidden_act='gelu' is not supported for llama; supported"),
        (dict(model_type="llama", rope_scaling=dict(rope_type="yarn", factor=4.0)), "'yarn' requires one orig"),
        (dict(model_type="qwen3", rope_parameters=dict(rope_type="dynamic", factor=4.0)), "'dynamic' requires max_pos"),
        (dict(model_type="llama", rope_scaling=dict(rope_type="axial")), "RoPE scaling 'axial' is not supported; sup"),
        (dict(model_type="llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(model_type="gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        (dict(model_type="gpt2", n_inner=100), "n_inner=100 is not supported for gpt2; supported: None or 3072"),
        (dict(model_type="gemma2", use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        (dict(model_type="gemma3_text", layer_types=["full_attention"] * 3), "layer_types has 3 entries, but num"),
        (dict(model_type="qwen2", num_hidden_layers=4, sliding_window=9, use_sliding_window=True,
              layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"]),
         "is in layers 2, 3"),
        (dict(model_type="gemma2", sliding_window=None), "sliding_window is missing"),
        (dict(model_type="gemma3_text", rope_parameters=dict(sliding_attention=dict(rope_type="linear", factor=2.0))),
         "scaling of sliding_attention"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_we_do_not_compute_is_refused_in_one_line(hf, told):
    with pytest.raises(ValueError, match=told) as error:
        families.read(hf)
    assert "\n" not in str(error.value) and "config.json" in str(error.value)


@pytest.mark.parametrize(
    "hf, told",
    [
        (dict(model_type="llama", rope_scaling=dict(rope_type="linear")), "llama config .KeyError: 'factor'."),
        (dict(model_type="llama", hidden_size=None), "TypeError"),
        (dict(model_type="llama", num_attention_heads=0), "ZeroDivisionError"),
        (dict(model_type="llama", rope_scaling="linear"), "config.json is not a valid llama"),
        (dict(model_type="gemma3", text_config=[1]), "config.json is not a valid gemma3"),
        (dict(model_type="llama", rope_scaling=dict(rope_type="longrope", short_factor=["x"], long_factor=[1.0])),
         "short_factor=.* must be a list of numbers"),
        (dict(model_type="phi3", rope_scaling=dict(type="su", short_factor=1.0, long_factor=[1.0])), "short_factor"),
        (dict(model_type="llama", rope_scaling=dict(rope_type="yarn", factor=None, original_max_position_embeddings=0),
              max_position_embeddings=8), "ZeroDivisionError"),
        (dict(model_type="gpt2", n_layer=True), "num_layers=True is not an integer"),
        (dict(model_type="gpt2", layer_norm_epsilon=float("nan")), "norm_eps=nan is not a number"),
        (dict(model_type="qwen2", tie_word_embeddings="yes"), "tied_embeddings='yes' is not true or false"),
        (dict(model_type=["llama"]), "model_type=.'llama'. is not supported"),
        (dict(model_type="qwen3_moe", mlp_only_layers=list(range(24))), "first_dense=24 must be below num_layers=24"),
        (dict(model_type="qwen3_moe", mlp_only_layers=["x", 1]), "config.json is not a valid qwen3_moe"),
        (dict(model_type="mixtral", num_experts_per_tok=9), "chosen=9 must be at least 1 and at most number=8"),
        (dict(model_type="olmoe", num_experts=None, num_local_experts="six"), "olmoe config .TypeError"),
        (dict(model_type="olmoe", norm_topk_prob="yes"), "normalised='yes' is not true or false"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_a_config_json_with_other_things_than_it_should_have_is_refused_in_one_line(hf, told):
    with pytest.raises(ValueError, match=told) as error:
        families.read(hf)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_each_model_goes_out_as_the_family_it_came_in_as(name):
    _, cfg, kept = families.read(dict(model_type=name))
    family = families.family_for(cfg, name)
    assert family.model_type == {"gemma3": "gemma3_text"}.get(name, name)  # vision is left out
    assert families.read(families.write(family, cfg, kept))[:2] == (family, cfg)


def test_what_is_computed_is_not_among_what_is_refused_by_name():
    assert not UNSUPPORTED.keys() & families.FAMILIES.keys()


def test_a_mistral_without_a_window_stays_one_and_one_that_became_another_model_does_not():
    _, cfg, _ = families.read(dict(model_type="mistral", sliding_window=None))
    assert families.family_for(cfg).model_type == "llama"  # of our own: the first that says it
    assert families.family_for(cfg, "mistral").model_type == "mistral"
    assert families.family_for(dataclasses.replace(cfg, qk_norm=True), "mistral").model_type == "qwen3"
    assert families.family_for(cfg, "a family of another program").model_type == "llama"


@pytest.mark.parametrize(
    "hf, told",
    [
        (dict(model_type="llama", per_layer_config={"0": dict(num_attention_heads=2)}), "per_layer_config="),
        (dict(model_type="llama", is_causal=False), "is_causal=False is not supported for llama; supported: True"),
        (dict(model_type="llama", sliding_window=64), "sliding_window=64 is not supported for llama; supported: None"),
        (dict(model_type="mistral", layer_types=["full_attention"]), "layer_types="),
        (dict(model_type="qwen2", layer_types=["sliding_attention"] * 32), "sliding_window is missing"),
        (dict(model_type="gpt2", hidden_size=64), "hidden_size=64 is not supported for gpt2; supported: 768"),
        (dict(model_type="gemma2", sliding_window_pattern=3), "sliding_window_pattern=3 is not supported for gemma2"),
        (dict(model_type="gemma3", tie_word_embeddings=False), "tie_word_embeddings=False is not supported for gemma3"),
        (dict(model_type="gemma3", text_config=dict(is_causal=False)), "is_causal=False"),
        (dict(model_type="llama", transformers_weights="other.safetensors"), "transformers_weights="),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_transformers_reads_and_we_do_not_is_refused_by_name(hf, told):
    with pytest.raises(ValueError, match=told):
        families.read(hf)


def test_the_rope_of_phi3_is_read_by_its_old_name_and_written_in_the_words_of_its_class():
    lists = dict(short_factor=[1.0] * 48, long_factor=[2.0] * 48)
    hf = dict(model_type="phi3", max_position_embeddings=8192, rope_scaling=dict(type="su", **lists))
    family, cfg, kept = families.read(hf)
    scaling = cfg.rope_scaling
    assert (scaling.name, scaling.factor, scaling.original_max_len) == ("longrope", 2.0, 4096)
    written = families.write(family, cfg, kept)
    assert written["rope_scaling"] == dict(type="longrope", **lists)  # transformers 4 refuses a fourth key
    assert written["original_max_position_embeddings"] == 4096 and families.read(written)[1] == cfg
    with pytest.raises(ValueError, match="RoPE scaling 'linear' is not supported for phi3"):
        families.read(hf | dict(rope_scaling=dict(type="linear", factor=2.0)))
    yarn = dataclasses.replace(cfg, rope_scaling=RopeScaling(name="yarn"))
    assert families.family_for(yarn, "phi3").model_type == "llama"  # which has a word for it


def test_keys_that_nobody_reads_are_told_by_name_and_so_is_code_that_is_not_run():
    assert families.notes(LLAMA31) == families.notes(QWEN3) == families.notes(GEMMA3) == []
    (line,) = families.notes(dict(model_type="llama", sliding_windw=64, temperature=None, _name_or_path="x"))
    assert line == "config.json has sliding_windw, which llama does not use; ignored"
    (line,) = families.notes(dict(model_type="gemma3", text_config=dict(rope_tetha=1e6)))
    assert "rope_tetha, which gemma3 does not use" in line
    (line,) = families.notes(dict(model_type="llama", auto_map=dict(AutoModelForCausalLM="modeling.Mine")))
    assert "custom code (auto_map), which is never run" in line and "\n" not in line


@pytest.mark.parametrize("name", sorted(set(families.FAMILIES) - {"gemma3"}))
def test_every_key_that_a_family_is_said_to_read_changes_the_model_or_is_refused(name):
    family = families.FAMILIES[name]
    effects = dict(rope_theta=7.0, rope_scaling=dict(rope_type="linear", factor=2.0), partial_rotary_factor=0.5)
    effects |= dict(rope_parameters=dict(rope_type="linear", factor=2.0), original_max_position_embeddings=7)
    llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    companions = dict(
        original_max_position_embeddings=dict(rope_scaling=llama3, max_position_embeddings=9),
        max_window_layers=dict(use_sliding_window=True, max_window_layers=0),
        sliding_window=dict(use_sliding_window=True, max_window_layers=0),
        use_sliding_window=dict(max_window_layers=0),
    )
    if name == "deepseek_v2":
        limited = dict(topk_method="group_limited_greedy", n_group=1, topk_group=1)
        companions |= dict(n_group=limited, topk_group=limited)
    if name == "qwen3_moe":
        companions |= dict(max_window_layers=dict(use_sliding_window=True), use_sliding_window={})
    if name == "phi3":  # whose heads have 96 numbers, and which takes no other scaling
        longrope = dict(rope_type="longrope", short_factor=[1.0] * 48, long_factor=[2.0] * 48)
        effects |= dict(rope_scaling=longrope, rope_parameters=longrope)
        lengths = ("original_max_position_embeddings", "max_position_embeddings")
        companions |= {length: dict(rope_scaling=longrope) for length in lengths}
    for key in family.keys:
        with_it = dict(model_type=name, **companions.get(key, {}))
        without = families.read(with_it)[1]
        try:
            changed = families.read(with_it | {key: effects.get(key, "another")})[1]
        except (ValueError, TypeError):
            continue
        assert changed != without, key
