"""The plan of a run: what config, machine and wishes say without compiling, computed once, as plain data."""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np

from jaxscale.auto_dtype import for_device
from jaxscale.budget import BEGINNING, Budget, Position, resolve_budget, train_flops
from jaxscale.build import Program
from jaxscale.checkpoint.write import state_bytes
from jaxscale.config import RunConfig
from jaxscale.data.cache import raw_dtype
from jaxscale.data.checks import corpus_files
from jaxscale.data.config import DataConfig
from jaxscale.data.header import read_header
from jaxscale.data.manifest import is_manifest, read_manifest
from jaxscale.data.megatron import is_megatron, read_index
from jaxscale.hardware import Price
from jaxscale.planning import cautions, cost, scaling
from jaxscale.planning.cautions import Caution
from jaxscale.planning.cost import Range
from jaxscale.planning.experts import exchange_of, routing_text
from jaxscale.planning.fitting import fitting_program
from jaxscale.planning.measured import Kept, Measured
from jaxscale.planning.memory import fitting_parts, host_bytes, least_memory, memory_need, memory_rows, usable_memory
from jaxscale.planning.positions import LEAST_POSITIONS
from jaxscale.planning.run_plan import Data, Device, Machine, Money, RunPlan, Saves, Time, Work
from jaxscale.planning.sending import between_slices
from jaxscale.planning.speed import Speed, speed
from jaxscale.planning.stages import stages_of
from jaxscale.planning.topology import Topology, link_domains
from jaxscale.sharding.mesh import mesh_layout
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import is_remote
from jaxscale.text.sources.files import SourceFile

PLAIN_TEXT = (".txt", ".py", ".md")
ADAMS_MOMENTS = ("adamw", "muon", "lamb")  # optimizers with a second moment of Adam's, if not for all parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the person gives beside config and machine."""

    config_name: str = "run"
    price: float | None = None  # dollars per chip-hour, over the table's
    deadline_seconds: float | None = None
    budget_dollars: float | None = None
    mfu: float | None = None
    pue: float | None = None
    save_bytes_per_second: float | None = None  # of all hosts together


def make_plan(
    cfg: RunConfig,
    topology: Topology,
    wishes: Wishes,
    *,
    measured: list[Measured] | None = None,
    kept: Kept | None = None,
    position: Position = BEGINNING,
) -> RunPlan:
    """The plan of a config on a machine of machine.open_machine().

    Args: measured: of this machine, where it is planned for, or of its kind of chip. kept: what preflight knows of this
    step. position: where a run resumes on this machine.
    Raises BadInput for a config that no such machine can run, and where the horizon cannot be known.
    """
    cfg = for_device(cfg, topology.devices[0])
    data_tokens, data_source = count_tokens(cfg.data, cfg.model.vocab_size)
    budget = resolve_budget(cfg, data_tokens, position)
    plain = dataclasses.replace(cfg, compiler={})  # options for the compiler change nothing that is planned here
    program = fitting_program(plain, topology.devices, budget, position)
    found = speed(program, topology, wishes.mfu, kept.mfu_ceiling if kept else None, measured or [])
    machine, work = plan_machine(topology, program), plan_work(cfg, budget, program)
    largest = work.tokens / work.batch_tokens  # how many steps of the largest batch
    wall = found.step_seconds and found.step_seconds.times(largest / cost.GOODPUT)
    id_bytes = cost.bytes_per_token_id(cfg.model.vocab_size)
    plan = RunPlan(
        config=wishes.config_name,
        machine=machine,
        work=work,
        device=plan_device(program, topology, kept),
        time=Time(speed=found, goodput=cost.GOODPUT, wall_seconds=wall, deadline_seconds=wishes.deadline_seconds),
        money=plan_money(wishes, topology, machine.num_chips, wall),
        saves=plan_saves(cfg, machine, program, work.total_steps, found, save_rate(wishes, machine, measured or [])),
        data=Data(
            data_bytes=work.tokens * id_bytes,
            data_bytes_per_second=found.tokens_per_second and found.tokens_per_second.times(id_bytes),
            data_tokens=data_tokens,  # of one pass over the data that exist
            data_source=data_source,
            epochs=work.tokens / data_tokens if data_tokens else None,
        ),
    )
    return dataclasses.replace(plan, cautions=find_cautions(plan, cfg, program, topology, wishes))


