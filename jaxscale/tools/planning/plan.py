"""The plan of a run: memory, time, cost and data computed from config, machine and options without compilation."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.core.axes import expert_axis
from jaxscale.kernels.hardware import Price
from jaxscale.program.auto_dtype import for_device
from jaxscale.program.budget import BEGINNING, Budget, Position, resolve_budget, train_flops
from jaxscale.program.fitting_mesh import fitting_program
from jaxscale.program.memory import host_bytes, memory_lower_bound, memory_need
from jaxscale.runtime.checkpoint.write import state_bytes
from jaxscale.runtime.data.cache import raw_dtype
from jaxscale.runtime.data.checks import corpus_files
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.manifest import is_manifest, read_manifest
from jaxscale.runtime.data.other_formats import is_megatron, read_index
from jaxscale.runtime.data.shards import read_header
from jaxscale.runtime.hosts.meshes import mesh_layout
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import is_remote
from jaxscale.tools.planning import cautions, cost, scaling
from jaxscale.tools.planning.cautions import Caution
from jaxscale.tools.planning.collectives import routing_assumption
from jaxscale.tools.planning.communication import slice_crossing
from jaxscale.tools.planning.cost import Range
from jaxscale.tools.planning.measured import CompiledStep, Measured
from jaxscale.tools.planning.memory import find_microbatches, memory_rows, usable_memory
from jaxscale.tools.planning.run_plan import Data, DeviceMemory, Money, PlannedMachine, RunPlan, Saves, Time, Work
from jaxscale.tools.planning.speed import Speed, plan_speed
from jaxscale.tools.planning.topology import Topology, link_domains

TEXT_SUFFIXES = (".txt", ".py", ".md")
ADAM_OPTIMIZERS = ("adamw", "muon", "lamb")  # use Adam's second moment for all or some parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan in addition to config and machine."""

    config_name: str = "run"
    price: float | None = None  # dollars per chip-hour; None means the price in kernels/hardware.py
    deadline_seconds: float | None = None
    budget_dollars: float | None = None
    mfu: float | None = None
    pue: float | None = None
    save_bytes_per_second: float | None = None  # all hosts together


def make_plan(
    cfg: RunConfig,
    topology: Topology,
    options: PlanOptions,
    *,
    measured: list[Measured] | None = None,
    compiled: CompiledStep | None = None,
    position: Position = BEGINNING,
) -> RunPlan:
    """Returns the plan of a config on the devices of a topology.

    measured: measurements on this machine, or on chips of this kind. compiled: preflight's result for this step.
    position: training position from which the run resumes. Raises BadInput if this machine does not support the config,
    or if the number of steps is unknown.
    """
    cfg = for_device(cfg, topology.devices[0])
    data_tokens, data_source = count_tokens(cfg.data, cfg.model.vocab_size)
    budget = resolve_budget(cfg, data_tokens, position)
    without_options = dataclasses.replace(cfg, compiler={})  # the plan does not depend on compiler options
    program = fitting_program(without_options, topology.devices, budget, position)
    speed = plan_speed(program, topology, options.mfu, compiled.mfu_ceiling if compiled else None, measured or [])
    work, devices = plan_work(cfg, budget, program), len(topology.devices)
    machine = PlannedMachine(
        topology=topology.name,
        platform=topology.platform,
        chip=topology.chip.name,
        num_chips=devices / topology.chip.devices_per_chip,
        num_devices=devices,
        num_hosts=topology.num_hosts,
        layout=mesh_layout(program.mesh),
        exchange=expert_axis.describe(program.plan.expert_exchange),
    )
    num_steps = work.tokens / work.batch_tokens  # number of steps if all had the largest batch
    wall = speed.step_seconds and speed.step_seconds.times(num_steps / cost.GOODPUT)
    id_bytes = cost.bytes_per_token_id(cfg.model.vocab_size)
    plan = RunPlan(
        config=options.config_name,
        machine=machine,
        work=work,
        device=plan_device(program, topology, compiled),
        time=Time(speed=speed, goodput=cost.GOODPUT, wall_seconds=wall, deadline_seconds=options.deadline_seconds),
        money=plan_money(options, topology, machine.num_chips, wall),
        saves=plan_saves(cfg, machine, program, work.total_steps, speed, save_rate(options, machine, measured or [])),
        data=Data(
            data_bytes=work.tokens * id_bytes,
            data_bytes_per_second=speed.tokens_per_second and speed.tokens_per_second.times(id_bytes),
            data_tokens=data_tokens,  # tokens of one epoch
            data_source=data_source,
            epochs=work.tokens / data_tokens if data_tokens else None,
        ),
    )
    found = (*run_cautions(plan, cfg), *machine_cautions(plan, cfg, program, topology, options))
    return dataclasses.replace(plan, cautions=tuple(filter(None, found)))


