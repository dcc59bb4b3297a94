"""What the layout of a step must send along each mesh axis: weights, gradients, activations, keys and values."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.build import Program
from jaxscale.models.config import ATTENTION_ADDED, lora_params, saved_names
from jaxscale.models.llama_config import LlamaConfig
from jaxscale.planning.experts import OPEN, Numbers, device_numbers, exchange_of, experts_of, rows_sent
from jaxscale.planning.positions import CONTEXT, attention_sending
from jaxscale.planning.stages import PIPELINE, Stages, compute_bytes, held_experts, held_numbers, hop_bytes, stages_of
from jaxscale.sharding.batch_axes import on_tpu
from jaxscale.sharding.expert_axis import AXIS as EXPERT


@dataclasses.dataclass(frozen=True)
class Sent:
    """Alike collectives of a step, of one device."""

    axis: str
    kind: str
    nbytes: float  # of the whole arrays, over all of a step
    hides: bool  # beside products, where the compiler lets it run beside any
    open: float = 0.0  # the part of its time that none hides even so
    in_stage: bool = False  # in the layers, so that other stages of a pipeline wait for it too


def sent_arrays(program: Program) -> list[Sent]:
    """All of a step, axes of one device too."""
    stages = stages_of(program.cfg, program.mesh.shape)
    weights = stage_weights(program, stages) if stages.on else layer_weights(program)
    return [*weights, *layer_activations(program, stages), *stage_activations(program, stages)]


def layer_weights(program: Program) -> list[Sent]:
    """Weights gathered and gradients scattered, a layer at a time; what copies have is summed once a step.

    With zero1 and zero2 parameters are gathered once, after the update; experts rest apart, and where they are gathered
    over their own axis it is for each pass.
    """
    cfg, parts, width = program.cfg, program.cfg.train.num_microbatches, compute_bytes(program.cfg)
    params = device_numbers(program)
    learned = Numbers(0, lora_params(cfg.model, cfg.lora) / program.mesh.shape["tensor"]) if cfg.lora.on else params
    learned, times = learned.times(reduced_bytes(program)), parts if cfg.rules != "zero1" else 1
    passes = params.times(2)
    # With experts a table is gathered once: the lookup's gradient and the loss need no more.
    if isinstance(cfg.model, LlamaConfig) and cfg.model.experts is not None:
        tables = cfg.model.vocab_size * cfg.model.embed_dim / program.mesh.shape["tensor"]
        held = 1 if cfg.model.tied_embeddings else 2
        passes = passes._replace(others=passes.others - 2 * held * tables + 2 * tables)
    found = [
        *gathers(program, passes.times(parts * width) if cfg.rules == "zero3" else params.times(4), True),
        *scatters(program, learned.times(times), True),
        of_copies(program, learned),
    ]
    if exchange_of(program).form == "gather" and cfg.rules != "zero3":
        along = Turns((), (EXPERT,))
        found += sent_parts(program, "all-gather", Numbers(2 * parts * width * params.experts, 0), along, True)
        found += sent_parts(program, "reduce-scatter", Numbers((parts - times) * learned.experts, 0), along, True)
    return found


def gathers(program: Program, nbytes: Numbers, hides: bool) -> list[Sent]:
    """Weights of so many bytes, put together over the devices that share them.

    A torus has context's parts put together first. Elsewhere one collective goes along all axes, and through the
    network before it goes through a node: context lies inside nodes. Experts have an axis of their own, along which
    they come first (BatchAxes.gather); with zero1 and zero2 they are gathered along it in the layers alone.
    """
    shape, turns = program.mesh.shape, turns_of(program)
    experts = nbytes.experts
    of_experts = (EXPERT, *turns.experts) if exchange_of(program).form == "gather" else turns.experts
    if exchange_of(program).form == "gather" and program.cfg.rules != "zero3":
        experts, of_experts = experts / shape[EXPERT], turns.experts
    return sent_parts(program, "all-gather", nbytes._replace(experts=experts), Turns(turns.others, of_experts), hides)


def scatters(program: Program, nbytes: Numbers, hides: bool) -> list[Sent]:
    """Gradients of so many bytes, scattered over the devices that share them: the other way, but along the experts' own
    axis first too."""
    turns = turns_of(program)
    of_experts = (*turns.experts, EXPERT) if exchange_of(program).form == "gather" else turns.experts
    return sent_parts(program, "reduce-scatter", nbytes, Turns(turns.others, of_experts), hides)


class Turns(NamedTuple):
    """The axes along which devices share parameters, in the order in which these are put together."""

    others: tuple[str, ...]
    experts: tuple[str, ...]  # but for their own axis


def turns_of(program: Program) -> Turns:
    """Of a program's devices."""
    turns = Turns((CONTEXT, EXPERT, "fsdp"), (CONTEXT, "fsdp"))
    return turns if on_tpu(program.mesh) else Turns(*(axes[::-1] for axes in turns))


def sent_parts(program: Program, kind: str, nbytes: Numbers, turns: Turns, hides: bool) -> list[Sent]:
    """Collectives of a kind along these axes in turn; of experts' arrays with what is left open."""
    shape, left_open = program.mesh.shape, OPEN[kind] if on_tpu(program.mesh) else 0.0
    found = [Sent(axis, kind, size, hides) for axis, size in parts_along(shape, nbytes.others, turns.others)]
    of_experts = parts_along(shape, nbytes.experts, turns.experts)
    return [*found, *(Sent(axis, kind, size, hides, open=left_open) for axis, size in of_experts)]


