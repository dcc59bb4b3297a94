"""The phases of a rehearsal. Child processes use the devices one after the other; this process uses none."""

import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from jaxscale import units
from jaxscale.cli.attempt import Child
from jaxscale.cli.compare_runs import checkpoints_of, num_bytes, read_metrics
from jaxscale.cli.two_runs import KILL_AFTER, TwoRuns
from jaxscale.config import RunConfig
from jaxscale.runtime.checkpoint.write import MARGIN, check_before_run
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.monitor.records import read_records
from jaxscale.system import paths
from jaxscale.system.exits import Stop, meaning

LEAST_STEPS = KILL_AFTER + 1
PROBE_BYTES = 32 << 20  # a file as large as those of checkpoints
OK, NO, NOTE, SKIPPED = "ok", "NO", "note", "-"


class NoGo(Exception):
    """Ends the rehearsal after a failure, which is in the table."""


@dataclasses.dataclass
class Report:
    """The rows of the table: (check, ok | NO | note | -, duration, result)."""

    say: Callable[[str], None]
    rows: list[tuple[str, str, str, str]] = dataclasses.field(default_factory=list)

    def add(self, what: str, mark: str, seen: str, seconds: float | None = None) -> None:
        """Adds a row and prints it."""
        took = duration(seconds) if seconds is not None else ""
        self.rows.append((what, mark, took, seen))
        self.say(f"rehearsal: {what}: {mark}{f', {took}' if took else ''}: {seen}")

    def fail(self, what: str, seen: str) -> NoReturn:
        """Adds a row that means NO-GO, and ends the rehearsal."""
        self.add(what, NO, seen)
        raise NoGo

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Fails with the message of a Stop in the block."""
        try:
            yield
        except Stop as stop:
            self.fail(what, str(stop))

    @property
    def goes(self) -> bool:
        """True if no row has failed."""
        return all(mark != NO for _, mark, _, _ in self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsal(TwoRuns):
    """The state that the phases share."""

    cfg: RunConfig  # of the real run
    workdir: str  # of the real run


def try_storage(rehearsal: Rehearsal, report: Report) -> int | None:
    """Writes, reads back and deletes a file in the run's storage. Returns its free bytes, None for a bucket."""
    try:
        folder = paths.make_run_dir(str(rehearsal.folder))
        content, file = os.urandom(PROBE_BYTES), folder / "probe"
        began = time.monotonic()
        paths.write_bytes_atomic(file, content)
        wrote = time.monotonic() - began
        back = file.read_bytes()
        read = time.monotonic() - began - wrote
        file.unlink()
    except Exception as error:  # any storage client's errors
        report.fail("storage", f"{rehearsal.folder} cannot be written, read and deleted: {first_line(error)}")
    if back != content:
        report.fail("storage", f"{rehearsal.folder}: {PROBE_BYTES} bytes came back changed; do not trust this storage")
    speed = f"write {units.size(PROBE_BYTES / wrote)}/s, read {units.size(PROBE_BYTES / max(read, 1e-9))}/s"
    free = None if paths.is_remote(folder) else shutil.disk_usage(folder).free
    room = "its limits are not known" if free is None else f"{units.size(free)} free"
    report.add("storage", OK, f"{units.size(PROBE_BYTES)} written and read back: {speed}; {room}", wrote + read)
    return free


def run_straight(rehearsal: Rehearsal, report: Report) -> None:
    """Trains, evaluates and saves without interruption, and reports the time of each."""
    report.say(f"rehearsal: an uninterrupted run of {rehearsal.steps} steps")
    with report.failing("train"):
        seen = rehearsal.run("straight")
    if not rehearsal.is_first:
        report.add("train", OK, f"{rehearsal.steps} steps", seen.seconds)
        return
    checkpoints = checkpoints_of(rehearsal.folder / "straight")
    newest = checkpoints.latest_step() or 0
    if newest != rehearsal.steps:
        report.fail(
            "train", f"it ended at step {newest}: train_tokens={rehearsal.cfg.train_tokens} is shorter than this"
        )
    records = read_metrics(rehearsal.folder / "straight", timing=True)
    times = [record["step_seconds"] for record in records.values() if record.get("step_seconds")]
    step_seconds = statistics.median(times) if times else None
    report.add("start", OK, "until the first step was done: data, compiling, evaluation, one step", seen.first)
    report.add("train", OK, f"{rehearsal.steps} steps, losses {losses_text(records)}; time of a step", step_seconds)
    report_evaluation(rehearsal, report)
    size = sum(num_bytes(leaf) for leaf in checkpoints.read_record(newest)["leaves"].values())
    events = read_events(rehearsal.folder / "straight")
    seconds = max((event["seconds"] for event in events if event["event"] == "saved"), default=None)
    report.add("save", OK, f"{units.size(size)} a checkpoint; time until it was written and read back", seconds)
    report_pace(rehearsal, report, step_seconds, seconds)


def report_evaluation(rehearsal: Rehearsal, report: Report) -> None:
    """Reports the validation loss and the time of an evaluation."""
    metrics = read_records(rehearsal.folder / "straight" / "metrics.jsonl")
    records = [record for record in metrics if "validation/loss" in record]
    if not records:
        report.add("evaluate", SKIPPED, "no held-out text (data.valid..., eval.num_rows), so nothing was evaluated")
        return
    last = records[-1]
    seen = f"{len(records)} times, validation loss {last['validation/loss']:.4g} at step {last['step']}; time of one"
    report.add("evaluate", OK, seen, last.get("validation_seconds"))


