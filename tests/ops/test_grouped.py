"""GroupedMatmuls by group, against each row with its own copy of its matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.kernels.matmul import grouped

project = functools.partial(grouped.grouped_project, grouped.megablox_matmuls(interpret=True))
ROWS, CONTRACTED, WIDTH = 250, 128, 128  # no multiple of a tile
COUNTS = {
    "some of each": [70, 3, 100, 77],
    "none of some": [0, 200, 0, 50],
    "all of one": [0, 0, 250, 0],
    "a whole tile": [128, 0, 122, 0],
    "one of each of many": [1] * 40 + [42] * 5,
}


def plain(x_RC, w_ECO, counts):
    groups_R = np.repeat(np.arange(len(counts)), counts)
    return jnp.einsum("RC,RCO->RO", x_RC, w_ECO[groups_R])


@pytest.mark.cases(2)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_values_and_gradients_are_those_of_rows_with_their_own_matrices(counts):
    keys = jax.random.split(jax.random.key(0), 3)
    x_RC = jax.random.normal(keys[0], (ROWS, CONTRACTED))
    w_ECO = jax.random.normal(keys[1], (len(counts), CONTRACTED, WIDTH))
    dy_RO = jax.random.normal(keys[2], (ROWS, WIDTH))
    ours, by_row = lambda x, w: project(x, w, jnp.asarray(counts)), lambda x, w: plain(x, w, counts)
    for one, other in zip(*(tiny.values_and_gradients(f, dy_RO, x_RC, w_ECO) for f in (ours, by_row)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_weights_that_lie_turned_in_memory_give_the_same():
    keys = jax.random.split(jax.random.key(0), 3)
    counts_E = jnp.asarray([100, 0, 90])
    x_RC = jax.random.normal(keys[0], (ROWS, CONTRACTED))
    w_ECO = jax.random.normal(keys[1], (3, CONTRACTED, 2 * WIDTH))
    dy_RO = jnp.arange(ROWS)[:, None] < 190
    dy_RO = jnp.where(dy_RO, jax.random.normal(keys[2], (ROWS, 2 * WIDTH)), 0.0)
    results = []
    for transposed in (False, True):
        f = functools.partial(project, counts_E=counts_E, transposed=transposed)
        results.append([array[:190] for array in tiny.values_and_gradients(f, dy_RO, x_RC, w_ECO)])
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_rows_behind_the_last_group_touch_no_gradient():
    counts_E = jnp.asarray([100, 0, 28])
    rows_R1 = jnp.arange(ROWS)[:, None] < 128
    x_RC = jnp.where(rows_R1, 1.0, jnp.inf) * jnp.ones((ROWS, CONTRACTED))
    dy_RO = jnp.where(rows_R1, 1.0, jnp.nan) * jnp.ones((ROWS, WIDTH))
    f = lambda w: project(x_RC, w, counts_E)
    _, dw_ECO = tiny.values_and_gradients(f, dy_RO, jnp.ones((3, CONTRACTED, WIDTH)))
    np.testing.assert_array_equal(dw_ECO[:, 0, 0], [100, 0, 28])
