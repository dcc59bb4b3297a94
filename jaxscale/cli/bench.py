"""How fast the training step is, alone, beside other programs, and inside the loop.

  jaxscale bench step                 the compiled step on random tokens: each step waited for, the median
  jaxscale bench loop --config=FILE   the loop (data, step, metrics, a checkpoint every 100 steps) beside the bare step
  jaxscale bench survive              what guard, watchdog, lock, fingerprints and saves cost, beside the step
  jaxscale bench statistics           what looking at each layer costs (monitor.statistics_every_steps), beside the step
  jaxscale bench sample               tokens/s that are written with a cache of keys and values, beside full passes
  jaxscale bench collectives          bandwidth along each mesh axis, beside the chip table, and hosts that are slow
  jaxscale bench data                 preparing and reading data, on one core: each stage, a recipe, shards, batches

collectives runs on many hosts as training does, and takes its mesh from --config=FILE or from --config.mesh.AXIS=N.

The exit code does not depend on speed.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxscale import schema
from jaxscale.cli import (
    bench_against,
    bench_collectives,
    bench_data,
    bench_loop,
    bench_sample,
    bench_statistics,
    bench_step,
    bench_survive,
    run_verb,
)
from jaxscale.command_line import Arguments, config_values, flag, parse, whole_number
from jaxscale.corpus.prepare.config import PrepareConfig
from jaxscale.help_text import page_of, show_help
from jaxscale.hosts import cluster
from jaxscale.planning.check import device_bytes
from jaxscale.planning.measured import from_record, keep_measured
from jaxscale.system.exits import BadInput, put


@dataclasses.dataclass(frozen=True)
class BenchFlags(cluster.HostFlags):
    """The flags of `jaxscale bench`."""

    spec: str | None = flag(
        None,
        "S: 8 layers, d 512, vocabulary 8192, 8 x 512 tokens; T: 4 layers, d 256, vocabulary 256, 16 x 256 tokens; "
        "both Llama, untied, AdamW, clipped",
        "S",
    )
    config: str = flag("", "a run's config instead", "FILE")
    settings: dict[str, str] = flag(
        dict, "sets any setting of either, such as --config.train.num_microbatches=4", "VALUE", name="config.NAME"
    )
    dtype: str | None = flag(None, "compute dtype", "float32")
    steps: int | None = flag(None, "timed steps (loop: 100; survive, statistics: 20)", "6", least=1)
    warmup: int = flag(2, "step: untimed steps after the first", least=0)
    devices: int | None = flag(None, "simulated CPU devices", "8", least=1)
    json: bool = flag(False, "one line of JSON")
    save: bool = flag(
        False,
        "step: keeps the result in the user's cache folder, for `jaxscale plan --topology=here`; without --spec and "
        "--config both specs are measured",
    )
    megabytes: list[int] | None = flag(
        None,
        "collectives: sizes of the whole array in MiB (on CPU 1,4,16)",
        "1,16,256",
        read=lambda _, text: bench_collectives.read_sizes(text),
    )
    repeats: int = flag(10, "collectives: calls, of which the median counts", least=1)
    against: tuple[str, ...] = flag(
        (),
        "step: runs our step and the command in turn, as processes, and prints the ratio. The command prints a line of "
        'JSON with "tok_s" and, if it likes, sys, spec, dtype, loss0, lossN, rss_mb, first_step_s, gflops, params. '
        "NAME=VALUE may stand in front. For several commands give the flag again, or put ';;' between them",
        "'COMMAND'",
    )
    rounds: int | None = flag(
        None, "step: turns of each with --against; survive, statistics: of each (5)", "3", least=1
    )
    prompt_tokens: int = flag(256, "sample: tokens of each prompt", least=1)
    num_tokens: int = flag(64, "sample: tokens that are written behind it", least=1)
    rows: int = flag(1, "sample: prompts at a time", least=1)
    input: str | None = flag(
        None, "data: text to measure with; else a recipe's sources, else this Python's standard library", "GLOB"
    )
    recipe: str | None = flag(None, "data: a recipe of jaxscale prepare, for stages and tokenizer", "FILE")
    seq_len: int = flag(2048, "data: tokens of a row that is read", least=2)
    batch_rows: int = flag(64, "data: rows of a batch", least=2)


FLAGS, HELP = BenchFlags, page_of(__doc__, BenchFlags)

ALL = ("config", "settings", "json")
SHARED = (*ALL, "spec", "dtype", "steps", "devices")
SUBVERBS = {
    "step": (*SHARED, "warmup", "rounds", "save", "against"),
    "loop": SHARED,
    "survive": (*SHARED, "rounds"),
    "statistics": (*SHARED, "rounds"),
    "sample": (*ALL, "spec", "dtype", "devices", "prompt_tokens", "num_tokens", "rows"),
    "data": (*ALL, "input", "recipe", "seq_len", "batch_rows", "rounds"),
    "collectives": (*ALL, "devices", "megabytes", "repeats", *cluster.FLAGS),
}


def main(argv: list[str]) -> int:
    """Measures what argv names, the step if it names nothing, and returns the exit code."""
    what, *rest = argv if argv and not argv[0].startswith("-") else ["step", *argv]
    if what not in SUBVERBS:
        raise BadInput(f"jaxscale bench has nothing called {what!r}; it has {', '.join(SUBVERBS)}")
    for name, does in (("save", "keeps what `jaxscale bench step` measured"), ("against", "compares steps")):
        if what != "step" and any(word.partition("=")[0] == f"--{name}" for word in rest):
            raise BadInput(f"--{name} {does}: it is for jaxscale bench step")
    arguments = parse(rest, BenchFlags, SUBVERBS[what])
    if arguments.help:
        show_help(HELP)
        return 0
    flags = arguments.flags
    if flags.against:
        against(arguments, rest)
        return 0
    if flags.devices:
        jax.config.update("jax_num_cpu_devices", flags.devices)
    measures = dict(step=step, loop=loop, survive=survive, statistics=statistics, sample=sample, data=data)
    (save_steps if flags.save else (measures | {"collectives": collectives})[what])(arguments)
    return 0


def show(flags: BenchFlags, record: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Prints the record, or the lines for people."""
    put(json.dumps(record) if flags.json else "\n".join(lines))


