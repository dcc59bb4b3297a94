"""Who is sent where, and that all come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.kernels.config import RouterConfig
from jaxscale.kernels.matmul.routing import (
    combine,
    dispatch,
    gather_scores,
    route,
    router_logits,
    sort_rows,
    sort_weights,
    stable_order,
)

TOKENS, EXPERTS, CHOSEN = 20, 5, 2


def chosen(form, logits, bias=None):
    return jax.device_get(route(form, jnp.asarray(logits, jnp.float32), bias))


def test_ties_go_to_the_lower_expert():
    routes = chosen(RouterConfig(chosen=2), [[0.0, 1.0, 1.0, 1.0], [0.0] * 4])
    np.testing.assert_array_equal(routes.expert_nk, [[1, 2], [0, 1]])


def test_weights_are_shares_normalised_or_not_and_scaled():
    shares = np.array([[0.5, 0.25, 0.125, 0.125]])
    plain = chosen(RouterConfig(chosen=2, normalised=False, scale=2.0), np.log(shares))
    np.testing.assert_allclose(plain.weight_nk, [[1.0, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(chosen(RouterConfig(chosen=2), np.log(shares)).weight_nk, [[2 / 3, 1 / 3]], rtol=1e-6)


def test_a_bias_changes_the_choice_and_no_weight():
    form = RouterConfig(chosen=1, score="sigmoid", normalised=False)
    routes = chosen(form, [[2.0, 0.0]], jnp.asarray([0.0, 1.0]))
    np.testing.assert_array_equal(routes.expert_nk, [[1]])
    np.testing.assert_allclose(routes.weight_nk, [[0.5]])


@pytest.mark.parametrize(("best", "experts"), [(1, [[0, 1]]), (2, [[2, 3]])])
def test_experts_come_from_the_best_groups(best, experts):
    # The first group has the best expert, the second the best two.
    form = RouterConfig(chosen=2, score="sigmoid", groups=2, groups_chosen=1, group_best=best)
    np.testing.assert_array_equal(chosen(form, [[3.0, -9.0, 2.0, 1.0]]).expert_nk, experts)


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "chosen", "as_bits"), [(4, 2, False), (4, 2, True), (9, 3, True), (3, 1, False)])
def test_sorting_is_undone_and_gradients_are_those_of_gathers(experts, chosen, as_bits):
    rng = np.random.default_rng(0)
    expert_nk = jnp.asarray(rng.permuted(np.tile(np.arange(experts), (20, 1)), axis=1)[:, :chosen], jnp.int32)
    rows = sort_rows(expert_nk, experts)
    flat_R = expert_nk.reshape(-1)
    assert (jnp.diff(flat_R[rows.order_R]) >= 0).all()
    np.testing.assert_array_equal(rows.order_R[rows.inverse_R], np.arange(20 * chosen))
    np.testing.assert_array_equal(rows.counts_E, np.bincount(flat_R, minlength=experts))
    x_nD, weight_nk = jnp.asarray(rng.normal(size=(20, 5))), jnp.asarray(rng.normal(size=(20, chosen)))

    def ours(x_nD, weight_nk):
        x_RD = dispatch(chosen, x_nD, rows, as_bits)
        return combine(chosen, x_RD**2 * sort_weights(weight_nk, rows)[:, None], rows, as_bits)

    def plain(x_nD, weight_nk):
        return x_nD**2 * jnp.sum(weight_nk, axis=1, keepdims=True)

    dy_nD = jnp.asarray(rng.normal(size=(20, 5)))
    got, right = (tiny.values_and_gradients(f, dy_nD, x_nD, weight_nk) for f in (ours, plain))
    np.testing.assert_allclose(got[0], right[0], rtol=1e-5, atol=1e-6)
    for one, other in zip(got, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


choices = st.permutations(range(EXPERTS + 2)).map(lambda order: [min(e, EXPERTS) for e in order[:CHOSEN]])


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(experts=st.lists(choices, min_size=TOKENS, max_size=TOKENS), as_bits=st.booleans())
def test_rows_go_to_their_experts_and_back_by_inverse_permutations(experts, as_bits):
    """Also choices without room, which have the number past the last expert and lie behind all others."""
    rows = sort_rows(jnp.asarray(experts, jnp.int32), EXPERTS)
    np.testing.assert_array_equal(rows.order_R[rows.inverse_R], np.arange(TOKENS * CHOSEN))
    np.testing.assert_array_equal(rows.inverse_R[rows.order_R], np.arange(TOKENS * CHOSEN))
    np.testing.assert_array_equal(rows.order_R, np.argsort(np.ravel(experts), kind="stable"))
    np.testing.assert_array_equal(rows.counts_E, np.bincount(np.ravel(experts), minlength=EXPERTS + 1)[:EXPERTS])
    x_nD = jnp.arange(3.0 * TOKENS).reshape(TOKENS, 3)
    there = dispatch(CHOSEN, x_nD, rows, as_bits)
    np.testing.assert_array_equal(there, np.repeat(x_nD, CHOSEN, axis=0)[rows.order_R])
    np.testing.assert_array_equal(combine(CHOSEN, there, rows, as_bits), CHOSEN * x_nD)


def test_gradients_of_weights_are_those_of_taking_them_out():
    rng = np.random.default_rng(0)
    score_nE, dweight_nk = jnp.asarray(rng.normal(size=(30, 7))), jnp.asarray(rng.normal(size=(30, 3)))
    expert_nk = jax.lax.top_k(score_nE, 3)[1]
    forms = (lambda s: gather_scores(s, expert_nk), lambda s: jnp.take_along_axis(s, expert_nk, axis=1))
    for got, right in zip(*(tiny.values_and_gradients(f, dweight_nk, score_nE) for f in forms), strict=True):
        np.testing.assert_array_equal(got, right)


@pytest.mark.slow
def test_a_token_that_is_no_number_changes_no_other():
    rng = np.random.default_rng(0)
    x_nD, w_DE, dweight_nk = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((16, 8), (8, 4), (16, 2)))

    def run(x_nD):
        weights = lambda x_nD: route(RouterConfig(chosen=2), router_logits(x_nD, w_DE)).weight_nk
        routes = route(RouterConfig(chosen=2), router_logits(x_nD, w_DE))
        return routes.expert_nk, routes.weight_nk, jax.vjp(weights, x_nD)[1](dweight_nk)[0]

    usual = run(x_nD)
    for bad in (jnp.nan, jnp.inf):
        spoiled = run(x_nD.at[3, 5].set(bad))
        for got, right in zip(spoiled, usual, strict=True):
            np.testing.assert_array_equal(np.delete(got, 3, axis=0), np.delete(right, 3, axis=0))
        assert ((spoiled[0][3] >= 0) & (spoiled[0][3] < 4)).all() and not np.isfinite(spoiled[1][3]).all()


@pytest.mark.parametrize("end", [7, 2**30])  # the second: too large for a number and its place in one int32
def test_numbers_are_sorted_and_equals_stay_in_their_order(end):
    number_R = jnp.asarray(np.random.default_rng(0).choice([0, 3, 6, end - 1], 500), jnp.int32)
    np.testing.assert_array_equal(stable_order(number_R, end), np.argsort(number_R, kind="stable"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("tokens", [64, 61])  # the second is no whole number of parts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_router_are_those_of_one_product(tokens, dtype):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    x_nD, w_DE, dlogit_nE = draw(tokens, 24).astype(dtype), draw(24, 5), draw(tokens, 5)
    plain = lambda x_nD, w_DE: jnp.matmul(x_nD.astype(jnp.float32), w_DE, precision="highest")
    got, right = (tiny.values_and_gradients(f, dlogit_nE, x_nD, w_DE) for f in (router_logits, plain))
    for one, other in zip(got, right, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-5, atol=1e-5)
