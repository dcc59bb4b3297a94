"""The phases of a rehearsal, in processes that hold the devices one after the other; this one asks for none.

The kill is exact, not a race: `checkpoint.save_every_steps=3` starts a second save at step 6, which waits until the
first one is committed, and the process dies by SIGKILL after step 7 (system/faults.py) while the second is written.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale import units
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.write import MARGIN, check_before_run
from jaxscale.cli.attempt import Child
from jaxscale.cli.compare_runs import checkpoints_of, num_bytes, read_metrics
from jaxscale.config import RunConfig
from jaxscale.monitor.events import read_events
from jaxscale.monitor.records import read_records
from jaxscale.system import paths
from jaxscale.system.exits import Stop, may_start_again, meaning

SAVE_EVERY = 3
KILL_AFTER = 2 * SAVE_EVERY + 1
LEAST_STEPS = KILL_AFTER + 1
PROBE_BYTES = 32 << 20  # a file of a size that checkpoints have too
LOOK_SECONDS = 0.2
LOOK_REMOTE_SECONDS = 2.0  # each look at a bucket is a request
STEP_LINE = re.compile(r"^step (\d+)/\d+  loss", re.MULTILINE)
# Where they differ from the user's: so that the few steps hold two saves, and every step can be compared.
SETTINGS = {
    "checkpoint.save_every_steps": str(SAVE_EVERY),
    "checkpoint.keep_last": "1",
    "checkpoint.keep_every_steps": "0",
    "checkpoint.wait_seconds": "3600",  # or a save that takes longer than the real run waits would be put off
    "monitor.log_every_steps": "1",
    "monitor.tensorboard": "false",
    "monitor.progress": "lines",
    "sample.num_tokens": "0",
}
OK, NO, NOTE, SKIPPED = "ok", "NO", "note", "-"


class NoGo(Exception):
    """Ends the rehearsal: what failed is in the table already."""


@dataclasses.dataclass
class Report:
    """The rows of the table: (what, ok | NO | note | -, how long, what was seen)."""

    say: Callable[[str], None]
    rows: list[tuple[str, str, str, str]] = dataclasses.field(default_factory=list)

    def add(self, what: str, mark: str, seen: str, seconds: float | None = None) -> None:
        """Adds a row and says it at once."""
        took = duration(seconds) if seconds is not None else ""
        self.rows.append((what, mark, took, seen))
        self.say(f"rehearsal: {what}: {mark}{f', {took}' if took else ''}: {seen}")

    def fail(self, what: str, seen: str) -> None:
        """Adds a row that means NO-GO, and ends the rehearsal."""
        self.add(what, NO, seen)
        raise NoGo

    @property
    def goes(self) -> bool:
        """True while nothing speaks against it."""
        return all(mark != NO for _, mark, _, _ in self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What the phases share."""

    cfg: RunConfig
    command: Sequence[str]  # the training's, without --workdir
    workdir: str  # of the real run
    folder: Any  # where this one writes
    logs: pathlib.Path  # always on a local disk
    steps: int
    is_first: bool  # of several processes
    name: str  # of this process among several, for its logs

    def start(self, run: str, env: Mapping[str, str] | None = None) -> Child:
        """The training in FOLDER/run: the first `steps` steps of its real horizon."""
        flags = [f"--workdir={self.folder / run}", f"--stop_after={self.steps}"]
        return Child([*self.command, *flags], self.log(run), dict(os.environ) | dict(env or {}))

    def log(self, run: str) -> pathlib.Path:
        """Where the output of a run goes."""
        return self.logs / f"{run}{self.name}.log"


@dataclasses.dataclass
class Watched:
    """What was seen of a child from outside. Seconds count from its start."""

    code: int = 0
    seconds: float = 0.0
    steps: dict[int, float] = dataclasses.field(default_factory=dict)  # when each was reported


def watch(child: Child, checkpoints: Checkpoints, steps: int, say: Callable[[str], None]) -> Watched:
    """Follows the child to its end, telling each step and each checkpoint as they come."""
    began, seen = time.monotonic(), Watched()
    known = set(checkpoints.all_steps())
    already = len(child.log.read_text(errors="replace"))
    pause = LOOK_REMOTE_SECONDS if paths.is_remote(checkpoints.directory) else LOOK_SECONDS
    try:
        running = True
        while running:
            running = child.attempt.running()  # asked first: what it did last is seen too
            now = time.monotonic() - began
            for step in map(int, STEP_LINE.findall(child.log.read_text(errors="replace")[already:])):
                if step not in seen.steps:
                    seen.steps[step] = now
                    say(f"  step {step} of {steps}, {units.duration(now)} after its start")
            for step in checkpoints.all_steps():
                if step not in known:
                    known.add(step)
                    say(f"  checkpoint {step} is committed")
            if running:
                time.sleep(pause)
    finally:
        child.attempt.kill_group()
        seen.code = child.attempt.wait()
    seen.seconds = time.monotonic() - began
    return seen


