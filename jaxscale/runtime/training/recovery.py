"""Recovery from skipped steps on the host: cut the learning rate, rewind or stop (settings train.recovery).

Pure functions of the metrics that every process reads at the same step, so that all processes make the same decisions.
Steps are counted from 1, as in metrics.jsonl: after step n the state has done n steps.
"""

from typing import Literal, NamedTuple

from jaxscale.core.config import GuardConfig, ratio_limit
from jaxscale.runtime.training.config import RecoveryConfig, RecoveryStep


class StepReading(NamedTuple):
    """Metrics of a step, as read by the host."""

    step: int
    loss: float
    grad_norm: float
    loss_median: float  # median of the window before this step
    bad: bool  # skipped, and not because of a loss scale that can still be reduced
    skipped_in_row: int


class RecoveryState(NamedTuple):
    """State of recovery, rebuilt from the events when a run resumes."""

    cuts: int = 0
    rewinds: int = 0
    bad: tuple[int, ...] = ()  # skipped steps in the last window, or consecutive with them
    answered: int = 0  # recovery has handled skips up to this step


class Action(NamedTuple):
    """The recovery step for the bad steps from first_bad to last_bad.

    cut_lr: reduce the learning rate and continue. rewind: restore a checkpoint before first_bad, and skip the batches
    up to last_bad. halt: end the run, because all recovery steps are used.
    """

    kind: RecoveryStep | Literal["halt"]
    first_bad: int
    last_bad: int


def decide(
    cfg: RecoveryConfig, guard: GuardConfig, state: RecoveryState, reading: StepReading
) -> tuple[RecoveryState, Action | None]:
    """Returns (new state, action or None) after a step."""
    row = min(reading.skipped_in_row, reading.step - state.answered) if reading.bad else 0
    oldest = min(reading.step - guard.window_steps, reading.step - reading.skipped_in_row)
    bad = tuple(step for step in (*state.bad, *([reading.step] if reading.bad else ())) if step > oldest)
    state = state._replace(bad=bad)
    unanswered = sum(step > state.answered for step in bad)
    too_many = cfg.max_skipped_in_window and unanswered > cfg.max_skipped_in_window
    if not reading.bad or (row <= guard.max_skipped_in_row and not too_many):
        return state, None
    state = state._replace(answered=reading.step)
    for kind in cfg.steps:
        if kind == "cut_lr" and state.cuts < cfg.max_cuts:
            return state._replace(cuts=state.cuts + 1), Action(kind, bad[0], reading.step)
        if kind == "rewind" and state.rewinds < cfg.max_rewinds:
            return state._replace(rewinds=state.rewinds + 1), Action(kind, bad[0], reading.step)
    return state, Action("halt", bad[0], reading.step)


def rewind_before_step(first_bad: int, margin: int) -> int:
    """Returns the step that the checkpoint of a rewind must precede."""
    return first_bad - max(margin, 1) + 1


def oldest_clean_step(first_bad: int, max_steps: int) -> int:
    """Returns the oldest step whose clean checkpoint is preferred to a newer suspect checkpoint."""
    return first_bad - max_steps if max_steps else 0


class AlarmState(NamedTuple):
    """The last step of each alarm, and the recent losses, from which plateaus are detected."""

    last: tuple[tuple[str, int], ...] = ()
    losses: tuple[float, ...] = ()


def update_alarms(cfg: RecoveryConfig, state: AlarmState, reading: StepReading) -> tuple[AlarmState, list[str]]:
    """Returns (new state, new alarms). An alarm in consecutive steps is new only in the first of them."""
    active, median = [], reading.loss_median  # 0 before the first good step
    if cfg.norm_alarm and reading.grad_norm > cfg.norm_alarm:
        active.append("norm")
    if cfg.spike_alarm and median and reading.loss > ratio_limit(cfg.spike_alarm, median):
        active.append("spike")
    losses = state.losses
    if cfg.plateau_steps and not reading.bad:
        losses = (*losses, reading.loss)
        if len(losses) >= cfg.plateau_steps:
            half = cfg.plateau_steps // 2
            first, second = sum(losses[:half]) / half, sum(losses[-half:]) / half
            losses = losses[half:]
            if second >= cfg.plateau_ratio * first:
                active.append("plateau")
    last = dict(state.last)
    new = [name for name in active if name == "plateau" or last.get(name, -1) < reading.step - 1]
    return AlarmState(tuple((last | dict.fromkeys(active, reading.step)).items()), losses), new
