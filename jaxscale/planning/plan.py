"""The plan of a run: what config, machine and wishes tell without compiling, computed once, as plain data."""

import dataclasses
from typing import Any

import jax

from jaxscale.build import make_program
from jaxscale.checkpoint.write import state_bytes
from jaxscale.config import RunConfig, resolve_budget
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
class Plan:
    """The answer before the spend. Ranges go from the better to the worse MFU, or the other way, in rising order."""

    config: str
    topology: str
    platform: str
    chip: str
    num_chips: float
    num_devices: int
    num_hosts: int
    layout: str

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

    memory: tuple[MemoryRow, ...]
    memory_bytes: int
    host_bytes: int
    usable_bytes: int
    usable_why: str
    fitting_microbatches: int | None  # the fewest with which the estimate fits; None: none does
    kept: Kept | None  # what preflight found out about this very step, where that is kept

    speed: Speed
    goodput: float
    wall_seconds: Range | None
    chip_hours: Range | None
    price: Price | None
    dollars: Range | None
    watts: float | None
    pue: float
    pue_source: str
    megawatt_hours: Range | None

    checkpoint_bytes: int
    save_seconds: float
    save_source: str
    save_interval_seconds: Range | None
    best_interval_seconds: float
    between_failures_seconds: float
    kept_checkpoints: int
    kept_bytes: int
    storage_dollars_per_month: float

    data_bytes: int
    data_bytes_per_second: Range | None
    data_tokens: int | None  # of one pass over the data that exist
    data_source: str
    epochs: float | None

    deadline_seconds: float | None
    budget_dollars: float | None
    cautions: tuple[Caution, ...]

    @property
    def fits(self) -> bool:
        """Whether the estimate is within what a device has; the compiler's word where preflight kept it."""
        return (self.kept.peak_bytes if self.kept else self.memory_bytes) <= self.usable_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self) | {
            "optimal": self.optimal and self.optimal._asdict(),
            "serving": [one._asdict() for one in self.serving],
            "cautions": [one._asdict() for one in self.cautions],
            "price": self.price and self.price._asdict(),
            "fits": self.fits,
        }