def plan_machine(topology: Topology, program: Program) -> Machine:
    """The machine, and the mesh on it."""
    devices = len(topology.devices)
    return Machine(
        topology=topology.name,
        platform=topology.platform,
        chip=topology.chip.name,
        num_chips=devices / topology.chip.devices_per_chip,
        num_devices=devices,
        num_hosts=topology.num_hosts,
        layout=mesh_layout(program.mesh),
        exchange=str(exchange_of(program)),
    )


def plan_work(cfg: RunConfig, budget: Budget, program: Program) -> Work:
    """Parameters, operations, tokens and batches; the sizes that a published rule prefers, for decoders."""
    params, tokens = cfg.model.num_params, budget.tokens_of(budget.total_steps)
    is_decoder = scaling.laws_hold(cfg.model)
    return Work(
        params=params,
        active_params=cfg.model.active_params,
        flops_per_token=cfg.flops_per_token,  # by the model's own formula, attention included
        flops_per_token_6n=scaling.train_flops(cfg.model.active_params, 1),
        train_flops=train_flops(cfg, budget),
        tokens=tokens,  # of whole steps
        total_steps=budget.total_steps,
        warmup_steps=budget.warmup_steps,
        warmup_tokens=budget.tokens_of(budget.warmup_steps),
        batch_tokens=budget.batch_tokens,
        ramp=budget.ramp,
        seq_len_ramp=budget.seq_len_ramp,
        rows=cfg.rows_per_step,
        seq_len=cfg.seq_len,
        num_microbatches=cfg.train.num_microbatches,
        rows_per_pass=cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards,  # on one batch shard
        routing=routing_text(program),
        optimal=scaling.lowest_alternative(scaling.train_flops(params, tokens)) if is_decoder else None,
        serving=tuple(scaling.serving_alternatives(params, tokens)) if is_decoder else (),
        loss=scaling.fitted_loss(params, tokens) if is_decoder else None,  # only for comparing sizes
    )


def plan_device(program: Program, topology: Topology, kept: Kept | None) -> Device:
    """What a device must hold, and what it has."""
    need, (usable, usable_why) = memory_need(program), usable_memory(topology)
    return Device(
        memory=memory_rows(program, need),
        memory_bytes=need.total,
        host_bytes=host_bytes(program.abstract_state),
        usable_bytes=usable,
        usable_why=usable_why,
        least_devices=math.ceil(least_memory(program.cfg, 1).state / usable),
        fitting_microbatches=fitting_parts(program, usable),  # the fewest by the estimate; None: none does
        kept=kept,
    )


def plan_money(wishes: Wishes, topology: Topology, num_chips: float, wall: Range | None) -> Money:
    """Chip-hours, dollars and energy of this wall time, where it is known."""
    chip, pue = topology.chip, wishes.pue or cost.PUE[topology.platform]
    price = chip.price if wishes.price is None else Price(wishes.price, "now", "as given by --price")
    hours = wall and wall.times(num_chips / cost.HOUR)
    power = cost.megawatt_hours(chip.watts, num_chips, 1.0, pue) if chip.watts else None
    return Money(
        chip_hours=hours,
        price=price,
        dollars=hours.times(price.dollars_per_hour) if hours and price else None,
        watts=chip.watts,
        pue=pue,
        pue_source="as given by --pue" if wishes.pue else cost.PUE_SOURCE[topology.platform],
        megawatt_hours=wall.times(power) if wall and power is not None else None,
        budget_dollars=wishes.budget_dollars,
    )


