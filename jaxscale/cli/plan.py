"""Estimates size, tokens, memory, time, cost and data of a run, with warnings about its settings.

  jaxscale plan --config=FILE --topology=v5p-256

Compiles nothing and needs no device. Times, costs and energy are ranges; the assumptions and their sources are listed
at the end. Exit code 0: the run fits by the estimate, or a proposal was made; 3: it does not fit.
"""

import dataclasses
import pathlib
import re

from jaxscale import schema, units
from jaxscale.api import planning as api
from jaxscale.cli import plan_loss
from jaxscale.config import RunConfig
from jaxscale.settings import config_file
from jaxscale.settings.command_line import Arguments, file_to_write, flag, number_flag, positive
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput, Exit, print_stderr, put
from jaxscale.system.paths import write_json, write_text_atomic
from jaxscale.tools.planning import cost
from jaxscale.tools.planning.plan import PlanOptions, make_plan
from jaxscale.tools.planning.plan_text import plan_lines, proposal_lines
from jaxscale.tools.planning.propose import Proposal, config_text, propose_for_flops, propose_for_size, shortened
from jaxscale.tools.planning.speed import check_peak, expected_mfu

SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
share = number_flag(lambda found: 0 < found <= 1, "a fraction of the peak, such as 0.4")
overhead = number_flag(
    lambda found: found >= 1, "at least 1: energy of the data centre divided by the energy of its machines"
)


def duration_of(name: str, text: str) -> float:
    """Returns the seconds of a duration such as '30d', '12h' or '90m'. Raises BadInput for other text."""
    if (seconds := units.seconds_of(text)) is None:
        raise BadInput(f"--{name}={text} must be a time such as 30d, 12h or 90m")
    return seconds


