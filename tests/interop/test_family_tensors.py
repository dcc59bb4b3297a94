"""Which family a model of ours is, and which tensors it has: by name, by shape, and in the order of their rows."""

import dataclasses

import numpy as np
import pytest
import tiny

from jaxscale.core.models.config import ExpertsConfig, LatentConfig
from jaxscale.core.models.gpt2_bert_t5_config import Gpt2Config
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.tools.interop import families

DEEPSEEK_KIND = dict(
    num_kv_heads=4, head_dim=12, latent=LatentConfig(kv_rank=6, nope_dim=8, rope_dim=4, value_dim=10), norm_eps=1e-6,
)  # fmt: skip
EXPERTS = ExpertsConfig(number=6, chosen=2, mlp_dim=12, bias_rate=0.1, groups=1, group_best=2)
DENSE_FIRST = dataclasses.replace(EXPERTS, first_dense=1)
SHARED = dataclasses.replace(EXPERTS, shared_dim=24, normalised=False, group_best=1)
V2_LITE = dict(
    model_type="deepseek_v2", hidden_size=2048, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=16,
    q_lora_rank=None, first_k_dense_replace=1,
)  # fmt: skip


def tiny_llama(**changes):
    return LlamaConfig(**tiny.LLAMA | changes)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "cfg, model_type",
    [
        (tiny_llama(), "llama"),
        (tiny_llama(scan_layers=False, remat="full", compute_dtype="bfloat16"), "llama"),
        (tiny_llama(attention_window=5), "mistral"),
        (tiny_llama(qk_norm=True), "qwen3"),
        (tiny_llama(qkv_bias=True, attention_window=5, global_every=2), "qwen2"),
        (tiny_llama(experts=EXPERTS), "mixtral"),
        (tiny_llama(experts=DENSE_FIRST, qk_norm=True, attention_window=3), "qwen3_moe"),
        (tiny_llama(experts=EXPERTS, qk_norm=True, qk_norm_over="all_heads", head_dim=4), "olmoe"),
        (tiny_llama(experts=SHARED, **DEEPSEEK_KIND), "deepseek_v2"),
        (tiny_llama(experts=dataclasses.replace(SHARED, score="sigmoid", bias=True), **DEEPSEEK_KIND), "deepseek_v3"),
        (Gpt2Config(**tiny.GPT2, dropout=0.1), "gpt2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_of_ours_goes_out_as_the_first_family_that_says_it_all(cfg, model_type):
    family = families.family_for(cfg)
    assert family.model_type == model_type
    assert len({name for pair in families.tensors(family, cfg) for name in pair.leaves}) > 8


@pytest.mark.parametrize(
    "changes, told",
    [
        (dict(logit_softcap=30.0), "no Hugging Face model type supports model.logit_softcap=30.0"),
        (dict(norm_placement="both", tied_embeddings=True), "model.norm_placement='both'"),
        (dict(experts=dataclasses.replace(EXPERTS, bias=True, shared_dim=4)),
         "supports model.experts.shared_dim=4, model.experts.bias=True; supported"),
        (dict(experts=dataclasses.replace(EXPERTS, groups=2, groups_chosen=1)), "supports model.experts.groups=2"),
        (DEEPSEEK_KIND, "no Hugging Face model type supports model.latent.kv_rank=6"),
        (DEEPSEEK_KIND | dict(experts=dataclasses.replace(SHARED, shared_dim=25)), "model.experts.shared_dim=25;"),
        (dict(experts=dataclasses.replace(EXPERTS, normalised=False)), "model.experts.normalised=False"),
        (dict(experts=EXPERTS, qk_norm=True, qk_norm_over="all_heads"), "model.qk_norm_over='all_heads'"),
    ],
)  # fmt: skip
def test_a_model_that_no_family_has_is_refused_by_what_it_is(changes, told):
    with pytest.raises(ValueError, match=told):
        families.family_for(tiny_llama(**changes))


def test_a_checkpoint_with_tensors_missing_or_too_many_is_refused_by_name():
    cfg = tiny_llama()
    family = families.family_for(cfg)
    names = [pair.hf_name for pair in families.tensors(family, cfg)]
    extra = ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert families.match(family, cfg, names + extra)[1] == extra
    with pytest.raises(ValueError, match="has no model.layers.1.mlp.up_proj.weight, which config.json requires"):
        families.match(family, cfg, [name for name in names if name != "model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(ValueError, match="has model.layers.0.self_attn.q_proj.bias, which llama with this config.json"):
        families.match(family, cfg, [*names, "model.layers.0.self_attn.q_proj.bias"])


def test_layers_behind_the_last_one_are_refused_by_name():
    family, cfg, _ = families.read(dict(model_type="deepseek_v3", num_hidden_layers=4, n_routed_experts=16))
    names = [pair.hf_name for pair in families.tensors(family, cfg)]
    assert "model.layers.3.mlp.gate.e_score_correction_bias" in names
    with pytest.raises(ValueError, match=r"has model.layers.4.eh_proj.weight: layers that predict additional tokens"):
        families.match(family, cfg, [*names, "model.layers.4.eh_proj.weight"])
    with pytest.raises(ValueError, match="has model.layers.3.eh_proj.weight, which deepseek_v3 with this config.json"):
        families.match(family, cfg, [*names, "model.layers.3.eh_proj.weight"])


def test_what_rope_turns_is_halves_here_and_pairs_of_neighbours_there():
    family, cfg, _ = families.read(V2_LITE)
    pairs = {pair.hf_name.removeprefix("model.layers.1.self_attn."): pair for pair in families.tensors(family, cfg)}
    (ours_DNH,) = pairs["q_proj.weight"].to_leaves(np.arange(16 * 192)[:, None] + np.zeros((1, 2048), int))
    np.testing.assert_array_equal(ours_DNH[0, 3, :128], 3 * 192 + np.arange(128))
    np.testing.assert_array_equal(ours_DNH[0, 3, 128:160], 3 * 192 + 128 + np.arange(0, 64, 2))
    (ours_DC,) = pairs["kv_a_proj_with_mqa.weight"].to_leaves(np.arange(576)[:, None] + np.zeros((1, 2048), int))
    np.testing.assert_array_equal(ours_DC[0, :512], np.arange(512))
    np.testing.assert_array_equal(ours_DC[0, 544:], 512 + np.arange(1, 64, 2))


def test_a_tied_table_that_is_there_twice_is_read_once():
    cfg = tiny_llama(tied_embeddings=True)
    family = families.family_for(cfg)
    names = [pair.hf_name for pair in families.tensors(family, cfg)]
    assert families.match(family, cfg, [*names, "lm_head.weight"])[1] == ["lm_head.weight"]


def test_the_names_of_the_first_gpt2_have_no_base_and_its_masks_are_left_out():
    cfg = Gpt2Config(**tiny.GPT2)
    family = families.family_for(cfg)
    names = [pair.hf_name.removeprefix("transformer.") for pair in families.tensors(family, cfg)]
    pairs, left_out = families.match(family, cfg, [*names, "h.0.attn.bias"])
    assert [pair.hf_name for pair in pairs] == names and left_out == ["h.0.attn.bias"]


def test_a_tensor_of_another_shape_is_refused_with_both_shapes():
    pair = families.tensors(families.FAMILIES["llama"], tiny_llama())[1]
    with pytest.raises(ValueError, match=r"norm.weight has shape \[3\], but the config requires \[16\]"):
        pair.to_leaves(np.zeros(3))
