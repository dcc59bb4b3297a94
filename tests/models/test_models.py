"""What holds for every model: it sees no later token and no other document, and its variants agree.

B batch  T position  V vocab  D embed
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from twins import twins

from jaxscale.core.models.gpt2_bert_t5_config import Gpt2Config
from jaxscale.core.models.layers import dropout, merge_model, split_model
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.model import logits, make_model, summed_loss, token_losses, unembed

T = 16
MODELS = {"llama": tiny.LLAMA, "gpt2": tiny.GPT2}


def model_config(name, **changes):
    return (LlamaConfig if name == "llama" else Gpt2Config)(**MODELS[name] | changes)


@functools.cache
def parameters(name, **changes):
    """Parameters that are the same whatever else the config says; larger than at the start, to show differences."""
    _, params, _ = split_model(make_model(model_config(name, **changes), key=jax.random.key(3)))
    return jax.tree.map(lambda leaf: 3 * leaf, params)


def graphdef_of(cfg):
    return split_model(jax.eval_shape(lambda key: make_model(cfg, key=key), jax.random.key(0)))[0]


@functools.cache
def forward(name, **changes):
    """(params, tokens, positions, segments) -> logits, compiled."""
    graphdef = graphdef_of(model_config(name, **changes))
    return jax.jit(lambda params, *inputs: logits(merge_model(graphdef, params), *inputs))


@functools.cache
def loss_and_gradient(name, **changes):
    """(params, batch, key) -> (summed loss, gradient), compiled."""
    graphdef = graphdef_of(model_config(name, **changes))
    loss = lambda params, batch, key: summed_loss(merge_model(graphdef, params), batch, key, {})[0]
    return jax.jit(jax.value_and_grad(loss))


def rows(num=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, tiny.VOCAB, (num, T)), jnp.int32)


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


of_any = pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.soak)])  # of code both share


@pytest.mark.cases(1)
@pytest.mark.parametrize("t", [0, 7, 14])
def test_a_logit_never_sees_a_later_token(name, t):
    tokens_BT = rows()
    changed_BT = tokens_BT.at[:, t + 1 :].set((tokens_BT[:, t + 1 :] + 1) % tiny.VOCAB)
    call = functools.partial(forward(name), parameters(name))
    before, after = np.asarray(call(tokens_BT)), np.asarray(call(changed_BT))
    np.testing.assert_array_equal(before[:, : t + 1], after[:, : t + 1])
    assert (before[:, t + 1 :] != after[:, t + 1 :]).any(axis=-1).all()  # and every later one does


def test_no_logit_moves_when_a_token_of_another_document_does(name):
    batch = tiny.packed_batch(5, rows=4)
    call = functools.partial(forward(name), parameters(name))
    before = np.asarray(call(*batch[:1], batch.positions, batch.segment_ids))
    for row in range(4):
        for document in set(batch.segment_ids[row].tolist()) - {0}:
            inside = batch.segment_ids == document
            inside[np.arange(4) != row] = False
            tokens_BT = np.where(inside, (batch.tokens + 1) % tiny.VOCAB, batch.tokens)
            after = np.asarray(call(tokens_BT, batch.positions, batch.segment_ids))
            np.testing.assert_array_equal(before[~inside], after[~inside])
            assert (before[inside] != after[inside]).any(axis=-1).all()


@pytest.mark.cases(1)
def test_a_packed_document_is_read_as_if_it_stood_alone(name):
    tokens_BT, half = rows(1), T // 2
    positions_BT = jnp.concatenate([jnp.arange(half), jnp.arange(T - half)])[None]
    segments_BT = jnp.concatenate([jnp.full(half, 1), jnp.full(T - half, 2)])[None]
    packed = forward(name)(parameters(name), tokens_BT, positions_BT, segments_BT)
    alone = forward(name)(parameters(name), jnp.roll(tokens_BT, half, axis=1))  # the second document, now first
    np.testing.assert_allclose(packed[:, half:], alone[:, : T - half], rtol=1e-5, atol=1e-5)


def test_positions_matter(name):
    call = functools.partial(forward(name), parameters(name))
    shifted = jnp.arange(T)[None] * 2 % T
    ones = jnp.ones((1, T), jnp.int32)
    assert not np.allclose(call(rows(1), jnp.arange(T)[None], ones), call(rows(1), shifted, ones), atol=1e-3)


def test_rotated_queries_and_keys_know_only_how_far_apart_they_are():
    call, ones = functools.partial(forward("llama"), parameters("llama")), jnp.ones((1, T), jnp.int32)
    near, far = (call(rows(1), jnp.arange(T)[None] + start, ones) for start in (0, 100))
    np.testing.assert_allclose(near, far, rtol=1e-3, atol=1e-3)  # angles of 100 radians have 1e-5 of rounding


def assert_close(left, right, rtol):
    """Fails if any leaf differs by more than rtol of the largest entry of the leaf."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "remat"),
    twins(
        [(name, remat) for name in MODELS for remat in ("full", "dots", "attention")],
        ("llama", "full"),
    ),
)
def test_what_is_computed_again_does_not_change_values_or_gradients(name, remat):
    arguments = parameters(name), tiny.packed_batch(1, rows=4), jax.random.key(0)
    assert_close(loss_and_gradient(name, remat=remat)(*arguments), loss_and_gradient(name)(*arguments), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "remat"), twins([("llama", "full"), ("gpt2", "none")], ("llama", "full")))