def size_of(name: str, text: str) -> float:
    """Returns the number of parameters of '7b', '350m' or '1.5e9'. Raises BadInput for other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", text.strip().lower())
    if not found or float(found[1]) == 0:
        raise BadInput(f"--{name}={text} must be a number of parameters such as 7b, 350m or 1.5e9")
    return float(found[1]) * SIZES[found[2]]


@dataclasses.dataclass(frozen=True)
class PlanFlags:
    config: str = flag("", None, "FILE")
    topology: str | None = flag(
        None,
        "as in preflight: v5p:4x4x8, v5p-256 (TensorCores), 2*v6e:16x16, h100:32x8 (hosts x cards); also v3-8, gb200, "
        "b200, v100, p100, t4, l4, a10g; here: this machine, after `jaxscale qualify` or `jaxscale bench step --save`",
        "NAME",
    )
    settings: dict[str, str] = flag(dict, "sets any setting, as in training", "VALUE", name="config.NAME")
    workdir: str | None = flag(
        None, "a run to resume: finished stages of batch_ramp and seq_len_ramp need not fit", "FOLDER"
    )
    price: float | None = flag(
        None, "price of one chip hour in dollars; default: the list price, shown with its date", "4.20", read=positive
    )
    deadline: float | None = flag(
        None, "reports whether the run ends within this time (s, m, h, d, w)", "30d", read=duration_of
    )
    budget: float | None = flag(
        None,
        "reports whether the run costs at most these dollars; without --config, proposes a model, tokens and settings",
        "1e6",
        read=positive,
    )
    flops: float | None = flag(None, "proposes a model for these FLOPs, without --config", "1e21", read=positive)
    model_size: float | None = flag(
        None, "proposes tokens, shape and settings for this number of parameters, without --config", "7b", read=size_of
    )
    write: pathlib.Path | None = flag(None, "writes the proposal as a config file", "FILE", read=file_to_write)
    mfu: float | None = flag(
        None, "MFU, if known, as a fraction of the peak; default: the range of published runs", "0.4", read=share
    )
    pue: float | None = flag(None, "energy of the data centre divided by the machines' energy", "1.1", read=overhead)
    save_bandwidth: float | None = flag(None, "bytes/s to storage, summed over all hosts", "1e9", read=positive)
    json: pathlib.Path | None = flag(None, "writes the plan as JSON", "FILE", read=file_to_write)
    loss: bool = flag(False, "forecasts the loss from a ladder of small runs; see jaxscale plan --loss --help")

    def plan_options(self, name: str) -> PlanOptions:
        """Returns the options other than the config and the machine."""
        return PlanOptions(
            config_name=name,
            price=self.price,
            deadline_seconds=self.deadline,
            budget_dollars=self.budget,
            mfu=self.mfu,
            pue=self.pue,
            save_bytes_per_second=self.save_bandwidth,
        )


@command(PlanFlags, settings=RunConfig, instead={"--loss": plan_loss.main})
def main(arguments: Arguments) -> int:
    """Prints the plan or the proposal and returns the exit code."""
    flags = arguments.flags
    if not arguments.config:
        return propose(arguments)
    if given := [name for name in ("flops", "model_size", "write") if name in arguments.options]:
        raise BadInput(f"--{given[0]} proposes a model and cannot be combined with --config; use one of them")
    cfg = config_file.load_config(arguments.config, arguments.overrides)
    return answer(cfg, flags, flags.plan_options(config_file.config_name(arguments.config)))


def answer(cfg: RunConfig, flags: PlanFlags, options: PlanOptions) -> Exit:
    """Prints the plan of a config. Returns DONE, or NO_GO if the run does not fit."""
    plan = api.plan(cfg, flags.topology, options, say=print_stderr, workdir=flags.workdir)
    put(*plan_lines(plan))
    if flags.json:
        write_json(flags.json, plan.to_dict())
    return Exit.DONE if plan.device.fits else Exit.NO_GO


def propose(arguments: Arguments) -> Exit:
    """Prints a proposal, and its plan if a topology is set. With --write, writes its config."""
    flags: PlanFlags = arguments.flags
    requested = [name for name in ("budget", "flops", "model_size") if name in arguments.options]
    if len(requested) != 1:
        raise BadInput(
            "use --config=FILE to plan, or one of --budget=DOLLARS, --flops=NUMBER, --model_size=7b to propose a run"
        )
    if flags.workdir:
        raise BadInput(f"--workdir={flags.workdir} requires the config of its run; also set --config=FILE")
    found = proposal_of(arguments, flags)
    if arguments.overrides:
        raise BadInput(
            f"--config.{next(iter(arguments.overrides))} requires a config; write the proposal with --write=FILE, "
            "then plan it with --config=FILE"
        )
    given = [name for name in (requested[0], "topology", "price", "mfu") if name in arguments.options]
    command = " ".join(["jaxscale plan", *(f"--{name}={arguments.options[name]}" for name in given)])
    options = flags.plan_options("the proposal")
    if flags.topology:
        found = fitted(found, flags.topology, options)
    if flags.write:
        write_text_atomic(flags.write, config_text(found, command))
    put(*proposal_lines(found))
    if flags.write:
        put(
            f"  written to {arguments.options['write']}; replace data.files, which is a placeholder, and set "
            "vocab_size to that of your tokenizer"
        )
    if flags.topology:
        put("")
        return answer(run_of(found), flags, options)
    if flags.json:
        write_json(flags.json, found.values())
    return Exit.DONE


def run_of(found: Proposal) -> RunConfig:
    """Returns the config of a proposal."""
    return schema.from_dict(RunConfig, found.values())


def fitted(found: Proposal, topology_name: str, options: PlanOptions) -> Proposal:
    """Returns the proposal with the fewest microbatches that fit, tokens for the budget, and the best save interval."""
    topology, measured = api.machine_of(topology_name)
    plan_of = lambda found: make_plan(run_of(found), topology, options, measured=measured)
    plan = plan_of(found)
    if not plan.device.fits and plan.device.fitting_microbatches:
        found = dataclasses.replace(found, num_microbatches=plan.device.fitting_microbatches)
        plan = plan_of(found)
    budget, dollars = options.budget_dollars, plan.money.dollars
    if budget is not None and dollars is not None and dollars.high > budget:
        found = shortened(found, budget / dollars.high)
    if (step := plan.time.speed.step_seconds) is not None:
        every = float(f"{plan.saves.best_interval_seconds / step.high:.1g}")
        found = dataclasses.replace(found, save_every_steps=0 if every >= found.total_steps else max(1, int(every)))
    return found


def proposal_of(arguments: Arguments, flags: PlanFlags) -> Proposal:
    """Returns the proposal for a budget, a number of FLOPs or a model size."""
    if flags.model_size:
        return propose_for_size(flags.model_size, f"--model_size={arguments.options['model_size']}")
    if flags.flops:
        return propose_for_flops(flags.flops, f"--flops={flags.flops:.3g}")
    assert flags.budget is not None, "propose() requires one of the three"
    topology, measured = api.machine_of(flags.topology)
    chip = topology.chip
    price = flags.price or (chip.price and chip.price.dollars_per_hour)
    if price is None:
        raise BadInput(
            f"--budget needs a price, but {chip.name} has no list price; set --price=DOLLARS (per chip hour)"
        )
    if topology.platform not in ("tpu", "gpu") and not flags.mfu:
        raise BadInput("--budget requires either TPUs or GPUs in --topology, or --mfu; set one of them")
    if flags.mfu:
        check_peak(topology, flags.mfu)
    mfu = flags.mfu or expected_mfu(topology, measured)[0].low  # the lower bound, to stay within the budget
    peak = chip.peak_flops * chip.devices_per_chip
    flops = cost.flops_for_dollars(flags.budget, price, peak, mfu, cost.GOODPUT)
    basis = (
        f"${flags.budget:,.0f} at ${price:.2f} buys {flags.budget / price:,.0f} chip hours of {chip.name}, or "
        f"{flops:.3g} FLOPs at {mfu:.1%} MFU and {cost.GOODPUT:.0%} goodput"
    )
    return propose_for_flops(flops, basis)
