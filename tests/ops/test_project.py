"""The CPU's form of a projection promises the values and gradients of einsum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels.matmul.project import contracted_axes, cpu_project, einsum_project

CASES = [  # spec, shape of x, shape of w
    ("BTD,DNH->BTNH", (2, 5, 8), (8, 3, 4)),
    ("BTNH,NHD->BTD", (2, 5, 3, 4), (3, 4, 8)),
    ("BTD,DF->BTF", (2, 16, 32), (32, 48)),
    ("BTF,FD->BTD", (2, 16, 48), (48, 32)),
    ("BD,DF->BF", (7, 9), (9, 11)),
    ("BTD,DF->BTF", (1, 1, 8), (8, 1)),
]


def value_and_gradients(project, spec, x, w):
    """(y, dx, dw) for a fixed gradient of y."""

    def run(x, w):
        y, pull = jax.vjp(lambda x, w: project(spec, x, w), x, w)
        return y, *pull(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).astype(y.dtype).reshape(y.shape))

    return jax.jit(run)(x, w)


def make_inputs(x_shape, w_shape, dtype):
    x, w = (np.random.default_rng(0).standard_normal(shape) for shape in (x_shape, w_shape))
    return jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32)


@pytest.mark.cases(2)
@pytest.mark.parametrize("spec, x_shape, w_shape", CASES)
def test_cpu_projection_equals_einsum(spec, x_shape, w_shape):
    x, w = make_inputs(x_shape, w_shape, jnp.float32)
    plain = value_and_gradients(einsum_project, spec, x, w)
    for got, right in zip(value_and_gradients(cpu_project, spec, x, w), plain):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)  # float32 sums taken in another order


@pytest.mark.cases(1)
@pytest.mark.parametrize("spec, x_shape, w_shape", CASES)
def test_cpu_projection_in_bfloat16_rounds_its_results_once(spec, x_shape, w_shape):
    x, w = make_inputs(x_shape, w_shape, jnp.bfloat16)
    rounded = w.astype(jnp.bfloat16).astype(jnp.float32)
    got = value_and_gradients(cpu_project, spec, x, w)
    exact = value_and_gradients(einsum_project, spec, x.astype(jnp.float32), rounded)
    assert [array.dtype for array in got] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for one, right in zip(got[:2], exact[:2]):
        scale = np.abs(right).max()
        np.testing.assert_allclose(one.astype(jnp.float32), right, rtol=2**-7, atol=2**-8 * scale)  # dy is rounded too


@pytest.mark.slow
def test_cpu_projection_keeps_the_weight_gradient_in_float32():
    x, w = make_inputs((2, 64, 8), (8, 8), jnp.bfloat16)
    dy = jnp.ones((2, 64, 8), jnp.bfloat16)
    _, pull = jax.vjp(lambda w: cpu_project("BTD,DF->BTF", x, w), w)
    exact = np.broadcast_to(np.asarray(x, np.float64).sum(axis=(0, 1))[:, None], (8, 8))
    np.testing.assert_allclose(pull(dy)[0], exact, rtol=1e-5)  # bfloat16 would be off by 4e-3


def test_cpu_projection_takes_a_transposed_weight():
    """Tied embeddings. XLA:CPU cannot run the bfloat16 product into which it would fold the gradient's transpose."""
    x, w = make_inputs((2, 16, 32), (48, 32), jnp.bfloat16)
    _, _, dw = value_and_gradients(lambda spec, x, w: cpu_project(spec, x, w.T), "BTD,DF->BTF", x, w)
    _, _, direct = value_and_gradients(cpu_project, "BTD,DF->BTF", x, w.T)
    np.testing.assert_array_equal(dw, direct.T)


def test_only_projections_are_taken():
    assert [contracted_axes(spec) for spec in ("BTD,DNH->BTNH", "BTNH,NHD->BTD", "BTD, DF -> BTF")] == [1, 2, 1]
    for spec in ("BTD,BTF->DF", "BTD,FD->BTF", "BTNH,HND->BTD", "BTD,DNH->BTHN"):
        with pytest.raises(AssertionError, match="not a projection"):
            contracted_axes(spec)