def test_unrolled_layers_equal_scanned_ones(name, remat):
    batch = tiny.packed_batch(1, rows=4)
    stacked, unrolled = parameters(name), parameters(name, scan_layers=False)
    loss, gradient = loss_and_gradient(name)(stacked, batch, None)
    loss_unrolled, gradient_unrolled = loss_and_gradient(name, scan_layers=False, remat=remat)(unrolled, batch, None)
    layers = [gradient_unrolled["blocks"][str(layer)] for layer in range(2)]
    restacked = gradient_unrolled | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}
    assert_close(restacked, gradient, 1e-5)
    np.testing.assert_allclose(loss_unrolled, loss, rtol=1e-6)


@pytest.mark.slow
def test_layer_l_starts_alike_scanned_or_unrolled(name):
    stacked, unrolled = parameters(name), parameters(name, scan_layers=False)
    for layer in range(2):
        tiny.assert_same_bits(
            jax.tree.map(operator.itemgetter(layer), stacked["blocks"]), unrolled["blocks"][str(layer)]
        )
    assert not np.array_equal(unrolled["blocks"]["0"]["mlp"]["up"], unrolled["blocks"]["1"]["mlp"]["up"])


def test_a_model_survives_being_taken_apart(name):
    for scan in (True, False):
        model = make_model(model_config(name, scan_layers=scan), key=jax.random.key(3))
        graphdef, params, axes = split_model(model)
        tiny.assert_same_bits(split_model(merge_model(graphdef, params))[1], params)
        is_axes = lambda leaf: isinstance(leaf, tuple)
        for leaf, names in zip(jax.tree.leaves(params), jax.tree.leaves(axes, is_leaf=is_axes), strict=True):
            assert leaf.ndim == len(names) and leaf.dtype == jnp.float32


