"""Collectives of a step along each mesh axis: weights, gradients, activations, keys and values, rows."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.build import Program
from jaxscale.core.axes.batch_axes import on_tpu
from jaxscale.core.axes.expert_axis import AXIS as EXPERT
from jaxscale.core.models.config import ATTENTION_ADDED, saved_names
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.lora_mup_config import lora_params
from jaxscale.tools.planning.context import CONTEXT, context_collectives
from jaxscale.tools.planning.expert_traffic import EXPOSED, ParamCounts, device_params, dispatch_bytes
from jaxscale.tools.planning.stages import (
    PIPELINE,
    Stages,
    compute_bytes,
    hop_bytes,
    pipeline_stages,
    stage_elements,
    stage_expert_elements,
)


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """All collectives of one kind, axis and purpose in a step, of one device."""

    axis: str
    kind: str
    nbytes: float  # of the whole arrays, over a step
    overlaps: bool  # matmuls can overlap it, if the compiler overlaps this kind
    exposed: float = 0.0  # exposed fraction even if overlapped
    in_stage: bool = False  # inside the layers, so that other pipeline stages wait too


def step_collectives(program: Program) -> list[PlannedCollective]:
    """Returns the collectives of a step, including those over axes of size 1."""
    stages = pipeline_stages(program.cfg, program.mesh.shape)
    weights = stage_weight_collectives(program, stages) if stages.is_pipelined else weight_collectives(program)
    return [*weights, *activation_collectives(program, stages), *pipeline_collectives(program, stages)]


def weight_collectives(program: Program) -> list[PlannedCollective]:
    """Returns the weight all-gathers and gradient reduce-scatters, per layer, and one all-reduce over copies per step.

    zero1 and zero2 gather parameters once, after the update. Experts stay sharded; where they are gathered over the
    expert axis, it is for each pass.
    """
    cfg, parts, width = program.cfg, program.cfg.train.num_microbatches, compute_bytes(program.cfg)
    params = device_params(program)
    grads = ParamCounts(0, lora_params(cfg.model, cfg.lora) / program.mesh.shape["tensor"]) if cfg.lora.on else params
    grads, times = grads.times(gradient_bytes(program)), parts if cfg.rules != "zero1" else 1
    passes = params.times(2)
    # With experts a table is gathered once: enough for the lookup's gradient and the loss.
    if isinstance(cfg.model, LlamaConfig) and cfg.model.experts is not None:
        tables = cfg.model.vocab_size * cfg.model.embed_dim / program.mesh.shape["tensor"]
        num_tables = 1 if cfg.model.tied_embeddings else 2
        passes = passes._replace(others=passes.others - 2 * num_tables * tables + 2 * tables)
    collectives = [
        *weight_gathers(program, passes.times(parts * width) if cfg.rules == "zero3" else params.times(4), True),
        *gradient_scatters(program, grads.times(times), True),
        data_all_reduce(program, grads),
    ]
    if program.plan.expert_exchange.name == "gather" and cfg.rules != "zero3":
        order = GatherOrder((), (EXPERT,))
        gathered, scattered = 2 * parts * width * params.experts, (parts - times) * grads.experts
        collectives += collectives_along(program, "all-gather", ParamCounts(gathered, 0), order, True)
        collectives += collectives_along(program, "reduce-scatter", ParamCounts(scattered, 0), order, True)
    return collectives


def weight_gathers(program: Program, nbytes: ParamCounts, overlaps: bool) -> list[PlannedCollective]:
    """Returns the all-gathers of weights of `nbytes`.

    A torus gathers the context axis first. Elsewhere one collective covers all axes, the network before the links
    within a node: context is inside nodes. Experts are gathered over the expert axis first (BatchAxes.gather); with
    zero1 and zero2 only inside the layers.
    """
    shape, order = program.mesh.shape, gather_order(program)
    experts = nbytes.experts
    expert_order = (EXPERT, *order.experts) if program.plan.expert_exchange.name == "gather" else order.experts
    if program.plan.expert_exchange.name == "gather" and program.cfg.rules != "zero3":
        experts, expert_order = experts / shape[EXPERT], order.experts
    order, nbytes = GatherOrder(order.others, expert_order), nbytes._replace(experts=experts)
    return collectives_along(program, "all-gather", nbytes, order, overlaps)


def gradient_scatters(program: Program, nbytes: ParamCounts, overlaps: bool) -> list[PlannedCollective]:
    """Returns the reduce-scatters of gradients: the reverse order, but the expert axis is also first."""
    order = gather_order(program)
    expert_order = (*order.experts, EXPERT) if program.plan.expert_exchange.name == "gather" else order.experts
    return collectives_along(program, "reduce-scatter", nbytes, GatherOrder(order.others, expert_order), overlaps)


class GatherOrder(NamedTuple):
    """Axes over which parameters are sharded, in the order in which they are gathered."""

    others: tuple[str, ...]
    experts: tuple[str, ...]  # without the expert axis


def gather_order(program: Program) -> GatherOrder:
    order = GatherOrder((CONTEXT, EXPERT, "fsdp"), (CONTEXT, "fsdp"))
    return order if on_tpu(program.mesh) else GatherOrder(*(axes[::-1] for axes in order))


def collectives_along(
    program: Program, kind: str, nbytes: ParamCounts, order: GatherOrder, overlaps: bool
) -> list[PlannedCollective]:
    """Returns collectives of one kind along these axes in turn; those of experts with their exposed fraction."""
    shape, exposed = program.mesh.shape, EXPOSED[kind] if on_tpu(program.mesh) else 0.0
    others, experts = bytes_along(shape, nbytes.others, order.others), bytes_along(shape, nbytes.experts, order.experts)
    collectives = [PlannedCollective(axis, kind, size, overlaps) for axis, size in others]
    return [*collectives, *(PlannedCollective(axis, kind, size, overlaps, exposed) for axis, size in experts)]


def bytes_along(shape: Mapping[str, int], nbytes: float, order: Sequence[str]) -> list[tuple[str, float]]:
    """Returns (axis, bytes that this axis gathers) of arrays gathered along these axes in turn."""
    later_shards = [math.prod(shape[axis] for axis in order[i + 1 :]) for i in range(len(order))]
    return [(axis, nbytes / shards) for axis, shards in zip(order, later_shards)]


def data_all_reduce(program: Program, nbytes: ParamCounts) -> PlannedCollective:
    """Returns the gradient all-reduce over copies of the model, of a device's local shard."""
    return PlannedCollective("data", "all-reduce", local_bytes(program, nbytes), False)