def plan_work(cfg: RunConfig, budget: Budget, program: Program) -> Work:
    """Returns parameters, FLOPs, tokens, batches, and for dense decoders the sizes recommended by published laws."""
    params, tokens = cfg.model.num_params, budget.tokens_of(budget.total_steps)
    is_decoder = scaling.laws_hold(cfg.model)
    return Work(
        params=params,
        active_params=cfg.model.active_params,
        flops_per_token=cfg.flops_per_token,  # by the model's formula, attention included
        flops_per_token_6n=scaling.train_flops(cfg.model.active_params, 1),
        train_flops=train_flops(cfg, budget),
        tokens=tokens,  # tokens of whole steps
        total_steps=budget.total_steps,
        warmup_steps=budget.warmup_steps,
        warmup_tokens=budget.tokens_of(budget.warmup_steps),
        batch_tokens=budget.batch_tokens,
        ramp=budget.ramp,
        seq_len_ramp=budget.seq_len_ramp,
        rows=cfg.rows_per_step,
        seq_len=cfg.seq_len,
        num_microbatches=cfg.train.num_microbatches,
        rows_per_pass=cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards,  # per batch shard
        routing=routing_assumption(program),
        optimal=scaling.lowest_alternative(scaling.train_flops(params, tokens)) if is_decoder else None,
        serving=tuple(scaling.serving_alternatives(params, tokens)) if is_decoder else (),
        loss=scaling.fitted_loss(params, tokens) if is_decoder else None,  # only for comparing sizes
    )


def plan_device(program: Program, topology: Topology, compiled: CompiledStep | None) -> DeviceMemory:
    """Returns the required and the usable memory of a device."""
    need, (usable, usable_source) = memory_need(program), usable_memory(topology)
    return DeviceMemory(
        memory=memory_rows(program, need),
        memory_bytes=need.total,
        host_bytes=host_bytes(program.abstract_state),
        usable_bytes=usable,
        usable_why=usable_source,
        least_devices=math.ceil(memory_lower_bound(program.cfg, 1).state / usable),
        fitting_microbatches=find_microbatches(program, usable),
        kept=compiled,
    )


def plan_money(options: PlanOptions, topology: Topology, num_chips: float, wall: Range | None) -> Money:
    """Returns chip-hours, dollars and energy for a wall time. Unknown values are None."""
    chip, (pue, source) = topology.chip, cost.PUE[topology.platform]
    if options.pue:
        pue, source = options.pue, "from --pue"
    price = chip.price if options.price is None else Price(options.price, "now", "from --price")
    hours = wall and wall.times(num_chips / cost.HOUR)
    power = cost.megawatt_hours(chip.watts, num_chips, 1.0, pue) if chip.watts else None
    return Money(
        chip_hours=hours,
        price=price,
        dollars=hours.times(price.dollars_per_hour) if hours and price else None,
        watts=chip.watts,
        pue=pue,
        pue_source=source,
        megawatt_hours=wall.times(power) if wall and power is not None else None,
        budget_dollars=options.budget_dollars,
    )


def save_rate(options: PlanOptions, machine: PlannedMachine, measured: list[Measured]) -> tuple[float, str]:
    """Returns (bytes/s that all hosts together write to storage, source)."""
    if options.save_bytes_per_second:
        return options.save_bytes_per_second, "from --save_bandwidth"
    if with_rate := [(one, rate) for one in measured if (rate := one.save_bytes_per_second)]:
        last, rate = max(with_rate, key=lambda pair: pair[0].date)
        rate = rate * machine.num_devices / last.num_devices
        return rate, f"measured by {last.by} with {last.num_devices} devices, {last.date}; scaled by device count"
    assumed = "1 GB/s per host, assumed; measure it with jaxscale qualify or jaxscale rehearse"
    return cost.SAVE_BYTES_PER_SECOND * machine.num_hosts, assumed


def plan_saves(
    cfg: RunConfig, machine: PlannedMachine, program: Program, total_steps: int, speed: Speed, rate: tuple[float, str]
) -> Saves:
    """Returns size, duration, interval and storage of checkpoints. rate: the result of save_rate()."""
    saves, (bytes_per_second, source) = cfg.checkpoint, rate
    num_bytes = state_bytes(jax.tree.leaves(program.abstract_state))
    save_seconds = num_bytes / bytes_per_second
    mtbf = cost.mean_seconds_between_failures(machine.num_chips)
    steps = speed.step_seconds if saves.save_every_steps else None
    number = cost.num_checkpoints(
        total_steps, saves.save_every_steps, saves.keep_last, saves.keep_every_steps, saves.keep_best
    )
    return Saves(
        checkpoint_bytes=num_bytes,
        save_seconds=save_seconds,
        save_source=source,
        save_interval_seconds=steps and steps.times(saves.save_every_steps),
        best_interval_seconds=cost.best_save_interval(save_seconds, mtbf),
        between_failures_seconds=mtbf,
        kept_checkpoints=number,
        kept_bytes=number * num_bytes,
        storage_dollars_per_month=number * num_bytes / 1e9 * cost.STORAGE_DOLLARS_PER_GB_MONTH,  # GB of 10**9 bytes
    )