@pytest.mark.slow
@of_any
def test_the_loss_is_cross_entropy_of_the_logits(name):
    batch, params = tiny.packed_batch(2, rows=4), parameters(name)
    all_logits = forward(name)(params, batch.tokens, batch.positions, batch.segment_ids)
    nats_BT = -np.take_along_axis(np.asarray(jax.nn.log_softmax(all_logits)), batch.targets[..., None], -1)[..., 0]
    total, _ = loss_and_gradient(name)(params, batch, None)
    np.testing.assert_allclose(total, (nats_BT * batch.weights).sum(), rtol=1e-5)
    model = merge_model(graphdef_of(model_config(name, loss_chunk_tokens=13)), params)
    np.testing.assert_allclose(token_losses(model, batch), nats_BT, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@of_any
def test_a_soft_cap_bounds_logits_and_is_in_the_loss_too(name):
    params, batch = parameters(name), tiny.packed_batch(2, rows=4)
    plain = forward(name)(params, batch.tokens, batch.positions, batch.segment_ids)
    capped = forward(name, logit_softcap=2.0)(params, batch.tokens, batch.positions, batch.segment_ids)
    assert float(jnp.abs(plain).max()) > 2.0 > float(jnp.abs(capped).max())
    np.testing.assert_allclose(capped, 2.0 * np.tanh(plain / 2.0), rtol=1e-5, atol=1e-5)
    nats_BT = -np.take_along_axis(np.asarray(jax.nn.log_softmax(capped)), batch.targets[..., None], -1)[..., 0]
    total, _ = loss_and_gradient(name, logit_softcap=2.0)(params, batch, None)
    np.testing.assert_allclose(total, (nats_BT * batch.weights).sum(), rtol=1e-5)


@pytest.mark.slow
def test_the_z_loss_is_reported_apart_and_minimised():
    batch, params = tiny.packed_batch(2, rows=4), parameters("llama")
    model = merge_model(graphdef_of(model_config("llama")), params)
    log_z_BT = jax.nn.logsumexp(forward("llama")(params, batch.tokens, batch.positions, batch.segment_ids), axis=-1)
    total, parts = summed_loss(model, batch, None, {"z_loss": 0.5})
    np.testing.assert_allclose(parts["z_loss"], np.sum(np.square(log_z_BT) * batch.weights), rtol=1e-5)
    np.testing.assert_allclose(total, parts["loss"] + 0.5 * parts["z_loss"], rtol=1e-6)
    assert set(summed_loss(model, batch, None, {})[1]) == {"loss"}


@pytest.mark.slow
def test_tied_embeddings_are_one_array_with_both_gradients():
    params, batch = parameters("llama", tied_embeddings=True), tiny.packed_batch(1, rows=4)
    assert "head" not in params and "head" in parameters("llama")
    untied = params | {"head": params["embedding"].T}
    loss, gradient = loss_and_gradient("llama", tied_embeddings=True)(params, batch, None)
    loss_untied, gradient_untied = loss_and_gradient("llama")(untied, batch, None)
    np.testing.assert_allclose(loss, loss_untied, rtol=1e-6)
    both = gradient_untied["embedding"] + gradient_untied["head"].T
    assert_close(gradient["embedding"], both, 1e-5)


@pytest.mark.slow
def test_dropout_acts_only_with_a_key():
    params, batch = parameters("gpt2"), tiny.packed_batch(1, rows=4)
    loss = lambda keys_B: float(loss_and_gradient("gpt2", dropout=0.3)(params, batch, keys_B)[0])
    plain = float(loss_and_gradient("gpt2")(params, batch, None)[0])
    np.testing.assert_allclose(loss(None), plain, rtol=1e-6)
    dropped = [loss(jax.random.split(jax.random.key(seed), 4)) for seed in (0, 1, 0)]
    assert dropped[0] == dropped[2] != dropped[1] and plain not in dropped


def test_dropout_keeps_the_mean_and_differs_by_row():
    x, keys_B = jnp.ones((100, 100)), jax.random.split(jax.random.key(0), 100)
    kept = np.asarray(dropout(x, 0.25, keys_B))
    assert (kept[0] != kept[1]).any()
    np.testing.assert_array_equal(dropout(x[40:], 0.25, keys_B[40:]), kept[40:])  # a row keeps its mask anywhere
    assert set(np.unique(kept)) == {0.0, np.float32(1 / 0.75)}
    np.testing.assert_allclose(kept.mean(), 1.0, atol=0.03)  # 5 standard deviations of 10,000 draws
    assert dropout(x, 0.25, None) is x and dropout(x, 0.0, keys_B) is x


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_single(name, dtype):
    params, tokens_BT = jax.tree.map(lambda leaf: leaf / 3, parameters(name)), rows()
    exact, rough = forward(name)(params, tokens_BT), forward(name, compute_dtype=dtype)(params, tokens_BT)
    assert rough.dtype == jnp.float32
    # 2 layers of a few roundings, each of half a unit in the last of 8 (11) bits, measured in logits of the usual size
    rtol = {"bfloat16": 0.03, "float16": 0.004}[dtype]
    error = np.sqrt(np.mean(np.square(exact - rough)) / np.mean(np.square(exact)))
    assert 0 < error < rtol


@pytest.mark.slow
@of_any
def test_logits_in_single_precision_are_a_way_out_of_instability(name):
    params = parameters(name)
    graphdef = graphdef_of(model_config(name, compute_dtype="bfloat16"))
    stable = graphdef_of(model_config(name, compute_dtype="bfloat16", embed_compute_dtype="float32"))
    h_BTD = merge_model(graphdef, params).hidden(
        rows(), jnp.arange(T)[None] + jnp.zeros((2, 1), jnp.int32), jnp.ones_like(rows())
    )
    assert h_BTD.dtype == jnp.bfloat16
    exact = h_BTD.astype(jnp.float32) @ merge_model(graphdef, params).unembedding(h_BTD)[1]
    np.testing.assert_allclose(unembed(merge_model(stable, params), h_BTD), exact, rtol=1e-5, atol=1e-5)
    assert not np.allclose(unembed(merge_model(graphdef, params), h_BTD), exact, rtol=1e-5, atol=1e-5)


def test_qk_norm_makes_scores_blind_to_the_size_of_queries():
    params = parameters("llama", qk_norm=True)
    larger = jax.tree_util.tree_map_with_path(lambda path, leaf: 7 * leaf if path[-1].key == "wq" else leaf, params)
    call = forward("llama", qk_norm=True)
    np.testing.assert_allclose(call(larger, rows()), call(params, rows()), rtol=1e-3, atol=1e-3)  # but for norm_eps


@pytest.mark.cases(1)
def test_the_first_loss_is_that_of_guessing(name):
    model = make_model(model_config(name), key=jax.random.key(0))
    batch = tiny.packed_batch(1)
    total, _ = summed_loss(model, batch, None, {})
    np.testing.assert_allclose(total / batch.weights.sum(), np.log(tiny.VOCAB), rtol=0.01)
