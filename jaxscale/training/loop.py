"""The training loop: feed, step, report one step late, recover from spikes, validate, save, stop cleanly."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxscale.checkpoint.local_saver import LocalSaver
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.hosts.agree import gathered, next_key
from jaxscale.monitor.events import Note
from jaxscale.monitor.machine import HostLoad
from jaxscale.monitor.throughput import Throughput
from jaxscale.monitor.writers import Writer
from jaxscale.system.exits import Exit, Stop
from jaxscale.system.faults import crash_point
from jaxscale.training.autopilot import Autopilot, Pilot, Rescheduled, Rewound
from jaxscale.training.ema import evaluate_with_ema
from jaxscale.training.expert_use import ExpertUse
from jaxscale.training.feed import Feed
from jaxscale.training.limits import Limiter, Limits
from jaxscale.training.report import Reporter, Unread, seconds_since
from jaxscale.training.services import UNATTENDED, Services
from jaxscale.training.state import TrainState
from jaxscale.training.statistics import StatisticsRunner, StatisticsStep
from jaxscale.training.step import TrainStep
from jaxscale.training.stopping import StopRequest

LAST_SECONDS = 5.0  # for a save under way, where its storage has been given up already


class NamedEvaluate(NamedTuple):
    """A named evaluator."""

    evaluate: Callable[[Any], dict[str, float]]  # params -> metrics, 'evals/NAME/...'
    every_steps: int  # 0: only at the end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that a run needs, made by run/assembly.py."""

    state: TrainState
    start_step: int
    total_steps: int
    tokens_after: Callable[[int], int]  # step -> tokens of the batches of the steps up to it
    train_step: TrainStep  # compiled
    open_feed: Callable[[int, int], Feed]  # steps [start, stop)
    evaluate: Callable[[Any], dict[str, float]] | None  # params -> metrics
    eval_every_steps: int
    checkpoints: Checkpoints
    save_every_steps: int
    position: Callable[[int], dict[str, Any]]  # step -> what a checkpoint holds beside the state
    writer: Writer
    throughput: Throughput
    pilot: Pilot
    finish: Callable[[TrainState], None]  # after the last step
    sample: Callable[[TrainState], str] | None = None  # state -> text; all processes call it together
    sample_every_steps: int = 0
    sample_prompt: str = ""
    statistics: StatisticsStep | None = None  # compiled when it is first due
    statistics_every_steps: int = 0
    stop_after: int | None = None  # leave after this step, with the horizon as it is
    services: Services = UNATTENDED
    source_names: Sequence[str] = ()  # of the mixture, as the step numbers them
    evaluators: Sequence[NamedEvaluate] = ()
    local: LocalSaver | None = None  # copies on the hosts themselves
    experts: ExpertUse | None = None  # of a mixture, since this start
    limits: Limits | None = None  # of time and money


@contextlib.contextmanager
def saves_finished(checkpoints: Checkpoints, note: Note) -> Iterator[None]:
    """Finishes the save that is under way, whatever ends the block: its failure is the outcome of a good end alone."""
    try:
        yield
    except BaseException as error:
        # A folder that has not answered for lock.outage_seconds, or is another run's, takes no save.
        in_vain = isinstance(error, Stop) and error.code in (Exit.STORAGE, Exit.LOCK_HELD)
        try:
            checkpoints.close(most_seconds=LAST_SECONDS if in_vain else None)
        except Stop as failure:
            if failure.code != Exit.STORAGE:
                raise
            note("alarm", None, cause=str(failure))
        raise
    checkpoints.close()


def train(run: Run) -> TrainState | Rewound:
    """The state after the last step; or Rewound, if the run goes on from a checkpoint, with another schedule or not.

    Raises Stop: PREEMPTED after a signal, NON_FINITE after too many bad steps, and what saving and data raise.
    """
    with saves_finished(run.checkpoints, run.services.note):
        return run_steps(run)


