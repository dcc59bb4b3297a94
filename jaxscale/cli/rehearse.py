"""Tries a run for a few steps with its real config, mesh and storage, and prints GO or NO-GO.

  jaxscale rehearse --config=FILE --workdir=FOLDER

Takes the settings and flags of training, except --stop_after, --replay and --steal_lock. Runs the actual training
command twice in sequence. The first run is uninterrupted: it trains, evaluates and saves. The second run is killed with
SIGKILL while it saves, restarted, and resumes from its checkpoint. Both are compared bit for bit: state, data position,
token ids, metrics. Also checked and timed: storage, first step, step, evaluation, save, restore, and space for the
retained checkpoints.

Exit code 0 for GO, 3 for NO-GO. Files are in WORKDIR/rehearsal, which is deleted after a GO.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import jax

from jaxscale import units
from jaxscale.cli import two_runs
from jaxscale.cli.two_runs import KILL_AFTER, RUNS, TwoRuns, checkpoints_of, comparable, state_bytes
from jaxscale.config import RunConfig
from jaxscale.runtime.checkpoint.write import MARGIN, check_before_run
from jaxscale.runtime.hosts import cluster
from jaxscale.runtime.monitor.history import read_history
from jaxscale.runtime.run.options import allowed_names
from jaxscale.runtime.run.resume_checks import recorded_settings
from jaxscale.settings import config_file
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop, first_line, meaning, put
from jaxscale.system.process import files_as, folder_mode
from jaxscale.tools.qualify.timing import seconds_of

LEAST_STEPS = KILL_AFTER + 1
PROBE_BYTES = 32 << 20  # as large as the files of checkpoints
OK, NO, NOTE, SKIPPED = "ok", "NO", "note", "-"


@dataclasses.dataclass
class RehearsalReport:
    """Table of the rehearsal. Each row is (check, ok | NO | note | -, duration, result)."""

    say: Callable[[str], None]
    rows: list[tuple[str, str, str, str]] = dataclasses.field(default_factory=list)
    phase: str = "storage"  # current check; a Stop is added as its row

    def begin(self, phase: str, line: str) -> None:
        """Starts a phase and prints its description."""
        self.phase = phase
        self.say(f"rehearsal: {line}")

    def add(self, what: str, mark: str, seen: str, seconds: float | None = None) -> None:
        """Adds a row and prints it."""
        took = units.step_duration(seconds) if seconds is not None else ""
        self.rows.append((what, mark, took, seen))
        self.say(f"rehearsal: {what}: {mark}{f', {took}' if took else ''}: {seen}")

    @property
    def goes(self) -> bool:
        """True if no row has failed."""
        return all(mark != NO for _, mark, _, _ in self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsal(TwoRuns):
    """State that the phases share."""

    cfg: RunConfig  # config of the real run
    workdir: str  # work folder of the real run

    @property
    def total_steps(self) -> int:
        """Number of steps of the real run."""
        return paths.read_json(self.folder / "straight" / "config.json")["budget"]["total_steps"]


def try_storage(rehearsal: Rehearsal, report: RehearsalReport) -> int | None:
    """Writes, reads back and deletes a file in the run's storage. Returns the free bytes, or None for a bucket."""
    try:
        folder = paths.make_run_dir(str(rehearsal.folder))
        content, file = os.urandom(PROBE_BYTES), folder / "probe"
        wrote, _ = seconds_of(lambda: paths.write_bytes_atomic(file, content))
        read, back = seconds_of(file.read_bytes)
        file.unlink()
    except Exception as error:  # errors of any storage client
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Stop(Exit.NO_GO, f"cannot write, read and delete a file in {rehearsal.folder}: {cause}") from None
    if back != content:
        raise Stop(
            Exit.NO_GO, f"{rehearsal.folder}: a file of {PROBE_BYTES} bytes was read incorrectly; use other storage"
        )
    speed = f"write {units.size(PROBE_BYTES / wrote)}/s, read {units.size(PROBE_BYTES / max(read, 1e-9))}/s"
    free = None if paths.is_remote(folder) else shutil.disk_usage(folder).free
    room = "free space unknown" if free is None else f"{units.size(free)} free"
    report.add("storage", OK, f"{units.size(PROBE_BYTES)} written and read back: {speed}; {room}", wrote + read)
    return free


