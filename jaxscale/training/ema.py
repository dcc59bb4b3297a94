"""A running average of the parameters beside them: smoother than they are, and often better on held-out text."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.optim.optimizers import combine
from jaxscale.optim.streamed import is_masked
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.training.state import TrainState

Evaluate = Callable[[Any], dict[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An exponential moving average of the parameters that learn; it costs their memory once more, cut as the moments
    are."""

    decay: float = setting(
        0.0, "part of the average that each step keeps: 0.999 looks back about 1000 steps; 0: no average"
    )
    start_step: int = setting(
        0,
        "steps after which averaging begins: until then the average is the parameters themselves",
        read_if="train.ema.decay",
    )

    def __post_init__(self):
        if not 0 <= self.decay < 1:
            raise BadInput(f"decay={self.decay} must be at least 0 and below 1")
        if self.start_step < 0 or self.start_step and not self.decay:
            raise BadInput(f"start_step={self.start_step} must be at least 0, and is for a decay above 0")

    @property
    def on(self) -> bool:
        """Whether there is an average."""
        return self.decay > 0


def init_ema(cfg: EmaConfig, params: Any) -> Any:
    """The average before the first step, equal to the parameters; None, which has no arrays, where it is off."""
    return params if cfg.on else None


def update_ema(cfg: EmaConfig | None, ema: Any, params: Any, step: jax.Array) -> Any:
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