def make_plan(
    cfg: RunConfig,
    topology: Topology,
    wishes: Wishes,
    *,
    measured: list[Measured] | None = None,
    kept: Kept | None = None,
) -> Plan:
    """The plan of a config on a machine of machine.open_machine().

    Args: measured: of this machine, where it is planned for. kept: what preflight knows of this step.
    Raises BadInput for a config that no such machine can run, and where the horizon cannot be known.
    """
    data_tokens, data_source = count_tokens(cfg.data, cfg.model.vocab_size)
    budget = resolve_budget(cfg, data_tokens)
    plain = dataclasses.replace(cfg, compiler={})  # options for the compiler change nothing that is planned here
    program = make_program(plain, budget, topology.devices)
    chip, devices = topology.chip, len(topology.devices)
    num_chips = devices / chip.devices_per_chip
    params, tokens = cfg.model.num_params, budget.total_steps * budget.batch_tokens
    need = memory_need(program)
    usable, usable_why = usable_memory(topology)
    found = speed(program, topology, wishes.mfu, kept.mfu_ceiling if kept else None, measured or [])
    hours = wall = dollars = energy = interval = rate = None
    price = own_price(wishes) or chip.price
    pue = wishes.pue or cost.PUE[topology.platform]
    id_bytes = cost.bytes_per_token_id(cfg.model.vocab_size)
    if found.step_seconds is not None:
        wall = found.step_seconds.times(budget.total_steps / cost.GOODPUT)
        hours = wall.times(num_chips / cost.HOUR)
        dollars = hours.times(price.dollars_per_hour) if price else None
        energy = wall.times(cost.megawatt_hours(chip.watts, num_chips, 1.0, pue)) if chip.watts else None
        if cfg.checkpoint.save_every_steps:
            interval = found.step_seconds.times(cfg.checkpoint.save_every_steps)
        rate = found.tokens_per_second.times(id_bytes)
    one_save = state_bytes(jax.tree.leaves(program.abstract_state))
    speed_of_saves = wishes.save_bytes_per_second or cost.SAVE_BYTES_PER_SECOND * topology.num_hosts
    save_seconds = one_save / speed_of_saves
    saves = cfg.checkpoint
    number = cost.kept_checkpoints(
        budget.total_steps, saves.save_every_steps, saves.keep_last, saves.keep_every_steps, saves.keep_best
    )
    between = cost.mean_seconds_between_failures(num_chips)
    islands = link_domains(topology.devices) if topology.platform != "cpu" else [0] * devices
    tensor = program.mesh.shape["tensor"]
    epochs = tokens / data_tokens if data_tokens else None
    is_decoder = cfg.model.kind == "decoder"
    return Plan(
        config=wishes.config_name,
        topology=topology.name,
        platform=topology.platform,
        chip=chip.name,
        num_chips=num_chips,
        num_devices=devices,
        num_hosts=topology.num_hosts,
        layout=mesh_layout(program.mesh),
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
        memory=memory_rows(program, need),
        memory_bytes=need.total,
        host_bytes=host_bytes(program.abstract_state),
        usable_bytes=usable,
        usable_why=usable_why,
        fitting_microbatches=fitting_parts(program, usable),
        kept=kept,
        speed=found,
        goodput=cost.GOODPUT,
        wall_seconds=wall,
        chip_hours=hours,
        price=price,
        dollars=dollars,
        watts=chip.watts,
        pue=pue,
        pue_source="as given by --pue" if wishes.pue else cost.PUE_SOURCE[topology.platform],
        megawatt_hours=energy,
        checkpoint_bytes=one_save,
        save_seconds=save_seconds,
        save_source="as given by --save_bandwidth"
        if wishes.save_bytes_per_second
        else "1 GB/s of each host, assumed; jaxscale rehearse measures it",
        save_interval_seconds=interval,
        best_interval_seconds=cost.best_save_interval(save_seconds, between),
        between_failures_seconds=between,
        kept_checkpoints=number,
        kept_bytes=number * one_save,
        storage_dollars_per_month=cost.storage_dollars_per_month(number * one_save),
        data_bytes=tokens * id_bytes,
        data_bytes_per_second=rate,
        data_tokens=data_tokens,
        data_source=data_source,
        epochs=epochs,
        deadline_seconds=wishes.deadline_seconds,
        budget_dollars=wishes.budget_dollars,
        cautions=cautions.present(
            [
                cautions.warmup_too_short(
                    params, budget.warmup_steps, budget.warmup_steps * budget.batch_tokens, cfg.optim.b2
                )
                if cfg.optim.name == "adamw"
                else None,
                cautions.rate_outside(params, tokens, budget.batch_tokens, cfg.optim.peak_lr)
                if is_decoder and cfg.optim.name == "adamw"
                else None,
                cautions.tokens_of_params(params, tokens) if is_decoder else None,
                *horizons(cfg, wishes, tokens, wall, dollars),
                cautions.batch_too_large(params, tokens, budget.batch_tokens) if is_decoder else None,
                cautions.save_interval(interval.high, save_seconds, num_chips, wall.high) if interval else None,
                cautions.tensor_over_slow_links(tensor, islands.count(islands[0]), chip),
                cautions.dtype_of_chip(cfg.model.compute_dtype, chip),
                cautions.pass_too_short(found.compute_seconds / cfg.train.num_microbatches)
                if found.compute_seconds is not None and wishes.mfu is None
                else None,
                cautions.too_many_epochs(epochs) if epochs else None,
            ]
        ),
    )


def own_price(wishes: Wishes) -> Price | None:
    """The price that was given, or None."""
    return None if wishes.price is None else Price(wishes.price, "now", "as given by --price")


def horizons(
    cfg: RunConfig, wishes: Wishes, tokens: int, wall: Range | None, dollars: Range | None
) -> list[Caution | None]:
    """What ends the run before its schedule, even at the better speed."""
    found = []
    if wishes.deadline_seconds is not None and wall is not None:
        share = min(1.0, wishes.deadline_seconds / wall.low)
        found.append(cautions.horizon_too_far(tokens, share * tokens, cfg.optim.decay, "the deadline"))
    if wishes.budget_dollars is not None and dollars is not None:
        share = min(1.0, wishes.budget_dollars / dollars.low)
        found.append(cautions.horizon_too_far(tokens, share * tokens, cfg.optim.decay, "the budget"))
    return found
