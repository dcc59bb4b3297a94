"""Estimates of step time and memory from array shapes, computed in milliseconds.

Speed is the expected MFU times the published peak, bounded by the compute and communication of the sharding. A
StepEstimate only ranks candidates for compilation and is never reported as a result. Its memory comes from
program/memory.py, its time from matmul FLOPs and a lower bound of the bytes sent by collectives.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.core.axes.pipeline_axis import PipelineAxis
from jaxscale.core.axes.pipeline_schedules import ScheduleSize
from jaxscale.core.models.config import (
    ATTENTION_ADDED,
    KEY,
    LATENT,
    MLP_GATE,
    MLP_UP,
    QUERY,
    VALUE,
    ModelConfig,
    saved_names,
)
from jaxscale.kernels.config import ATTENTION_OUT
from jaxscale.kernels.hardware import Chip, find_chip
from jaxscale.program.memory import (
    activation_bytes,
    activation_sizes,
    host_bytes,
    shard_bytes,
    stage_elements,
    stage_weight_bytes,
)
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.communication import communication_time
from jaxscale.tools.planning.cost import Range
from jaxscale.tools.planning.measured import Measured, interpolate_rate
from jaxscale.tools.planning.placeholder_devices import THIS_MACHINE
from jaxscale.tools.planning.published_mfu import published_mfu
from jaxscale.tools.planning.scaling import is_mixture
from jaxscale.tools.planning.schedule_times import bubble_formula
from jaxscale.tools.planning.topology import Topology

HOST_LINK = 16e9  # bytes/s between a device and its host, assumed (PCIe 4.0 x8); affects only the candidates' order


@dataclasses.dataclass(frozen=True)
class Speed:
    """Planned step time and throughput with their source."""

    step_seconds: Range | None  # None without a peak or a measurement
    mfu: Range | None  # None without a peak
    source: str
    tokens_per_second: Range | None
    compute_seconds: float | None  # matmuls including recomputation, at the chip's peak
    link_seconds: float | None  # lower bound of communication, assuming no overlap between links
    exposed_seconds: float | None  # part of link_seconds that matmuls do not overlap
    measured: bool = False  # True if from steps timed on this machine
    idle_seconds: float = 0.0  # idle time of a pipeline stage
    bubble: str = ""  # text such as '5.2% = (P-1)/(VM+P-1) = 7/135'
    sent_bytes: dict[str, float] = dataclasses.field(default_factory=dict)  # {mesh axis: bytes per device and step}


def plan_speed(
    program: Program, topology: Topology, requested_mfu: float | None, ceiling: float | None, measured: list[Measured]
) -> Speed:
    """Returns the planned speed. ceiling: MFU bound from preflight. Raises BadInput for --mfu without a known peak."""
    cfg = program.cfg
    step_flops = cfg.flops_per_token * cfg.tokens_per_step
    if requested_mfu is not None:
        check_peak(topology, requested_mfu)
    elif measured and topology.name == THIS_MACHINE:
        return measured_speed(program, topology, measured, step_flops)
    chip, num_devices = topology.chip, len(topology.devices)
    estimate = estimate_step(program, topology)
    communication = communication_time(program, topology)
    peak = chip.peak_flops * num_devices
    if requested_mfu is not None:
        mfu, source = Range(requested_mfu, requested_mfu), "from --mfu"
    else:
        pass_flops = step_flops / cfg.train.num_microbatches
        mfu, source = expected_mfu(topology, measured, pass_flops, is_mixture(cfg.model))
        max_mfu = step_flops / peak / estimate.cost[0]
        reason = f"from the chip's peak{', bubble' if estimate.idle_s else ''} and links for this layout"
        if ceiling is not None and ceiling < max_mfu:
            max_mfu, reason = ceiling, "from the step that jaxscale preflight compiled"
        fraction, dtype_reason = peak_fraction(chip, topology.platform, cfg.model)
        if fraction < max_mfu:
            max_mfu, reason = fraction, dtype_reason
        if max_mfu < mfu.high:
            mfu = Range(min(mfu.low, max_mfu * mfu.low / mfu.high), max_mfu)
            source += f"; at most {max_mfu:.1%} {reason}"
    seconds = mfu.divide(step_flops / peak)
    tokens_per_second, exposed = seconds.divide(cfg.tokens_per_step), communication.exposed_s(estimate.compute_s)
    return Speed(
        seconds,
        mfu,
        source,
        tokens_per_second,
        estimate.compute_s,
        communication.total_s,
        exposed,
        idle_seconds=estimate.idle_s,
        bubble=bubble_formula(program.plan.schedule_size) if program.plan.pipeline.size > 1 else "",
        sent_bytes=dict(communication.nbytes),
    )


def expected_mfu(
    topology: Topology, measured: Sequence[Measured], pass_flops: float | None = None, mixture: bool = False
) -> tuple[Range, str]:
    """Returns (MFU range, source): measured at the closest FLOPs per pass and device, otherwise published."""
    if not measured:
        return published_mfu(topology.chip, mixture)
    sizes = {id(one): math.log(one.pass_flops / one.num_devices) for one in measured}
    target = math.log(pass_flops / len(topology.devices)) if pass_flops else max(sizes.values())
    nearest = min(measured, key=lambda one: abs(sizes[id(one)] - target))
    mfu = nearest.flops_per_second / (topology.chip.peak_flops * nearest.num_devices)
    source = f"{mfu:.1%} for {nearest.spec} on {nearest.num_devices} of these chips, measured by {nearest.by}"
    return Range(0.85 * mfu, min(1.0, 1.15 * mfu)), f"{source}, {nearest.date}, +-15%"


def check_peak(topology: Topology, requested_mfu: float) -> None:
    """Raises BadInput if --mfu is passed for a device with an unknown peak."""
    if find_chip(kind := topology.devices[0].device_kind) is None:
        raise BadInput(f"--mfu={requested_mfu:g} is a fraction of the peak, which is unknown for {kind!r}; omit --mfu")


def peak_fraction(chip: Chip, platform: str, model: ModelConfig) -> tuple[float, str]:
    """Returns (highest fraction of the peak in the compute dtype, reason). Sources: jax.lax.Precision, TF32."""
    if model.compute_dtype != "float32" or platform == "cpu":
        return 1.0, ""
    highest = model.matmul_precision == "highest"
    if platform == "tpu":
        return (1 / 6, "in float32 as six passes of bfloat16") if highest else (1.0, "")
    if chip.bfloat16 and not highest:
        return 0.5, "in float32 as TF32"
    return (chip.fp32_flops / chip.peak_flops, "in float32 without matrix units") if chip.fp32_flops else (1.0, "")


def measured_speed(program: Program, topology: Topology, measured: list[Measured], step_flops: float) -> Speed:
    """Returns the speed from steps timed on this machine, +-15% because other programs affect the timings."""
    cfg = program.cfg
    num_microbatches = cfg.train.num_microbatches
    rate, sources = interpolate_rate(measured, cfg.model.compute_dtype, step_flops / num_microbatches)
    seconds = Range(0.85, 1.15).times(step_flops / rate)
    chip = find_chip(sources[0].device_kind)
    mfu = seconds.divide(step_flops / (chip.peak_flops * len(topology.devices))) if chip else None
    names = " and ".join(f"{one.spec} ({one.flops_per_second / 1e9:,.0f} GFLOP/s, {one.date})" for one in sources)
    source = f"measured on this machine by {sources[0].by}: {names}, +-15%"
    return Speed(seconds, mfu, source, seconds.divide(cfg.tokens_per_step), None, None, None, measured=True)


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """Estimated memory and time of a step on one device."""

    state_bytes: int  # parameters, moments and gradients in device memory
    activation_bytes: int
    compute_s: float
    link_s: float  # sum over all links and the host link, assuming no overlap
    exposed_s: float = 0.0  # part of link_s that matmuls do not overlap
    idle_s: float = 0.0  # idle time of a pipeline stage
    exchange: str = ""  # method of expert parallelism: "gather" or "send"

    def memory(self, scale: float = 1.0) -> float:
        """Returns peak bytes, with activations and temporaries scaled by `scale`."""
        return self.state_bytes + scale * self.activation_bytes

    @property
    def cost(self) -> tuple[float, float]:
        """Sort key for candidates: (time with exposed communication, time without any overlap)."""
        return (self.least_s + self.exposed_s, self.least_s + self.link_s)

    @property
    def least_s(self) -> float:
        """Time of matmuls plus pipeline idle time."""
        return self.compute_s + self.idle_s


def estimate_step(program: Program, topology: Topology) -> StepEstimate:
    """Returns the estimated memory and time of a step."""
    cfg = program.cfg
    state = (program.abstract_state.params, program.abstract_state.opt_state, program.abstract_state.ema)
    params = shard_bytes(state[0]) + host_bytes(state[0])
    shape = program.mesh.shape
    num_shards = math.prod(shape[axis] for axis in ("fsdp", "expert", "context", "tensor"))  # of one replica
    gradients = params if cfg.rules == "zero1" else 4 * cfg.model.num_params // num_shards
    gradients = shard_bytes(program.abstract_grads) if cfg.lora.on else gradients
    if weights := stage_weight_bytes(program):
        gradients = 4 * sum(stage_elements(program, program.abstract_grads)) + weights
    flops = cfg.flops_per_token + recomputed_flops(cfg.model, cfg.seq_len) + recomputed_row_flops(program)
    if program.plan.attention.name == "splash":  # 7 backward matmuls, but the formula has 4 (preflight/hlo_costs.py)
        flops += 3 * 2 * cfg.model.query_width * cfg.model.visible_keys(cfg.seq_len)
    passes = 2 * cfg.train.num_microbatches  # weights move to the device in forward and backward
    host_traffic = 2 * host_bytes(state) + passes * host_bytes(state[0])  # the update reads and writes the state
    compute = flops * cfg.tokens_per_step / program.mesh.size / topology.chip.peak_flops
    idle = idle_ratio(program.plan.pipeline, program.plan.schedule_size, head_flops_fraction(cfg))
    communication, host = communication_time(program, topology), host_traffic / HOST_LINK
    return StepEstimate(
        state_bytes=shard_bytes(state) + gradients,
        activation_bytes=activation_bytes(program),
        compute_s=compute,
        link_s=communication.total_s + host,
        exposed_s=max(communication.exposed_s(compute), host - compute),
        idle_s=compute * idle + communication.idle_s,
        exchange=program.plan.expert_exchange.name,
    )


def idle_ratio(pipeline: PipelineAxis, schedule: ScheduleSize, head: float) -> float:
    """Returns a stage's idle time in a step, relative to its matmul time if all stages had equal work.

    A stage waits while the pipeline fills and drains, for stages with more layers, and for the output projection if
    only the last stage computes it. head: fraction of all matmul FLOPs in the output projection.
    """
    if pipeline.size == 1:
        return 0.0
    work = int(pipeline.layers.max()) + 1 + pipeline.leading_layers
    layers = pipeline.chunk_work * pipeline.num_chunks * pipeline.size / work * schedule.slowdown()
    return (1 - head) * (layers - 1) + head * (0 if pipeline.shards_vocab else pipeline.size - 1)


def recomputed_row_flops(program: Program) -> float:
    """Returns FLOPs per token of expert matmuls that all-to-all rounds recompute despite the remat policy.

    All-to-all rounds save no activations (kernels/matmul/expert_all_to_all.py).
    """
    model, experts = program.cfg.model, program.cfg.model.experts
    if experts is None or program.plan.expert.size == 1:
        return 0.0
    saved, hidden = saved_names(model), {MLP_GATE, MLP_UP}
    recomputed = hidden if saved is None else hidden & (saved | set(model.remat_offload))
    moe_layers = model.num_layers - experts.first_dense
    return len(recomputed) * moe_layers * 2.0 * model.embed_dim * experts.chosen * experts.mlp_dim


def head_flops_fraction(cfg: RunConfig) -> float:
    """Returns the output projection's fraction of a step's FLOPs, including recomputation."""
    flops = cfg.flops_per_token + recomputed_flops(cfg.model, cfg.seq_len)
    return 6 * cfg.model.vocab_size * cfg.model.embed_dim / flops


def recomputed_flops(model: ModelConfig, seq_len: int) -> float:
    """Returns the forward FLOPs per token that the backward pass recomputes under the remat policy."""
    saved = saved_names(model)
    if saved is None:
        return 0.0
    sizes, D = activation_sizes(model, 1), model.embed_dim
    costs = {name: 2 * D * sizes[name] for name in (QUERY, KEY, VALUE, MLP_GATE, MLP_UP) if name in sizes}
    if model.latent_width:
        costs |= latent_flops(model)
    costs[ATTENTION_OUT] = seq_len * (model.query_width + model.result_width)  # two matmuls over half the keys
    costs[ATTENTION_ADDED] = 2 * D * model.result_width
    stored = saved | set(model.remat_offload)
    return float(model.num_layers * sum(cost for name, cost in costs.items() if name not in stored))


def latent_flops(model: ModelConfig) -> dict[str, float]:
    """Returns {activation: FLOPs per token} for the projections of latent attention."""
    matrix_flops = {name.removeprefix("attention."): 2 * rows * size for name, (rows, size) in model.matrices().items()}
    values = model.value_width / model.matrices()["attention.wkv_up"][1]  # the rest are keys
    return {
        LATENT: matrix_flops.get("wq_down", 0) + matrix_flops["wkv_down"],
        QUERY: matrix_flops["wq_up" if "wq_up" in matrix_flops else "wq"],
        KEY: (1 - values) * matrix_flops["wkv_up"],
        VALUE: values * matrix_flops["wkv_up"],
    }