def run_straight(rehearsal: Rehearsal, report: RehearsalReport) -> None:
    """Trains, evaluates and saves without interruption, and reports the time of each."""
    report.begin("train", f"an uninterrupted run of {rehearsal.steps} steps")
    seen = rehearsal.run("straight")
    if not rehearsal.is_first:
        report.add("train", OK, f"{rehearsal.steps} steps", seen.seconds)
        return
    checkpoints = checkpoints_of(rehearsal.folder / "straight")
    newest = checkpoints.latest_step() or 0
    if newest != rehearsal.steps:
        reason = f"train_tokens={rehearsal.cfg.train_tokens} is less than the {rehearsal.steps} steps of a rehearsal"
        raise Stop(Exit.NO_GO, f"the run ended at step {newest}: {reason}")
    history = read_history(rehearsal.folder / "straight", None)
    times, losses = history.series("step_seconds")[1], history.series("loss")[1]
    step_seconds = statistics.median(times) if times else None
    report.add("start", OK, "time until the first step completed: data, compilation, evaluation, one step", seen.first)
    text = f"{losses[0]:.4g} to {losses[-1]:.4g}" if losses else "unknown"
    report.add("train", OK, f"{rehearsal.steps} steps, loss {text}; time per step", step_seconds)
    evaluated, found = history.series("validation/loss")
    if evaluated:
        text = f"{len(evaluated)} times, validation loss {found[-1]:.4g} at step {evaluated[-1]}; time per evaluation"
        report.add("evaluate", OK, text, history.latest("validation_seconds"))
    else:
        report.add("evaluate", SKIPPED, "not evaluated, since no text is held out (data.valid..., eval.num_rows)")
    seconds = max((event["seconds"] for event in history.events if event["event"] == "saved"), default=None)
    size = units.size(state_bytes(checkpoints, newest))
    report.add("save", OK, f"{size} per checkpoint; time until it was written and read back", seconds)
    if step_seconds is None:
        return
    every, steps = rehearsal.cfg.checkpoint.save_every_steps, rehearsal.total_steps
    report.add("the run", NOTE, f"{steps:,} steps, excluding evaluations and pauses", steps * step_seconds)
    if every and seconds and seconds > every * step_seconds:
        times = f"{every} steps take {units.duration(every * step_seconds)}, a save {units.duration(seconds)}: "
        report.add("save", NOTE, times + "the run would wait for storage; increase checkpoint.save_every_steps")


def check_space(rehearsal: Rehearsal, report: RehearsalReport, free: int | None) -> None:
    """Reports whether there is space for the retained checkpoints. free: free bytes at first; None for a bucket."""
    report.phase = "space"
    checkpoints = checkpoints_of(rehearsal.folder / "straight")
    size, keep = state_bytes(checkpoints, rehearsal.steps), rehearsal.cfg.checkpoint.keep_last
    if free is None:
        report.add("space", NOTE, f"a checkpoint takes {units.size(size)}; the bucket's quota is unknown")
        return
    steps = [*checkpoints_of(rehearsal.workdir).all_steps(), *checkpoints.all_steps()]  # the rehearsal's are deleted
    try:
        problem = check_before_run(rehearsal.folder, size, keep, steps)
    except Stop as stop:
        problem = str(stop)
    seen = problem or f"a checkpoint takes {units.size(size)}; keep_last={keep} of them fit"
    report.add("space", NO if problem else OK, f"{seen}; {units.size(free)} were free at the start")
    if every := rehearsal.cfg.checkpoint.keep_every_steps:
        added = rehearsal.total_steps // every * size
        if (added + keep * size) * MARGIN > free:
            more = f"keep_every_steps={every} adds {units.size(added)} by the end of the run; move some of them away"
            report.add("space", NOTE, more)


