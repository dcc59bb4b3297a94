"""Kernels are held against their definitions in float32, and one that does something else is found."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from jaxscale.tools.qualify import kernels
from jaxscale.tools.qualify.result import Floors, Machine

CPU = Machine(tuple(jax.devices()), None, Floors(), None, None, 60.0)


@pytest.fixture(scope="module")
def cases():
    """Every case of a CPU, by name."""
    made = [
        case
        for make in (kernels.loss_case, kernels.small_cases, kernels.product_cases)
        for case in make(CPU, "bfloat16")
    ]
    made += [case for case in kernels.attention_cases(CPU, "bfloat16")]
    assert not [case for case in made if isinstance(case, str)]
    return {case.name: case for case in made}


@pytest.mark.slow
def test_every_form_of_attention_of_this_platform_has_a_case(cases):
    assert {name.split(",")[0] for name in cases if "attention" in name} == {
        "blockwise attention of length 256", "blockwise attention of length 1100",
    }  # fmt: skip
    assert {"rms_norm", "layer_norm", "swiglu", "geglu_tanh", "rotary positions", "projection"} < set(cases)
    assert {"projection in int8", "projection in fp8", "cross-entropy, vocabulary 512"} < set(cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rms_norm", "rotary positions", "swiglu", "projection in int8"])
def test_a_kernel_is_near_its_definition_and_another_is_not(cases, name):
    case = cases[name]
    value, gradient = kernels.errors_of(case)
    assert 0 < value <= case.value_most and gradient <= case.gradient_most
    wrong = dataclasses.replace(case, kernel=lambda *x: case.kernel(*x) * jnp.asarray(1.1, jnp.bfloat16))
    assert min(kernels.errors_of(wrong)) > case.gradient_most
    half = lambda x: x + 0 * jnp.sqrt(x - x)  # the same value; its gradient is NaN
    last = dataclasses.replace(case, kernel=lambda *x: case.kernel(*x[:-1], half(x[-1])))
    assert kernels.errors_of(last)[0] <= case.value_most and math.isnan(kernels.errors_of(last)[1])
    bent = dataclasses.replace(case, exact=lambda *x: jnp.tanh(case.exact(*x)))
    assert kernels.errors_of(bent)[0] > case.value_most
