"""cuDNN's attention against plain attention, on a GPU: nothing else can run it."""

import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = """
import jax, numpy as np, jax.numpy as jnp
from jaxscale.kernels.attention import cudnn, xla

def run(attend, dtype, q, k, v, ids, dout):
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q.astype(dtype), k.astype(dtype), v.astype(dtype))
    return [np.asarray(x.astype(jnp.float32)) for x in (out, *pull(dout.astype(dtype)))]

random = np.random.default_rng(0)
draw = lambda n: jnp.asarray(random.standard_normal((2, 255, n, 128)), jnp.bfloat16).astype(jnp.float32)
ids = jnp.asarray(np.sort(random.integers(0, 4, (2, 255)), axis=1), jnp.int32)
inputs = (draw(4), draw(2), draw(2), ids, draw(4))
for window in (None, 100):
    exact = run(xla.make_attend(window=window), jnp.float32, *inputs)
    plain = run(xla.make_attend(window=window), jnp.bfloat16, *inputs)
    found = run(cudnn.make_masked_attend(window=window), jnp.bfloat16, *inputs)
    for name, right, near, got in zip(("out", "dq", "dk", "dv"), exact, plain, found):
        error = lambda x: float(np.sqrt(np.mean((x - right) ** 2)))
        assert np.isfinite(got).all() and error(got) < 1.5 * error(near), (window, name, error(got), error(near))
"""


def test_cudnn_attention_is_as_near_to_float32_as_plain_attention():
    if not any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is no NVIDIA GPU on this machine")
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