def try_storage(rehearsal: Rehearsal, report: Report) -> int | None:
    """Free bytes where the run will write, None where nobody knows. Writes a file there, reads it back, deletes it."""
    try:
        folder = paths.make_run_dir(str(rehearsal.folder))
        content, file = os.urandom(PROBE_BYTES), folder / "probe"
        began = time.monotonic()
        paths.write_bytes_atomic(file, content)
        wrote = time.monotonic() - began
        back = file.read_bytes()
        read = time.monotonic() - began - wrote
        file.unlink()
    except Exception as error:  # of any storage's client
        report.fail("storage", f"{rehearsal.folder} cannot be written, read and deleted: {first_line(error)}")
    if back != content:
        report.fail("storage", f"{rehearsal.folder}: {PROBE_BYTES} bytes came back changed; do not trust this storage")
    speed = f"write {units.size(PROBE_BYTES / wrote)}/s, read {units.size(PROBE_BYTES / max(read, 1e-9))}/s"
    free = None if paths.is_remote(folder) else shutil.disk_usage(folder).free
    room = "its limits are not known" if free is None else f"{units.size(free)} free"
    report.add("storage", OK, f"{units.size(PROBE_BYTES)} written and read back: {speed}; {room}", wrote + read)
    return free


def run_straight(rehearsal: Rehearsal, report: Report) -> None:
    """The run that is left alone: train, evaluate, save. Says what each takes."""
    report.say(f"rehearsal: a run of {rehearsal.steps} steps that is left alone")
    checkpoints = checkpoints_of(rehearsal.folder / "straight")
    child = rehearsal.start("straight")
    seen = watch(child, checkpoints, rehearsal.steps, report.say)
    if seen.code:
        report.fail("train", f"{meaning(seen.code)}: {child.tail()}")
    if not rehearsal.is_first:
        report.add("train", OK, f"{rehearsal.steps} steps", seen.seconds)
        return
    newest = checkpoints.latest_step() or 0
    if newest != rehearsal.steps:
        report.fail(
            "train", f"it ended at step {newest}: train_tokens={rehearsal.cfg.train_tokens} is shorter than this"
        )
    records = read_metrics(rehearsal.folder / "straight", clocked=True)
    times = [record["step_seconds"] for record in records.values() if record.get("step_seconds")]
    step_seconds = statistics.median(times) if times else None
    first = min(seen.steps.values(), default=None)
    report.add("start", OK, "until the first step was done: data, compiling, evaluation, one step", first)
    report.add("train", OK, f"{rehearsal.steps} steps, losses {losses_text(records)}; time of a step", step_seconds)
    report_evaluation(rehearsal, report)
    size = sum(num_bytes(leaf) for leaf in checkpoints.read_record(newest)["leaves"].values())
    events = read_events(rehearsal.folder / "straight")
    seconds = max((event["seconds"] for event in events if event["event"] == "saved"), default=None)
    report.add("save", OK, f"{units.size(size)} a checkpoint; time until it was written and read back", seconds)
    report_pace(rehearsal, report, step_seconds, seconds)


def report_evaluation(rehearsal: Rehearsal, report: Report) -> None:
    """Says what evaluating gave and took."""
    metrics = read_records(rehearsal.folder / "straight" / "metrics.jsonl")
    records = [record for record in metrics if "validation/loss" in record]
    if not records:
        report.add("evaluate", SKIPPED, "no held-out text (data.valid..., eval.num_rows), so nothing was evaluated")
        return
    last = records[-1]
    seen = f"{len(records)} times, validation loss {last['validation/loss']:.4g} at step {last['step']}; time of one"
    report.add("evaluate", OK, seen, last.get("validation_seconds"))


def report_pace(rehearsal: Rehearsal, report: Report, step_seconds: float | None, save_seconds: float | None) -> None:
    """Says how long the real run would take, and whether its saves keep up."""
    total = paths.read_json(rehearsal.folder / "straight" / "config.json")["budget"]["total_steps"]
    every = rehearsal.cfg.checkpoint.save_every_steps
    if step_seconds is None:
        return
    report.add("the run", NOTE, f"{total:,} steps, without evaluations and pauses", total * step_seconds)
    if every and save_seconds and save_seconds > every * step_seconds:
        told = f"{every} steps take {units.duration(every * step_seconds)} and a save {units.duration(save_seconds)}: "
        report.add("save", NOTE, told + "the run would wait for its storage; raise checkpoint.save_every_steps")


