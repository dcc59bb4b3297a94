"""A mixture of experts by arithmetic: how its devices meet tokens and experts, and what that sends.

What a router will do is not known before it is trained. It is taken to be balanced: each expert gets as many rows as
the others, so that one round takes all that are sent, and every device multiplies as many.
"""

import math
from typing import NamedTuple

from jaxscale.build import Program
from jaxscale.model_on_mesh import parallel_request
from jaxscale.models.config import ModelConfig
from jaxscale.models.experts_config import ExpertsConfig
from jaxscale.models.sharded import expert_work
from jaxscale.ops.expert_all_to_all import CAPACITY_FACTOR, round_capacity
from jaxscale.sharding.batch_axes import LANES
from jaxscale.sharding.compiler_options import PIPELINE, PIPELINED_GATHER
from jaxscale.sharding.expert_axis import AXIS, ExpertExchange, resolve_expert_exchange

F32 = 4
# Arrays of rows that go over the axis: there and back; going backward their inputs and gradients there, one gradient
# back. Beside them the weights of rows, in float32, forward, backward, and their gradients.
ROWS_SENT, WEIGHTS_SENT = 5, 3
# The part of the time of experts' gathers and scatters for which products stand still although there is room beside
# them: XLA:TPU starts and ends two of a layer's three gathers with no product between, and what runs beside scatters is
# too short for a fifth of their time in one compiled program, and for none in another.
OPEN = {"all-gather": 2 / 3, "reduce-scatter": 1 / 10}


class Numbers(NamedTuple):
    """Of parameters: those of experts, and all others."""

    experts: float
    others: float

    def times(self, factor: float) -> "Numbers":
        """So many times each."""
        return Numbers(factor * self.experts, factor * self.others)


def experts_of(model: ModelConfig) -> ExpertsConfig | None:
    """The settings of a model's experts, if it has any."""
    return model.experts


def known_experts(model: ModelConfig) -> ExpertsConfig:
    """The settings of the experts of a model that has some."""
    assert model.experts is not None, "asked of a model with experts"
    return model.experts


def exchange_of(program: Program) -> ExpertExchange:
    """How tokens and experts meet: of this config, whose microbatches may not be those that the program was made of."""
    cfg, mesh = program.cfg, program.mesh
    return resolve_expert_exchange(cfg.expert.exchange, expert_work(cfg.model, mesh, parallel_request(cfg, mesh)))


def resting_parts(program: Program) -> int:
    """Devices that each keep their own experts while a layer is computed."""
    return program.mesh.shape[AXIS] if exchange_of(program).form == "send" else 1


def device_numbers(program: Program) -> Numbers:
    """Parameters that a device computes with, one layer after the other: its part by tensor, and its own experts where
    rows are sent to them."""
    model, tensor = program.cfg.model, program.mesh.shape["tensor"]
    if (own := experts_of(model)) is None:
        return Numbers(0, model.num_params / tensor)
    experts = (model.num_layers - own.first_dense) * 3 * own.number * model.embed_dim * own.mlp_dim
    return Numbers(experts / tensor / resting_parts(program), (model.num_params - experts) / tensor)


def router_tokens(program: Program) -> int:
    """Tokens of one device and microbatch that a router sees: all positions of the devices that split its products."""
    cfg, shape = program.cfg, program.mesh.shape
    own = math.prod(shape[axis] for axis in ("data", "fsdp", AXIS, "context"))
    return cfg.tokens_per_step // cfg.train.num_microbatches // own


def block_parts(program: Program) -> int:
    """Parts in which the rows of a device go through a block, one after the other: model.row_parts."""
    return 1 if program.cfg.model.remat == "none" else math.gcd(program.cfg.model.row_parts, device_rows(program))


def device_rows(program: Program) -> int:
    """Rows of a batch that a device has of one microbatch."""
    return program.cfg.rows_per_step // program.cfg.train.num_microbatches // program.batch_shards


