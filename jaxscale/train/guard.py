"""Which gradients may be applied. A NaN compares False with everything, so a check by `norm > limit` lets it pass:
here a step counts only if its loss and norm are finite and the norm is below the limit."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.schema import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """A step with a non-finite or absurd gradient changes nothing but the counts."""

    max_grad_norm: float = setting(1e4, "a larger norm before clipping is absurd: 0.1 to 10 is usual, 100 an alarm")
    max_skipped_in_row: int = setting(20, "more skipped steps than this in a row end the run (exit 17)")

    def __post_init__(self):
        if self.max_grad_norm <= 0 or self.max_skipped_in_row < 0:
            raise ValueError("max_grad_norm must be above 0 and max_skipped_in_row at least 0")


class Guard(NamedTuple):
    """Counts of skipped steps, int32[]."""

    skipped: jax.Array
    skipped_in_row: jax.Array


def init_guard() -> Guard:
    """No step skipped yet."""
    return Guard(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def inspect(
    cfg: GuardConfig, state: Guard, loss: jax.Array, grad_norm: jax.Array, excused: jax.Array | bool = False
) -> tuple[jax.Array, Guard]:
    """(ok, counts): ok is bool[], True if the step may be applied.

    excused: the step does not count as one in a row, as when a loss scale that can still fall overflows.
    """
    ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (grad_norm <= cfg.max_grad_norm)
    return ok, Guard(state.skipped + ~ok, jnp.where(ok, 0, state.skipped_in_row + ~jnp.asarray(excused)))
