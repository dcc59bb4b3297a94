"""How fast the training step is, alone, beside other programs, and inside the loop.

  jaxscale bench step                 the compiled step on random tokens: each step waited for, the median
  jaxscale bench loop --config=FILE   the loop (data, step, metrics, a checkpoint every 100 steps) beside the bare step
  jaxscale bench survive              what guard, watchdog, lock, fingerprints and saves cost, beside the step; with
                                      --processes=4, how long a run stands still when one of four is killed
  jaxscale bench statistics           what looking at each layer costs (monitor.statistics_every_steps), beside the step
  jaxscale bench experts              a mixture's layer (spec M, or --config=FILE) beside a dense one of equal FLOPs
  jaxscale bench sample               tokens/s that are written with a cache of keys and values, beside full passes
  jaxscale bench stages               a pipeline's schedules on simulated devices, beside the simulator of their tables
  jaxscale bench time_to_loss         a whole run (--config=FILE) beside other programs that train on the same rows
                                      (--against): tokens and seconds to a loss
  jaxscale bench collectives          bandwidth along each mesh axis, beside the chip table, and hosts that are slow
  jaxscale bench hosts                the control plane of many hosts, simulated: seconds, requests, how they grow
  jaxscale bench data                 preparing and reading data, on one core: each stage, a recipe, shards, batches

collectives runs on many hosts as training does, and takes its mesh from --config=FILE or from --config.mesh.AXIS=N.

The exit code does not depend on speed.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxscale import schema, units
from jaxscale.cli import (
    bench_against,
    bench_data,
    bench_experts,
    bench_hosts,
    bench_loop,
    bench_restart,
    bench_sample,
    bench_scale,
    bench_stages,
    bench_statistics,
    bench_survive,
    bench_time,
    run_verb,
)
from jaxscale.command_line import Arguments, flag, whole_number
from jaxscale.config import RunConfig
from jaxscale.config_file import config_values
from jaxscale.corpus.prepare.config import PrepareConfig
from jaxscale.help_text import command
from jaxscale.hosts import cluster
from jaxscale.planning.check import device_bytes
from jaxscale.planning.measured import from_record, keep_measured
from jaxscale.qualify.collectives import collective_lines, measure_collectives, read_mesh, read_sizes
from jaxscale.qualify.step import measure_step, read_config, step_lines
from jaxscale.system.exits import BadInput, put


@dataclasses.dataclass(frozen=True)
class BenchFlags(cluster.HostFlags):
    """The flags of `jaxscale bench`."""

    spec: str | None = flag(
        None,
        "S: 8 layers, d 512, vocabulary 8192, 8 x 512 tokens; T: 4 layers, d 256, vocabulary 256, 16 x 256 tokens; "
        "both Llama, untied, AdamW, clipped; M: a Mixtral of 4 layers, d 512, 8 experts of 768 of which 2 are chosen, "
        "vocabulary 8192, 8 x 512 tokens",
        "S",
    )
    config: str = flag("", "a run's config instead", "FILE")
    settings: dict[str, str] = flag(
        dict, "sets any setting of either, such as --config.train.num_microbatches=4", "VALUE", name="config.NAME"
    )
    dtype: str | None = flag(None, "compute dtype", "float32")
    steps: int | None = flag(None, "timed steps (loop: 100; survive, statistics: 20; stages: 3)", "6", least=1)
    warmup: int = flag(2, "step: untimed steps after the first", least=0)
    devices: int | None = flag(None, "simulated CPU devices (stages: as many as stages, 2)", "8", least=1)
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
        "time_to_loss: it gets a folder with rows.npz and model.json as its last argument, trains on them, and prints "
        'one with "tokens" and "loss"; docs/torch_adamw.py is such a program. data: it gets a file of JSON lines with '
        'texts, and prints one with the "seconds" of CPU time that it took and the "stages" of a recipe that it did; '
        "docs/datatrove_rates.py is such a program",
        "'COMMAND'",
    )
    rounds: int | None = flag(
        None,
        "step, time_to_loss: turns of each with --against; data: of all; survive, statistics: of each (5; survive "
        "--processes: 1); experts: of each (36)",
        "3",
        least=1,
    )
    hosts: list[int] | None = flag(
        None, "hosts: how many are simulated, one number after the other", "16,256,1536", read=bench_hosts.read_hosts
    )
    loss: float | None = flag(None, "time_to_loss: nats a token of held-out rows; what our run ends at", "1.6")
    workers: int = flag(4, "hosts: processes that share all hosts but the first", least=1)
    processes: int | None = flag(
        None, "survive: kills one of so many processes, and times the restart of all (--config=FILE)", "4", least=2
    )
    kill_after: int = flag(20, "survive --processes: seconds of training before the kill", least=1)
    prompt_tokens: int = flag(256, "sample: tokens of each prompt", least=1)
    num_tokens: int = flag(64, "sample: tokens that are written behind it", least=1)
    rows: int = flag(1, "sample: prompts at a time", least=1)
    input: str | None = flag(
        None, "data: text to measure with; else a recipe's sources, else this Python's standard library", "GLOB"
    )
    recipe: str | None = flag(None, "data: a recipe of jaxscale prepare, for stages and tokenizer", "FILE")
    seq_len: int = flag(2048, "data: tokens of a row that is read", least=2)
    batch_rows: int = flag(64, "data: rows of a batch", least=2)
    scale: bool = flag(False, "data: how preparing and loading grow, from --documents tiny ones to 16 times as many")
    documents: int | None = flag(None, "data --scale: the fewest", "25000", least=1000)


ALL = ("config", "settings", "json", "save", "against")  # the last two are refused where they say nothing
SHARED = (*ALL, "spec", "dtype", "steps", "devices")
SUBVERBS = {
    "step": (*SHARED, "warmup", "rounds"),
    "loop": SHARED,
    "survive": (*SHARED, "rounds", "processes", "kill_after"),
    "statistics": (*SHARED, "rounds"),
    "stages": SHARED,
    "experts": (*ALL, "spec", "dtype", "rounds"),
    "time_to_loss": (*ALL, "loss", "rounds"),
    "sample": (*ALL, "spec", "dtype", "devices", "prompt_tokens", "num_tokens", "rows"),
    "data": (*ALL, "input", "recipe", "seq_len", "batch_rows", "rounds", "scale", "documents"),
    "hosts": ("json", "save", "against", "hosts", "workers"),
    "collectives": (*ALL, "devices", "megabytes", "repeats", *cluster.FLAGS),
}


@command(BenchFlags, subverbs=SUBVERBS, alone="step")
def main(arguments: Arguments) -> None:
    """Measures what is named, the step if nothing is."""
    flags, what = arguments.flags, arguments.subverb
    for name, verbs, does in (
        ("save", ("step",), "keeps what `jaxscale bench step` measured"),
        ("against", ("step", "time_to_loss", "data"), "compares steps, whole runs, or stages of a recipe"),
    ):
        if what not in verbs and getattr(flags, name):
            raise BadInput(f"--{name} {does}: it is for jaxscale bench {units.or_list(list(verbs))}")
    if what == "time_to_loss":
        time_to_loss(arguments)
        return
    if flags.against and what == "step":
        against(arguments)
        return
    if flags.processes:
        if not arguments.config:
            raise BadInput("--processes starts a run of several processes: give its --config=FILE")
        settings = [f"--config.{name}={text}" for name, text in arguments.overrides.items()]
        own = [f"--config={arguments.config}", *settings]
        how = dict(processes=flags.processes, seconds=flags.kill_after, rounds=flags.rounds or 1)
        record = bench_restart.measure_restart(own, **how)
        show(flags, record, bench_restart.restart_lines(record))
        return
    if what == "stages":
        stages = flags.devices or 2
        bench_stages.on_stages(stages, [sys.executable, "-m", "jaxscale.cli.bench", what, *arguments.words])
        say = (lambda text: None) if flags.json else put
        record = bench_stages.measure_stages(read_config(arguments)[1], stages, flags.steps or 3, say)
        show(flags, record, bench_stages.stage_lines(record))
        return
    if flags.devices:
        jax.config.update("jax_num_cpu_devices", flags.devices)
    if what == "collectives":
        collectives(arguments)
    elif what == "hosts":
        record = bench_hosts.measure_hosts(flags.hosts or bench_hosts.USUAL, flags.workers)
        show(flags, record, bench_hosts.host_lines(record))
    elif what == "data" and flags.scale:
        if flags.input or flags.recipe or flags.rounds or flags.against or arguments.config:
            raise BadInput(
                "--scale measures made-up documents by its own recipe: leave --input, --recipe, --rounds, --against "
                "and --config out"
            )
        record = bench_scale.measure_scale(flags.documents or 25_000, (lambda text: None) if flags.json else put)
        show(flags, record, bench_scale.scale_lines(record))
    elif what == "data":
        if flags.documents:
            raise BadInput("--documents is for jaxscale bench data --scale")
        record = data(arguments)
        show(flags, record, bench_data.data_lines(record))
    elif what == "experts":
        name, cfg = read_config(arguments, usual="M")
        record = bench_experts.measure_experts(name, cfg, rounds=flags.rounds or 36)
        show(flags, record, bench_experts.experts_lines(record))
    elif flags.save:
        save_steps(arguments)
    else:
        show(flags, *measure(what, *read_config(arguments), flags))


def show(flags: BenchFlags, record: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Prints the record, or the lines for people."""
    put(json.dumps(record) if flags.json else "\n".join(lines))


