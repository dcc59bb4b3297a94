"""Settings of microbatches, loss scaling, the guard, spike recovery, the EMA of the parameters and replica checks."""

import dataclasses
import datetime
from typing import Literal

from jaxscale.core.models.config import AUX_LOSSES
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.units import seconds_of

MIN_WINDOW_STEPS = 10  # steps in the window before its median is used


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """A step with a non-finite or absurd gradient, or a spike of the loss, changes only the counts.

    spike_ratio and grad_ratio decide which steps are applied; those of monitor.health have other baselines and only
    report.
    """

    max_grad_norm: float = setting(1e4, "a larger norm before clipping is absurd: 0.1 to 10 is usual, 100 an alarm")
    max_skipped_in_row: int = setting(
        20,
        "more skipped steps than this in a row are answered by train.recovery, or end the run (exit 17)",
        may_change=True,
    )
    max_spikes_in_row: int = setting(
        10,
        "steps that only spike_ratio or spike_sigma reject are skipped at most this often in a row; the next one is "
        "applied as a new level, and the window restarts with it",
        may_change=True,
        read_if="train.guard.spike_ratio or train.guard.spike_sigma",
    )
    window_steps: int = setting(100, "good steps whose losses and norms later steps are compared with")
    spike_ratio: float = setting(
        2.0,
        "a step with a loss above this times the window's median, and half a nat above it, is skipped; 1.5 skips more; "
        "0: none. Raise it before a stage of data.mixture with a loss that much higher",
        may_change=True,
    )
    spike_sigma: float = setting(
        0.0,
        "a step with a loss or norm this many robust standard deviations above its median is skipped; OLMo 2 uses 6 "
        "(arXiv:2501.00656); 0: none",
        may_change=True,
    )
    grad_ratio: float = setting(
        0.0,
        "a step with a norm above this times optim.clip_norm, such as 3, is skipped after the first "
        f"{MIN_WINDOW_STEPS} steps; 0: none",
        may_change=True,
        read_if="optim.clip_norm",
    )

    def __post_init__(self):
        if self.max_grad_norm <= 0:
            raise BadInput(f"max_grad_norm={self.max_grad_norm} must be above 0")
        if self.max_skipped_in_row < 0:
            raise BadInput(f"max_skipped_in_row={self.max_skipped_in_row} must be at least 0")
        if self.window_steps < MIN_WINDOW_STEPS:
            raise BadInput(
                f"window_steps={self.window_steps} must be at least {MIN_WINDOW_STEPS}: fewer have no steady median"
            )
        for name in ("spike_sigma", "grad_ratio", "max_spikes_in_row"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 0 (0: off)")
        if self.spike_ratio and self.spike_ratio <= 1:
            raise BadInput(
                f"spike_ratio={self.spike_ratio} must be above 1, or 0 for none: half of all losses lie above 1"
            )


RecoveryStep = Literal["cut_lr", "rewind"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Recovery from more skipped steps than the guard allows. Each recovery step is an event, and can be replayed."""

    steps: tuple[RecoveryStep, ...] = setting(
        ("rewind",), "in this order, each up to its maximum; then the run ends with exit 17", may_change=True
    )
    max_skipped_in_window: int = setting(
        50,
        "more skipped steps than this among the last guard.window_steps start recovery too; 0: no limit",
        may_change=True,
    )
    cut_factor: float = setting(
        10.0, "cut_lr: the learning rate is divided by this", may_change=True, read_if="train.recovery.steps=cut_lr"
    )
    cut_steps: int = setting(
        100,
        "cut_lr: steps with the divided learning rate, after which it follows the schedule again",
        may_change=True,
        read_if="train.recovery.steps=cut_lr",
    )
    max_cuts: int = setting(
        1,
        "cut_lr: times in a run; a rewind also undoes the cuts after its checkpoint",
        may_change=True,
        read_if="train.recovery.steps=cut_lr",
    )
    rewind_margin_steps: int = setting(
        100,
        "rewind: the checkpoint is at least this many steps older than the first bad step, and the batches from this "
        "many steps before it to the last bad one are skipped; PaLM: 100 steps, 200 to 500 batches (arXiv:2204.02311, "
        "5.1)",
        may_change=True,
        read_if="train.recovery.steps=rewind",
    )
    max_rewinds: int = setting(3, "rewind: times in a run", may_change=True, read_if="train.recovery.steps=rewind")
    max_rewind_steps: int = setting(
        2000,
        "rewind: if the newest clean checkpoint is more than this many steps older than the first bad step, the newest "
        "suspect one before the margin is used; 0: no limit",
        may_change=True,
        read_if="train.recovery.steps=rewind",
    )
    clean_source: str | None = setting(
        None,
        "rewind: a source of data.mixture for the first steps after it; none: none",
        may_change=True,
        read_if="train.recovery.steps=rewind",
    )
    clean_steps: int = setting(
        0, "rewind: number of these steps", may_change=True, read_if="train.recovery.clean_source"
    )
    norm_alarm: float = setting(
        100.0, "a norm above this is reported as an event; the step is applied; 0: never", may_change=True
    )
    spike_alarm: float = setting(
        1.5,
        "a loss above this times the window's median is reported as an event; the step is applied; 0: never",
        may_change=True,
    )
    plateau_steps: int = setting(
        0, "steps in which the second half is compared with the first; 0: never", may_change=True
    )
    plateau_ratio: float = setting(
        0.99,
        "a mean loss of the second half of at least this times that of the first is reported as an event",
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
                f"clean_source={self.clean_source!r} and clean_steps={self.clean_steps} belong together: set both or "
                "neither"
            )
        if len(set(self.steps)) < len(self.steps):
            raise BadInput(f"steps={self.steps} names one twice; max_cuts and max_rewinds say how often")


DYNAMIC = "train.loss_scale.mode=auto and model.compute_dtype=auto|float16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic: halve on overflow, double after `growth_interval` good steps, between `min` and `max`."""

    mode: Literal["auto", "static"] = setting(
        "auto", "auto: dynamic in float16, 1 in other dtypes; static: always `initial`"
    )
    initial: float = setting(
        2.0**15, "first scale", read_if="train.loss_scale.mode=static or model.compute_dtype=auto|float16"
    )
    growth_interval: int = setting(2000, "good steps before the scale doubles", read_if=DYNAMIC)
    max: float = setting(2.0**24, "largest scale", read_if=DYNAMIC)
    min: float = setting(1.0, "smallest scale", read_if=DYNAMIC)

    def __post_init__(self):
        if self.mode == "static" and self.initial <= 0:
            raise BadInput(f"initial={self.initial:g} must be above 0")
        if self.mode == "auto" and not 0 < self.min <= self.initial <= self.max:
            raise BadInput(f"initial={self.initial:g} must be between min={self.min:g} (above 0) and max={self.max:g}")
        if self.growth_interval < 1:
            raise BadInput(f"growth_interval={self.growth_interval} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Exponential moving average of the trainable parameters, float32 and sharded like the moments."""

    decay: float = setting(0.0, "decay rate of the average: 0.999 averages over about 1000 steps; 0: no average")
    start_step: int = setting(
        0,
        "steps after which averaging begins; until then the average equals the parameters",
        read_if="train.ema.decay",
    )

    def __post_init__(self):
        if not 0 <= self.decay < 1:
            raise BadInput(f"decay={self.decay} must be at least 0 and below 1")
        if self.start_step < 0 or self.start_step and not self.decay:
            raise BadInput(f"start_step={self.start_step} must be at least 0, and is for a decay above 0")

    @property
    def on(self) -> bool:
        """True if there is an average."""
        return self.decay > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """Silent data corruption: a wrong bit in one device's copy of the state, found by comparing replicas."""

    every_steps: int = setting(
        0, "steps between comparisons of all copies, also made before each save; 0: none", may_change=True
    )
    max_passing: int = setting(
        3, "transient faults of one device, gone when the same steps ran again; one more ends the run (exit 16)",
        may_change=True, read_if="train.replicas.every_steps",)  # fmt: skip

    def __post_init__(self):
        for name in ("every_steps", "max_passing"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitConfig:
    """Limits of time and money. A run reports when it will overrun, and can decay early to end in time."""

    deadline: str | None = setting(
        None,
        "time by which the run must end: 2026-12-24T18:00 (UTC unless it has a zone), or 12h, 2d, 1h30m after its "
        "first start; none: no deadline",
        may_change=True,
    )
    dollars: float = setting(0.0, "budget for all starts of the run together; 0: no budget", may_change=True)
    chip_hour_dollars: float = setting(
        0.0,
        "price of an hour of one chip; 0: its list price in kernels/hardware.py",
        may_change=True,
        read_if=".dollars",
    )
    on_overrun: Literal["tell", "decay"] = setting(
        "tell",
        "tell: a run that will overrun reports it and continues; decay: it begins its decay early (optim.decay=wsd or "
        "constant) and ends in time at optim.min_lr",
        may_change=True,
        read_if=".deadline or .dollars",
    )

    def __post_init__(self):
        for name in ("dollars", "chip_hour_dollars"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadInput(f"{name}={getattr(self, name)} must be at least 0 (0: none)")
        if self.deadline is not None:
            self.ends_at(0.0)

    @property
    def on(self) -> bool:
        """True if there is a limit."""
        return self.deadline is not None or self.dollars > 0

    def ends_at(self, first_start: float) -> float:
        """Returns the deadline in seconds since 1970; first_start: of the run. Raises BadInput for an invalid time."""
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
class TrainConfig:
    """Gradient accumulation, loss scaling, the guard and recovery."""

    num_microbatches: int = setting(1, "microbatches of a batch, for gradient accumulation with less memory")
    reduce_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype of gradient reductions over devices; bfloat16 halves their bytes and rounds them"
    )
    aux_losses: dict[str, float] = setting({}, f"weight by name of auxiliary losses; there is {', '.join(AUX_LOSSES)}")
    guard: GuardConfig = setting(GuardConfig)
    recovery: RecoveryConfig = setting(RecoveryConfig)
    loss_scale: LossScaleConfig = setting(LossScaleConfig)
    ema: EmaConfig = setting(EmaConfig)
    replicas: ReplicaConfig = setting(ReplicaConfig)

    def __post_init__(self):
        if self.num_microbatches < 1:
            raise BadInput(f"num_microbatches={self.num_microbatches} must be at least 1")
        for name, weight in self.aux_losses.items():
            if name not in AUX_LOSSES:
                raise BadInput(f"aux_losses has {name!r}; there is {', '.join(AUX_LOSSES)}")
            if weight < 0:
                raise BadInput(f"aux_losses.{name}={weight} must not be negative")