def run_cautions(plan: RunPlan, cfg: RunConfig) -> Iterator[Caution | None]:
    """Yields cautions about warmup, learning rate, tokens, batch, wall time, deadline, budget and checkpoints."""
    work, time, money, saves, chips = plan.work, plan.time, plan.money, plan.saves, plan.machine.num_chips
    is_decoder, size = scaling.laws_hold(cfg.model), (work.params, work.tokens)
    yield cautions.too_many_tokens(work.tokens)
    if plan.data.epochs:
        yield cautions.too_many_epochs(plan.data.epochs)
    if cfg.optim.name in ADAM_OPTIMIZERS:
        yield cautions.warmup_too_short(work.params, work.warmup_steps, work.warmup_tokens, cfg.optim.b2)
    if cfg.optim.name in scaling.TIMES_ADAMW and is_decoder:
        yield cautions.rate_outside(*size, work.batch_tokens, cfg.optim.peak_lr, cfg.optim.name)
    if is_decoder:
        yield cautions.too_few_tokens(*size)
        yield cautions.batch_too_large(*size, work.batch_tokens)
    if (wall := time.wall_seconds) is None:
        return
    yield cautions.wall_too_long(wall, chips, work.flops_per_token_6n * work.tokens if is_decoder else None)
    for limit, available, needed in (
        ("the deadline", time.deadline_seconds, wall),
        ("the budget", money.budget_dollars, money.dollars),
    ):
        if available is not None and needed is not None:  # compares with the lower bound of what the run needs
            reached = min(1.0, available / needed.low) * work.tokens
            yield cautions.horizon_too_far(work.tokens, reached, cfg.optim.decay, limit)
    if (interval := saves.save_interval_seconds) is not None:
        yield cautions.save_interval(interval.high, saves.save_seconds, chips, wall.high)


def machine_cautions(
    plan: RunPlan, cfg: RunConfig, program: Program, topology: Topology, options: PlanOptions
) -> Iterator[Caution | None]:
    """Yields cautions about links between devices, compute dtype, matmul time and the requested MFU."""
    chip, devices, shape, speed = topology.chip, len(topology.devices), program.mesh.shape, plan.time.speed
    domains = link_domains(topology.devices) if topology.platform != "cpu" else [0] * devices
    yield cautions.tensor_over_slow_links(shape["tensor"], domains.count(domains[0]), chip)
    yield cautions.bubble_too_large(program.plan.schedule_size, int(program.plan.pipeline.layers.max()) + 1)
    yield cautions.too_few_positions(shape["context"], cfg.seq_len)
    yield cautions.dtype_mismatch(cfg.model.compute_dtype, chip)
    if crossing := slice_crossing(program, topology):
        yield cautions.wrong_axis_across_slices(*crossing)
    if not speed.measured and speed.mfu is not None:
        yield cautions.unknown_bandwidth(len(set(domains)), devices, chip)
    if (matmul_seconds := speed.compute_seconds) is None or speed.step_seconds is None:
        return
    yield cautions.exposed_communication(matmul_seconds, speed.exposed_seconds or 0.0)
    if options.mfu is None:
        yield cautions.pass_too_short(matmul_seconds / cfg.train.num_microbatches)
    else:
        yield cautions.mfu_beyond_reach(options.mfu, speed.step_seconds.low, matmul_seconds)


def count_tokens(cfg: DataConfig, vocab_size: int) -> tuple[int | None, str]:
    """Returns (tokens of one epoch, source), or if they are unknown, (None, reason)."""
    if cfg.name == "synthetic":
        return None, "synthetic data is unlimited"
    if cfg.name == "hf":
        return None, "unknown: jaxscale prepare counts Hugging Face datasets"
    (files, _), problems = corpus_files(cfg)
    if problems:
        return None, f"unknown: {problems[0]}"
    if any(is_remote(file.path) for file in files):
        return None, "unknown: jaxscale plan does not read data in a bucket"
    if cfg.name == "tokens":
        try:
            return sum(token_count(file, cfg, vocab_size) for file in files), "from file headers and sizes"
        except (BadInput, OSError) as error:
            return None, f"unknown: {error}"
    if cfg.tokenizer not in ("", "bytes"):
        return None, "unknown until the text is tokenized: jaxscale prepare counts it"
    if not all(file.path.endswith(TEXT_SUFFIXES) for file in files):
        return None, "unknown until the files are unpacked: jaxscale prepare counts it"
    train_fraction = 1 - cfg.val_fraction if not cfg.val_files else 1.0
    tokens = sum(Path(file.path).stat().st_size + 1 for file in files) * train_fraction
    return round(tokens), "from file sizes, one token per byte, without held-out text"


def token_count(file: SourceFile, cfg: DataConfig, vocab_size: int) -> int:
    """Returns the number of tokens in a token file. Raises BadInput if the number is unknown."""
    if is_manifest(file.path):
        return read_manifest(file.path).content["num_tokens"]
    if is_megatron(file.path):
        return int(read_index(Path(file.path).with_suffix(".idx")).offsets[-1])
    header = read_header(Path(file.path))
    if header is not None:
        return header["num_tokens"]
    if not file.path.endswith(".bin"):
        raise BadInput(f"{file.path} has no header with the number of tokens; create the file with jaxscale prepare")
    return Path(file.path).stat().st_size // np.dtype(raw_dtype(cfg, vocab_size)).itemsize
