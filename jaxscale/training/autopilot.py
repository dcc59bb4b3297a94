"""Reads what each step has reported, notes it, and carries out what recovery decides, alike in every process."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale import units
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.data.batch import Batch
from jaxscale.hosts.agree import agreed
from jaxscale.monitor.events import Note, ignore
from jaxscale.system.exits import Exit, Stop
from jaxscale.training import guard, recovery
from jaxscale.training.config import GuardConfig, RecoveryConfig
from jaxscale.training.decisions import Decisions, LrCut
from jaxscale.training.replicas import ReplicaWatch
from jaxscale.training.state import TrainState

WAY_OUT = "lower optim.peak_lr, lengthen optim.warmup_tokens, or look at the data of these steps"
WHAT_WAS_WRONG = {
    guard.NOT_FINITE: "a loss or gradient that is not finite",
    guard.ABSURD_NORM: "an absurd gradient norm",
    guard.LOSS_RATIO: "a loss too far above the window's median",
    guard.LOSS_SIGMAS: "a loss too many sigmas above the window's median",
    guard.NORM_SIGMAS: "a gradient norm too many sigmas above the window's median",
    guard.NORM_RATIO: "a gradient norm too far above optim.clip_norm",
    guard.ORDERED: "been skipped in the run that is replayed",
}


class Rewound(Exception):
    """The loop's outcome where the run goes on from an older checkpoint: open it again."""


class Rescheduled(Rewound):
    """The loop's outcome where the decay begins early: open the run again at the step that was just saved."""


class Pilot(NamedTuple):
    """What an Autopilot is made of, by run/assembly.py."""

    recovery: RecoveryConfig
    guard: GuardConfig
    note: Note = ignore
    past: Decisions = Decisions()  # of this run
    replayed: Decisions | None = None  # of the run whose decisions are repeated; then none are taken, but to end
    start_step: int = 0
    batch_of: Callable[[int], int] = lambda step: step  # steps done -> number of the next batch
    gradient_norms: Callable[[TrainState, Batch], dict[str, jax.Array]] | None = None  # compiled only if called
    replicas: ReplicaWatch | None = None  # compares the copies of the state


