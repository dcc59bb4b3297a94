"""How fast the training step is, alone, beside other programs, and inside the loop.

  jaxscale bench step                 the compiled step on random tokens: each step waited for, the median
  jaxscale bench loop --config=FILE   the loop (data, step, metrics, a checkpoint every 100 steps) beside the bare step
  jaxscale bench survive              what guard, watchdog, lock, fingerprints and saves cost, beside the step
  jaxscale bench statistics           what looking at each layer costs (monitor.statistics_every_steps), beside the step
  jaxscale bench sample               tokens/s that are written with a cache of keys and values, beside full passes
  jaxscale bench collectives          bandwidth along each mesh axis, beside the chip table, and hosts that are slow
  jaxscale bench data                 preparing and reading data, on one core: each stage, a recipe, shards, batches
  --spec=S                S: 8 layers, d 512, vocabulary 8192, 8 x 512 tokens; T: 4 layers, d 256, vocabulary 256,
                          16 x 256 tokens; both Llama, untied, AdamW, clipped
  --config=FILE           a run's config instead
  --config.NAME=VALUE     sets any setting of either, such as --config.train.num_microbatches=4
  --dtype=float32         compute dtype
  --steps=6               timed steps (loop: 100; survive, statistics: 20)
  --warmup=2              step: untimed steps after the first
  --devices=8             simulated CPU devices
  --json                  one line of JSON
  --save                  step: keeps the result in the user's cache folder, for `jaxscale plan --topology=here`;
                          without --spec and --config both specs are measured
  --megabytes=1,16,256    collectives: sizes of the whole array in MiB (on CPU 1,4,16)
  --repeats=10            collectives: calls, of which the median counts
  --against='COMMAND'     step: runs our step and the command in turn, as processes, and prints the ratio. The command
                          prints a line of JSON with "tok_s" and, if it likes, sys, spec, dtype, loss0, lossN, rss_mb,
                          first_step_s, gflops, params. NAME=VALUE may stand in front. For several commands give the
                          flag again, or put ';;' between them
  --rounds=3              step: turns of each with --against; survive, statistics: of each (5)

  --prompt_tokens=256     sample: tokens of each prompt
  --num_tokens=64         sample: tokens that are written behind it
  --rows=1                sample: prompts at a time

  --input=GLOB            data: text to measure with; else a recipe's sources, else this Python's standard library
  --recipe=FILE           data: a recipe of jaxscale prepare, for stages and tokenizer
  --seq_len=2048          data: tokens of a row that is read
  --batch_rows=64         data: rows of a batch

collectives runs on many hosts as training does, and takes its mesh from --config=FILE or from --config.mesh.AXIS=N:

The exit code does not depend on speed.
"""

import dataclasses
import json

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
from jaxscale.command_line import Arguments, config_values, parse_arguments, whole_number
from jaxscale.corpus.prepare.config import PrepareConfig
from jaxscale.help_text import show_help
from jaxscale.hosts import cluster
from jaxscale.planning.check import device_bytes
from jaxscale.planning.measured import from_record, keep_measured
from jaxscale.system.exits import BadInput, put

HELP = f"{__doc__}{cluster.HELP}"

SHARED_OPTIONS = ("spec", "dtype", "steps", "devices")
OPTIONS = {
    "step": (*SHARED_OPTIONS, "warmup", "rounds"),
    "loop": SHARED_OPTIONS,
    "survive": (*SHARED_OPTIONS, "rounds"),
    "statistics": (*SHARED_OPTIONS, "rounds"),
    "sample": ("spec", "dtype", "devices", "prompt_tokens", "num_tokens", "rows"),
    "data": ("input", "recipe", "seq_len", "batch_rows", "rounds"),
    "collectives": ("devices", "megabytes", "repeats", *cluster.FLAGS),
}


def main(argv: list[str]) -> int:
    """Measures what argv names, the step if it names nothing, and returns the exit code."""
    what, *rest = argv if argv and not argv[0].startswith("-") else ["step", *argv]
    if what not in OPTIONS:
        raise BadInput(f"jaxscale bench has nothing called {what!r}; it has {', '.join(OPTIONS)}")
    save, rest = "--save" in rest, [flag for flag in rest if flag != "--save"]
    rest, as_json, commands = take_flags(rest)
    if save and (what != "step" or commands):
        raise BadInput("--save keeps what `jaxscale bench step` measured, and nothing else")
    if commands and what != "step":
        raise BadInput("--against compares steps: jaxscale bench step --against='COMMAND'")
    arguments = parse_arguments(rest, OPTIONS[what])
    if arguments.help:
        show_help(HELP)
    elif commands:
        against(arguments, rest, commands, as_json)
    else:
        if "devices" in arguments.options:
            jax.config.update("jax_num_cpu_devices", number(arguments, "devices", 1, 1))
        verbs = {"step": save_steps if save else step, "loop": loop, "survive": survive, "statistics": statistics}
        (verbs | {"collectives": collectives, "data": data, "sample": sample})[what](arguments, as_json)
    return 0


def step(arguments: Arguments, as_json: bool) -> None:
    """`jaxscale bench step`."""
    steps, warmup = number(arguments, "steps", 6, 1), number(arguments, "warmup", 2, 0)
    record = bench_step.measure_step(*bench_step.read_config(arguments), steps=steps, warmup=warmup)
    put(json.dumps(record) if as_json else "\n".join(bench_step.step_lines(record)))


