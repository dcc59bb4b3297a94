"""Loss scaling for float16, whose gradients below 6e-8 vanish (arXiv:1710.03740). Elsewhere the scale is held at 1."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic: halve on overflow, double after `growth_interval` good steps, between `min` and `max`."""

    mode: Literal["auto", "static"] = setting(
        "auto", "auto: dynamic in float16, 1 in other types; static: `initial`, kept"
    )
    initial: float = setting(
        2.0**15, "first scale", read_if="train.loss_scale.mode=static or model.compute_dtype=float16"
    )
    growth_interval: int = setting(
        2000,
        "good steps before the scale doubles",
        read_if="train.loss_scale.mode=auto and model.compute_dtype=float16",
    )
    max: float = setting(2.0**24, "largest scale", read_if="train.loss_scale.mode=auto and model.compute_dtype=float16")
    min: float = setting(1.0, "smallest scale", read_if="train.loss_scale.mode=auto and model.compute_dtype=float16")

    def __post_init__(self):
        if self.mode == "static" and self.initial <= 0:
            raise BadInput(f"initial={self.initial:g} must be above 0")
        if self.mode == "auto" and not 0 < self.min <= self.initial <= self.max:
            raise BadInput(f"initial={self.initial:g} must lie between min={self.min:g} (above 0) and max={self.max:g}")
        if self.growth_interval < 1:
            raise BadInput(f"growth_interval={self.growth_interval} must be at least 1")


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
