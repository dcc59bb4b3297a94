"""Earlier decisions of a run (rewinds, skipped batches), and the replay of another run's decisions."""

import dataclasses
import functools
from typing import Any

from jaxscale.config import RunConfig
from jaxscale.program.budget import Budget
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.restore import newest_readable_step
from jaxscale.runtime.checkpoint.storage_errors import stop_if_unwritable
from jaxscale.runtime.data.mixture import Mixture
from jaxscale.runtime.data.order import normalise_ranges
from jaxscale.runtime.hosts.agree import agreed
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.monitor.records import abandon, read_records
from jaxscale.runtime.run.changes import changes_of
from jaxscale.runtime.run.options import Log
from jaxscale.runtime.run.resume_checks import check_same_run
from jaxscale.runtime.training.decisions import Decisions, Rewind, decision_events, parse_decisions
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop

cannot_replay = functools.partial(Stop, Exit.CONFIG_MISMATCH)


def read_decisions(folder: Any) -> Decisions:
    """Returns the decisions of the run in the folder. Process 0 reads them and sends them to the others."""
    return parse_decisions(agreed(lambda: decision_events(read_events(folder))))


def complete_rewind(rewind: Rewind, folder: Any, checkpoints: Checkpoints) -> None:
    """Sets aside checkpoints and metrics after the target step of the rewind. Idempotent and collective."""
    checkpoints.set_aside_after(rewind.to, "rewound")
    agreed(lambda: stop_if_unwritable(lambda: abandon(folder, rewind.to, rewind.number), folder))


def with_replayed(cfg: RunConfig, folder: Any, old_workdir: str, log: Log) -> tuple[RunConfig, Decisions]:
    """Returns (cfg that skips the same batches as another run, decisions of that run).

    Raises BadInput if `old_workdir` is not another run, Stop(CONFIG_MISMATCH) if cfg cannot replay that run, and
    Stop(CHECKPOINT_CORRUPT) if none of its checkpoints has readable skipped batches.
    """
    old = paths.as_path(old_workdir)
    resolved = lambda path: str(paths.absolute(path) if paths.is_remote(path) else paths.absolute(path).resolve())
    if resolved(old).rstrip("/") == resolved(folder).rstrip("/"):
        raise BadInput(f"--replay={old_workdir} is the work folder of this run; use another --workdir")
    if not (old / "config.json").exists():
        raise BadInput(f"--replay={old_workdir} has no config.json; use the work folder of a run")
    check_same_run(cfg, old, None)
    old_record = paths.read_json(old / "config.json")
    if names := ", ".join(
        dict.fromkeys(change["name"] for change in changes_of(old_record) if change.get("alters", True))
    ):
        raise cannot_replay(
            f"--replay={old_workdir}: that run changed settings that affect its results ({names}), but a replay has "
            "one config for all steps; it cannot be replayed"
        )
    decisions = read_decisions(old)
    pending = decisions.pending
    checkpoints = Checkpoints(old / "checkpoints", cfg.checkpoint)
    newest = newest_readable_step(checkpoints, log, before=pending.to + 1 if pending else None)
    recorded = checkpoints.read_run(newest)["data"] if newest is not None else {"skipped": []}
    ranges = normalise_ranges(
        [*recorded["skipped"], *old_record["config"]["data"]["skip_batches"], *decisions.skip_batches]
        + [*cfg.data.skip_batches]
    )
    decisions = decisions.up_to(pending.to) if pending else decisions
    if decisions.decay and decisions.decay.step > (newest or 0):  # no checkpoint is after its start
        decisions = decisions._replace(decay=None)
    last = pending.to if pending else max(newest or 0, agreed(lambda: last_measured(old)), *decisions.skipped, 0)
    decisions = decisions.with_recorded_detours(recorded)._replace(last_step=last)
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, skip_batches=ranges)), decisions


def check_same_schedule(budget: Budget, mixture: Mixture | None, old_workdir: str) -> None:
    """Raises Stop(CONFIG_MISMATCH) if steps, ramps or mixture stages differ from those of the replayed run."""
    record = paths.read_json(paths.as_path(old_workdir) / "config.json")
    old = record["budget"]
    if old["total_steps"] != budget.total_steps:
        raise cannot_replay(
            f"--replay={old_workdir}: that run has {old['total_steps']} steps and this run {budget.total_steps}, so "
            "their learning rates differ; use the train_tokens of that run, and end early with --stop_after"
        )
    for name, setting in (("ramp", "batch_ramp"), ("seq_len_ramp", "seq_len_ramp")):
        stages = [list(stage) for stage in getattr(budget, name)]
        if (old_stages := [list(stage) for stage in old.get(name) or ()]) != stages:
            raise cannot_replay(
                f"--replay={old_workdir}: the stages of {setting}, as [first batch, size], are {old_stages} in that "
                f"run and {stages} in this run, because train_tokens changed after them; it cannot be replayed"
            )
    starts = (record.get("mixture") or {}).get("starts")  # an earlier version recorded none
    if mixture is not None and starts not in (None, mixture.starts):
        raise cannot_replay(
            f"--replay={old_workdir}: the first batches of the stages of data.mixture are {starts} in that run and "
            f"{dict(mixture.starts)} in this run, because train_tokens changed after them; it cannot be replayed"
        )


def last_measured(folder: Any) -> int:
    """Returns the last step in metrics.jsonl, or 0."""
    steps = (record.get("step") for record in read_records(folder / "metrics.jsonl"))
    return max((int(step) for step in steps if isinstance(step, (int, float))), default=0)
