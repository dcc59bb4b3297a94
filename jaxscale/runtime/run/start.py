"""Resolves the start of a run and its dtypes from the config, the work folder and the data. Writes nothing."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxscale.config import RunConfig
from jaxscale.kernels.hardware import DtypeChoice, choose_compute_dtype
from jaxscale.program.auto_dtype import Resolved, is_auto, resolve_dtypes
from jaxscale.program.budget import BatchStage, Budget, remaining_stages, resolve_budget
from jaxscale.runtime.checkpoint.branch import InitSource, open_source
from jaxscale.runtime.checkpoint.tiers import TieredCheckpoints
from jaxscale.runtime.data.dataset import Transform
from jaxscale.runtime.data.mixture import Detour, Mixture
from jaxscale.runtime.data.order import Ranges, batch_index, rows_trained
from jaxscale.runtime.data.pipeline import Corpus
from jaxscale.runtime.hosts.agree import agreed
from jaxscale.runtime.run import resume_checks
from jaxscale.runtime.run.branching import check_branch, check_longer
from jaxscale.runtime.run.changes import Change
from jaxscale.runtime.run.options import Log, RunOptions
from jaxscale.runtime.run.replay import check_same_schedule, read_decisions
from jaxscale.runtime.training.decisions import Decisions
from jaxscale.runtime.training.loop_services import Services
from jaxscale.system import paths
from jaxscale.units import BatchSizes


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A prepared work folder, with config, options and services of this process."""

    cfg: RunConfig
    path: Any
    checkpoints: TieredCheckpoints
    services: Services
    options: RunOptions
    log: Log
    replayed: Decisions | None  # decisions of the run given by --replay
    dtypes: tuple[Resolved, ...] = ()  # resolved values of settings with 'auto'


@dataclasses.dataclass(frozen=True)
class Start:
    """The start of a run, resolved before compilation."""

    step: int | None  # step of the checkpoint, or None
    recorded: dict[str, Any] | None  # the checkpoint's record of the run
    changes: list[Change]  # changes of the config since the checkpoint
    decisions: Decisions
    source: InitSource | None  # the checkpoint of another run that this one is initialized from
    corpus: Corpus
    budget: Budget
    skipped: Ranges  # ranges of skipped batches
    nothing_to_do: str  # reason, or ''
    detours: Sequence[Detour] = ()
    mixture: Mixture | None = None
    transforms: Sequence[Transform] = ()  # transforms of training batches, in order

    @property
    def steps_done(self) -> int:
        """Steps before this process started, including the steps of the run that this run branches from."""
        if self.step is None and self.source is not None and self.source.whole:
            return self.source.step
        return self.step or 0

    @property
    def sizes(self) -> BatchSizes:
        """Number of rows in each batch."""
        return self.budget.batches(self.corpus.seq_len)

    @property
    def remaining_stages(self) -> list[BatchStage]:
        """Batch sizes of the remaining steps."""
        return remaining_stages(self.budget, self.corpus.seq_len, self.batch_of(self.steps_done), self.skipped)

    def tokens_after(self, step: int) -> int:
        """Returns the tokens of the first `step` steps."""
        return rows_trained(step, self.sizes, self.skipped) * self.corpus.seq_len

    def batch_of(self, step: int) -> int:
        """Returns the index of the batch after `step` steps."""
        return batch_index(step, self.skipped)


