"""On CPUs, order_on_cpu adds a data dependency and changes no bit; for other platforms it adds nothing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels.collectives import order_on_cpu

X = jnp.array([[jnp.nan, 1.0], [-0.0, jnp.inf]])
W = jnp.array([[-0.0, 3.0, 1e-40], [jnp.inf, -2.0, 5.0]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", [0.5, jnp.nan, jnp.inf])
def test_values_and_gradients_keep_their_bits(first, dtype):
    x, w = X.at[0, 0].set(first).astype(dtype), W.astype(dtype)
    (x_out, w_out), vjp = jax.vjp(jax.jit(order_on_cpu), x, w)
    dx, dw = vjp((w[:, :2], x[:, [0, 1, 1]]))
    for found, expected in ((x_out, x), (w_out, w), (dx, w[:, :2]), (dw, x[:, [0, 1, 1]])):
        np.testing.assert_array_equal(np.asarray(found).view("uint8"), np.asarray(expected).view("uint8"))


def test_the_weight_reads_the_other_array_in_the_program_for_cpus_only():
    wait = jax.jit(lambda x, w: order_on_cpu(x, w)[1])
    program = wait.lower(X, W).compile().as_text() or ""
    entry = program[program.index("ENTRY") :]
    assert re.search(r"%x\S*[,)]", entry[entry.index("parameter") :]), "XLA removed the dependency"
    assert "select" in wait.trace(X, W).lower(lowering_platforms=("cpu",)).as_text()
    assert "select" not in wait.trace(X, W).lower(lowering_platforms=("tpu",)).as_text()
