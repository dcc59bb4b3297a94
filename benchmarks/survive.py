"""Cost of fault tolerance: guard, watchdog, lock, fingerprints and saves, compared with the bare step.

  python -m benchmarks.survive --config=configs/quickstart.py

Times each part alone, and the loop with and without watchdog and lock alternately, in one process.
"""

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import run_main, show, use_devices
from jaxscale.cli.bench_loop import Bench, open_bench, run_bare, run_loop
from jaxscale.config import RunConfig
from jaxscale.core import guard
from jaxscale.core.config import GuardConfig
from jaxscale.core.state import TrainState
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.fingerprint import fingerprints
from jaxscale.runtime.checkpoint.lock import RunLock
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.hosts.watchdog import Watchdog
from jaxscale.runtime.training import loop
from jaxscale.runtime.training.loop_services import NO_SERVICES, Services
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.tools.qualify.step import SpecFlags, read_config
from jaxscale.tools.qualify.timing import median_seconds

WANTED = 0.01  # maximum cost of all parts together, as a fraction of a step
WANTED_BLOCKED = 0.1  # seconds
SAVED_BYTES = 500_000_000
LEAVES = 25  # number of arrays in the saved state; a small model has this many large arrays
PHASES = ("data", "step", "step", "step")  # watchdog phases of a step of the loop
CALLS = 2000


def measure_survive(cfg: RunConfig, *, steps: int, rounds: int) -> dict[str, Any]:
    """Returns seconds of a bare step, of each part, of the loop with and without the parts, and of a save."""
    with open_bench(cfg, save_every_steps=0) as bench:
        run, folder = bench.run, bench.folder
        state, _, _ = run_bare(run, run.state, bench.batch, 2)  # compiled
        take = lambda: fingerprints(jax.tree.leaves(state))
        take()
        parts = {
            "guard": timed_guard(bench.cfg.train.guard, rounds),
            "fingerprints of a save": median_seconds(take, rounds),
        }
        turns: dict[str, list[float]] = {"bare": [], "without": [], "with": []}
        with RunLock(folder / "locked", log=lambda text: None) as lock, Watchdog(folder / "locked", cfg.hang) as dog:
            parts["watchdog"] = median_seconds(lambda: pass_phases(dog), CALLS)
            parts["lock"] = median_seconds(lock.poll, CALLS)
            watched = Services(watchdog=dog, may_commit=lock.check, poll=lock.poll)
            services = {"without": NO_SERVICES, "with": watched}
            ways = {kind: dataclasses.replace(run, services=found) for kind, found in services.items()}
            for turn in range(rounds):
                state, bare, _ = run_bare(run, state, bench.batch, steps)
                state, looped = time_alternately(bench, ways, turn, state, steps)
                for kind, seconds in (looped | {"bare": bare}).items():
                    turns[kind].append(seconds / steps)
        blocked, whole = save_times(folder / "saves", rounds)
    found = {kind: statistics.median(seconds) for kind, seconds in turns.items()}
    ratios = sorted(with_all / without - 1 for with_all, without in zip(turns["with"], turns["without"]))
    parts["fingerprints of a save"] /= cfg.checkpoint.save_every_steps or 1
    return {
        "config": cfg.model.name,
        "steps": steps,
        "rounds": rounds,
        "save_every_steps": cfg.checkpoint.save_every_steps,
        "step_seconds": found["bare"],
        "parts_seconds": parts,
        "parts_of_a_step": sum(parts.values()) / found["bare"],
        "loop_seconds": {kind: found[kind] for kind in ("without", "with")},
        "loop_overheads": ratios,
        "saved_bytes": SAVED_BYTES,
        "save_blocked_seconds": blocked,
        "save_seconds": whole,
    }


def timed_guard(cfg: GuardConfig, rounds: int) -> float:
    """Returns the seconds of the guard's check as a separate program. In a step, XLA fuses the check with the rest."""
    calls = 100
    check = jax.jit(functools.partial(guard.check, cfg))
    state, one = guard.init_guard(cfg.window_steps), jnp.float32(1)

    def run() -> None:
        guard_state = state
        for _ in range(calls):
            _, _, guard_state = check(guard_state, one, one)
        jax.block_until_ready(guard_state)

    run()
    return median_seconds(run, rounds) / calls


