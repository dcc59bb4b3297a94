"""A trial: one run of an experiment, its folder, and its result."""

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from jaxscale import config_file, schema
from jaxscale.config import RunConfig
from jaxscale.reporting.history import History, read_history
from jaxscale.reporting.status import BEGINS
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit

LOSS = "validation/loss"
DIGEST = 10  # hex digits of a trial's name: 40 bits, for a folder of a few thousand runs
LABEL = 60  # characters of a name before them
CHANCE = 0.99  # of the loss of a guess without a model, log(vocabulary)
ENDS = (Exit.DONE, Exit.NON_FINITE)  # after which a trial is not run again: trained to its end, or diverged

# As given on a command line. What guards a real run would hide what an experiment looks for: a loss that explodes is a
# result here. What is not finite is still skipped, and ends the run when it comes too often.
UNGUARDED = {"train.guard.spike_ratio": "0", "train.recovery.steps": "()", "monitor.health.on": "false"}


@dataclasses.dataclass(frozen=True)
class Base:
    """The config that an experiment varies."""

    file: str  # of --config, with ':argument' where it takes one
    overrides: Mapping[str, str]
    cfg: RunConfig

    @classmethod
    def load(cls, file: str, overrides: Mapping[str, str]) -> "Base":
        """The config file with the overrides of the command line."""
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
        """A trial with these settings and this seed, a difference from the config's own.

        Args: also: further settings, which its label leaves out. at: the label's settings, if not `settings`. kill_at:
        as of Trial.
        """
        changed = UNGUARDED | {name: as_text(value) for name, value in {**(also or {}), **settings}.items()}
        overrides = dict(self.overrides) | changed | {"seed": str(self.cfg.seed + seed)}
        return Trial(self, dict(settings) if at is None else at, overrides, seed, kill_at)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run: the base with some settings changed. Its config raises BadInput for invalid ones."""

    base: Base
    at: Mapping[str, Any]  # what it is varied in, by dotted name: its place in the experiment
    overrides: Mapping[str, str]
    seed: int
    kill_at: int | None = None  # the step after which it is killed once, as by a power cut, and started again

    @property
    def label(self) -> str:
        """'peak_lr=0.002 batch_tokens=4096 seed=1'."""
        parts = [f"{name.rpartition('.')[2]}={as_text(value)}" for name, value in self.at.items()]
        return " ".join([*parts, f"seed={self.seed}"])

    @functools.cached_property
    def cfg(self) -> RunConfig:
        """Its config, checked."""
        return config_file.load_config(self.base.file, dict(self.overrides))

    @functools.cached_property
    def digest(self) -> str:
        """Of all its settings: equal for two trials that are the same run, however their labels write it."""
        facts = schema.flatten(schema.to_dict(self.cfg)) | ({"kill_at": self.kill_at} if self.kill_at else {})
        text = json.dumps(facts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]

    @property
    def name(self) -> str:
        """The name of its folder: a label to read, and the digest, by which it is found again."""
        plain = re.sub(r"[^\w.=+-]+", "_", self.label, flags=re.ASCII)[:LABEL]
        return f"{plain}-{self.digest}"

    def command(self, folder: Any) -> list[str]:
        """The arguments of `jaxscale train` that make this run."""
        settings = [f"--config.{name}={value}" for name, value in sorted(self.overrides.items())]
        return [f"--config={self.base.file}", *settings, f"--workdir={folder}"]


class Result(NamedTuple):
    """The result of a trial."""

    trial: Trial
    folder: str
    diverged: bool  # ended by its guard, or no better than chance
    loss: float  # held-out, after the last step, nats per token; NaN where it diverged
    history: History
    seconds: float  # of its steps alone

    @property
    def seed(self) -> int:
        """Of the trial."""
        return self.trial.seed

    def at(self, name: str) -> Any:
        """The value of a setting that the experiment varies."""
        return self.trial.at[name]

    def curve(self, name: str = "loss") -> tuple[list[float], list[float]]:
        """(tokens, values) of a metric, as it was logged."""
        rows = [row for row in self.history.rows if is_number(row.get(name)) and is_number(row.get("tokens_seen"))]
        return [row["tokens_seen"] for row in rows], [row[name] for row in rows]


def is_number(value: Any) -> TypeGuard[int | float]:
    """Returns True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def as_text(value: Any) -> str:
    """The value as it is written on a command line."""
    return f"{value:.6g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def distinct(trials: Iterable[Trial]) -> list[Trial]:
    """The trials, each run once: of two labels for the same run the last."""
    return list({trial.digest: trial for trial in trials}.values())


def folder_of(trial: Trial, work: Any) -> Any:
    """The folder of a trial's run, made or not: found by its digest, whichever experiment made it."""
    folder = paths.as_path(work) / "runs"
    found = sorted(folder.glob(f"*-{trial.digest}"))
    return found[0] if found else folder / trial.name


def outcome_of(folder: Any) -> int | None:
    """The exit code, of ENDS, with which the run ended wherever it was started; None where it has to run, or go on."""
    try:
        history = read_history(str(folder))
    except BadInput:  # nothing of a run is there
        return None
    last = next((event for event in reversed(history.events) if event["event"] in (*BEGINS, "stopped")), {})
    code, total = last.get("code"), history.part("budget").get("total_steps")
    if last.get("event") != "stopped" or code not in ENDS:
        return None
    finished = is_number(total) and history.reached_step is not None and history.reached_step >= total
    return code if code == Exit.NON_FINITE or finished else None


def read_result(trial: Trial, work: Any) -> Result:
    """The Result of a trial that has ended. Raises BadInput where it has not."""
    folder = folder_of(trial, work)
    code = outcome_of(folder)
    if code is None:
        raise BadInput(f"{folder} is of a run that has not ended; run the experiment again, and it goes on")
    history = read_history(str(folder), None)
    loss = history.latest(LOSS)
    # A run that ends no better than chance learned nothing that can be compared: such rates collapse a model whose
    # norms keep it finite.
    diverged = code == Exit.NON_FINITE or loss is None or loss > CHANCE * math.log(trial.cfg.model.vocab_size)
    end = math.nan if loss is None or diverged else loss
    return Result(trial, str(folder), diverged, end, history, seconds_of(history.rows))


def seconds_of(rows: Iterable[Mapping[str, Any]]) -> float:
    """Seconds of the steps; a row is of all steps since the one before, and tells what one took."""
    total, before = 0.0, 0
    for row in rows:
        if "step_seconds" in row:
            total += (row["step"] - before) * (row["step_seconds"] if is_number(row["step_seconds"]) else 0.0)
            before = row["step"]
    return total


def groups_of(results: Sequence[Result], key: Callable[[Result], Any]) -> dict[Any, list[Result]]:
    """The results by `key`, in the order in which keys appear."""
    found: dict[Any, list[Result]] = {}
    for result in results:
        found.setdefault(key(result), []).append(result)
    return found