def save_rate(wishes: Wishes, machine: Machine, measured: list[Measured]) -> tuple[float, str]:
    """(bytes/s to storage of all hosts together, how it is known)."""
    if wishes.save_bytes_per_second:
        return wishes.save_bytes_per_second, "as given by --save_bandwidth"
    if timed := [(one, rate) for one in measured if (rate := one.save_bytes_per_second)]:
        last, rate = max(timed, key=lambda pair: pair[0].date)
        rate = rate * machine.num_devices / last.num_devices
        return rate, f"measured by {last.by} with {last.num_devices} devices, {last.date}, and taken to grow with them"
    assumed = "1 GB/s of each host, assumed; jaxscale qualify and jaxscale rehearse measure it"
    return cost.SAVE_BYTES_PER_SECOND * machine.num_hosts, assumed


def plan_saves(
    cfg: RunConfig, machine: Machine, program: Program, total_steps: int, found: Speed, rate: tuple[float, str]
) -> Saves:
    """Size and time of a checkpoint, how often one is due, and what all that stay take. rate: of save_rate()."""
    saves, (bytes_per_second, source) = cfg.checkpoint, rate
    one_save = state_bytes(jax.tree.leaves(program.abstract_state))
    save_seconds = one_save / bytes_per_second
    between = cost.mean_seconds_between_failures(machine.num_chips)
    steps = found.step_seconds if saves.save_every_steps else None
    number = cost.kept_checkpoints(
        total_steps, saves.save_every_steps, saves.keep_last, saves.keep_every_steps, saves.keep_best
    )
    return Saves(
        checkpoint_bytes=one_save,
        save_seconds=save_seconds,
        save_source=source,
        save_interval_seconds=steps and steps.times(saves.save_every_steps),
        best_interval_seconds=cost.best_save_interval(save_seconds, between),
        between_failures_seconds=between,
        kept_checkpoints=number,
        kept_bytes=number * one_save,
        storage_dollars_per_month=number * one_save / 1e9 * cost.STORAGE_DOLLARS_PER_GB_MONTH,  # GB of 10**9 bytes
    )


def find_cautions(
    plan: RunPlan, cfg: RunConfig, program: Program, topology: Topology, wishes: Wishes
) -> tuple[Caution, ...]:
    """What is unwise about the plan. Rules that were found for some optimizers or decoders are asked of these alone."""
    found = [
        *training_cautions(plan, cfg),
        *time_cautions(plan, cfg),
        *machine_cautions(plan, cfg, program, topology),
        *speed_cautions(plan, cfg, wishes),
    ]
    return tuple(one for one in found if one is not None)


def training_cautions(plan: RunPlan, cfg: RunConfig) -> list[Caution | None]:
    """Of warmup, rate, tokens and batch."""
    work = plan.work
    is_decoder, size = scaling.laws_hold(cfg.model), (work.params, work.tokens)
    found = [cautions.tokens_beyond_text(work.tokens)]
    if plan.data.epochs:
        found.append(cautions.too_many_epochs(plan.data.epochs))
    if cfg.optim.name in ADAMS_MOMENTS:
        found.append(cautions.warmup_too_short(work.params, work.warmup_steps, work.warmup_tokens, cfg.optim.b2))
    if cfg.optim.name in scaling.TIMES_ADAMW and is_decoder:
        found.append(cautions.rate_outside(*size, work.batch_tokens, cfg.optim.peak_lr, cfg.optim.name))
    if is_decoder:
        found += [cautions.tokens_of_params(*size), cautions.batch_too_large(*size, work.batch_tokens)]
    return found


def time_cautions(plan: RunPlan, cfg: RunConfig) -> list[Caution | None]:
    """Of the wall time, what ends the run, and the checkpoints."""
    work, time, money, saves, chips = plan.work, plan.time, plan.money, plan.saves, plan.machine.num_chips
    if (wall := time.wall_seconds) is None:
        return []
    is_decoder = scaling.laws_hold(cfg.model)
    found = [cautions.wall_too_long(wall, chips, work.flops_per_token_6n * work.tokens if is_decoder else None)]
    for limit, there, needed in (
        ("the deadline", time.deadline_seconds, wall),
        ("the budget", money.budget_dollars, money.dollars),
    ):
        if there is not None and needed is not None:  # what ends the run early even at the better speed
            reached = min(1.0, there / needed.low) * work.tokens
            found.append(cautions.horizon_too_far(work.tokens, reached, cfg.optim.decay, limit))
    if (interval := saves.save_interval_seconds) is not None:
        found.append(cautions.save_interval(interval.high, saves.save_seconds, chips, wall.high))
    return found