class Autopilot:
    """Steps are counted from 1, as in metrics.jsonl; `now` is how many are done."""

    def __init__(self, of: Pilot, checkpoints: Checkpoints):
        self.of, self.checkpoints = of, checkpoints
        self.trouble = of.past.trouble(of.guard.window_steps, of.start_step)
        self.cuts, self.last_bad = list(of.past.cuts), max(self.trouble.bad, default=-math.inf)
        self.watching = recovery.Watching()
        self.action: recovery.Action | None = None
        self.worst: tuple[Batch, recovery.JudgedStep, int] | None = None
        self.recovery = of.recovery  # a replay takes no decisions of its own, not even where the old run's end
        if of.replayed is not None:
            self.recovery = dataclasses.replace(of.recovery, rungs=())

    def read(self, step: int, values: dict[str, Any], batch: Batch) -> None:
        """Takes in the metrics of a step; `action` is then what is to be done, or None."""
        verdict = values["verdict"]
        if verdict == guard.NO_TARGETS:  # there is nothing to judge
            self.of.note("alarm", step, what=guard.VERDICTS[verdict], batch=self.of.batch_of(step - 1))
            return
        bad = bool(values["skipped"]) and verdict != guard.LOSS_SCALE
        reading = recovery.JudgedStep(
            step, values["objective"], values["grad_norm"], values["loss_median"], bad, values["skipped_in_row"]
        )
        self.watching, told = recovery.alarms(self.of.recovery, self.watching, reading)
        facts = {
            "loss": finite(reading.loss),
            "grad_norm": finite(reading.grad_norm),
            "batch": self.of.batch_of(step - 1),
        }
        for name in told:
            self.of.note("spike" if name == "spike" else "alarm", step, what=name, **facts)
        if bad:
            self.of.note("skipped", step, why=guard.VERDICTS[verdict], **facts)
            self.last_bad, self.worst = step, (batch, reading, verdict)
        if verdict == guard.NEW_LEVEL:
            self.of.note("alarm", step, what=guard.VERDICTS[verdict], **facts)
        trouble, action = recovery.decide(self.recovery, self.of.guard, self.trouble, reading)
        if self.action is None and (self.of.replayed is None or step >= self.of.replayed.last_step):
            self.trouble, self.action = trouble, action
            return
        # It was under way when recovery decided about another one, or the old run has answered it.
        self.trouble = self.trouble._replace(bad=trouble.bad)
        if bad and self.action and self.action.kind == "rewind":
            self.action = self.action._replace(last_bad=step)

    def act(self, now: int, state: TrainState) -> TrainState:
        """Returns the state to continue with: the same where recovery has decided nothing.

        To be called when all steps that are under way have been read. Raises Rewound, or Stop (NON_FINITE) where no
        recovery is left.
        """
        action, self.action = self.action, None
        if action is None:
            return state
        if action.kind == "cut_lr":
            active = next((cut.factor for cut in reversed(self.cuts) if cut.until > now), 1.0)
            cut = LrCut(now + 1, active / self.of.recovery.cut_factor, now + self.of.recovery.cut_steps)
            self.of.note("lr_cut", cut.step, factor=cut.factor, until=cut.until)
            self.cuts.append(cut)
            return with_cut(state, cut)
        if action.kind == "rewind":
            self.go_back(now, action)
        raise self.end(state, no_checkpoint=action.kind == "rewind")

    def go_back(self, now: int, action: recovery.Action) -> None:
        """Notes the rewind and raises Rewound; returns if there is no checkpoint to go back to."""
        cfg, before = self.of.recovery, recovery.newest_before(action.first_bad, self.of.recovery.rewind_margin_steps)
        oldest = recovery.oldest_clean(action.first_bad, cfg.max_rewind_steps)
        to = self.newest((oldest, before, "clean"), (oldest, action.first_bad, "clean"), (0, before, None))
        if to is None:
            return
        batch_of, margin = self.of.batch_of, cfg.rewind_margin_steps
        start, stop = batch_of(max(to, action.first_bad - 1 - margin)), batch_of(action.last_bad - 1) + 1
        facts = {"first_bad": action.first_bad, "last_bad": action.last_bad, "skip_batches": [[start, stop]]}
        following = next(n for n in map(batch_of, itertools.count(to)) if not start <= n < stop)
        clean = [following, cfg.clean_steps, cfg.clean_source] if cfg.clean_steps else None
        self.of.note("rewind", now, to=to, batch=batch_of(to), why="skipped", clean=clean, **facts)
        raise Rewound

    def newest(self, *wishes: tuple[int, int, str | None]) -> int | None:
        """The newest checkpoint of the first wish that there is one for: (from this step on, below this one, health).

        A save that is under way is finished first. If it fails, that is noted: an older one will do.
        """
        self.checkpoints.join()
        self.checkpoints.take_failure()
        find = lambda: [self.checkpoints.newest(before=before, health=health) for _, before, health in wishes]
        found = zip(agreed(find), wishes, strict=True)
        return next((step for step, (oldest, *_) in found if step is not None and step >= oldest), None)

    def end(self, state: TrainState, no_checkpoint: bool) -> Stop:
        """The error that says at which step, and in which parameter's gradient, it goes wrong."""
        assert self.worst is not None, "recovery acts after a bad step"
        batch, reading, verdict = self.worst
        in_row, skipped = reading.skipped_in_row, len(self.trouble.bad)
        count, what = in_row, f"{units.plural(in_row, 'step')} in a row"
        if in_row <= self.of.guard.max_skipped_in_row:
            count, what = skipped, f"{skipped} of the last {self.of.guard.window_steps} steps"
        done = (f"{len(self.cuts)} cuts of the learning rate", f"{len(self.of.past.rewinds)} rewinds")
        were, name = "were" if count > 1 else "was", guard.SETTINGS.get(verdict)
        setting = f", or raise train.guard.{name} if these steps were well" if name else ""
        tried = f", after {' and '.join(done)}" if self.cuts or self.of.past.rewinds else ""
        tried += f", and no checkpoint before step {self.trouble.bad[0]} to go back to" if no_checkpoint else ""
        return Stop(
            Exit.NON_FINITE,
            f"{what} {were} refused, up to step {reading.step}, which had {WHAT_WAS_WRONG[verdict]} "
            f"(loss {reading.loss:.4g}, gradient norm {reading.grad_norm:.4g}"
            f"{self.guilty_leaf(state, batch, reading.step)}){tried}; {WAY_OUT}{setting}",
        )

    def guilty_leaf(self, state: TrainState, batch: Batch, step: int) -> str:
        """', first not finite in blocks/mlp/up', or the largest; '' where nobody can tell."""
        if self.of.gradient_norms is None:
            return ""
        at_step = state._replace(step=on_device(state.step, step - 1))
        norms = {name: float(norm) for name, norm in jax.device_get(self.of.gradient_norms(at_step, batch)).items()}
        first = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
        return f", first not finite in {first}" if first else f", largest in {max(norms, key=norms.__getitem__)}"

    def steer(self, now: int, state: TrainState) -> TrainState:
        """The state for the next step, with the order that a replayed run gives for it."""
        replayed = self.of.replayed
        if replayed is None or now >= replayed.last_step:
            return state
        order = guard.SKIP if now + 1 in replayed.skipped else guard.APPLY
        return state._replace(guard=state.guard._replace(order=on_device(state.guard.order, order)))

    def repeat(self, now: int, state: TrainState) -> TrainState:
        """The state after a step, with what a replayed run had decided there: before it is saved, as by that run."""
        for cut in self.of.replayed.cuts if self.of.replayed else ():
            if cut.step == now + 1:
                self.of.note("lr_cut", cut.step, factor=cut.factor, until=cut.until)
                state = with_cut(state, cut)
                self.trouble = self.trouble._replace(answered=cut.step - 1)
        decay = self.of.replayed.decay if self.of.replayed else None
        if decay and decay.step == now:  # the schedule has it from the beginning
            self.of.note("early_decay", now, until=decay.until, why="as in the run that is replayed")
        return state

    def health(self, now: int) -> str:
        """'suspect' if a step of the last window was skipped, else 'clean'."""
        return "suspect" if self.last_bad > now - self.of.guard.window_steps else "clean"

    def check_replicas(self, now: int, state: TrainState, saving: bool, leaving: str | None) -> None:
        """Compares the devices' copies of the state if it is time to, or about to be saved.

        Raises: Rewound where they differ for the first time: the same steps are run again. Stop (SILENT_CORRUPTION)
        where they then differ again, or there is nothing to go back to; Stop (PREEMPTED) where there is no time to.
        """
        watch = self.of.replicas
        if watch is None or not watch.due(now, saving) or watch.agree(now, state):
            return
        if leaving:
            raise Stop(
                Exit.PREEMPTED,
                f"{leaving}: step {now} was not saved, for copies of the state differ; the same command goes on from "
                "the last checkpoint",
            )
        to = self.newest((0, now, "clean"))
        if to is None:
            raise Stop(
                Exit.SILENT_CORRUPTION,
                f"after step {now} devices hold different copies of the state, as said above, and there is no clean "
                "checkpoint to go back to; begin anew, without the devices that were named",
            )
        self.of.note("rewind", now, to=to, batch=self.of.batch_of(to), why="replicas", skip_batches=[], clean=None)
        raise Rewound


def with_cut(state: TrainState, cut: LrCut) -> TrainState:
    """The state whose next steps learn at a part of their rate."""
    changed = {"lr_factor": cut.factor, "cut_until": cut.until}
    fields = {name: on_device(getattr(state.guard, name), value) for name, value in changed.items()}
    return state._replace(guard=state.guard._replace(**fields))


def on_device(like: jax.Array, value: float) -> jax.Array:
    """A scalar where `like` is, of its type; no process asks another for it."""
    host = np.asarray(value, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: host)


def finite(value: float) -> float | None:
    """The number, or None, since JSON has no NaN."""
    return value if math.isfinite(value) else None
