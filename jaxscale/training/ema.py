"""A running average of the parameters beside them: smoother than they are, and often better on held-out text."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.optim.groups import is_masked
from jaxscale.optim.optimizers import combine
from jaxscale.training.config import EmaConfig
from jaxscale.training.state import TrainState

Evaluate = Callable[[Any], dict[str, float]]


def init_ema(cfg: EmaConfig, params: Any) -> Any:
    """The average before the first step, equal to the parameters; None, which has no arrays, where it is off."""
    return params if cfg.on else None


def update_ema(cfg: EmaConfig, ema: Any, params: Any, step: jax.Array) -> Any:
    """The average after the step number `step` (from 0) has given these parameters; None stays None.

    One that equals its parameter stays so bit for bit: the difference is what is scaled.
    """
    if ema is None:
        return None
    begun = step >= cfg.start_step
    renew = lambda new, old: jnp.where(begun, old + (1 - cfg.decay) * (new - old), new)
    return jax.tree.map(lambda new, old: old if is_masked(old) else renew(new, old), params, ema)


def averaged(state: TrainState) -> Any:
    """All parameters, averages in the place of those that have one."""
    return combine(state.ema, state.params)


def evaluated(evaluate: Evaluate, state: TrainState, group: str = "validation") -> dict[str, float]:
    """Metrics of the parameters and, where there is one, of their average: 'validation/loss', 'validation_ema/loss'."""
    metrics = evaluate(state.params)
    if state.ema is None:
        return metrics
    average = evaluate(averaged(state))
    return metrics | {name.replace(group, f"{group}_ema", 1): v for name, v in average.items()}
