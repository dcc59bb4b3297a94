"""Writes what transformers computes for a small random model of each Hugging Face family, under the names of its files.

    python -m venv torch-venv && torch-venv/bin/pip install torch transformers numpy
    torch-venv/bin/python tests/parity/make_family_references.py          # writes family_*.npz beside this file
    torch-venv/bin/python tests/parity/make_family_references.py FOLDER   # there instead, for the test that makes them

Each file has `config` (the config.json that transformers saves), `versions`, `names` (JSON lists) and

    param/NAME   the tensor under its name in the checkpoint, float16 without loss      tokens [2, 24] int32
    grad/NAME    d loss / d tensor, float32                                             logits [2, 24, 61] float32
    loss         mean next-token cross-entropy [nats/token]

Windows are shorter than a row, heads are grouped, and layers are no multiple of the pattern of local and global ones.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open

VOCAB, ROWS, LENGTH = 61, 2, 24
COMMON = dict(
    vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager", bos_token_id=3, eos_token_id=5,
    pad_token_id=None,
)  # fmt: skip
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=1000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=32)  # fmt: skip
# The same heads under YaRN: fewer turns than 3.2 in 16 tokens begin to be slowed, and than 0.1 are slowed by 4.
YARN_ROPE = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=3.2,
                 beta_slow=0.1)  # fmt: skip
ONE_LAYER = COMMON | dict(num_hidden_layers=1)
EAGER = dict(experts_implementation="eager")  # torch's grouped product takes no odd widths on a CPU
# DeepSeek's: values of another size than keys, and one layer before those with experts.
LATENT = COMMON | EAGER | dict(
    num_hidden_layers=3, num_key_value_heads=4, q_lora_rank=14, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=7, first_k_dense_replace=1, moe_intermediate_size=11, scoring_func="softmax", moe_layer_freq=1,
)  # fmt: skip
LATENT_V3 = LATENT | dict(scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=0)
LITE = LATENT | dict(num_hidden_layers=2, q_lora_rank=None, v_head_dim=12, first_k_dense_replace=0)
DYNAMIC_ROPE = dict(rope_type="dynamic", rope_theta=1000.0, factor=4.0)
LONG_ROPE = dict(rope_type="longrope", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16,
                 short_factor=[1.0, 1.1, 1.2, 1.3, 1.4], long_factor=[1.0, 2.0, 3.0, 4.0, 5.0])  # fmt: skip
# Wavelengths of the 5 frequencies of head_dim 10 are 6.3, 25, 100, ...: one is kept (< 32/4), one is in the ramp below
# 32, and the rest are slowed by 8.
GEMMA = COMMON | dict(head_dim=8)
GEMMA3 = GEMMA | dict(
    num_hidden_layers=4, sliding_window=7, sliding_window_pattern=3, query_pre_attn_scalar=12,
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
)  # fmt: skip
VISION = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)


def models():
    """{name: (config, class)}"""
    t = transformers
    gpt2 = dict(vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=3, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, attn_implementation="eager", bos_token_id=3, eos_token_id=5)  # fmt: skip
    vision = t.Gemma3Config(
        text_config=GEMMA3, vision_config=VISION, mm_tokens_per_image=4, image_token_index=60, boi_token_index=58,
        eoi_token_index=59, attn_implementation="eager",
    )  # fmt: skip
    return {
        "gpt2": (t.GPT2Config(**gpt2), t.GPT2LMHeadModel),
        "llama2": (t.LlamaConfig(**COMMON), t.LlamaForCausalLM),
        "llama31": (
            t.LlamaConfig(**COMMON, head_dim=10, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
            t.LlamaForCausalLM,
        ),
        "mistral": (t.MistralConfig(**COMMON, sliding_window=7), t.MistralForCausalLM),
        "qwen2": (t.Qwen2Config(**COMMON), t.Qwen2ForCausalLM),
        "qwen3": (t.Qwen3Config(**COMMON, head_dim=8), t.Qwen3ForCausalLM),
        "gemma": (t.GemmaConfig(**GEMMA), t.GemmaForCausalLM),
        "gemma2": (
            t.Gemma2Config(
                **GEMMA | dict(num_hidden_layers=3), sliding_window=7, query_pre_attn_scalar=12,
                attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
            ),
            t.Gemma2ForCausalLM,
        ),
        "gemma3": (t.Gemma3TextConfig(**GEMMA3), t.Gemma3ForCausalLM),
        "gemma3_vision": (vision, t.Gemma3ForConditionalGeneration),
        "olmo2": (t.Olmo2Config(**COMMON), t.Olmo2ForCausalLM),
        "llama_yarn": (
            t.LlamaConfig(**COMMON, head_dim=10, rope_parameters=YARN_ROPE, attention_bias=True),
            t.LlamaForCausalLM,
        ),
        "llama_dynamic": (
            t.LlamaConfig(**ONE_LAYER | dict(max_position_embeddings=16), head_dim=10, rope_parameters=DYNAMIC_ROPE),
            t.LlamaForCausalLM,
        ),
        "llama_longrope": (
            t.LlamaConfig(**ONE_LAYER, head_dim=10, rope_parameters=LONG_ROPE),
            t.LlamaForCausalLM,
        ),
        "qwen2_windows": (
            t.Qwen2Config(
                **COMMON | dict(num_hidden_layers=3), use_sliding_window=True, sliding_window=7, max_window_layers=1
            ),
            t.Qwen2ForCausalLM,
        ),
        "phi3": (
            t.Phi3Config(
                **COMMON | dict(hidden_size=40, original_max_position_embeddings=16), sliding_window=9,
                rope_parameters={key: value for key, value in LONG_ROPE.items() if key != "factor"},
            ),
            t.Phi3ForCausalLM,
        ),
        "mixtral": (
            t.MixtralConfig(
                **COMMON | EAGER | dict(intermediate_size=18), num_local_experts=5, num_experts_per_tok=2,
                sliding_window=7,
            ),
            t.MixtralForCausalLM,
        ),
        "mixtral_tied": (
            t.MixtralConfig(
                **ONE_LAYER | EAGER | dict(intermediate_size=22, head_dim=10), num_local_experts=3,
                num_experts_per_tok=3, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True,
            ),
            t.MixtralForCausalLM,
        ),
        "qwen3_moe": (
            t.Qwen3MoeConfig(
                **COMMON | EAGER | dict(num_hidden_layers=3), head_dim=8, moe_intermediate_size=14, num_experts=7,
                num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[0],
            ),
            t.Qwen3MoeForCausalLM,
        ),
        "qwen3_moe_windows": (
            t.Qwen3MoeConfig(
                **ONE_LAYER | EAGER, head_dim=10, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=1,
                norm_topk_prob=False, attention_bias=True, use_sliding_window=True, sliding_window=7,
            ),
            t.Qwen3MoeForCausalLM,
        ),
        "olmoe": (
            t.OlmoeConfig(
                **COMMON | EAGER | dict(intermediate_size=14), num_experts=6, num_experts_per_tok=4,
                norm_topk_prob=False,
            ),
            t.OlmoeForCausalLM,
        ),
        "olmoe_biases": (
            t.OlmoeConfig(
                **ONE_LAYER | EAGER | dict(intermediate_size=9), num_experts=5, num_experts_per_tok=2,
                norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True,
            ),
            t.OlmoeForCausalLM,
        ),
        "deepseek_v2": (
            t.DeepseekV2Config(
                **LATENT, n_routed_experts=9, n_shared_experts=2, num_experts_per_tok=2, n_group=3, topk_group=2,
                topk_method="group_limited_greedy", routed_scaling_factor=1.5,
                rope_parameters=YARN_ROPE | dict(mscale=0.7, mscale_all_dim=0.9),
            ),
            t.DeepseekV2ForCausalLM,
        ),
        "deepseek_v2_lite": (
            t.DeepseekV2Config(
                **LITE, n_routed_experts=5, n_shared_experts=1, num_experts_per_tok=3, n_group=1, topk_group=1,
                topk_method="greedy", rms_norm_eps=1e-4,
            ),
            t.DeepseekV2ForCausalLM,
        ),
        "deepseek_v3": (
            t.DeepseekV3Config(
                **LATENT_V3, n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=3, n_group=4, topk_group=2,
                rope_parameters=YARN_ROPE | dict(mscale=1.0, mscale_all_dim=1.0),
            ),
            t.DeepseekV3ForCausalLM,
        ),
        "deepseek_v3_one_group": (
            t.DeepseekV3Config(
                **LATENT_V3 | dict(num_hidden_layers=2, q_lora_rank=None, v_head_dim=9, kv_lora_rank=13),
                n_routed_experts=7, n_shared_experts=3, num_experts_per_tok=2, n_group=1, topk_group=1,
                norm_topk_prob=False, routed_scaling_factor=0.8, tie_word_embeddings=True,
            ),
            t.DeepseekV3ForCausalLM,
        ),
    }  # fmt: skip


def randomise(model, seed):
    """Weights that float16 holds and in which every part of the model shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        scale = 0.3 if weight.ndim == 1 else 0.25 if "embed" in name or "wpe" in name or "wte" in name else 0.2
        weight.data.copy_((weight.data if weight.ndim == 1 else 0) + scale * noise)  # norms stay around their start
        weight.data.copy_(weight.data.half().float())
    for bias in biases_of_experts(model).values():  # near those of scores, so that it changes what is chosen
        bias.copy_((0.2 * torch.randn(bias.shape, generator=generator)).half().float())


