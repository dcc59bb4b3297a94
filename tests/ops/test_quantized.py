"""Products in 8 bits are near the exact ones, forward and backward, and train."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from no_packages import no_distribution

from jaxscale.build import make_program
from jaxscale.kernels.matmul.project import einsum_project, quantized_project
from jaxscale.kernels.matmul.quantized import RECIPES
from jaxscale.program.budget import resolve_budget

SHAPES = {  # einsum spec: (x, w); sums over 64 entries
    "BTD,DNH->BTNH": ((2, 8, 64), (64, 4, 16)),
    "BTNH,NHD->BTD": ((2, 8, 4, 16), (4, 16, 32)),
    "BTD,DF->BTF": ((2, 8, 64), (64, 32)),
}
# The error of a sum of products with rounded operands, against its size. int8: the step is 1/127 of the largest of 64
# normal numbers (2.5), so 0.29 * 2.5 / 127 = 0.6% an operand. fp8: 3 (forward) and 2 bits (gradients) behind the point.
EXPECTED = {"int8": (0.009, 0.009, 0.0), "fp8": (0.036, 0.056, 0.050)}


def random(shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def products(project, spec, dtype=jnp.float32):
    """(y, dx, dw) of the same random x, w and dy; one row of x and one of dy are zero, as in padding."""
    x_shape, w_shape = SHAPES[spec]
    x, w = random(x_shape, 1, dtype).at[0, 3].set(0), random(w_shape, 2)

    @jax.jit
    def both(x, w):
        y, back = jax.vjp(functools.partial(project, spec), x, w)
        return y, *back(random(y.shape, 3, y.dtype).at[0, 5].set(0))

    return both(x, w)


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", SHAPES)
@pytest.mark.parametrize("name", RECIPES)
def test_each_of_the_three_products_is_as_near_as_its_bits_allow(name, spec, dtype):
    exact = products(einsum_project, spec)
    rough = products(quantized_project(einsum_project, name), spec, dtype)
    assert [array.dtype for array in rough] == [dtype, dtype, jnp.float32]  # the gradient of a weight is in its type
    for right, got, expected in zip(exact, rough, EXPECTED[name], strict=True):
        error = np.sqrt(np.mean(np.square(np.asarray(right - got))) / np.mean(np.square(right)))
        rest = 0.004 if dtype == jnp.bfloat16 else 1e-6
        assert 0.8 * expected <= error <= 1.2 * expected + rest


@pytest.mark.parametrize("name", RECIPES)
def test_the_operands_really_have_eight_bits(name):
    spec = "BTD,DF->BTF"
    x, w = (random(shape, 1) for shape in SHAPES[spec])
    step = jax.value_and_grad(lambda x, w: jnp.sum(quantized_project(einsum_project, name)(spec, x, w)), (0, 1))
    operands = [tuple(v.aval.dtype.itemsize for v in dot.invars) for dot in dots(jax.make_jaxpr(step)(x, w).jaxpr)]
    assert sorted(operands) == {"int8": [(1, 1), (1, 1), (4, 4)], "fp8": [(1, 1)] * 3}[name]


def dots(jaxpr):
    """All dot_general equations of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from dots(inner)


@pytest.mark.parametrize(
    ("overrides", "num_devices"),
    [
        pytest.param({"model.matmul_dtype": "int8", "model.remat": "full"}, 1, marks=pytest.mark.soak),
        pytest.param(
            {"model": tiny.GPT2, "model.matmul_dtype": "fp8", "model.compute_dtype": "bfloat16"},
            1,
            marks=pytest.mark.soak,
        ),
        ({"model.matmul_dtype": "int8", "mesh.fsdp": 4, "mesh.tensor": 2, "model.remat": "minimal"}, 8),
    ],
    ids=["remat", "gpt2", "mesh"],
)
@pytest.mark.soak
def test_a_tiny_run_learns_as_it_does_in_full_precision(overrides, num_devices):
    rough, exact = losses(overrides, num_devices), losses({**overrides, "model.matmul_dtype": "none"}, num_devices)
    assert rough != exact and rough[-1] < 0.9 * rough[0]
    np.testing.assert_allclose(rough, exact, rtol=0.01)


def losses(overrides, num_devices):
    """Of steps that all see the same batch."""
    cfg = tiny.config(overrides)
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[:num_devices])
    state, batch, found = program.init(), tiny.on_mesh(program, tiny.packed_batch(1)), []
    for _ in range(8):
        state, metrics = program.train_step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def test_a_missing_library_is_one_line_with_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.metadata.distribution", no_distribution)
    with pytest.raises(ValueError, match=r"model.matmul_dtype='fp8' needs qwix: pip install 'jaxscale\[quant\]'"):
        quantized_project(einsum_project, "fp8")
    assert quantized_project(einsum_project, "none") is einsum_project
