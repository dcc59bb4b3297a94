"""Runs trials as parallel processes, skipping trials that have ended, and reports progress and remaining time."""

import concurrent.futures
import contextlib
import os
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale import units
from jaxscale.runtime.hosts.discovery import TPU_FILES
from jaxscale.runtime.monitor.run_files import read_lines
from jaxscale.system import paths
from jaxscale.system.attempt import Attempt
from jaxscale.system.exits import BadInput, Exit, Stop, meaning
from jaxscale.tools.lab.trial import ENDS, Result, Trial, folder_of, outcome_of, read_result

POLL_SECONDS = 0.1
LAST_LINES = 12  # lines of a failed trial's output in the error message
OUTPUT = "lab.log"  # file with the output of a trial
KILLED = "killed"  # file with the step at which a trial was killed on purpose


def train_command(trial: Trial, folder: Any) -> list[str]:
    """Returns the command line of a trial as a list of arguments."""
    return [sys.executable, "-m", "jaxscale.main", *trial.command(folder)]


def command_lines(trials: Sequence[Trial], work: Any) -> list[str]:
    """Returns one shell command per unfinished trial, to run on Slurm, GKE or TPU VMs."""
    waiting = [(trial, folder_of(trial, work)) for trial in trials]
    return [
        shlex.join(["python", *train_command(trial, folder)[1:]])
        for trial, folder in waiting
        if outcome_of(folder) is None
    ]


def run_all(trials: Sequence[Trial], work: Any, *, jobs: int, say: Callable[[str], None]) -> list[Result]:
    """Runs all trials, `jobs` at a time, and returns their results in the order of `trials`.

    Parallel trials share the CPU cores equally. An interrupted trial resumes from its checkpoint. Ctrl-C stops the
    running trials and preserves finished results. If a trial fails, raises Stop with the exit code of the trial.
    """
    waiting = [trial for trial in trials if outcome_of(folder_of(trial, work)) is None]
    if waiting and paths.is_remote(str(work)):
        raise BadInput(
            f"--workdir={work} must be a local folder to start the {len(waiting)} pending runs; use a local folder, or "
            "print the commands with --dry_run and run them on other machines"
        )
    if done := len(trials) - len(waiting):
        say(f"{done} of {len(trials)} runs are already done, in {paths.as_path(work) / 'runs'}")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    shares = [cores[place::jobs] if jobs <= len(cores) else cores for place in range(jobs)]
    slot, stop, took, total = threading.local(), threading.Event(), [], len(waiting)
    with concurrent.futures.ThreadPoolExecutor(jobs, initializer=lambda: setattr(slot, "cores", shares.pop())) as pool:
        try:
            trial_of = {pool.submit(run_trial, trial, folder_of(trial, work), slot, stop): trial for trial in waiting}
            for done in concurrent.futures.as_completed(trial_of):
                if (seconds := done.result()) is None:
                    continue
                took.append(seconds)
                left = statistics.mean(took) * (total - len(took)) / jobs
                result = read_result(trial_of[done], work)
                end = "diverged" if result.diverged else f"{result.loss:.4f} nats"
                to_go = f"; {units.duration(left)} left" if len(took) < total else ""
                say(f"[{len(took)}/{total}] {result.trial.label}: {end} ({units.duration(took[-1])}){to_go}")
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return [read_result(trial, work) for trial in trials]


def run_trial(trial: Trial, folder: Any, slot: threading.local, stop: threading.Event) -> float | None:
    """Runs a trial on the CPU cores `slot.cores`. Returns its time in seconds, or None if `stop` was set.

    The process is killed at step `trial.kill_at`, then restarted. It has its own group, so Ctrl-C does not reach it.
    If `stop` is set, it saves a checkpoint and exits. If the trial fails, sets `stop` and raises Stop.
    """
    began, is_killed = time.monotonic(), True
    if stop.is_set():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    while is_killed:
        with (folder / OUTPUT).open("ab") as output:
            attempt = Attempt(train_command(trial, folder), output=output.fileno())
        if slot.cores:  # sets XLA's number of threads; preexec_fn may deadlock when JAX has threads
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(attempt.process.pid, slot.cores)
        is_killed = False
        try:
            while attempt.running() and not is_killed and not stop.wait(POLL_SECONDS):
                if is_due(trial, folder):
                    (folder / KILLED).write_text(f"{trial.kill_at}\n", "utf-8")
                    attempt.kill_group()  # without cleanup, as in a power failure
                    is_killed = True
        finally:
            if not is_killed:
                attempt.signal(signal.SIGTERM)
            code = attempt.wait()
    if code not in ENDS and not stop.is_set():
        lines = (folder / OUTPUT).read_text("utf-8", "replace").splitlines()[-LAST_LINES:]
        shown = "".join(f"\n    {line}" for line in lines)
        known = Exit(code) if code in list(Exit) else Exit.ERROR
        stop.set()
        raise Stop(known, f"{trial.label} failed with exit code {code} ({meaning(code)}) in {folder}; output:{shown}")
    return None if stop.is_set() else time.monotonic() - began


def is_due(trial: Trial, folder: Any) -> bool:
    """Returns True if a trial has reached `trial.kill_at` and has not been killed yet."""
    file = folder / "metrics.jsonl"
    if trial.kill_at is None or (folder / KILLED).exists() or not file.exists():
        return False
    return any(row.get("step", 0) >= trial.kill_at for row in read_lines(file, []))


def default_jobs(platform: str | None) -> int:
    """Returns the number of parallel runs: 1 on an accelerator, else the number of cores. platform: JAX_PLATFORMS."""
    has_accelerator = any(os.path.exists(file) for file in (*TPU_FILES, "/dev/nvidia0"))
    if has_accelerator if not platform else platform.split(",")[0] != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