def local_bytes(program: Program, nbytes: ParamCounts) -> float:
    """Returns the local part of `nbytes` that are sharded over fsdp, context and expert."""
    shape = program.mesh.shape
    shards = shape["fsdp"] * shape[CONTEXT]
    expert_shards = shape[EXPERT] if program.plan.expert_exchange.name == "gather" else 1
    return nbytes.others / (shards * shape[EXPERT]) + nbytes.experts / (shards * expert_shards)


def stage_weight_collectives(program: Program, stages: Stages) -> list[PlannedCollective]:
    """Returns the weight and gradient collectives of a pipeline, once a step, outside the loop, overlapped by nothing.

    If stages do not store their own layers between steps, they exchange layers and vocabulary shards once. Otherwise
    only gradients of replicated tables are summed over the stages.
    """
    width, float32 = compute_bytes(program.cfg), 4
    blocks, tables = stage_params(program, program.abstract_state.params)
    grad_blocks, grad_tables = stage_params(program, program.abstract_grads)
    grad_bytes, weight_bytes = gradient_bytes(program), width if program.cfg.rules == "zero3" else float32
    total = lambda blocks, tables: ParamCounts(blocks.experts, blocks.others + tables.others)
    weights, grads = total(blocks, tables).times(weight_bytes), total(grad_blocks, grad_tables).times(grad_bytes)
    collectives = [
        *weight_gathers(program, weights, False),
        *gradient_scatters(program, grads, False),
        data_all_reduce(program, grads),
    ]
    if program.plan.expert_exchange.name == "gather" and program.cfg.rules != "zero3":
        collectives.append(PlannedCollective(EXPERT, "all-gather", width * blocks.experts, False))
    local = lambda numbers, nbytes: local_bytes(program, numbers.times(nbytes))
    if stages.stores_stage_layers:
        table_sum = PlannedCollective(PIPELINE, "all-reduce", local(grad_tables, float32), False)
        return collectives if stages.shards_head else [*collectives, table_sum]
    gather, scatter = ("all-to-all", "all-to-all") if stages.shards_head else ("all-gather", "reduce-scatter")
    return [
        *collectives,
        PlannedCollective(PIPELINE, "all-to-all", local(blocks, width) + local(grad_blocks, float32), False),
        PlannedCollective(PIPELINE, gather, local(tables, width), False),
        PlannedCollective(PIPELINE, scatter, local(grad_tables, float32), False),
    ]


