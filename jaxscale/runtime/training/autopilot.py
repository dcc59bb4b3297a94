"""Reads the guard's metrics of each step, records events and carries out recovery, identically in every process."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale import units
from jaxscale.core import guard
from jaxscale.core.batch import Batch
from jaxscale.core.config import GuardConfig
from jaxscale.core.state import TrainState
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.hosts.agree import agreed
from jaxscale.runtime.monitor.events import Note, ignore
from jaxscale.runtime.training import recovery
from jaxscale.runtime.training.config import RecoveryConfig
from jaxscale.runtime.training.decisions import Decisions, LrCut
from jaxscale.runtime.training.replicas import ReplicaMonitor
from jaxscale.system.exits import Exit, Stop

FIX = "lower optim.peak_lr, lengthen optim.warmup_tokens, or inspect the data of these steps"
VERDICT_TEXT = {
    guard.NOT_FINITE: "a loss or gradient that is not finite",
    guard.ABSURD_NORM: "a gradient norm above the absolute limit",
    guard.LOSS_RATIO: "a loss too far above the window's median",
    guard.LOSS_SIGMAS: "a loss too many sigmas above the window's median",
    guard.NORM_SIGMAS: "a gradient norm too many sigmas above the window's median",
    guard.NORM_RATIO: "a gradient norm too far above optim.clip_norm",
    guard.ORDERED: "been skipped in the run that is replayed",
}


class Rewound(Exception):
    """Raised if the run must be reopened from an older checkpoint."""


class Rescheduled(Rewound):
    """Raised if the decay begins early: the run must be reopened from the step that was just saved."""


class AutopilotSpec(NamedTuple):
    """Inputs of an Autopilot, made by runtime/run/assembly.py."""

    recovery: RecoveryConfig
    guard: GuardConfig
    note: Note = ignore
    past: Decisions = Decisions()  # earlier decisions of this run
    replayed: Decisions | None = None  # decisions to replay; no new decisions are taken, except to stop
    start_step: int = 0
    batch_index: Callable[[int], int] = lambda step: step  # steps done -> index of the next batch
    gradient_norms: Callable[[TrainState, Batch], dict[str, jax.Array]] | None = None  # compiled at the first call
    replicas: ReplicaMonitor | None = None


class Autopilot:
    """Recovers a run from bad steps. Steps count from 1, and `now` is the last completed step."""

    def __init__(self, spec: AutopilotSpec, checkpoints: Checkpoints):
        self.spec, self.checkpoints = spec, checkpoints
        self.state = spec.past.recovery_state(spec.guard.window_steps, spec.start_step)
        self.cuts, self.last_bad = list(spec.past.cuts), max(self.state.bad, default=-math.inf)
        self.alarms = recovery.AlarmState()
        self.action: recovery.Action | None = None
        self.last_skipped: tuple[Batch, recovery.StepReading, int] | None = None
        self.recovery = spec.recovery
        if spec.replayed is not None:  # a replay takes no decisions, even after the replayed run's end
            self.recovery = dataclasses.replace(spec.recovery, steps=())

    def observe(self, step: int, values: dict[str, Any], batch: Batch) -> None:
        """Reads the metrics of a step and sets `action` to the required recovery step, or None."""
        verdict = values["verdict"]
        if verdict == guard.NO_TARGETS:
            self.spec.note("alarm", step, what=guard.VERDICTS[verdict], batch=self.spec.batch_index(step - 1))
            return
        bad = bool(values["skipped"]) and verdict != guard.LOSS_SCALE
        reading = recovery.StepReading(
            step, values["objective"], values["grad_norm"], values["loss_median"], bad, values["skipped_in_row"]
        )
        self.alarms, new_alarms = recovery.update_alarms(self.spec.recovery, self.alarms, reading)
        facts = {
            "loss": finite_or_none(reading.loss),
            "grad_norm": finite_or_none(reading.grad_norm),
            "batch": self.spec.batch_index(step - 1),
        }
        for name in new_alarms:
            self.spec.note("spike" if name == "spike" else "alarm", step, what=name, **facts)
        if bad:
            self.spec.note("skipped", step, why=guard.VERDICTS[verdict], **facts)
            self.last_bad, self.last_skipped = step, (batch, reading, verdict)
        if verdict == guard.NEW_LEVEL:
            self.spec.note("alarm", step, what=guard.VERDICTS[verdict], **facts)
        state, action = recovery.decide(self.recovery, self.spec.guard, self.state, reading)
        if self.action is None and (self.spec.replayed is None or step >= self.spec.replayed.last_step):
            self.state, self.action = state, action
            return
        # The step was in flight when recovery decided about an earlier step, or the replayed run has handled it.
        self.state = self.state._replace(bad=state.bad)
        if bad and self.action and self.action.kind == "rewind":
            self.action = self.action._replace(last_bad=step)

    def act(self, now: int, state: TrainState) -> TrainState:
        """Carries out a pending action and returns the state to continue with.

        Call it when the metrics of all steps have been read. Raises Rewound, or Stop(NON_FINITE) if recovery fails.
        """
        action, self.action = self.action, None
        if action is None:
            return state
        if action.kind == "cut_lr":
            active = next((cut.factor for cut in reversed(self.cuts) if cut.until > now), 1.0)
            cut = LrCut(now + 1, active / self.spec.recovery.cut_factor, now + self.spec.recovery.cut_steps)
            self.spec.note("lr_cut", cut.step, factor=cut.factor, until=cut.until)
            self.cuts.append(cut)
            return cut_learning_rate(state, cut)
        if action.kind == "rewind":
            self.rewind(now, action)
        raise self.halt_error(state, no_checkpoint=action.kind == "rewind")

    def rewind(self, now: int, action: recovery.Action) -> None:
        """Records a rewind and raises Rewound. Returns if no usable checkpoint exists."""
        cfg = self.spec.recovery
        before = recovery.rewind_before_step(action.first_bad, cfg.rewind_margin_steps)
        oldest = recovery.oldest_clean_step(action.first_bad, cfg.max_rewind_steps)
        to = self.newest_checkpoint((oldest, before, "clean"), (oldest, action.first_bad, "clean"), (0, before, None))
        if to is None:
            return
        batch_index, margin = self.spec.batch_index, cfg.rewind_margin_steps
        start, stop = batch_index(max(to, action.first_bad - 1 - margin)), batch_index(action.last_bad - 1) + 1
        facts = {"first_bad": action.first_bad, "last_bad": action.last_bad, "skip_batches": [[start, stop]]}
        following = next(n for n in map(batch_index, itertools.count(to)) if not start <= n < stop)
        clean = [following, cfg.clean_steps, cfg.clean_source] if cfg.clean_steps else None
        self.spec.note("rewind", now, to=to, batch=batch_index(to), why="skipped", clean=clean, **facts)
        raise Rewound

    def newest_checkpoint(self, *ranges: tuple[int, int, str | None]) -> int | None:
        """Returns the newest checkpoint of the first range (first step, end, health) with a checkpoint, or None.

        Waits for a save in progress. If the save fails, the failure is recorded and an older checkpoint is used.
        """
        self.checkpoints.join()
        self.checkpoints.take_failure()
        find = lambda: [self.checkpoints.newest(before=before, health=health) for _, before, health in ranges]
        found = zip(agreed(find), ranges, strict=True)
        return next((step for step, (oldest, *_) in found if step is not None and step >= oldest), None)

    def halt_error(self, state: TrainState, no_checkpoint: bool) -> Stop:
        """Returns an error that names the step and the parameter with the first non-finite or the largest gradient."""
        assert self.last_skipped is not None, "recovery acts after a bad step"
        batch, reading, verdict = self.last_skipped
        in_row, skipped = reading.skipped_in_row, len(self.state.bad)
        count, what = in_row, units.plural(in_row, "consecutive step")
        if in_row <= self.spec.guard.max_skipped_in_row:
            count, what = skipped, f"{skipped} of the last {self.spec.guard.window_steps} steps"
        done = (f"{len(self.cuts)} cuts of the learning rate", f"{len(self.spec.past.rewinds)} rewinds")
        were, name = "were" if count > 1 else "was", guard.SETTINGS.get(verdict)
        setting = f", or raise train.guard.{name} if these steps were valid" if name else ""
        tried = f", after {' and '.join(done)}" if self.cuts or self.spec.past.rewinds else ""
        tried += f", and no checkpoint before step {self.state.bad[0]} exists" if no_checkpoint else ""
        return Stop(
            Exit.NON_FINITE,
            f"{what} {were} skipped, up to step {reading.step}, which had {VERDICT_TEXT[verdict]} "
            f"(loss {reading.loss:.4g}, gradient norm {reading.grad_norm:.4g}"
            f"{self.worst_gradient(state, batch, reading.step)}){tried}; {FIX}{setting}",
        )

    def worst_gradient(self, state: TrainState, batch: Batch, step: int) -> str:
        """Returns ', first not finite in NAME' or ', largest in NAME'; '' if gradient norms are not available."""
        if self.spec.gradient_norms is None:
            return ""
        at_step = state._replace(step=scalar_like(state.step, step - 1))
        norms = {name: float(norm) for name, norm in jax.device_get(self.spec.gradient_norms(at_step, batch)).items()}
        first = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
        return f", first not finite in {first}" if first else f", largest in {max(norms, key=norms.__getitem__)}"

    def set_order(self, now: int, state: TrainState) -> TrainState:
        """Makes the guard apply or skip the next step as in the replayed run. No change without a replay."""
        replayed = self.spec.replayed
        if replayed is None or now >= replayed.last_step:
            return state
        order = guard.SKIP if now + 1 in replayed.skipped else guard.APPLY
        return state._replace(guard=state.guard._replace(order=scalar_like(state.guard.order, order)))

    def replay_decisions(self, now: int, state: TrainState) -> TrainState:
        """Applies the decisions that the replayed run made after this step. Call it before saving the state."""
        for cut in self.spec.replayed.cuts if self.spec.replayed else ():
            if cut.step == now + 1:
                self.spec.note("lr_cut", cut.step, factor=cut.factor, until=cut.until)
                state = cut_learning_rate(state, cut)
                self.state = self.state._replace(answered=cut.step - 1)
        decay = self.spec.replayed.decay if self.spec.replayed else None
        if decay and decay.step == now:  # the schedule includes it from the start
            self.spec.note("early_decay", now, until=decay.until, why="as in the run that is replayed")
        return state

    def health(self, now: int) -> str:
        """Returns 'suspect' if a step in the last window was skipped, otherwise 'clean'."""
        return "suspect" if self.last_bad > now - self.spec.guard.window_steps else "clean"

    def check_replicas(self, now: int, state: TrainState, saving: bool, leaving: str | None) -> None:
        """Compares the devices' copies of the state, if a comparison is due.

        Raises Rewound at the first difference, to run the same steps again. Raises Stop(SILENT_CORRUPTION) if the
        copies differ again or no checkpoint is clean, and Stop(PREEMPTED) if they differ while the process must stop.
        """
        monitor = self.spec.replicas
        if monitor is None or not monitor.due(now, saving) or monitor.check_agreement(now, state):
            return
        if leaving:
            raise Stop(
                Exit.PREEMPTED,
                f"{leaving}: step {now} was not saved, because the devices' copies of the state differ; run the same "
                "command again to continue from the last checkpoint",
            )
        to = self.newest_checkpoint((0, now, "clean"))
        if to is None:
            raise Stop(
                Exit.SILENT_CORRUPTION,
                f"after step {now}, the devices' copies of the state differ, and no checkpoint exists without "
                "recently skipped steps; start a new run without the devices named above",
            )
        self.spec.note(
            "rewind", now, to=to, batch=self.spec.batch_index(to), why="replicas", skip_batches=[], clean=None
        )
        raise Rewound


def cut_learning_rate(state: TrainState, cut: LrCut) -> TrainState:
    """Returns the state with a guard that multiplies the learning rate by cut.factor until step cut.until."""
    values = {"lr_factor": cut.factor, "cut_until": cut.until}
    fields = {name: scalar_like(getattr(state.guard, name), value) for name, value in values.items()}
    return state._replace(guard=state.guard._replace(**fields))


def scalar_like(like: jax.Array, value: float) -> jax.Array:
    """Returns a scalar with the dtype and sharding of `like`, without communication between processes."""
    host = np.asarray(value, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: host)


def finite_or_none(value: float) -> float | None:
    """Returns the number, or None if it is not finite, because JSON has no NaN."""
    return value if math.isfinite(value) else None
