"""The learning rate as a function of the step: linear warmup, then one of six shapes.

Steps count from 0 and step 0 already learns: its rate is peak / warmup, never 0. Past the horizon it stays as it ended.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxscale.optim.config import STABLE, Decay, DecayShape

Schedule = Callable[[jax.Array | int], jax.Array]  # int32 step -> float32 learning rate


def make_schedule(
    *,
    decay: Decay,
    peak_lr: float,
    min_lr: float,
    warmup_steps: int,
    total_steps: int,
    decay_fraction: float,
    decay_shape: DecayShape = "linear",
    decay_start: int | None = None,
    factors: Sequence[tuple[int, float]] = (),
) -> Schedule:
    """The learning rate at any step, float32[].

    cosine and linear fall from the end of the warmup to the last step. wsd (warmup, stable, decay: arXiv:2404.06395)
    stays at the peak and falls over the last `decay_fraction` of all steps, or from step `decay_start` on, linearly or
    as 1 - sqrt (arXiv:2405.18392). inverse_sqrt is peak x sqrt(warmup / steps) (arXiv:1706.03762), where a step has
    taken part in its own rate. piecewise is the peak times the last of `factors`, (step, factor) in order, whose step
    has come (arXiv:2401.02954). constant stays at the peak; with a decay_start it falls from there as wsd does.
    The last step, total_steps - 1, has min_lr exactly in all that fall to it, but in a run that is all warmup.
    """
    if decay_start is not None:
        start = max(warmup_steps, decay_start)
    elif decay == "wsd":
        start = max(warmup_steps, total_steps - round(decay_fraction * total_steps))
    else:
        start = warmup_steps
    span = max(1, total_steps - 1 - start)

    def falling(step: jax.Array) -> jax.Array:
        done = jnp.clip((step - start) / span, 0.0, 1.0)
        if decay == "cosine":
            shape = 0.5 * (1 + jnp.cos(jnp.pi * done))
        elif decay_shape == "one_minus_sqrt" and decay in STABLE:
            shape = 1 - jnp.sqrt(done)
        else:
            shape = 1 - done
        shape = jnp.where(step >= total_steps - 1, 0.0, shape)  # however short the fall is, even of no steps
        return shape * peak_lr + (1 - shape) * min_lr  # exact at both ends

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warm = peak_lr * (step + 1) / max(1, warmup_steps)
        if decay == "inverse_sqrt":
            rest = peak_lr * jnp.sqrt(max(1, warmup_steps) / (step + 1))
        elif decay == "piecewise" or (decay == "constant" and decay_start is None):
            rest = jnp.full((), peak_lr, jnp.float32)
            for begin, factor in factors:
                rest = jnp.where(step >= begin, peak_lr * factor, rest)
        else:
            rest = falling(step)
        return jnp.where(step < warmup_steps, warm, rest)

    return schedule
