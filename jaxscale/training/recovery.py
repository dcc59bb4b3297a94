"""Spike recovery: what the host does about skipped steps. Cut the learning rate, rewind, stop (settings train.ladder).

A pure function of the metrics that every process reads at the same step, so that all come to the same answer. Steps are
counted from 1, as metrics.jsonl does: step n is the one after which the state has done n.
"""

import dataclasses
from typing import Literal, NamedTuple

from jaxscale.monitor.spikes import ratio_limit
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.training.guard import GuardConfig

Rung = Literal["cut_lr", "rewind"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Answers to more skipped steps than the guard allows. Every one is an event, and can be replayed."""

    rungs: tuple[Rung, ...] = setting(
        ("rewind",), "in this order, each as often as it may; then the run ends with exit 17", may_change=True
    )
    max_skipped_in_window: int = setting(
        50, "more skipped steps than this among the last guard.window_steps are answered too; 0: any", may_change=True
    )
    cut_factor: float = setting(
        10.0, "cut_lr: the learning rate is divided by this", may_change=True, read_if="train.ladder.rungs=cut_lr"
    )
    cut_steps: int = setting(
        100,
        "cut_lr: for so many steps, after which it is what it would have been",
        may_change=True,
        read_if="train.ladder.rungs=cut_lr",
    )
    max_cuts: int = setting(
        1,
        "cut_lr: times in a run; those behind a rewind are forgotten with their steps",
        may_change=True,
        read_if="train.ladder.rungs=cut_lr",
    )
    rewind_margin_steps: int = setting(
        100,
        "rewind: the checkpoint is at least so old when the first bad step comes, and the batches from so many steps "
        "before it to the last bad one are skipped; PaLM: 100 steps, 200 to 500 batches (arXiv:2204.02311, 5.1)",
        may_change=True,
        read_if="train.ladder.rungs=rewind",
    )
    max_rewinds: int = setting(3, "rewind: times in a run", may_change=True, read_if="train.ladder.rungs=rewind")
    max_rewind_steps: int = setting(
        2000,
        "rewind: a clean checkpoint more than so many steps older than the first bad one is passed over for the newest "
        "suspect one before the margin; 0: none is",
        may_change=True,
        read_if="train.ladder.rungs=rewind",
    )
    clean_source: str | None = setting(
        None,
        "rewind: a source of data.mixture that the first steps afterwards learn from; none: none",
        may_change=True,
        read_if="train.ladder.rungs=rewind",
    )
    clean_steps: int = setting(
        0, "rewind: how many steps these are", may_change=True, read_if="train.ladder.clean_source"
    )
    norm_alarm: float = setting(100.0, "a norm above this is told as an event, and applied; 0: never", may_change=True)
    spike_alarm: float = setting(
        1.5,
        "a loss above so many times the window's median is told as an event, and applied; 0: never",
        may_change=True,
    )
    plateau_steps: int = setting(
        0, "so many steps, of which the second half is compared with the first; 0: never", may_change=True
    )
    plateau_ratio: float = setting(
        0.99,
        "a mean loss of the second half of at least this part of the first is told as an event",
        may_change=True,
        read_if="train.ladder.plateau_steps",
    )

    def __post_init__(self):
        if self.cut_factor <= 1 or self.cut_steps < 1:
            raise BadInput("cut_factor must be above 1 and cut_steps at least 1")
        most = ("max_skipped_in_window", "max_cuts", "max_rewinds", "max_rewind_steps")
        for name in (*most, "rewind_margin_steps", "clean_steps"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 0")
        if bool(self.clean_source) != bool(self.clean_steps):
            raise BadInput("clean_source and clean_steps belong together: a source, and how many steps it is for")
        if len(set(self.rungs)) < len(self.rungs):
            raise BadInput(f"rungs={self.rungs} names one twice; max_cuts and max_rewinds say how often")


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


class Cut(NamedTuple):
    """Divide the learning rate, and stay."""

    first_bad: int
    last_bad: int


class Rewind(NamedTuple):
    """Go back to before the first bad step, and leave out the batches up to the last one."""

    first_bad: int
    last_bad: int


class Halt(NamedTuple):
    """No rung is left."""

    first_bad: int
    last_bad: int


Action = Cut | Rewind | Halt | None


def decide(cfg: RecoveryConfig, guard: GuardConfig, trouble: Trouble, reading: JudgedStep) -> tuple[Trouble, Action]:
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
            return trouble._replace(cuts=trouble.cuts + 1), Cut(bad[0], reading.step)
        if rung == "rewind" and trouble.rewinds < cfg.max_rewinds:
            return trouble._replace(rewinds=trouble.rewinds + 1), Rewind(bad[0], reading.step)
    return trouble, Halt(bad[0], reading.step)


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
