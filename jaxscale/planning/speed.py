"""How fast a step may be, and how large: guesses from shapes alone, made in milliseconds.

A speed is a share of the peak that was published, bounded by what the layout must compute and send. An Estimate ranks
what is worth compiling, and is never reported as a result: memory comes from planning/memory.py, time from counting
products and the bytes of the collectives that the layout needs at the least.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.hardware import Chip, find_chip
from jaxscale.models.config import (
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
from jaxscale.ops.config import ATTENTION_OUT
from jaxscale.planning.cost import Range
from jaxscale.planning.experts import exchange_of, known_experts, resting_parts
from jaxscale.planning.machine import HERE
from jaxscale.planning.measured import Measured, rate_for
from jaxscale.planning.memory import (
    activation_bytes,
    activation_sizes,
    host_bytes,
    shard_bytes,
    stage_weights,
)
from jaxscale.planning.reached import reached_on
from jaxscale.planning.scaling import is_mixture
from jaxscale.planning.sending import plan_sending
from jaxscale.planning.stages import held_numbers, idle_share, stages_of
from jaxscale.planning.topology import Topology
from jaxscale.system.exits import BadInput

HOST_LINK = 16e9  # bytes/s between a device and its host, assumed: PCIe 4.0 x8; only the order of guesses rests on it


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a step may take."""

    step_seconds: Range | None  # None where neither a peak nor a measurement is known
    mfu: Range | None  # None where the chip has no peak
    source: str
    tokens_per_second: Range | None
    compute_seconds: float | None  # least time of the products, recomputation included, at the chip's peak
    link_seconds: float | None  # least time of the bytes that the layout must send, one link after another
    exposed_seconds: float | None  # the part of them for which products stand still (sending.plan_sending)
    measured: bool = False  # by a step that was timed on this machine, and not by a share of the peak
    idle_seconds: float = 0.0  # that a stage of a pipeline waits for others
    bubble: str = ""  # of a pipeline's schedule: '5.2% = (P-1)/(VM+P-1) = 7/135'
    sent_bytes: dict[str, float] = dataclasses.field(default_factory=dict)  # of a device and step, by mesh axis


def speed(
    program: Program, topology: Topology, wished_mfu: float | None, ceiling: float | None, measured: list[Measured]
) -> Speed:
    """The speed of a program. ceiling: the MFU that a compiled step can reach at most, where that is known.

    measured: of this very machine, where it is the one that is planned for; else of its kind of chip. Raises BadInput
    for a wished MFU of a device whose peak is not known.
    """
    cfg = program.cfg
    step_flops = cfg.flops_per_token * cfg.tokens_per_step
    if wished_mfu is not None:
        check_peak(topology, wished_mfu)
    elif measured and topology.name == HERE:
        return measured_speed(program, topology, measured, step_flops)
    chip, number = topology.chip, len(topology.devices)
    guess = estimate(program, topology)
    sending = plan_sending(program, topology)
    peak = chip.peak_flops * number
    if wished_mfu is not None:
        mfu, source = Range(wished_mfu, wished_mfu), "as given by --mfu"
    else:
        pass_flops = step_flops / cfg.train.num_microbatches
        mfu, source = usual_mfu(topology, measured, pass_flops, is_mixture(cfg.model))
        most = step_flops / peak / guess.cost[0]
        why = f"by the chip's peak{', bubble' if guess.idle_s else ''} and links for this layout"
        if ceiling is not None and ceiling < most:
            most, why = ceiling, "by the compiled step of jaxscale preflight"
        share, in_type = share_of_peak(chip, topology.platform, cfg.model)
        if share < most:
            most, why = share, in_type
        if most < mfu.high:
            mfu = Range(min(mfu.low, most * mfu.low / mfu.high), most)
            source += f"; at most {most:.1%} {why}"
    seconds = mfu.under(step_flops / peak)
    tokens_per_second, exposed = seconds.under(cfg.tokens_per_step), sending.exposed_s(guess.compute_s)
    stages = stages_of(cfg, program.mesh.shape)
    return Speed(
        seconds,
        mfu,
        source,
        tokens_per_second,
        guess.compute_s,
        sending.total_s,
        exposed,
        idle_seconds=guess.idle_s,
        bubble=stages.formula if stages.on else "",
        sent_bytes=dict(sending.nbytes),
    )


