"""The learning rate as a function of the step: linear warmup, then one of four shapes down to min_lr.

Steps count from 0 and step 0 already learns: its rate is peak / warmup, never 0. Past the horizon it stays min_lr.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxscale.optim.config import Decay

Schedule = Callable[[jax.Array | int], jax.Array]  # int32 step -> float32 learning rate


def make_schedule(
    *, decay: Decay, peak_lr: float, min_lr: float, warmup_steps: int, total_steps: int, decay_fraction: float
) -> Schedule:
    """The learning rate at any step, float32[].

    cosine and linear fall from the end of the warmup to the last step. wsd (warmup, stable, decay: arXiv:2404.06395)
    stays at the peak and falls linearly over the last `decay_fraction` of all steps. constant stays at the peak.
    The last step, total_steps - 1, has min_lr exactly, but for constant, and in a run that is all warmup.
    """
    if decay == "wsd":
        start = max(warmup_steps, total_steps - round(decay_fraction * total_steps))
    else:
        start = warmup_steps
    span = max(1, total_steps - 1 - start)

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warm = peak_lr * (step + 1) / max(1, warmup_steps)
        if decay == "constant":
            rest = jnp.full((), peak_lr, jnp.float32)
        else:
            done = jnp.clip((step - start) / span, 0.0, 1.0)
            shape = 0.5 * (1 + jnp.cos(jnp.pi * done)) if decay == "cosine" else 1 - done
            shape = jnp.where(step >= total_steps - 1, 0.0, shape)  # however short the fall is, even of no steps
            rest = shape * peak_lr + (1 - shape) * min_lr  # exact at both ends
        return jnp.where(step < warmup_steps, warm, rest)

    return schedule
