"""The plan of a run: what config, machine and wishes tell without compiling, computed once, as plain data."""

import dataclasses
from typing import Any

import jax

from jaxscale.build import Program, make_program
from jaxscale.checkpoint.write import state_bytes
from jaxscale.config import Budget, RunConfig, resolve_budget
from jaxscale.hardware import Price
from jaxscale.planning import cautions, cost, scaling
from jaxscale.planning.cautions import Caution
from jaxscale.planning.cost import Range
from jaxscale.planning.dataset import count_tokens
from jaxscale.planning.layout import fitting_parts, memory_rows
from jaxscale.planning.measured import Kept, Measured
from jaxscale.planning.memory import host_bytes, memory_need, usable_memory
from jaxscale.planning.speed import Speed, speed
from jaxscale.planning.tables import MemoryRow
from jaxscale.planning.topology import Topology, link_domains
from jaxscale.sharding.mesh import mesh_layout


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What it runs on."""

    topology: str
    platform: str
    chip: str
    num_chips: float
    num_devices: int
    num_hosts: int
    layout: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained, on how many tokens, in which batches."""

    params: int
    flops_per_token: float  # by the model's own formula, attention included
    flops_per_token_6n: float
    train_flops: float
    tokens: int  # of whole steps
    total_steps: int
    warmup_steps: int
    batch_tokens: int
    rows: int
    seq_len: int
    num_microbatches: int
    rows_per_pass: int  # on one batch shard
    optimal: scaling.Alternative | None  # None, as the next two, for models that the rule was not found for
    serving: tuple[scaling.Alternative, ...]
    loss: float | None  # by the published fit; only for comparing sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """The memory of one device."""

    memory: tuple[MemoryRow, ...]
    memory_bytes: int
    host_bytes: int
    usable_bytes: int
    usable_why: str
    fitting_microbatches: int | None  # the fewest with which the estimate fits; None: none does
    kept: Kept | None  # what preflight found out about this very step, where that is kept

    @property
    def fits(self) -> bool:
        """Whether the estimate is within what a device has; the compiler's word where preflight kept it."""
        return (self.kept.peak_bytes if self.kept else self.memory_bytes) <= self.usable_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Time:
    """How long it takes."""

    speed: Speed
    goodput: float
    wall_seconds: Range | None
    deadline_seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Money:
    """What it costs, in dollars and energy."""

    chip_hours: Range | None
    price: Price | None
    dollars: Range | None
    watts: float | None
    pue: float
    pue_source: str
    megawatt_hours: Range | None
    budget_dollars: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saves:
    """Checkpoints: size, time, how often, what stays."""

    checkpoint_bytes: int
    save_seconds: float
    save_source: str
    save_interval_seconds: Range | None
    best_interval_seconds: float
    between_failures_seconds: float
    kept_checkpoints: int
    kept_bytes: int
    storage_dollars_per_month: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """What is read."""

    data_bytes: int
    data_bytes_per_second: Range | None
    data_tokens: int | None  # of one pass over the data that exist
    data_source: str
    epochs: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The answer before the spend. Ranges go from the better to the worse MFU, or the other way, in rising order."""

    config: str
    machine: Machine
    work: Work
    device: Device
    time: Time
    money: Money
    saves: Saves
    data: Data
    cautions: tuple[Caution, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, on one level."""
        parts = (self.machine, self.work, self.device, self.time, self.money, self.saves, self.data)
        flat = {"config": self.config}
        for part in parts:
            flat |= dataclasses.asdict(part)
        return flat | {
            "optimal": self.work.optimal and self.work.optimal._asdict(),
            "serving": [one._asdict() for one in self.work.serving],
            "cautions": [one._asdict() for one in self.cautions],
            "price": self.money.price and self.money.price._asdict(),
            "fits": self.device.fits,
        }


