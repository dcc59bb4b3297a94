"""Implements `jaxscale bench loop`, which compares the whole training loop with the bare step in one process."""

import contextlib
import dataclasses
import io
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jaxscale.cli.shrink import without_extras
from jaxscale.config import RunConfig
from jaxscale.core.state import TrainState
from jaxscale.program.machine_check import check_machine
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.monitor.writers import Writer
from jaxscale.runtime.run.assembly import OpenedRun
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.training import loop
from jaxscale.runtime.training.autopilot import Rewound
from jaxscale.runtime.training.feed import Feed, NumberedBatch
from jaxscale.system.exits import BadInput

SAVE_EVERY = 100
MIN_RATIO = 0.95  # minimum speed of the loop relative to the bare step
MAX_DRIFT = 0.03  # relative difference of the two bare segments above which the ratio is unreliable


def timed(name: str, f: Callable, seconds: dict[str, float]) -> Callable:
    """Returns `f` wrapped so that its time is added to seconds[name]."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return f(*args, **kwargs)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    return wrapped


class TimedFeed:
    """Feed that measures its waiting time."""

    def __init__(self, feed: Feed, seconds: dict[str, float]):
        self.next, self.close = timed("data", feed.__next__, seconds), feed.close

    def __next__(self) -> NumberedBatch:
        return self.next()


class LoopTimes(NamedTuple):
    """Times of one segment of the loop."""

    seconds: float
    cpu_seconds: float  # CPU time of the process, including background threads
    saves: int
    parts: dict[str, float]  # seconds that the loop's thread spent in: data, save, metrics


def measure_loop(cfg: RunConfig, *, steps: int) -> dict[str, Any]:
    """Times steps / 2 bare steps, `steps` steps of train.loop, and steps / 2 bare steps. Returns the record of --json.

    The loop loads data, logs and saves as in training, without validation, evaluators and samples. It saves every 100
    steps (or every `steps` if fewer), in the middle of the timed steps, so that these include the background work of a
    save. One-time costs (compilation, the import of Orbax and the first save) are excluded. Bare steps reuse one batch
    on the device, and are synchronized only after the last step.
    """
    every, half = min(SAVE_EVERY, steps), -(-steps // 2)
    with open_bench(cfg, save_every_steps=every) as bench:
        run, batch = bench.run, bench.batch
        state, warm = run_loop(bench, run, "warm", run.state, start=0, steps=2)
        state, first, first_cpu = run_bare(run, state, batch, half)
        state, looped = run_loop(bench, run, "loop", state, start=every // 2, steps=steps)
        _, second, second_cpu = run_bare(run, state, batch, half)
    bare_step = (first + second) / (2 * half)
    return {
        "config": cfg.model.name,
        "steps": steps,
        "save_every_steps": every,
        "saves": looped.saves,
        "bare_tok_s": round(cfg.tokens_per_step / bare_step, 1),
        "bare_tok_s_before_after": [round(cfg.tokens_per_step * half / s, 1) for s in (first, second)],
        "loop_tok_s": round(cfg.tokens_per_step * steps / looped.seconds, 1),
        "ratio": round(bare_step * steps / looped.seconds, 4),
        "bare_cpu_s": round((first_cpu + second_cpu) / (2 * half), 4),
        "loop_cpu_s": round(looped.cpu_seconds / steps, 4),
        "loop_s": round(looped.seconds, 3),
        "bare_s": round(bare_step * steps, 3),
        **{f"{part}_s": round(looped.parts.get(part, 0.0), 4) for part in ("data", "save", "metrics")},
        "first_save_s": round(warm.parts.get("save", 0.0), 3),
    }


class Bench(NamedTuple):
    """An open run to measure."""

    cfg: RunConfig
    run: OpenedRun
    batch: Any  # first batch, on the devices
    folder: pathlib.Path  # temporary folder


@contextlib.contextmanager
def open_bench(cfg: RunConfig, *, save_every_steps: int) -> Iterator[Bench]:
    """Opens a run in a temporary folder, without samples, exports and evals. Saves every `save_every_steps` steps."""
    # after many steps on one batch, the loss of any other batch would be a spike
    train = dataclasses.replace(cfg.train, guard=dataclasses.replace(cfg.train.guard, spike_ratio=0.0))
    checkpoint = dataclasses.replace(cfg.checkpoint, save_every_steps=save_every_steps)
    fixed = dict(train=train, checkpoint=checkpoint, evals={}, batch_ramp=(), seq_len_ramp=())
    cfg = dataclasses.replace(without_extras(cfg), **fixed)
    check_machine(cfg)
    with tempfile.TemporaryDirectory(prefix="jaxscale-bench-") as name:
        folder = pathlib.Path(name)
        run = open_run(cfg, str(folder / "run"), log=lambda text: None)
        assert run is not None, "the folder is new, so its run is not complete"
        feed = run.open_feed(0, 1)
        batch = next(feed).batch
        feed.close()
        yield Bench(cfg, dataclasses.replace(run, statistics_every_steps=0), batch, folder)
        run.writer.close()


def run_bare(run: loop.LoopSpec, state: TrainState, batch: Any, steps: int) -> tuple[TrainState, float, float]:
    """Returns (state after `steps` steps on one batch, seconds, CPU seconds)."""
    jax.block_until_ready(state)
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        state, _ = run.train_step(state, batch)
    jax.block_until_ready(state)
    return state, time.perf_counter() - began, time.process_time() - cpu_began


def run_loop(
    bench: Bench, run: loop.LoopSpec, name: str, state: TrainState, *, start: int, steps: int
) -> tuple[TrainState, LoopTimes]:
    """Runs steps [start, start + steps) of train.loop in a new folder. Returns (state, times without the last save)."""
    cfg, folder = bench.cfg, bench.folder / name
    folder.mkdir()
    seconds: dict[str, float] = {}
    stop = start + steps
    writer = Writer(folder, cfg.monitor, stop, start, stream=io.StringIO())
    checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint)
    ended: dict[str, Any] = {}
    saves = []

    def position(step: int) -> dict[str, Any]:
        if step == stop:
            ended.update(at=time.perf_counter(), cpu=time.process_time(), parts=dict(seconds))
        else:
            saves.append(step)
        return run.position(step)

    writer.write = timed("metrics", writer.write, seconds)
    checkpoints.save = timed("save", checkpoints.save, seconds)
    began, cpu_began = time.perf_counter(), time.process_time()
    outcome = loop.train(
        dataclasses.replace(
            run,
            state=state,
            start_step=start,
            total_steps=stop,
            open_feed=lambda first, last: TimedFeed(run.open_feed(first, last), seconds),
            evaluate=None,
            checkpoints=checkpoints,
            save_every_steps=cfg.checkpoint.save_every_steps,
            position=position,
            writer=writer,
            finish=lambda state: None,
        )
    )
    if isinstance(outcome, Rewound):
        raise BadInput("nothing was measured: the loop rewound after a skipped step; reduce optim.peak_lr")
    parts = ended["parts"] if saves else seconds  # without a save in the segment, includes the final save
    checkpoints.close()
    return outcome, LoopTimes(ended["at"] - began, ended["cpu"] - cpu_began, len(saves), parts)


def loop_lines(name: str, record: dict[str, Any]) -> list[str]:
    """Returns the record as text."""
    before, after = record["bare_tok_s_before_after"]
    known = record["data_s"] + record["save_s"] + record["metrics_s"]
    lost = record["loop_s"] - record["bare_s"]
    verdict = "at least 95%" if record["ratio"] >= MIN_RATIO else "less than 95%"
    drift = abs(before - after) / record["bare_tok_s"]
    noisy = f"; they differ by {drift:.0%}, so the ratio is unreliable" if drift > MAX_DRIFT else ""
    return [
        f"{name}: {record['steps']} steps of the loop (data, step, metrics, a checkpoint every "
        f"{record['save_every_steps']} steps: {record['saves']}), between two segments of "
        f"{-(-record['steps'] // 2)} bare steps",
        f"  bare step {record['bare_tok_s']:,.0f} tokens/s (before {before:,.0f}, after {after:,.0f}{noisy})",
        f"  loop      {record['loop_tok_s']:,.0f} tokens/s, {record['ratio']:.1%}: {verdict} of the bare step",
        f"  the bare steps took {record['bare_s']:.2f} s, the loop {lost:+.2f} s; its thread waited "
        f"{record['data_s']:.3f} s for data, {record['save_s']:.3f} s for saves and "
        f"{record['metrics_s']:.3f} s for metrics",
        f"  the remaining {lost - known:+.2f} s: CPU shared with background feeding and saving, and other programs",
        f"  CPU time per step: bare {record['bare_cpu_s']:.4g} s, in the loop {record['loop_cpu_s']:.4g} s",
        f"  not included, once per process: first save and import of Orbax, {record['first_save_s']:.2f} s",
    ]
