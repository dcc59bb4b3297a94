"""The training loop: runs steps, reports metrics one step late, recovers from spikes, validates, saves and stops."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxscale.core.batch import Batch
from jaxscale.core.state import TrainState, ema_params
from jaxscale.core.statistics import StatisticsStep
from jaxscale.core.step import TrainStep
from jaxscale.runtime.checkpoint.local_copy import LocalSaver
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.hosts.agree import gathered, next_key
from jaxscale.runtime.monitor.events import Note
from jaxscale.runtime.monitor.goodput import Throughput
from jaxscale.runtime.monitor.machine import HostLoad
from jaxscale.runtime.monitor.writers import Writer
from jaxscale.runtime.training.autopilot import Autopilot, AutopilotSpec, Rescheduled, Rewound
from jaxscale.runtime.training.decisions import EarlyDecay
from jaxscale.runtime.training.expert_load import ExpertLoad
from jaxscale.runtime.training.feed import Feed
from jaxscale.runtime.training.limits import LimitMonitor, TimeLimit
from jaxscale.runtime.training.loop_services import NO_SERVICES, Services
from jaxscale.runtime.training.statistics_runner import StatisticsRunner
from jaxscale.runtime.training.stopping import StopRequest
from jaxscale.runtime.training.train_metrics import DispatchedStep, Reporter, seconds_since
from jaxscale.system.exits import Exit, Stop
from jaxscale.system.faults import crash_point

ABANDONED_SAVE_SECONDS = 5.0  # timeout for a save whose storage is already lost


class LoopEvaluator(NamedTuple):
    """A named evaluator and its interval."""

    evaluate: Callable[[Any], dict[str, float]]  # params -> metrics, 'evals/NAME/...'
    every_steps: int  # 0: only at the end


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """Inputs of the training loop, made by runtime/run/assembly.py."""

    state: TrainState
    start_step: int
    total_steps: int
    tokens_after: Callable[[int], int]  # step -> tokens in all batches up to this step
    train_step: TrainStep  # compiled
    open_feed: Callable[[int, int], Feed]  # steps [start, stop)
    evaluate: Callable[[Any], dict[str, float]] | None  # params -> metrics
    eval_every_steps: int
    checkpoints: Checkpoints
    save_every_steps: int
    position: Callable[[int], dict[str, Any]]  # step -> run record and data position of a checkpoint
    writer: Writer
    throughput: Throughput
    pilot: AutopilotSpec
    finish: Callable[[TrainState], None]  # called after the last step
    sample: Callable[[TrainState], str] | None = None  # state -> text; all processes call it together
    sample_every_steps: int = 0
    sample_prompt: str = ""
    statistics: StatisticsStep | None = None  # compiled at its first use
    statistics_every_steps: int = 0
    stop_after: int | None = None  # stop after this step, without changing the schedule
    services: Services = NO_SERVICES
    source_names: Sequence[str] = ()  # sources of the mixture, in the order of the step's arrays
    evaluators: Sequence[LoopEvaluator] = ()
    local: LocalSaver | None = None  # checkpoints on local disks
    experts: ExpertLoad | None = None  # expert loads since this process started, for an MoE model
    limits: TimeLimit | None = None


@contextlib.contextmanager
def finish_saves(checkpoints: Checkpoints, note: Note) -> Iterator[None]:
    """Waits for the save in progress when the block ends. Raises an error of the save only if the block succeeded."""
    try:
        yield
    except BaseException as error:
        # lost storage or a lost lock: the save cannot finish
        in_vain = isinstance(error, Stop) and error.code in (Exit.STORAGE, Exit.LOCK_HELD)
        try:
            checkpoints.close(most_seconds=ABANDONED_SAVE_SECONDS if in_vain else None)
        except Stop as failure:
            if failure.code != Exit.STORAGE:
                raise
            note("alarm", None, cause=str(failure))
        raise
    checkpoints.close()


def train(run: LoopSpec) -> TrainState | Rewound:
    """Trains and returns the state after the last step, or Rewound if the run must be reopened from a checkpoint.

    Raises Stop(PREEMPTED) after a signal and Stop(NON_FINITE) after too many bad steps.
    """
    last_step = min(run.total_steps, run.stop_after or run.total_steps)
    reporter = Reporter(
        run.writer, run.throughput, run.tokens_after, run.source_names, Counter(), HostLoad(), run.experts
    )
    with finish_saves(run.checkpoints, run.services.note), contextlib.closing(run.writer):
        if run.start_step == 0:
            validate(run, reporter, 0, run.state)
            run_evaluators(run, reporter, 0, run.state, [ev for ev in run.evaluators if ev.every_steps])
        feed = run.open_feed(run.start_step, last_step)
        run.throughput.start()
        try:
            with StopRequest(run.services.board) as stop:
                state = step_through(run, reporter, feed, stop, last_step)
            if signal := first_stop_request(stop.requested):  # since the last step's stop_after()
                raise Stop(Exit.PREEMPTED, f"{signal}: saved step {last_step}, the last step to run")
            with run.services.watchdog.phase("eval"):
                run.finish(state)
        except Rewound as outcome:
            if signal := first_stop_request(stop.requested):  # would be lost with the signal handler
                what = "starting the decay" if isinstance(outcome, Rescheduled) else "rewinding to an older step"
                raise Stop(Exit.PREEMPTED, f"{signal}: stopped before {what}; run the same command again") from None
            return outcome
        finally:
            feed.close()
        return state


def step_through(run: LoopSpec, reporter: Reporter, feed: Feed, stop: StopRequest, last_step: int) -> TrainState:
    """Runs the steps from run.start_step to last_step, with evaluations and saves when they are due."""
    state, pending, phase = run.state, None, run.services.watchdog.phase
    statistics = StatisticsRunner(run.statistics, run.statistics_every_steps, run.throughput.exclude, phase)
    pilot, monitor = Autopilot(run.pilot, run.checkpoints), None if run.limits is None else LimitMonitor(run.limits)
    compiled_shapes = set()  # batch shapes

    def read(pending: DispatchedStep) -> None:
        """Fetches and reports the metrics of a step. Blocks until the devices have computed them."""
        # the first step with a batch shape also waits for the slowest compilation of all processes
        with phase("compile" if pending.compiles else "step", pending.step):
            pilot.observe(pending.step, reporter.report(pending), pending.batch)
        if run.local is not None:
            run.local.confirm(pending.step, pilot.action is None)

    for step in range(run.start_step, last_step):
        now = step + 1
        with phase("data", now):
            batch, n, data_seconds = next_batch(feed)
        state = pilot.set_order(step, state)
        step_statistics = statistics.dispatch(now, state, batch)
        compiles = batch.tokens.shape not in compiled_shapes
        compiled_shapes.add(batch.tokens.shape)
        with phase("compile" if compiles else "step", now):
            state, metrics = run.train_step(state, batch)
        if step == run.start_step:
            run.checkpoints.prepare(state)  # overlaps with the first step
        if pending:
            read(pending)  # one step late, so that the device is never idle while the host reads
        pending = DispatchedStep(now, metrics, batch, n, data_seconds, compiles, statistics.fetch(now, step_statistics))
        signal, decay = poll_services(run, stop, monitor, now)
        due = due_after(run, now, last_step, signal)
        decay = None if due.last else decay  # the next start decides again
        due = due._replace(save=due.save or decay is not None)
        if due.reads_state or pilot.action:
            pending = read(pending)
        with phase("eval", now):
            state = pilot.act(now, state)  # before it is saved
            state = pilot.replay_decisions(now, state)
            pilot.check_replicas(now, state, due.save, signal)
        eval_metrics = run_due_evaluations(run, reporter, now, state, due)
        if decay and monitor:
            run.services.note("early_decay", now, until=decay.until, why=monitor.limit.name)
        if due.save:
            save(run, now, state, pilot.health(now), eval_metrics, due.last or decay is not None)
        elif run.local is not None and pilot.action is None:
            run.local.offer(now, state, run.position, pilot.health(now))
        crash_point("step")
        if signal and now < last_step:
            raise Stop(Exit.PREEMPTED, f"{signal}: saved step {now}; the same command continues from there")
        if decay and monitor:
            run.writer.say(monitor.limit.line(decay))
            raise Rescheduled
    return state


def next_batch(feed: Feed) -> tuple[Batch, int, float]:
    """Returns (next batch, its index, seconds waited)."""
    began = time.monotonic()
    batch, n = next(feed)
    return batch, n, seconds_since(began)


def poll_services(
    run: LoopSpec, stop: StopRequest, monitor: LimitMonitor | None, step: int
) -> tuple[str | None, EarlyDecay | None]:
    """Polls saves, the lock and the board after a step.

    Returns (signal to stop for, decay to begin), with None for neither. All processes get the same result.
    """
    with run.services.watchdog.phase("step", step):
        if run.services.board:
            run.services.board.refresh()  # one refresh for all readers of this step
        run.checkpoints.poll(step)
        run.services.poll()
        signal = stop.stop_after(step)  # asked once: a later signal takes effect at a later step
        return signal, None if monitor is None else monitor.decay_after(step)


class DueWork(NamedTuple):
    """Work that is due between two steps."""

    last: bool  # True if this process takes no further step
    validate: bool
    evaluators: list[LoopEvaluator]
    sample: bool
    save: bool

    @property
    def reads_state(self) -> bool:
        """True if any of this work reads the state, which requires that the metrics of the step are read first."""
        return bool(self.validate or self.evaluators or self.sample or self.save)


def due_after(run: LoopSpec, step: int, last_step: int, signal: str | None) -> DueWork:
    """Returns the work due after `step` steps. If a signal requests a stop, only a save is due."""
    last, evaluates = step == last_step or signal is not None, signal is None
    return DueWork(
        last=last,
        validate=evaluates and run.evaluate is not None and (last or is_due(step, run.eval_every_steps)),
        evaluators=[ev for ev in run.evaluators if evaluates and (last or is_due(step, ev.every_steps))],
        sample=evaluates and run.sample is not None and step < run.total_steps and is_due(step, run.sample_every_steps),
        save=last or is_due(step, run.save_every_steps) or run.checkpoints.retry_due,
    )


def first_stop_request(requested: str | None, gather: Callable[..., Any] = gathered) -> str | None:
    """Returns a signal that some process has received, the same in all processes, or None. Collective."""
    return gather(next_key("leaving"), requested, made_of=lambda names: next(filter(None, names), None))


def is_due(step: int, every: int) -> bool:
    """Returns True every `every` steps, and never if `every` is 0."""
    return every > 0 and step % every == 0


def run_due_evaluations(
    run: LoopSpec, reporter: Reporter, step: int, state: TrainState, due: DueWork
) -> dict[str, float]:
    """Runs validation, evaluators and sampling that are due; returns the metrics."""
    metrics = validate(run, reporter, step, state) if due.validate else {}
    metrics |= run_evaluators(run, reporter, step, state, due.evaluators)
    if due.sample:
        write_sample(run, step, state)
    return metrics


def validate(run: LoopSpec, reporter: Reporter, step: int, state: TrainState) -> dict[str, float]:
    """Computes and writes the validation metrics, if any. Raises Stop if the loss is not finite."""
    if run.evaluate is None:
        return {}
    began = time.monotonic()
    with run.services.watchdog.phase("eval", step):
        metrics = evaluate_with_ema(run.evaluate, state)
    reporter.validation(step, metrics, seconds_since(began))
    return metrics


def run_evaluators(
    run: LoopSpec, reporter: Reporter, step: int, state: TrainState, evaluators: Sequence[LoopEvaluator]
) -> dict[str, float]:
    """Computes and writes the metrics of these evaluators. Throughput excludes their time."""
    if not evaluators:
        return {}
    began, metrics = time.monotonic(), {}
    for evaluator in evaluators:
        with run.services.watchdog.phase("eval", step):
            metrics |= evaluate_with_ema(evaluator.evaluate, state, "evals")
    reporter.evaluation(step, metrics, seconds_since(began))
    return metrics


def write_sample(run: LoopSpec, step: int, state: TrainState) -> None:
    """Writes a text sample after `step` steps; excludes the time from throughput."""
    assert run.sample is not None, "a sample is due only if there is a sampler"
    began = time.monotonic()
    with run.services.watchdog.phase("eval", step):
        run.writer.sample(step, run.sample_prompt, run.sample(state))
    run.throughput.exclude(seconds_since(began))


def save(run: LoopSpec, step: int, state: TrainState, health: str, metrics: dict[str, float], last: bool) -> None:
    """Starts a background save of the state after `step` steps. If `last` is True, waits until it is complete."""
    began = time.monotonic()
    run.writer.upload_soon()  # so that a run resumed from this checkpoint has its metrics
    with run.services.watchdog.phase("save", step):
        run.checkpoints.save(step, state, run.position(step), health=health, metrics=metrics, wait=last)
    run.throughput.exclude(seconds_since(began))


def evaluate_with_ema(
    evaluate: Callable[[Any], dict[str, float]], state: TrainState, group: str = "validation"
) -> dict[str, float]:
    """Returns the metrics of the parameters and, if enabled, of their EMA, named 'validation_ema/...'."""
    metrics = evaluate(state.params)
    if state.ema is None:
        return metrics
    ema_metrics = evaluate(ema_params(state))
    return metrics | {name.replace(group, f"{group}_ema", 1): v for name, v in ema_metrics.items()}
