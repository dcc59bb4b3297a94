"""The train state that a step reads and writes. A checkpoint consists of the train state and the data position.

The loss scale is needed in float16, where gradients below 6e-8 underflow (arXiv:1710.03740), and is 1 for other dtypes.
The exponential moving average (EMA) of the parameters often has a lower validation loss.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.core.config import EmaConfig, LossScaleConfig
from jaxscale.core.guard import GuardState, init_guard
from jaxscale.core.optim.groups import is_masked
from jaxscale.core.optim.optimizer import combine


class LossScale(NamedTuple):
    """Factor that multiplies the loss before differentiation and divides the gradients afterwards."""

    value: jax.Array  # float32[]
    good_steps: jax.Array  # int32[]: good steps since the last change


class TrainState(NamedTuple):
    """Train state. Field names are part of checkpoint paths."""

    step: jax.Array  # int32[]: number of attempted steps, including skipped steps
    key: jax.Array  # uint32 key data, into which each step folds its number
    params: Any  # float32
    opt_state: Any  # float32
    loss_scale: LossScale
    guard: GuardState
    ema: Any = None  # float32 tree like the parameters; None if the EMA is off


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    loss_scale: LossScale,
    key: jax.Array,
    ema: Any = None,
    window_steps: int = 100,
) -> TrainState:
    """Returns the state before the first step. window_steps: window length of the loss guard, in steps."""
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
    """Returns the logical axes of every leaf. Scalars, the key and the guard's window have no axes."""
    scalar: Any = ()
    guard_axes = GuardState(*[scalar] * len(GuardState._fields))
    return TrainState(scalar, scalar, param_axes, opt_axes, LossScale(scalar, scalar), guard_axes)


def is_dynamic(cfg: LossScaleConfig, compute_dtype: str) -> bool:
    """Returns True if the loss scale is dynamic for this compute dtype."""
    return cfg.mode == "auto" and compute_dtype == "float16"


def init_loss_scale(cfg: LossScaleConfig, compute_dtype: str) -> LossScale:
    """Returns the loss scale before the first step."""
    value = cfg.initial if cfg.mode == "static" or is_dynamic(cfg, compute_dtype) else 1.0
    return LossScale(jnp.asarray(value, jnp.float32), jnp.zeros((), jnp.int32))


def adjust_loss_scale(cfg: LossScaleConfig, state: LossScale, finite: jax.Array) -> LossScale:
    """Returns the next dynamic loss scale. finite: bool[], True if the gradients of this step are finite."""
    grown = finite & (state.good_steps + 1 >= cfg.growth_interval)
    value = jnp.where(grown, jnp.minimum(2 * state.value, cfg.max), state.value)
    value = jnp.where(finite, value, jnp.maximum(state.value / 2, cfg.min))
    return LossScale(value, jnp.where(finite & ~grown, state.good_steps + 1, 0))


def update_ema(cfg: EmaConfig, ema: Any, params: Any, step: jax.Array) -> Any:
    """Returns the exponential moving average (EMA) after a step, or None if the EMA is off.

    params: parameters after the step. step: number of the step, from 0. An average that
    equals its parameter does not change, because the update scales their difference.
    """
    if ema is None:
        return None
    started = step >= cfg.start_step
    update = lambda new, old: jnp.where(started, old + (1 - cfg.decay) * (new - old), new)
    return jax.tree.map(lambda new, old: old if is_masked(old) else update(new, old), params, ema)


def ema_params(state: TrainState) -> Any:
    """Returns all parameters, replaced by their EMA where there is one."""
    return combine(state.ema, state.params)
