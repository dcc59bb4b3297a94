"""Cost of per-layer statistics (monitor.statistics_every_steps), compared with the step and the loop without them.

  python -m benchmarks.layer_statistics --config=configs/quickstart.py

Times the statistics program and the step alternately, then the loop with one statistics step and without statistics.
"""

import dataclasses
import statistics
from typing import Any

import jax

from benchmarks import run_main, show, use_devices
from benchmarks.survive import SurviveFlags, time_alternately
from jaxscale.cli.bench_loop import open_bench
from jaxscale.config import RunConfig
from jaxscale.runtime.training.statistics_runner import flatten_statistics
from jaxscale.settings.command_line import Arguments
from jaxscale.settings.help_text import command
from jaxscale.tools.qualify.step import read_config
from jaxscale.tools.qualify.timing import seconds_of

WANTED = 0.02  # maximum cost as a fraction of the time of all steps
DEFAULT_EVERY = 100  # interval for a config that never computes statistics


def measure_statistics(name: str, cfg: RunConfig, *, steps: int, rounds: int) -> dict[str, Any]:
    """Returns the record of --json: seconds of the step and the statistics program, timed alternately, and of the loop
    over `steps` steps, with one computation of statistics and without.

    Compilation happens before and is reported separately.
    """
    every = cfg.monitor.statistics_every_steps or DEFAULT_EVERY
    with open_bench(cfg, save_every_steps=0) as bench:
        run, batch, program = bench.run, bench.batch, bench.run.parts.program
        compiled, compile_seconds = {}, {}
        for what, function in (("step", program.train_step), ("statistics", program.statistics)):
            lowered = function.lower(program.abstract_state, program.abstract_batch)
            compile_seconds[what], compiled[what] = seconds_of(lowered.compile)
        waited = lambda what, state: seconds_of(lambda: jax.block_until_ready(compiled[what](state, batch)))
        _, (state, _) = waited("step", run.state)
        seen = flatten_statistics(jax.device_get(compiled["statistics"](state, batch)))
        alone: dict[str, list[float]] = {"step": [], "statistics": []}
        for _ in range(rounds):
            seconds, (state, _) = waited("step", state)
            alone["step"].append(seconds)
            alone["statistics"].append(waited("statistics", state)[0])
        run = dataclasses.replace(run, train_step=compiled["step"], statistics=compiled["statistics"])
        ways = {"without": run, "with": dataclasses.replace(run, statistics_every_steps=steps)}
        looped: dict[str, list[float]] = {"without": [], "with": []}
        for turn in range(rounds + 1):  # the first turn warms up imports and caches, and does not count
            state, found = time_alternately(bench, ways, turn, state, steps)
            for kind, seconds in found.items():
                looped[kind] += [seconds] if turn else []
    step, look = (statistics.median(alone[what]) for what in ("step", "statistics"))
    ratios = sorted(of_look / of_step for of_look, of_step in zip(alone["statistics"], alone["step"]))
    added = sorted(seconds - plain for seconds, plain in zip(looped["with"], looped["without"]))
    return {
        "spec": name,
        "attention": program.plan.attention.name,
        "numbers": len(seen),
        "every_steps": every,
        "steps": steps,
        "rounds": rounds,
        "step_seconds": step,
        "statistics_seconds": look,
        "statistics_in_steps": ratios,
        "cost": statistics.median(ratios) / every,
        "loop_seconds": {kind: statistics.median(seconds) / steps for kind, seconds in looped.items()},
        "loop_added_seconds": added,
        "loop_cost": statistics.median(added) / (every * statistics.median(looped["without"]) / steps),
        "compile_seconds": compile_seconds,
        "device_bytes": {what: peak_bytes(function) for what, function in compiled.items()},
        "devices": f"{program.mesh.size} x {jax.devices()[0].device_kind}",
    }


def peak_bytes(compiled: Any) -> int | None:
    """Returns the bytes per device that the program needs according to the compiler, or None if unknown."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    own = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + own + memory.temp_size_in_bytes


def statistics_lines(record: dict[str, Any]) -> list[str]:
    """Returns the record as lines of text."""
    ratios, added, every = record["statistics_in_steps"], record["loop_added_seconds"], record["every_steps"]
    loop, compiled, memory = record["loop_seconds"], record["compile_seconds"], record["device_bytes"]
    verdict = "under" if record["cost"] < WANTED else "NOT under"
    mib = lambda num_bytes: "unknown" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"
    return [
        f"{record['spec']}: {record['numbers']} numbers, {record['attention']} attention; {record['devices']}",
        f"  a step takes {record['step_seconds'] * 1e3:,.1f} ms, its statistics "
        f"{record['statistics_seconds'] * 1e3:,.1f} ms: {statistics.median(ratios):.2f} steps, the median of "
        f"{record['rounds']} rounds ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        f"  every {every} steps that is {record['cost']:.2%} of the time: {verdict} {WANTED:.0%}",
        f"  the loop over {record['steps']} steps takes {loop['without'] * 1e3:,.1f} ms per step without "
        f"statistics, {loop['with'] * 1e3:,.1f} with one; added {statistics.median(added) * 1e3:+,.1f} ms, median of "
        f"{record['rounds']} pairs ({added[0] * 1e3:+,.1f} to {added[-1] * 1e3:+,.1f}): "
        f"{record['loop_cost']:+.2%} every {every} steps",
        f"  memory per device by the compiler: step {mib(memory['step'])}, statistics {mib(memory['statistics'])}",
        f"  compiled before in {compiled['step']:.1f} s and {compiled['statistics']:.1f} s",
    ]


@command(SurviveFlags)
def main(arguments: Arguments) -> None:
    """Measures the statistics program, and the training loop with and without statistics."""
    flags = arguments.flags
    use_devices(flags.devices)
    record = measure_statistics(*read_config(arguments), steps=flags.steps, rounds=flags.rounds)
    show(record, statistics_lines(record), as_json=flags.json)


if __name__ == "__main__":
    run_main(main)
