"""Settings of the training loop: limits of time and money, spike recovery and replica checks."""

import dataclasses
import datetime
from typing import Literal

from jaxscale.core.config import StepConfig
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.units import seconds_of

RecoveryStep = Literal["cut_lr", "rewind"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Settings of recovery, which starts if the guard skips too many steps. Each recovery step is an event."""

    steps: tuple[RecoveryStep, ...] = setting(
        ("rewind",),
        "recovery steps in order of use, each up to its maximum number; then the run ends with exit code 17",
        may_change=True,
    )
    max_skipped_in_window: int = setting(
        50,
        "recovery also starts if more than this many of the last guard.window_steps steps were skipped; 0: no limit",
        may_change=True,
    )
    cut_factor: float = setting(
        10.0, "cut_lr: divisor of the learning rate", may_change=True, read_if="train.recovery.steps=cut_lr"
    )
    cut_steps: int = setting(
        100,
        "cut_lr: steps with the divided learning rate, after which it follows the schedule again",
        may_change=True,
        read_if="train.recovery.steps=cut_lr",
    )
    max_cuts: int = setting(
        1,
        "cut_lr: maximum number per run; a rewind also undoes the cuts after its checkpoint",
        may_change=True,
        read_if="train.recovery.steps=cut_lr",
    )
    rewind_margin_steps: int = setting(
        100,
        "rewind: the checkpoint is at least this many steps older than the first bad step, and the batches from that "
        "many steps before the first to the last bad step are skipped; PaLM: 100 steps, 200 to 500 batches "
        "(arXiv:2204.02311, 5.1)",
        may_change=True,
        read_if="train.recovery.steps=rewind",
    )
    max_rewinds: int = setting(
        3, "rewind: maximum number per run", may_change=True, read_if="train.recovery.steps=rewind"
    )
    max_rewind_steps: int = setting(
        2000,
        "rewind: if the newest clean checkpoint is more than this many steps older than the first bad step, the newest "
        "checkpoint before the margin is used even if a step shortly before it was skipped; 0: no limit",
        may_change=True,
        read_if="train.recovery.steps=rewind",
    )
    clean_source: str | None = setting(
        None,
        "rewind: the only source of data.mixture that is used in the first steps after a rewind; none: no change",
        may_change=True,
        read_if="train.recovery.steps=rewind",
    )
    clean_steps: int = setting(
        0, "rewind: number of steps that use only clean_source", may_change=True, read_if="train.recovery.clean_source"
    )
    norm_alarm: float = setting(
        100.0, "a gradient norm above this is reported as an event; the step is applied; 0: never", may_change=True
    )
    spike_alarm: float = setting(
        1.5,
        "a loss above this times the window's median is reported as an event; the step is applied; 0: never",
        may_change=True,
    )
    plateau_steps: int = setting(
        0, "steps of the window whose halves are compared to detect a plateau; 0: never", may_change=True
    )
    plateau_ratio: float = setting(
        0.99,
        "a plateau is reported as an event if the second half's mean loss is at least this times that of the first",
        may_change=True,
        read_if="train.recovery.plateau_steps",
    )

    def __post_init__(self):
        if self.cut_factor <= 1:
            raise BadInput(f"cut_factor={self.cut_factor} must be above 1")
        if self.cut_steps < 1:
            raise BadInput(f"cut_steps={self.cut_steps} must be at least 1")
        limits = ("max_skipped_in_window", "max_cuts", "max_rewinds", "max_rewind_steps")
        for name in (*limits, "rewind_margin_steps", "clean_steps"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 0")
        if bool(self.clean_source) != bool(self.clean_steps):
            raise BadInput(
                f"clean_source={self.clean_source!r} and clean_steps={self.clean_steps} must be set together; set "
                "both, or neither"
            )
        if len(set(self.steps)) < len(self.steps):
            raise BadInput(f"steps={self.steps} has a duplicate; to repeat a step, set max_cuts or max_rewinds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """Settings of the replica comparison, which detects silent data corruption in copies of the state."""

    every_steps: int = setting(
        0, "steps between comparisons of all copies; they are also compared before each save; 0: never", may_change=True
    )
    max_passing: int = setting(
        3, "maximum number of transient faults per device, which do not recur when the steps run again; one more ends "
        "the run (exit code 16)",
        may_change=True, read_if="train.replicas.every_steps",)  # fmt: skip

    def __post_init__(self):
        for name in ("every_steps", "max_passing"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitConfig:
    """Time limit and budget. A run reports an expected overrun, and can begin its decay early to end in time."""

    deadline: str | None = setting(
        None,
        "time by which the run must end: 2026-12-24T18:00 (UTC unless it has a zone), or 12h, 2d, 1h30m after its "
        "first start; none: no deadline",
        may_change=True,
    )
    dollars: float = setting(0.0, "budget for all starts of the run in total; 0: no budget", may_change=True)
    chip_hour_dollars: float = setting(
        0.0,
        "price of one chip hour; 0: the list price in kernels/hardware.py",
        may_change=True,
        read_if=".dollars",
    )
    on_overrun: Literal["tell", "decay"] = setting(
        "tell",
        "tell: a run that will overrun reports it and continues; decay: it starts its decay early (optim.decay=wsd or "
        "constant) and ends in time at optim.min_lr",
        may_change=True,
        read_if=".deadline or .dollars",
    )

    def __post_init__(self):
        for name in ("dollars", "chip_hour_dollars"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadInput(f"{name}={getattr(self, name)} must be finite and at least 0")
        if self.deadline is not None:
            self.ends_at(0.0)

    @property
    def on(self) -> bool:
        """True if there is a limit."""
        return self.deadline is not None or self.dollars > 0

    def ends_at(self, first_start: float) -> float:
        """Returns the deadline for a run that first started at `first_start`; both in seconds since 1970."""
        assert self.deadline is not None, "call it only if there is a deadline"
        if (seconds := seconds_of(self.deadline)) is not None:
            return first_start + seconds
        try:
            when = datetime.datetime.fromisoformat(self.deadline)
            return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()
        except (ValueError, OverflowError):
            raise BadInput(
                f"deadline={self.deadline!r} must be a time such as 2026-12-24T18:00, or a duration such as 12h"
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(StepConfig):
    """Settings of gradient accumulation, loss scaling, the guard and recovery."""

    recovery: RecoveryConfig = setting(RecoveryConfig)
    replicas: ReplicaConfig = setting(ReplicaConfig)
