"""Settings of the mesh and of a training step: microbatches, losses, loss scale, guard, EMA and spike limits."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

ScheduleName = Literal["1f1b", "zero_bubble", "gpipe"]
SharingName = Literal["auto", "gather", "ulysses", "ring"]
ExchangeName = Literal["auto", "gather", "send"]
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")  # slowest link first
# Losses summed over mixture-of-experts layers. router_z_loss is the squared log-partition of the router
# (arXiv:2202.08906). balance_loss is each expert's load in the previous step times its router probability
# (arXiv:2101.03961), and row_balance_loss uses the load within a sequence (arXiv:2412.19437). Balance losses are 1 per
# layer if all experts have equal load.
EXPERT_LOSSES = ("router_z_loss", "balance_loss", "row_balance_loss")
# z_loss is the squared log-partition of the logits and keeps the log-partition near 0 (arXiv:2204.02311, section 5).
AUX_LOSSES = ("z_loss", *EXPERT_LOSSES)
MIN_WINDOW_STEPS = 10  # minimum number of steps in the window for its median to be used
# Spike limits of a loss or gradient norm, relative to the median of earlier accepted values. They accept Python floats
# and, with maximum=jnp.maximum, traced values. The guard, which decides which steps are applied, recovery and the
# health rules, which have different ratio limits (runtime/monitor/health/rule.py), share them.
SIGMA_PER_MAD = 1.4826  # standard deviation divided by median absolute deviation, for a normal distribution
MIN_SIGMA = 1e-3  # relative to the median; without it, every rounding error in a constant window would be a spike
MIN_SPIKE = 0.5  # nats per token above the median; without it, chance fluctuations of a loss near 0 would be spikes
Maximum = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each mesh axis. One axis may be -1, for all remaining devices."""

    pipeline: int = setting(1, "number of pipeline stages, each with some of the layers")
    data: int = setting(1, "number of model replicas, each with different rows of the batch")
    fsdp: int = setting(-1, "number of devices that shard parameters, gradients or moments, each with different rows")
    expert: int = setting(1, "number of devices that shard the experts of a layer, each with different rows")
    context: int = setting(1, "number of devices that shard the positions of a sequence")
    tensor: int = setting(1, "number of devices that shard each matmul")

    def __post_init__(self):
        for axis in MESH_AXES:
            size = getattr(self, axis)
            if size < 1 and size != -1:
                raise BadInput(f"{axis}={size} must be a positive number of devices, or -1 for the remaining ones")
        if len(free := [axis for axis in MESH_AXES if getattr(self, axis) == -1]) > 1:
            raise BadInput(f"only one axis may be -1, but {free} are; set the others (fsdp is -1 by default)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Settings of attention with a context axis, which shards the positions of a sequence."""

    attention: SharingName = setting(
        "auto",
        "gather: all-gather keys and values; ulysses: all-to-all between positions and heads (arXiv:2309.14509); ring: "
        "ring attention (arXiv:2310.01889); auto prints its choice and reason",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Settings of expert parallelism over mesh.expert: devices exchange either experts or tokens."""

    exchange: ExchangeName = setting(
        "auto",
        "gather: all-gather the experts of a layer; send: all-to-all of tokens to their experts and back, in the "
        "required number of rounds; auto prints its choice and reason",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Settings of mesh.pipeline: schedule, chunks and vocabulary sharding."""

    schedule: ScheduleName = setting(
        "1f1b",
        "1f1b: saves activations of a few microbatches (arXiv:1806.03377); zero_bubble: 1f1b that defers some weight "
        "gradients until a stage idles (arXiv:2401.10241); gpipe: saves activations of all (arXiv:1811.06965)",
    )
    chunks: int = setting(
        1, "chunks of layers per stage (interleaved schedule, arXiv:2104.04473); more chunks make the bubble smaller"
    )
    head: Literal["cut", "whole"] = setting(
        "cut", "cut: the vocabulary is sharded over stages; whole: the first stage embeds, the last computes the logits"
    )

    def __post_init__(self):
        if self.chunks < 1:
            raise BadInput(f"chunks={self.chunks} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Settings of the guard, which skips steps with a non-finite or very large gradient, or with a loss spike.

    spike_ratio and grad_ratio decide which steps are applied. The ratios of monitor.health only raise alerts.
    """

    max_grad_norm: float = setting(1e4, "largest norm before clipping; 0.1 to 10 is usual, 100 is suspicious")
    max_skipped_in_row: int = setting(
        20,
        "after more skipped steps in a row than this, train.recovery acts, or the run ends (exit 17)",
        may_change=True,
    )
    max_spikes_in_row: int = setting(
        10,
        "most steps in a row that are skipped only for spike_ratio or spike_sigma; the next such step is applied as a "
        "new level of the loss, and the window restarts with that step",
        may_change=True,
        read_if="train.guard.spike_ratio or train.guard.spike_sigma",
    )
    window_steps: int = setting(100, "number of latest good steps whose losses and norms are the baseline of a step")
    spike_ratio: float = setting(
        2.0,
        "skips steps whose loss is above this multiple of the window's median and half a nat above the median; "
        "1.5 skips more; 0: none. Raise it before a stage of data.mixture with a loss that much higher",
        may_change=True,
    )
    spike_sigma: float = setting(
        0.0,
        "skips steps whose loss or gradient norm is this number of robust standard deviations above its median; OLMo 2 "
        "uses 6 (arXiv:2501.00656); 0: none",
        may_change=True,
    )
    grad_ratio: float = setting(
        0.0,
        "skips steps whose gradient norm is above this multiple of optim.clip_norm, such as 3, after the first "
        f"{MIN_WINDOW_STEPS} steps; 0: none",
        may_change=True,
        read_if="optim.clip_norm",
    )

    def __post_init__(self):
        if self.max_grad_norm <= 0:
            raise BadInput(f"max_grad_norm={self.max_grad_norm} must be above 0")
        if self.max_skipped_in_row < 0:
            raise BadInput(f"max_skipped_in_row={self.max_skipped_in_row} must be at least 0")
        if self.window_steps < MIN_WINDOW_STEPS:
            raise BadInput(f"window_steps={self.window_steps} must be at least {MIN_WINDOW_STEPS}, for a stable median")
        for name in ("spike_sigma", "grad_ratio", "max_spikes_in_row"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 0; 0 disables this check")
        if self.spike_ratio and self.spike_ratio <= 1:
            raise BadInput(
                f"spike_ratio={self.spike_ratio} must be above 1, or 0 to disable it; half of losses exceed the median"
            )


DYNAMIC = "train.loss_scale.mode=auto and model.compute_dtype=auto|float16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Settings of the loss scale. A dynamic scale is halved on overflow and doubled after `growth_interval` steps."""

    mode: Literal["auto", "static"] = setting(
        "auto", "auto: dynamic in float16, 1 in other dtypes; static: always `initial`"
    )
    initial: float = setting(
        2.0**15, "first scale", read_if="train.loss_scale.mode=static or model.compute_dtype=auto|float16"
    )
    growth_interval: int = setting(2000, "good steps in a row before the scale doubles", read_if=DYNAMIC)
    max: float = setting(2.0**24, "largest scale", read_if=DYNAMIC)
    min: float = setting(1.0, "smallest scale", read_if=DYNAMIC)

    def __post_init__(self):
        if self.mode == "static" and self.initial <= 0:
            raise BadInput(f"initial={self.initial:g} must be above 0")
        if self.mode == "auto" and not 0 < self.min <= self.initial <= self.max:
            raise BadInput(f"initial={self.initial:g} must be between min={self.min:g} (above 0) and max={self.max:g}")
        if self.growth_interval < 1:
            raise BadInput(f"growth_interval={self.growth_interval} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Settings of an exponential moving average of trainable parameters, in float32 and sharded like the moments."""

    decay: float = setting(0.0, "decay rate of the average: 0.999 averages over about 1000 steps; 0: no average")
    start_step: int = setting(
        0,
        "step at which averaging begins; before it, the average equals the parameters",
        read_if="train.ema.decay",
    )

    def __post_init__(self):
        if not 0 <= self.decay < 1:
            raise BadInput(f"decay={self.decay} must be at least 0 and below 1")
        if self.start_step < 0 or self.start_step and not self.decay:
            raise BadInput(f"start_step={self.start_step} must be at least 0, and requires decay above 0")

    @property
    def on(self) -> bool:
        """True if an average is computed."""
        return self.decay > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Settings of a step: gradient accumulation, loss scaling, guard and parameter average."""

    num_microbatches: int = setting(1, "microbatches per batch, over which gradients accumulate to save memory")
    reduce_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype of gradient reductions over devices; bfloat16 halves their bytes and rounds them"
    )
    aux_losses: dict[str, float] = setting({}, f"{{auxiliary loss: weight}}; losses are {', '.join(AUX_LOSSES)}")
    guard: GuardConfig = setting(GuardConfig)
    loss_scale: LossScaleConfig = setting(LossScaleConfig)
    ema: EmaConfig = setting(EmaConfig)

    def __post_init__(self):
        if self.num_microbatches < 1:
            raise BadInput(f"num_microbatches={self.num_microbatches} must be at least 1")
        for name, weight in self.aux_losses.items():
            if name not in AUX_LOSSES:
                raise BadInput(f"aux_losses has {name!r}, which is not an auxiliary loss; use {', '.join(AUX_LOSSES)}")
            if weight < 0:
                raise BadInput(f"aux_losses.{name}={weight} must not be negative")


def ratio_limit(ratio: float, median: Any, maximum: Maximum = max) -> Any:
    """Returns the loss limit of a spike: the median times `ratio`, but at least half a nat above the median."""
    return maximum(ratio * median, median + MIN_SPIKE)


def robust_sigma(median: Any, deviation: Any, maximum: Maximum = max) -> Any:
    """Estimates the standard deviation from the median absolute deviation."""
    return maximum(SIGMA_PER_MAD * deviation, MIN_SIGMA * abs(median))


def sigma_limit(sigmas: float, median: Any, deviation: Any, maximum: Maximum = max) -> Any:
    """Returns the limit of a spike in loss or norm: `sigmas` robust standard deviations above the median."""
    return median + sigmas * robust_sigma(median, deviation, maximum)