def run_killed(rehearsal: Rehearsal, report: RehearsalReport) -> dict[int, dict]:
    """Starts a second run, kills it while it saves, and resumes it. Returns the metrics logged before the kill."""
    report.begin("kill", f"the same run, killed with SIGKILL after step {KILL_AFTER} while it saves")
    newest, metrics, seen = rehearsal.kill(f"step:{KILL_AFTER}")
    died = f"{meaning(seen.code)} after step {KILL_AFTER}, newest checkpoint {newest}"
    report.add("kill", OK, died, seen.seconds)
    report.begin("resume", "restarted")
    seen = rehearsal.run("killed")
    restored = f"restored step {newest} and trained to {rehearsal.steps}; time until the first step"
    report.add("resume", OK, restored, seen.first)
    return metrics


def compare_runs(rehearsal: Rehearsal, report: RehearsalReport, early: dict[int, dict]) -> None:
    """Compares both runs on the CPU, so that this process never uses a device that training needs."""
    report.begin("compare", "comparing both runs bitwise")
    began = time.monotonic()
    jax.config.update("jax_platforms", "cpu")
    try:
        found = two_runs.compare(rehearsal.folder / "straight", rehearsal.folder / "killed", rehearsal.steps, [early])
    except (OSError, LookupError, BadInput) as error:  # a file is missing or damaged
        raise Stop(Exit.NO_GO, first_line(error)) from None
    if found.differences:
        more = f"; and {len(found.differences) - 3} more" if len(found.differences) > 3 else ""
        what = f"{'; '.join(found.differences[:3])}{more}"
        raise Stop(Exit.NO_GO, f"the runs DIFFER: {what}; resuming is not exact on this machine")
    state = [amount.split()[0] for what, amount, _ in found.rows if what.startswith("state: ")]
    others = ", ".join(what for what, _, _ in found.rows if not what.startswith("state: "))
    seen = f"bitwise identical at step {rehearsal.steps}: {sum(map(int, state))} arrays of the state, {others}"
    report.add("compare", OK, seen, time.monotonic() - began)


FORWARDED_FLAGS = ("allow_change", "run_dir_mode", *cluster.FLAGS)  # --stop_after is set in plan_rehearsal


@dataclasses.dataclass(frozen=True)
class RehearseFlags(cluster.HostFlags):
    config: str = flag("", None, "FILE")
    settings: dict[str, str] = flag(dict, None, "VALUE", name="config.NAME")
    workdir: str | None = flag(None, None, "FOLDER")
    steps: int = flag(
        LEAST_STEPS,
        f"steps of the rehearsal, at least {LEAST_STEPS}; learning rates follow the schedule of the real run",
        least=LEAST_STEPS,
    )
    skip_data: str | None = flag(None, "as in training", "A:B,C:D", name="skip-data")
    init_from: str | None = flag(None, "as in training", "RUN")
    budget_dollars: str | None = flag(None, "as in training", "DOLLARS")
    deadline: str | None = flag(None, "as in training", "12h")
    allow_change: tuple[str, ...] = flag(
        (), "as in training", "NAMES", read=lambda _, text: allowed_names("--allow_change", text)
    )
    mode: int = flag(
        paths.PRIVATE, "as in training", "0700", read=lambda _, text: folder_mode(text), name="run_dir_mode"
    )


@command(RehearseFlags)
def main(arguments: Arguments) -> int:
    """Runs the rehearsal. Returns 0 for GO, 3 for NO-GO."""
    with files_as(arguments.flags.mode):
        return carry_out(plan_rehearsal(arguments))


