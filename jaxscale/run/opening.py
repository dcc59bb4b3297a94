"""Opening a run in a work folder: prepare the folder, resolve the start, make the program, restore the state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxscale import build
from jaxscale.budget import Budget
from jaxscale.build import Program, add_stages
from jaxscale.checkpoint.branch import branch_state, resume_branch
from jaxscale.checkpoint.tiers import TieredCheckpoints
from jaxscale.config import RunConfig
from jaxscale.eval.named import check_files
from jaxscale.hosts.agree import check_shared
from jaxscale.monitor.events import Events
from jaxscale.run.assembly import OpenedRun, assemble, make_parts, open_evals
from jaxscale.run.dtypes import resolve_run_dtypes
from jaxscale.run.limiting import check_early_decay
from jaxscale.run.options import DEFAULT_OPTIONS, RunOptions
from jaxscale.run.replay import complete_rewind, read_decisions, with_replayed
from jaxscale.run.resume_checks import check_position, check_same_run
from jaxscale.run.start import RunFolder, Start, resolve_start
from jaxscale.run.startup_log import log_program, log_resume
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Stop
from jaxscale.training import loop
from jaxscale.training.autopilot import Rescheduled, Rewound
from jaxscale.training.services import Services
from jaxscale.training.state import TrainState


def train_to_completion(run: OpenedRun | None) -> None:
    """Trains to completion, restarting from an older checkpoint on each rewind, and with another schedule where a decay
    begins early. None: it is complete already."""
    while run is not None and isinstance(outcome := loop.train(run), Rewound):
        run = reopen(run) if isinstance(outcome, Rescheduled) else rewind(run)


def open_run(
    cfg: RunConfig,
    workdir: str,
    log: Callable[[str], None] = print,
    *,
    services: Services | None = None,
    options: RunOptions = DEFAULT_OPTIONS,
    make_program: Callable[[RunConfig, Budget], Program] = build.make_program,
) -> OpenedRun | None:
    """A run ready to train, new or resumed from its newest checkpoint; None if it is complete already.

    Raises BadInput for input that a person can mend, and Stop with CONFIG_MISMATCH, DATA_MISMATCH or
    CHECKPOINT_CORRUPT where the work folder holds something else. Never begins anew over an old run.
    """
    folder = prepare_folder(cfg, workdir, log, services or with_events(workdir), options)
    start = resolve_start(folder, folder.checkpoints.newest_readable(log))
    if start.nothing_to_do:
        log(f"{folder.path}: {start.nothing_to_do}")
        folder.checkpoints.close()
        return None
    check_early_decay(folder.cfg, start)
    evaluators = open_evals(folder.cfg, start.corpus)
    program = make_remaining(folder.cfg, start, make_program)
    log_program(program, start.budget, start.mixture, evaluators, log)
    folder.checkpoints.check_room(program.abstract_state)  # before anything is compiled
    start, state, program = restore_start(folder, start, program)
    parts = make_parts(folder, start, program, evaluators, make_program)
    return assemble(folder, start, parts, state)


def rewind(run: OpenedRun) -> OpenedRun:
    """The same run at the older checkpoint that it has decided to go back to; compiled programs and data are kept."""
    folder = run.folder
    checkpoints = open_checkpoints(folder.cfg, folder.path, folder.services)
    pending = read_decisions(folder.path).pending
    assert pending is not None, "a rewind is noted in events.jsonl before it is carried out"
    complete_rewind(pending, folder.path, checkpoints)
    return reopen(run, checkpoints)


def reopen(run: OpenedRun, checkpoints: TieredCheckpoints | None = None) -> OpenedRun:
    """The same run at its newest checkpoint. Its program is made again only where its schedule is another now."""
    folder, parts = run.folder, run.parts
    checkpoints = checkpoints or open_checkpoints(folder.cfg, folder.path, folder.services)
    folder = dataclasses.replace(folder, checkpoints=checkpoints)
    start = resolve_start(folder, checkpoints.newest_readable(folder.log), parts.corpus)
    check_early_decay(folder.cfg, start)
    if start.budget != parts.budget:
        program = make_remaining(folder.cfg, start, parts.make_program)
    else:
        program = with_remaining(parts.program, start)  # of an earlier stage, after a rewind
    start, state, program = restore_start(folder, start, program)
    parts = dataclasses.replace(parts, budget=start.budget, program=program)
    return assemble(folder, start, parts, state)


def make_remaining(cfg: RunConfig, start: Start, make_program: Callable[[RunConfig, Budget], Program]) -> Program:
    """The program, with those of the stages of batch_ramp and seq_len_ramp that are still ahead.

    Raises BadInput for one that does not fit the devices; a stage that is over need not fit.
    """
    return with_remaining(make_program(cfg, start.budget.without_ramps), start)


def with_remaining(program: Program, start: Start) -> Program:
    """The program, with those of the stages that this start needs and it does not have. Raises as make_remaining."""
    try:
        return add_stages(program, start.budget, start.remaining_stages)
    except BadInput as error:
        if not start.steps_done:
            raise
        raise BadInput(f"batch {start.batch_of(start.steps_done)} follows step {start.steps_done}: {error}") from None


def prepare_folder(
    cfg: RunConfig, workdir: str, log: Callable[[str], None], services: Services, options: RunOptions
) -> RunFolder:
    """The work folder, created if it is new. Completes a rewind that was decided before the process died."""
    path = paths.as_path(workdir)
    check_files(cfg.evals)
    check_shared(path, prepare=lambda: paths.make_run_dir(workdir, options.mode))
    cfg, dtypes = resolve_run_dtypes(cfg, path, options.replay)
    for one in dtypes:
        log(str(one))
    checkpoints = open_checkpoints(cfg, path, services)
    cfg, replayed = with_replayed(cfg, path, options.replay, log) if options.replay else (cfg, None)
    if pending := read_decisions(path).pending:
        check_same_run(cfg, path, None, options.allow_change)  # a start that is refused moves nothing
        complete_rewind(pending, path, checkpoints)
    return RunFolder(cfg, path, checkpoints, services, options, log, replayed, dtypes)


def open_checkpoints(cfg: RunConfig, path: Any, services: Services) -> TieredCheckpoints:
    """The checkpoints of the run."""
    return TieredCheckpoints(
        path / "checkpoints",
        cfg.checkpoint,
        note=services.note,
        may_commit=services.may_commit,
        reports=services.reports,
        phase=services.watchdog.phase,
    )


def restore_start(folder: RunFolder, start: Start, program: Program) -> tuple[Start, TrainState, Program]:
    """The start, its state and the program of its stages; of an older checkpoint if arrays of the newest are damaged.

    Raises BadInput where the older one lies in a stage that does not fit the devices.
    """
    checkpoints, log = folder.checkpoints, folder.log
    while True:
        if start.step is not None and start.recorded is not None:
            log_resume(program, start.recorded, start.step, start.budget, log)
        try:
            with folder.services.watchdog.phase("restore"):
                state = first_state(folder, start, program)
        except Stop as damage:
            older = checkpoints.fall_back(start.step, damage, log)
            start = resolve_start(folder, older, start.corpus)
            program = with_remaining(program, start)
            continue
        if start.step is not None:
            checkpoints.log_changed_files(start.step, log)
        checkpoints.begin(start.steps_done)
        return start, state, program


def first_state(folder: RunFolder, start: Start, program: Program) -> TrainState:
    """The state that this start begins with: a checkpoint's, another run's, or a random one.

    Raises Stop (CHECKPOINT_CORRUPT) for a checkpoint whose state has done another number of steps.
    """
    if start.source and start.source.whole:
        return resume_branch(program, start.source, folder.log)
    if start.step is None:
        return branch_state(program, folder.cfg.init, folder.log, start.source) if start.source else program.init()
    assert start.recorded is not None, "a step has a record"
    check_position(start.recorded, start.step)
    state = folder.checkpoints.restore(start.step, program.abstract_state)
    if int(state.step) != start.step:
        raise folder.checkpoints.corrupt(start.step, "state", f"it has done {int(state.step)} steps")
    return state


def with_events(workdir: str) -> Services:
    """The services of a run outside run_services: only its event log, which rewinds are read from."""
    return Services(Events(workdir, primary=jax.process_index() == 0).note)
