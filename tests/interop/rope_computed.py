"""What transformers multiplies positions with, and queries and keys, for scalings of RoPE in a config.json.

TORCH_PYTHON tests/interop/rope_computed.py > tests/interop/rope_computed.json
"""

import json

PAIRS = 32
SHORT, LONG = [1.0 + pair / 64 for pair in range(PAIRS)], [1.0 + pair for pair in range(PAIRS)]
PUBLISHED = dict(
    hidden_size=256, num_attention_heads=4, head_dim=64, num_hidden_layers=2, max_position_embeddings=4096,
    rope_theta=10_000.0,
)  # fmt: skip
OLD = dict(original_max_position_embeddings=1024)
YARN = dict(rope_type="yarn", factor=4.0, **OLD)
LONGROPE = dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, **OLD)
SCALINGS = {
    "linear": dict(rope_type="linear", factor=4.0),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **OLD),
    "yarn": YARN,
    "yarn with ends between dimensions": YARN | dict(truncate=False),
    "yarn with other ends": YARN | dict(beta_fast=12.5, beta_slow=0.25),
    "yarn with ends that meet": YARN | dict(beta_fast=1.0, beta_slow=1.0, truncate=False),
    "yarn with its own attention factor": YARN | dict(attention_factor=1.3),
    "yarn with mscale": YARN | dict(mscale=0.707, mscale_all_dim=0.5),
    "yarn with one mscale": YARN | dict(mscale=0.707),
    "yarn of the whole context": dict(rope_type="yarn", factor=4.0),
    "yarn with the factor of the lengths": YARN | dict(factor=None),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
    "longrope": LONGROPE,
    "longrope with a factor": LONGROPE | dict(factor=2.0),
    "longrope with its own attention factor": LONGROPE | dict(attention_factor=1.19),
}
LENGTHS = {"dynamic": (4096, 6000, 16_384)} | dict.fromkeys(
    ("longrope", "longrope with a factor", "longrope with its own attention factor"), (1000, 1024, 1025, 4096)
)


def cases():
    """{name: (config.json, length of the longest row)}"""
    return {
        f"{name}, {length}": (dict(model_type="llama", rope_scaling=scaling, **PUBLISHED), length)
        for name, scaling in SCALINGS.items()
        for length in LENGTHS.get(name, (4096,))
    }


def compute(config, length):
    """(angle per position of each pair, what cosines and sines are multiplied with)"""
    import torch
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    rope = LlamaRotaryEmbedding(made)
    rope(torch.zeros(1), torch.arange(length)[None])
    return rope.inv_freq.tolist(), rope.attention_scaling


if __name__ == "__main__":
    found = {name: compute(*case) for name, case in cases().items()}
    print("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items()) + "\n}")
