"""A batch in parts gives what the whole batch gives, however unevenly the padding lies.

B batch  T position
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.core.gradients import Reduction, accumulate, split_microbatches

PARAMS = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(tiny.VOCAB, 5)), jnp.float32)}


def summed_loss(params, batch, key):
    """A sum over real tokens of a squared error, with an auxiliary part that has a weight in what is minimised."""
    error_BT = jnp.sum(params["w"][batch.tokens] * jnp.cos(params["w"][batch.targets]), axis=-1) - batch.positions
    loss, aux = jnp.sum(jnp.square(error_BT) * batch.weights), jnp.sum(jnp.abs(error_BT) * batch.weights)
    return loss + 0.5 * aux, {"loss": loss, "aux": aux}


@functools.cache
def compiled(num_microbatches, loss_fn, **more):
    settings = dict(num_microbatches=num_microbatches, **more)
    return jax.jit(lambda params, batch: accumulate(loss_fn, params, batch, jax.random.key(0), **settings))


def run(num_microbatches, batch, loss_fn=summed_loss, params=PARAMS, **more):
    return compiled(num_microbatches, loss_fn, **more)(params, jax.tree.map(jnp.asarray, batch))


def uneven_batch():
    """A batch whose even rows are nearly all padding, so that a mean of means would be wrong."""
    batch = tiny.packed_batch(7)
    weights_BT = batch.weights.copy()
    weights_BT[::2, 1:] = 0
    return batch._replace(weights=weights_BT)


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_microbatches", [2, 4, 16])
def test_parts_equal_the_whole(num_microbatches):
    whole, parts = run(1, uneven_batch()), run(num_microbatches, uneven_batch())
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # float32 sums taken in another order


def test_the_gradient_is_that_of_the_mean_over_real_tokens():
    batch = uneven_batch()
    means, grads = run(4, batch)
    mean = lambda params: summed_loss(params, batch, None)[0] / batch.weights.sum()
    np.testing.assert_allclose(grads["w"], jax.jit(jax.grad(mean))(PARAMS)["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(means["objective"], means["loss"] + 0.5 * means["aux"], rtol=1e-6)
    assert means["real_tokens"] == batch.weights.sum()


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_scale_leaves_no_trace(num_microbatches):
    plain, scaled = run(num_microbatches, uneven_batch()), run(num_microbatches, uneven_batch(), scale=2.0**15)
    tiny.assert_same_bits(plain, scaled)  # a power of two changes exponents only


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_batch_of_padding_has_no_gradient(num_microbatches):
    batch = tiny.packed_batch(7)._replace(weights=np.zeros((tiny.ROWS, tiny.SEQ_LEN), np.float32))
    means, grads = run(num_microbatches, batch)
    assert means["loss"] == 0 and not grads["w"].any()


def test_sums_are_float32_whatever_the_parameters_are():
    half = {"w": PARAMS["w"].astype(jnp.bfloat16)}
    _, grads = run(4, uneven_batch(), params=half)
    assert grads["w"].dtype == jnp.float32


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_each_row_has_a_key_of_its_own_whatever_part_it_is_in(num_microbatches):
    def noisy(params, batch, keys_B):
        noise_B1 = jax.vmap(jax.random.uniform)(keys_B)[:, None]
        sums = {name: jnp.sum(noise_B1**power * batch.weights) for name, power in (("noise", 1), ("square", 2))}
        return jnp.sum(noise_B1 * batch.positions * jnp.sum(params["w"])), sums

    batch = tiny.packed_batch(7)._replace(weights=np.ones((tiny.ROWS, tiny.SEQ_LEN), np.float32))
    (means, grads), (whole_means, whole_grads) = run(num_microbatches, batch, noisy), run(1, batch, noisy)
    assert means["square"] > means["noise"] ** 2 + 1e-4  # the noise has a variance over the rows
    np.testing.assert_allclose(means["noise"], whole_means["noise"], rtol=1e-6)
    np.testing.assert_allclose(grads["w"], whole_grads["w"], rtol=1e-5)


def test_row_i_goes_to_part_i_mod_m():
    rows_BT = np.arange(12)[:, None] * 10 + np.arange(3)[None]
    parts = split_microbatches(rows_BT, 4)
    assert parts.shape == (4, 3, 3)
    for row in range(12):
        np.testing.assert_array_equal(parts[row % 4, row // 4], rows_BT[row])


def test_gradients_are_reduced_in_each_part_and_all_sums_at_the_end():
    twice = lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree)
    means, grads = run(4, uneven_batch())
    # sums are divided by the real tokens, themselves a sum that is doubled here; gradients are not doubled with them
    for reduction, factor in (
        (Reduction(microbatch_grads=twice), 2),
        (Reduction(total_grads=twice), 2),
        (Reduction(scalars=twice), 0.5),
    ):
        reduced_means, reduced_grads = run(4, uneven_batch(), reduction=reduction)
        np.testing.assert_allclose(reduced_grads["w"], factor * grads["w"], rtol=1e-6)
        np.testing.assert_allclose(reduced_means["loss"], means["loss"], rtol=1e-6)
