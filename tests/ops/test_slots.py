"""Gated experts in slots, against a plain loop over rows: values and every gradient, whatever the routing.

R rows  E experts  D embed  F width of an expert
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import settings
from hypothesis import strategies as st

from jaxscale.core.models.moe import run_experts
from jaxscale.kernels.activation import swiglu
from jaxscale.kernels.matmul import slots

ROWS, EMBED, WIDTH = 330, 8, 12  # no multiple of a tile: of 4 experts each has 96 slots, and visits are of 32 rows
COUNTS = {
    "some of each": [70, 3, 140, 117],
    "none of some": [0, 280, 0, 50],
    "all of one": [0, 0, 330, 0],
    "one of each": [1, 1, 1, 1],
    "as many as slots": [96, 96, 96, 42],
    "one more": [97, 97, 97, 39],
    "few rows of each of many": [1] * 329 + [0],
    "a batched product": [40, 0, 1, 1, 120, 2, 0, 9] + [10] * 8 + [7],
}
run = functools.partial(run_experts, slots.project_expert, functools.partial(slots.weighted_activation_f32, swiglu))
laid, laid_on_gpu = (functools.partial(slots.run_in_slots, sizes, run) for sizes in (slots.ON_CPU, slots.ON_GPU))


def plain(weights, x_RD, weight_R, counts_E):
    """Rows one by one, each with the matrices of its expert; zeros behind them."""
    row_R, end_E = jnp.arange(ROWS), jnp.cumsum(counts_E)
    expert_R = jnp.minimum(jnp.sum(row_R[:, None] >= end_E[None], axis=1), len(end_E) - 1)
    gate, up, down = (w[expert_R] for w in weights)
    product = functools.partial(jnp.einsum, "RC,RCO->RO")
    y_RD = product(jax.nn.silu(product(x_RD, gate)) * product(x_RD, up) * weight_R[:, None], down)
    return jnp.where(row_R[:, None] < end_E[-1], y_RD, 0.0)


def given(experts):
    keys = iter(jax.random.split(jax.random.key(0), 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / 3
    weights = normal(experts, EMBED, WIDTH), normal(experts, EMBED, WIDTH), normal(experts, WIDTH, EMBED)
    return weights, normal(ROWS, EMBED), jax.random.uniform(next(keys), (ROWS,)), normal(ROWS, EMBED)


@functools.partial(jax.jit, static_argnums=0)
def both(f, weights, x_RD, weight_R, dy_RD, counts_E):
    """(values, gradients of everything), compiled once for all counts of so many experts."""
    return tiny.values_and_gradients(lambda *args: f(*args, counts_E), dy_RD, weights, x_RD, weight_R)


@pytest.mark.cases(2)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_values_and_gradients_are_those_of_a_plain_loop(counts):
    counts_E = jnp.asarray(counts, jnp.int32)
    with jax.default_matmul_precision("highest"):
        *found, right = (both(f, *given(len(counts)), counts_E) for f in (laid, laid_on_gpu, plain))
        for got in found:
            for one, other in zip(got, right, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * max(np.abs(other).max(), 1))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_no_number_stays_with_its_expert_and_behind_the_last_row_anything_may_lie(bad):
    weights, x_RD, weight_R, dy_RD = given(4)
    counts_E = jnp.asarray([60, 0, 130, 50], jnp.int32)
    right = both(laid, weights, x_RD, weight_R, dy_RD, counts_E)
    spoiled = (slice(60, 190), slice(240, ROWS))  # all of expert 2; no expert's
    for rows in spoiled:
        x_RD, dy_RD, weight_R = x_RD.at[rows].set(bad), dy_RD.at[rows].set(bad), weight_R.at[rows].set(bad)
    got = both(laid, weights, x_RD, weight_R, dy_RD, counts_E)
    for one, other in zip((got[0], got[4], got[5]), (right[0], right[4], right[5]), strict=True):
        np.testing.assert_array_equal(one[:60], other[:60])
        np.testing.assert_array_equal(one[190:], other[190:])
        assert not np.isfinite(one[60:190]).all()
    for one, other in zip(got[1:4], right[1:4], strict=True):
        np.testing.assert_array_equal(np.delete(one, 2, axis=0), np.delete(other, 2, axis=0))
        assert not np.isfinite(one[2]).any()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@hypothesis.given(
    counts=st.lists(st.integers(0, 130), min_size=5, max_size=5).filter(lambda counts: sum(counts) <= ROWS),
    spare=st.sampled_from([0, 16, 64]),
    max_chunk=st.sampled_from([8, 32, 128]),
)
def test_overflow_chunks_have_the_rows_of_one_expert_beyond_its_slots(counts, spare, max_chunk):
    layout = slots.SlotLayout(ROWS, 5, slots.SlotSizes(lambda average: spare, max_chunk))

    def mark(expert, fold_chunks, marks_R):
        add = lambda span, marks_R: span.write(marks_R, span.read(marks_R, jnp.int32) + 1 + expert)
        return fold_chunks(add, marks_R)

    marks_R = layout.fold_overflow(mark, jnp.asarray(counts), jnp.zeros(ROWS, jnp.uint32))
    expected = [np.where(np.arange(count) < layout.slots, 0, 1 + expert) for expert, count in enumerate(counts)]
    np.testing.assert_array_equal(marks_R, np.pad(np.concatenate(expected), (0, ROWS - sum(counts))))


@pytest.mark.slow
def test_a_bfloat16_product_is_summed_in_float32_and_its_gradient_of_weights_is_in_their_dtype():
    weights, x_RD, weight_R, dy_RD = given(4)
    x_RD, counts_E = x_RD.astype(jnp.bfloat16), jnp.asarray([150, 0, 60, 40], jnp.int32)
    dy_RD = dy_RD.astype(x_RD.dtype)
    y_RD, *dweights, dx_RD, dweight_R = both(laid, weights, x_RD, weight_R, dy_RD, counts_E)
    assert y_RD.dtype == dx_RD.dtype == jnp.bfloat16 and dweight_R.dtype == jnp.float32
    assert {w.dtype for w in dweights} == {jnp.dtype("float32")}
    right = plain(weights, x_RD.astype(jnp.float32), weight_R, counts_E)
    np.testing.assert_allclose(y_RD.astype(jnp.float32), right, atol=1e-2 * np.abs(right).max())
