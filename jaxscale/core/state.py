"""The train state that a step reads and writes. A checkpoint is the train state and the position in the data.

It includes the loss scale for float16, whose gradients below 6e-8 underflow (arXiv:1710.03740); 1 for other dtypes;
and the exponential moving average (EMA) of the parameters, which often has a lower validation loss.
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
    """Factor of the loss before differentiation, divided out of the gradients."""

    value: jax.Array  # float32[]
    good_steps: jax.Array  # int32[], since the last change


class TrainState(NamedTuple):
    """Nested dicts of arrays, and the optimizer's tuples. Field names are part of checkpoint paths."""

    step: jax.Array  # int32[], attempted steps: skipped ones count
    key: jax.Array  # uint32 key data; each step folds its number in
    params: Any  # float32
    opt_state: Any  # float32
    loss_scale: LossScale
    guard: GuardState
    ema: Any = None  # float32, like the parameters; None, a tree without arrays, if it is off


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    loss_scale: LossScale,
    key: jax.Array,
    ema: Any = None,
    window_steps: int = 100,
) -> TrainState:
    """Returns the state before the first step. window_steps: the guard's window."""
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
    """Returns logical axes of every leaf; () for scalars, the key and the guard's window."""
    scalar: Any = ()
    guard_axes = GuardState(*[scalar] * len(GuardState._fields))
    return TrainState(scalar, scalar, param_axes, opt_axes, LossScale(scalar, scalar), guard_axes)


def is_dynamic(cfg: LossScaleConfig, compute_dtype: str) -> bool:
    """True if the loss scale is dynamic in this run."""
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
    """Returns the EMA after step number `step` (from 0) with these new parameters; None if it is off.

    An average equal to its parameter stays so bit for bit, because the difference is scaled.
    """
    if ema is None:
        return None
    started = step >= cfg.start_step
    update = lambda new, old: jnp.where(started, old + (1 - cfg.decay) * (new - old), new)
    return jax.tree.map(lambda new, old: old if is_masked(old) else update(new, old), params, ema)


def ema_params(state: TrainState) -> Any:
    """Returns all parameters, with the average of those that have one."""
    return combine(state.ema, state.params)
