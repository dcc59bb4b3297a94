"""Speed of the training step, alone, inside the loop, and compared with other programs.

  jaxscale bench step                 the compiled step on random tokens: each step waited for, the median
  jaxscale bench loop --config=FILE   the loop (data, step, metrics, a checkpoint every 100 steps) against the bare step
  jaxscale bench collectives          bandwidth along each mesh axis against the chip's published one, and slow hosts
  jaxscale bench data                 preparing and reading data on one core: each stage, a recipe, shards, batches

collectives runs on many hosts as training does, and takes its mesh from --config=FILE or from --config.mesh.AXIS=N.
More benchmarks, of parts of jaxscale, are in the folder benchmarks/ of a checkout.

The exit code does not depend on speed.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxscale import schema, units
from jaxscale.cli import bench_against, bench_data, bench_loop, run_verb
from jaxscale.command_line import Arguments, flag
from jaxscale.config import RunConfig
from jaxscale.config_file import config_values
from jaxscale.corpus.prepare.config import PrepareConfig
from jaxscale.help_text import command
from jaxscale.hosts import cluster
from jaxscale.planning.check import device_bytes
from jaxscale.planning.measured import from_record, keep_measured
from jaxscale.qualify.collectives import collective_lines, measure_collectives, read_mesh, read_sizes
from jaxscale.qualify.step import ModelFlags, measure_step, read_config, step_lines
from jaxscale.system.exits import BadInput, put


@dataclasses.dataclass(frozen=True)
class BenchFlags(ModelFlags, cluster.HostFlags):
    """The flags of `jaxscale bench`."""

    steps: int | None = flag(None, "timed steps (loop: 100)", "6", least=1)
    warmup: int = flag(2, "step: untimed steps after the first", least=0)
    devices: int | None = flag(None, "simulated CPU devices", "8", least=1)
    json: bool = flag(False, "one line of JSON")
    save: bool = flag(
        False,
        "step: keeps the result in the user's cache folder, for `jaxscale plan --topology=here`; without --spec and "
        "--config S and T are measured",
    )
    megabytes: list[int] | None = flag(
        None,
        "collectives: sizes of the whole array in MiB (on CPU 1,4,16)",
        "1,16,256",
        read=lambda _, text: read_sizes(text),
    )
    repeats: int = flag(10, "collectives: calls, of which the median counts", least=1)
    against: tuple[str, ...] = flag(
        (),
        "step: runs our step and the command in turn, as processes, and prints the ratio. The command prints a line of "
        'JSON with "tok_s" and, if it likes, sys, spec, dtype, loss0, lossN, rss_mb, first_step_s, gflops, params. '
        "NAME=VALUE may stand in front. For several commands give the flag again, or put ';;' between them. "
        "data: it gets a file of JSON lines with "
        'texts, and prints one with the "seconds" of CPU time that it took and the "stages" of a recipe that it did; '
        "docs/datatrove_rates.py is such a program",
        "'COMMAND'",
    )
    rounds: int | None = flag(None, "step: turns of each with --against; data: turns of all", "3", least=1)
    input: str | None = flag(
        None, "data: text to measure with; else a recipe's sources, else this Python's standard library", "GLOB"
    )
    recipe: str | None = flag(None, "data: a recipe of jaxscale prepare, for stages and tokenizer", "FILE")
    seq_len: int = flag(2048, "data: tokens of a row that is read", least=2)
    batch_rows: int = flag(64, "data: rows of a batch", least=2)


ALL = ("config", "settings", "json", "save", "against")  # the last two are refused where they say nothing
SHARED = (*ALL, "spec", "dtype", "steps", "devices")
SUBVERBS = {
    "step": (*SHARED, "warmup", "rounds"),
    "loop": SHARED,
    "data": (*ALL, "input", "recipe", "seq_len", "batch_rows", "rounds"),
    "collectives": (*ALL, "devices", "megabytes", "repeats", *cluster.FLAGS),
}
SCRIPTS = {
    "survive": "survive", "statistics": "layer_statistics", "stages": "pipeline_stages", "experts": "experts",
    "time_to_loss": "time_to_loss", "sample": "sampling", "hosts": "hosts",
}  # fmt: skip
MOVED = {subverb: f"python -m benchmarks.{script}" for subverb, script in SCRIPTS.items()}


@command(BenchFlags, subverbs=SUBVERBS, alone="step", moved=MOVED)
def main(arguments: Arguments) -> None:
    """Measures what is named, the step if nothing is."""
    flags, what = arguments.flags, arguments.subverb
    for name, verbs, does in (
        ("save", ("step",), "keeps what `jaxscale bench step` measured"),
        ("against", ("step", "data"), "compares steps or stages of a recipe"),
    ):
        if what not in verbs and getattr(flags, name):
            raise BadInput(f"--{name} {does}: it is for jaxscale bench {units.or_list(list(verbs))}")
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
    """Prints the record, or the lines for people."""
    put(json.dumps(record) if flags.json else "\n".join(lines))


def measure(what: str, name: str, cfg: RunConfig, flags: BenchFlags) -> tuple[dict[str, Any], list[str]]:
    """(the record of what is measured of a config, the record as text)."""
    if what == "loop":
        record = bench_loop.measure_loop(cfg, steps=flags.steps or 100)
        return record, bench_loop.loop_lines(name, record)
    record = measure_step(name, cfg, steps=flags.steps or 6, warmup=flags.warmup)
    return record, step_lines(record)


def save_steps(arguments: Arguments) -> None:
    """`jaxscale bench step --save`: measures the config or spec, or S and T, and keeps the results."""
    flags = arguments.flags
    for spec in [flags.spec] if arguments.config or flags.spec else ("S", "T"):
        one = dataclasses.replace(arguments, flags=dataclasses.replace(flags, spec=spec))
        record, lines = measure("step", *read_config(one), flags)
        show(flags, record, lines)
        devices = jax.devices()
        memory_bytes = device_bytes(devices) or 0
        file = keep_measured(
            from_record(record, platform=devices[0].platform, num_devices=len(devices), memory_bytes=memory_bytes)
        )
        if not flags.json:
            put(f"  kept in {file}")


def collectives(arguments: Arguments) -> None:
    """`jaxscale bench collectives`."""
    cfg, flags = read_mesh(arguments), arguments.flags
    facts = schema.flatten(
        {"mesh": schema.to_dict(cfg), "megabytes": arguments.options.get("megabytes"), "repeats": flags.repeats}
    )
    with cluster.joined(cluster.discover_process(arguments.options), facts, arguments.options) as say:
        record = measure_collectives(cfg, sizes=flags.megabytes, repeats=flags.repeats)
        say(json.dumps(record) if flags.json else "\n".join(collective_lines(record)))


def data(arguments: Arguments) -> dict[str, Any]:
    """The record of `jaxscale bench data`."""
    flags, cfg = arguments.flags, None
    if arguments.config:
        raise BadInput(f"--config={arguments.config} is of a run; jaxscale bench data takes a recipe, --recipe=FILE")
    if arguments.overrides and not (flags.input or flags.recipe):
        raise BadInput(f"--config.{next(iter(arguments.overrides))} sets a recipe's; give --recipe=FILE or --input too")
    if flags.input or flags.recipe:
        values: dict[str, Any] = config_values(flags.recipe) if flags.recipe else {"stages": bench_data.CURATION}
        if flags.input:
            values["sources"] = {"text": {"files": flags.input}}
        cfg = schema.from_dict(PrepareConfig, schema.merge(values, arguments.overrides))
    how = dict(seq_len=flags.seq_len, batch_rows=flags.batch_rows, rounds=flags.rounds or 3)
    return bench_data.measure_data(cfg, commands=commands_of(flags), **how)


def against(arguments: Arguments) -> None:
    """`jaxscale bench step --against=...`."""
    read_config(arguments)  # what is wrong with our own side is said before anything runs
    flags = arguments.flags
    if flags.save:
        raise BadInput("--save keeps what our step was measured at, and --against compares it; give one of them")
    commands = commands_of(flags)
    say = (lambda text: None) if flags.json else put
    compared = bench_against.compare(own_flags(arguments.words), commands, rounds=flags.rounds or 3, say=say)
    found = compared | {"ratios": bench_against.ratios(compared)} if flags.json else compared
    show(flags, found, [] if flags.json else bench_against.compare_lines(compared))


def commands_of(flags: BenchFlags) -> list[str]:
    """The commands of --against."""
    return [command.strip() for given in flags.against for command in given.split(";;")]


def own_flags(argv: Sequence[str]) -> list[str]:
    """Our side of a comparison: the command that times our step with the same flags and prints one line of JSON."""
    own, left = [sys.executable, "-m", "jaxscale.cli.bench", "step", "--json"], list(argv)
    while left:
        word = left.pop(0)
        if word == "--against":
            left.pop(0)
        elif word.partition("=")[0] not in ("--against", "--json"):
            own.append(word)
    return own


if __name__ == "__main__":
    run_verb("bench")