def parts_along(shape: Mapping[str, int], nbytes: float, turns: Sequence[str]) -> list[tuple[str, float]]:
    """(axis, bytes that lie along it) of arrays that are put together along these axes in turn."""
    later = [math.prod(shape[axis] for axis in turns[place + 1 :]) for place in range(len(turns))]
    return [(axis, nbytes / rest) for axis, rest in zip(turns, later)]


def of_copies(program: Program, nbytes: Numbers) -> Sent:
    """The sum of gradients of so many bytes over the copies of the model, of a device's own part."""
    return Sent("data", "all-reduce", own_part(program, nbytes), False)


def own_part(program: Program, nbytes: Numbers) -> float:
    """What one device has of so many bytes that devices share, beside those of tensor and pipeline."""
    shape = program.mesh.shape
    shards = shape["fsdp"] * shape[CONTEXT]
    apart = shape[EXPERT] if exchange_of(program).form == "gather" else 1
    return nbytes.others / (shards * shape[EXPERT]) + nbytes.experts / (shards * apart)


def stage_weights(program: Program, stages: Stages) -> list[Sent]:
    """The same of a pipeline, whose stages do it once a step: before and after their loop, beside no products.

    Where a stage does not keep its own layers between steps, all stages exchange them once, and their parts of the
    vocabulary; where it does, only gradients of tables that every stage has are summed over the stages.
    """
    width, wide = compute_bytes(program.cfg), 4
    blocks, tables = in_stage(program, program.abstract_state.params)
    learned_blocks, learned_tables = in_stage(program, program.abstract_grads)
    reduced, gathered = reduced_bytes(program), width if program.cfg.rules == "zero3" else wide
    both = lambda blocks, tables: Numbers(blocks.experts, blocks.others + tables.others)
    held, learned = both(blocks, tables).times(gathered), both(learned_blocks, learned_tables).times(reduced)
    found = [*gathers(program, held, False), *scatters(program, learned, False), of_copies(program, learned)]
    if exchange_of(program).form == "gather" and program.cfg.rules != "zero3":
        found.append(Sent(EXPERT, "all-gather", width * blocks.experts, False))
    own = lambda numbers, nbytes: own_part(program, numbers.times(nbytes))
    if stages.rests_by_layer:
        of_tables = Sent(PIPELINE, "all-reduce", own(learned_tables, wide), False)
        return found if stages.cuts_head else [*found, of_tables]
    there, back = ("all-to-all", "all-to-all") if stages.cuts_head else ("all-gather", "reduce-scatter")
    return [
        *found,
        Sent(PIPELINE, "all-to-all", own(blocks, width) + own(learned_blocks, wide), False),
        Sent(PIPELINE, there, own(tables, width), False),
        Sent(PIPELINE, back, own(learned_tables, wide), False),
    ]


def in_stage(program: Program, tree: Any) -> tuple[Numbers, Numbers]:
    """(numbers of the blocks, of all else) of a tree like the parameters that a stage holds while a step runs."""
    blocks, tables = held_numbers(program, tree)
    experts = held_experts(program, tree)
    return Numbers(experts, blocks - experts), Numbers(0, tables)


def layer_activations(program: Program, stages: Stages) -> list[Sent]:
    """Activations summed along tensor, keys and values along context, rows to their experts and back along expert, of
    the layers that a device computes.

    A gather and a scatter of the residual stream are counted as one sum; attention may gather something else.
    """
    cfg, shape = program.cfg, program.mesh.shape
    layers = stages.held_layers if stages.on else cfg.model.num_layers
    passes = 2 if (kept := saved_names(cfg.model)) is None or ATTENTION_ADDED in kept else 3
    own = shape["data"] * shape["fsdp"] * shape[EXPERT] * shape[CONTEXT]
    numbers = (3 * cfg.model.embed_dim + cfg.model.gathered_width) / 2  # of both parts of a block
    rows = cfg.tokens_per_step / own * numbers * compute_bytes(cfg)
    times = layers * cfg.train.num_microbatches
    shared, experts = attention_sending(program), experts_of(cfg.model)
    sparse = 0 if experts is None else layers if stages.on else layers - experts.first_dense
    sent = sparse * cfg.train.num_microbatches * rows_sent(program, compute_bytes(cfg))
    return [
        Sent(EXPERT, "all-to-all", sent, False, in_stage=True),
        Sent("tensor", "all-reduce", passes * layers * rows, False, in_stage=True),
        *(Sent(CONTEXT, kind, times * size, kind == "collective-permute", in_stage=True) for kind, size in shared),
    ]


def stage_activations(program: Program, stages: Stages) -> list[Sent]:
    """The residual stream from stage to stage and its gradient back, in every tick; what a cut vocabulary needs.

    A cut embedding is summed over the stages, whole positions before tensor shares them, and its gradient given to all;
    the last stage's result is given to all and its gradient summed. In one program giving is a sum too, of zeros but
    for one. The gradient goes down while a tick's forward pass runs, the result up during the backward pass.
    """
    if not stages.on:
        return []
    hop, tensor = hop_bytes(program), program.mesh.shape["tensor"]
    found = [Sent(PIPELINE, "collective-permute", 2 * stages.ticks * hop, True)]
    if stages.cuts_head:
        found.append(Sent(PIPELINE, "all-reduce", 2 * (1 + tensor) * stages.microbatches * hop, False))
    return found


def reduced_bytes(program: Program) -> int:
    """Bytes of a number of a gradient on its way."""
    return 2 if program.cfg.train.reduce_dtype == "bfloat16" else 4
