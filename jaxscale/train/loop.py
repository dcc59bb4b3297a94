"""The loop around the step: feed, step, report one step late, validate, save, leave well."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.data.batch import hash_text
from jaxscale.exits import Exit, Stop
from jaxscale.monitor.memory import memory_metrics
from jaxscale.monitor.throughput import Throughput
from jaxscale.monitor.writers import Writer
from jaxscale.train.feed import Fed, Feed
from jaxscale.train.state import TrainState
from jaxscale.train.step import TrainStep
from jaxscale.train.stopping import Board, StopRequest


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
    max_skipped_in_row: int
    finish: Callable[[TrainState], None]  # after the last step
    source_names: Sequence[str] = ()  # of the mixture, as the step numbers them
    board: Board | None = None  # of several processes


def train(run: Run) -> TrainState:
    """The state after the last step. Raises Stop: PREEMPTED after a signal, NON_FINITE after too many skips."""
    state, waiting = run.state, None
    sums: Counter[str] = Counter()  # over the steps since this start; those before it are not in them
    if run.evaluate and run.start_step == 0:
        validate(run, 0, state)
    feed = run.open_feed(run.start_step, run.total_steps)
    run.throughput.start()
    try:
        with StopRequest(run.board) as stop:
            for step in range(run.start_step, run.total_steps):
                began = time.monotonic()
                fed = next(feed)
                waited = time.monotonic() - began
                state, metrics = run.train_step(state, fed.batch)
                if step == run.start_step:
                    run.checkpoints.prepare()  # imports what saving needs while the first step runs
                if waiting:
                    report(run, sums, *waiting)  # of the step before: the device is never idle while the host reads
                waiting = (step + 1, metrics, fed, waited)
                run.checkpoints.poll()
                now = step + 1
                leaving = stop.leave_after(now)  # asked once: a signal after this is obeyed at a later step
                last = now == run.total_steps or leaving is not None
                if run.evaluate and (last or due(now, run.eval_every_steps)):
                    waiting = report(run, sums, *waiting)
                    if leaving is None:
                        validate(run, now, state)
                if last or due(now, run.save_every_steps):
                    waiting = report(run, sums, *waiting) if waiting else None
                    save(run, now, state)
                if leaving and now < run.total_steps:
                    run.checkpoints.wait()
                    raise Stop(Exit.PREEMPTED, f"{leaving}: saved step {now}; the same command goes on from there")
            run.checkpoints.wait()  # still guarded: a signal now must not cost the last save
        run.finish(state)
    finally:
        feed.close()
        run.writer.close()
        run.checkpoints.close()  # a save that is under way is finished, whatever ended the loop
    return state


def due(step: int, every: int) -> bool:
    """True every so many steps; never for 0."""
    return every > 0 and step % every == 0


def report(run: Run, sums: Counter[str], step: int, metrics: dict[str, jax.Array], fed: Fed, waited: float) -> None:
    """Fetches the metrics of a step that is done or nearly so, adds to the sums, and writes all when they are due."""
    fetched = jax.device_get(metrics)
    seen = hash_text(fetched.pop("tokens_seen"))
    sources = source_losses(run.source_names, fetched)
    values = {name: value.item() for name, value in fetched.items()}
    sums["gated_rows"] += values.get("gated_rows", 0)
    run.throughput.add(run.tokens_per_step, waited)
    run.writer.tick(step)
    if values["skipped_in_row"] > run.max_skipped_in_row:
        raise Stop(
            Exit.NON_FINITE,
            f"{values['skipped_in_row']} steps in a row had a non-finite or absurd gradient, up to step {step} "
            f"(loss {values['loss']:.4g}, gradient norm {values['grad_norm']:.4g}); lower optim.peak_lr, lengthen "
            "optim.warmup_tokens, or look at the data of these steps",
        )
    if not run.writer.due(step):
        return
    record = {
        "loss": values.pop("loss"),
        **run.throughput.report(),
        "learning_rate": values.pop("lr"),
        "grad_norm": values.pop("grad_norm"),
        "tokens_seen": step * run.tokens_per_step,
        "batch_index": fed.batch_index,
        "tokens_hash": seen,  # of the global batch, as the devices had it
        "skipped": int(values.pop("skipped")),
        "skipped_total": values.pop("skipped_total"),
        **memory_metrics([device.memory_stats() for device in jax.local_devices()]),
    }
    values.pop("skipped_in_row")
    if "gated_rows" in values:
        record["gated_rows"] = values.pop("gated_rows")
        record["gated_rows_total"] = sums["gated_rows"]
    run.writer.write(step, record | {f"train/{name}": value for name, value in (values | sources).items()})


def source_losses(names: Sequence[str], fetched: dict[str, Any]) -> dict[str, float]:
    """{'NAME/loss': nats per token} of each source that the step had tokens of; taken out of `fetched`."""
    if "source_nats" not in fetched:
        return {}
    sums = zip(names, fetched.pop("source_nats").tolist(), fetched.pop("source_tokens").tolist())
    return {f"{name}/loss": nats / tokens for name, nats, tokens in sums if tokens}


def validate(run: Run, step: int, state: TrainState) -> None:
    """Measures held-out loss and writes it; the time does not count as training. Raises Stop if it is not finite."""
    began = time.monotonic()
    metrics = run.evaluate(state.params)
    seconds = time.monotonic() - began
    run.writer.write(step, metrics | {"validation_seconds": seconds})
    run.throughput.exclude(seconds)
    if not math.isfinite(metrics.get("validation/loss", 0.0)):
        raise Stop(
            Exit.NON_FINITE,
            f"the validation loss at step {step} is {metrics['validation/loss']}: a model that computes this cannot be "
            "saved; lower optim.peak_lr, or set model.embed_compute_dtype=float32",
        )


def save(run: Run, step: int, state: TrainState) -> None:
    """Starts an asynchronous save of the state after `step` steps."""
    began = time.monotonic()
    run.checkpoints.save(step, state, run.position(step))
    run.throughput.exclude(time.monotonic() - began)
