"""What a run costs, before it is paid for: size, tokens, memory, time, money, data, and what is unwise about it.

  jaxscale plan --config=FILE --topology=v5p-256
  --topology=NAME         as in preflight: v5p:4x4x8, v5p-256 (TensorCores), 2*v6e:16x16, h100:32x8 (hosts x cards);
                          also b200, v100, t4, l4; here: this machine, once `jaxscale bench step --save` measured it
  --config.NAME=VALUE     sets any setting, as in training
  --price=4.20            dollars of a chip and hour; else the list price that is shown with its date
  --deadline=30d          says whether that is enough (s, m, h, d, w)
  --budget=1e6            dollars: the same. Without --config it proposes a model, its tokens and settings
  --flops=1e21            proposes for so many operations, without --config
  --model_size=7b         proposes tokens, shape and settings for so many parameters, without --config
  --write=FILE            writes the proposal as a config file
  --mfu=0.4               the share of the peak that you know you reach; else the range of published runs
  --pue=1.1               energy of the building over that of its machines
  --save_bandwidth=1e9    bytes/s to storage, of all hosts together
  --json=FILE             writes the plan
  --loss                  forecasts the loss from a ladder of small runs; jaxscale plan --loss --help has its flags

Nothing is compiled and no device is touched. Times, money and energy are ranges, and each assumption is named at the
end with its source. Exit code 0: it fits by the estimate, or a proposal was made; 3: it does not fit.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jaxscale import config, schema
from jaxscale.ahead.kept import find_kept
from jaxscale.cli import run_verb
from jaxscale.cli.plan_loss import main_loss
from jaxscale.command_line import Arguments, config_name, parse_arguments, take_switches
from jaxscale.config import RunConfig
from jaxscale.help_text import show_help
from jaxscale.planning import cost
from jaxscale.planning.machine import HERE, measured_machine, open_machine
from jaxscale.planning.measured import Measured, measured_file, newest_machine, read_measured
from jaxscale.planning.plan import RunPlan, Wishes, make_plan
from jaxscale.planning.propose import Proposal, config_text, propose_for_flops, propose_for_size, shortened
from jaxscale.planning.speed import PUBLISHED
from jaxscale.planning.text import plan_lines
from jaxscale.planning.text_proposal import proposal_lines
from jaxscale.planning.topology import Topology
from jaxscale.system.exits import BadInput, Exit, put
from jaxscale.system.paths import write_json, write_text_atomic

NUMBERS = ("price", "budget", "flops", "mfu", "pue", "save_bandwidth")
OPTIONS = ("topology", *NUMBERS, "deadline", "model_size", "write", "json")
SECONDS = {"s": 1.0, "m": 60.0, "h": cost.HOUR, "d": cost.DAY, "w": 7 * cost.DAY}
SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def main(argv: list[str]) -> int:
    """Prints the plan or the proposal and returns the exit code."""
    if "--loss" in argv:
        return main_loss(argv)
    rest, _ = take_switches(argv, OPTIONS, ())
    arguments = parse_arguments(rest, OPTIONS)
    if arguments.help:
        show_help(__doc__, RunConfig, arguments.topic)
        return 0
    numbers = {name: positive(name, arguments.options[name]) for name in NUMBERS if name in arguments.options}
    if numbers.get("mfu", 0.0) > 1:
        raise BadInput(f"--mfu={arguments.options['mfu']} must be a share of the peak, such as 0.4")
    if numbers.get("pue", 1.0) < 1:
        raise BadInput(f"--pue={arguments.options['pue']} must be 1 or more: what the building uses over its machines")
    for name in ("write", "json"):
        check_file(name, arguments)
    if not arguments.config:
        return propose(arguments, numbers)
    for name in ("flops", "model_size", "write"):
        if name in arguments.options:
            raise BadInput(f"--{name} proposes a model, and --config names one; give one of them")
    cfg = config.load_config(arguments.config, arguments.overrides)
    return answer(cfg, arguments, wishes_of(arguments, numbers, config_name(arguments.config)))


def answer(cfg: RunConfig, arguments: Arguments, wishes: Wishes) -> Exit:
    """Prints the plan of a config; DONE, or NO_GO where it does not fit."""
    topology, measured = machine_of(arguments)
    kept = None if topology.name == HERE else find_kept(cfg, topology.name)
    plan = make_plan(cfg, topology, wishes, measured=measured, kept=kept)
    put(*plan_lines(plan))
    write_plan(plan, None, arguments)
    return Exit.DONE if plan.device.fits else Exit.NO_GO


def propose(arguments: Arguments, numbers: Mapping[str, float]) -> Exit:
    """Prints a proposal, and its plan where a topology is given; writes its config where asked."""
    asked = [name for name in ("budget", "flops", "model_size") if name in arguments.options]
    if len(asked) != 1:
        raise BadInput(
            "give --config=FILE to plan a run, or one of --budget=DOLLARS, --flops=NUMBER, --model_size=7b to get one"
        )
    found = proposal_of(asked[0], arguments, numbers)
    if arguments.overrides:
        raise BadInput(
            f"--config.{next(iter(arguments.overrides))} sets a setting of a config, and a proposal is none yet; "
            "--write=FILE it, then plan it with --config=FILE"
        )
    given = [name for name in (asked[0], "topology", "price", "mfu") if name in arguments.options]
    command = " ".join(["jaxscale plan", *(f"--{name}={arguments.options[name]}" for name in given)])
    wishes = wishes_of(arguments, numbers, "the proposal")
    if "topology" in arguments.options:
        found = fitted(found, arguments, wishes)
    if file := arguments.options.get("write"):
        write_text_atomic(pathlib.Path(file).expanduser(), config_text(found, command))
    put(*proposal_lines(found))
    if file:
        put(f"  written to {file}; its data.files is a placeholder, and vocab_size must be that of your tokenizer")
    if "topology" in arguments.options:
        put("")
        return answer(run_of(found), arguments, wishes)
    write_plan(None, found, arguments)
    return Exit.DONE


def run_of(found: Proposal) -> RunConfig:
    """The config of a proposal."""
    return schema.from_dict(RunConfig, found.values())


def fitted(found: Proposal, arguments: Arguments, wishes: Wishes) -> Proposal:
    """The proposal with the fewest microbatches that fit, where any do, and the tokens that a budget buys at least."""
    topology, measured = machine_of(arguments)
    plan = make_plan(run_of(found), topology, wishes, measured=measured)
    if not plan.device.fits and plan.device.fitting_microbatches:
        found = dataclasses.replace(found, num_microbatches=plan.device.fitting_microbatches)
        plan = make_plan(run_of(found), topology, wishes, measured=measured)
    budget, needed = wishes.budget_dollars, plan.money.dollars
    if budget is not None and needed is not None and needed.high > budget:
        found = shortened(found, budget / needed.high)
    return found


def proposal_of(asked: str, arguments: Arguments, numbers: Mapping[str, float]) -> Proposal:
    """The proposal for a budget, for operations or for a size."""
    if asked == "model_size":
        text = arguments.options["model_size"]
        return propose_for_size(size_of(text), f"--model_size={text}")
    if asked == "flops":
        return propose_for_flops(numbers["flops"], f"--flops={numbers['flops']:.3g}")
    topology, _ = machine_of(arguments)
    chip = topology.chip
    price = numbers.get("price") or (chip.price and chip.price.dollars_per_hour)
    if price is None:
        raise BadInput(f"--budget: no price of {chip.name} is known; give --price=DOLLARS a chip and hour")
    if topology.platform not in PUBLISHED and "mfu" not in numbers:
        raise BadInput("--budget needs --topology of TPUs or GPUs, or --mfu")
    mfu = numbers.get("mfu") or PUBLISHED[topology.platform][0].low  # what is left over costs less than what is short
    peak = chip.peak_flops * chip.devices_per_chip
    flops = cost.flops_for_dollars(numbers["budget"], price, peak, mfu, cost.GOODPUT)
    why = (
        f"${numbers['budget']:,.0f} at ${price:.2f} buy {numbers['budget'] / price:,.0f} hours of {chip.name}, or "
        f"{flops:.3g} FLOPs at {mfu:.1%} MFU and {cost.GOODPUT:.0%} goodput"
    )
    return propose_for_flops(flops, why)


def machine_of(arguments: Arguments) -> tuple[Topology, list[Measured]]:
    """(the machine that --topology names, what was measured on it if it is this one)."""
    text = arguments.options.get("topology")
    if text is None:
        raise BadInput("--topology must be given, such as --topology=v5p:4x4x8, --topology=h100:8x8 or here")
    if text != HERE:
        return open_machine(text), []
    measured = newest_machine(read_measured())
    if not measured:
        raise BadInput(
            f"--topology=here: {measured_file()} has no measurement of this machine; run: jaxscale bench step --save"
        )
    return measured_machine(measured[-1]), measured


def wishes_of(arguments: Arguments, numbers: Mapping[str, float], name: str) -> Wishes:
    """What was given beside config and machine."""
    deadline = arguments.options.get("deadline")
    return Wishes(
        config_name=name,
        price=numbers.get("price"),
        deadline_seconds=None if deadline is None else duration_of(deadline),
        budget_dollars=numbers.get("budget"),
        mfu=numbers.get("mfu"),
        pue=numbers.get("pue"),
        save_bytes_per_second=numbers.get("save_bandwidth"),
    )


def write_plan(plan: RunPlan | None, proposal: Proposal | None, arguments: Arguments) -> None:
    """Writes --json, if it was asked for."""
    if file := arguments.options.get("json"):
        content: dict[str, Any] = plan.to_dict() if plan else proposal.values()
        write_json(pathlib.Path(file).expanduser(), content)


def check_file(name: str, arguments: Arguments) -> None:
    """Raises BadInput before anything is computed if the file of an option cannot be written."""
    if name in arguments.options:
        file = pathlib.Path(arguments.options[name]).expanduser()
        if file.is_dir() or not file.parent.is_dir():
            raise BadInput(f"--{name}={file} must be a file in a folder that exists")


def positive(name: str, text: str) -> float:
    """A number above 0, '1e6' and '1_000_000' too, with or without '$'. Raises BadInput naming the flag."""
    try:
        number = float(text.removeprefix("$").replace(",", ""))
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise BadInput(f"--{name}={text} must be a number above 0")
    return number


def duration_of(text: str) -> float:
    """Seconds of '30d', '12h', '90m'. Raises BadInput for anything else."""
    found = re.fullmatch(r"([0-9.]+)([smhdw])", text.strip().lower())
    if not found or not re.fullmatch(r"\d+(\.\d+)?", found[1]) or float(found[1]) == 0:
        raise BadInput(f"--deadline={text} must be a time such as 30d, 12h or 90m")
    return float(found[1]) * SECONDS[found[2]]


def size_of(text: str) -> float:
    """Parameters of '7b', '350m', '1.5e9'. Raises BadInput for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", text.strip().lower())
    if not found or float(found[1]) == 0:
        raise BadInput(f"--model_size={text} must be a number of parameters such as 7b, 350m or 1.5e9")
    return float(found[1]) * SIZES[found[2]]


if __name__ == "__main__":
    run_verb("plan")
