"""The scale of float16's loss: halved on overflow, doubled after good steps, between its bounds."""

import jax.numpy as jnp
import pytest

from jaxscale.core.config import LossScaleConfig
from jaxscale.core.state import adjust_loss_scale, init_loss_scale, is_dynamic


def scales(cfg, finite):
    """Scales after each of the steps."""
    state, seen = init_loss_scale(cfg, "float16"), []
    for good in finite:
        state = adjust_loss_scale(cfg, state, jnp.asarray(good))
        seen.append(float(state.value))
    return seen


def test_it_doubles_after_so_many_good_steps_in_a_row():
    cfg = LossScaleConfig(initial=8, growth_interval=3, max=32)
    assert scales(cfg, [1] * 10) == [8, 8, 16, 16, 16, 32, 32, 32, 32, 32]


def test_an_overflow_halves_it_and_the_count_starts_again():
    cfg = LossScaleConfig(initial=8, growth_interval=3)
    assert scales(cfg, [1, 1, 0, 1, 1, 1, 0, 0]) == [8, 8, 4, 4, 4, 8, 4, 2]


def test_it_never_falls_below_the_floor():
    assert scales(LossScaleConfig(initial=4, min=2), [0] * 3) == [2, 2, 2]


@pytest.mark.parametrize(
    ("mode", "dtype", "first"),
    [("auto", "float16", 2.0**15), ("auto", "bfloat16", 1.0), ("auto", "float32", 1.0), ("static", "float32", 2.0**15)],
)
def test_it_moves_in_float16_only(mode, dtype, first):
    cfg = LossScaleConfig(mode=mode)
    assert float(init_loss_scale(cfg, dtype).value) == first
    assert is_dynamic(cfg, dtype) == (mode == "auto" and dtype == "float16")


@pytest.mark.parametrize("settings", [{"min": 0.0}, {"initial": 2.0**25}, {"initial": 0.5}, {"growth_interval": 0}])
def test_bounds_that_cross_are_refused(settings):
    with pytest.raises(ValueError, match="initial=|growth_interval="):
        LossScaleConfig(**settings)