def machine_cautions(plan: RunPlan, cfg: RunConfig, program: Program, topology: Topology) -> list[Caution | None]:
    """Of the links between devices, and of the type on this chip."""
    chip, devices = topology.chip, len(topology.devices)
    islands = link_domains(topology.devices) if topology.platform != "cpu" else [0] * devices
    found = [
        cautions.tensor_over_slow_links(program.mesh.shape["tensor"], islands.count(islands[0]), chip),
        cautions.bubble_too_large(stages_of(cfg, program.mesh.shape)),
        cautions.positions_too_few(program.mesh.shape["context"], cfg.seq_len, LEAST_POSITIONS),
        cautions.dtype_of_chip(cfg.model.compute_dtype, chip),
    ]
    if crossing := between_slices(program, topology):
        found.append(cautions.wrong_axis_between_slices(*crossing))
    if not plan.time.speed.measured and plan.time.speed.mfu is not None:
        found.append(cautions.links_not_known(len(set(islands)), devices, chip))
    return found


def speed_cautions(plan: RunPlan, cfg: RunConfig, wishes: Wishes) -> list[Caution | None]:
    """Of the step: how much of it is products, and whether they are enough for the MFU."""
    speed = plan.time.speed
    if (products := speed.compute_seconds) is None or speed.step_seconds is None:
        return []
    found = [cautions.waits_for_links(products, speed.exposed_seconds or 0.0)]
    if wishes.mfu is None:
        found.append(cautions.pass_too_short(products / cfg.train.num_microbatches))
    else:
        found.append(cautions.mfu_beyond_reach(wishes.mfu, speed.step_seconds.low, products))
    return found


def count_tokens(cfg: DataConfig, vocab_size: int) -> tuple[int | None, str]:
    """(tokens of one pass over the training data, how it is known), or (None, why it is not known)."""
    if cfg.name == "synthetic":
        return None, "synthetic data never end"
    if cfg.name == "hf":
        return None, "unknown: data sets of the hub are counted when they are prepared"
    (files, _), problems = corpus_files(cfg)
    if problems:
        return None, f"unknown: {problems[0]}"
    if any(is_remote(file.path) for file in files):
        return None, "unknown: data in a bucket are not asked for here"
    if cfg.name == "tokens":
        try:
            return sum(tokens_of(file, cfg, vocab_size) for file in files), "by the files' headers and sizes"
        except (BadInput, OSError) as error:
            return None, f"unknown: {error}"
    if cfg.tokenizer not in ("", "bytes"):
        return None, "unknown before the text is tokenised: jaxscale prepare counts it"
    if not all(file.path.endswith(PLAIN_TEXT) for file in files):
        return None, "unknown before the files are unpacked: jaxscale prepare counts it"
    held = 1 - cfg.val_fraction if not cfg.val_files else 1.0
    tokens = sum(Path(file.path).stat().st_size + 1 for file in files) * held
    return round(tokens), "by the sizes of the files, a byte being a token, without what is held out"


def tokens_of(file: SourceFile, cfg: DataConfig, vocab_size: int) -> int:
    """Tokens of one token file. Raises BadInput where it does not say."""
    if is_manifest(file.path):
        return read_manifest(file.path).content["num_tokens"]
    if is_megatron(file.path):
        return int(read_index(Path(file.path).with_suffix(".idx")).offsets[-1])
    header = read_header(Path(file.path))
    if header is not None:
        return header["num_tokens"]
    if not file.path.endswith(".bin"):
        raise BadInput(f"{file.path} has no header that tells its tokens")
    return Path(file.path).stat().st_size // np.dtype(raw_dtype(cfg, vocab_size)).itemsize
