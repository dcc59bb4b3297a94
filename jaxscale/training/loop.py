"""The loop around the step: feed, step, report one step late, answer trouble, validate, save, leave well."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.hosts.agree import gathered, next_key
from jaxscale.monitor.events import Note
from jaxscale.monitor.host_load import HostLoad
from jaxscale.monitor.throughput import Throughput
from jaxscale.monitor.writers import Writer
from jaxscale.system.exits import Exit, Stop
from jaxscale.system.faults import crash_point
from jaxscale.training.autopilot import Autopilot, Pilot, Rewound
from jaxscale.training.ema import evaluated
from jaxscale.training.feed import Feed
from jaxscale.training.report import Reporter, Unread, seconds_since
from jaxscale.training.services import UNATTENDED, Services
from jaxscale.training.state import TrainState
from jaxscale.training.statistics import StatisticsStep, Watch
from jaxscale.training.step import TrainStep
from jaxscale.training.stopping import Board, StopRequest


class NamedEvaluate(NamedTuple):
    """What is measured under a name of its own."""

    evaluate: Callable[[Any], dict[str, float]]  # params -> metrics, 'evals/NAME/...'
    every_steps: int  # 0: only at the end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that a run needs, made by run.py."""

    state: TrainState
    start_step: int
    total_steps: int
    tokens_per_step: int
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
    program: Any = None  # for the next opening of the same run
    stop_after: int | None = None  # leave after this step, with the horizon as it is
    services: Services = UNATTENDED
    source_names: Sequence[str] = ()  # of the mixture, as the step numbers them
    board: Board | None = None  # of several processes
    evaluators: Sequence[NamedEvaluate] = ()


@contextlib.contextmanager
def saves_finished(checkpoints: Checkpoints, note: Note) -> Iterator[None]:
    """Finishes the save that is under way, whatever ends the block: its failure is the outcome of a good end alone."""
    try:
        yield
    except BaseException:
        try:
            checkpoints.close()
        except Stop as failure:
            if failure.code != Exit.STORAGE:
                raise
            note("alarm", None, cause=str(failure))
        raise
    checkpoints.close()


def train(run: Run) -> TrainState | Rewound:
    """The state after the last step; or Rewound where the run is to be opened again, at an older step.

    Raises Stop: PREEMPTED after a signal, NON_FINITE after too many bad steps, and what saving and data raise.
    """
    with saves_finished(run.checkpoints, run.services.note):
        return run_steps(run)


def run_steps(run: Run) -> TrainState | Rewound:
    """As train(), which then waits for the save that is under way."""
    state, unread, checkpoints, phase = run.state, None, run.checkpoints, run.services.watchdog.phase
    reporter = Reporter(run.writer, run.throughput, run.tokens_per_step, run.source_names, Counter(), HostLoad())
    watch = Watch(run.statistics, run.statistics_every_steps, run.throughput, phase)
    pilot = Autopilot(run.pilot, checkpoints)
    last_step = min(run.total_steps, run.stop_after or run.total_steps)

    def read(unread: Unread) -> None:
        """Fetches and reports a step's metrics: where the host waits for the devices."""
        # the first step also waits for whichever process compiles the longest
        with phase("compile" if unread.step == run.start_step + 1 else "step", unread.step):
            pilot.read(unread.step, reporter.report(unread), unread.fed.batch)

    if run.evaluate and run.start_step == 0:
        validate(run, reporter, 0, state)
    if run.start_step == 0:
        measure(run, reporter, 0, state, [one for one in run.evaluators if one.every_steps])
    feed = run.open_feed(run.start_step, last_step)
    run.throughput.start()
    try:
        with StopRequest(run.board) as stop:
            for step in range(run.start_step, last_step):
                began = time.monotonic()
                with phase("data", step + 1):
                    fed = next(feed)
                waited = seconds_since(began)
                state = pilot.steer(step, state)
                seen = watch.begin(step + 1, state, fed.batch)
                with phase("compile" if step == run.start_step else "step", step + 1):
                    state, metrics = run.train_step(state, fed.batch)
                if step == run.start_step:
                    checkpoints.prepare(state)  # makes ready what saving needs, while the first step runs
                if unread:
                    read(unread)  # of the step before: the device is never idle while the host reads
                unread, now = Unread(step + 1, metrics, fed, waited, watch.end(step + 1, seen)), step + 1
                with phase("step", now):
                    checkpoints.poll(now)
                    run.services.poll()
                    leaving = stop.leave_after(now)  # asked once: a signal after this is obeyed at a later step
                last = now == last_step or leaving is not None
                validating = run.evaluate and leaving is None and (last or due(now, run.eval_every_steps))
                measured = [one for one in run.evaluators if leaving is None and (last or due(now, one.every_steps))]
                saving = last or due(now, run.save_every_steps) or checkpoints.retry_due
                sampling = run.sample and leaving is None and due(now, run.sample_every_steps) and now < run.total_steps
                if validating or measured or saving or sampling or pilot.action:
                    unread = read(unread)
                with phase("eval", now):
                    if pilot.action:
                        state = pilot.act(now, state)  # before it is saved
                    state = pilot.repeat(now, state)
                    pilot.check_replicas(now, state, saving, leaving)
                validated = validate(run, reporter, now, state) if validating else {}
                validated |= measure(run, reporter, now, state, measured)
                if sampling:
                    write_sample(run, now, state)
                if saving:
                    save(run, now, state, pilot.health(now), validated, last)
                crash_point("step")
                if leaving and now < last_step:
                    raise Stop(Exit.PREEMPTED, f"{leaving}: saved step {now}; the same command goes on from there")
        if leaving := asked_anywhere(stop.requested):  # since the last step was told to stay
            raise Stop(
                Exit.PREEMPTED, f"{leaving}: saved step {last_step}, the last of this start; nothing else is done"
            )
        with phase("eval"):
            run.finish(state)
    except Rewound as outcome:
        if leaving := asked_anywhere(stop.requested):  # it would be forgotten with the signal's handler
            raise Stop(Exit.PREEMPTED, f"{leaving}: going back to an older step; the same command does that") from None
        return outcome
    finally:
        feed.close()
        run.writer.close()
    return state


def asked_anywhere(requested: str | None) -> str | None:
    """The first process's signal of those that have one, or None: the same in all, which call it together."""
    return next(filter(None, gathered(next_key("leaving"), requested)), None)


def due(step: int, every: int) -> bool:
    """True every so many steps; never for 0."""
    return every > 0 and step % every == 0


def validate(run: Run, reporter: Reporter, step: int, state: TrainState) -> dict[str, float]:
    """Held-out losses, measured and written. Raises Stop if the loss is not finite."""
    began = time.monotonic()
    with run.services.watchdog.phase("eval", step):
        metrics = evaluated(run.evaluate, state)
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
            metrics |= evaluated(one.evaluate, state, "evals")
    reporter.evaluation(step, metrics, seconds_since(began))
    return metrics


def write_sample(run: Run, step: int, state: TrainState) -> None:
    """What the model writes after `step` steps; the time does not count as training."""
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
