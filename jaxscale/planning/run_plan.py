"""A plan as plain data: groups of figures with their units in their names, None where a figure is not known."""

import dataclasses
from typing import Any

from jaxscale.hardware import Price
from jaxscale.planning import scaling
from jaxscale.planning.cautions import Caution
from jaxscale.planning.cost import Range
from jaxscale.planning.measured import Kept
from jaxscale.planning.memory import MemoryRow
from jaxscale.planning.speed import Speed


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
    exchange: str  # how tokens and experts meet on the devices of mesh.expert, and why so; '' without that axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained, on how many tokens, in which batches."""

    params: int
    active_params: int  # that a token goes through
    flops_per_token: float  # by the model's own formula, attention included
    flops_per_token_6n: float
    train_flops: float
    tokens: int  # of whole steps
    total_steps: int
    warmup_steps: int
    warmup_tokens: int  # of whole steps
    batch_tokens: int  # the largest
    ramp: tuple[tuple[int, int], ...]  # (first batch, tokens) of each size of a ramp; () where there is one size
    seq_len_ramp: tuple[tuple[int, int], ...]  # (first batch, tokens in a row) of each length; () where there is one
    rows: int
    seq_len: int
    num_microbatches: int
    rows_per_pass: int  # on one batch shard
    routing: str  # what is taken for granted of a router, '' for a model without one
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
    least_devices: int  # that hold parameters, moments and gradients, shared evenly by all of them
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
    cautions: tuple[Caution, ...] = ()

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
