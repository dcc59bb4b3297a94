"""Decides in the compiled step whether gradients are applied, by comparing with losses and norms of earlier steps.

Every comparison with NaN is False, so `norm > limit` alone would accept NaN. Therefore the loss and norm must also be
finite. Rejected steps do not enter the window, so they cannot raise later limits. A loss that stays above the limits,
for example after a change of the data, is accepted as a new level after max_spikes_in_row steps.

W steps of the window
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.core.config import MIN_WINDOW_STEPS, GuardConfig, ratio_limit, sigma_limit

CHECK, SKIP, APPLY = range(3)  # orders from the host; APPLY still rejects non-finite losses and gradients

# Indexed by the verdict of a step.
VERDICTS = (
    "good", "not finite", "absurd norm", "loss by median", "loss by sigmas", "norm by sigmas", "norm by clip",
    "ordered", "new level", "loss scale", "no targets"
)  # fmt: skip
(
    GOOD, NOT_FINITE, ABSURD_NORM, LOSS_RATIO, LOSS_SIGMAS, NORM_SIGMAS, NORM_RATIO, ORDERED, NEW_LEVEL, LOSS_SCALE,
    NO_TARGETS,
) = range(len(VERDICTS))  # fmt: skip
BY_WINDOW = (LOSS_RATIO, LOSS_SIGMAS, NORM_SIGMAS)  # verdicts that acceptance of a new level can override

# The setting of train.guard that causes a verdict.
SETTINGS = {
    ABSURD_NORM: "max_grad_norm",
    LOSS_RATIO: "spike_ratio",
    LOSS_SIGMAS: "spike_sigma",
    NORM_SIGMAS: "spike_sigma",
    NORM_RATIO: "grad_ratio",
}


class GuardState(NamedTuple):
    """State of the guard: counters, windows and an order from the host. Field names are part of checkpoint paths."""

    skipped: jax.Array  # int32[]
    skipped_in_row: jax.Array  # int32[]
    spikes_in_row: jax.Array  # int32[]: latest consecutive skipped steps with a verdict of BY_WINDOW
    losses: jax.Array  # float32[W], a ring buffer
    norms: jax.Array  # float32[W], a ring buffer
    seen: jax.Array  # int32[]: good steps since the start of the window
    lr_factor: jax.Array  # float32[]: multiplies the learning rate while step < cut_until
    cut_until: jax.Array  # int32[]
    order: jax.Array  # int32[]: CHECK, SKIP or APPLY, for the next step


def init_guard(window_steps: int = 100) -> GuardState:
    """Returns a state with an empty window."""
    zero, zeros_W = jnp.zeros((), jnp.int32), jnp.zeros(window_steps, jnp.float32)
    return GuardState(zero, zero, zero, zeros_W, zeros_W, zero, jnp.ones((), jnp.float32), zero, zero)


@jax.named_scope("guard")
def check(
    cfg: GuardConfig,
    state: GuardState,
    loss: jax.Array,
    grad_norm: jax.Array,
    excused: jax.Array | bool = False,
    clip_norm: float = 0.0,
    no_targets: jax.Array | bool = False,
) -> tuple[jax.Array, jax.Array, GuardState]:
    """Returns (ok, verdict, state). ok: bool[], True if the step may be applied. verdict: int32[], index of VERDICTS.

    excused: bool[], True if the gradient is not finite and the loss scale can still be reduced. Such a step is not
    counted in skipped_in_row. no_targets: bool[], True if all token weights of the batch are 0. Such a step changes
    neither the parameters nor the window.
    """
    window_ready, median = state.seen >= MIN_WINDOW_STEPS, loss_median(state)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    failures = {NOT_FINITE: ~finite, ABSURD_NORM: grad_norm > cfg.max_grad_norm}
    if cfg.spike_ratio:
        failures[LOSS_RATIO] = window_ready & (loss > ratio_limit(cfg.spike_ratio, median, jnp.maximum))
    if cfg.spike_sigma:
        failures[LOSS_SIGMAS] = window_ready & (loss > sigma_threshold(cfg.spike_sigma, state.losses, state.seen))
        failures[NORM_SIGMAS] = window_ready & (grad_norm > sigma_threshold(cfg.spike_sigma, state.norms, state.seen))
    if cfg.grad_ratio and clip_norm:
        failures[NORM_RATIO] = window_ready & (grad_norm > cfg.grad_ratio * clip_norm)
    verdict = jnp.select(list(failures.values()), [jnp.int32(number) for number in failures], jnp.int32(GOOD))

    # Independent of the order, so that a replay restarts its window at the same step as the original run.
    certain = jnp.any(jnp.stack([failed for number, failed in failures.items() if number not in BY_WINDOW]))
    spike = (verdict != GOOD) & ~certain & ~jnp.asarray(no_targets)
    new_level = spike & (state.spikes_in_row >= cfg.max_spikes_in_row) & (state.order != SKIP)
    verdict = jnp.where(finite, jnp.where(state.order == APPLY, GOOD, verdict), NOT_FINITE)
    verdict = jnp.where(excused & ~finite, LOSS_SCALE, jnp.where(new_level, NEW_LEVEL, verdict))
    verdict = jnp.where(no_targets & finite, NO_TARGETS, verdict)
    verdict = jnp.where(state.order == SKIP, ORDERED, verdict).astype(jnp.int32)
    ok = (verdict == GOOD) | new_level
    counted = (verdict != LOSS_SCALE) & (verdict != NO_TARGETS)
    index = jnp.where(new_level, 0, state.seen % state.losses.size)
    push = lambda ring_W, value: ring_W.at[index].set(jnp.where(ok, value, ring_W[index]))
    return (
        ok,
        verdict,
        state._replace(
            skipped=state.skipped + (~ok & (verdict != NO_TARGETS)),
            skipped_in_row=jnp.where(ok, 0, state.skipped_in_row + counted),
            spikes_in_row=jnp.where(ok | (counted & ~spike), 0, state.spikes_in_row + spike),
            losses=push(state.losses, loss),
            norms=push(state.norms, grad_norm),
            seen=jnp.where(new_level, 1, state.seen + ok),
            order=jnp.full_like(state.order, CHECK),  # an order applies to one step and is never saved
        ),
    )


def guard_metrics(before: GuardState, after: GuardState, ok: jax.Array, verdict: jax.Array) -> dict[str, jax.Array]:
    """Returns the guard's metrics of a step."""
    return {
        "loss_median": loss_median(before),
        "verdict": verdict,
        "skipped": ~ok & (verdict != NO_TARGETS),
        "skipped_total": after.skipped,
        "skipped_in_row": after.skipped_in_row,
    }


def loss_median(state: GuardState) -> jax.Array:
    """Returns the median loss of the window, float32[]. It is undefined before the first good step."""
    return ring_median(state.losses, state.seen)


def sigma_threshold(sigmas: float, ring_W: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns the median plus a number of robust standard deviations, float32[]."""
    median = ring_median(ring_W, seen)
    return sigma_limit(sigmas, median, ring_median(jnp.abs(ring_W - median), seen), jnp.maximum)


def ring_median(values_W: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns the median of the filled part of a ring buffer, float32[]."""
    W = values_W.size
    count = jnp.clip(seen, 1, W)
    sorted_W = jnp.sort(jnp.where(jnp.arange(W) < count, values_W, jnp.inf))
    return (sorted_W[(count - 1) // 2] + sorted_W[count // 2]) / 2


def lr_factor(state: GuardState, step: jax.Array) -> jax.Array:
    """Returns the multiplier of the learning rate, float32[]. It is below 1 for some steps after a recovery."""
    return jnp.where(step < state.cut_until, state.lr_factor, 1.0)
