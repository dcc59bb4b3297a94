"""Trains one config twice and compares the runs: `straight` is uninterrupted, `killed` is killed and resumed.

Used by `verify resume` and `rehearse`. Each run is the actual training command in a separate process, and both read one
config file. The kill is deterministic: with `checkpoint.save_every_steps=3`, the second save, at step 6, waits until
the first is committed, and the process kills itself at a named point (system/faults.py). The comparison is bitwise and
covers state, data position, resolved config, token ids and metrics. It uses only the CPU and reads each state in parts.
"""

import dataclasses
import math
import pathlib
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxscale import units
from jaxscale.cli.shrink import without_extras
from jaxscale.config import RunConfig
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import named_leaves, nest
from jaxscale.runtime.checkpoint.verify import leaf_bytes
from jaxscale.runtime.monitor.records import read_records
from jaxscale.settings.config_file import file_text
from jaxscale.system import paths
from jaxscale.system.attempt import Attempt
from jaxscale.system.exits import Exit, Stop, may_start_again, meaning

SAVE_EVERY = 3
KILL_AFTER = 2 * SAVE_EVERY + 1
RUNS = ("straight", "killed")
POLL_SECONDS = 0.2
REMOTE_POLL_SECONDS = 2.0  # each poll of a bucket is a request
SKIPPED_LINE = re.compile(r"\s*(-*$|For simplicity, JAX has removed its internal frames)")  # also matches blank lines
STEP_LINE = re.compile(r"^step (\d+)/\d+  loss", re.MULTILINE)


def comparable(cfg: RunConfig, keep_last: int) -> RunConfig:
    """Returns cfg with a checkpoint every SAVE_EVERY steps, every step logged, no postponed saves and no ramps."""
    saves = dict(save_every_steps=SAVE_EVERY, keep_last=keep_last, keep_every_steps=0, wait_seconds=3600)
    checkpoint = dataclasses.replace(cfg.checkpoint, **saves)
    monitor = dataclasses.replace(cfg.monitor, log_every_steps=1, tensorboard=False, progress="lines")
    changes = dict(batch_ramp=(), seq_len_ramp=(), checkpoint=checkpoint, monitor=monitor)
    return dataclasses.replace(without_extras(cfg), **changes)


class Watched(NamedTuple):
    """Result of a training run."""

    begin: int  # checkpoint from which the run resumed, or 0
    code: int
    seconds: float
    first: float | None  # seconds until the first step


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoRuns:
    """Config, command and folder of the two runs."""

    trained: RunConfig
    command: Sequence[str]  # training command without --config and --workdir
    folder: Any  # folder of both runs
    logs: pathlib.Path  # local folder of the logs
    steps: int
    env: Mapping[str, str]
    say: Callable[[str], None]  # called with a line for each step and checkpoint
    is_first: bool = True  # whether this process is the first of several
    name: str = ""  # suffix of this process's files, if there are several processes

    def start(self, run: str, kill_at: str = "") -> Attempt:
        """Starts the training in FOLDER/run, with its output in log(run)."""
        config = self.log(f"config{self.name}").with_suffix(".py")
        self.logs.mkdir(parents=True, exist_ok=True)
        paths.write_text_atomic(config, file_text(self.trained))
        crash = {"JAXSCALE_CRASH_AT": kill_at} if kill_at and self.is_first else {}
        flags = [f"--config={config}", f"--workdir={self.folder / run}"]
        with self.log(run).open("ab") as file:
            return Attempt([*self.command, *flags], {**self.env, **crash}, output=file.fileno())

    def log(self, run: str) -> pathlib.Path:
        """Returns the log file of a run."""
        return self.logs / f"{run}{self.name}.log"

    def newest(self) -> int:
        """Returns the newest committed step of the killed run, or 0."""
        return checkpoints_of(self.folder / "killed").latest_step() or 0

    def run(self, run: str, kill_at: str = "") -> Watched:
        """Starts or resumes a run and waits until it ends. Raises Stop if its exit code or first step is unexpected."""
        begin, log = self.newest() if run == "killed" else 0, self.log(run)
        code, seconds, first = self.watch(self.start(run, kill_at), run)
        expected = code == (-signal.SIGKILL if kill_at else 0)
        if not (expected or kill_at and not self.is_first and may_start_again(code)):
            instead = "expected to be killed, but: " if kill_at else ""
            reason = f"{instead}{meaning(code)}: {last_line(log)}"
            raise Stop(Exit(code) if code and code in list(Exit) else Exit.ERROR, reason)
        if begin and self.is_first and f"resuming from step {begin}" not in log.read_text("utf-8", "replace"):
            raise Stop(Exit.ERROR, f"the run did not resume from step {begin}; see {log}")
        return Watched(begin, code, seconds, first)

    def watch(self, attempt: Attempt, run: str) -> tuple[int, float, float | None]:
        """Reports steps and checkpoints until the command ends. Returns (code, seconds, seconds to the first step)."""
        checkpoints, log, began = checkpoints_of(self.folder / run), self.log(run), time.monotonic()
        saved, already = set(checkpoints.all_steps()), len(log.read_text("utf-8", "replace"))
        pause = REMOTE_POLL_SECONDS if paths.is_remote(checkpoints.directory) else POLL_SECONDS
        done: dict[int, float] = {}  # {step: seconds until its line in the log}
        try:
            running = True
            while running:
                running = attempt.running()  # checked before reading, so that the last output is read
                now = time.monotonic() - began
                for step in map(int, STEP_LINE.findall(log.read_text("utf-8", "replace")[already:])):
                    if done.setdefault(step, now) == now:
                        self.say(f"  step {step} of {self.steps}, {units.duration(now)} after the start")
                for step in checkpoints.all_steps():
                    if step not in saved:
                        saved.add(step)
                        self.say(f"  checkpoint {step} is committed")
                if running:
                    time.sleep(pause)
        finally:
            attempt.kill_group()
            code = attempt.wait()
        return code, time.monotonic() - began, min(done.values(), default=None)

    def kill(self, point: str) -> tuple[int, dict[int, dict], Watched]:
        """Runs the second run until it is killed at a point of system/faults.py.

        Returns (newest checkpoint, metrics logged before the kill, result). Raises the errors of run(), and Stop if
        no checkpoint exists.
        """
        seen = self.run("killed", point)
        if not (newest := self.newest()):
            raise Stop(Exit.ERROR, f"the run has no checkpoint to resume from: {meaning(seen.code)} at {point}")
        return newest, read_metrics(self.folder / "killed"), seen


