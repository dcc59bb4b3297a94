"""What the settings of Llama's relatives promise, all of them at one time; test_families.py compares with others.

B batch  T position
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.core.axes.tensor_axis import NO_TENSOR_AXIS
from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.model import logits, make_model
from jaxscale.core.plan import single_device_plan
from jaxscale.core.recorder import make_recorder
from jaxscale.kernels.activation import geglu_tanh
from jaxscale.kernels.attention import windowed_or_full
from jaxscale.kernels.config import RopeScaling, WindowLayers
from jaxscale.kernels.norm import rms_norm, rms_norm_heads

T = tiny.SEQ_LEN


def config(**changes):
    return LlamaConfig(**tiny.RELATIVE | changes)


def parts(cfg):
    """(graphdef, random parameters, large enough that all of them show)."""
    plan, rng = single_device_plan("cpu", "xla", cfg.attention_needs()), np.random.default_rng(3)
    make = lambda key: make_model(cfg, key=key, plan=plan)
    graphdef, shapes, _ = split_model(jax.eval_shape(make, jax.random.key(0)))
    return graphdef, jax.tree.map(lambda leaf: rng.normal(scale=0.4, size=leaf.shape).astype(np.float32), shapes)


@functools.cache
def forward():
    graphdef, params = parts(config())
    return jax.jit(lambda *inputs: logits(merge_model(graphdef, params), *inputs))


def rows(num, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, tiny.VOCAB, (num, T)), jnp.int32)


@pytest.mark.slow
def test_a_packed_document_is_read_as_if_it_stood_alone():
    tokens_BT, half = rows(1), T // 2
    positions_BT = jnp.concatenate([jnp.arange(half), jnp.arange(T - half)])[None]
    segments_BT = jnp.concatenate([jnp.full(half, 1), jnp.full(T - half, 2)])[None]
    packed = forward()(tokens_BT, positions_BT, segments_BT)
    places, ones = jnp.arange(T)[None], jnp.ones((1, T), jnp.int32)
    alone = forward()(jnp.roll(tokens_BT, half, axis=1), places, ones)  # the second document, now first
    np.testing.assert_allclose(packed[:, half:], alone[:, : T - half], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_token_is_seen_from_afar_only_where_a_layer_is_global():
    tokens_BT = rows(1)
    changed_BT = tokens_BT.at[0, 0].set((tokens_BT[0, 0] + 1) % tiny.VOCAB)
    places, ones = jnp.arange(T)[None], jnp.ones((1, T), jnp.int32)
    assert (forward()(tokens_BT, places, ones)[0, -1] != forward()(changed_BT, places, ones)[0, -1]).any()
    graphdef, params = parts(config(global_every=4))  # of 3 layers none is global: 3 windows of 5 reach 12 back
    call = jax.jit(lambda tokens_BT: logits(merge_model(graphdef, params), tokens_BT))
    moved_T = np.asarray(call(tokens_BT) != call(changed_BT)).any(axis=-1)[0]
    np.testing.assert_array_equal(moved_T, np.arange(T) <= 12)


def test_each_nth_layer_is_global():
    assert config(num_layers=5, global_every=2).local_layers.tolist() == [True, False, True, False, True]
    assert config(num_layers=2, global_every=None, local_rope_base=None).local_layers.tolist() == [True, True]
    assert LlamaConfig(**tiny.LLAMA).local_layers.tolist() == [False, False]


def test_the_first_layers_can_be_global_alone_and_beside_each_nth():
    alone = config(num_layers=4, global_every=None, global_first=2)
    assert alone.local_layers.tolist() == [False, False, True, True]
    assert alone.attention_needs().window_layers == WindowLayers(2, 4)
    assert config(num_layers=6, global_every=4, global_first=1).local_layers.tolist() == [0, 1, 1, 0, 1, 1]
    assert config().attention_needs().window_layers == WindowLayers(2, 3)
    windowed = config(global_every=None, local_rope_base=None)
    assert windowed.attention_needs().window_layers is None and windowed.local_layers.all()


def test_flops_are_counted_over_the_keys_that_each_layer_sees():
    per_key = 12 * 4 * 8  # heads, head_dim
    full = config(global_every=None, local_rope_base=None, attention_window=None).flops_per_token(100)
    window_layers = config().flops_per_token(100)  # 2 of 3 layers have the window of 5
    assert full - window_layers == pytest.approx(per_key * 2 * (50 - (5 - 25 / 200)), rel=1e-12)


@pytest.mark.parametrize(
    "changes, told",
    [
        (dict(global_every=1), "global_every=1 must be at least 2, and needs attention_window"),
        (dict(attention_window=None), "global_every=2 must be at least 2, and needs attention_window"),
        (dict(global_every=None), "local_rope_base=100.0 must be at least 1, and needs global_every"),
        (dict(global_first=3), "global_first=3 must be at least 0 and below num_layers"),
        (dict(global_every=None, local_rope_base=None, attention_window=None, global_first=1), "global_first=1 must"),
        (dict(rope_scaling=RopeScaling(name="longrope", short_factor=(1.0,), long_factor=(2.0,))),
         "rope_scaling.long_factor has 1 numbers, but RoPE rotates 8 dimensions and needs 4"),
        (dict(rope_scaling=RopeScaling(name="dynamic"), head_dim=2), "head_dim=2 must be at least 4"),
        (dict(rope_scaling=RopeScaling(name="yarn"), rope_base=1.0), "rope_base=1.0 must be above 1"),
        (dict(query_scalar=0.0), "query_scalar=0.0 must be above 0; use none for head_dim"),
        (dict(qk_norm=False), "qk_norm_over='all_heads' needs qk_norm; set qk_norm=true"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        config(**changes)


@pytest.mark.parametrize("local", [True, np.True_, jnp.asarray(True), False, jnp.asarray(False)], ids=repr)
def test_one_of_two_is_computed_with_its_gradient(local):
    both = windowed_or_full(lambda x, y: x * y, lambda x, y: x + y, WindowLayers(1, 2))
    found = jax.value_and_grad(lambda x: both(x, 3.0, local=local))(2.0)
    assert tuple(map(float, found)) == ((6.0, 3.0) if local else (5.0, 1.0))


@pytest.mark.slow
def test_geglu_and_the_norm_of_all_heads_have_the_gradients_of_their_definition():
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(2, 3, 4, 8)), jnp.float32) for _ in range(2))
    scale = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    joined = lambda x, scale: rms_norm(x.reshape(2, 3, 32), scale.reshape(32), 1e-5).reshape(x.shape)
    for ours, defined, inputs in (
        (geglu_tanh, lambda gate, up: jax.nn.gelu(gate, approximate=True) * up, (x, y)),
        (lambda x, scale: rms_norm_heads(x, scale, 1e-5, NO_TENSOR_AXIS), joined, (x, scale)),
    ):
        (value, pull), (defined_value, defined_pull) = jax.vjp(ours, *inputs), jax.vjp(defined, *inputs)
        np.testing.assert_allclose(value, defined_value, rtol=1e-5, atol=1e-6)
        for ours_gradient, gradient in zip(pull(y), defined_pull(y), strict=True):
            np.testing.assert_allclose(ours_gradient, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_statistics_see_each_layer_as_it_is_scanned_or_not():
    found = []
    for scan in (True, False):
        cfg = config(scan_layers=scan, num_layers=2)
        plan, needs = single_device_plan("cpu", "xla", cfg.attention_needs()), cfg.attention_needs()
        _, params = parts(config(num_layers=2))
        if not scan:
            layers = [jax.tree.map(operator.itemgetter(layer), params["blocks"]) for layer in range(2)]
            params = params | {"blocks": {str(layer): block for layer, block in enumerate(layers)}}

        def watch(params, cfg=cfg, plan=plan, needs=needs):
            recorder = make_recorder(plan.attention.name, needs, NO_TENSOR_AXIS)
            make = lambda key: make_model(cfg, key=key, plan=plan.with_recorder(recorder))
            graphdef = split_model(jax.eval_shape(make, jax.random.key(0)))[0]
            places = jnp.broadcast_to(jnp.arange(T)[None], (2, T))
            merge_model(graphdef, params).hidden(rows(2), places, jnp.ones((2, T), jnp.int32))
            return recorder.sown()["sown"][0]

        found.append(jax.jit(watch)(params))
    (scanned, unrolled), name = found, "attention_logit_max"
    np.testing.assert_allclose(scanned.maxima[name], unrolled.maxima[name], rtol=1e-5)
    assert scanned.maxima[name].shape == (2,) and set(scanned.sums) == set(unrolled.sums)
