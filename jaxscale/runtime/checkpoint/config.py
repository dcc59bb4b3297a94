"""Settings of checkpoints, exports, the run lock, and the initial weights of a run."""

import dataclasses
import re
from typing import Any, Literal

from jaxscale.schema import adjustable, setting
from jaxscale.system.exits import BadInput

ARROW = "=>"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def check_not_negative(config: Any, *names: str) -> None:
    """Raises BadInput if one of the named settings is negative."""
    for name in names:
        if getattr(config, name) < 0:
            raise BadInput(f"{name}={getattr(config, name)} must be 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """Copies of the train state on the hosts, made every few seconds, for restarts after a crash."""

    folder: str | None = adjustable(
        None,
        "folder on each host for copies of its part of the state, such as /dev/shm/jaxscale; $VARIABLES are expanded "
        "on each host; none: no local copies",
    )
    every_seconds: float = adjustable(5.0, "seconds between two local copies", read_if=".folder")
    every_steps: int = adjustable(0, "steps between two local copies; 0: use every_seconds", read_if=".folder")
    neighbour: bool = adjustable(
        True, "true: each host also stores a different host's copies, so that one host can be lost", read_if=".folder"
    )

    def __post_init__(self):
        if self.folder is not None and ("://" in self.folder or not self.folder.strip()):
            raise BadInput(f"folder={self.folder!r} must be a local folder of the host, such as /dev/shm/jaxscale")
        if self.every_seconds <= 0:
            raise BadInput(f"every_seconds={self.every_seconds} must be above 0")
        check_not_negative(self, "every_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Schedule and retention policy of checkpoints."""

    save_every_steps: int = adjustable(500, "steps between two checkpoints; 0: only at the end")
    keep_last: int = adjustable(3, "number of newest checkpoints to keep")
    keep_every_steps: int = adjustable(0, "checkpoints of steps divisible by this number are never deleted; 0: none")
    keep_best: int = adjustable(
        0, "number of checkpoints with the lowest validation loss to keep", read_if="eval.num_rows"
    )
    verify_saved: bool = adjustable(True, "true: read every checkpoint back after writing, and compare it bitwise")
    on_corrupt: Literal["fallback", "stop"] = adjustable(
        "fallback", "if a checkpoint cannot be read: fallback resumes from the previous checkpoint, stop ends the run"
    )
    wait_seconds: float = adjustable(30.0, "seconds to wait for the previous save before a new save is postponed")
    max_failed_saves: int = adjustable(3, "number of consecutive failed saves after which the run stops")
    max_save_seconds: float = adjustable(
        1800.0, "the run stops if a save takes longer than this, including waits for storage"
    )
    local: LocalConfig = setting(LocalConfig)

    def __post_init__(self):
        check_not_negative(self, "save_every_steps", "keep_every_steps", "keep_best", "wait_seconds")
        if self.keep_last < 1:
            raise BadInput(f"keep_last={self.keep_last} must be at least 1, so that a run can be resumed")
        if self.max_failed_saves < 1:
            raise BadInput(
                f"max_failed_saves={self.max_failed_saves} must be at least 1; use 1 to stop after one failed save"
            )
        if self.max_save_seconds <= 0:
            raise BadInput(f"max_save_seconds={self.max_save_seconds} must be above 0; use, for example, 3600")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LockConfig:
    """Time limits of the run lock and of unreachable storage."""

    lease_seconds: float = adjustable(
        20.0, "seconds between renewals of the work folder's lock; the lock expires after three times this period"
    )
    outage_seconds: float = adjustable(
        3600.0, "the run stops (exit code 14) if its work folder cannot be reached for this long; 0: never"
    )

    def __post_init__(self):
        if self.lease_seconds <= 0:
            raise BadInput(f"lease_seconds={self.lease_seconds} must be above 0")
        check_not_negative(self, "outage_seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Source of a new run's weights. Ignored by a run that resumes from its own checkpoint."""

    from_path: str | None = setting(
        None,
        "work folder of a different run, or WORKDIR/checkpoints/STEP, for the initial weights; none: random weights",
    )
    what: Literal["params", "ema", "state", "run"] = setting(
        "params",
        "parts to load; params: weights; ema: moving average of the weights; state: weights, optimizer state and "
        "average; run: the whole run, which this run continues as a branch from the same step and data position",
    )
    rename: tuple[str, ...] = setting(
        (), "rules 'REGEX=>REPLACEMENT', applied in order to the names of the checkpoint's leaves"
    )
    skip: tuple[str, ...] = setting(
        (), "regexes of leaves that are ignored in the checkpoint and keep their random initial values in this config"
    )
    resize_vocab: bool = setting(
        False, "true: the vocabulary size may differ; rows are added or removed at the end of the vocabulary"
    )
    new_rows: Literal["mean", "init"] = setting(
        "mean",
        "values of added vocabulary rows; mean: the mean of the old rows; init: initialized as in a new model",
        read_if="init.resize_vocab",
    )
    experts: Literal["none", "copy", "split"] = setting(
        "none",
        "conversion of a dense model to model.experts; copy: each expert is a copy of the MLP (arXiv:2212.05055); "
        "split: each expert is one of the equal parts of the MLP (arXiv:2410.07524); none: no conversion",
    )

    def __post_init__(self):
        for rule in self.rename:
            if ARROW not in rule:
                raise BadInput(f"rename={rule!r} must have the form 'REGEX{ARROW}REPLACEMENT'")
        for pattern in (*(rule.partition(ARROW)[0] for rule in self.rename), *self.skip):
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadInput(f"rename or skip has an invalid regular expression {pattern!r}: {error}") from None
        if self.experts != "none" and self.what == "state":
            raise BadInput(
                f"experts={self.experts!r} cannot convert optimizer moments; use what='params' or 'ema', not 'state'"
            )
        changed = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        lost = [name for name in ("rename", "skip", "resize_vocab", "experts") if name in changed]
        if self.what == "run" and lost:
            raise BadInput(f"what='run' restores arrays unchanged and does not support {lost[0]}; use what='params'")
        if self.from_path is None and changed:
            raise BadInput(f"{changed[0]} requires a checkpoint with initial weights; set from_path")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Exports of the weights as Hugging Face models to WORKDIR/export/STEP, written in the background after saves."""

    every_steps: int = adjustable(
        0,
        "steps between two exports, a multiple of checkpoint.save_every_steps because exports are made from "
        "checkpoints; the last step is also exported; 0: no exports",
    )
    dtype: Literal["bfloat16", "float32"] = adjustable("bfloat16", "dtype of the exported weights")
    ema: bool = adjustable(False, "true: export the moving average of the weights (train.ema)")
    keep: int = adjustable(1, "number of newest exports to keep; 0: all")
    push_to: str | None = adjustable(
        None,
        "Hugging Face Hub repository OWNER/NAME to which each export is pushed with the token HF_TOKEN; none: no push",
    )

    def __post_init__(self):
        check_not_negative(self, "every_steps", "keep")
        if self.push_to is not None:
            check_hub_name("push_to", self.push_to)
            if not self.every_steps:
                raise BadInput("push_to requires exports, but every_steps=0 disables them; set every_steps")


def check_hub_name(setting_name: str, name: str) -> None:
    """Raises BadInput unless the name is a valid Hub repository name."""
    if not HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        raise BadInput(f"{setting_name}={name!r} must be a Hugging Face Hub repository, written as OWNER/NAME")