def stage_params(program: Program, tree: Any) -> tuple[ParamCounts, ParamCounts]:
    """Returns (elements of the blocks, of everything else) that a stage holds during a step."""
    blocks, tables = stage_elements(program, tree)
    experts = stage_expert_elements(program, tree)
    return ParamCounts(experts, blocks - experts), ParamCounts(0, tables)


def activation_collectives(program: Program, stages: Stages) -> list[PlannedCollective]:
    """Returns per-layer collectives: activations over tensor, keys and values over context, rows over expert.

    A gather and a scatter of the residual stream count as one all-reduce; attention may gather another width.
    """
    cfg, shape = program.cfg, program.mesh.shape
    layers = stages.layer_slots if stages.is_pipelined else cfg.model.num_layers
    passes = 2 if (saved := saved_names(cfg.model)) is None or ATTENTION_ADDED in saved else 3
    num_shards = shape["data"] * shape["fsdp"] * shape[EXPERT] * shape[CONTEXT]
    width = (3 * cfg.model.embed_dim + cfg.model.gathered_width) / 2  # mean over attention and MLP
    rows = cfg.tokens_per_step / num_shards * width * compute_bytes(cfg)
    layer_passes = layers * cfg.train.num_microbatches
    context = [(kind, layer_passes * size) for kind, size in context_collectives(program)]
    experts = cfg.model.experts
    moe_layers = 0 if experts is None else layers if stages.is_pipelined else layers - experts.first_dense
    row_bytes = moe_layers * cfg.train.num_microbatches * dispatch_bytes(program, compute_bytes(cfg))
    return [
        PlannedCollective(EXPERT, "all-to-all", row_bytes, False, in_stage=True),
        PlannedCollective("tensor", "all-reduce", passes * layers * rows, False, in_stage=True),
        *(
            PlannedCollective(CONTEXT, kind, size, kind == "collective-permute", in_stage=True)
            for kind, size in context
        ),
    ]


def pipeline_collectives(program: Program, stages: Stages) -> list[PlannedCollective]:
    """Returns the residual stream and its gradient between stages per tick, and what a sharded vocabulary needs.

    A sharded embedding is summed over the stages, before tensor splits the positions, and its gradient broadcast; the
    last stage's output is broadcast and its gradient summed. In SPMD a broadcast is an all-reduce of zeros but for one
    term. Gradients are sent during a tick's forward pass, outputs during its backward pass.
    """
    if not stages.is_pipelined:
        return []
    hop, tensor = hop_bytes(program), program.mesh.shape["tensor"]
    collectives = [PlannedCollective(PIPELINE, "collective-permute", 2 * stages.ticks * hop, True)]
    if stages.shards_head:
        nbytes = 2 * (1 + tensor) * stages.microbatches * hop
        collectives.append(PlannedCollective(PIPELINE, "all-reduce", nbytes, False))
    return collectives


def gradient_bytes(program: Program) -> int:
    """Returns bytes per element of a gradient in a reduction."""
    return 2 if program.cfg.train.reduce_dtype == "bfloat16" else 4
