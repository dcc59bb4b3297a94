"""The train state: all that a training step reads and writes. With the data position, a checkpoint of it is the run.

It has the loss scale of float16, whose gradients below 6e-8 vanish (arXiv:1710.03740); elsewhere that is held at 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.training.config import LossScaleConfig
from jaxscale.training.guard import Guard, init_guard


class LossScale(NamedTuple):
    """What is multiplied into the loss before differentiation and divided out of the gradient after it."""

    value: jax.Array  # float32[]
    good_steps: jax.Array  # int32[], since the last change


class TrainState(NamedTuple):
    """Nested plain dicts of arrays, with the optimizer's own tuples."""

    step: jax.Array  # int32[], attempted steps: skipped ones count
    key: jax.Array  # uint32 key data; each step folds its number in
    params: Any  # float32
    opt_state: Any  # float32
    loss_scale: LossScale
    guard: Guard
    ema: Any = None  # float32, like the parameters; None, which has no arrays, where it is off


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    loss_scale: LossScale,
    key: jax.Array,
    ema: Any = None,
    window_steps: int = 100,
) -> TrainState:
    """The state before the first step. window_steps: of the guard."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        key=jax.random.key_data(key),
        params=params,
        opt_state=optimizer.init(params),
        loss_scale=loss_scale,
        guard=init_guard(window_steps),
        ema=ema,
    )


def state_axes(param_axes: Any, opt_axes: Any) -> TrainState:
    """Logical axes of every leaf: moments as their parameters, () for scalars, the key and the guard's window."""
    scalar: Any = ()
    return TrainState(
        scalar, scalar, param_axes, opt_axes, LossScale(scalar, scalar), Guard(*[scalar] * len(Guard._fields))
    )


def is_dynamic(cfg: LossScaleConfig, compute_dtype: str) -> bool:
    """True if the scale moves in this run."""
    return cfg.mode == "auto" and compute_dtype == "float16"


def init_loss_scale(cfg: LossScaleConfig, compute_dtype: str) -> LossScale:
    """The scale before the first step."""
    first = cfg.initial if cfg.mode == "static" or is_dynamic(cfg, compute_dtype) else 1.0
    return LossScale(jnp.asarray(first, jnp.float32), jnp.zeros((), jnp.int32))


def adjust_loss_scale(cfg: LossScaleConfig, state: LossScale, finite: jax.Array) -> LossScale:
    """The next dynamic scale: `finite` tells whether this step's gradient was."""
    grown = finite & (state.good_steps + 1 >= cfg.growth_interval)
    value = jnp.where(grown, jnp.minimum(2 * state.value, cfg.max), state.value)
    value = jnp.where(finite, value, jnp.maximum(state.value / 2, cfg.min))
    return LossScale(value, jnp.where(finite & ~grown, state.good_steps + 1, 0))
