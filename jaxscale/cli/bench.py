"""Measures the speed of the training step, alone, inside the loop, and compared with other programs.

  jaxscale bench step                 the compiled step on random tokens: median over blocking steps
  jaxscale bench loop --config=FILE   the loop (data, step, metrics, a checkpoint every 100 steps) and the bare step
  jaxscale bench collectives          bandwidth along each mesh axis, compared with the chip's datasheet; slow hosts
  jaxscale bench data                 preparing and reading data on one core: each stage, a recipe, shards, batches

collectives runs on several hosts like training, and takes its mesh from --config=FILE or --config.mesh.AXIS=N.
The folder benchmarks/ of the repository has more benchmarks of parts of jaxscale.

The exit code does not depend on speed.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxscale import schema
from jaxscale.cli import bench_against, bench_data, bench_loop
from jaxscale.config import RunConfig
from jaxscale.program.machine_check import device_bytes
from jaxscale.runtime.hosts import cluster
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.config_file import config_values
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput, put
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.planning.measured import from_record, save_measured
from jaxscale.tools.qualify.axis_bandwidth import collective_lines, measure_collectives, read_mesh, read_sizes
from jaxscale.tools.qualify.step import SpecFlags, measure_step, read_config, step_lines

SCRIPTS = {  # former subverbs, which are now in benchmarks/
    "survive": "survive", "statistics": "layer_statistics", "stages": "pipeline_stages", "experts": "experts",
    "time_to_loss": "time_to_loss", "sample": "sampling", "hosts": "hosts",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BenchFlags(SpecFlags, cluster.HostFlags):
    moved = {subverb: f"python -m benchmarks.{script}" for subverb, script in SCRIPTS.items()}

    steps: int | None = flag(None, "number of timed steps (loop: 100)", "6", least=1)
    warmup: int = flag(2, "step: number of untimed steps after the first step", least=0)
    devices: int | None = flag(None, "simulated CPU devices", "8", least=1)
    json: bool = flag(False, "prints one line of JSON")
    save: bool = flag(
        False,
        "step: saves the result in the user's cache folder for `jaxscale plan --topology=here`; measures S and T "
        "unless --spec or --config is given",
    )
    megabytes: list[int] | None = flag(
        None,
        "collectives: array sizes in MiB (default on CPU 1,4,16)",
        "1,16,256",
        read=lambda _, text: read_sizes(text),
    )
    repeats: int = flag(10, "collectives: timed calls per size; the median is reported", least=1)
    against: tuple[str, ...] = flag(
        (),
        "step: alternates jaxscale's step and the command, as processes, and prints the ratio. The command prints a "
        'JSON line with "tok_s" and optionally sys, spec, dtype, loss0, lossN, rss_mb, first_step_s, gflops, params. '
        "It may begin with NAME=VALUE. For several commands, repeat the flag or separate the commands with ';;'. "
        "data: the command receives a JSON Lines file of "
        'texts and prints a JSON line with the "seconds" of CPU time and the "stages" of the recipe that it ran; '
        "docs/datatrove_rates.py is an example",
        "'COMMAND'",
    )
    rounds: int | None = flag(None, "repetitions (step: with --against)", "3", least=1)
    input: str | None = flag(
        None, "data: text files to measure with; default: the recipe's sources, or Python's standard library", "GLOB"
    )
    recipe: str | None = flag(None, "data: a recipe of jaxscale prepare that sets stages and tokenizer", "FILE")
    seq_len: int = flag(2048, "data: tokens per packed row", least=2)
    batch_rows: int = flag(64, "data: packed rows per batch", least=2)


ALL = ("config", "settings", "json", "save", "against")  # main() rejects save and against for some subverbs
SHARED = (*ALL, "spec", "dtype", "steps", "devices")
SUBVERBS = {
    "step": (*SHARED, "warmup", "rounds"),
    "loop": SHARED,
    "data": (*ALL, "input", "recipe", "seq_len", "batch_rows", "rounds"),
    "collectives": (*ALL, "devices", "megabytes", "repeats", *cluster.FLAGS),
}


@command(BenchFlags, subverbs=SUBVERBS, alone="step")
def main(arguments: Arguments) -> None:
    """Runs the named benchmark, by default the step."""
    flags, what = arguments.flags, arguments.subverb
    if flags.save and what != "step":
        raise BadInput(f"--save applies only to `jaxscale bench step`; remove it from `jaxscale bench {what}`")
    if flags.against and what not in ("step", "data"):
        raise BadInput(
            f"--against applies only to `jaxscale bench step` and `data`; remove it from `jaxscale bench {what}`"
        )
    if flags.against and what == "step":
        against(arguments)
        return
    if flags.devices:
        jax.config.update("jax_num_cpu_devices", flags.devices)
    if what == "collectives":
        collectives(arguments)
    elif what == "data":
        record = data(arguments)
        show(flags, record, bench_data.data_lines(record))
    elif flags.save:
        save_steps(arguments)
    else:
        show(flags, *measure(what, *read_config(arguments), flags))


def show(flags: BenchFlags, record: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Prints the record as JSON or as text."""
    put(json.dumps(record) if flags.json else "\n".join(lines))