def usual_mfu(
    topology: Topology, measured: Sequence[Measured], pass_flops: float | None = None, mixture: bool = False
) -> tuple[Range, str]:
    """(MFU to expect of a large run, the source): as it was measured on such chips, or else as it was published.

    measured: of the kind of chip; the one counts whose pass is nearest in size, a device for a device.
    """
    if not measured:
        return reached_on(topology.chip, mixture)
    sizes = {id(one): math.log(one.pass_flops / one.num_devices) for one in measured}
    wanted = math.log(pass_flops / len(topology.devices)) if pass_flops else max(sizes.values())
    near = min(measured, key=lambda one: abs(sizes[id(one)] - wanted))
    share = near.flops_per_second / (topology.chip.peak_flops * near.num_devices)
    source = f"{share:.1%} of {near.spec} on {near.num_devices} such chips, measured by {near.by}, {near.date}"
    return Range(0.85 * share, min(1.0, 1.15 * share)), f"{source}, give or take 15%"


def check_peak(topology: Topology, wished_mfu: float) -> None:
    """Raises BadInput where a share of the peak says nothing, for the peak is not known."""
    if find_chip(kind := topology.devices[0].device_kind) is None:
        raise BadInput(f"--mfu={wished_mfu:g} is a share of the peak, and none of {kind!r} is known; leave --mfu out")


def share_of_peak(chip: Chip, platform: str, model: ModelConfig) -> tuple[float, str]:
    """(part of the chip's peak that products of the model's type can reach, why).

    Source: jax.lax.Precision says what float32 becomes; TF32's peak is half of bfloat16's (NVIDIA A100: 156 of 312).
    """
    if model.compute_dtype != "float32" or platform == "cpu":
        return 1.0, ""
    highest = model.matmul_precision == "highest"
    if platform == "tpu":
        return (1 / 6, "in float32 as six passes of bfloat16") if highest else (1.0, "")
    if chip.bfloat16 and not highest:
        return 0.5, "in float32 as TF32"
    return (chip.fp32_flops / chip.peak_flops, "in float32 without matrix units") if chip.fp32_flops else (1.0, "")


