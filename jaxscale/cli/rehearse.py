"""Tries a run for a few steps with its real config, mesh and storage, and prints GO or NO-GO.

  jaxscale rehearse --config=FILE --workdir=FOLDER

Takes the settings and flags of training, except --stop_after, --replay and --steal_lock. The real training commands run
one after the other. The first run is uninterrupted: it trains, evaluates and saves. The second is killed with SIGKILL
while it saves, restarted, and resumes from its checkpoint. Both are compared bit for bit: state, data position, token
ids, metrics. Also checked and timed: the storage, the first step, a step, an evaluation, a save, a restore, and the
space for the retained checkpoints.

Exit code 0 for GO, 3 for NO-GO. It works in WORKDIR/rehearsal, which is deleted after a GO.
"""

import dataclasses
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

from jaxscale.cli import run_verb
from jaxscale.cli.rehearsal import (
    LEAST_STEPS,
    OK,
    NoGo,
    Rehearsal,
    Report,
    check_space,
    compare_runs,
    run_killed,
    run_straight,
    try_storage,
)
from jaxscale.cli.two_runs import KILL_AFTER, RUNS, comparable
from jaxscale.runtime.checkpoint.storage_errors import stop_if_unreachable
from jaxscale.runtime.hosts import cluster
from jaxscale.runtime.run.options import allowed_names
from jaxscale.runtime.run.resume_checks import recorded_settings
from jaxscale.settings import config_file
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.config_file import config_name
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, put
from jaxscale.system.process import files_as, folder_mode
from jaxscale.units import table

FORWARDED_FLAGS = ("allow_change", "run_dir_mode", *cluster.FLAGS)  # --stop_after is set below


@dataclasses.dataclass(frozen=True)
class RehearseFlags(cluster.HostFlags):
    """The flags of `jaxscale rehearse`."""

    config: str = flag("", None, "FILE")
    settings: dict[str, str] = flag(dict, None, "VALUE", name="config.NAME")
    workdir: str | None = flag(None, None, "FOLDER")
    steps: int = flag(
        LEAST_STEPS,
        f"steps of the rehearsal, {LEAST_STEPS} or more; learning rates follow the horizon of the real run",
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
    """Rehearses and returns 0 for GO, 3 for NO-GO."""
    with files_as(arguments.flags.mode):
        return carry_out(plan_rehearsal(arguments))


def carry_out(rehearsal: Rehearsal) -> int:
    """Rehearses, prints the table and the verdict, and cleans up unless it is NO-GO. Returns the exit code."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up, too
    made = missing_folder(rehearsal.workdir)
    keep_folder = False
    try:
        report = rehearse(rehearsal)
        keep_folder = not report.goes
    finally:  # an interrupted rehearsal is deleted
        signal.signal(signal.SIGTERM, previous)
        if not keep_folder and rehearsal.is_first:
            clean_up(rehearsal, made)
    if not rehearsal.is_first:
        return Exit.DONE if report.goes else Exit.NO_GO
    put("", *table([("check", "", "takes", "seen"), *report.rows], indent=""), "")
    if report.goes:
        put("GO")
        return Exit.DONE
    put(f"NO-GO; both runs are kept in {rehearsal.folder}, their output in {rehearsal.logs}")
    return Exit.NO_GO


def plan_rehearsal(arguments: Arguments) -> Rehearsal:
    """Returns the rehearsal of the command line. Raises BadInput before anything is started."""
    options = arguments.options
    workdir = arguments.flags.workdir or f"runs/{config_name(arguments.config)}"
    recorded = lambda: stop_if_unreachable(lambda: recorded_settings(workdir), workdir)
    cfg = config_file.load_config(arguments.config, config_file.with_flags(arguments), recorded)
    if cfg.init.what == "run":
        raise BadInput(
            f"init.what='run': a rehearsal trains the first {arguments.flags.steps} steps, which a branch does not "
            "have; rehearse with --config.init.what=state, which starts at step 0 with the same arrays"
        )
    place = cluster.discover_process(options)
    is_first = place is None or place.is_first
    folder = paths.as_path(workdir) / "rehearsal"
    if is_first and any((folder / run).exists() for run in RUNS):
        raise BadInput(f"{folder} holds an earlier rehearsal that ended with NO-GO; look at it, then delete it")
    remote = paths.is_remote(workdir)
    logs = pathlib.Path(tempfile.mkdtemp(prefix="jaxscale-rehearsal-")) if remote else pathlib.Path(folder).absolute()
    command = [sys.executable, "-m", "jaxscale.cli", "train", f"--stop_after={arguments.flags.steps}"]
    command += [f"--{name}={options[name]}" for name in FORWARDED_FLAGS if name in options]
    return Rehearsal(
        cfg=cfg,
        trained=comparable(cfg, keep_last=1),
        command=command,
        workdir=workdir,
        folder=folder if remote else pathlib.Path(folder).absolute(),
        logs=logs,
        steps=arguments.flags.steps,
        env=os.environ,
        kills={f"step:{KILL_AFTER}": ""},
        say=put,
        is_first=is_first,
        name="" if place is None else f"-{place.process_id}",
    )


def rehearse(rehearsal: Rehearsal) -> Report:
    """Runs all phases until one fails."""
    report, began = Report(put), time.monotonic()
    try:
        free = try_storage(rehearsal, report) if rehearsal.is_first else None
        run_straight(rehearsal, report)
        if rehearsal.is_first:
            check_space(rehearsal, report, free)
        early = run_killed(rehearsal, report)
        if rehearsal.is_first:
            compare_runs(rehearsal, report, early)
    except NoGo:
        pass
    if report.goes:
        report.add("rehearsal", OK, "all of it", time.monotonic() - began)
    return report


def missing_folder(workdir: str) -> Any:
    """Returns the outermost missing folder of `workdir`, which clean_up deletes, or None."""
    if paths.is_remote(workdir):
        return None
    folder = pathlib.Path(paths.as_path(workdir)).absolute()
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    return missing[-1] if missing else None


def clean_up(rehearsal: Rehearsal, made: Any) -> None:
    """Deletes the rehearsal's files, and the folders that were made for it if they are empty."""
    if paths.is_remote(rehearsal.folder):
        if rehearsal.folder.exists():
            rehearsal.folder.rmtree()
        shutil.rmtree(rehearsal.logs, ignore_errors=True)
        return
    shutil.rmtree(rehearsal.folder, ignore_errors=True)
    folder = rehearsal.folder.parent
    while made is not None and (folder == made or made in folder.parents):
        try:
            folder.rmdir()
        except OSError:  # not empty, or already deleted
            return
        folder = folder.parent


if __name__ == "__main__":
    run_verb("rehearse")