def check_space(rehearsal: Rehearsal, report: Report, free: int | None) -> None:
    """Says whether the checkpoints that will be kept have room, by the rule that training goes by when it starts.

    Args: free: bytes that were free before the rehearsal wrote anything; None for a bucket.
    """
    checkpoints = checkpoints_of(rehearsal.folder / "straight")
    leaves = checkpoints.read_record(rehearsal.steps)["leaves"].values()
    size, keep = sum(map(num_bytes, leaves)), rehearsal.cfg.checkpoint.keep_last
    if free is None:
        report.add(
            "space", NOTE, f"a checkpoint takes {units.size(size)}; what the bucket allows is not known from here"
        )
        return
    there = [*checkpoints_of(rehearsal.workdir).all_steps(), *checkpoints.all_steps()]  # ours go before it begins
    try:
        wrong = check_before_run(rehearsal.folder, size, keep, there)
    except Stop as stop:
        wrong = str(stop)
    mark, seen = (
        NO if wrong else OK,
        wrong or f"a checkpoint takes {units.size(size)}; those of keep_last={keep} have room",
    )
    report.add("space", mark, f"{seen}; {units.size(free)} were free at first")
    every = rehearsal.cfg.checkpoint.keep_every_steps
    if every:
        total = paths.read_json(rehearsal.folder / "straight" / "config.json")["budget"]["total_steps"]
        forever = total // every * size
        if (forever + keep * size) * MARGIN > free:
            report.add("space", NOTE, f"keep_every_steps={every} adds {units.size(forever)} in the end; move some away")


def run_killed(rehearsal: Rehearsal, report: Report) -> dict[int, dict]:
    """The same run, killed while it saves, and started again; its metrics at the kill."""
    report.say(f"rehearsal: the same run, killed with SIGKILL after step {KILL_AFTER} while it saves")
    workdir = rehearsal.folder / "killed"
    checkpoints = checkpoints_of(workdir)
    crash = {"JAXSCALE_CRASH_AT": f"step:{KILL_AFTER}"} if rehearsal.is_first else {}
    child = rehearsal.start("killed", crash)
    seen = watch(child, checkpoints, rehearsal.steps, report.say)
    if not may_start_again(seen.code):
        report.fail("kill", f"it was to be killed, and instead: {meaning(seen.code)}: {child.tail()}")
    newest, early = checkpoints.latest_step() or 0, read_metrics(workdir)
    if not newest:
        report.fail("kill", f"after {meaning(seen.code)} at step {KILL_AFTER} there was no checkpoint to go on from")
    report.add(
        "kill", OK, f"{meaning(seen.code)} after step {KILL_AFTER}, checkpoint {newest} being the newest", seen.seconds
    )

    report.say("rehearsal: started again")
    child = rehearsal.start("killed")
    seen = watch(child, checkpoints, rehearsal.steps, report.say)
    if seen.code:
        report.fail("go on", f"{meaning(seen.code)}: {child.tail()}")
    if rehearsal.is_first and f"going on from step {newest}" not in child.log.read_text(errors="replace"):
        report.fail("go on", f"it did not go on from step {newest}; see {child.log}")
    first = min(seen.steps.values(), default=None)
    report.add(
        "go on", OK, f"restored step {newest} and trained to {rehearsal.steps}; time until the first step", first
    )
    return early


def compare_runs(rehearsal: Rehearsal, report: Report, early: Mapping[int, Any]) -> None:
    """Holds both runs against each other, in a process whose only device is the CPU."""
    report.say("rehearsal: comparing both runs, bit for bit")
    began, kept = time.monotonic(), rehearsal.logs / "metrics_at_kill.json"
    paths.write_json(kept, early)
    runs = [str(rehearsal.folder / "straight"), str(rehearsal.folder / "killed")]
    command = [sys.executable, "-m", "jaxscale.cli.compare_runs", *runs, str(rehearsal.steps), str(kept)]
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
        report.fail("compare", f"NOT the same: {'; '.join(differences[:3])}{more}; going on is not exact here")
    state = [amount.split()[0] for what, amount, _ in rows if what.startswith("state: ")]
    others = ", ".join(what for what, _, _ in rows if not what.startswith("state: "))
    seen = f"bit for bit the same at step {rehearsal.steps}: {sum(map(int, state))} arrays of the state, {others}"
    report.add("compare", OK, seen, time.monotonic() - began)


def losses_text(records: Mapping[int, Mapping[str, Any]]) -> str:
    """'5.55 to 5.12'."""
    losses = [record["loss"] for _, record in sorted(records.items()) if record.get("loss") is not None]
    return f"{losses[0]:.4g} to {losses[-1]:.4g}" if losses else "unknown"


def duration(seconds: float) -> str:
    """'12ms', '3.4s', '1m20s'."""
    return f"{seconds * 1e3:.3g}ms" if seconds < 1 else units.duration(seconds)


def first_line(error: BaseException) -> str:
    """The error in one line."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