def run_steps(run: Run) -> TrainState | Rewound:
    """As train(), which then waits for the save that is under way."""
    last_step = min(run.total_steps, run.stop_after or run.total_steps)
    reporter = Reporter(
        run.writer, run.throughput, run.tokens_after, run.source_names, Counter(), HostLoad(), run.experts
    )
    if run.start_step == 0:
        validate(run, reporter, 0, run.state)
        measure(run, reporter, 0, run.state, [one for one in run.evaluators if one.every_steps])
    feed = run.open_feed(run.start_step, last_step)
    run.throughput.start()
    try:
        with StopRequest(run.services.board) as stop:
            state = step_through(run, reporter, feed, stop, last_step)
        if leaving := asked_anywhere(stop.requested):  # since the last step was told to stay
            raise Stop(
                Exit.PREEMPTED, f"{leaving}: saved step {last_step}, the last of this start; nothing else is done"
            )
        with run.services.watchdog.phase("eval"):
            run.finish(state)
    except Rewound as outcome:
        if leaving := asked_anywhere(stop.requested):  # it would be forgotten with the signal's handler
            what = "its decay begins" if isinstance(outcome, Rescheduled) else "going back to an older step"
            raise Stop(Exit.PREEMPTED, f"{leaving}: {what}; the same command does that") from None
        return outcome
    finally:
        feed.close()
        run.writer.close()
    return state


def step_through(run: Run, reporter: Reporter, feed: Feed, stop: StopRequest, last_step: int) -> TrainState:
    """The state after the steps from run.start_step to last_step, with all that is due between them done."""
    state, unread, checkpoints, phase = run.state, None, run.checkpoints, run.services.watchdog.phase
    statistics = StatisticsRunner(run.statistics, run.statistics_every_steps, run.throughput.exclude, phase)
    pilot, limiter = Autopilot(run.pilot, checkpoints), None if run.limits is None else Limiter(run.limits)
    met = set()  # shapes of batches

    def read(unread: Unread) -> None:
        """Fetches and reports a step's metrics: where the host waits for the devices."""
        # the first step of a size also waits for whichever process compiles the longest
        with phase("compile" if unread.compiles else "step", unread.step):
            pilot.read(unread.step, reporter.report(unread), unread.batch)
        if run.local is not None:
            run.local.confirm(unread.step, pilot.action is None)

    for step in range(run.start_step, last_step):
        began, now = time.monotonic(), step + 1
        with phase("data", now):
            batch, n = next(feed)
        waited = seconds_since(began)
        state = pilot.steer(step, state)
        pending = statistics.dispatch(now, state, batch)
        compiles = batch.tokens.shape not in met
        met.add(batch.tokens.shape)
        with phase("compile" if compiles else "step", now):
            state, metrics = run.train_step(state, batch)
        if step == run.start_step:
            checkpoints.prepare(state)  # makes ready what saving needs, while the first step runs
        if unread:
            read(unread)  # of the step before: the device is never idle while the host reads
        unread = Unread(now, metrics, batch, n, waited, compiles, statistics.fetch(now, pending))
        with phase("step", now):
            if run.services.board:
                run.services.board.refresh()  # once for all that is asked of it
            checkpoints.poll(now)
            run.services.poll()
            leaving = stop.leave_after(now)  # asked once: a signal after this is obeyed at a later step
            decay = None if limiter is None else limiter.after(now)
        due = due_after(run, now, last_step, leaving)
        decay = None if due.last else decay  # who leaves decides again
        due = due._replace(save=due.save or decay is not None)
        if due.anything or pilot.action:
            unread = read(unread)
        with phase("eval", now):
            state = pilot.act(now, state)  # before it is saved
            state = pilot.repeat(now, state)
            pilot.check_replicas(now, state, due.save, leaving)
        found = validate(run, reporter, now, state) if due.validate else {}
        found |= measure(run, reporter, now, state, due.evaluators)
        if due.sample:
            write_sample(run, now, state)
        if decay and limiter:
            run.services.note("early_decay", now, until=decay.until, why=limiter.of.name)
        if due.save:
            save(run, now, state, pilot.health(now), found, due.last or decay is not None)
        elif run.local is not None and pilot.action is None:
            run.local.offer(now, state, run.position, pilot.health(now))
        crash_point("step")
        if leaving and now < last_step:
            raise Stop(Exit.PREEMPTED, f"{leaving}: saved step {now}; the same command goes on from there")
        if decay and limiter:
            run.writer.say(limiter.of.line(decay))
            raise Rescheduled
    return state


