"""Products by group, against a plain loop over groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops import grouped

FORMS = {
    "loops": grouped.looped,
    "kernels": functools.partial(grouped.grouped_project, grouped.kernel_products(interpret=True)),
}
ROWS, CONTRACTED, WIDTH = 250, 128, 128  # no multiple of a tile
COUNTS = {
    "some of each": [70, 3, 100, 77],
    "none of some": [0, 200, 0, 50],
    "all of one": [0, 0, 250, 0],
    "a whole tile": [128, 0, 122, 0],
    "one of each of many": [1] * 250,
}


def plain(x_RC, w_ECO, counts):
    groups_R = np.repeat(np.arange(len(counts)), counts)
    return jnp.stack([x_C @ w_ECO[group] for x_C, group in zip(x_RC, groups_R)])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_a_plain_loop(form, counts):
    keys = jax.random.split(jax.random.key(0), 3)
    x_RC = jax.random.normal(keys[0], (ROWS, CONTRACTED))
    w_ECO = jax.random.normal(keys[1], (len(counts), CONTRACTED, WIDTH))
    dy_RO = jax.random.normal(keys[2], (ROWS, WIDTH))
    right, pull = jax.vjp(lambda x, w: plain(x, w, counts), x_RC, w_ECO)
    got, pull_got = jax.vjp(lambda x, w: FORMS[form](x, w, jnp.asarray(counts)), x_RC, w_ECO)
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-4)
    for one, other in zip(pull_got(dy_RO), pull(dy_RO)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_lie_turned_in_memory_give_the_same(form):
    keys = jax.random.split(jax.random.key(0), 3)
    counts_E = jnp.asarray([100, 0, 90])
    x_RC = jax.random.normal(keys[0], (ROWS, CONTRACTED))
    w_ECO = jax.random.normal(keys[1], (3, CONTRACTED, 2 * WIDTH))
    dy_RO = jnp.arange(ROWS)[:, None] < 190
    dy_RO = jnp.where(dy_RO, jax.random.normal(keys[2], (ROWS, 2 * WIDTH)), 0.0)
    results = []
    for turned in (False, True):
        y_RO, pull = jax.vjp(functools.partial(FORMS[form], counts_E=counts_E, turned=turned), x_RC, w_ECO)
        results.append([y_RO[:190], *(g[:190] for g in pull(dy_RO))])
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_rows_behind_the_last_group_touch_no_gradient(form):
    counts_E = jnp.asarray([100, 0, 28])
    rows_R1 = jnp.arange(ROWS)[:, None] < 128
    x_RC = jnp.where(rows_R1, 1.0, jnp.inf) * jnp.ones((ROWS, CONTRACTED))
    _, pull = jax.vjp(lambda w: FORMS[form](x_RC, w, counts_E), jnp.ones((3, CONTRACTED, WIDTH)))
    (dw_ECO,) = pull(jnp.where(rows_R1, 1.0, jnp.nan) * jnp.ones((ROWS, WIDTH)))
    np.testing.assert_array_equal(dw_ECO[:, 0, 0], [100, 0, 28])


def test_visits_are_of_one_group_each_and_leave_no_row_out():
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = rng.multinomial(ROWS, rng.dirichlet(np.full(5, 0.3)))
        size = int(rng.choice([8, 32, 128]))
        visits = jax.device_get(grouped.plan_visits(jnp.asarray(counts), ROWS, size))
        ends = np.cumsum(counts)
        met = np.full(ROWS, -1)
        for group, begin in list(zip(visits.group_V, visits.begin_V))[: visits.total]:
            place = np.arange(begin, min(begin + size, ends[group]))
            assert (met[place] == -1).all() and begin >= ends[group] - counts[group]
            met[place] = group
        np.testing.assert_array_equal(met, np.repeat(np.arange(5), counts))


def test_a_bfloat16_product_is_summed_in_float32_and_its_gradient_of_weights_is_in_their_dtype():
    x_RC, w_ECO = jnp.ones((64, 512), jnp.bfloat16), jnp.full((2, 512, 8), 0.01, jnp.float32)
    y_RO, pull = jax.vjp(lambda w: grouped.looped(x_RC, w, jnp.asarray([40, 24])), w_ECO)
    assert y_RO.dtype == jnp.bfloat16 and pull(y_RO)[0].dtype == jnp.float32