def biases_of_experts(model):
    """{name: numbers that are added to scores when experts are chosen}: they are saved, and have no gradient."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}


def saved(model):
    """(config.json, {name in the files: tensor}) as save_pretrained writes them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((pathlib.Path(folder) / "config.json").read_text())
        with safe_open(pathlib.Path(folder) / "model.safetensors", "pt") as file:
            return config, {name: file.get_tensor(name) for name in file.keys()}


def parts(name, weight, gradient):
    """The matrices of single experts, of a parameter that holds those of all: [(values, gradient)]."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return []
    halves = [slice(0, weight.shape[1])]
    if name.endswith("gate_up_proj"):
        halves = [slice(0, weight.shape[1] // 2), slice(weight.shape[1] // 2, None)]
    return [(weight[expert, half], gradient[expert, half]) for expert in range(len(weight)) for half in halves]


def reference(config, make, seed):
    """What the tests compare for one model."""
    torch.manual_seed(seed)
    model = make(config).float().eval()
    randomise(model, seed)
    tokens_BT = torch.from_numpy(np.random.default_rng(seed).integers(6, 58, (ROWS, LENGTH), dtype=np.int32))
    logits_BTV = model(tokens_BT.long()).logits
    loss = F.cross_entropy(logits_BTV[:, :-1].reshape(-1, VOCAB), tokens_BT[:, 1:].reshape(-1).long())
    loss.backward()
    config, weights = saved(model)
    params = {name: (p, p.grad) for name, p in model.named_parameters() if p.grad is not None}  # text: none of vision
    params |= {name: (bias, torch.zeros_like(bias)) for name, bias in biases_of_experts(model).items()}
    params |= {f"{name}.{i}": part for name in list(params) for i, part in enumerate(parts(name, *params[name]))}
    # Where a release saves under other names than its modules have, the values tell which is which.
    same = lambda weight: next((p for p in params.values() if torch.equal(p[0], weight)), None)
    learned = {name: params.get(name) or same(weight) for name, weight in weights.items()}
    learned = {name: p[1] for name, p in learned.items() if p is not None}
    return config, dict(
        names=json.dumps(sorted(weights)),
        tokens=tokens_BT.numpy(),
        logits=logits_BTV.detach().numpy(),
        loss=loss.detach().numpy(),
        **{f"param/{name}": weights[name].half().numpy() for name in learned},
        **{f"grad/{name}": gradient.numpy() for name, gradient in learned.items()},
    )


def main(folder):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    for seed, (name, (config, make)) in enumerate(models().items(), 1):
        config, arrays = reference(config, make, seed)
        path = folder / f"family_{name}.npz"
        np.savez_compressed(path, config=json.dumps(config), versions=json.dumps(versions), **arrays)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB, loss {arrays['loss']:.3f}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