def last_line(log: pathlib.Path) -> str:
    """Returns the last line of a log, except for JAX's note after a traceback."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if not SKIPPED_LINE.match(line)]
    return lines[-1] if lines else f"no output in {log}"


SHOWN_DIFFERENCES = 6
READ_BYTES = 1 << 30  # maximum size of a part, for each run
# substrings of metric names that depend on time or on the machine
TIMING_METRICS = ("seconds", "per_second", "mfu", "bytes", "goodput/", "device/", "host_")


class RunComparison(NamedTuple):
    """Result of a comparison of two runs."""

    rows: list[tuple[str, str, str]]  # (what was compared, its size, number of differences)
    differences: list[str]  # one line each

    @property
    def passes(self) -> bool:
        """True if nothing is missing or differs."""
        return not self.differences

    def lines(self) -> list[str]:
        """Returns the table and the verdict."""
        shown = [f"  {line}" for line in self.differences[:SHOWN_DIFFERENCES]]
        more = len(self.differences) - len(shown)
        shown += [f"  and {more} more"] if more else []
        verdict = "resume: exact" if self.passes else f"resume: NOT exact, {len(self.differences)} differences"
        return [*units.table([("compared", "size", "differences"), *self.rows], indent=""), verdict, *shown]


def read_metrics(workdir: Any) -> dict[int, dict[str, Any]]:
    """Returns {step: training metrics}, without TIMING_METRICS."""
    compared = lambda name: not any(part in name for part in TIMING_METRICS)
    trained = [r for r in read_records(paths.as_path(workdir) / "metrics.jsonl") if "tokens_hash" in r]
    return {record["step"]: {name: record[name] for name in record if compared(name)} for record in trained}


def compare(one: Any, other: Any, steps: int, seen: list[dict[int, dict]] | None = None) -> RunComparison:
    """Compares the checkpoints of step `steps` and the metrics. seen: metrics that `other` logged before each kill."""
    checkpoints, other_checkpoints = checkpoints_of(one), checkpoints_of(other)
    run, other_run = checkpoints.read_run(steps), other_checkpoints.read_run(steps)
    rows, differences = [], []

    def note(what: str, amount: str, found: Iterable[str]) -> None:
        lines = [f"{what}: {line}" for line in found]
        rows.append((what, amount, str(len(lines))))
        differences.extend(lines)

    for group, amount, found in compare_state(checkpoints, other_checkpoints, steps):
        note(f"state: {group}", amount, found)
    note("data position", ", ".join(run["data"]), dict_differences(run["data"], other_run["data"]))
    note("resolved config", "all settings", dict_differences(run["config"], other_run["config"]))

    metrics, other_metrics = read_metrics(one), read_metrics(other)
    logged = range(1, steps + 1)
    if paths.is_remote(other):  # a killed run may not have uploaded its last lines
        logged = [step for step in logged if step in other_metrics]
    for what, names in (("token ids", ("tokens_hash", "batch_index")), ("metrics", ())):
        note(what, f"{len(logged)} steps", metric_differences(metrics, other_metrics, logged, names))
    found = [line for early in seen or () for line in metric_differences(metrics, early, early)]
    note("metrics before a kill", f"{sum(map(len, seen or ()))} steps", found)
    return RunComparison(rows, differences)


def compare_state(one: Checkpoints, other: Checkpoints, step: int) -> Iterator[tuple[str, str, list[str]]]:
    """Yields (group, size, a line for each differing leaf). Reads in parts, since two states may not fit in memory."""
    leaves, other_leaves = one.read_record(step)["leaves"], other.read_record(step)["leaves"]
    groups: dict[str, list[str]] = {}
    for name in sorted(leaves | other_leaves):
        groups.setdefault(name.split("/")[0], []).append(name)
    for group, names in groups.items():
        shared = [name for name in names if name in leaves and name in other_leaves]
        which = lambda name: "second" if name in other_leaves else "first"
        found = [f"{name} is only in the {which(name)} run" for name in names if name not in shared]
        for part in batches(shared, {name: leaf_bytes(*leaves[name][:2]) for name in shared}):
            state = read_leaves(one, step, leaves, part)
            other_state = read_leaves(other, step, other_leaves, part)
            found += [line for name in part if (line := leaf_difference(name, state[name], other_state[name]))]
        numbers = sum(math.prod(leaves[name][0]) for name in shared)
        yield group, f"{len(names)} arrays, {numbers:,} numbers", found


def batches(names: Sequence[str], sizes: Mapping[str, int]) -> list[list[str]]:
    """Returns the names in groups of at most READ_BYTES. A leaf that is larger is a group by itself."""
    parts: list[list[str]] = []
    filled = 0
    for name in names:
        filled += sizes[name]
        if not parts or filled > READ_BYTES:
            parts.append([])
            filled = sizes[name]
        parts[-1].append(name)
    return parts


def state_bytes(checkpoints: Checkpoints, step: int) -> int:
    """Returns the size of the arrays in a checkpoint."""
    return sum(leaf_bytes(*leaf[:2]) for leaf in checkpoints.read_record(step)["leaves"].values())


def read_leaves(checkpoints: Checkpoints, step: int, leaves: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns {name: NumPy array} of the named leaves."""
    target = {name: np.empty(leaves[name][0], jnp.dtype(leaves[name][1])) for name in names}
    return named_leaves(checkpoints.restore(step, nest(target), partial=True))