class Due(NamedTuple):
    """What is due between two steps."""

    last: bool  # no step of this start comes next
    validate: bool
    evaluators: list[NamedEvaluate]
    sample: bool
    save: bool

    @property
    def anything(self) -> bool:
        """Whether anything reads the state: the metrics of its step are read first."""
        return bool(self.validate or self.evaluators or self.sample or self.save)


def due_after(run: Run, step: int, last_step: int, leaving: str | None) -> Due:
    """What is due after `step` steps; nothing is measured where a signal asks to leave."""
    last, stays = step == last_step or leaving is not None, leaving is None
    return Due(
        last=last,
        validate=stays and run.evaluate is not None and (last or is_due(step, run.eval_every_steps)),
        evaluators=[one for one in run.evaluators if stays and (last or is_due(step, one.every_steps))],
        sample=stays and run.sample is not None and step < run.total_steps and is_due(step, run.sample_every_steps),
        save=last or is_due(step, run.save_every_steps) or run.checkpoints.retry_due,
    )


def asked_anywhere(requested: str | None, gather: Callable[..., Any] = gathered) -> str | None:
    """The first process's signal of those that have one, or None: the same in all, which call it together."""
    return gather(next_key("leaving"), requested, made_of=lambda names: next(filter(None, names), None))


def is_due(step: int, every: int) -> bool:
    """True every `every` steps; never for 0."""
    return every > 0 and step % every == 0


def validate(run: Run, reporter: Reporter, step: int, state: TrainState) -> dict[str, float]:
    """Measures and writes the held-out losses, of a run that has any. Raises Stop if the loss is not finite."""
    if run.evaluate is None:
        return {}
    began = time.monotonic()
    with run.services.watchdog.phase("eval", step):
        metrics = evaluate_with_ema(run.evaluate, state)
    reporter.validation(step, metrics, seconds_since(began))
    return metrics


def measure(
    run: Run, reporter: Reporter, step: int, state: TrainState, evaluators: Sequence[NamedEvaluate]
) -> dict[str, float]:
    """What these evaluators find, measured and written; the time does not count as training."""
    if not evaluators:
        return {}
    began, metrics = time.monotonic(), {}
    for one in evaluators:
        with run.services.watchdog.phase("eval", step):
            metrics |= evaluate_with_ema(one.evaluate, state, "evals")
    reporter.evaluation(step, metrics, seconds_since(began))
    return metrics


def write_sample(run: Run, step: int, state: TrainState) -> None:
    """Samples text after `step` steps; the time does not count as training."""
    assert run.sample is not None, "due_after() asks for samples only of a run that has them"
    began = time.monotonic()
    with run.services.watchdog.phase("eval", step):
        run.writer.sample(step, run.sample_prompt, run.sample(state))
    run.throughput.exclude(seconds_since(began))


def save(run: Run, step: int, state: TrainState, health: str, metrics: dict[str, float], last: bool) -> None:
    """Starts a save of the state after `step` steps in the background; waits for the last, which nobody tries again."""
    began = time.monotonic()
    run.writer.upload_soon()  # a run that goes on from this checkpoint has its metrics up to here
    with run.services.watchdog.phase("save", step):
        run.checkpoints.save(step, state, run.position(step), health=health, metrics=metrics, wait=last)
    run.throughput.exclude(seconds_since(began))
