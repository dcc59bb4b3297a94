"""Everything that a training step reads and writes; a checkpoint of it, with the data position, is the run."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.train.guard import Guard, init_guard
from jaxscale.train.loss_scale import LossScale


class TrainState(NamedTuple):
    """Nested plain dicts of arrays, with the optimizer's own tuples."""

    step: jax.Array  # int32[], attempted steps: skipped ones count
    key: jax.Array  # uint32 key data; each step folds its number in
    params: Any  # float32
    opt_state: Any  # float32
    loss_scale: LossScale
    guard: Guard


def init_state(
    params: Any, optimizer: optax.GradientTransformation, loss_scale: LossScale, key: jax.Array
) -> TrainState:
    """The state before the first step."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        key=jax.random.key_data(key),
        params=params,
        opt_state=optimizer.init(params),
        loss_scale=loss_scale,
        guard=init_guard(),
    )


def state_axes(param_axes: Any, opt_axes: Any) -> TrainState:
    """Logical axes of every leaf: moments as their parameters, () for scalars and the key."""
    scalar = ()
    return TrainState(scalar, scalar, param_axes, opt_axes, LossScale(scalar, scalar), Guard(scalar, scalar))
