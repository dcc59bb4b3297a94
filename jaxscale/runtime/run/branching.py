"""Branches of a run: resume from another run's state and data position, optionally with a learning rate decay."""

import contextlib
from collections.abc import Mapping
from typing import Any

from jaxscale import schema, units
from jaxscale.config import RunConfig
from jaxscale.core.optim.config import STABLE, OptimConfig
from jaxscale.program.budget import decay_begin
from jaxscale.runtime.checkpoint.branch import InitSource, parse_checkpoint_path
from jaxscale.runtime.checkpoint.folders import all_steps
from jaxscale.runtime.checkpoint.record import require_record
from jaxscale.runtime.data.order import batch_index
from jaxscale.runtime.run.options import NEVER
from jaxscale.system.exits import BadInput

MAX_LISTED = 3  # available steps in an error


def branch_settings(path: str, decay_tokens: str | None, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a branch of the run at `path`. With `decay_tokens`, the learning rate decays at once.

    `path` is WORKDIR, for its newest step, or WORKDIR/checkpoints/STEP. `recorded` has the settings of the branch if it
    already exists. The branch then keeps its step when the other run saves new steps.
    Uses no device, since processes compare settings before they connect. Raises BadInput if the step does not exist or,
    with `decay_tokens`, if the learning rate is not at its peak at the step.
    """
    source = str((recorded.get("init") or {}).get("from_path"))
    source = source if source.startswith(f"{path.rstrip('/')}/checkpoints/") else path
    folder, step = parse_checkpoint_path(source)
    found = all_steps(folder)
    if not found:
        raise BadInput(f"--branch_from={source}: {folder} has no complete checkpoint; use a run that has saved one")
    step = found[-1] if step is None else step
    if step not in found:
        near = units.or_list(found[-MAX_LISTED:])
        raise BadInput(f"--branch_from={source}: {folder} has no checkpoint of step {step}; use step {near}")
    settings = {"init.from_path": str(folder / str(step)), "init.what": "run"}
    if decay_tokens is None:
        return settings
    run = require_record(folder / str(step))["run"]
    check_stable(folder / str(step), step, run)
    budget = run["budget"]
    sizes = units.recorded_sizes(budget)
    if sizes.vary and (largest := sizes.stages[-1][0]) > batch_index(step - 1, run["data"]["skipped"]):
        raise BadInput(
            f"--branch_from={path}: at step {step} the batch size still grows (batch_ramp), but --decay_tokens needs a "
            f"constant batch size; branch from a step after batch {largest}, the first batch with the full size of "
            f"{budget['batch_tokens']} tokens"
        )
    known = dict(seq_len=run["config"]["seq_len"], batch_tokens=budget["batch_tokens"])
    steps = units.steps(units.resolve("--decay_tokens", decay_tokens, **known), known["batch_tokens"])
    if steps < 1:
        raise BadInput(f"--decay_tokens={decay_tokens} must be at least one step")
    return settings | {
        "train_tokens": sizes.begin(step + steps),
        "optim.decay": "wsd",
        "optim.decay_tokens": steps * known["batch_tokens"],
        "optim.warmup_tokens": f"{budget['warmup_steps']} steps",
    }


def check_stable(folder: Any, step: int, run: Mapping[str, Any]) -> None:
    """Raises BadInput unless the learning rate is at its peak before and after the step."""
    optim, budget = schema.from_dict(OptimConfig, run["config"]["optim"], f"{folder}: optim"), run["budget"]
    begin = decay_begin(optim, budget["total_steps"], budget.get("decay_start"))
    if optim.decay not in STABLE:
        reason, fix = f"follows decay={optim.decay}", f"a run with optim.decay={units.or_list(STABLE)}"
    elif step < budget["warmup_steps"]:
        reason, fix = f"is in its warmup of {budget['warmup_steps']} steps", "a later step"
    elif begin is not None and step > begin:
        reason, fix = f"decays from step {begin} on", f"step {begin} or an earlier step"
    else:
        return
    raise BadInput(
        f"--decay_tokens must start at the peak learning rate, but that of {folder} {reason}; branch from {fix}"
    )


def check_branch(cfg: RunConfig, source: InitSource) -> None:
    """Raises BadInput if a run with these settings cannot continue the data of the source."""
    run = source.record["run"]
    if not run.get("data"):
        raise BadInput(
            f"init.what='run': {source} has no data position, since no training run wrote it; use 'state' or 'params'"
        )
    old, new = run["config"], schema.to_dict(cfg)
    with contextlib.suppress(ValueError):
        old = schema.to_dict(schema.from_dict(RunConfig, old))  # defaults for settings newer than that run
    if changed := [name for name in NEVER if old.get(name) != new[name]]:
        differences = "; ".join(
            f"{name}: {old.get(name)!r} in the source, {new[name]!r} in this run" for name in changed
        )
        raise BadInput(
            f"init.what='run' continues the data of {source}, which depend on {', '.join(NEVER)}, but the runs differ: "
            f"{differences}; use the same values, or init.what='state', which reads the data from the beginning"
        )
    expected = batch_index(source.step, [tuple(part) for part in run["data"]["skipped"]])
    if run["data"].get("batch_index", expected) != expected:
        raise BadInput(f"init.what='run': {source} is at batch {run['data']['batch_index']}, but must be at {expected}")


def check_longer(cfg: RunConfig, source: InitSource, total_steps: int) -> None:
    """Raises BadInput for a branch that would end where it starts."""
    if total_steps <= source.step:
        raise BadInput(
            f"train_tokens={cfg.train_tokens} gives {total_steps} steps, but the branch starts after step "
            f"{source.step} of {source.checkpoints.directory.parent}; raise train_tokens, which includes these steps"
        )