def measured_speed(program: Program, topology: Topology, measured: list[Measured], step_flops: float) -> Speed:
    """The speed by what was timed here, give or take 15%: other programs on the machine move it that much."""
    cfg = program.cfg
    parts = cfg.train.num_microbatches
    rate, used = rate_for(measured, cfg.model.compute_dtype, step_flops / parts)
    seconds = Range(0.85, 1.15).times(step_flops / rate)
    chip = find_chip(used[0].device_kind)
    mfu = seconds.under(step_flops / (chip.peak_flops * len(topology.devices))) if chip else None
    names = " and ".join(f"{one.spec} ({one.flops_per_second / 1e9:,.0f} GFLOP/s, {one.date})" for one in used)
    source = f"measured here by {used[0].by}: {names}, give or take 15%"
    return Speed(seconds, mfu, source, seconds.under(cfg.tokens_per_step), None, None, None, measured=True)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A guess, of one device and step."""

    state_bytes: int  # parameters, moments and gradients in the device's own memory
    activation_bytes: int
    compute_s: float
    link_s: float  # on all links, one after another, and to the host
    exposed_s: float = 0.0  # the part of link_s for which products stand still
    idle_s: float = 0.0  # that a stage of a pipeline waits for the others
    exchange: str = ""  # how devices that share experts bring them and tokens together: "gather" or "send"

    def memory(self, scale: float = 1.0) -> float:
        """Bytes at the peak, with activations and temporaries `scale` times as large as guessed."""
        return self.state_bytes + scale * self.activation_bytes

    @property
    def cost(self) -> tuple[float, float]:
        """What candidates are sorted by: the time with what is exposed, then the time if nothing overlaps."""
        return (self.least_s + self.exposed_s, self.least_s + self.link_s)

    @property
    def least_s(self) -> float:
        """Products, and what a stage waits for those of others."""
        return self.compute_s + self.idle_s


def estimate(program: Program, topology: Topology) -> Estimate:
    """The guess for a program. Its cfg may differ in remat and microbatches from the one it was made of."""
    cfg = program.cfg
    state = (program.abstract_state.params, program.abstract_state.opt_state, program.abstract_state.ema)
    params = shard_bytes(state[0]) + host_bytes(state[0])
    shape = program.mesh.shape
    sharing = math.prod(shape[axis] for axis in ("fsdp", "expert", "context", "tensor"))  # one copy of the state
    gradients = params if cfg.rules == "zero1" else 4 * cfg.model.num_params // sharing
    gradients = shard_bytes(program.abstract_grads) if cfg.lora.on else gradients
    if weights := stage_weights(program):
        gradients = 4 * sum(held_numbers(program, program.abstract_grads)) + weights
    flops = cfg.flops_per_token + recomputed_flops(cfg.model, cfg.seq_len) + scores_again_flops(program)
    flops += rows_again_flops(program)
    passes = 2 * cfg.train.num_microbatches  # of weights to the device, forward and backward
    moved = 2 * host_bytes(state) + passes * host_bytes(state[0])  # and there and back when the step renews it
    compute = flops * cfg.tokens_per_step / program.mesh.size / topology.chip.peak_flops
    sending, host = plan_sending(program, topology), moved / HOST_LINK
    return Estimate(
        state_bytes=shard_bytes(state) + gradients,
        activation_bytes=activation_bytes(program),
        compute_s=compute,
        link_s=sending.total_s + host,
        exposed_s=max(sending.exposed_s(compute), host - compute),
        idle_s=compute * idle_share(stages_of(cfg, program.mesh.shape), head_share(cfg)) + sending.idle_s,
        exchange=exchange_of(program).form,
    )


def scores_again_flops(program: Program) -> float:
    """Operations per token by which splash attention's backward pass exceeds the 4 products of the formula.

    It has two kernels, of 4 and of 3 products, that each compute the scores again (ahead/hlo_costs.py).
    """
    if program.attention != "splash":
        return 0.0
    model = program.cfg.model
    return 3 * 2 * model.query_width * model.visible_keys(program.cfg.seq_len)


def rows_again_flops(program: Program) -> float:
    """Operations per token of experts' first two products that are done again going back, although the remat policy
    keeps their results: where rows are sent, none of a round is kept (ops/expert_all_to_all.py)."""
    model = program.cfg.model
    if resting_parts(program) == 1:
        return 0.0
    own = known_experts(model)
    kept, both = saved_names(model), {MLP_GATE, MLP_UP}
    held = both if kept is None else both & (kept | set(model.remat_offload))
    return len(held) * (model.num_layers - own.first_dense) * 2.0 * model.embed_dim * own.chosen * own.mlp_dim


def head_share(cfg: RunConfig) -> float:
    """The output projection's part of a step's operations, recomputation included."""
    flops = cfg.flops_per_token + recomputed_flops(cfg.model, cfg.seq_len)
    return 6 * cfg.model.vocab_size * cfg.model.embed_dim / flops


def recomputed_flops(model: ModelConfig, seq_len: int) -> float:
    """Operations per token of the forward pass that the backward pass does again under the remat policy."""
    kept = saved_names(model)
    if kept is None:
        return 0.0
    sizes, D = activation_sizes(model, 1), model.embed_dim
    costs = {name: 2 * D * sizes[name] for name in (QUERY, KEY, VALUE, MLP_GATE, MLP_UP) if name in sizes}
    if model.latent_width:
        costs |= latent_costs(model)
    costs[ATTENTION_OUT] = seq_len * (model.query_width + model.result_width)  # two products over half the keys
    costs[ATTENTION_ADDED] = 2 * D * model.result_width
    held = kept | set(model.remat_offload)
    return float(model.num_layers * sum(cost for name, cost in costs.items() if name not in held))


def latent_costs(model: ModelConfig) -> dict[str, float]:
    """The same of each activation that latent attention makes before its scores."""
    of_matrix = {name.removeprefix("attention."): 2 * rows * size for name, (rows, size) in model.matrices().items()}
    values = model.value_width / model.matrices()["attention.wkv_up"][1]  # the rest is keys
    return {
        LATENT: of_matrix.get("wq_down", 0) + of_matrix["wkv_down"],
        QUERY: of_matrix["wq_up" if "wq_up" in of_matrix else "wq"],
        KEY: (1 - values) * of_matrix["wkv_up"],
        VALUE: values * of_matrix["wkv_up"],
    }