def make_plan(
    cfg: RunConfig,
    topology: Topology,
    wishes: Wishes,
    *,
    measured: list[Measured] | None = None,
    kept: Kept | None = None,
) -> RunPlan:
    """The plan of a config on a machine of machine.open_machine().

    Args: measured: of this machine, where it is planned for. kept: what preflight knows of this step.
    Raises BadInput for a config that no such machine can run, and where the horizon cannot be known.
    """
    data_tokens, data_source = count_tokens(cfg.data, cfg.model.vocab_size)
    budget = resolve_budget(cfg, data_tokens)
    plain = dataclasses.replace(cfg, compiler={})  # options for the compiler change nothing that is planned here
    program = make_program(plain, budget, topology.devices)
    machine = plan_machine(topology, program)
    work = plan_work(cfg, budget, program)
    found = speed(program, topology, wishes.mfu, kept.mfu_ceiling if kept else None, measured or [])
    wall = found.step_seconds and found.step_seconds.times(budget.total_steps / cost.GOODPUT)
    time = Time(speed=found, goodput=cost.GOODPUT, wall_seconds=wall, deadline_seconds=wishes.deadline_seconds)
    money = plan_money(wishes, topology, machine.num_chips, wall)
    saves = plan_saves(cfg, wishes, machine, program, work.total_steps, found)
    id_bytes = cost.bytes_per_token_id(cfg.model.vocab_size)
    data = Data(
        data_bytes=work.tokens * id_bytes,
        data_bytes_per_second=found.step_seconds and found.tokens_per_second.times(id_bytes),
        data_tokens=data_tokens,
        data_source=data_source,
        epochs=work.tokens / data_tokens if data_tokens else None,
    )
    told = (
        *cautions_of_optimizer(cfg, work),
        *cautions_of_horizon(cfg, work, time, money),
        *cautions_of_machine(cfg, work, topology, program, time, saves, given=wishes.mfu is not None),
        cautions.too_many_epochs(data.epochs) if data.epochs else None,
    )
    return RunPlan(
        config=wishes.config_name,
        machine=machine,
        work=work,
        device=plan_device(program, topology, kept),
        time=time,
        money=money,
        saves=saves,
        data=data,
        cautions=cautions.present(told),
    )


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
    )


def plan_work(cfg: RunConfig, budget: Budget, program: Program) -> Work:
    """Parameters, operations, tokens and batches; the sizes that a published rule prefers, for decoders."""
    params, tokens = cfg.model.num_params, budget.total_steps * budget.batch_tokens
    is_decoder = cfg.model.kind == "decoder"
    return Work(
        params=params,
        flops_per_token=cfg.flops_per_token,
        flops_per_token_6n=scaling.train_flops(params, 1),
        train_flops=cfg.flops_per_token * tokens,
        tokens=tokens,
        total_steps=budget.total_steps,
        warmup_steps=budget.warmup_steps,
        batch_tokens=budget.batch_tokens,
        rows=cfg.rows_per_step,
        seq_len=cfg.seq_len,
        num_microbatches=cfg.train.num_microbatches,
        rows_per_pass=cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards,
        optimal=scaling.optimal_alternative(scaling.train_flops(params, tokens)) if is_decoder else None,
        serving=tuple(scaling.serving_alternatives(params, tokens)) if is_decoder else (),
        loss=scaling.fitted_loss(params, tokens) if is_decoder else None,
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
        fitting_microbatches=fitting_parts(program, usable),
        kept=kept,
    )


def plan_money(wishes: Wishes, topology: Topology, num_chips: float, wall: Range | None) -> Money:
    """Chip-hours, dollars and energy of this wall time, where it is known."""
    chip, pue = topology.chip, wishes.pue or cost.PUE[topology.platform]
    given = None if wishes.price is None else Price(wishes.price, "now", "as given by --price")
    price = given or chip.price
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