def save_steps(arguments: Arguments, as_json: bool) -> None:
    """`jaxscale bench step --save`: measures the config or spec, or every spec, and keeps the results."""
    named = arguments.config or "spec" in arguments.options
    for spec in [None] if named else bench_step.SPECS:
        options = arguments.options | ({"spec": spec} if spec else {})
        one = dataclasses.replace(arguments, options=options)
        steps, warmup = number(one, "steps", 6, 1), number(one, "warmup", 2, 0)
        record = bench_step.measure_step(*bench_step.read_config(one), steps=steps, warmup=warmup)
        put(json.dumps(record) if as_json else "\n".join(bench_step.step_lines(record)))
        devices = jax.devices()
        found = from_record(
            record, platform=devices[0].platform, num_devices=len(devices), memory_bytes=device_bytes(devices) or 0
        )
        file = keep_measured(found)
        if not as_json:
            put(f"  kept in {file}")


def loop(arguments: Arguments, as_json: bool) -> None:
    """`jaxscale bench loop`."""
    name, cfg = bench_step.read_config(arguments)
    record = bench_loop.measure_loop(cfg, steps=number(arguments, "steps", 100, 1))
    put(json.dumps(record) if as_json else "\n".join(bench_loop.loop_lines(name, record)))


def survive(arguments: Arguments, as_json: bool) -> None:
    """`jaxscale bench survive`."""
    _, cfg = bench_step.read_config(arguments)
    rounds = number(arguments, "rounds", 5, 1)
    record = bench_survive.measure_survive(cfg, steps=number(arguments, "steps", 20, 2), rounds=rounds)
    put(json.dumps(record) if as_json else "\n".join(bench_survive.survive_lines(record)))


def statistics(arguments: Arguments, as_json: bool) -> None:
    """`jaxscale bench statistics`."""
    name, cfg = bench_step.read_config(arguments)
    steps, rounds = number(arguments, "steps", 20, 2), number(arguments, "rounds", 5, 1)
    record = bench_statistics.measure_statistics(name, cfg, steps=steps, rounds=rounds)
    put(json.dumps(record) if as_json else "\n".join(bench_statistics.statistics_lines(record)))


def sample(arguments: Arguments, as_json: bool) -> None:
    """`jaxscale bench sample`."""
    sizes = {"prompt_tokens": 256, "num_tokens": 64, "rows": 1}
    prompt_tokens, num_tokens, rows = (number(arguments, name, size, 1) for name, size in sizes.items())
    record = bench_sample.measure_sample(
        *bench_step.read_config(arguments), prompt_tokens=prompt_tokens, num_tokens=num_tokens, batch=rows
    )
    put(json.dumps(record) if as_json else "\n".join(bench_sample.sample_lines(record)))


def collectives(arguments: Arguments, as_json: bool) -> None:
    """`jaxscale bench collectives`."""
    cfg, text = bench_collectives.read_mesh(arguments), arguments.options.get("megabytes")
    sizes = None if text is None else bench_collectives.read_sizes(text)
    repeats = number(arguments, "repeats", 10, 1)
    facts = schema.flatten({"mesh": schema.to_dict(cfg), "megabytes": text, "repeats": repeats})
    with cluster.joined(cluster.find_own_place(arguments.options), facts, arguments.options) as say:
        record = bench_collectives.measure_collectives(cfg, sizes=sizes, repeats=repeats)
        say(json.dumps(record) if as_json else "\n".join(bench_collectives.collective_lines(record)))


def data(arguments: Arguments, as_json: bool) -> None:
    """`jaxscale bench data`."""
    options, cfg = arguments.options, None
    if "input" in options or "recipe" in options:
        values = config_values(options["recipe"]) if "recipe" in options else {"stages": bench_data.CURATION}
        if "input" in options:
            values["sources"] = {"text": {"files": options["input"]}}
        cfg = schema.from_dict(PrepareConfig, schema.merge(values, arguments.overrides))
    record = bench_data.measure_data(
        cfg,
        seq_len=number(arguments, "seq_len", 2048, 2),
        batch_rows=number(arguments, "batch_rows", 64, 2),
        rounds=number(arguments, "rounds", 3, 1),
    )
    put(json.dumps(record) if as_json else "\n".join(bench_data.data_lines(record)))


def against(arguments: Arguments, argv: list[str], commands: list[str], as_json: bool) -> None:
    """`jaxscale bench step --against=...`."""
    bench_step.read_config(arguments)  # what is wrong with our own side is said before anything runs
    rounds = number(arguments, "rounds", 3, 1)
    ours = bench_against.our_command(argv)
    say = (lambda text: None) if as_json else put
    compared = bench_against.compare(ours, commands, rounds=rounds, say=say)
    if as_json:
        put(json.dumps(compared | {"ratios": bench_against.ratios(compared)}))
    else:
        put(*bench_against.compare_lines(compared))


def take_flags(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    """(the other arguments, whether --json is among them, the commands of every --against)."""
    rest, as_json, commands, left = [], False, [], list(argv)
    while left:
        flag = left.pop(0)
        name, equals, value = flag.partition("=")
        if flag == "--json":
            as_json = True
        elif name == "--against":
            if not equals and not left:
                raise BadInput("--against needs a command: --against='python other.py'")
            value = value if equals else left.pop(0)
            commands += [command.strip() for command in value.split(";;")]
        else:
            rest.append(flag)
    return rest, as_json, commands


def number(arguments: Arguments, name: str, default: int, least: int) -> int:
    """The option as a number, `default` where it is not given."""
    return whole_number(name, arguments.options.get(name, str(default)), least)


if __name__ == "__main__":
    run_verb("bench")
