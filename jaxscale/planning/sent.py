"""What the layout of a step must send along each mesh axis: weights, gradients, activations, keys and values."""

import dataclasses

from jaxscale.build import Program
from jaxscale.models.config import ATTENTION_ADDED, lora_params
from jaxscale.planning.memory import saved_names
from jaxscale.planning.positions import CONTEXT, attention_sending
from jaxscale.planning.stages import PIPELINE, Stages, compute_bytes, held_numbers, hop_bytes, stages_of
from jaxscale.sharding.batch_axes import on_tpu


@dataclasses.dataclass(frozen=True)
class Sent:
    """Alike collectives of a step, of one device."""

    axis: str
    kind: str
    nbytes: float  # of the whole arrays, over all of a step
    hides: bool  # beside products, where the compiler lets it run beside any
    in_stage: bool = False  # in the layers, so that other stages of a pipeline wait for it too


def sent_arrays(program: Program) -> list[Sent]:
    """All of a step, axes of one device too."""
    stages = stages_of(program.cfg, program.mesh.shape)
    weights = stage_weights(program, stages) if stages.on else layer_weights(program)
    return [*weights, *layer_activations(program, stages), *stage_activations(program, stages)]


def layer_weights(program: Program) -> list[Sent]:
    """Weights gathered and gradients scattered, a layer at a time; what copies have is summed once a step."""
    cfg, shape = program.cfg, program.mesh.shape
    tensor, parts = shape["tensor"], cfg.train.num_microbatches
    params = cfg.model.num_params / tensor
    learned = reduced_bytes(program) * (lora_params(cfg.model, cfg.lora) / tensor if cfg.lora.on else params)
    gathered = 2 * parts * compute_bytes(cfg) * params if cfg.rules == "zero3" else 4 * params
    scattered = learned * (parts if cfg.rules != "zero1" else 1)
    return [*gathers(program, gathered, True), *scatters(program, scattered, True), of_copies(program, learned)]


def gathers(program: Program, nbytes: float, hides: bool) -> list[Sent]:
    """Weights of so many bytes, put together over the devices that share them."""
    return [Sent(axis, "all-gather", size, hides) for axis, size in parts_along(program, nbytes)]


def scatters(program: Program, nbytes: float, hides: bool) -> list[Sent]:
    """Gradients of so many bytes, scattered over the devices that share them."""
    return [Sent(axis, "reduce-scatter", size, hides) for axis, size in parts_along(program, nbytes)]


def parts_along(program: Program, nbytes: float) -> list[tuple[str, float]]:
    """(axis, bytes that lie along it) of an array over fsdp and context (BatchAxes.gather).

    A torus has context's parts put together first. Elsewhere one collective goes along both, and through the network
    before it goes through a node: context lies inside nodes.
    """
    first, last = (CONTEXT, "fsdp") if on_tpu(program.mesh) else ("fsdp", CONTEXT)
    return [(first, nbytes / program.mesh.shape[last]), (last, nbytes)]


def of_copies(program: Program, nbytes: float) -> Sent:
    """The sum of gradients of so many bytes over the copies of the model, of a device's own part."""
    return Sent("data", "all-reduce", nbytes / sharing(program), False)


def sharing(program: Program) -> int:
    """Devices that share one copy of parameters, beside those of tensor and pipeline."""
    return program.mesh.shape["fsdp"] * program.mesh.shape[CONTEXT]


def stage_weights(program: Program, stages: Stages) -> list[Sent]:
    """The same of a pipeline, whose stages do it once a step: before and after their loop, beside no products.

    Where a stage does not keep its own layers between steps, all stages exchange them once, and their parts of the
    vocabulary; where it does, only gradients of tables that every stage has are summed over the stages.
    """
    cfg, width, shards = program.cfg, compute_bytes(program.cfg), sharing(program)
    blocks, tables = held_numbers(program, program.abstract_state.params)
    learned_blocks, learned_tables = held_numbers(program, program.abstract_grads)
    learned = reduced_bytes(program) * (learned_blocks + learned_tables)
    gathered = (width if cfg.rules == "zero3" else 4) * (blocks + tables)
    found = [*gathers(program, gathered, False), *scatters(program, learned, False), of_copies(program, learned)]
    if stages.rests_by_layer:
        return found if stages.cuts_head else [*found, Sent(PIPELINE, "all-reduce", 4 * learned_tables / shards, False)]
    there, back = ("all-to-all", "all-to-all") if stages.cuts_head else ("all-gather", "reduce-scatter")
    return [
        *found,
        Sent(PIPELINE, "all-to-all", (width * blocks + 4 * learned_blocks) / shards, False),
        Sent(PIPELINE, there, width * tables / shards, False),
        Sent(PIPELINE, back, 4 * learned_tables / shards, False),
    ]


def layer_activations(program: Program, stages: Stages) -> list[Sent]:
    """Activations summed along tensor, keys and values along context, of the layers that a device computes.

    A gather and a scatter of the residual stream are counted as one sum; attention may gather something else.
    """
    cfg, shape = program.cfg, program.mesh.shape
    layers = stages.held_layers if stages.on else cfg.model.num_layers
    passes = 2 if (kept := saved_names(cfg.model)) is None or ATTENTION_ADDED in kept else 3
    own = shape["data"] * shape["fsdp"] * shape[CONTEXT]
    numbers = (3 * cfg.model.embed_dim + cfg.model.gathered_width) / 2  # of both parts of a block
    rows = cfg.tokens_per_step / own * numbers * compute_bytes(cfg)
    times = layers * cfg.train.num_microbatches
    shared = attention_sending(program)
    return [
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
