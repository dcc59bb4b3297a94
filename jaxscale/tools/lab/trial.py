"""Trials (runs of an experiment), their folders and their results."""

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.runtime.monitor.history import History, is_finite, read_history
from jaxscale.settings import config_file
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit
from jaxscale.tools.reporting.status import BEGINS

LOSS, RATE = "validation/loss", "optim.peak_lr"
DIGEST = 10  # hex digits in a trial's name (40 bits, enough for a few thousand runs in a folder)
LABEL = 60  # characters of the label in a name, before the digest
CHANCE = 0.99  # a run diverged if its loss is above this factor times log(vocabulary), a uniform guess
ENDS = (Exit.DONE, Exit.NON_FINITE)  # exit codes of finished and diverged trials, which are not run again

# Guards of a production run are disabled because they would hide divergence, which is a result of an experiment.
# Non-finite steps are still skipped, and end the run if there are too many.
UNGUARDED = {"train.guard.spike_ratio": "0", "train.recovery.steps": "()", "monitor.health.on": "false"}


@dataclasses.dataclass(frozen=True)
class Base:
    """The config that an experiment varies."""

    file: str  # value of --config, with ':argument' if the file takes one
    overrides: Mapping[str, str]
    cfg: RunConfig

    @classmethod
    def load(cls, file: str, overrides: Mapping[str, str]) -> "Base":
        """Loads the config file with the overrides of the command line."""
        return cls(file, dict(overrides), config_file.load_config(file, dict(overrides)))

    def with_settings(
        self,
        settings: Mapping[str, Any],
        seed: int = 0,
        also: Mapping[str, Any] | None = None,
        *,
        at: Mapping[str, Any] | None = None,
        kill_at: int | None = None,
    ) -> "Trial":
        """Returns a trial. seed: added to cfg.seed. also: settings that the label omits. at: settings in the label."""
        changed = UNGUARDED | {name: as_text(value) for name, value in {**(also or {}), **settings}.items()}
        overrides = dict(self.overrides) | changed | {"seed": str(self.cfg.seed + seed)}
        return Trial(self, dict(settings) if at is None else at, overrides, seed, kill_at)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run of the base config with changed settings. `cfg` raises BadInput if the settings are invalid."""

    base: Base
    at: Mapping[str, Any]  # {dotted name: value} of the varied settings
    overrides: Mapping[str, str]
    seed: int
    kill_at: int | None = None  # step after which the run is killed once and restarted

    @property
    def label(self) -> str:
        """The varied settings and the seed, such as 'peak_lr=0.002 batch_tokens=4096 seed=1'."""
        parts = [f"{name.rpartition('.')[2]}={as_text(value)}" for name, value in self.at.items()]
        return " ".join([*parts, f"seed={self.seed}"])

    @functools.cached_property
    def cfg(self) -> RunConfig:
        """The validated config of the trial."""
        return config_file.load_config(self.base.file, dict(self.overrides))

    @functools.cached_property
    def digest(self) -> str:
        """Hash of all settings. Trials with equal settings have the same digest, even if their labels differ."""
        facts = schema.flatten(schema.to_dict(self.cfg)) | ({"kill_at": self.kill_at} if self.kill_at else {})
        text = json.dumps(facts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]

    @property
    def name(self) -> str:
        """Name of the folder: a readable label, then the digest."""
        plain = re.sub(r"[^\w.=+-]+", "_", self.label, flags=re.ASCII)[:LABEL]
        return f"{plain}-{self.digest}"

    def command(self, folder: Any) -> list[str]:
        """Returns the arguments of `jaxscale train` for this run."""
        settings = [f"--config.{name}={value}" for name, value in sorted(self.overrides.items())]
        return [f"--config={self.base.file}", *settings, f"--workdir={folder}"]


class Result(NamedTuple):
    """The result of a trial."""

    trial: Trial
    folder: str
    diverged: bool  # True if non-finite or no better than chance
    loss: float  # final held-out loss in nats per token; NaN if diverged
    history: History
    seconds: float  # time of the steps only

    @property
    def seed(self) -> int:
        """The trial's seed, as an offset from the config's seed."""
        return self.trial.seed

    def at(self, name: str) -> Any:
        """Returns the value of a setting that the experiment varies."""
        return self.trial.at[name]

    def curve(self, name: str = "loss") -> tuple[list[float], list[float]]:
        """Returns (tokens, values) of a logged metric without non-finite values."""
        rows = [row for row in self.history.rows if is_finite(row.get(name)) and is_finite(row.get("tokens_seen"))]
        return [row["tokens_seen"] for row in rows], [row[name] for row in rows]


def as_text(value: Any) -> str:
    """Returns a value as text for a command line."""
    return f"{value:.6g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def distinct(trials: Iterable[Trial]) -> list[Trial]:
    """Returns the trials without duplicates. Of trials with the same digest, only the last is returned."""
    return list({trial.digest: trial for trial in trials}.values())


def folder_of(trial: Trial, work: Any) -> Any:
    """Returns the folder of a trial, which may not exist yet. Trials with the same digest share a folder."""
    folder = paths.as_path(work) / "runs"
    found = sorted(folder.glob(f"*-{trial.digest}"))
    return found[0] if found else folder / trial.name


def outcome_of(folder: Any) -> int | None:
    """Returns the exit code (in ENDS) of the finished run in a folder, or None if no run has finished."""
    try:
        history = read_history(str(folder))
    except BadInput:  # the folder has no run
        return None
    last = next((event for event in reversed(history.events) if event["event"] in (*BEGINS, "stopped")), {})
    code, total = last.get("code"), history.part("budget").get("total_steps")
    if last.get("event") != "stopped" or code not in ENDS:
        return None
    finished = is_finite(total) and history.reached_step is not None and history.reached_step >= total
    return code if code == Exit.NON_FINITE or finished else None


def read_result(trial: Trial, work: Any) -> Result:
    """Returns the Result of a trial. Raises BadInput if the trial is not finished."""
    folder = folder_of(trial, work)
    code = outcome_of(folder)
    if code is None:
        raise BadInput(f"{folder}: the run is not finished; run the experiment again to resume it")
    history = read_history(str(folder), None)
    loss = history.latest(LOSS)
    # A final loss no better than chance counts as diverged: a high learning rate can collapse a model although its
    # normalization keeps the loss finite.
    diverged = code == Exit.NON_FINITE or loss is None or loss > CHANCE * math.log(trial.cfg.model.vocab_size)
    end = math.nan if loss is None or diverged else loss
    return Result(trial, str(folder), diverged, end, history, seconds_of(history.rows))


def seconds_of(rows: Iterable[Mapping[str, Any]]) -> float:
    """Returns the total step time in seconds. `step_seconds` of a row is the mean since the previous row."""
    total, before = 0.0, 0
    for row in rows:
        if "step_seconds" in row:
            total += (row["step"] - before) * (row["step_seconds"] if is_finite(row["step_seconds"]) else 0.0)
            before = row["step"]
    return total


def groups_of(results: Sequence[Result], key: Callable[[Result], Any]) -> dict[Any, list[Result]]:
    """Returns {key: results}, with keys in order of their first appearance."""
    found: dict[Any, list[Result]] = {}
    for result in results:
        found.setdefault(key(result), []).append(result)
    return found
