"""Cross-entropy in chunks promises the values and gradients of the formula on whole logits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from twins import twins

from jaxscale.kernels.vocabulary import LossSettings, merge_chunks, split_chunks, summed_cross_entropy, token_nats

B, T, D, V = 3, 10, 8, 33


def make_inputs(dtype=jnp.float32):
    random = np.random.default_rng(0)
    h_BTD = jnp.asarray(random.standard_normal((B, T, D)), dtype)
    w_DV = jnp.asarray(random.standard_normal((D, V)), jnp.float32)
    targets_BT = jnp.asarray(random.integers(0, V, (B, T)), jnp.int32)
    return h_BTD, w_DV, targets_BT, jnp.asarray(random.integers(0, 3, (B, T)), jnp.float32)


def whole_nats(h_BTD, w_DV, targets_BT, softcap):
    """(cross-entropy, logsumexp) from all logits at once."""
    logits_BTV = jnp.einsum("BTD,DV->BTV", h_BTD.astype(jnp.float32), w_DV.astype(h_BTD.dtype).astype(jnp.float32))
    if softcap is not None:
        logits_BTV = softcap * jnp.tanh(logits_BTV / softcap)
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    return lse_BT - jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0], lse_BT


def whole_total(h_BTD, w_DV, targets_BT, weights_BT, z_loss, softcap):
    nats_BT, lse_BT = whole_nats(h_BTD, w_DV, targets_BT, softcap)
    return jnp.sum(weights_BT * nats_BT) + z_loss * jnp.sum(weights_BT * lse_BT**2)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("z_loss", "softcap"), twins([(0.0, None), (0.1, None), (0.0, 3.0), (0.1, 3.0)], (0.0, None), (0.1, 3.0))
)
@pytest.mark.parametrize("chunk_tokens", [1, 9, 12, 1000])
def test_chunked_loss_and_gradients_equal_those_of_whole_logits(chunk_tokens, z_loss, softcap):
    h, w, targets, weights = make_inputs()

    def in_chunks(h, w):
        sums = summed_cross_entropy(
            h, w, targets, weights, LossSettings(chunk_tokens=chunk_tokens, z_loss=z_loss, softcap=softcap)
        )
        return 0.25 * sums.total

    def at_once(h, w):
        return 0.25 * whole_total(h, w, targets, weights, z_loss, softcap)

    value, gradients = jax.jit(jax.value_and_grad(in_chunks, argnums=(0, 1)))(h, w)
    exact_value, exact_gradients = jax.jit(jax.value_and_grad(at_once, argnums=(0, 1)))(h, w)
    np.testing.assert_allclose(value, exact_value, rtol=1e-6)  # float32 sums taken in another order, here and below
    np.testing.assert_allclose(jax.jit(in_chunks)(h, w), exact_value, rtol=1e-6)  # without gradients: another path
    for got, exact in zip(gradients, exact_gradients):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_sums_are_the_parts_of_the_total():
    h, w, targets, weights = make_inputs()
    nats_BT, lse_BT = whole_nats(h, w, targets, None)

    def total_and_sums(h):
        sums = summed_cross_entropy(h, w, targets, weights, LossSettings(chunk_tokens=9, z_loss=0.5))
        return sums.total, sums

    for sums in (jax.jit(total_and_sums)(h)[1], jax.jit(jax.grad(total_and_sums, has_aux=True))(h)[1]):
        np.testing.assert_allclose(sums.nats, jnp.sum(nats_BT * weights), rtol=1e-6)
        np.testing.assert_allclose(sums.z, jnp.sum(lse_BT**2 * weights), rtol=1e-6)
        np.testing.assert_allclose(sums.total, sums.nats + 0.5 * sums.z, rtol=1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_token_nats_equal_those_of_whole_logits(softcap):
    h, w, targets, _ = make_inputs()
    got = token_nats(h, w, targets, LossSettings(chunk_tokens=9, softcap=softcap))
    for one, exact in zip(got, whole_nats(h, w, targets, softcap)):
        assert one.shape == (B, T) and one.dtype == jnp.float32
        np.testing.assert_allclose(one, exact, rtol=1e-5, atol=1e-6)


def test_bfloat16_activations_give_a_float32_loss_and_weight_gradient():
    h, w, targets, weights = make_inputs(jnp.bfloat16)
    loss = lambda h, w: summed_cross_entropy(h, w, targets, weights, LossSettings(chunk_tokens=9, z_loss=0.1)).total
    value, (dh, dw) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(h, w)
    rounded = w.astype(jnp.bfloat16).astype(jnp.float32)
    exact = lambda h, w: whole_total(h, w, targets, weights, 0.1, None)
    of_exact = jax.jit(jax.value_and_grad(exact, argnums=(0, 1)))
    exact_value, (exact_dh, exact_dw) = of_exact(h.astype(jnp.float32), rounded)
    assert (value.dtype, dh.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(value, exact_value, rtol=1e-5)  # logits are float32 sums of the same products
    for got, right in ((dh, exact_dh), (dw, exact_dw)):  # the gradients of the logits are rounded to 8 bits
        np.testing.assert_allclose(got.astype(jnp.float32), right, rtol=2**-7, atol=2**-8 * np.abs(right).max())


def test_tokens_of_weight_zero_change_nothing():
    h, w, targets, weights = make_inputs()
    weights = weights.at[:, 4:].set(0.0)
    loss = lambda h, w, targets: (
        summed_cross_entropy(h, w, targets, weights, LossSettings(chunk_tokens=9, z_loss=0.1)).total
    )
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    value, (dh, dw) = step(h, w, targets)
    moved = step(h.at[:, 4:].add(1.0), w, targets.at[:, 4:].set(0))
    np.testing.assert_array_equal(value, moved[0])
    np.testing.assert_array_equal(dw, moved[1][1])
    np.testing.assert_array_equal(dh[:, 4:], 0.0)


@pytest.mark.parametrize("chunk_tokens", [1, 9, 12, 1000])
def test_chunks_hold_at_most_the_tokens_asked_for_and_join_again(chunk_tokens):
    h = make_inputs()[0]
    pieces = split_chunks(h, chunk_tokens)
    assert pieces.shape[1] * pieces.shape[2] <= max(chunk_tokens, B)
    np.testing.assert_array_equal(merge_chunks(pieces, T), h)


def test_no_array_of_all_logits_exists():
    h, w, targets, weights = (jnp.tile(array, (1, 8) + (1,) * (array.ndim - 2)) for array in make_inputs())
    w = make_inputs()[1]
    loss = lambda h, w: summed_cross_entropy(h, w, targets, weights, LossSettings(chunk_tokens=30)).total
    text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(h, w).compile().as_text()
    sizes = [np.prod([int(size) for size in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) < h.shape[0] * h.shape[1] * V


def test_rows_of_a_sharded_batch_stay_on_their_devices():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    random = np.random.default_rng(0)
    h = jnp.asarray(random.standard_normal((8, 16, D)), jnp.float32)
    targets = jnp.asarray(random.integers(0, V, (8, 16)), jnp.int32)
    w = make_inputs()[1]

    def gradients(h, w, targets):
        loss = lambda h, w: summed_cross_entropy(h, w, targets, jnp.ones((8, 16)), LossSettings(chunk_tokens=32)).total
        return jax.value_and_grad(loss, argnums=(0, 1))(h, w)

    whole = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(gradients, in_shardings=(rows, whole, rows), out_shardings=(whole, (rows, whole)))
    text = step.lower(h, w, targets).compile().as_text()
    assert "all-reduce" in text and not re.search(r"all-gather|all-to-all|collective-permute", text)
    for got, single in zip(jax.tree.leaves(step(h, w, targets)), jax.tree.leaves(jax.jit(gradients)(h, w, targets))):
        np.testing.assert_allclose(got, single, rtol=1e-5, atol=1e-5)  # float32 sums taken in another order


def test_float16_gradients_are_not_lost_where_the_model_is_nearly_sure():
    """Gradients of about 1e-6 lie among float16's subnormals; the loss scale that follows could not bring them back."""
    h_BTD, _, targets_BT, weights_BT = make_inputs()
    D = h_BTD.shape[-1]
    w_DV = 12.0 * jnp.eye(D, dtype=jnp.float32)
    h_BTD = 1.5 * jax.nn.one_hot(targets_BT % D, D) + 0.01 * h_BTD
    targets_BT = targets_BT % D

    def grad_of(dtype):
        total = lambda h: (
            summed_cross_entropy(h, w_DV, targets_BT, weights_BT, LossSettings(chunk_tokens=8)).total * 2.0**12
        )
        return np.asarray(jax.jit(jax.grad(total))(h_BTD.astype(dtype)), np.float64) / 2.0**12

    exact, half = grad_of(jnp.float32), grad_of(jnp.float16)
    small = np.abs(exact).max()
    assert 1e-7 < small < 1e-6
    assert np.linalg.norm(half - exact) < 6e-3 * np.linalg.norm(exact)  # inputs and outputs rounded to 11 bits
