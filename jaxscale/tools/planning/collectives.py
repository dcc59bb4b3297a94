"""Collectives of a step along each mesh axis, as reported by the axis objects of the parallel plan (core/axes)."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxscale.build import Program
from jaxscale.core.models.config import ATTENTION_ADDED, saved_names
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.lora_mup_config import lora_params
from jaxscale.kernels.collectives import CollectiveBytes, on_tpu
from jaxscale.kernels.matmul.expert_all_to_all import CAPACITY_FACTOR
from jaxscale.program.memory import (
    EXPERT_MATRIX,
    F32,
    MATRIX,
    attention_bytes,
    compute_bytes,
    device_rows,
    device_tokens,
    hop_bytes,
    row_chunks,
    rows_per_round,
    stage_elements,
)

# Exposed fraction of the experts' all-gathers and reduce-scatters where matmuls could overlap them. XLA:TPU starts and
# ends two of a layer's three gathers with no matmul in between. In one compiled program, the matmuls next to the
# scatters were too short to overlap a fifth of their time; in a second program they were long enough.
EXPOSED = {"all-gather": 2 / 3, "reduce-scatter": 1 / 10}
Sizes = Mapping[tuple[str, ...], float]  # {logical axes of weights: gathered elements on a device}


class PlannedCollective(NamedTuple):
    """All collectives of one kind, mesh axis and purpose that a device runs in a step."""

    axis: str
    kind: str
    nbytes: float  # size of the whole arrays, summed over a step
    overlaps: bool  # matmuls can overlap it, if the compiler overlaps this kind
    exposed: float = 0.0  # fraction that is exposed even if the rest overlaps
    in_stage: bool = False  # inside the layers, so other pipeline stages also wait


def step_collectives(program: Program) -> list[PlannedCollective]:
    """Returns the collectives of a step."""
    weights = stage_weights(program) if program.plan.pipeline.size > 1 else layer_weights(program)
    return [*weights, *activations(program)]


def layer_weights(program: Program) -> list[PlannedCollective]:
    """Returns the collectives of weights and gradients of a model without pipeline stages."""
    cfg, model, tensor, parts = program.cfg, program.cfg.model, program.plan.tensor.size, program.plan.num_microbatches
    expert_params = tables = 0  # embedding tables are gathered once for the lookup's gradient and the loss
    if isinstance(model, LlamaConfig) and (experts := model.experts) is not None:
        expert_matrix = experts.number * model.embed_dim * experts.mlp_dim
        expert_params = 3 * (model.num_layers - experts.first_dense) * expert_matrix
        tables = 0 if model.tied_embeddings else 2 * model.vocab_size * model.embed_dim
    dense = (model.num_params - expert_params) / tensor
    params = {MATRIX: dense, EXPERT_MATRIX: expert_params / tensor / program.plan.expert.size}
    grads = {MATRIX: lora_params(model, cfg.lora) / tensor} if cfg.lora.on else params
    gathered = {MATRIX: parts * (2 * dense - tables / tensor), EXPERT_MATRIX: 2 * parts * params[EXPERT_MATRIX]}
    updates = parts if cfg.rules != "zero1" else 1
    return weight_collectives(program, params, gathered, grads, scattered=(parts, updates), overlaps=True)


def stage_weights(program: Program) -> list[PlannedCollective]:
    """Returns the collectives of weights and gradients of a pipeline stage, which run once per step."""
    axes, width = program.plan.batch_axes, compute_bytes(program)
    weights, grads = (stage_elements(program, tree) for tree in (program.abstract_state.params, program.abstract_grads))
    params, grad_params = ({MATRIX: one.layers + one.others, EXPERT_MATRIX: one.experts} for one in (weights, grads))
    local = lambda names, number: number / axes.num_parts(axes.partition(names, axes.rules.moments))
    local_bytes = lambda one, width: (
        width * (local(MATRIX, one.layers) + local(EXPERT_MATRIX, one.experts)), width * local(MATRIX, one.others)
    )  # fmt: skip
    exchanged = program.plan.pipeline.weight_bytes_sent(local_bytes(weights, width), local_bytes(grads, F32))
    gathered = weight_collectives(program, params, params, grad_params, scattered=(1, 1), overlaps=False)
    return [*gathered, *planned(exchanged)]


def weight_collectives(
    program: Program, params: Sizes, gathered: Sizes, grads: Sizes, *, scattered: tuple[int, int], overlaps: bool
) -> list[PlannedCollective]:
    """Returns the all-gathers of weights, and the reduce-scatters and all-reduces of gradients.

    Weights are gathered inside layers in the compute dtype, or after the update in float32 with zero1 and zero2. Expert
    weights are always gathered inside layers over the expert axis. gathered: elements of all gathers inside layers.
    scattered: number of gradient reduce-scatters (inside layers, to the sharding of the moments).
    """
    axes, width = program.plan.batch_axes, compute_bytes(program)
    reduced, found = jnp.dtype(program.cfg.train.reduce_dtype).itemsize, []
    for names in params:
        in_layers = axes.partition(names, axes.rules.params)
        after_update = axes.added_partition(names, axes.rules.moments, axes.rules.params)
        parts, grad = axes.num_parts(in_layers), reduced * grads.get(names, 0)
        exposed = EXPOSED if names == EXPERT_MATRIX and on_tpu(program.mesh) else {}
        sent = [
            *axes.bytes_sent("all-gather", width * gathered[names], in_layers),
            *axes.bytes_sent("reduce-scatter", scattered[0] * grad, in_layers),
            *axes.bytes_sent("all-gather", F32 * params[names] / parts, after_update),
            *axes.bytes_sent("reduce-scatter", scattered[1] * grad / parts, after_update),
        ]
        found += [PlannedCollective(*one, overlaps, exposed.get(one.kind, 0.0)) for one in sent]
        found += planned([CollectiveBytes("data", "all-reduce", grad / parts / axes.num_parts(after_update))])
    return found


def activations(program: Program) -> list[PlannedCollective]:
    """Returns the collectives of activations along the tensor, context, expert and pipeline axes.

    Attention and the MLP may gather different widths along the tensor axis, so their mean is used.
    """
    cfg, plan, model, width = program.cfg, program.plan, program.cfg.model, compute_bytes(program)
    layers = plan.pipeline.layer_slots if plan.pipeline.size > 1 else model.num_layers
    passes = 2 if (saved := saved_names(model)) is None or ATTENTION_ADDED in saved else 3
    stream = device_tokens(program) * (3 * model.embed_dim + model.gathered_width) / 2 * width
    runs = layers * cfg.train.num_microbatches
    in_layers = [(passes * runs, one) for one in plan.tensor.bytes_sent(stream)]
    exchanged = plan.context.bytes_sent(plan.context_exchange.name, attention_bytes(program))
    in_layers += [(runs, one) for one in exchanged]
    if (experts := model.experts) is not None and plan.expert.size > 1:
        # Each chunk of rows has its own all-to-all rounds. Tensor parallelism splits each chunk into two halves.
        parts = row_chunks(program)
        parts *= 2 if plan.tensor.size > 1 and device_rows(program) // parts % 2 == 0 else 1
        rows = parts * rows_per_round(program, experts, parts)
        if plan.pipeline.size == 1:
            runs -= experts.first_dense * cfg.train.num_microbatches
        in_layers += [(runs, one) for one in plan.expert.bytes_sent(rows, model.embed_dim * width)]
    return [
        *planned([one._replace(nbytes=times * one.nbytes) for times, one in in_layers], in_stage=True),
        *planned(plan.pipeline.bytes_sent(plan.schedule_size, hop_bytes(program), plan.tensor.size)),
    ]


def planned(collectives: Iterable[CollectiveBytes], *, in_stage: bool = False) -> list[PlannedCollective]:
    """Returns planned collectives. Matmuls can overlap only the collective-permutes."""
    return [PlannedCollective(*one, one.kind == "collective-permute", in_stage=in_stage) for one in collectives]


def routing_assumption(program: Program) -> str:
    """Returns text with the assumed expert routing, or '' for a dense model."""
    if program.cfg.model.experts is None:
        return ""
    if program.plan.expert.size == 1:
        return (
            "balanced: every expert has the same number of rows. Rows are not sent to other devices, so uneven routing "
            "changes neither memory nor traffic"
        )
    return (
        f"balanced: every expert has the same number of rows, and one all-to-all round with {CAPACITY_FACTOR:g} x an "
        "equal share is enough. Uneven routing needs the same memory, but each additional round sends the same amount "
        "again, and all devices wait for the busiest device"
    )