def pass_phases(dog: Watchdog) -> None:
    """Enters the watchdog phases of one step of the loop."""
    for name in PHASES:
        with dog.phase(name, 1):
            pass


def save_times(folder: pathlib.Path, rounds: int) -> tuple[float, float]:
    """Returns medians of (seconds for which a save of SAVED_BYTES blocks its caller, seconds until it is on disk)."""
    state = {f"w{i}": jnp.full(SAVED_BYTES // 4 // LEAVES, float(i), jnp.float32) for i in range(LEAVES)}
    checkpoints = Checkpoints(folder, CheckpointConfig(keep_last=1))
    checkpoints.prepare(state)
    blocked, whole = [], []
    for step in range(rounds + 1):  # the first save imports and compiles, and does not count
        jax.block_until_ready(state)
        began = time.perf_counter()
        blocked.append(checkpoints.save(step, state, {}))
        checkpoints.wait()
        whole.append(time.perf_counter() - began)
    checkpoints.close()
    return statistics.median(blocked[1:]), statistics.median(whole[1:])


def survive_lines(record: dict[str, Any]) -> list[str]:
    """Returns the record as lines of text."""
    step, loop = record["step_seconds"], record["loop_seconds"]
    part = lambda seconds: f"{seconds * 1e6:,.1f} us, {seconds / step:.3%} of a step"
    notes = {"fingerprints of a save": f" (shared by {record['save_every_steps']} steps)"}
    verdict = "under" if record["parts_of_a_step"] < WANTED else "NOT under"
    blocked, ratios = record["save_blocked_seconds"], record["loop_overheads"]
    return [
        f"{record['config']}: a bare step takes {step * 1e3:,.1f} ms (medians of {record['rounds']})",
        *[f"  {name:<24}{part(seconds)}{notes.get(name, '')}" for name, seconds in record["parts_seconds"].items()],
        f"  together {record['parts_of_a_step']:.3%} of a step: {verdict} {WANTED:.0%}",
        f"  the loop without watchdog and lock {loop['without'] * 1e3:,.2f} ms per step, with them "
        f"{loop['with'] * 1e3:,.2f} ms: {statistics.median(ratios):+.2%}, the median of {len(ratios)} pairs "
        f"({ratios[0]:+.1%} to {ratios[-1]:+.1%})",
        f"  a save of {record['saved_bytes'] / 1e6:,.0f} MB blocks the training thread for {blocked * 1e3:,.1f} ms "
        f"({'under' if blocked < WANTED_BLOCKED else 'NOT under'} {WANTED_BLOCKED * 1e3:.0f}), and is written, synced "
        f"and read back after {record['save_seconds']:.2f} s",
    ]


@dataclasses.dataclass(frozen=True)
class SurviveFlags(SpecFlags):
    """Flags of this benchmark."""

    steps: int = flag(20, "timed steps", least=2)
    rounds: int = flag(5, "rounds", least=1)
    devices: int | None = flag(None, "simulated CPU devices", "8", least=1)
    json: bool = flag(False, "one line of JSON")


@command(SurviveFlags)
def main(arguments: Arguments) -> None:
    """Measures the cost of each part of fault tolerance."""
    flags = arguments.flags
    use_devices(flags.devices)
    record = measure_survive(read_config(arguments)[1], steps=flags.steps, rounds=flags.rounds)
    show(record, survive_lines(record), as_json=flags.json)


def time_alternately(
    bench: Bench, runs: Mapping[str, loop.LoopSpec], turn: int, state: TrainState, steps: int
) -> tuple[TrainState, dict[str, float]]:
    """Returns (state, {name: seconds of the loop}). The order alternates, since the first may run on a cooler CPU."""
    seconds = {}
    for name in list(runs) if turn % 2 else reversed(list(runs)):
        state, times = run_loop(bench, runs[name], f"{name}-{turn}", state, start=0, steps=steps)
        seconds[name] = times.seconds
    return state, seconds


if __name__ == "__main__":
    run_main(main)