def checkpoints_of(workdir: Any) -> Checkpoints:
    """Opens the checkpoints of a work folder for reading."""
    return Checkpoints(paths.as_path(workdir) / "checkpoints", CheckpointConfig())


def leaf_difference(name: str, one: np.ndarray, other: np.ndarray) -> str:
    """Returns '' if two arrays are bitwise equal, or a description of the difference."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{name} is {one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
    if one.tobytes() == other.tobytes():
        return ""
    unequal = int(np.sum(one != other))
    largest = np.max(np.abs(one.astype(np.float64) - other.astype(np.float64)))
    return f"{name}: {unequal:,} of {one.size:,} numbers differ, by at most {largest:.3g}"


def metric_differences(one: Mapping, other: Mapping, steps: Iterable, names: Sequence[str] = ()) -> Iterator[str]:
    """Yields one line for each step with differing values. names: metrics to compare, by default all."""
    for step in steps:
        if step not in one or step not in other:
            yield f"step {step} is missing from metrics.jsonl"
        elif lines := dict_differences(one[step], other[step], names):
            yield f"step {step}: {'; '.join(lines)}"


def dict_differences(one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str] = ()) -> list[str]:
    """Returns 'NAME is VALUE and VALUE' for each differing entry. names: entries to compare, by default all."""
    pairs = {name: (one.get(name), other.get(name)) for name in sorted(names or one.keys() | other.keys())}
    return [f"{name} is {left!r} and {right!r}" for name, (left, right) in pairs.items() if left != right]
