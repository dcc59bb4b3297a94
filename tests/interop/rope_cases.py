"""Each way in which a config.json can say how RoPE is scaled, and what transformers reads of it.

TORCH_PYTHON tests/interop/rope_cases.py > tests/interop/rope_read.json
"""

import json
import sys

FULL, SLIDING = "full_attention", "sliding_attention"
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0 + 0.5 * pair for pair in range(4)]
KINDS = {
    "default": {},
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
    "longrope": dict(short_factor=SHORT, long_factor=LONG, factor=2.0, original_max_position_embeddings=32),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    "proportional": dict(partial_rotary_factor=0.5),
}
FAMILIES = ("llama", "gemma3_text")
LIKE_LLAMA = ("mistral", "qwen2", "qwen3", "olmo2", "gemma", "gemma2")
WORDS = (
    "rope_type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "short_factor", "long_factor",
)  # fmt: skip
SMALL = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=6, head_dim=8, max_position_embeddings=64)


def ways(family, kind, more):
    """{way: the keys of a config.json}"""
    scaling, theta = dict(rope_type=kind, **more), dict(rope_theta=5e5)
    layered = family == "gemma3_text"
    put = lambda rope: {FULL: rope, SLIDING: dict(rope_type="default", rope_theta=2e4)} if layered else rope
    usual = put(dict(rope_type="default") | theta)
    return {
        "old": dict(rope_scaling=scaling) | theta,
        "old_without_theta": dict(rope_scaling=scaling),
        "old_type": dict(rope_scaling=dict(type=kind, **more)) | theta,
        "new": dict(rope_parameters=put(scaling | theta)),
        "new_theta_outside": dict(rope_parameters=put(scaling)) | theta,
        "both": dict(rope_scaling=scaling, rope_parameters=usual),
        "both_with_theta": dict(rope_scaling=scaling | dict(rope_theta=7e5), rope_parameters=usual),
        "both_theta_outside": dict(rope_scaling=scaling, rope_parameters=usual) | theta,
        "both_type": dict(rope_scaling=dict(type=kind, **more), rope_parameters=usual) | theta,
        "both_types": dict(rope_scaling=dict(type=kind, rope_type="linear", factor=2.0) | more) | theta,
        "both_scaled": dict(rope_scaling=scaling, rope_parameters=put(dict(rope_type="linear", factor=2.0) | theta))
        | theta,
        "empty": dict(rope_scaling={}, rope_parameters=put(scaling | theta)),
        "original_outside": dict(rope_parameters=put(scaling | theta), original_max_position_embeddings=16),
        "without_original": dict(rope_scaling={k: v for k, v in scaling.items() if not k.startswith("orig")}) | theta,
        "partial": dict(rope_scaling=scaling, partial_rotary_factor=0.5) | theta,
        "other_shape": dict(rope_parameters=scaling | theta if layered else {FULL: scaling | theta}),
    }


def cases(families=FAMILIES):
    """{name: config.json}"""
    return {
        f"{family} {kind} {way}": dict(model_type=family, **SMALL, **keys)
        for family in families
        for kind, more in KINDS.items()
        for way, keys in ways(family, kind, more).items()
    }


def read(config):
    """{type of layers, or "": WORDS of RoPE} as a model of transformers computes with them, or its error's name."""
    import transformers

    try:
        made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
        name = made.model_type.removesuffix("_text")
        module = getattr(getattr(transformers.models, name), f"modeling_{name}")
        getattr(module, f"{name.capitalize()}RotaryEmbedding")(made)
        rope = made.rope_parameters
        found = {kind: rope[kind] for kind in (FULL, SLIDING)} if name == "gemma3" else {"": rope}
        return {kind: [one.get(word) for word in WORDS] for kind, one in found.items()}
    except Exception as error:  # anything that keeps the model from being made
        return type(error).__name__


if __name__ == "__main__":
    chosen = sys.argv[1:] or FAMILIES
    found = {name: read(config) for name, config in cases(chosen).items()}
    print("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items()) + "\n}")
