"""Implements `jaxscale bench step --against`: alternates jaxscale's step with other programs in separate processes."""

import json
import math
import os
import shlex
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.system import process
from jaxscale.system.exits import BadInput
from jaxscale.tools.qualify.step import loss_problem
from jaxscale.units import table

OURS = "jaxscale"
SHOWN_STDERR = 300  # maximum number of characters shown of a failed command's last line


def compare(ours: Sequence[str], commands: Sequence[str], *, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs every command once per round. Returns {"ours": records, "others": [{command, records}]}.

    Commands alternate because the speed of a machine drifts; compare only numbers of the same round. A record is the
    last output line that is a JSON object with tok_s. `ours` is a list of arguments. `commands` have shell syntax and
    may begin with NAME=VALUE, but run without a shell. Raises BadInput if a command fails or prints no record.
    """
    theirs = [(split_command(command), shell_environment(), command) for command in commands]
    sides = [(list(ours), our_environment(), OURS), *theirs]
    records: list[list[dict[str, Any]]] = [[] for _ in sides]
    for number in range(1, rounds + 1):
        for (words, environment, name), found in zip(sides, records):
            found.append(run_one(words, environment, name))
            say(f"round {number} of {rounds}: {found[-1]['tok_s']:>10,.0f} tokens/s  {name}")
    others = [dict(command=command, records=found) for command, found in zip(commands, records[1:])]
    return {"ours": records[0], "others": others}


def split_command(command: str) -> list[str]:
    """Returns the words of a command in shell syntax. Raises BadInput for an unclosed quote or a missing command."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadInput(f"--against={command!r} is not valid shell syntax: {error}") from None
    if not take_assignments(words)[1]:
        raise BadInput(f"--against={command!r} has no command; use --against='python other.py'")
    return words


def take_assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns ({NAME: VALUE} of the leading assignments, the remaining words)."""
    assigned, remaining = {}, list(words)
    while remaining and remaining[0].partition("=")[1] and remaining[0].partition("=")[0].isidentifier():
        name, _, value = remaining.pop(0).partition("=")
        assigned[name] = value
    return assigned, remaining


def shell_environment() -> dict[str, str]:
    """Returns the environment for other programs, without the variables that process.py sets."""
    ours = process.environment()
    return {name: value for name, value in os.environ.items() if ours.get(name) != value}


def our_environment() -> dict[str, str]:
    """Returns shell_environment() without a compilation cache, so that the first step of each program compiles."""
    return {"JAX_ENABLE_COMPILATION_CACHE": "false"} | shell_environment()


def run_one(
    words: Sequence[str], environment: Mapping[str, str], name: str, keys: Sequence[str] = ("tok_s",)
) -> dict[str, Any]:
    """Runs a command and returns the record that it prints, which must have positive numbers under `keys`."""
    assigned, command = take_assignments(words)
    decode = lambda output: output.decode("utf-8", "replace")
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env={**environment, **assigned})
    except OSError as error:
        raise BadInput(f"cannot run {command[0]}: {error.strerror}; command: {name}") from None
    if done.returncode:
        error = (decode(done.stderr).strip() or decode(done.stdout).strip() or "no output").splitlines()[-1]
        raise BadInput(f"command {name} ended with exit code {done.returncode}: {error[-SHOWN_STDERR:]}")
    record = last_record(decode(done.stdout), keys)
    if record is None:
        required = " and ".join(f'"{key}"' for key in keys)
        raise BadInput(f"the command must print a JSON line with a positive {required}: {name}")
    return record


def last_record(text: str, keys: Sequence[str]) -> dict[str, Any] | None:
    """Returns the last line that is a JSON object with a positive number under each key, or None."""
    for line in reversed(text.splitlines()):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found = [record.get(key) for key in keys] if isinstance(record, dict) else [None]
        if all(isinstance(number, (int, float)) and math.isfinite(number) and number > 0 for number in found):
            return record
    return None


def ratios(compared: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns, for each other command, the ratio of median tok_s (ours to theirs) and its range over single rounds."""
    ours, found = [record["tok_s"] for record in compared["ours"]], []
    for other in compared["others"]:
        theirs = [record["tok_s"] for record in other["records"]]
        by_round = [us / them for us, them in zip(ours, theirs)]
        ratio = statistics.median(ours) / statistics.median(theirs)
        found.append(dict(command=other["command"], ratio=round(ratio, 3), low=min(by_round), high=max(by_round)))
    return found


def median_of(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Returns the median of a number over the records, or None if a record lacks it."""
    values = [value for record in records if isinstance(value := record.get(key), (int, float))]
    return statistics.median(values) if values and len(values) == len(records) else None


def compare_lines(compared: dict[str, Any]) -> list[str]:
    """Returns the comparison as text: setup, table, ratios and warnings."""
    ours = compared["ours"]
    us = ours[0]
    everyone = [(OURS, ours), *((f"[{n}]", other["records"]) for n, other in enumerate(compared["others"], 1))]
    lines = [
        f"compared: {us['spec']}, {us['dtype']}, {us['rows']} x {us['seq_len']} tokens per step, median of "
        f"{us['steps']} steps per process, medians of {len(ours)} alternating round(s); {us['devices']}, "
        f"{us['cpus']} CPUs, {us['date']}",
        f"  {OURS}: {us['attention']} attention, layers {'scanned' if us['scan_layers'] else 'unrolled'}, "
        f"{us['num_microbatches']} microbatch(es), huge pages {'on' if us['huge_pages'] else 'off'}, jax "
        f"{us['versions'].get('jax')}",
        *(f"  [{n}]: {other['command']}" for n, other in enumerate(compared["others"], 1)),
    ]
    columns = (("tokens/s", "tok_s"), ("GFLOP/s", "gflops"), ("first step s", "first_step_s"), ("peak MiB", "rss_mb"))
    columns += (("loss first", "loss0"), ("loss last", "lossN"))
    rows = [["", *(title for title, _ in columns), "reported as"]]
    text = lambda value: "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    for name, records in everyone:
        reported = " ".join(str(records[0][key]) for key in ("sys", "spec", "dtype") if key in records[0])
        rows.append([name, *(text(median_of(records, key)) for _, key in columns), reported])
    lines += table(rows, right=range(len(rows[0])), indent="")
    alone, reached = median_of(ours, "product_gflops"), median_of(ours, "gflops")
    if alone and reached is not None:
        lines.append(
            f"matmuls alone, in sequence: {alone:,.0f} GFLOP/s; {OURS} reaches {reached / alone:.0%} of that, "
            "by the model's FLOP formula"
        )
    for n, found in enumerate(ratios(compared), 1):
        lines.append(
            f"{OURS} / [{n}]: {found['ratio']:.3f} (single rounds: {found['low']:.3f} to {found['high']:.3f}); "
            + ("at least as fast" if found["ratio"] >= 1 else "slower")
        )
    return lines + [f"WARNING: {text}" for name, records in everyone for text in warnings_of(name, records, us)]


def warnings_of(name: str, records: Sequence[Mapping[str, Any]], us: Mapping[str, Any]) -> list[str]:
    """Returns warnings if a program's losses or number of parameters show that it does different work."""
    first, last = median_of(records, "loss0"), median_of(records, "lossN")
    problem = loss_problem(first, last, us["log_vocab"], us["logit_variance"])
    found = [f"{name}: {problem}"] if problem else []
    params = records[0].get("params")
    if params is not None and params != us["params"]:
        found.append(f"{name} has {params} parameters and {OURS} has {us['params']}, so the models differ")
    return found