def plan_saves(
    cfg: RunConfig, wishes: Wishes, machine: Machine, program: Program, total_steps: int, found: Speed
) -> Saves:
    """Size and time of a checkpoint, how often one is due, and what all that stay take."""
    saves, given = cfg.checkpoint, wishes.save_bytes_per_second
    one_save = state_bytes(jax.tree.leaves(program.abstract_state))
    save_seconds = one_save / (given or cost.SAVE_BYTES_PER_SECOND * machine.num_hosts)
    between = cost.mean_seconds_between_failures(machine.num_chips)
    steps = found.step_seconds if saves.save_every_steps else None
    number = cost.kept_checkpoints(
        total_steps, saves.save_every_steps, saves.keep_last, saves.keep_every_steps, saves.keep_best
    )
    assumed = "1 GB/s of each host, assumed; jaxscale rehearse measures it"
    return Saves(
        checkpoint_bytes=one_save,
        save_seconds=save_seconds,
        save_source="as given by --save_bandwidth" if given else assumed,
        save_interval_seconds=steps and steps.times(saves.save_every_steps),
        best_interval_seconds=cost.best_save_interval(save_seconds, between),
        between_failures_seconds=between,
        kept_checkpoints=number,
        kept_bytes=number * one_save,
        storage_dollars_per_month=cost.storage_dollars_per_month(number * one_save),
    )


def cautions_of_optimizer(cfg: RunConfig, work: Work) -> list[Caution | None]:
    """What is unwise about warmup and rate, and about the amount of data; the rules were found for AdamW, decoders."""
    found, is_decoder = [], cfg.model.kind == "decoder"
    if cfg.optim.name == "adamw":
        warmup_tokens = work.warmup_steps * work.batch_tokens
        found.append(cautions.warmup_too_short(work.params, work.warmup_steps, warmup_tokens, cfg.optim.b2))
        if is_decoder:
            found.append(cautions.rate_outside(work.params, work.tokens, work.batch_tokens, cfg.optim.peak_lr))
    if is_decoder:
        found.append(cautions.tokens_of_params(work.params, work.tokens))
    return found


def cautions_of_horizon(cfg: RunConfig, work: Work, time: Time, money: Money) -> list[Caution | None]:
    """What ends the run before its schedule, even at the better speed."""
    found = []
    if time.deadline_seconds is not None and time.wall_seconds is not None:
        share = min(1.0, time.deadline_seconds / time.wall_seconds.low)
        found.append(cautions.horizon_too_far(work.tokens, share * work.tokens, cfg.optim.decay, "the deadline"))
    if money.budget_dollars is not None and money.dollars is not None:
        share = min(1.0, money.budget_dollars / money.dollars.low)
        found.append(cautions.horizon_too_far(work.tokens, share * work.tokens, cfg.optim.decay, "the budget"))
    return found


def cautions_of_machine(
    cfg: RunConfig, work: Work, topology: Topology, program: Program, time: Time, saves: Saves, *, given: bool
) -> list[Caution | None]:
    """What is unwise about batch, checkpoints, links, types and length of a pass. given: --mfu was."""
    chip, devices = topology.chip, topology.devices
    islands = link_domains(devices) if topology.platform != "cpu" else [0] * len(devices)
    interval, compute = saves.save_interval_seconds, time.speed.compute_seconds
    num_chips = len(devices) / chip.devices_per_chip
    found = []
    if cfg.model.kind == "decoder":
        found.append(cautions.batch_too_large(work.params, work.tokens, work.batch_tokens))
    if interval is not None:
        found.append(cautions.save_interval(interval.high, saves.save_seconds, num_chips, time.wall_seconds.high))
    found += [
        cautions.tensor_over_slow_links(program.mesh.shape["tensor"], islands.count(islands[0]), chip),
        cautions.dtype_of_chip(cfg.model.compute_dtype, chip),
    ]
    if compute is not None and not given:
        found.append(cautions.pass_too_short(compute / cfg.train.num_microbatches))
    return found
