"""Branches of a run: where one goes on with all of another's state and data, and decays its rate from there."""

from collections.abc import Mapping
from typing import Any

from jaxscale import schema, units
from jaxscale.checkpoint.branch import Source, open_source
from jaxscale.config import RunConfig, schedule_steps
from jaxscale.data.order import batch_index
from jaxscale.optim.config import OptimConfig
from jaxscale.optim.optimizers import optim_schedule
from jaxscale.run.options import NEVER
from jaxscale.system.exits import BadInput

STABLE_AT = 1e-6  # relative: a rate this near the peak has not begun to fall


def branch_settings(path: str, decay_tokens: str | None, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make a run a branch of the one at `path`; with decay_tokens one whose rate decays at once.

    path: a work folder, of which the newest step is taken, or WORKDIR/checkpoints/STEP. recorded: the settings of the
    branch where it has begun already: then it keeps its step, whatever the trunk has saved since.
    Raises BadInput where there is no such step, and where its rate does not stand at the peak.
    """
    source = open_source(begun_from(path, recorded) or path, named="--branch_from")
    settings = {"init.from_path": str(source), "init.what": "run"}
    if decay_tokens is None:
        return settings
    run = source.record["run"]
    check_stable(source, run)
    budget = run["budget"]
    known = dict(seq_len=run["config"]["seq_len"], batch_tokens=budget["batch_tokens"])
    steps = units.steps(units.resolve("--decay_tokens", decay_tokens, **known), known["batch_tokens"])
    if steps < 1:
        raise BadInput(f"--decay_tokens={decay_tokens} must be at least one step")
    return settings | {
        "train_tokens": (source.step + steps) * known["batch_tokens"],
        "optim.decay": "wsd",
        "optim.decay_tokens": steps * known["batch_tokens"],
        "optim.warmup_tokens": f"{budget['warmup_steps']} steps",
    }


def begun_from(path: str, recorded: Mapping[str, Any]) -> str | None:
    """The checkpoint of the run at `path` that the branch began with, if it has begun from one of these."""
    known = (recorded.get("init") or {}).get("from_path")
    return known if known and str(known).startswith(f"{path.rstrip('/')}/checkpoints/") else None


def check_stable(source: Source, run: Mapping[str, Any]) -> None:
    """Raises BadInput unless the rate of the run stood at its peak before and after the step."""
    optim = schema.from_dict(OptimConfig, run["config"]["optim"], f"{source}: optim")
    schedule = optim_schedule(optim, **schedule_steps(run["budget"]))
    rates = [float(schedule(step)) for step in (max(0, source.step - 1), source.step)]
    if optim.decay in ("wsd", "constant") and all(abs(rate / optim.peak_lr - 1) < STABLE_AT for rate in rates):
        return
    stage = "in its warmup" if source.step < run["budget"]["warmup_steps"] else "falling"
    way = "an earlier step" if optim.decay == "wsd" and stage == "falling" else "a later step"
    if optim.decay not in ("wsd", "constant"):
        way = "a run with optim.decay=wsd or constant"
    raise BadInput(
        f"--decay_tokens: the rate of {source} is {stage} ({rates[1]:.3g}, peak {optim.peak_lr:.3g}, "
        f"decay={optim.decay}), and a decay begins at the peak; branch off {way}"
    )


def check_branch(cfg: RunConfig, source: Source) -> None:
    """Raises BadInput where a run with these settings cannot go on with the data of the source where it stands."""
    run = source.record["run"]
    if not run.get("data"):
        raise BadInput(
            f"init.what='run': {source} is not of a run, and has no position in data; use 'state' or 'params'"
        )
    there, here = run["config"], schema.to_dict(cfg)
    if changed := [name for name in NEVER if there.get(name) != here[name]]:
        told = "; ".join(f"{name}: {there.get(name)!r} there, {here[name]!r} here" for name in changed)
        raise BadInput(
            f"init.what='run' goes on with the data of {source}, whose rows follow from {', '.join(NEVER)}: {told}; "
            "set these as there, or use init.what='state', which begins the data anew"
        )
    wanted = batch_index(source.step, [tuple(part) for part in run["data"]["skipped"]])
    if run["data"].get("batch_index", wanted) != wanted:
        raise BadInput(f"init.what='run': {source} stands at batch {run['data']['batch_index']}, not at {wanted}")


def check_longer(cfg: RunConfig, source: Source, total_steps: int) -> None:
    """Raises BadInput for a branch that would end where it begins."""
    if total_steps <= source.step:
        raise BadInput(
            f"train_tokens={cfg.train_tokens} is {total_steps} steps, and the branch begins after step {source.step} "
            f"of {source.checkpoints.directory.parent}; train_tokens counts from that run's beginning, so give more"
        )
