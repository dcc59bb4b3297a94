"""Data classes of a plan. Unknown values are None."""

import dataclasses
from typing import Any

from jaxscale.kernels.hardware import Price
from jaxscale.tools.planning import scaling
from jaxscale.tools.planning.cautions import Caution
from jaxscale.tools.planning.cost import Range
from jaxscale.tools.planning.measured import CompiledStep
from jaxscale.tools.planning.memory import MemoryRow
from jaxscale.tools.planning.speed import Speed


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedMachine:
    """The machine and the mesh."""

    topology: str
    platform: str
    chip: str
    num_chips: float
    num_devices: int
    num_hosts: int
    layout: str
    exchange: str  # expert exchange method with its reason, or '' without mesh.expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Model size, training tokens and batches."""

    params: int
    active_params: int  # parameters used per token
    flops_per_token: float  # by the model's formula, including attention
    flops_per_token_6n: float
    train_flops: float
    tokens: int  # tokens of whole steps
    total_steps: int
    warmup_steps: int
    warmup_tokens: int  # tokens of whole steps
    batch_tokens: int  # the largest batch of the run
    ramp: tuple[tuple[int, int], ...]  # (first batch, tokens per batch) of each stage; () without a ramp
    seq_len_ramp: tuple[tuple[int, int], ...]  # (first batch, sequence length) of each stage; () without a ramp
    rows: int
    seq_len: int
    num_microbatches: int
    rows_per_pass: int  # sequences per batch shard and microbatch
    routing: str  # assumption about expert routing, or '' for a dense model
    optimal: scaling.Alternative | None  # compute-optimal size; None if published laws do not cover the model
    serving: tuple[scaling.Alternative, ...]  # smaller sizes with the same loss; () if not covered
    loss: float | None  # by the published fit, only for comparing sizes; None if not covered


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of one device."""

    memory: tuple[MemoryRow, ...]
    memory_bytes: int
    host_bytes: int
    usable_bytes: int
    usable_why: str
    least_devices: int  # smallest number of devices that fit parameters, moments and gradients, sharded evenly
    fitting_microbatches: int | None  # smallest number that fits by the estimate; None if none fits
    kept: CompiledStep | None  # preflight's result for this step

    @property
    def fits(self) -> bool:
        """True if the peak memory fits, as reported by the compiler if preflight ran, otherwise as estimated."""
        return (self.kept.peak_bytes if self.kept else self.memory_bytes) <= self.usable_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Time:
    """Speed and wall time."""

    speed: Speed
    goodput: float
    wall_seconds: Range | None
    deadline_seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Money:
    """Cost in dollars and energy."""

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
    """Size, time, interval and storage of checkpoints."""

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
    """Training data."""

    data_bytes: int
    data_bytes_per_second: Range | None
    data_tokens: int | None  # tokens of one epoch
    data_source: str
    epochs: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run. Values that depend on the MFU are ranges, with the lower value first."""

    config: str
    machine: PlannedMachine
    work: Work
    device: DeviceMemory
    time: Time
    money: Money
    saves: Saves
    data: Data
    cautions: tuple[Caution, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as a flat dict for JSON."""
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