def measure(what: str, name: str, cfg: RunConfig, flags: BenchFlags) -> tuple[dict[str, Any], list[str]]:
    """Returns (record of a benchmark of a config, record as text)."""
    if what == "loop":
        record = bench_loop.measure_loop(cfg, steps=flags.steps or 100)
        return record, bench_loop.loop_lines(name, record)
    record = measure_step(name, cfg, steps=flags.steps or 6, warmup=flags.warmup)
    return record, step_lines(record)


def save_steps(arguments: Arguments) -> None:
    """Implements `jaxscale bench step --save`: measures the config or spec (default: S, then T) and saves results."""
    flags = arguments.flags
    for spec in [flags.spec] if arguments.config or flags.spec else ("S", "T"):
        one = dataclasses.replace(arguments, flags=dataclasses.replace(flags, spec=spec))
        record, lines = measure("step", *read_config(one), flags)
        show(flags, record, lines)
        devices = jax.devices()
        memory_bytes, platform = device_bytes(devices) or 0, devices[0].platform
        measured = from_record(record, platform=platform, num_devices=len(devices), memory_bytes=memory_bytes)
        file = save_measured(measured)
        if not flags.json:
            put(f"  saved in {file}")


def collectives(arguments: Arguments) -> None:
    """Implements `jaxscale bench collectives`."""
    cfg, flags = read_mesh(arguments), arguments.flags
    facts = schema.flatten(
        {"mesh": schema.to_dict(cfg), "megabytes": arguments.options.get("megabytes"), "repeats": flags.repeats}
    )
    with cluster.joined(cluster.discover_process(arguments.options), facts, arguments.options) as say:
        record = measure_collectives(cfg, sizes=flags.megabytes, repeats=flags.repeats)
        say(json.dumps(record) if flags.json else "\n".join(collective_lines(record)))


def data(arguments: Arguments) -> dict[str, Any]:
    """Returns the record of `jaxscale bench data`."""
    flags, cfg = arguments.flags, None
    if arguments.config:
        raise BadInput(f"`jaxscale bench data` does not use --config={arguments.config}; set a recipe: --recipe=FILE")
    if arguments.overrides and not (flags.input or flags.recipe):
        name = next(iter(arguments.overrides))
        raise BadInput(f"--config.{name} is a setting of a recipe; also set --recipe=FILE or --input=GLOB")
    if flags.input or flags.recipe:
        values: dict[str, Any] = config_values(flags.recipe) if flags.recipe else {"stages": bench_data.CURATION}
        if flags.input:
            values["sources"] = {"text": {"files": flags.input}}
        cfg = schema.from_dict(PrepareConfig, schema.merge(values, arguments.overrides))
    how = dict(seq_len=flags.seq_len, batch_rows=flags.batch_rows, rounds=flags.rounds or 3)
    return bench_data.measure_data(cfg, commands=commands_of(flags), **how)


def against(arguments: Arguments) -> None:
    """Implements `jaxscale bench step --against=...`."""
    read_config(arguments)  # raises for an invalid config before running anything
    flags = arguments.flags
    if flags.save:
        raise BadInput("--save and --against cannot be combined; use one of them")
    say = (lambda text: None) if flags.json else put
    ours = jaxscale_step_command(arguments.words)
    compared = bench_against.compare(ours, commands_of(flags), rounds=flags.rounds or 3, say=say)
    lines = [] if flags.json else bench_against.compare_lines(compared)
    show(flags, compared | {"ratios": bench_against.ratios(compared)}, lines)


def commands_of(flags: BenchFlags) -> list[str]:
    """Returns the commands of --against."""
    return [command.strip() for given in flags.against for command in given.split(";;")]


def jaxscale_step_command(argv: Sequence[str]) -> list[str]:
    """Returns the command that times jaxscale's step with the same flags and prints a JSON line."""
    step_command, remaining = [sys.executable, "-m", "jaxscale.cli", "bench", "step", "--json"], list(argv)
    while remaining:
        word = remaining.pop(0)
        if word == "--against":
            remaining.pop(0)
        elif word.partition("=")[0] not in ("--against", "--json"):
            step_command.append(word)
    return step_command
