"""Spike recovery: what the host does about skipped steps. Cut the learning rate, rewind, stop (settings train.ladder).

A pure function of the metrics that every process reads at the same step, so that all come to the same answer. Steps are
counted from 1, as metrics.jsonl does: step n is the one after which the state has done n.
"""

from typing import Literal, NamedTuple

from jaxscale.monitor.spikes import ratio_limit
from jaxscale.training.config import GuardConfig, RecoveryConfig, Rung


class JudgedStep(NamedTuple):
    """What the host has read of a step that the guard has judged."""

    step: int
    loss: float
    grad_norm: float
    loss_median: float  # of the window before it
    bad: bool  # skipped, and not only because a loss scale that can still fall was too high
    skipped_in_row: int


class Trouble(NamedTuple):
    """What recovery remembers. Rebuilt from the events when a run resumes."""

    cuts: int = 0
    rewinds: int = 0
    bad: tuple[int, ...] = ()  # skipped steps within the last window, or in a row with those
    answered: int = 0  # skips up to this step have had their answer


class Action(NamedTuple):
    """What to do about the steps from the first bad one to the last.

    cut_lr: divide the learning rate, and stay. rewind: go back to before the first bad step, and leave out the batches
    up to the last one. halt: no rung is left.
    """

    kind: Rung | Literal["halt"]
    first_bad: int
    last_bad: int


def decide(
    cfg: RecoveryConfig, guard: GuardConfig, trouble: Trouble, reading: JudgedStep
) -> tuple[Trouble, Action | None]:
    """(what to remember, what to do now) after reading a step."""
    row = min(reading.skipped_in_row, reading.step - trouble.answered) if reading.bad else 0
    oldest = min(reading.step - guard.window_steps, reading.step - reading.skipped_in_row)
    bad = tuple(step for step in (*trouble.bad, *([reading.step] if reading.bad else ())) if step > oldest)
    trouble = trouble._replace(bad=bad)
    unanswered = sum(step > trouble.answered for step in bad)
    too_many = cfg.max_skipped_in_window and unanswered > cfg.max_skipped_in_window
    if not reading.bad or (row <= guard.max_skipped_in_row and not too_many):
        return trouble, None
    trouble = trouble._replace(answered=reading.step)
    for rung in cfg.rungs:
        if rung == "cut_lr" and trouble.cuts < cfg.max_cuts:
            return trouble._replace(cuts=trouble.cuts + 1), Action(rung, bad[0], reading.step)
        if rung == "rewind" and trouble.rewinds < cfg.max_rewinds:
            return trouble._replace(rewinds=trouble.rewinds + 1), Action(rung, bad[0], reading.step)
    return trouble, Action("halt", bad[0], reading.step)


def newest_before(first_bad: int, margin: int) -> int:
    """The checkpoint to go back to is of a step below this."""
    return first_bad - max(margin, 1) + 1


def oldest_clean(first_bad: int, most: int) -> int:
    """No clean checkpoint of a step below this is preferred to a suspect one that is newer."""
    return first_bad - most if most else 0


class Watching(NamedTuple):
    """What the alarms remember: when each was last true, and the losses that a plateau is looked for in."""

    last: tuple[tuple[str, int], ...] = ()
    losses: tuple[float, ...] = ()


def alarms(cfg: RecoveryConfig, watching: Watching, reading: JudgedStep) -> tuple[Watching, list[str]]:
    """(what to remember, new alarms). They decide nothing; one that lasts for several steps is reported once."""
    true, median = [], reading.loss_median  # 0 before the first good step
    if cfg.norm_alarm and reading.grad_norm > cfg.norm_alarm:
        true.append("norm")
    if cfg.spike_alarm and median and reading.loss > ratio_limit(cfg.spike_alarm, median):
        true.append("spike")
    losses = watching.losses
    if cfg.plateau_steps and not reading.bad:
        losses = (*losses, reading.loss)
        if len(losses) >= cfg.plateau_steps:
            half = cfg.plateau_steps // 2
            first, second = sum(losses[:half]) / half, sum(losses[-half:]) / half
            losses = losses[half:]
            if second >= cfg.plateau_ratio * first:
                true.append("plateau")
    last = dict(watching.last)
    new = [name for name in true if name == "plateau" or last.get(name, -1) < reading.step - 1]
    return Watching(tuple((last | dict.fromkeys(true, reading.step)).items()), losses), new
