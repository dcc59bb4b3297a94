"""Mixture of experts by arithmetic: how tokens reach their experts, and the bytes that this holds and sends.

Routing is unknown before training. It is assumed balanced: every expert gets the same number of rows, so one all-to-all
round is enough and every device multiplies as many rows.
"""

import math
from typing import NamedTuple

from jaxscale.build import Program
from jaxscale.core.axes.batch_axes import LANES
from jaxscale.core.axes.expert_axis import AXIS
from jaxscale.core.models.config import ExpertsConfig, ModelConfig
from jaxscale.core.models.expert_all_to_all import CAPACITY_FACTOR, round_capacity
from jaxscale.kernels.compiler_options import PIPELINE, PIPELINED_GATHER

F32 = 4
# Row arrays per layer over the expert axis: dispatch and combine; in the backward pass inputs and gradients out, one
# gradient back. In addition the float32 combine weights: forward, backward, and their gradients.
ROW_TRANSFERS, WEIGHT_TRANSFERS = 5, 3
# Exposed fraction of the experts' gathers and scatters although matmuls could overlap them: XLA:TPU starts and ends two
# of a layer's three gathers with no matmul between. The matmuls next to the scatters are too short for a fifth of their
# time in one compiled program, and long enough in another.
EXPOSED = {"all-gather": 2 / 3, "reduce-scatter": 1 / 10}


class ParamCounts(NamedTuple):
    """Parameter counts, or bytes of them: of experts, and of everything else."""

    experts: float
    others: float

    def times(self, factor: float) -> "ParamCounts":
        return ParamCounts(factor * self.experts, factor * self.others)


def require_experts(model: ModelConfig) -> ExpertsConfig:
    """Returns the settings of a model's experts, which must exist."""
    assert model.experts is not None, "the model has no experts"
    return model.experts


def expert_shards(program: Program) -> int:
    """Returns the devices over which experts stay sharded while a layer is computed; 1 if they are gathered."""
    return program.mesh.shape[AXIS] if program.plan.expert_exchange.name == "send" else 1


def device_params(program: Program) -> ParamCounts:
    """Returns parameters that a device computes with: its tensor shard, and its own experts where rows are sent."""
    model, tensor = program.cfg.model, program.mesh.shape["tensor"]
    if (cfg := model.experts) is None:
        return ParamCounts(0, model.num_params / tensor)
    expert_params = (model.num_layers - cfg.first_dense) * 3 * cfg.number * model.embed_dim * cfg.mlp_dim
    return ParamCounts(expert_params / tensor / expert_shards(program), (model.num_params - expert_params) / tensor)


def router_tokens(program: Program) -> int:
    """Returns tokens per device and microbatch that a router sees, all positions of the tensor group."""
    cfg, shape = program.cfg, program.mesh.shape
    num_shards = math.prod(shape[axis] for axis in ("data", "fsdp", AXIS, "context"))
    return cfg.tokens_per_step // cfg.train.num_microbatches // num_shards


def row_chunks(program: Program) -> int:
    """Returns the number of row chunks in which a device computes a block: model.row_parts."""
    return 1 if program.cfg.model.remat == "none" else math.gcd(program.cfg.model.row_parts, device_rows(program))


def device_rows(program: Program) -> int:
    """Returns local rows of one microbatch."""
    return program.cfg.rows_per_step // program.cfg.train.num_microbatches // program.batch_shards