def measure(what: str, name: str, cfg: RunConfig, flags: BenchFlags) -> tuple[dict[str, Any], list[str]]:
    """(the record of what is measured of a config, the record for people)."""
    loops = lambda: dict(steps=whole_number("--steps", str(flags.steps or 20), 2), rounds=flags.rounds or 5)
    match what:
        case "step":
            record = measure_step(name, cfg, steps=flags.steps or 6, warmup=flags.warmup)
            return record, step_lines(record)
        case "loop":
            record = bench_loop.measure_loop(cfg, steps=flags.steps or 100)
            return record, bench_loop.loop_lines(name, record)
        case "survive":
            record = bench_survive.measure_survive(cfg, **loops())
            return record, bench_survive.survive_lines(record)
        case "statistics":
            record = bench_statistics.measure_statistics(name, cfg, **loops())
            return record, bench_statistics.statistics_lines(record)
    sizes = dict(prompt_tokens=flags.prompt_tokens, num_tokens=flags.num_tokens, batch=flags.rows)
    record = bench_sample.measure_sample(name, cfg, **sizes)
    return record, bench_sample.sample_lines(record)


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
    with cluster.joined(cluster.find_own_place(arguments.options), facts, arguments.options) as say:
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


def time_to_loss(arguments: Arguments) -> None:
    """`jaxscale bench time_to_loss --config=FILE`."""
    flags = arguments.flags
    if not arguments.config:
        raise BadInput("time_to_loss trains a run to its end: give its --config=FILE, such as configs/quickstart.py")
    cfg = read_config(arguments)[1]
    own = [f"--config={arguments.config}", *(f"--config.{name}={text}" for name, text in arguments.overrides.items())]
    commands = commands_of(flags)
    say = (lambda text: None) if flags.json else put
    how = dict(loss=flags.loss, rounds=flags.rounds or 3, say=say)
    record = bench_time.measure_time_to_loss(cfg, own, commands, **how)
    show(flags, record, bench_time.time_lines(record))


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
