"""Opens a run in a work folder: prepares the folder, resolves the start, makes the program, restores the state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxscale import build
from jaxscale.build import Program, add_stages
from jaxscale.config import RunConfig
from jaxscale.core.state import TrainState
from jaxscale.program.budget import Budget
from jaxscale.runtime.checkpoint.branch import branch_state, resume_branch
from jaxscale.runtime.checkpoint.tiers import TieredCheckpoints
from jaxscale.runtime.eval.named import check_files
from jaxscale.runtime.hosts.agree import check_shared
from jaxscale.runtime.monitor.events import Events
from jaxscale.runtime.run.assembly import (
    OpenedRun,
    Parts,
    assemble,
    make_evaluate,
    make_evaluates,
    make_watch,
    open_evals,
)
from jaxscale.runtime.run.limiting import check_early_decay, hourly_dollars
from jaxscale.runtime.run.options import DEFAULT_OPTIONS, Log, RunOptions
from jaxscale.runtime.run.replay import complete_rewind, read_decisions, with_replayed
from jaxscale.runtime.run.resume_checks import check_position, check_same_run
from jaxscale.runtime.run.start import RunFolder, Start, resolve_run_dtypes, resolve_start
from jaxscale.runtime.run.startup_log import log_model, log_resume, sample_of_run
from jaxscale.runtime.training import loop
from jaxscale.runtime.training.autopilot import Rescheduled, Rewound
from jaxscale.runtime.training.loop_services import Services
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Stop


def train_to_completion(run: OpenedRun | None) -> None:
    """Trains a run to completion. Reopens it after a rewind or a new schedule. None is a complete run."""
    while run is not None and isinstance(outcome := loop.train(run), Rewound):
        run = reopen(run) if isinstance(outcome, Rescheduled) else rewind(run)


def open_run(
    cfg: RunConfig,
    workdir: str,
    log: Log = print,
    *,
    services: Services | None = None,
    options: RunOptions = DEFAULT_OPTIONS,
    make_program: Callable[[RunConfig, Budget], Program] = build.make_program,
) -> OpenedRun | None:
    """Returns a run that is ready to train, new or resumed from its newest checkpoint; None if it is complete.

    Raises BadInput for input that the user can correct, and Stop with CONFIG_MISMATCH, DATA_MISMATCH or
    CHECKPOINT_CORRUPT if the work folder does not match. Never overwrites an existing run.
    """
    # without run_services there is only the event log, which rewinds need
    services = services or Services(Events(workdir, primary=jax.process_index() == 0).note)
    folder = prepare_folder(cfg, workdir, log, services, options)
    start = resolve_start(folder, folder.checkpoints.newest_readable(log))
    if start.nothing_to_do:
        log(f"{folder.path}: {start.nothing_to_do}")
        folder.checkpoints.close()
        return None
    check_early_decay(folder.cfg, start)
    evaluators = open_evals(folder.cfg, start.corpus)
    program = add_remaining_stages(make_program(folder.cfg, start.budget.without_ramps), start)
    for line in start.mixture.lines if start.mixture else ():
        log(f"data: {line}")
    log_model(program, start.budget, log)
    for one in evaluators:
        log(f"evals.{one.name}: {one.summary}")
    folder.checkpoints.check_room(program.abstract_state)  # before compilation
    start, state, program = restore_start(folder, start, program)
    if folder.cfg.limit.dollars:
        hourly_dollars(folder.cfg.limit, program.mesh)  # raises BadInput if no price is known
    parts = Parts(
        corpus=start.corpus,
        program=program,
        evaluate=make_evaluate(program, start.corpus),
        evaluators=make_evaluates(program, evaluators),
        sample=sample_of_run(program, start.corpus, log),
        replicas=make_watch(program, log),
        budget=start.budget,
        make_program=make_program,
    )
    return assemble(folder, start, parts, state)


def rewind(run: OpenedRun) -> OpenedRun:
    """Reopens the run at the checkpoint of its pending rewind. Reuses compiled programs and data."""
    folder = run.folder
    checkpoints = open_checkpoints(folder.cfg, folder.path, folder.services)
    pending = read_decisions(folder.path).pending
    assert pending is not None, "a rewind is noted in events.jsonl before it is carried out"
    complete_rewind(pending, folder.path, checkpoints)
    return reopen(run, checkpoints)


def reopen(run: OpenedRun, checkpoints: TieredCheckpoints | None = None) -> OpenedRun:
    """Reopens the run at its newest checkpoint. Makes a new program only if the schedule has changed."""
    folder, parts = run.folder, run.parts
    checkpoints = checkpoints or open_checkpoints(folder.cfg, folder.path, folder.services)
    folder = dataclasses.replace(folder, checkpoints=checkpoints)
    start = resolve_start(folder, checkpoints.newest_readable(folder.log), parts.corpus)
    check_early_decay(folder.cfg, start)
    program = parts.program  # a rewind can return to an earlier stage of the same program
    if start.budget != parts.budget:
        program = parts.make_program(folder.cfg, start.budget.without_ramps)
    program = add_remaining_stages(program, start)
    start, state, program = restore_start(folder, start, program)
    parts = dataclasses.replace(parts, budget=start.budget, program=program)
    return assemble(folder, start, parts, state)


def add_remaining_stages(program: Program, start: Start) -> Program:
    """Adds the remaining stages of batch_ramp and seq_len_ramp. Raises BadInput if one does not fit the devices."""
    try:
        return add_stages(program, start.budget, start.remaining_stages)
    except BadInput as error:
        if not start.steps_done:
            raise
        raise BadInput(f"batch {start.batch_of(start.steps_done)}, after step {start.steps_done}: {error}") from None


def prepare_folder(cfg: RunConfig, workdir: str, log: Log, services: Services, options: RunOptions) -> RunFolder:
    """Returns the work folder, created if it is new. Completes a rewind that a crash interrupted."""
    path = paths.as_path(workdir)
    check_files(cfg.evals)
    check_shared(path, prepare=lambda: paths.make_run_dir(workdir, options.mode))
    cfg, dtypes = resolve_run_dtypes(cfg, path, options.replay)
    for one in dtypes:
        log(str(one))
    checkpoints = open_checkpoints(cfg, path, services)
    cfg, replayed = with_replayed(cfg, path, options.replay, log) if options.replay else (cfg, None)
    if pending := read_decisions(path).pending:
        check_same_run(cfg, path, None, options.allow_change)  # before any file is moved
        complete_rewind(pending, path, checkpoints)
    return RunFolder(cfg, path, checkpoints, services, options, log, replayed, dtypes)


def open_checkpoints(cfg: RunConfig, path: Any, services: Services) -> TieredCheckpoints:
    """Opens the checkpoints of the run."""
    return TieredCheckpoints(
        path / "checkpoints",
        cfg.checkpoint,
        note=services.note,
        may_commit=services.may_commit,
        reports=services.reports,
        phase=services.watchdog.phase,
    )


def restore_start(folder: RunFolder, start: Start, program: Program) -> tuple[Start, TrainState, Program]:
    """Returns (start, state, program). Falls back to an older checkpoint if the newest one is damaged.

    Raises BadInput if the older checkpoint is in a stage of a ramp that does not fit the devices.
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
            program = add_remaining_stages(program, start)
            continue
        if start.step is not None:
            checkpoints.log_changed_files(start.step, log)
        checkpoints.begin(start.steps_done)
        return start, state, program


def first_state(folder: RunFolder, start: Start, program: Program) -> TrainState:
    """Returns the initial state: from a checkpoint, from another run, or random.

    Raises Stop (CHECKPOINT_CORRUPT) if the step counter in the state differs from the step of the checkpoint.
    """
    if start.source and start.source.whole:
        return resume_branch(program, start.source, folder.log)
    if start.step is None:
        return branch_state(program, folder.cfg.init, folder.log, start.source) if start.source else program.init()
    assert start.recorded is not None, "a step has a record"
    check_position(start.recorded, start.step)
    state = folder.checkpoints.restore(start.step, program.abstract_state)
    if int(state.step) != start.step:
        raise folder.checkpoints.corrupt(start.step, "state", f"its state is of step {int(state.step)}")
    return state
