"""Seconds and tokens to a loss: a whole run of a config, alternating with other programs on the same data.

  python -m benchmarks.time_to_loss --config=configs/quickstart.py --against='python docs/torch_adamw.py'

Each command gets a folder with rows.npz and model.json as its last argument, trains on them, and prints a line of JSON
with "tokens" and "loss"; docs/torch_adamw.py is such a program.
"""

import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import config_flags, run_main, show
from jaxscale.cli.bench_against import OURS, our_environment, run_one, shell_environment, split_command
from jaxscale.config import RunConfig
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.monitor.history import read_history
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.config_file import load_config
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput, put
from jaxscale.tools.interop import families
from jaxscale.units import table

HORIZON = 4  # maximum rows for other programs, as a multiple of the rows of our run
ROWS, MODEL = "rows.npz", "model.json"
KEYS = ("tokens", "loss")  # in the line that another program prints
SHOWN = 300  # characters of the output of a failed run in an error


def measure_time_to_loss(
    cfg: RunConfig, own: Sequence[str], commands: Sequence[str], *, loss: float | None, rounds: int, say: Callable
) -> dict[str, Any]:
    """Returns the record of --json: {"loss": target, "rounds", "systems": [{name, tokens, loss, seconds per round}]}.

    Each command gets the folder of write_rows as its last argument, trains, and prints a line of JSON with the number
    of "tokens" trained on and the held-out "loss" in nats per token. Seconds are those of the whole process, including
    startup, compilation and validation. `own` has the flags of `jaxscale.main` for the config. `loss` defaults to ours.
    Raises BadInput for a command that fails or prints no such line, and for a config without held-out rows.
    """
    systems: list[dict[str, Any]] = [dict(name=name, tokens=0, loss=[], seconds=[]) for name in (OURS, *commands)]
    with tempfile.TemporaryDirectory() as folder:
        write_rows(cfg, folder)
        for number in range(1, rounds + 1):
            for system in systems:
                began = time.perf_counter()
                if system["name"] == OURS:
                    record = run_own(own, f"{folder}/run{number}")
                else:
                    words = [*split_command(system["name"]), folder]
                    record = run_one(words, shell_environment(), system["name"], KEYS)
                system["seconds"].append(round(time.perf_counter() - began, 2))
                system["tokens"] = round(record["tokens"])
                system["loss"].append(record["loss"])
                told = f"{system['seconds'][-1]:>7,.1f} s  {record['loss']:.4f}  {system['name']}"
                say(f"round {number} of {rounds}: {told}")
    reached = statistics.median(systems[0]["loss"]) if loss is None else loss
    return {"loss": reached, "rounds": rounds, "systems": systems}


def write_rows(cfg: RunConfig, folder: str) -> None:
    """Writes rows.npz and, if the model has a Hugging Face family, model.json in the format of its config.json.

    rows.npz has tokens, targets and weights [rows, T] in the order of our run, up to HORIZON times as many rows as the
    run uses; targets of weight 0 do not count. held_tokens, held_targets and held_weights are the validation rows.
    """
    say = lambda text: None
    corpus = open_data(cfg.data, seq_len=cfg.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.seed, say=say)
    if corpus.valid_rows is None or not cfg.eval.num_rows:
        raise BadInput("time_to_loss compares losses on held-out rows, but this config has none; set eval.num_rows")
    steps = resolve_budget(cfg, corpus.epoch_tokens).total_steps
    batches = corpus.batches(cfg.rows_per_step)
    whole = max(steps, min(HORIZON * steps, len(corpus.train_rows) // cfg.rows_per_step))
    train = [batches.batch(n) for n in range(whole)]
    held = [batch for batch, _, _ in corpus.valid_batches(cfg.eval.num_rows, cfg.eval.num_rows)]
    arrays = {
        prefix + name: np.concatenate([getattr(batch, name) for batch in some])
        for prefix, some in (("", train), ("held_", held))
        for name in ("tokens", "targets", "weights")
    }
    np.savez(pathlib.Path(folder, ROWS), allow_pickle=False, **arrays)
    try:
        family = families.family_for(cfg.model)
    except BadInput:
        return  # without model.json, the other program must know the model
    pathlib.Path(folder, MODEL).write_text(json.dumps(families.write(family, cfg.model)), "utf-8")


def run_own(own: Sequence[str], workdir: str) -> dict[str, float]:
    """Returns {"tokens", "loss"} of our run: the tokens seen and the last validation loss."""
    command = [sys.executable, "-m", "jaxscale.main", *own, f"--workdir={workdir}"]
    done = subprocess.run(
        command,
        env=our_environment(),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise BadInput(f"our run ended with exit {done.returncode}: {(done.stderr or done.stdout).strip()[-SHOWN:]}")
    rows = read_history(workdir).rows
    last = lambda name: [row[name] for row in rows if name in row][-1]
    return {"tokens": last("tokens_seen"), "loss": last("validation/loss")}


def time_lines(record: Mapping[str, Any]) -> list[str]:
    """Returns the comparison as text: a table, and our tokens and seconds as fractions of each other program's."""
    middle = statistics.median
    rows = [["", "tokens", "seconds", "loss", ""]]
    for number, system in enumerate(record["systems"]):
        reached = middle(system["loss"]) <= record["loss"]
        name = system["name"] if not number else f"[{number}]"
        seconds, loss = f"{middle(system['seconds']):,.1f}", f"{middle(system['loss']):.4f}"
        rows.append([name, f"{system['tokens']:,}", seconds, loss, "" if reached else "not reached"])
    ours, *others = record["systems"]
    ratio = lambda one, other, name: middle(one[name]) / middle(other[name])
    return [
        f"to {record['loss']:.4f} nats per token, held out; medians of {record['rounds']} alternating round(s), each "
        "a whole process including compilation",
        *table(rows, right=range(1, 4), indent=""),
        *(f"  [{number}]: {other['name']}" for number, other in enumerate(others, 1)),
        *(
            f"{OURS} / [{number}]: {ours['tokens'] / other['tokens']:.2f} of the tokens, "
            f"{ratio(ours, other, 'seconds'):.2f} of the seconds, to {ratio(ours, other, 'loss'):.3f} times the loss"
            for number, other in enumerate(others, 1)
        ),
    ]


@dataclasses.dataclass(frozen=True)
class TimeFlags:
    """Flags of this benchmark."""

    config: str = flag("", "the run's config", "FILE")
    settings: dict[str, str] = flag(dict, "sets any setting", "VALUE", name="config.NAME")
    against: tuple[str, ...] = flag((), "another program; may be given several times", "'COMMAND'")
    loss: float | None = flag(None, "target in nats per token on held-out rows; default: final loss of our run", "1.6")
    rounds: int = flag(3, "rounds of all programs", least=1)
    json: bool = flag(False, "one line of JSON")


@command(TimeFlags)
def main(arguments: Arguments) -> None:
    """Trains each program to its end, alternately."""
    flags = arguments.flags
    if not arguments.config:
        raise BadInput("time_to_loss trains a run to its end; pass --config=FILE, such as configs/quickstart.py")
    cfg = load_config(arguments.config, arguments.overrides)
    say = (lambda text: None) if flags.json else put
    record = measure_time_to_loss(
        cfg, config_flags(arguments), flags.against, loss=flags.loss, rounds=flags.rounds, say=say
    )
    show(record, time_lines(record), as_json=flags.json)


if __name__ == "__main__":
    run_main(main)
