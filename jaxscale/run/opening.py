"""RunConfig -> a run ready to train: data, checkpoints and reports around the program that build.py makes.

It decides whether a run begins or goes on; run/resume_checks.py, whether it may.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxscale import schema
from jaxscale.build import Program, make_program
from jaxscale.checkpoint.branch import Source, branch_state, open_source
from jaxscale.checkpoint.cause import written
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.config import RunConfig, resolve_budget
from jaxscale.data.ledger import Ledger
from jaxscale.data.mixture import mixture_names
from jaxscale.data.order import ORDER, batch_index
from jaxscale.data.pipeline import Corpus
from jaxscale.eval.named import Evaluator, check_files, open_evaluators
from jaxscale.eval.perplexity import evaluate, make_eval_step
from jaxscale.eval.scorer import Scorer
from jaxscale.eval.text import Reading
from jaxscale.hardware import find_chip
from jaxscale.hosts.agree import check_shared, open_board
from jaxscale.interop.periodic import exporting
from jaxscale.monitor.alerts import Diagnosis, read_facts
from jaxscale.monitor.events import Events, read_events
from jaxscale.monitor.runinfo import run_info
from jaxscale.monitor.throughput import Throughput
from jaxscale.monitor.writers import Writer
from jaxscale.run.changes import find_jump, jump_lines, record_changes
from jaxscale.run.options import NO_WISHES, Wishes, carry_out, check_same_length, read_decisions, with_replayed
from jaxscale.run.resume_checks import (
    check_hosts_agree,
    check_same_data,
    check_same_evals,
    check_same_past,
    check_same_run,
    open_same_data,
    recorded_run,
    version_changes,
)
from jaxscale.run.startup_log import announce, announce_return, finish, sample_of_run
from jaxscale.sharding.place import put_rows, replicated
from jaxscale.sharding.rules import RULES
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.redact import redacted
from jaxscale.text.tokenizer.kept import keep_tokenizer
from jaxscale.training import loop
from jaxscale.training.autopilot import Pilot, Rewound
from jaxscale.training.decisions import Decisions
from jaxscale.training.feed import Feed
from jaxscale.training.injected import corrupt_batches, flip_bits
from jaxscale.training.loop import NamedEvaluate, Run
from jaxscale.training.replica_watch import ReplicaWatch
from jaxscale.training.replicas import coverage, make_replica_check
from jaxscale.training.services import Services
from jaxscale.training.state import TrainState


def train_through(
    cfg: RunConfig,
    workdir: str,
    say: Callable[[str], None] = print,
    *,
    services: Services | None = None,
    wishes: Wishes = NO_WISHES,
) -> None:
    """Trains to the end, going back to an older step as often as the run decides to. Raises as open_run does."""
    services = services or with_events(workdir)
    with exporting(cfg.export, workdir, services.note, say, primary=jax.process_index() == 0) as note:
        services = services._replace(note=note)
        run = open_run(cfg, workdir, say, services=services, wishes=wishes)
        while run is not None and isinstance(loop.train(run), Rewound):
            run = open_run(cfg, workdir, say, services=services, wishes=wishes, before=run)


def open_run(
    cfg: RunConfig,
    workdir: str,
    say: Callable[[str], None] = print,
    *,
    services: Services | None = None,
    wishes: Wishes = NO_WISHES,
    before: Run | None = None,
) -> Run | None:
    """A run ready to train, new or gone on from its last checkpoint; None if it is complete already.

    Args: before: the same run, opened earlier in this process, that goes back to an older step.
    Raises BadInput for input that a person can mend, and Stop with CONFIG_MISMATCH, DATA_MISMATCH or
    CHECKPOINT_CORRUPT where the work folder holds something else. Never begins anew over an old run.
    """
    folder, services = paths.as_path(workdir), services or with_events(workdir)
    check_files(cfg.evals)
    check_shared(folder, prepare=lambda: paths.make_run_dir(workdir, wishes.mode))
    checkpoints = Checkpoints(
        folder / "checkpoints",
        cfg.checkpoint,
        note=services.note,
        may_commit=services.may_commit,
        reports=services.reports,
        phase=services.watchdog.phase,
    )
    cfg, replayed = with_replayed(cfg, folder, wishes.replay, say) if wishes.replay else (cfg, None)
    if pending := read_decisions(folder).pending:
        check_same_run(cfg, folder, None, wishes.allow_change)  # a start that is refused moves nothing
        carry_out(pending, folder, checkpoints)
    return checkpoints.restore_newest(
        lambda step: open_at(step, cfg, folder, checkpoints, say, services, wishes, before, replayed), say
    )


def open_at(
    start_step: int | None,
    cfg: RunConfig,
    folder: Any,
    checkpoints: Checkpoints,
    say: Callable[[str], None],
    services: Services,
    wishes: Wishes,
    before: Run | None,
    replayed: Decisions | None,
) -> Run | None:
    """The run from a checkpoint's step on, or from its beginning (None). Raises as open_run does."""
    begun, recorded = start_step or 0, None if start_step is None else checkpoints.read_run(start_step)
    decisions = read_decisions(folder).with_recorded(recorded and recorded["data"])
    changes = check_same_run(cfg, folder, recorded, wishes.allow_change)
    source = open_ancestor(cfg, folder, recorded, say)
    corpus = open_same_data(
        cfg.data, recorded, say, seq_len=cfg.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.seed
    )
    say(corpus.summary)
    check_hosts_agree(corpus)
    evaluators = () if before else open_evals(cfg, corpus)
    budget = resolve_budget(cfg, corpus.epoch_tokens)
    if wishes.replay:
        check_same_length(budget.total_steps, wishes.replay)
    skipped = check_same_data(cfg, corpus, recorded, begun, decisions)
    if why := nothing_to_do(begun, budget.total_steps, wishes):
        say(f"{folder}: {why}")
        checkpoints.close()
        return None
    num_batches = batch_index(budget.total_steps - 1, skipped) + 1
    detours = (replayed or decisions).detours
    mixture = corpus.plan_mixture(cfg.rows_per_step, budget.total_steps, num_batches, detours=detours)
    check_same_past(cfg, mixture, recorded, begun, say)
    program = before.program if before else make_program(cfg, budget)
    if not before:
        for line in mixture.lines if mixture else ():
            say(f"data: {line}")
        announce(program, budget, say)
        for one in evaluators:
            say(f"evals.{one.name}: {one.summary}")
    checkpoints.check_room(program.abstract_state)  # before anything is compiled
    jump = find_jump(recorded, program.schedule, begun)
    if recorded is not None:
        announce_return(program, recorded, begun, budget, say)
        for line in jump_lines(jump, cfg, budget, folder):
            say(line)
    with services.watchdog.phase("restore"):
        state = first_state(program, checkpoints, start_step, source, say)
    chip = find_chip(program.mesh.devices.flat[0].device_kind)
    resolved = {
        "config": schema.to_dict(cfg),
        "budget": dataclasses.asdict(budget),
        "devices": {"kind": program.mesh.devices.flat[0].device_kind, "number": program.mesh.size},
        "peak": dataclasses.asdict(chip) if chip else None,  # what MFU is measured against
        "mixture": mixture and {"stages": mixture.record(), "rows": corpus.rows_of_sources},
        "ancestry": source.ancestry if source else (recorded or {}).get("ancestry", []),  # newest first
        **run_info(),
        "changed": record_changes(changes, recorded or recorded_run(folder), begun, jump, say),
    }
    say("versions: " + ", ".join(f"{name} {version}" for name, version in resolved["versions"].items() if version))
    for line in version_changes(recorded, resolved["versions"]):
        say(line)
    resolved = redacted(resolved)
    primary = jax.process_index() == 0
    if primary:
        written(lambda: paths.write_json(folder / "config.json", resolved), folder)
        if corpus.tokenizer is not None:
            written(lambda: keep_tokenizer(corpus.tokenizer, folder, corpus.chat), folder)
    start_facts = services.ledger.take_up(folder) if services.ledger and primary else {}  # before records are dropped
    begins = [stage.first_row // cfg.rows_per_step for stage in mixture.stages[1:]] if mixture else []
    diagnosis = None
    if primary and cfg.monitor.health.on:
        names = Ledger(corpus, corpus.batches(cfg.rows_per_step, mixture)).names if corpus.shards else None
        known = read_facts(folder, resolved, begins, say)
        diagnosis = Diagnosis(cfg.monitor.health, known, services.note, names, read_events(folder))
        services = services._replace(note=diagnosis.hearing(services.note))
    vitals = dict(vitals=services.vitals, diagnosis=diagnosis)
    writer = written(lambda: Writer(folder, cfg.monitor, budget.total_steps, begun, primary=primary, **vitals), folder)

    def position(step: int) -> dict[str, Any]:
        data = {"batch_index": batch_index(step, skipped), "skipped": [list(r) for r in skipped], "seed": cfg.seed}
        data |= {
            "fingerprint": corpus.fingerprint,
            "parts": dict(corpus.parts),
            "order": ORDER,
            "mixture": mixture.record() if mixture else None,
            "detours": [list(detour) for detour in detours],
        }
        return resolved | {"step": step, "data": data}

    batches = corpus.batches(cfg.rows_per_step, mixture)
    sample = before.sample if before else sample_of_run(program, corpus, say)
    if source:
        services.note("branch", 0, ancestor=redacted(source.ancestry[0]))
    facts = {"changed": resolved["changed"][-len(changes) :] if changes else [], "replay": wishes.replay} | start_facts
    services.note("started" if start_step is None else "resumed", begun, **redacted(facts), devices=resolved["devices"])
    return Run(
        state=state,
        start_step=begun,
        total_steps=budget.total_steps,
        tokens_per_step=budget.batch_tokens,
        train_step=flip_bits(program.train_step, begun),
        statistics=program.statistics,
        statistics_every_steps=cfg.monitor.statistics_every_steps,
        open_feed=lambda start, stop: Feed(
            corrupt_batches(batches.rows),
            lambda step: batch_index(step, skipped),
            program.batch_sharding,
            num_rows=cfg.rows_per_step,
            seq_len=cfg.seq_len,
            start=start,
            stop=stop,
        ),
        evaluate=before.evaluate if before else make_evaluate(program, corpus),  # compiled, with its rows in place
        eval_every_steps=cfg.eval.every_steps,
        evaluators=before.evaluators if before else make_evaluates(program, evaluators),
        checkpoints=checkpoints,
        save_every_steps=cfg.checkpoint.save_every_steps,
        position=position,
        writer=writer,
        throughput=Throughput(
            cfg.flops_per_token,
            chip.peak_flops if chip else None,
            program.mesh.size,
            leaves_out=services.profiling,
        ),
        pilot=Pilot(
            recovery=cfg.train.ladder,
            guard=cfg.train.guard,
            note=services.note,
            past=decisions.up_to(begun),
            replayed=replayed,
            start_step=begun,
            batch_of=lambda step: batch_index(step, skipped),
            gradient_norms=program.gradient_norms,
            replicas=before.pilot.replicas if before else make_watch(program, services, say),
        ),
        program=program,
        stop_after=wishes.stop_after,
        services=services,
        sample=sample,
        sample_every_steps=cfg.sample.every_steps,
        sample_prompt=cfg.sample.prompt,
        finish=lambda state: finish(cfg.sample, sample, state, folder, writer),
        source_names=mixture_names(cfg.data.mixture),
        board=open_board(),
    )


def with_events(workdir: str) -> Services:
    """What a run needs that nobody attends: its log of events, which a rewind is read from."""
    return Services(Events(workdir, primary=jax.process_index() == 0).note)


def nothing_to_do(step: int, total_steps: int, wishes: Wishes) -> str:
    """Why a run at this step trains no more, or ''."""
    if step >= total_steps:
        return (
            f"this run is complete at step {step}; a larger --config.train_tokens goes on from there, with the "
            "learning rate of the longer schedule"
        )
    if wishes.stop_after is not None and step >= wishes.stop_after:
        return f"this run is at step {step} already, and --stop_after={wishes.stop_after}"
    return ""


def first_state(
    program: Program, checkpoints: Checkpoints, step: int | None, source: Source | None, say: Callable[[str], None]
) -> TrainState:
    """The state that this start begins with: a checkpoint's, another run's, or a random one.

    Raises Stop (CHECKPOINT_CORRUPT) for a checkpoint whose state has done another number of steps.
    """
    if step is not None:
        state = checkpoints.restore(step, program.abstract_state)
        if int(state.step) != step:
            raise checkpoints.corrupt(step, "state", f"it has done {int(state.step)} steps")
        return state
    return branch_state(program, program.cfg.init, say, source) if source else program.init()


def open_ancestor(
    cfg: RunConfig, folder: Any, recorded: dict[str, Any] | None, say: Callable[[str], None]
) -> Source | None:
    """The checkpoint that a run begins with; None for one that begins at random, or has a checkpoint of its own.

    A run that stopped before its first checkpoint begins with the same one again, whatever the other run has saved
    since.
    """
    if cfg.init.from_path is None or recorded is not None:
        return None
    begun = paths.read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    return open_source(cfg.init.from_path, next(iter(begun.get("ancestry", ())), None), say=say)


def make_watch(program: Program, services: Services, say: Callable[[str], None]) -> ReplicaWatch | None:
    """What compares the copies of the state, if the config asks for it; says how much of the state has copies."""
    cfg = program.cfg.train.replicas
    if not cfg.every_steps:
        return None
    say(f"replicas: {coverage(program.abstract_state, RULES[program.cfg.rules])}")
    check = make_replica_check(program.mesh, program.abstract_state)
    return ReplicaWatch(cfg, check, note=services.note, say=say)


def make_evaluate(program: Program, corpus: Corpus) -> Callable[[Any], dict[str, float]] | None:
    """params -> validation metrics, over a fixed set that is put on the devices once; None without held-out text."""
    cfg = program.cfg
    if not cfg.eval.num_rows or corpus.valid_rows is None:
        return None
    rows = max(program.batch_shards, cfg.rows_per_step // cfg.train.num_microbatches)
    on_mesh = functools.partial(put_rows, rows=list(range(rows)), num_rows=rows, sharding=program.batch_sharding)
    step = jax.jit(
        make_eval_step(program.model.token_losses, len(corpus.source_names)), out_shardings=replicated(program.mesh)
    )

    @functools.cache
    def placed() -> list:
        return [on_mesh(batch) for batch in corpus.valid_batches(cfg.eval.num_rows, rows)]

    return lambda params: evaluate(step, params, placed(), corpus.source_names)


def open_evals(cfg: RunConfig, corpus: Corpus) -> tuple[Evaluator, ...]:
    """The named evaluators with their data read. Raises BadInput for data that is not as told."""
    if not cfg.evals:
        return ()
    if corpus.tokenizer is None:
        raise BadInput("evals read text, and the tokenizer of this run's ids is not known; give data.tokenizer")
    evaluators = open_evaluators(cfg.evals, Reading.of(corpus.tokenizer, cfg.seq_len))
    check_same_evals(evaluators)
    return evaluators


def make_evaluates(program: Program, evaluators: tuple[Evaluator, ...]) -> tuple[NamedEvaluate, ...]:
    """params -> metrics of each evaluator, all by one program, which is compiled for each length of rows."""
    cfg = program.cfg
    rows = max(program.batch_shards, cfg.rows_per_step // cfg.train.num_microbatches)
    scorer = Scorer(
        step=jax.jit(program.model.target_scores, out_shardings=replicated(program.mesh)),
        sharding=program.batch_sharding,
        shards=program.batch_shards,
        multiple=program.mesh.shape["tensor"],
        batch_tokens=rows * cfg.seq_len,
    )
    return tuple(NamedEvaluate(functools.partial(one.metrics, scorer), one.every_steps) for one in evaluators)
