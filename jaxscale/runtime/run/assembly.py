"""Assembly of a run: the record, metrics writer, feed, validation and autopilot around the compiled program."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxscale import schema
from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.core.shardings import RULES, replicated
from jaxscale.core.state import TrainState
from jaxscale.kernels.hardware import find_chip
from jaxscale.program.budget import Budget
from jaxscale.program.fault_injection import corrupt_batches
from jaxscale.runtime.checkpoint.storage_errors import stop_if_unwritable
from jaxscale.runtime.data.config import mixture_names
from jaxscale.runtime.data.ledger import Ledger
from jaxscale.runtime.data.order import ORDER
from jaxscale.runtime.data.pipeline import Corpus
from jaxscale.runtime.eval.bits_per_byte import EvalReading
from jaxscale.runtime.eval.named import Evaluator, open_evaluators
from jaxscale.runtime.eval.perplexity import evaluate, make_eval_step
from jaxscale.runtime.eval.scorer import Scorer
from jaxscale.runtime.hosts.meshes import one_at_a_time, put_rows
from jaxscale.runtime.monitor.alerts import Diagnosis, read_facts
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.monitor.goodput import Throughput
from jaxscale.runtime.monitor.runinfo import run_info
from jaxscale.runtime.monitor.writers import Writer
from jaxscale.runtime.run.changes import find_jump, jump_lines, record_changes
from jaxscale.runtime.run.limiting import make_limits
from jaxscale.runtime.run.options import Log
from jaxscale.runtime.run.resume_checks import check_same_evals, recorded_run, version_changes
from jaxscale.runtime.run.start import RunFolder, Start, dtype_record
from jaxscale.runtime.run.startup_log import Sample, finish
from jaxscale.runtime.text.tokenizer.load import save_tokenizer
from jaxscale.runtime.training.autopilot import AutopilotSpec
from jaxscale.runtime.training.expert_load import ExpertLoad
from jaxscale.runtime.training.feed import Feed
from jaxscale.runtime.training.loop import LoopEvaluator, LoopSpec
from jaxscale.runtime.training.loop_services import Services
from jaxscale.runtime.training.replicas import ReplicaMonitor, flip_bits, make_replica_check, replica_coverage
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.process import has_huge_pages
from jaxscale.system.redact import redacted


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of a run that a rewind reuses: the compiled functions and the data."""

    corpus: Corpus
    program: Program
    evaluate: Callable[[Any], dict[str, float]] | None
    evaluators: tuple[LoopEvaluator, ...]
    sample: Sample | None
    replicas: ReplicaMonitor | None
    budget: Budget  # budget of the program
    make_program: Callable[[RunConfig, Budget], Program]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedRun(LoopSpec):
    """A run with the parts that a rewind needs."""

    folder: RunFolder
    parts: Parts


def assemble(folder: RunFolder, start: Start, parts: Parts, state: TrainState) -> OpenedRun:
    """Returns a run that is ready to train from `start`. Writes config.json and opens the metrics file."""
    cfg, program, done = folder.cfg, parts.program, start.steps_done
    record = make_record(folder, start, program)
    services, writer = open_writer(folder, start, record)
    batches = start.corpus.batches(start.sizes, start.mixture)
    chip = find_chip(program.mesh.devices.flat[0].device_kind)
    return OpenedRun(
        folder=folder,
        parts=parts,
        state=state,
        start_step=done,
        total_steps=start.budget.total_steps,
        tokens_after=start.tokens_after,
        train_step=flip_bits(program.by_size("train_step"), done),
        statistics=one_at_a_time(program.by_size("statistics"), program.mesh),
        statistics_every_steps=cfg.monitor.statistics_every_steps,
        open_feed=functools.partial(open_feed, start, batches, program),
        evaluate=parts.evaluate,
        eval_every_steps=cfg.eval.every_steps,
        evaluators=parts.evaluators,
        checkpoints=folder.checkpoints,
        local=folder.checkpoints.local,
        save_every_steps=cfg.checkpoint.save_every_steps,
        position=lambda step: record | {"step": step, "data": data_position(start, cfg.seed, step)},
        writer=writer,
        throughput=Throughput(
            cfg.flops_per_token,
            chip and chip.peak_flops,
            program.mesh.size,
            is_excluded=services.profiling,
            flops_by_row_tokens={one.cfg.seq_len: one.cfg.flops_per_token for one in program.smaller},
        ),
        pilot=make_pilot(folder, start, parts, services),
        stop_after=folder.options.stop_after,
        services=services,
        sample=parts.sample,
        sample_every_steps=cfg.sample.every_steps,
        sample_prompt=cfg.sample.prompt,
        finish=lambda state: finish(cfg.sample, parts.sample, state, folder.path, writer),
        source_names=mixture_names(cfg.data.mixture),
        experts=make_expert_load(cfg, start.budget.total_steps),
        limits=make_limits(folder, start, program.mesh, services, writer.say),
    )