def carry_out(rehearsal: Rehearsal) -> int:
    """Rehearses, prints the table and the verdict, and cleans up unless the verdict is NO-GO. Returns the exit code."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM also cleans up
    made, keep_folder = missing_folders(rehearsal.workdir), True
    report = RehearsalReport(put)
    try:
        rehearse(rehearsal, report)
        keep_folder = not report.goes
    except Stop as stop:
        report.add(report.phase, NO, str(stop))
    except BaseException as error:
        keep_folder = isinstance(error, Exception)  # to find the cause; an interrupted rehearsal is deleted
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
        if not keep_folder and rehearsal.is_first:
            clean_up(rehearsal, made)
    if not rehearsal.is_first:
        return Exit.DONE if report.goes else Exit.NO_GO
    put("", *units.table([("check", "", "time", "result"), *report.rows], indent=""), "")
    if report.goes:
        put("GO")
        return Exit.DONE
    put(f"NO-GO; both runs are kept in {rehearsal.folder}, their output in {rehearsal.logs}")
    return Exit.NO_GO


def plan_rehearsal(arguments: Arguments) -> Rehearsal:
    """Returns the rehearsal of the command line. Raises BadInput before anything is started."""
    options = arguments.options
    workdir = arguments.flags.workdir or f"runs/{config_file.config_name(arguments.config)}"
    overrides = config_file.with_flags(arguments)
    cfg = config_file.load_config(arguments.config, overrides, lambda: recorded_settings(workdir))
    if cfg.init.what == "run":
        raise BadInput(
            f"init.what='run' starts at a later step, but a rehearsal trains the first {arguments.flags.steps} steps; "
            "rehearse with --config.init.what=state, which starts at step 0 with the same arrays"
        )
    place = cluster.discover_process(options)
    is_first = place is None or place.is_first
    folder = paths.as_path(workdir) / "rehearsal"
    if is_first and any((folder / run).exists() for run in RUNS):
        raise BadInput(f"{folder} contains an earlier rehearsal that ended with NO-GO; inspect it, then delete it")
    folder, remote = folder.absolute(), paths.is_remote(workdir)
    command = [sys.executable, "-m", "jaxscale.cli", "train", f"--stop_after={arguments.flags.steps}"]
    command += [f"--{name}={options[name]}" for name in FORWARDED_FLAGS if name in options]
    return Rehearsal(
        cfg=cfg,
        trained=comparable(cfg, keep_last=1),
        command=command,
        workdir=workdir,
        folder=folder,
        logs=pathlib.Path(tempfile.mkdtemp(prefix="jaxscale-rehearsal-")) if remote else folder,
        steps=arguments.flags.steps,
        env=os.environ,
        say=put,
        is_first=is_first,
        name="" if place is None else f"-{place.process_id}",
    )


def rehearse(rehearsal: Rehearsal, report: RehearsalReport) -> None:
    """Runs all phases. Raises Stop if a phase fails."""
    began = time.monotonic()
    free = try_storage(rehearsal, report) if rehearsal.is_first else None
    run_straight(rehearsal, report)
    if rehearsal.is_first:
        check_space(rehearsal, report, free)
    early = run_killed(rehearsal, report)
    if rehearsal.is_first:
        compare_runs(rehearsal, report, early)
    if report.goes:
        report.add("rehearsal", OK, "total", time.monotonic() - began)


def missing_folders(workdir: str) -> list[pathlib.Path]:
    """Returns the missing folders of a local `workdir`, innermost first."""
    if paths.is_remote(workdir):
        return []
    folder = pathlib.Path(paths.as_path(workdir)).absolute()
    return [path for path in (folder, *folder.parents) if not path.exists()]


def clean_up(rehearsal: Rehearsal, made: Sequence[pathlib.Path]) -> None:
    """Deletes the rehearsal's files, and the folders that were created for it if they are empty."""
    if paths.is_remote(rehearsal.folder) and rehearsal.folder.exists():
        rehearsal.folder.rmtree()
    shutil.rmtree(rehearsal.logs, ignore_errors=True)  # for a local folder, this also deletes both runs
    with contextlib.suppress(OSError):  # the folder is not empty, or already deleted
        for folder in made:
            folder.rmdir()
