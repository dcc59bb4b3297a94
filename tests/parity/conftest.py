"""The references of make_references.py, with the names of transformers turned into ours.

B batch  T position  V vocab  D embed  N query heads  K key-value heads  H head dim  L layers
"""

import json
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxscale.data.batch import Batch
from jaxscale.models import logits, make_model
from jaxscale.models.gpt2 import Gpt2Config
from jaxscale.models.layers import merge_model, split_model
from jaxscale.models.llama import LlamaConfig
from jaxscale.models.loss import summed_loss
from jaxscale.ops.kernels import PLAIN
from jaxscale.ops.rope import RopeScaling

HERE = pathlib.Path(__file__).parent


class Reference:
    """One .npz: its config, its arrays by name, its weights and gradients by the names of transformers."""

    def __init__(self, name):
        with np.load(HERE / f"{name}.npz", allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        self.config = json.loads(str(arrays.pop("config")))
        self.weights = {key.removeprefix("param/"): a for key, a in arrays.items() if key.startswith("param/")}
        self.gradients = {key.removeprefix("grad/"): a for key, a in arrays.items() if key.startswith("grad/")}
        self.arrays = arrays

    def __getitem__(self, key):
        return self.arrays[key]


def llama_config(hf, **changes):
    """Our settings for a config of transformers' Llama or Qwen3."""
    rope, scaling = hf["rope_parameters"], None
    if rope["rope_type"] == "llama3":
        scaling = RopeScaling(
            name="llama3",
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_len=rope["original_max_position_embeddings"],
        )
    settings = {
        "vocab_size": hf["vocab_size"],
        "num_layers": hf["num_hidden_layers"],
        "embed_dim": hf["hidden_size"],
        "num_heads": hf["num_attention_heads"],
        "num_kv_heads": hf["num_key_value_heads"],
        "head_dim": hf["head_dim"],
        "mlp_dim": hf["intermediate_size"],
        "norm_eps": hf["rms_norm_eps"],
        "rope_base": rope["rope_theta"],
        "rope_scaling": scaling,
        "tied_embeddings": hf["tie_word_embeddings"],
        "compute_dtype": "float32",
    }
    return LlamaConfig(**settings | changes)


def llama_params(cfg, arrays):
    """Our nested dict for {name of transformers: weight}, or for its gradients: the change is linear.

    transformers keeps a linear layer as [out, in], with heads and their dimensions as one axis.
    """
    D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim

    def block(layer):
        get = lambda name: arrays[f"model.layers.{layer}.{name}.weight"]
        attention = {
            "wq": get("self_attn.q_proj").T.reshape(D, N, H),
            "wk": get("self_attn.k_proj").T.reshape(D, K, H),
            "wv": get("self_attn.v_proj").T.reshape(D, K, H),
            "wo": get("self_attn.o_proj").T.reshape(N, H, D),
        }
        if cfg.qk_norm:
            attention |= {"q_norm": get("self_attn.q_norm"), "k_norm": get("self_attn.k_norm")}
        return {
            "attention_norm": get("input_layernorm"),
            "attention": attention,
            "mlp_norm": get("post_attention_layernorm"),
            "mlp": {name: get(f"mlp.{name}_proj").T for name in ("gate", "up", "down")},
        }

    params = {
        "embedding": arrays["model.embed_tokens.weight"],
        "blocks": stack_blocks(cfg, block),
        "final_norm": arrays["model.norm.weight"],
    }
    return params if cfg.tied_embeddings else params | {"head": arrays["lm_head.weight"].T}


def gpt2_config(hf, **changes):
    """Our settings for a config of transformers' GPT-2."""
    settings = {
        "vocab_size": hf["vocab_size"],
        "num_layers": hf["n_layer"],
        "embed_dim": hf["n_embd"],
        "num_heads": hf["n_head"],
        "max_seq_len": hf["n_positions"],
        "norm_eps": hf["layer_norm_epsilon"],
        "compute_dtype": "float32",
    }
    return Gpt2Config(**settings | changes)


def gpt2_params(cfg, arrays):
    """As llama_params. GPT-2's layers are [in, out], with queries, keys and values side by side in one."""
    D, N = cfg.embed_dim, cfg.num_heads
    H = D // N

    def block(layer):
        get = lambda name: arrays[f"transformer.h.{layer}.{name}"]
        attention = {"wo": get("attn.c_proj.weight").reshape(N, H, D), "bias_o": get("attn.c_proj.bias")}
        weights = np.split(get("attn.c_attn.weight"), 3, axis=-1)
        biases = np.split(get("attn.c_attn.bias"), 3, axis=-1)
        for name, weight, bias in zip("qkv", weights, biases):
            attention |= {f"w{name}": weight.reshape(D, N, H), f"bias_{name}": bias.reshape(N, H)}
        return {
            "scale_attention": get("ln_1.weight"),
            "bias_attention": get("ln_1.bias"),
            "attention": attention,
            "scale_mlp": get("ln_2.weight"),
            "bias_mlp": get("ln_2.bias"),
            "mlp": {
                "up": get("mlp.c_fc.weight"),
                "bias_up": get("mlp.c_fc.bias"),
                "down": get("mlp.c_proj.weight"),
                "bias_down": get("mlp.c_proj.bias"),
            },
        }

    return {
        "embedding": arrays["transformer.wte.weight"],
        "position_embedding": arrays["transformer.wpe.weight"],
        "blocks": stack_blocks(cfg, block),
        "scale_final": arrays["transformer.ln_f.weight"],
        "bias_final": arrays["transformer.ln_f.bias"],
    }


def stack_blocks(cfg, block):
    """Layers with a leading axis for the scan, or one dict each where they are unrolled."""
    blocks = [block(layer) for layer in range(cfg.num_layers)]
    if not cfg.scan_layers:
        return {str(layer): params for layer, params in enumerate(blocks)}
    return jax.tree.map(lambda *layers: np.stack(layers), *blocks)


def next_token_batch(tokens_BT):
    """One document a row, in which every token but the last has a target."""
    B, T = tokens_BT.shape
    weights_BT = np.ones((B, T), np.float32)
    weights_BT[:, -1] = 0.0
    return Batch(
        tokens=tokens_BT,
        targets=np.roll(tokens_BT, -1, axis=1),
        positions=np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        segment_ids=np.ones((B, T), np.int32),
        weights=weights_BT,
    )


class Computed(NamedTuple):
    """What our model makes of a batch; losses and gradients are means over the tokens that have a target."""

    logits: Any  # float32 [B, T, V]
    total: Any  # what is minimised
    parts: Any  # {name: loss}
    gradients: Any  # as the parameters


def compute(cfg, params, batch, *, kernels=PLAIN, aux_weights=None):
    """Computed by the model of `cfg` with `params`, whose names and shapes must be the model's own."""
    graphdef, own, _ = split_model(make_model(cfg, key=jax.random.key(0), kernels=kernels))
    assert jax.tree.map(np.shape, own) == jax.tree.map(np.shape, params)

    def objective(params, batch):
        model, tokens = merge_model(graphdef, params), batch.weights.sum()
        total, parts = summed_loss(model, batch, None, aux_weights or {})
        all_logits = logits(model, batch.tokens, batch.positions, batch.segment_ids)
        return total / tokens, (jax.tree.map(lambda part: part / tokens, parts), all_logits)

    (total, (parts, all_logits)), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(params, batch)
    return Computed(all_logits, total, parts, gradients)


def assert_close_trees(ours, theirs, tolerance):
    """Every leaf within tolerance * (1 + |theirs|)."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree_util.tree_leaves_with_path(theirs), strict=True)
    for (path, our), (_, their) in pairs:
        np.testing.assert_allclose(our, their, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))


class Parity(NamedTuple):
    """What the tests here share, handed over as one fixture."""

    load: Any = Reference  # load("llama") -> Reference
    llama_config: Any = llama_config
    llama_params: Any = llama_params
    gpt2_config: Any = gpt2_config
    gpt2_params: Any = gpt2_params
    make_batch: Any = next_token_batch
    compute: Any = compute
    assert_close_trees: Any = assert_close_trees


@pytest.fixture(scope="session")
def parity():
    return Parity()
