"""The train state: all that a training step reads and writes. With the data position, a checkpoint of it is the run."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.training.guard import Guard, init_guard
from jaxscale.training.loss_scale import LossScale


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
    scalar = ()
    return TrainState(
        scalar, scalar, param_axes, opt_axes, LossScale(scalar, scalar), Guard(*[scalar] * len(Guard._fields))
    )
