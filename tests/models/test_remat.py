"""A remat policy keeps what it names, on the device or on the host, and changes no number."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.core.models.config import SAVED_NAMES, LatentConfig
from jaxscale.core.models.gpt2_bert_t5_config import Gpt2Config
from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.model import make_model, summed_loss

ROWS, T = 4, 16
LATENT = LatentConfig(kv_rank=8, q_rank=12, nope_dim=8, rope_dim=4, value_dim=10)
CONFIGS = {
    "llama": (LlamaConfig, tiny.LLAMA | {"mlp_dim": 48}),
    "latent": (LlamaConfig, tiny.LLAMA | {"mlp_dim": 48, "num_kv_heads": 4, "head_dim": 12, "latent": LATENT}),
    "gpt2": (Gpt2Config, tiny.GPT2),
}
WIDTHS = {  # elements per token and layer, from the shapes of the two tiny models
    "llama": dict(
        block_input=16, query=32, key=16, value=16, attention_out=32, attention_added=16, mlp_gate=48, mlp_up=48
    ),
    "latent": dict(
        block_input=16,
        query=48,
        key=48,
        value=40,
        attention_out=40,
        attention_added=16,
        mlp_gate=48,
        mlp_up=48,
        latent=24,
    ),
    "gpt2": dict(block_input=16, query=16, key=16, value=16, attention_out=16, attention_added=16, mlp_up=64),
}
NAMED = [(model, name) for model in WIDTHS for name in WIDTHS[model]]


def make(model, **changes):
    """(config, graphdef, shapes of the parameters)."""
    kind, values = CONFIGS[model]
    cfg = kind(**values | changes)
    graphdef, shapes, _ = split_model(jax.eval_shape(lambda key: make_model(cfg, key=key), jax.random.key(0)))
    return cfg, graphdef, shapes


@functools.cache
def kept(model, **changes):
    """Bytes of every layer's activations that the forward pass leaves to the backward: (on the device, on the host)."""
    _, graphdef, shapes = make(model, **changes)
    batch = tiny.packed_batch(1, rows=ROWS)
    hidden = lambda params: merge_model(graphdef, params).hidden(batch.tokens, batch.positions, batch.segment_ids)
    left = jax.make_jaxpr(lambda params: jax.vjp(hidden, params)[1])(shapes).out_avals
    left = [array for array in left if array.shape[:3] == (2, ROWS, T)]
    size = lambda host: sum(math.prod(a.shape) * 4 for a in left if (a.memory_space == jax.memory.Space.Host) == host)
    return size(False), size(True)


def size_of(model, names):
    """Bytes of these float32 activations in both layers."""
    return 2 * ROWS * T * 4 * sum(WIDTHS[model].get(name, 0) for name in names)


@functools.cache
def loss_and_gradient(model, **changes):
    """Of one batch and random parameters, on the host."""
    cfg, graphdef, shapes = make(model, **changes)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.3 * random.standard_normal(leaf.shape), leaf.dtype), shapes)
    loss = lambda params, batch: summed_loss(merge_model(graphdef, params), batch, None, {})[0]
    return tiny.host(jax.jit(jax.value_and_grad(loss))(params, tiny.packed_batch(1, rows=ROWS)))


def assert_close(left, right, rtol):
    """Fails if any leaf differs by more than rtol of the largest entry of the leaf."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(np.abs(b).max()))


def test_every_activation_that_a_model_names_has_a_size_here():
    assert {model: tuple(WIDTHS[model]) for model in WIDTHS} == {
        model: make(model)[0].activation_names for model in CONFIGS
    }


@pytest.mark.cases(2)
@pytest.mark.parametrize(("model", "name"), NAMED)
def test_a_name_keeps_its_array_and_nothing_else(model, name):
    names = {"block_input", name}  # the scan keeps its carry anyway
    assert kept(model, remat="save", remat_save=(name,)) == (size_of(model, names), 0)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("remat", "offload"),
    [("full", {"block_input"}), ("full", {"query"}), ("minimal", {"mlp_gate", "mlp_up"}), ("qkv", {"attention_out"})],
)
def test_an_offloaded_name_is_on_the_host_and_leaves_the_device(remat, offload):
    names = {"block_input", *SAVED_NAMES[remat]} - offload
    there = kept("llama", remat=remat, remat_offload=tuple(sorted(offload)))
    assert there == (size_of("llama", names), size_of("llama", offload))


@pytest.mark.cases(2)
@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("remat", SAVED_NAMES)
def test_a_policy_keeps_the_names_in_its_list(model, remat):
    assert kept(model, remat=remat) == (size_of(model, {"block_input", *SAVED_NAMES[remat]}), 0)


def test_dots_keeps_the_products_of_weights():
    assert kept("llama", remat="dots") == (size_of("llama", set(WIDTHS["llama"]) - {"attention_out"}), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param("gpt2", {"remat": "minimal"}, marks=pytest.mark.soak),
        ("llama", {"remat": "save", "remat_save": ("key",), "remat_offload": ("block_input", "mlp_gate")}),
        ("gpt2", {"remat": "attention", "remat_offload": ("attention_out",)}),
        ("llama", {"remat": "full", "remat_offload": ("block_input",), "scan_layers": False}),
    ],
    ids=str,
)
def test_neither_what_is_kept_nor_where_changes_values_or_gradients(model, changes):
    plain = {"scan_layers": False} if "scan_layers" in changes else {}
    assert_close(loss_and_gradient(model, **changes), loss_and_gradient(model, **plain), 1e-5)


@pytest.mark.parametrize(
    ("model", "changes", "told"),
    [
        ("llama", {"remat": "save", "remat_save": ("qery",)}, "remat_save has 'qery'"),
        ("llama", {"remat": "save", "remat_save": ("qery",)}, "did you mean 'query'?"),
        ("llama", {"remat": "full", "remat_offload": ("zzz",)}, "use block_input, query, key"),
        ("gpt2", {"remat": "save", "remat_save": ("mlp_gate",)}, "of this model; did you mean 'mlp_up'?"),
        ("llama", {"remat": "full", "remat_save": ("query",)}, "remat_save needs remat='save', but remat='full'"),
        ("llama", {"remat": "save"}, "needs remat_save or remat_offload"),
        ("llama", {"remat": "none", "remat_offload": ("query",)}, "cannot be combined with remat='none'"),
        ("llama", {"remat": "dots", "remat_offload": ("query",)}, "use remat=full, attention, qkv, minimal, save"),
        ("llama", {"remat": "save", "remat_save": ("key",), "remat_offload": ("key",)}, "remove it from one of them"),
        ("llama", {"remat": "save", "remat_save": ("key", "key")}, "'key' twice"),
    ],
)
def test_lists_that_cannot_be_honoured_are_refused(model, changes, told):
    kind, values = CONFIGS[model]
    with pytest.raises(ValueError) as error:
        kind(**values | changes)
    assert told in str(error.value) and "\n" not in str(error.value)
