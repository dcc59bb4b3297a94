"""Norms, activations and rotary positions against their formulas, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.kernels.activation import gelu_tanh, swiglu
from jaxscale.kernels.config import RopeScaling
from jaxscale.kernels.norm import layer_norm, rms_norm
from jaxscale.kernels.rope import frequencies, make_rotation, rotate, rotate_on_tpu

random = np.random.default_rng(0)
x_BTD = jnp.asarray(random.standard_normal((2, 3, 8)) * 3 + 1, jnp.float32)
y_BTD = jnp.asarray(random.standard_normal((2, 3, 8)), jnp.float32)
scale_D, bias_D = (jnp.asarray(random.standard_normal(8), jnp.float32) for _ in range(2))


def rope(x_BTNH, positions_BT, base, scaling=None):
    return rotate(x_BTNH, make_rotation(positions_BT, x_BTNH.shape[-1], base, scaling))


def plain_rms_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale[None, None]


def plain_layer_norm(x, scale, bias):
    spread = jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5)
    return (x - jnp.mean(x, axis=-1, keepdims=True)) / spread * scale[None, None] + bias[None, None]


PAIRS = {
    "rms_norm": (lambda x, scale: rms_norm(x, scale, 1e-5), plain_rms_norm, (x_BTD, scale_D)),
    "layer_norm": (lambda *args: layer_norm(*args, 1e-5), plain_layer_norm, (x_BTD, scale_D, bias_D)),
    "swiglu": (swiglu, lambda gate, up: gate / (1 + jnp.exp(-gate)) * up, (x_BTD, y_BTD)),
    "gelu_tanh": (
        gelu_tanh,
        lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        (x_BTD,),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_equal_the_formula(name):
    function, formula, args = PAIRS[name]
    for got, right in zip(*(tiny.values_and_gradients(f, y_BTD, *args) for f in (function, formula)), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)  # float32, another order of operations


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", PAIRS)
def test_bfloat16_goes_through_float32_and_is_rounded_once(name):
    function, _, args = PAIRS[name]
    narrow = [arg.astype(jnp.bfloat16) for arg in args]
    value = function(*narrow)
    wide = function(*(arg.astype(jnp.float32) for arg in narrow))
    assert value.dtype == jnp.bfloat16
    np.testing.assert_array_equal(value, wide.astype(jnp.bfloat16))


def test_a_rotation_turns_pairs_of_halves_by_position_times_frequency():
    x = jnp.asarray(random.standard_normal((1, 5, 2, 6)), jnp.float32)
    positions_BT = jnp.asarray([[0, 1, 2, 0, 1]], jnp.int32)
    got = np.asarray(rope(x, positions_BT, 100.0))
    numbers = np.asarray(x[..., :3]) + 1j * np.asarray(x[..., 3:])  # the first half is real, the second imaginary
    angle_BT11 = np.asarray(positions_BT)[:, :, None, None] * 100.0 ** (-np.arange(3) / 3)
    turned = numbers * np.exp(1j * angle_BT11)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-6)


def test_scores_depend_on_the_distance_of_positions_alone():
    q, k = (jnp.asarray(random.standard_normal((1, 1, 1, 16)), jnp.float32) for _ in range(2))
    at = lambda x, position: rope(x, jnp.full((1, 1), position, jnp.int32), 10_000.0)
    near, far = jnp.sum(at(q, 7) * at(k, 3)), jnp.sum(at(q, 1007) * at(k, 1003))
    np.testing.assert_allclose(near, far, rtol=1e-4)  # float32 angles near 1000 radians are off by 6e-5


@pytest.mark.slow
def test_the_gradient_of_a_rotation_is_the_rotation_back():
    x, dy = (jnp.asarray(random.standard_normal((2, 3, 2, 8)), jnp.float32) for _ in range(2))
    rotation = make_rotation(jnp.asarray([[0, 1, 2], [5, 6, 7]], jnp.int32), 8, 10_000.0)
    _, pull = jax.vjp(lambda x: rotate(x, rotation), x)
    np.testing.assert_allclose(rotate(pull(dy)[0], rotation), dy, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jnp.sum(rotate(x, rotation) * dy), jnp.sum(x * pull(dy)[0]), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_whole_heads_are_turned_to_the_same_bits_as_halves(dtype):
    x, dy = (jnp.asarray(random.standard_normal((2, 3, 2, 8)), dtype) for _ in range(2))
    rotation = make_rotation(jnp.asarray([[0, 1, 2], [5, 600, 7000]], jnp.int32), 8, 10_000.0)
    halves, pull_halves = jax.vjp(lambda x: rotate(x, rotation), x)
    whole, pull_whole = jax.vjp(lambda x: rotate_on_tpu(x, rotation), x)
    np.testing.assert_array_equal(whole, halves)
    np.testing.assert_array_equal(pull_whole(dy)[0], pull_halves(dy)[0])


@pytest.mark.slow
def test_linear_scaling_divides_positions():
    x = jnp.asarray(random.standard_normal((1, 4, 1, 8)), jnp.float32)
    scaled = rope(x, jnp.asarray([[0, 4, 8, 12]]), 10_000.0, RopeScaling(name="linear", factor=4.0))
    np.testing.assert_allclose(scaled, rope(x, jnp.asarray([[0, 1, 2, 3]]), 10_000.0), rtol=1e-5, atol=1e-6)


def test_llama3_scaling_slows_long_waves_only():
    """Head dim 128, base 500000, factor 8 over 8192 tokens, as Llama 3.1 8B has it."""
    plain = frequencies(128, 500_000.0)
    scaled = frequencies(128, 500_000.0, RopeScaling(name="llama3", factor=8.0))
    wavelength = 2 * np.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
    np.testing.assert_allclose(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8)
    between = ~short & ~long
    smooth = (8192 / wavelength[between] - 1) / (4 - 1)  # the published rule, in wavelengths
    np.testing.assert_allclose(scaled[between], (1 - smooth) * plain[between] / 8 + smooth * plain[between])
    assert short.any() and long.any() and between.any()


@pytest.mark.parametrize(
    "settings",
    [{"factor": 0.5}, {"low_freq_factor": 4.0}, {"original_max_len": 0}, {"beta_fast": 0.5}, {"beta_slow": 0.0},
     {"attention_factor": 0.0}, {"mscale": 1.0}, {"row_len": 0}, {"short_factor": (1.0, 2.0), "name": "longrope"},
     {"short_factor": (1.0,), "long_factor": (0.0,), "name": "longrope"}],
    ids=str,
)  # fmt: skip
def test_impossible_scalings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        RopeScaling(**settings)


def test_an_odd_head_cannot_be_rotated():
    with pytest.raises(ValueError, match="head_dim=7 must be even"):
        frequencies(7, 10_000.0)