def make_expert_load(cfg: RunConfig, total_steps: int) -> ExpertLoad | None:
    """Returns the counter of tokens per expert, or None for a model without experts."""
    if (experts := getattr(cfg.model, "experts", None)) is None:
        return None
    return ExpertLoad(
        experts_per_token=experts.chosen,
        first_layer=experts.first_dense,
        every_steps=cfg.monitor.statistics_every_steps,
        total_steps=total_steps,
    )


def make_record(folder: RunFolder, start: Start, program: Program) -> dict[str, Any]:
    """Returns the record of the run for config.json and checkpoints. Logs changes since the last start."""
    chip, mixture = find_chip(program.mesh.devices.flat[0].device_kind), start.mixture
    trunk = start.source.record["run"] if start.source and start.source.whole else None
    jump = find_jump(trunk or start.recorded, program.schedule, start.steps_done)
    past = start.recorded or recorded_run(folder.path)
    for line in jump_lines(jump, folder.cfg, start.budget, folder.path)[: 1 if trunk else None]:
        folder.log(line)  # for a branch only the warning: the hints are for the same folder
    record = {
        "config": schema.to_dict(folder.cfg),
        "dtypes": dtype_record(folder.dtypes, past),
        "budget": dataclasses.asdict(start.budget),
        "devices": {"kind": program.mesh.devices.flat[0].device_kind, "number": program.mesh.size},
        "peak": dataclasses.asdict(chip) if chip else None,  # the reference of MFU
        "mixture": mixture
        and {"stages": mixture.record(), "rows": start.corpus.rows_of_sources, "starts": dict(mixture.starts)},
        "ancestry": start.source.ancestry if start.source else (start.recorded or {}).get("ancestry", []),
        **run_info(),
        "changed": record_changes(start.changes, past, start.steps_done, jump, folder.log),
    }
    versions = record["versions"]
    pages = "; malloc uses huge pages (JAXSCALE_HUGE_PAGES=0 disables them)" if has_huge_pages() else ""
    folder.log("versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version) + pages)
    for line in version_changes(start.recorded, versions):
        folder.log(line)
    return redacted(record)


def open_writer(folder: RunFolder, start: Start, record: dict[str, Any]) -> tuple[Services, Writer]:
    """Returns (services whose events reach the health rules, metrics writer).

    Writes the started or resumed event. The first process also writes config.json and the tokenizer.
    """
    cfg, path, services, corpus = folder.cfg, folder.path, folder.services, start.corpus
    primary = jax.process_index() == 0
    if primary:
        stop_if_unwritable(lambda: paths.write_json(path / "config.json", record), path)
        if (tokenizer := corpus.tokenizer) is not None:
            stop_if_unwritable(lambda: save_tokenizer(tokenizer, path, corpus.chat), path)
    facts = services.ledger.start_facts(path) if services.ledger and primary else {}  # before records are dropped
    diagnosis = None
    if primary and cfg.monitor.health.on:
        stages = start.mixture.stages[1:] if start.mixture else []
        begins = [start.sizes.find(stage.first_row)[0] for stage in stages]
        names = Ledger(corpus, corpus.batches(start.sizes, start.mixture)).names if corpus.shards else None
        run_facts = read_facts(path, record, begins, folder.log)
        diagnosis = Diagnosis(cfg.monitor.health, run_facts, services.note, names, read_events(path))
        services = services._replace(note=diagnosis.wrap_note(services.note))
    make = functools.partial(Writer, path, cfg.monitor, start.budget.total_steps, start.steps_done)
    writer = stop_if_unwritable(lambda: make(primary=primary, vitals=services.vitals, diagnosis=diagnosis), path)
    writer.console.tokens_after = start.tokens_after  # the ETA with growing batches
    if start.source:
        services.note("branch", start.steps_done, ancestor=redacted(start.source.ancestry[0]))
    changed = record["changed"][-len(start.changes) :] if start.changes else []
    details = redacted({"changed": changed, "replay": folder.options.replay, **facts})
    kind = "started" if start.step is None else "resumed"
    services.note(kind, start.steps_done, **details, devices=record["devices"])
    return services, writer


def data_position(start: Start, seed: int, step: int) -> dict[str, Any]:
    """Returns the data position after `step` steps for a checkpoint."""
    return {
        "batch_index": start.batch_of(step),
        "skipped": [list(r) for r in start.skipped],
        "seed": seed,
        "fingerprint": start.corpus.fingerprint,
        "parts": dict(start.corpus.parts),
        "order": ORDER,
        "mixture": start.mixture.record() if start.mixture else None,
        "detours": [list(detour) for detour in start.detours],
    }


def open_feed(start: Start, batches: Any, program: Program, first: int, stop: int) -> Feed:
    """Returns the feed of steps [first, stop)."""
    cfg = program.cfg
    return Feed(
        corrupt_batches(batches.rows),
        start.batch_of,
        program.batch_sharding,
        range(first, stop),
        num_rows=start.sizes.size,
        row_tokens=start.budget.row_tokens(cfg.seq_len).size,
        seq_len=cfg.seq_len,
        transforms=start.transforms,
    )


def make_pilot(folder: RunFolder, start: Start, parts: Parts, services: Services) -> AutopilotSpec:
    """Returns the autopilot of this process, with its settings and history."""
    if parts.replicas:
        parts.replicas.note = services.note  # passes events to this process's health rules
    return AutopilotSpec(
        recovery=folder.cfg.train.recovery,
        guard=folder.cfg.train.guard,
        note=services.note,
        past=start.decisions.up_to(start.steps_done),
        replayed=folder.replayed,
        start_step=start.steps_done,
        batch_index=start.batch_of,
        gradient_norms=parts.program.by_size("gradient_norms"),
        replicas=parts.replicas,
    )


def make_watch(program: Program, log: Log) -> ReplicaMonitor | None:
    """Returns the monitor of replicated state, or None if it is off. Logs how much of the state is replicated."""
    cfg = program.cfg.train.replicas
    if not cfg.every_steps:
        return None
    log(f"replicas: {replica_coverage(program.abstract_state, RULES[program.cfg.rules])}")
    return ReplicaMonitor(cfg, make_replica_check(program.mesh, program.abstract_state), say=log)


def make_evaluate(program: Program, corpus: Corpus) -> Callable[[Any], dict[str, float]] | None:
    """Returns a function params -> validation metrics, or None. Puts its fixed batches on the devices once."""
    cfg = program.cfg
    if not cfg.eval.num_rows or corpus.valid_rows is None:
        return None
    rows = rows_per_pass(program)
    model = program.model.unstaged
    on_mesh = functools.partial(put_rows, rows=list(range(rows)), num_rows=rows, sharding=model.rows_sharding)
    step = jax.jit(
        make_eval_step(model.token_losses, len(corpus.source_names)),
        out_shardings=replicated(program.mesh),
        compiler_options=program.plan.compiler_options.values or None,
    )

    @functools.cache
    def batches() -> list:
        return [on_mesh(batch) for batch in corpus.valid_batches(cfg.eval.num_rows, rows)]

    alone = one_at_a_time(step, program.mesh)
    return lambda params: evaluate(alone, params, batches(), corpus.source_names)


def open_evals(cfg: RunConfig, corpus: Corpus) -> tuple[Evaluator, ...]:
    """Returns the named evaluators with their data. Raises BadInput if the data cannot be read."""
    if not cfg.evals:
        return ()
    if corpus.tokenizer is None:
        raise BadInput("evals need a tokenizer, but the data of this run are token ids; set data.tokenizer")
    evaluators = open_evaluators(cfg.evals, EvalReading.of(corpus.tokenizer, cfg.seq_len))
    check_same_evals(evaluators)
    return evaluators


def make_evaluates(program: Program, evaluators: tuple[Evaluator, ...]) -> tuple[LoopEvaluator, ...]:
    """Returns the evaluators for the loop. All share one program, which is compiled once per sequence length."""
    scorer = Scorer.of(program.model.unstaged, rows_per_pass(program) * program.cfg.seq_len)
    return tuple(LoopEvaluator(functools.partial(one.metrics, scorer), one.every_steps) for one in evaluators)


def rows_per_pass(program: Program) -> int:
    """Returns the sequences per validation batch: a microbatch, rounded up to a multiple of the batch shards."""
    rows = program.cfg.rows_per_step // program.cfg.train.num_microbatches
    return rows + -rows % program.model.unstaged.plan.batch_axes.num_shards