def resolve_start(folder: RunFolder, step: int | None, corpus: Corpus | None = None) -> Start:
    """Resolves the start from the checkpoint of `step`, or from the beginning if `step` is None.

    `corpus` is the data, if already open. Raises BadInput, or Stop with CONFIG_MISMATCH or DATA_MISMATCH, if the run in
    the folder cannot continue with these settings or data.
    """
    cfg, options, done = folder.cfg, folder.options, step or 0
    recorded = None if step is None else folder.checkpoints.read_run(step)
    changes = resume_checks.check_same_run(cfg, folder.path, recorded, options.allow_change)
    source, before = open_ancestor(folder, recorded), recorded  # before: the record whose data position is used
    if source is not None and source.whole:
        check_branch(cfg, source)
        before, done = source.record["run"], source.step
    decisions = read_decisions(folder.path).with_recorded_detours(before and before["data"])
    if corpus is None:
        known: dict[str, Any] = dict(seq_len=cfg.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.seed)
        corpus = resume_checks.open_same_data(cfg.data, before, folder.log, **known)
        folder.log(corpus.summary)
        resume_checks.check_hosts_agree(corpus)
    position = resume_checks.recorded_position(before, done)
    budget = resolve_budget(cfg, corpus.epoch_tokens, position)
    if source is not None and source.whole and done:
        check_longer(cfg, source, budget.total_steps)
    planned = budget
    if decay := (folder.replayed or decisions.up_to(done)).decay:
        budget = dataclasses.replace(budget, total_steps=decay.until, decay_start=decay.step)
    skipped = resume_checks.check_same_data(cfg, corpus, before, done, decisions)
    reason = nothing_to_do(done, budget.total_steps, options.stop_after)
    start = Start(step, recorded, changes, decisions, source, corpus, budget, skipped, reason)
    if reason:
        return start
    detours = (folder.replayed or decisions).detours
    num_batches = start.batch_of(planned.total_steps - 1) + 1  # an early decay does not move mixture stages
    mixture = corpus.plan_mixture(start.sizes, planned.total_steps, num_batches, detours=detours, begun=position.begun)
    if options.replay:
        check_same_schedule(budget, mixture, options.replay)
    resume_checks.check_same_past(start.sizes, budget.row_tokens(cfg.seq_len), mixture, before, done, folder.log)
    transforms = corpus.open_transforms(corpus.batches(start.sizes, mixture), start.batch_of(done))
    return dataclasses.replace(start, detours=detours, mixture=mixture, transforms=transforms)


def nothing_to_do(step: int, total_steps: int, stop_after: int | None) -> str:
    """Returns the reason why a run at this step has nothing left to train, or ''."""
    if step >= total_steps:
        return (
            f"this run is complete at step {step}; to continue, raise --config.train_tokens; the learning rate then "
            "follows the longer schedule"
        )
    if stop_after is not None and step >= stop_after:
        return f"this run is already at step {step}, and --stop_after={stop_after}"
    return ""


def open_ancestor(folder: RunFolder, recorded: dict[str, Any] | None) -> InitSource | None:
    """Returns the checkpoint that initializes a new run, as recorded at an earlier start, or None."""
    if folder.cfg.init.from_path is None or recorded is not None:
        return None
    ancestor = next(iter(resume_checks.recorded_run(folder.path).get("ancestry", ())), None)
    source = open_source(folder.cfg.init.from_path, ancestor, log=folder.log)
    init = folder.cfg.init
    return dataclasses.replace(source, experts=init.experts, whole=init.what == "run")


def resolve_run_dtypes(
    cfg: RunConfig, workdir: Any, replay: str | None = None
) -> tuple[RunConfig, tuple[Resolved, ...]]:
    """Returns (config without 'auto', resolved settings), the same in all processes.

    An existing run uses its recorded dtypes. A replay, or a run initialized from another run, uses the dtypes of the
    other run. `replay` is the work folder given by --replay. Raises BadInput if init.from_path has no checkpoint.
    """
    if not is_auto(cfg):
        return cfg, ()
    choice = DtypeChoice(*agreed(lambda: choose_compute_dtype(jax.devices()[0])))  # hosts may differ in their CPUs
    return resolve_dtypes(cfg, choice, *recorded_config(cfg, paths.as_path(workdir), replay))


def recorded_config(cfg: RunConfig, folder: Any, replay: str | None) -> tuple[Mapping[str, Any], str]:
    """Returns (config, name) of the run whose dtypes are used, or ({}, '')."""
    if recorded := resume_checks.recorded_run(folder).get("config"):
        return recorded, "this run"
    if replay and (replayed := resume_checks.recorded_run(paths.as_path(replay)).get("config")):
        return replayed, replay
    if cfg.init.from_path is not None:
        source = open_source(cfg.init.from_path, log=lambda line: None)  # resolve_start opens it again, and logs
        return source.record["run"].get("config") or {}, str(source)
    return {}, ""


def dtype_record(resolved: tuple[Resolved, ...], past: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {setting: {"dtype", "reason"}} for the run's record. Unchanged dtypes keep their first reason."""
    old = past.get("dtypes", {})
    new = {one.name: {"dtype": one.dtype, "reason": one.reason} for one in resolved}
    unchanged = lambda name, entry: name not in new or new[name]["dtype"] == entry["dtype"]
    return new | {name: entry for name, entry in old.items() if unchanged(name, entry)}