def report_pace(rehearsal: Rehearsal, report: Report, step_seconds: float | None, save_seconds: float | None) -> None:
    """Reports the duration of the real run, and if its saves take longer than the steps between them."""
    total = paths.read_json(rehearsal.folder / "straight" / "config.json")["budget"]["total_steps"]
    every = rehearsal.cfg.checkpoint.save_every_steps
    if step_seconds is None:
        return
    report.add("the run", NOTE, f"{total:,} steps, without evaluations and pauses", total * step_seconds)
    if every and save_seconds and save_seconds > every * step_seconds:
        times = f"{every} steps take {units.duration(every * step_seconds)} and a save {units.duration(save_seconds)}: "
        report.add("save", NOTE, times + "the run would wait for its storage; raise checkpoint.save_every_steps")


def check_space(rehearsal: Rehearsal, report: Report, free: int | None) -> None:
    """Reports if the retained checkpoints fit, by the rule that training applies at its start.

    Args: free: free bytes before the rehearsal wrote anything; None for a bucket.
    """
    checkpoints = checkpoints_of(rehearsal.folder / "straight")
    leaves = checkpoints.read_record(rehearsal.steps)["leaves"].values()
    size, keep = sum(map(num_bytes, leaves)), rehearsal.cfg.checkpoint.keep_last
    if free is None:
        report.add("space", NOTE, f"a checkpoint takes {units.size(size)}; the bucket's quota is not known")
        return
    steps = [*checkpoints_of(rehearsal.workdir).all_steps(), *checkpoints.all_steps()]  # the latter will be deleted
    try:
        problem = check_before_run(rehearsal.folder, size, keep, steps)
    except Stop as stop:
        problem = str(stop)
    seen = problem or f"a checkpoint takes {units.size(size)}; those of keep_last={keep} have room"
    report.add("space", NO if problem else OK, f"{seen}; {units.size(free)} were free at first")
    every = rehearsal.cfg.checkpoint.keep_every_steps
    if every:
        total = paths.read_json(rehearsal.folder / "straight" / "config.json")["budget"]["total_steps"]
        added = total // every * size
        if (added + keep * size) * MARGIN > free:
            report.add("space", NOTE, f"keep_every_steps={every} adds {units.size(added)} in the end; move some away")


def run_killed(rehearsal: Rehearsal, report: Report) -> dict[int, dict]:
    """Kills the same run while it saves, and restarts it. Returns its metrics at the kill."""
    report.say(f"rehearsal: the same run, killed with SIGKILL after step {KILL_AFTER} while it saves")
    with report.failing("kill"):
        (kill,) = rehearsal.kill()
    died = meaning(kill.seen.code)
    report.add("kill", OK, f"{died} after step {KILL_AFTER}, newest checkpoint {kill.newest}", kill.seen.seconds)

    report.say("rehearsal: restarted")
    with report.failing("resume"):
        seen = rehearsal.run("killed")
    restored = f"restored step {kill.newest} and trained to {rehearsal.steps}; time until the first step"
    report.add("resume", OK, restored, seen.first)
    return kill.metrics


def compare_runs(rehearsal: Rehearsal, report: Report, early: Mapping[int, Any]) -> None:
    """Compares both runs in a process whose only device is the CPU."""
    report.say("rehearsal: comparing both runs, bit for bit")
    began, metrics_file = time.monotonic(), rehearsal.logs / "metrics_at_kill.json"
    paths.write_json(metrics_file, early)
    runs = [str(rehearsal.folder / "straight"), str(rehearsal.folder / "killed")]
    command = [sys.executable, "-m", "jaxscale.cli.compare_runs", *runs, str(rehearsal.steps), str(metrics_file)]
    env = dict(os.environ) | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    child = Child(command, rehearsal.log("compare"), env)
    code = child.attempt.wait()
    try:
        found = json.loads(child.tail())
        rows, differences = found["rows"], found["differences"]
    except (ValueError, TypeError, KeyError):
        report.fail("compare", f"{meaning(code)}: {child.tail()}")
    if differences or code:
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        report.fail("compare", f"NOT the same: {'; '.join(differences[:3])}{more}; resuming is not exact here")
    state = [amount.split()[0] for what, amount, _ in rows if what.startswith("state: ")]
    others = ", ".join(what for what, _, _ in rows if not what.startswith("state: "))
    seen = f"bit for bit the same at step {rehearsal.steps}: {sum(map(int, state))} arrays of the state, {others}"
    report.add("compare", OK, seen, time.monotonic() - began)


def losses_text(records: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns text such as '5.55 to 5.12'."""
    losses = [record["loss"] for _, record in sorted(records.items()) if record.get("loss") is not None]
    return f"{losses[0]:.4g} to {losses[-1]:.4g}" if losses else "unknown"


def duration(seconds: float) -> str:
    """Returns text such as '12ms', '3.4s' or '1m20s'."""
    return f"{seconds * 1e3:.3g}ms" if seconds < 1 else units.duration(seconds)


def first_line(error: BaseException) -> str:
    """Returns the first line of the error."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
