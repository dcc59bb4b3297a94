"""The whole training loop beside the bare step, in one process: what `jaxscale bench loop` measures."""

import contextlib
import dataclasses
import io
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cli.shrink import without_extras
from jaxscale.config import RunConfig
from jaxscale.monitor.writers import Writer
from jaxscale.planning.check import check_machine
from jaxscale.run.assembly import OpenedRun
from jaxscale.run.opening import open_run
from jaxscale.system.exits import BadInput
from jaxscale.training import loop
from jaxscale.training.autopilot import Rewound
from jaxscale.training.feed import Feed, NumberedBatch
from jaxscale.training.state import TrainState

SAVE_EVERY = 100
WANTED = 0.95
QUIET = 0.03  # bare halves further apart than this hide what is looked for


class Stopwatch:
    """Seconds by name."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Adds the time spent inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def around(self, name: str, f: Callable) -> Callable:
        """f, with its time added."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.time(name):
                return f(*args, **kwargs)

        return timed


class TimedFeed:
    """A feed whose waits are timed."""

    def __init__(self, feed: Feed, watch: Stopwatch):
        self.feed, self.watch, self.close = feed, watch, feed.close

    def __next__(self) -> NumberedBatch:
        with self.watch.time("data"):
            return next(self.feed)


@dataclasses.dataclass(frozen=True)
class LoopTimes:
    """One segment of the loop."""

    seconds: float
    cpu_seconds: float  # processor time of the whole process, threads in the background included
    saves: int
    parts: dict[str, float]  # seconds of the loop's own thread in: data, save, metrics


def measure_loop(cfg: RunConfig, *, steps: int) -> dict[str, Any]:
    """Times steps / 2 bare steps, `steps` steps of train.loop, and steps / 2 bare steps; what --json prints.

    The loop feeds, reports and saves as in training, every 100 steps (every `steps` if that is less), each save in the
    midst of the segment so that its background part is inside too. Validation, evaluators and samples are left out.
    What happens once a process (compilation, the import of Orbax and its first save) is done before and told apart. The
    bare steps run on one batch that stays on the device, none waited for but the last.
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
    """What is timed."""

    cfg: RunConfig
    run: OpenedRun
    batch: Any  # the first, on the devices
    folder: pathlib.Path  # a temporary one


@contextlib.contextmanager
def open_bench(cfg: RunConfig, *, save_every_steps: int) -> Iterator[Bench]:
    """An open run whose loop saves every `save_every_steps` steps, and neither samples, exports nor measures."""
    # after many steps on one batch any other one looks like a spike
    guard = dataclasses.replace(cfg.train.guard, spike_ratio=0.0)
    checkpoint = dataclasses.replace(cfg.checkpoint, save_every_steps=save_every_steps)
    train = dataclasses.replace(cfg.train, guard=guard)
    cfg = dataclasses.replace(without_extras(cfg), train=train, checkpoint=checkpoint, evals={})
    cfg = dataclasses.replace(cfg, batch_ramp=(), seq_len_ramp=())
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


def loop_pair(
    bench: Bench, ways: Mapping[str, loop.LoopSpec], turn: int, state: TrainState, steps: int
) -> tuple[TrainState, dict[str, float]]:
    """(state, {way: seconds of the loop}), one way after the other: who comes first may find a colder machine."""
    seconds = {}
    for way in list(ways) if turn % 2 else reversed(list(ways)):
        state, times = run_loop(bench, ways[way], f"{way}-{turn}", state, start=0, steps=steps)
        seconds[way] = times.seconds
    return state, seconds


def run_bare(run: loop.LoopSpec, state: TrainState, batch: Any, steps: int) -> tuple[TrainState, float, float]:
    """(state after `steps` steps on one batch, seconds, processor seconds)."""
    jax.block_until_ready(state)
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        state, _ = run.train_step(state, batch)
    jax.block_until_ready(state)
    return state, time.perf_counter() - began, time.process_time() - cpu_began


def run_loop(
    bench: Bench, run: loop.LoopSpec, name: str, state: TrainState, *, start: int, steps: int
) -> tuple[TrainState, LoopTimes]:
    """(state, times) of train.loop over steps [start, start + steps), into a folder of its own.

    The clock stops where the loop turns to save the last step, when that step is done: the save that ends every run
    comes once, not every 100 steps.
    """
    cfg, folder = bench.cfg, bench.folder / name
    folder.mkdir()
    watch, stop = Stopwatch(), start + steps
    writer = Writer(folder, cfg.monitor, stop, start, stream=io.StringIO())
    checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint)
    ended: dict[str, Any] = {}
    saves = []

    def position(step: int) -> dict[str, Any]:
        if step == stop:
            ended.update(at=time.perf_counter(), cpu=time.process_time(), parts=dict(watch.seconds))
        else:
            saves.append(step)
        return run.position(step)

    writer.write = watch.around("metrics", writer.write)
    checkpoints.save = watch.around("save", checkpoints.save)
    began, cpu_began = time.perf_counter(), time.process_time()
    outcome = loop.train(
        dataclasses.replace(
            run,
            state=state,
            start_step=start,
            total_steps=stop,
            open_feed=lambda first, last: TimedFeed(run.open_feed(first, last), watch),
            evaluate=None,
            checkpoints=checkpoints,
            save_every_steps=cfg.checkpoint.save_every_steps,
            position=position,
            writer=writer,
            finish=lambda state: None,
        )
    )
    if isinstance(outcome, Rewound):
        raise BadInput("a step was skipped and the loop goes back, so nothing was measured; lower optim.peak_lr")
    parts = ended["parts"] if saves else watch.seconds  # a segment without a save of its own reports the last one
    checkpoints.close()
    return outcome, LoopTimes(ended["at"] - began, ended["cpu"] - cpu_began, len(saves), parts)


def loop_lines(name: str, record: dict[str, Any]) -> list[str]:
    """The record for people."""
    before, after = record["bare_tok_s_before_after"]
    known = record["data_s"] + record["save_s"] + record["metrics_s"]
    lost = record["loop_s"] - record["bare_s"]
    verdict = "keeps at least 95%" if record["ratio"] >= WANTED else "keeps less than 95%"
    apart = abs(before - after) / record["bare_tok_s"]
    noisy = f"; {apart:.0%} apart, so this machine is too busy for the ratio to mean much" if apart > QUIET else ""
    return [
        f"{name}: {record['steps']} steps of the loop (data, step, metrics, a checkpoint every "
        f"{record['save_every_steps']} steps: {record['saves']}), between two halves of as many bare steps",
        f"  bare step {record['bare_tok_s']:,.0f} tokens/s (before {before:,.0f}, after {after:,.0f}{noisy})",
        f"  loop      {record['loop_tok_s']:,.0f} tokens/s, {record['ratio']:.1%}: the loop {verdict} of the bare step",
        f"  the bare steps took {record['bare_s']:.2f} s, the loop {lost:+.2f} s; its thread waited "
        f"{record['data_s']:.3f} s for data, {record['save_s']:.3f} s for saves and "
        f"{record['metrics_s']:.3f} s for metrics",
        f"  the other {lost - known:+.2f} s: feeding and saving in the background share the processor with the step, "
        "as other programs do",
        f"  processor time of a step: bare {record['bare_cpu_s']:.4g} s, in the loop {record['loop_cpu_s']:.4g} s",
        f"  before that, once a process: the first save, {record['first_save_s']:.2f} s, Orbax's import included",
    ]
