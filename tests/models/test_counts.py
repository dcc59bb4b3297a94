"""Parameters and FLOPs by formula are those of the arrays, and of published models."""

import math

import jax
import pytest
import tiny

from jaxscale.core.models.gpt2_bert_t5_config import Gpt2Config
from jaxscale.core.models.layers import split_model
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.model import make_model

GPT2_124M = dict(vocab_size=50_257, num_layers=12, embed_dim=768, num_heads=12, max_seq_len=1024)
LLAMA2_7B = dict(
    vocab_size=32_000, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=32, head_dim=128, mlp_dim=11_008
)
LLAMA3_8B = dict(
    vocab_size=128_256, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14_336
)
KNOWN = {
    "gpt2 124M": (Gpt2Config(**GPT2_124M), 124_439_808),
    "llama 2 7B": (LlamaConfig(**LLAMA2_7B), 6_738_415_616),
    "llama 3 8B": (LlamaConfig(**LLAMA3_8B), 8_030_261_248),
}


def arrays(cfg):
    """Number of entries in the arrays of the model, which are never made."""
    model = jax.eval_shape(lambda key: make_model(cfg, key=key), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(split_model(model)[1]))


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_have_their_known_size(name):
    cfg, total = KNOWN[name]
    assert cfg.num_params == total == arrays(cfg)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_embeddings": True}, {"qk_norm": True}, {"num_kv_heads": 4}, {"num_kv_heads": 1, "head_dim": 6},
     {"scan_layers": False}, {"num_layers": 1}, {"qkv_bias": True}, {"out_bias": True},
     {"qk_norm": True, "qk_norm_over": "all_heads"},
     {"norm_placement": "after"}, {"norm_placement": "both"}, tiny.RELATIVE],
    ids=str,
)  # fmt: skip
def test_the_formula_of_llama_counts_the_arrays(changes):
    cfg = tiny.config({f"model.{name}": value for name, value in changes.items()}).model
    assert cfg.num_params == arrays(cfg)


@pytest.mark.parametrize("changes", [{}, {"scan_layers": False}, {"max_seq_len": 7}, {"num_heads": 4}], ids=str)
def test_the_formula_of_gpt2_counts_the_arrays(changes):
    cfg = Gpt2Config(**tiny.GPT2 | changes)
    assert cfg.num_params == arrays(cfg)


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": True}], ids=str)
def test_flops_of_llama_are_those_counted_by_hand(changes):
    # D=16 N=4 K=2 H=8 F=32 L=2 V=64; multiply-adds for one token in the forward pass, at a row of T=10
    projections = 16 * 32 + 2 * 16 * 16 + 32 * 16  # q, k and v, output
    mlp = 3 * 16 * 32
    attention = 2 * 4 * 8 * 10 / 2  # scores and values, over half the row on average
    forward = 2 * (projections + mlp + attention) + 16 * 64
    cfg = tiny.config({f"model.{name}": value for name, value in changes.items()}).model
    assert cfg.flops_per_token(10) == 3 * 2 * forward  # a multiply-add is 2; backward costs twice the forward pass


def test_flops_of_gpt2_are_those_counted_by_hand():
    # D=16 L=2 V=64 F=64, at a row of T=10
    block = 4 * 16 * 16 + 2 * 16 * 64 + 2 * 16 * 10 / 2
    assert Gpt2Config(**tiny.GPT2).flops_per_token(10) == 6 * (2 * block + 16 * 64)
