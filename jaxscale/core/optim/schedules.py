"""The learning rate as a function of the step: linear warmup, then one of six shapes.

Steps count from 0; the rate of step 0 is peak / warmup_steps, not 0. After total_steps the final rate is held.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxscale.core.optim.config import STABLE, Decay, DecayShape

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
    """Returns step -> learning rate, float32[].

    cosine, linear: decay from the end of the warmup to the last step. wsd (warmup, stable, decay: arXiv:2404.06395):
    stays at the peak and decays over the last `decay_fraction` of all steps, or from step `decay_start`, linearly or
    as 1 - sqrt (arXiv:2405.18392). inverse_sqrt: peak x sqrt(warmup / (step + 1)) (arXiv:1706.03762). piecewise: the
    peak times the last of `factors`, ordered (step, factor), whose step is reached (arXiv:2401.02954). constant: stays
    at the peak; with a decay_start it decays from there as wsd does.
    Decays that end at min_lr reach it exactly at step total_steps - 1, unless the whole run is warmup.
    """
    if decay_start is not None:
        start = max(warmup_steps, decay_start)
    elif decay == "wsd":
        start = max(warmup_steps, total_steps - round(decay_fraction * total_steps))
    else:
        start = warmup_steps
    span = max(1, total_steps - 1 - start)

    def decayed(step: jax.Array) -> jax.Array:
        progress = jnp.clip((step - start) / span, 0.0, 1.0)
        if decay == "cosine":
            shape = 0.5 * (1 + jnp.cos(jnp.pi * progress))
        elif decay_shape == "one_minus_sqrt" and decay in STABLE:
            shape = 1 - jnp.sqrt(progress)
        else:
            shape = 1 - progress
        shape = jnp.where(step >= total_steps - 1, 0.0, shape)  # even for a decay of 0 or 1 steps
        return shape * peak_lr + (1 - shape) * min_lr  # exact at both ends

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warm = peak_lr * (step + 1) / max(1, warmup_steps)
        if decay == "inverse_sqrt":
            lr = peak_lr * jnp.sqrt(max(1, warmup_steps) / (step + 1))
        elif decay == "piecewise" or (decay == "constant" and decay_start is None):
            lr = jnp.full((), peak_lr, jnp.float32)
            for begin, factor in factors:
                lr = jnp.where(step >= begin, peak_lr * factor, lr)
        else:
            lr = decayed(step)
        return jnp.where(step < warmup_steps, warm, lr)

    return schedule