def step(arguments: Arguments) -> dict[str, Any]:
    """`jaxscale bench step`, and what it measured."""
    flags = arguments.flags
    name, cfg = bench_step.read_config(arguments)
    record = bench_step.measure_step(name, cfg, steps=flags.steps or 6, warmup=flags.warmup)
    show(flags, record, bench_step.step_lines(record))
    return record


def save_steps(arguments: Arguments) -> None:
    """`jaxscale bench step --save`: measures the config or spec, or every spec, and keeps the results."""
    flags = arguments.flags
    if flags.against:
        raise BadInput("--save keeps what our step was measured at, and --against compares it; give one of them")
    for spec in [flags.spec] if arguments.config or flags.spec else bench_step.SPECS:
        record = step(dataclasses.replace(arguments, flags=dataclasses.replace(flags, spec=spec)))
        devices = jax.devices()
        file = keep_measured(
            from_record(
                record, platform=devices[0].platform, num_devices=len(devices), memory_bytes=device_bytes(devices) or 0
            )
        )
        if not flags.json:
            put(f"  kept in {file}")


def loop(arguments: Arguments) -> None:
    """`jaxscale bench loop`."""
    name, cfg = bench_step.read_config(arguments)
    record = bench_loop.measure_loop(cfg, steps=arguments.flags.steps or 100)
    show(arguments.flags, record, bench_loop.loop_lines(name, record))


def survive(arguments: Arguments) -> None:
    """`jaxscale bench survive`."""
    _, cfg = bench_step.read_config(arguments)
    steps, rounds = turns(arguments.flags)
    record = bench_survive.measure_survive(cfg, steps=steps, rounds=rounds)
    show(arguments.flags, record, bench_survive.survive_lines(record))


def statistics(arguments: Arguments) -> None:
    """`jaxscale bench statistics`."""
    name, cfg = bench_step.read_config(arguments)
    steps, rounds = turns(arguments.flags)
    record = bench_statistics.measure_statistics(name, cfg, steps=steps, rounds=rounds)
    show(arguments.flags, record, bench_statistics.statistics_lines(record))


def turns(flags: BenchFlags) -> tuple[int, int]:
    """(steps, rounds) of what compares two loops."""
    return whole_number("steps", str(flags.steps or 20), 2), flags.rounds or 5


def sample(arguments: Arguments) -> None:
    """`jaxscale bench sample`."""
    flags = arguments.flags
    record = bench_sample.measure_sample(
        *bench_step.read_config(arguments),
        prompt_tokens=flags.prompt_tokens,
        num_tokens=flags.num_tokens,
        batch=flags.rows,
    )
    show(flags, record, bench_sample.sample_lines(record))


def collectives(arguments: Arguments) -> None:
    """`jaxscale bench collectives`."""
    cfg, flags = bench_collectives.read_mesh(arguments), arguments.flags
    facts = schema.flatten(
        {"mesh": schema.to_dict(cfg), "megabytes": arguments.options.get("megabytes"), "repeats": flags.repeats}
    )
    with cluster.joined(cluster.find_own_place(arguments.options), facts, arguments.options) as say:
        record = bench_collectives.measure_collectives(cfg, sizes=flags.megabytes, repeats=flags.repeats)
        say(json.dumps(record) if flags.json else "\n".join(bench_collectives.collective_lines(record)))


def data(arguments: Arguments) -> None:
    """`jaxscale bench data`."""
    flags, cfg = arguments.flags, None
    if flags.input or flags.recipe:
        values = config_values(flags.recipe) if flags.recipe else {"stages": bench_data.CURATION}
        if flags.input:
            values["sources"] = {"text": {"files": flags.input}}
        cfg = schema.from_dict(PrepareConfig, schema.merge(values, arguments.overrides))
    record = bench_data.measure_data(cfg, seq_len=flags.seq_len, batch_rows=flags.batch_rows, rounds=flags.rounds or 3)
    show(flags, record, bench_data.data_lines(record))


def against(arguments: Arguments, argv: list[str]) -> None:
    """`jaxscale bench step --against=...`."""
    bench_step.read_config(arguments)  # what is wrong with our own side is said before anything runs
    flags = arguments.flags
    commands = [command.strip() for given in flags.against for command in given.split(";;")]
    say = (lambda text: None) if flags.json else put
    compared = bench_against.compare(own_flags(argv), commands, rounds=flags.rounds or 3, say=say)
    if flags.json:
        put(json.dumps(compared | {"ratios": bench_against.ratios(compared)}))
    else:
        put(*bench_against.compare_lines(compared))


def own_flags(argv: list[str]) -> list[str]:
    """Our side of a comparison: the command without --json and --against."""
    own, left = [], list(argv)
    while left:
        word = left.pop(0)
        if word == "--against":
            left.pop(0)
        elif word.partition("=")[0] not in ("--against", "--json"):
            own.append(word)
    return bench_against.our_command(own)


if __name__ == "__main__":
    run_verb("bench")