def rows_per_round(program: Program, parts: int) -> int:
    """Returns rows that a device sends, and receives, in one round for one of `parts` chunks of its tokens."""
    devices, experts = program.mesh.shape[AXIS], require_experts(program.cfg.model)
    return devices * round_capacity(router_tokens(program) * experts.chosen // parts, devices)


def dispatch_bytes(program: Program, width: int) -> float:
    """Returns bytes that a device sends over the expert axis per layer and microbatch, `width` bytes an element.

    Recomputation under remat sends nothing: no gradient reads what comes back. Each row chunk has its own rounds:
    row_parts, times two halves under tensor parallelism.
    """
    if expert_shards(program) == 1:
        return 0.0
    parts = row_chunks(program)
    halves = program.mesh.shape["tensor"] > 1 and device_rows(program) // parts % 2 == 0
    parts *= 2 if halves else 1
    row_bytes = ROW_TRANSFERS * program.cfg.model.embed_dim * width + WEIGHT_TRANSFERS * F32
    return parts * rows_per_round(program, parts) * row_bytes


def moe_block_bytes(program: Program, width: int, reduced: int, *, staged: bool) -> float:
    """Returns the peak bytes of a block of experts, reached in its backward pass: weights and activations.

    width: bytes of a matmul operand; reduced: of a gradient in a reduction. staged: in a pipeline, whose weights are
    already gathered and whose gradients are float32.

    From the live ranges of three programs (v5p:2x2x2 and v6e:2x4, libtpu 0.0.51, 2026-11-24), with no fitted number:
    residuals of attention, with a kernel's logsumexp in 128 lanes; the block's residual stream, its normalised form and
    the gradient; sorted rows and their gradients; three inner arrays of the experts (gate, up, the gradient between),
    then one, together with the weight gradients. For experts narrower than a row the weight gradients come last, after
    three row gradients. Where rows are sent, a round's rows add to the local ones, and weight gradients to their sum
    over rounds. The next layer's weights count where the compiler prefetches them.

    Without prefetching each matrix's gradient is reduce-scattered once complete, so one of three and one
    row gradient are live, as in the peaks of compiled programs (docs/plan.md).
    """
    model, cfg, shape = program.cfg.model, require_experts(program.cfg.model), program.mesh.shape
    tensor, parts, sends = shape["tensor"], row_chunks(program), expert_shards(program) > 1
    tokens, embed, inner = router_tokens(program) // parts, model.embed_dim, cfg.mlp_dim // tensor
    rows = tokens * cfg.chosen
    sent_rows = rows_per_round(program, parts) if sends else rows
    head_widths = model.query_width + model.key_width + model.value_width + model.result_width
    saved = tokens * ((head_widths + 2 * embed) / tensor + model.latent_width + embed + 3 * cfg.shared_dim / tensor)
    saved += 2 * parts * tokens * embed / tensor if parts > 1 else 0  # the block's input and output, of all rows
    lse_lanes = LANES * model.num_heads / tensor if program.plan.attention.name == "splash" else 0
    float32_elements = tokens * (4 * cfg.number + lse_lanes)
    weights = moe_block_weights(program, staged)
    expert_params = 3 * cfg.number * embed * inner / expert_shards(program)
    gradients = (F32 if staged or not weights.shared else reduced) * expert_params
    scatters_early = not (sends or staged or prefetches_weights(program))
    row_grads = 2 if inner >= embed else 3 if scatters_early else 5
    arrays = width * sent_rows * (3 * inner + row_grads * embed)
    after_weight_grads = gradients / (3 if scatters_early else 1) + width * sent_rows * (inner + 2 * embed)
    concurrent = gradients if sends or parts > 1 else 0.0
    concurrent += width * 3 * rows * embed if sends else 0.0
    return width * (saved + weights.elements) + F32 * float32_elements + concurrent + max(arrays, after_weight_grads)


class MoEBlockWeights(NamedTuple):
    """Weights in memory while one block is computed."""

    elements: float
    shared: bool  # experts are sharded and gathered


def moe_block_weights(program: Program, staged: bool) -> MoEBlockWeights:
    """Returns one device's weights of a block. staged: those of a pipeline stage are counted separately."""
    model, cfg, shape = program.cfg.model, require_experts(program.cfg.model), program.mesh.shape
    num_shards = shape["fsdp"] * shape["context"]
    zero3, expert_axis = program.cfg.rules == "zero3", shape[AXIS] if expert_shards(program) == 1 else 1
    expert_params = 3 * cfg.number * model.embed_dim * cfg.mlp_dim / shape["tensor"] / expert_shards(program)
    others = sum(math.prod(sizes) for sizes in model.matrices().values()) / shape["tensor"]
    shared = (zero3 and num_shards > 1) or expert_axis > 1
    if staged:
        return MoEBlockWeights(0.0, shared)
    prefetches = prefetches_weights(program) and zero3
    others *= 1 + (prefetches and num_shards * shape[AXIS] > 1)
    return MoEBlockWeights(others + expert_params * (1 + (prefetches and shared)), shared)


def prefetches_weights(program: Program) -> bool:
    """True if compiler options prefetch the next layer's weights during this layer."""
    options = program.plan.compiler_options.values
    return bool(options.get(PIPELINE[0]) or options.get(PIPELINED_GATHER[0]))


def routing_assumption(program: Program) -> str:
    """Returns the routing assumption of the plan as text; '' for a dense model."""
    if program.cfg.model.experts is None:
        return ""
    if expert_shards(program) == 1:
        return (
            "balanced: every expert has the same number of rows. Rows stay on their device, so uneven routing changes "
            "neither memory nor traffic"
        )
    return (
        f"balanced: every expert has the same number of rows, and one round of {CAPACITY_FACTOR:g} x an equal share "
        "suffices. Uneven routing needs the same memory, but each further round sends as much again, and all devices "
        "wait for the busiest"
    )
