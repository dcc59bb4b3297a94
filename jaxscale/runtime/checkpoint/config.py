"""Settings of checkpoints, exports, the run lock, and the weights that a new run starts with."""

import dataclasses
import re
from typing import Any, Literal

from jaxscale.schema import adjustable, setting
from jaxscale.system.exits import BadInput

ARROW = "=>"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def check_not_negative(config: Any, *names: str) -> None:
    """Raises BadInput if one of these settings is below 0."""
    for name in names:
        if getattr(config, name) < 0:
            raise BadInput(f"{name}={getattr(config, name)} must be 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """Copies of the state on each host, made every few seconds, for a restart after a kill."""

    folder: str | None = adjustable(
        None,
        "folder of each host for its part of the newest states, such as /dev/shm/jaxscale; $VARIABLES are expanded on "
        "each host; none: no local copies",
    )
    every_seconds: float = adjustable(5.0, "seconds between two local copies", read_if=".folder")
    every_steps: int = adjustable(0, "steps between two local copies; 0: by every_seconds", read_if=".folder")
    neighbour: bool = adjustable(
        True, "each host also stores the copies of another host, so that one host can be replaced", read_if=".folder"
    )

    def __post_init__(self):
        if self.folder is not None and ("://" in self.folder or not self.folder.strip()):
            raise BadInput(f"folder={self.folder!r} must be a local folder of the host, such as /dev/shm/jaxscale")
        if self.every_seconds <= 0:
            raise BadInput(f"every_seconds={self.every_seconds} must be above 0")
        check_not_negative(self, "every_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and which checkpoints are kept."""

    save_every_steps: int = adjustable(500, "steps between two checkpoints; 0: only at the end")
    keep_last: int = adjustable(3, "newest checkpoints that are kept")
    keep_every_steps: int = adjustable(0, "checkpoints of steps divisible by this are never deleted; 0: none")
    keep_best: int = adjustable(0, "checkpoints with the lowest validation loss that are kept", read_if="eval.num_rows")
    verify_saved: bool = adjustable(True, "read every checkpoint back after writing it, and compare it bitwise")
    on_corrupt: Literal["fallback", "stop"] = adjustable(
        "fallback", "if a checkpoint cannot be read: fallback resumes from the one before it, stop ends the run"
    )
    wait_seconds: float = adjustable(
        30.0, "how long a step waits for the previous save; after that, its own save is postponed"
    )
    max_failed_saves: int = adjustable(3, "consecutive failed saves after which the run stops")
    max_save_seconds: float = adjustable(
        1800.0, "how long a save may take, including waits for storage, before the run stops"
    )
    local: LocalConfig = setting(LocalConfig)

    def __post_init__(self):
        check_not_negative(self, "save_every_steps", "keep_every_steps", "keep_best", "wait_seconds")
        if self.keep_last < 1:
            raise BadInput(f"keep_last={self.keep_last} must be at least 1, or there would be nothing to resume from")
        if self.max_failed_saves < 1:
            raise BadInput(f"max_failed_saves={self.max_failed_saves} must be at least 1: the first failure stops")
        if self.max_save_seconds <= 0:
            raise BadInput(f"max_save_seconds={self.max_save_seconds} must be above 0, such as 3600")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LockConfig:
    """Time limits of the run lock and of unreachable storage."""

    lease_seconds: float = adjustable(
        20.0, "the lock of the work folder is renewed this often, and expires after three times that"
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
    """Source of a new run's weights. Read once, before step 0: a run that has a checkpoint resumes from it."""

    from_path: str | None = setting(
        None,
        "work folder of another run, or WORKDIR/checkpoints/STEP, for the initial weights; none: random weights",
    )
    what: Literal["params", "ema", "state", "run"] = setting(
        "params",
        "params: its weights; ema: their moving average; state: its weights, optimizer state and average; run: the "
        "whole run, so that this run continues from that step and data position as a branch",
    )
    rename: tuple[str, ...] = setting(
        (), "'REGEX=>REPLACEMENT', applied in order to names of leaves of the checkpoint that differ from this config"
    )
    skip: tuple[str, ...] = setting(
        (), "regexes of leaves: in this config they keep their random values, in the checkpoint they are ignored"
    )
    resize_vocab: bool = setting(
        False, "true: the vocabulary may have another size; rows are added or removed at its end"
    )
    new_rows: Literal["mean", "init"] = setting(
        "mean", "values of added rows: the mean of the old rows, or as in a new model", read_if="init.resize_vocab"
    )
    experts: Literal["none", "copy", "split"] = setting(
        "none",
        "how a dense model is converted to model.experts: each expert is a copy of its MLP (copy, arXiv:2212.05055), "
        "or one of the equal parts of its MLP (split, arXiv:2410.07524); none: the model already has experts",
    )

    def __post_init__(self):
        for rule in self.rename:
            if ARROW not in rule:
                raise BadInput(f"rename={rule!r} must be 'REGEX{ARROW}REPLACEMENT'")
        for pattern in (*(rule.partition(ARROW)[0] for rule in self.rename), *self.skip):
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadInput(f"{pattern!r} is not a regular expression: {error}") from None
        if self.experts != "none" and self.what == "state":
            raise BadInput(
                f"what='state' has no moments for the experts of experts={self.experts!r}; use 'params' or 'ema'"
            )
        changed = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        lost = [name for name in ("rename", "skip", "resize_vocab", "experts") if name in changed]
        if self.what == "run" and lost:
            raise BadInput(f"what='run' resumes all arrays unchanged, but {lost[0]} changes some; use 'params'")
        if self.from_path is None and changed:
            raise BadInput(f"{changed[0]} applies only to a run that starts from another's weights; also set from_path")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Weights as a Hugging Face model in WORKDIR/export/STEP, written in the background after a save."""

    every_steps: int = adjustable(
        0,
        "steps between two exports, made from checkpoints, so a multiple of checkpoint.save_every_steps; the last "
        "step is exported too; 0: none",
    )
    dtype: Literal["bfloat16", "float32"] = adjustable("bfloat16", "dtype of the exported weights")
    ema: bool = adjustable(False, "true: export the moving average of train.ema")
    keep: int = adjustable(1, "newest exports that are kept; 0: all")
    push_to: str | None = adjustable(
        None,
        "OWNER/NAME on the Hugging Face Hub to which each export is pushed, with the token in HF_TOKEN; none: no push",
    )

    def __post_init__(self):
        check_not_negative(self, "every_steps", "keep")
        if self.push_to is not None:
            check_hub_name("push_to", self.push_to)
            if not self.every_steps:
                raise BadInput("push_to has no effect with every_steps=0, which disables exports; set every_steps")


def check_hub_name(setting_name: str, name: str) -> None:
    """Raises BadInput unless the name is a valid Hub repository name."""
    if not HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        raise BadInput(f"{setting_name}={name!r} must be a repository on the Hub, written as OWNER/NAME")
