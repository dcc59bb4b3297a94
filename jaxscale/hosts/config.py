"""How long each phase of a run may take."""

import dataclasses
import math

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangConfig:
    """How long a phase of the run may take before it counts as a hang (exit 15), in seconds; 0: for ever."""

    step_seconds: float = setting(600.0, "one training step, and the metrics of the step before", may_change=True)
    data_seconds: float = setting(600.0, "waiting for the batch of a step", may_change=True)
    compile_seconds: float = setting(3600.0, "the first step of a start, with its compilation", may_change=True)
    restore_seconds: float = setting(3600.0, "reading a checkpoint, or making the first state", may_change=True)
    save_seconds: float = setting(3600.0, "saving a checkpoint, from the snapshot to its verification", may_change=True)
    eval_seconds: float = setting(3600.0, "one validation, or one sample, with its compilation", may_change=True)
    statistics_seconds: float = setting(
        3600.0,
        "one look at the statistics of the layers, with its compilation",
        may_change=True,
        read_if="monitor.statistics_every_steps",
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            seconds = getattr(self, field.name)
            if not (math.isfinite(seconds) and (seconds == 0 or seconds >= 1)):
                raise BadInput(f"{field.name}={seconds} must be 0 (never a hang) or at least 1")
