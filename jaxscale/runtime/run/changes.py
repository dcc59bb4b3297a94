"""Changes of a run's config between starts, their effect on past steps, and jumps of the learning rate."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.core.optim.config import OptimConfig
from jaxscale.core.optim.optimizer import Schedule, optim_schedule
from jaxscale.program.budget import Budget, schedule_steps
from jaxscale.runtime.run.options import Log
from jaxscale.system.exits import BadInput

# Settings that may always change but affect the exact result of a step. For train_tokens, learning rates are compared;
# mixtures and skipped batches affect future steps only.
ALTERS = ("mesh", "context", "pipeline", "rules", "compiler", "model.remat", "model.remat_save", "model.remat_offload",
          "model.row_parts", "optim.offload_moments", "optim.offload_params")  # fmt: skip
HORIZON = "train_tokens"
CONTINUOUS = 0.05  # largest relative change of the learning rate that is not a jump


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting that differs from the recorded run. `allowed` is True if the change needs --allow_change."""

    name: str
    old: Any
    new: Any
    allowed: bool = False


class Jump(NamedTuple):
    """Learning rates before and after a start. Steps are counted as in metrics.jsonl."""

    step: int  # last completed step
    before: float  # learning rate of this step
    after: float  # learning rate of the next step
    expected: float  # `after` without the change
    past_alters: bool  # past steps would have had other learning rates

    @property
    def is_jump(self) -> bool:
        """True if the learning rate changes by more than a schedule does between two steps."""
        return all(abs(self.after - rate) > CONTINUOUS * max(self.after, rate) for rate in (self.before, self.expected))


def changes_of(record: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Returns all changes in a run's record, oldest first, converted to the current format."""
    record = record or {}
    if "changed" in record:
        return list(record["changed"])
    return [{**change, "allowed": True, "alters": True} for change in record.get("allowed_changes") or []]


def record_changes(
    changes: Sequence[Change], recorded: Mapping[str, Any] | None, step: int, jump: Jump | None, log: Log
) -> list[dict[str, Any]]:
    """Returns all changes of a run, oldest first, and logs new ones. 'alters' marks those that alter past steps."""
    texts = [f"{change.name}: {change.old!r} -> {change.new!r}" for change in changes]
    if text := ", ".join(text for change, text in zip(changes, texts) if not change.allowed):
        log(f"changed from step {step} on: {text}")
    new = []
    for change, text in zip(changes, texts):
        if change.allowed:
            log(f"allowed by --allow_change, from step {step} on: {text}")
        entry = {"step": step, **dataclasses.asdict(change), "alters": alters(change, step, jump)}
        if jump and jump.is_jump and (change.name == HORIZON or change.name.startswith("optim.")):
            entry["learning_rate"] = [jump.before, jump.after]
        new.append(entry)
    return [*changes_of(recorded), *new]


def alters(change: Change, step: int, jump: Jump | None) -> bool:
    """Returns True if the new value may alter past steps. This is True for every allowed change after step 0."""
    if step == 0:
        return False
    if change.name == HORIZON:
        return jump is None or jump.past_alters
    return change.allowed or any(change.name == name or change.name.startswith(f"{name}.") for name in ALTERS)


def find_jump(recorded: Mapping[str, Any] | None, schedule: Schedule, step: int) -> Jump | None:
    """Compares the recorded learning rate schedule with the current one at `step`. Returns None without a record."""
    if recorded is None or step < 1:
        return None
    try:
        cfg = schema.from_dict(OptimConfig, recorded["config"]["optim"], "optim")
    except BadInput:  # recorded by another version
        return None
    budget = recorded["budget"]
    old = optim_schedule(cfg, **schedule_steps(budget))
    samples = sorted({step * part // 64 for part in range(64)} | {step - 1})
    past_alters = any(float(old(number)) != float(schedule(number)) for number in samples)
    return Jump(step, float(old(step - 1)), float(schedule(step)), float(old(step)), past_alters)


def jump_lines(jump: Jump | None, cfg: RunConfig, budget: Budget, workdir: Any) -> list[str]:
    """Returns a warning about a learning rate jump and flags that avoid it, or [] without a jump."""
    if jump is None or not jump.is_jump:
        return []
    times = max(jump.before, jump.after) / max(min(jump.before, jump.after), 1e-30)
    by = f", {times:.3g} times {'higher' if jump.after > jump.before else 'lower'}" if min(jump[1:3]) > 0 else ""
    last = budget.total_steps
    lines = [
        f"warning: the learning rate jumps from {jump.before:.4g} at step {jump.step} to {jump.after:.4g} at step "
        f"{jump.step + 1}{by}: the schedule now has {last} steps; the loss may rise before it falls"
    ]
    if flags := constant_rate_flags(jump, cfg, budget):
        lines.append(f"to keep {jump.before:.4g} instead: press Ctrl-C twice now, and restart with {flags}")
    lines.append(
        f"or start a new run with these weights and its own warmup: --init_from={workdir} --workdir=NEW; future runs "
        "with optim.decay=wsd can continue from a checkpoint before their decay without a jump"
    )
    return lines


def constant_rate_flags(jump: Jump, cfg: RunConfig, budget: Budget) -> str:
    """Returns flags that make the learning rate constant, or '' if there are none. Checks them on the schedule."""
    near = lambda rate: math.isclose(rate, jump.before, rel_tol=1e-5)
    rate = cfg.optim.min_lr if near(cfg.optim.min_lr) else float(f"{jump.before:.6g}")
    if not rate:
        return ""  # a learning rate of 0 trains nothing
    for more in ({}, {"decay": "constant"}):  # with peak_lr equal to min_lr every decay is flat
        values = {"peak_lr": rate, **more}
        try:
            optim = schema.from_dict(OptimConfig, schema.to_dict(cfg.optim) | values)
        except BadInput:
            continue
        schedule = optim_schedule(optim, **budget.schedule_steps)
        if all(near(float(schedule(step))) for step in (jump.step, budget.total_steps - 1)):
            flags = " ".join(f"--config.optim.{name}={value}" for name, value in values.items())
            return f"{flags} --allow_change={','.join(f'optim.{name}' for name in values)}"
    return ""