def round_rows(program: Program, parts: int) -> int:
    """Rows that a device sends in one round, and gets, of one of `parts` parts of its tokens."""
    devices, own = program.mesh.shape[AXIS], known_experts(program.cfg.model)
    return devices * round_capacity(router_tokens(program) * own.chosen // parts, devices)


def rows_sent(program: Program, width: int) -> float:
    """Bytes of rows, `width` a number, of one layer and microbatch that a device puts on the expert axis: 0 where none
    are sent.

    The forward pass that the backward one does again sends nothing: what comes back is read by no gradient. Each part
    of the rows has rounds of its own: row_parts, and the halves that a tensor axis takes.
    """
    if resting_parts(program) == 1:
        return 0.0
    parts = block_parts(program)
    halves = program.mesh.shape["tensor"] > 1 and device_rows(program) // parts % 2 == 0
    parts *= 2 if halves else 1
    of_row = ROWS_SENT * program.cfg.model.embed_dim * width + WEIGHTS_SENT * F32
    return parts * round_rows(program, parts) * of_row


def block_memory(program: Program, width: int, reduced: int, *, staged: bool) -> float:
    """Bytes that a device works with in a block of experts, going back, where most is there: weights and activations.

    width: of a number that products read; reduced: of a gradient on its way. staged: in a pipeline, whose weights are
    together already and whose gradients are float32.

    Read off the live ranges of three programs (v5p:2x2x2 and v6e:2x4, libtpu 0.0.51, 2026-11-24), with no number
    fitted: what attention made for its own backward pass, with a kernel's logarithms of sums in 128 lanes; the block's
    stream, its normalised form and the gradient; rows and their gradients, sorted; three of the experts' inner arrays
    (gate, up, the gradient of what is between), then one beside the gradients of the weights. Of experts that are
    narrower than a row the weights' gradients come last, and three gradients of rows are there before. Where rows are
    sent those of a round are beside the device's own, and gradients of weights beside their sum over rounds. The next
    layer's weights, where the compiler fetches them ahead.

    Where it does not, each matrix's gradient is scattered as soon as it is there, so that one of three is held, and one
    gradient of rows: as the peaks of compiled programs have it (docs/plan.md).
    """
    model, own, shape = program.cfg.model, known_experts(program.cfg.model), program.mesh.shape
    tensor, parts, sends = shape["tensor"], block_parts(program), resting_parts(program) > 1
    tokens, embed, inner = router_tokens(program) // parts, model.embed_dim, own.mlp_dim // tensor
    rows = tokens * own.chosen
    moved = round_rows(program, parts) if sends else rows
    of_heads = model.query_width + model.key_width + model.value_width + model.result_width
    kept = tokens * ((of_heads + 2 * embed) / tensor + model.latent_width + embed + 3 * own.shared_dim / tensor)
    kept += 2 * parts * tokens * embed / tensor if parts > 1 else 0  # the block's input and result, of all rows
    of_floats = tokens * (4 * own.number + (LANES * model.num_heads / tensor if program.attention == "splash" else 0))
    weights = block_weights(program, staged)
    experts = 3 * own.number * embed * inner / resting_parts(program)
    gradients = (F32 if staged or not weights.shared else reduced) * experts
    at_once = not (sends or staged or fetches_ahead(program))  # gradients are scattered
    of_rows = 2 if inner >= embed else 3 if at_once else 5
    arrays = width * moved * (3 * inner + of_rows * embed)
    at_end = gradients / (3 if at_once else 1) + width * moved * (inner + 2 * embed)
    beside = gradients if sends or parts > 1 else 0.0
    beside += width * 3 * rows * embed if sends else 0.0
    return width * (kept + weights.numbers) + F32 * of_floats + beside + max(arrays, at_end)


class BlockWeights(NamedTuple):
    """What is there of weights while one block is computed."""

    numbers: float  # as products read them
    shared: bool  # whether devices share those of experts, which then come together


def block_weights(program: Program, staged: bool) -> BlockWeights:
    """Of a device. staged: those of a pipeline's stage are counted apart."""
    model, own, shape = program.cfg.model, known_experts(program.cfg.model), program.mesh.shape
    sharing = shape["fsdp"] * shape["context"]
    zero3, apart = program.cfg.rules == "zero3", shape[AXIS] if resting_parts(program) == 1 else 1
    experts = 3 * own.number * model.embed_dim * own.mlp_dim / shape["tensor"] / resting_parts(program)
    others = sum(math.prod(sizes) for sizes in model.matrices().values()) / shape["tensor"]
    shared = (zero3 and sharing > 1) or apart > 1
    if staged:
        return BlockWeights(0.0, shared)
    ahead = fetches_ahead(program) and zero3
    others *= 1 + (ahead and sharing * shape[AXIS] > 1)
    return BlockWeights(others + experts * (1 + (ahead and shared)), shared)


def fetches_ahead(program: Program) -> bool:
    """Whether the compiler is asked to gather the weights of the next layer during this one."""
    options = program.compiler_options.values
    return bool(options.get(PIPELINE[0]) or options.get(PIPELINED_GATHER[0]))


def routing_text(program: Program) -> str:
    """What is taken for granted of a router, in words; '' for a model without one."""
    if experts_of(program.cfg.model) is None:
        return ""
    if resting_parts(program) == 1:
        return (
            "each expert has as many rows as the others. Rows stay on their device, so that uneven routing moves "
            "neither memory nor bytes"
        )
    return (
        f"each expert has as many rows as the others, and one round of {CAPACITY_FACTOR:g} times an equal share takes "
        "them all. Of uneven routing memory is the same, each further round sends as much again, and all devices wait "
        "for the busiest"
    )
