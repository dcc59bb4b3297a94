"""Decides in the compiled step which gradients may be applied, by the losses and norms of the good steps before.

A NaN compares False with everything, so a check by `norm > limit` lets it pass: here a step counts only if its loss and
norm are finite and below every limit. What was refused never enters the window, so it cannot raise the next limits. But
a loss that stays where the window says it cannot be, as after a change of the data, is believed after a few steps.

W steps of the window
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.monitor.spikes import ratio_limit, sigma_limit
from jaxscale.training.config import ENOUGH, GuardConfig

JUDGE, SKIP, APPLY = range(3)  # orders; APPLY still refuses what is not finite

# By the number that the step gives as its verdict.
VERDICTS = (
    "good", "not finite", "absurd norm", "loss by median", "loss by sigmas", "norm by sigmas", "norm by clip",
    "ordered", "new level", "loss scale", "no targets"
)  # fmt: skip
(
    GOOD, NOT_FINITE, ABSURD_NORM, LOSS_RATIO, LOSS_SIGMAS, NORM_SIGMAS, NORM_RATIO, ORDERED, NEW_LEVEL, LOSS_SCALE,
    NO_TARGETS,
) = range(len(VERDICTS))  # fmt: skip
BY_WINDOW = (LOSS_RATIO, LOSS_SIGMAS, NORM_SIGMAS)  # may be wrong about a step; the others are not

# The setting that a verdict follows from.
SETTINGS = {
    ABSURD_NORM: "max_grad_norm",
    LOSS_RATIO: "spike_ratio",
    LOSS_SIGMAS: "spike_sigma",
    NORM_SIGMAS: "spike_sigma",
    NORM_RATIO: "grad_ratio",
}


class Guard(NamedTuple):
    """Counts, the window, and what the host has ordered."""

    skipped: jax.Array  # int32[]
    skipped_in_row: jax.Array  # int32[]
    spikes_in_row: jax.Array  # int32[]: of them the last ones, if only the window spoke against them
    losses: jax.Array  # float32[W], a ring
    norms: jax.Array  # float32[W], a ring
    seen: jax.Array  # int32[]: good steps so far, or since the window began anew
    lr_factor: jax.Array  # float32[]: of the learning rate while step < cut_until
    cut_until: jax.Array  # int32[]
    order: jax.Array  # int32[]: JUDGE, SKIP or APPLY the next step


def init_guard(window_steps: int = 100) -> Guard:
    """No step skipped yet, an empty window, no orders."""
    whole, zeros_W = jnp.zeros((), jnp.int32), jnp.zeros(window_steps, jnp.float32)
    return Guard(whole, whole, whole, zeros_W, zeros_W, whole, jnp.ones((), jnp.float32), whole, whole)


@jax.named_scope("guard")
def inspect(
    cfg: GuardConfig,
    state: Guard,
    loss: jax.Array,
    grad_norm: jax.Array,
    excused: jax.Array | bool = False,
    clip_norm: float = 0.0,
    no_targets: jax.Array | bool = False,
) -> tuple[jax.Array, jax.Array, Guard]:
    """(ok, verdict, state): ok is bool[], True if the step may be applied; verdict int32[] is a place in VERDICTS.

    excused: it is known why the gradient is not finite, as when a loss scale that can still fall overflows, so that the
    step does not count as one in a row. no_targets: no token of the batch has weight: there is nothing to learn and
    nothing to judge, and the step changes neither the parameters nor the window.
    """
    seen_enough, median = state.seen >= ENOUGH, loss_median(state)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    wrongs = {NOT_FINITE: ~finite, ABSURD_NORM: grad_norm > cfg.max_grad_norm}
    if cfg.spike_ratio:
        wrongs[LOSS_RATIO] = seen_enough & (loss > ratio_limit(cfg.spike_ratio, median, jnp.maximum))
    if cfg.spike_sigma:
        wrongs[LOSS_SIGMAS] = seen_enough & (loss > sigmas_above(cfg.spike_sigma, state.losses, state.seen))
        wrongs[NORM_SIGMAS] = seen_enough & (grad_norm > sigmas_above(cfg.spike_sigma, state.norms, state.seen))
    if cfg.grad_ratio and clip_norm:
        wrongs[NORM_RATIO] = seen_enough & (grad_norm > cfg.grad_ratio * clip_norm)
    judged = jnp.select(list(wrongs.values()), [jnp.int32(number) for number in wrongs], jnp.int32(GOOD))

    # Counted and believed under any order, so that the window of a replay begins anew where that of the old run did.
    certain = jnp.any(jnp.stack([wrong for number, wrong in wrongs.items() if number not in BY_WINDOW]))
    spike = (judged != GOOD) & ~certain & ~jnp.asarray(no_targets)
    believed = spike & (state.spikes_in_row >= cfg.max_spikes_in_row) & (state.order != SKIP)
    judged = jnp.where(finite, jnp.where(state.order == APPLY, GOOD, judged), NOT_FINITE)
    judged = jnp.where(excused & ~finite, LOSS_SCALE, jnp.where(believed, NEW_LEVEL, judged))
    judged = jnp.where(no_targets & finite, NO_TARGETS, judged)
    verdict = jnp.where(state.order == SKIP, ORDERED, judged).astype(jnp.int32)
    ok = (verdict == GOOD) | believed
    counted = (verdict != LOSS_SCALE) & (verdict != NO_TARGETS)
    at = jnp.where(believed, 0, state.seen % state.losses.size)
    enter = lambda ring_W, value: ring_W.at[at].set(jnp.where(ok, value, ring_W[at]))
    return (
        ok,
        verdict,
        state._replace(
            skipped=state.skipped + (~ok & (verdict != NO_TARGETS)),
            skipped_in_row=jnp.where(ok, 0, state.skipped_in_row + counted),
            spikes_in_row=jnp.where(ok | (counted & ~spike), 0, state.spikes_in_row + spike),
            losses=enter(state.losses, loss),
            norms=enter(state.norms, grad_norm),
            seen=jnp.where(believed, 1, state.seen + ok),
            order=jnp.full_like(state.order, JUDGE),  # it was for this step, and is saved with no state
        ),
    )


def told(before: Guard, after: Guard, ok: jax.Array, verdict: jax.Array) -> dict[str, jax.Array]:
    """What it says of a step among the metrics."""
    return {
        "loss_median": loss_median(before),
        "verdict": verdict,
        "skipped": ~ok & (verdict != NO_TARGETS),
        "skipped_total": after.skipped,
        "skipped_in_row": after.skipped_in_row,
    }


def loss_median(state: Guard) -> jax.Array:
    """float32[]: of the window; meaningless before the first good step."""
    return middle(state.losses, state.seen)


def sigmas_above(sigmas: float, ring_W: jax.Array, seen: jax.Array) -> jax.Array:
    """float32[]: so many robust standard deviations above the median."""
    median = middle(ring_W, seen)
    return sigma_limit(sigmas, median, middle(jnp.abs(ring_W - median), seen), jnp.maximum)


def middle(values_W: jax.Array, seen: jax.Array) -> jax.Array:
    """float32[]: the median of the part of a ring that is filled."""
    W = values_W.size
    count = jnp.clip(seen, 1, W)
    sorted_W = jnp.sort(jnp.where(jnp.arange(W) < count, values_W, jnp.inf))
    return (sorted_W[(count - 1) // 2] + sorted_W[count // 2]) / 2


def lr_factor(state: Guard, step: jax.Array) -> jax.Array:
    """float32[]: what the learning rate of a step is multiplied by."""
    return jnp.where(step < state.cut_until, state.lr_factor, 1.0)
