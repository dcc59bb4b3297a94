"""Exponential moving average (EMA) of the parameters, which often has a lower validation loss."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.core.config import EmaConfig
from jaxscale.core.optim.groups import is_masked
from jaxscale.core.optim.optimizer import combine
from jaxscale.core.state import TrainState


def init_ema(cfg: EmaConfig, params: Any) -> Any:
    """Returns the EMA before the first step, equal to the parameters; None, a tree without arrays, if it is off."""
    return params if cfg.on else None


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
