"""Loss scaling for float16, whose gradients below 6e-8 vanish (arXiv:1710.03740). Elsewhere the scale is held at 1."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.training.config import LossScaleConfig


class LossScale(NamedTuple):
    """What is multiplied into the loss before differentiation and divided out of the gradient after it."""

    value: jax.Array  # float32[]
    good_steps: jax.Array  # int32[], since the last change


def is_dynamic(cfg: LossScaleConfig, compute_dtype: str) -> bool:
    """True if the scale moves in this run."""
    return cfg.mode == "auto" and compute_dtype == "float16"


def init_loss_scale(cfg: LossScaleConfig, compute_dtype: str) -> LossScale:
    """The scale before the first step."""
    first = cfg.initial if cfg.mode == "static" or is_dynamic(cfg, compute_dtype) else 1.0
    return LossScale(jnp.asarray(first, jnp.float32), jnp.zeros((), jnp.int32))


def adjust(cfg: LossScaleConfig, state: LossScale, finite: jax.Array) -> LossScale:
    """The next dynamic scale: `finite` tells whether this step's gradient was."""
    grown = finite & (state.good_steps + 1 >= cfg.growth_interval)
    value = jnp.where(grown, jnp.minimum(2 * state.value, cfg.max), state.value)
    value = jnp.where(finite, value, jnp.maximum(state.value / 2, cfg.min))
    return LossScale(value, jnp.where(finite & ~grown, state.good_steps + 1, 0))
