"""Bytes per device that a training step needs: the state exactly, activations as an estimate."""

import dataclasses
import math
import os
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale import units
from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.models.config import (
    ATTENTION_ADDED,
    BLOCK_INPUT,
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
from jaxscale.optim.config import OptimConfig
from jaxscale.planning.experts import block_memory, experts_of, known_experts, resting_parts
from jaxscale.planning.positions import attention_memory, attention_way
from jaxscale.planning.residuals import number_bytes, residuals_by_stack, tiled_bytes
from jaxscale.planning.stages import compute_bytes, held_numbers, hop_bytes, stages_of
from jaxscale.planning.topology import Topology
from jaxscale.sharding.batch_axes import on_tpu
from jaxscale.sharding.offload import HOST
from jaxscale.system.exits import BadInput

# docs.jax.dev, "GPU memory allocation": the part of a GPU's memory that jax takes at its start, and no program exceeds.
GPU_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
GPU_FRACTION = 0.75
NUM_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 1, "adafactor": 0, "lamb": 2}  # at least
MOMENTS_IN_WORDS = {"adamw": "2 moments", "lion": "1 moment", "sgd": "momentum", "lamb": "2 moments"}
MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
# Over what a block's own arrays sum to: XLA:TPU does not reuse all at once. Fitted to the ten TPU results in the
# headers of configs/ (libtpu 0.0.51, 2026-11-21), which tests/planning/test_plan_memory.py compares with.
BLOCK_SLACK = 1.25
# XLA:GPU needs about twice as much for the same arrays: three compilations in the same headers (jax 0.10.2), all with
# remat="full". Why was not looked into, so it is used with remat alone.
GPU_SLACK = 2.15
TRANSIT = 4  # what a stage of a pipeline receives and sends, up and down


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind on one device."""

    kind: str
    num_bytes: int
    source: str  # how it is known


@dataclasses.dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device."""

    params: int
    moments: int  # and the average of the parameters, where one is kept
    grads: int
    activations: int  # an estimate: XLA decides
    summed: int = 0  # gradients of earlier microbatches, beside those of the one that is computed
    padding: int = 0  # of all these but activations, up to whole tiles of a TPU
    weights: int = 0  # of a pipeline's stage, gathered once a step

    @property
    def state(self) -> int:
        """What no batch size can lower."""
        return self.params + self.moments + self.grads + self.weights

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.summed + self.padding + self.activations


def memory_need(program: Program) -> MemoryNeed:
    """Bytes on each device at the peak of a step: float32 parameters, moments and gradients, and activations."""
    state = program.abstract_state
    params = shard_bytes(state.params)
    # Of a microbatch they are cut like the parameters, or more finely, wherever those rest: an upper bound.
    learned = jax.tree.map(lambda p, g: p if jax.tree.leaves(g) else None, state.params, program.abstract_grads)
    grads = shard_bytes(learned) + host_bytes(learned)
    summed = shard_bytes(program.abstract_grads) if program.cfg.train.num_microbatches > 1 else 0
    weights = stage_weights(program)
    if staged := bool(weights):  # one sum of a stage's gradients is carried through the step
        grads, summed = 4 * sum(held_numbers(program, program.abstract_grads)), 0
    moments = shard_bytes((state.opt_state, state.ema))
    padding = 0
    if on_tpu(program.mesh):
        filled = {tree: padding_bytes(getattr(state, tree)) for tree in ("params", "opt_state", "ema")}
        again = filled["params"] + (padding_bytes(program.abstract_grads) if summed else 0)
        padding = sum(filled.values()) + (0 if staged else again)
    return MemoryNeed(params, moments, grads, activation_bytes(program), summed, padding, weights)


def stage_weights(program: Program) -> int:
    """Bytes of the weights of a stage, which a pipeline gathers once a step in the type of its products; else 0."""
    if not stages_of(program.cfg, program.mesh.shape).on:
        return 0
    return compute_bytes(program.cfg) * sum(held_numbers(program, program.abstract_state.params))


def least_memory(cfg: RunConfig, num_devices: int) -> MemoryNeed:
    """A lower bound for a mesh that cannot be made: the state shared evenly by all devices."""
    params = 4 * cfg.model.num_params // num_devices
    has_momentum = cfg.optim.name != "sgd" or cfg.optim.b1 > 0
    if cfg.lora.on:
        return MemoryNeed(params, 0, 0, 0)
    moments = NUM_MOMENTS[cfg.optim.name] * has_momentum * params * MOMENT_BYTES[cfg.optim.moment_dtype] // 4
    return MemoryNeed(params, moments + cfg.train.ema.on * params, params, 0)


def shards(abstract: Any, on_host: bool = False) -> list[tuple[tuple[int, ...], int]]:
    """(shape, bytes of an element) of one device's parts of a tree of ShapeDtypeStructs with shardings."""
    leaves = [leaf for leaf in jax.tree.leaves(abstract) if (leaf.sharding.memory_kind == HOST) == on_host]
    return [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in leaves]


def shard_bytes(abstract: Any, on_host: bool = False) -> int:
    """Bytes of one device's parts of such a tree: those in its own memory, or those in the host's."""
    return sum(size * math.prod(shape) for shape, size in shards(abstract, on_host))


def host_bytes(abstract: Any) -> int:
    """Bytes of one device's parts of such a tree that are in the host's memory."""
    return shard_bytes(abstract, on_host=True)


def padding_bytes(abstract: Any) -> int:
    """Bytes by which a TPU's tiles are larger than one device's parts of such a tree, the host's left out."""
    return sum(tiled_bytes(shape, size, tpu=True) - size * math.prod(shape) for shape, size in shards(abstract))


def activation_bytes(program: Program) -> int:
    """What the backward pass keeps of one microbatch on one device, and the most that it works with at one time.

    Without remat, every array that planning/residuals.py names, of all blocks. With it what the policy keeps, and one
    block whole, or of it one part of the rows: the residual stream twice and its normalised forms (4 D), attention's
    inputs and output, and the MLP's inner arrays. What goes to the host is left out. Beside that, the larger of two:
    one block and its gathered weights, or the output projection with the logits of one chunk of the loss and their
    gradient. A stage of a pipeline keeps the inputs of its layers of several microbatches (Stages.slots), and what
    travels; a block whose positions are shared has keys and values of others beside it. A block of experts has more
    arrays, and weights that are larger than all of them (experts.block_memory).
    """
    cfg, shape = program.cfg, program.mesh.shape
    model, lengths, stages = cfg.model, cfg.row_lengths, stages_of(cfg, shape)
    rows = cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards
    tokens = rows * (lengths.row + (lengths.encoder or 0)) // shape["context"]
    width, tensor = compute_bytes(cfg), shape["tensor"]
    sizes = activation_sizes(model, tensor)
    inner = sum(sizes[name] for name in sizes if name not in (BLOCK_INPUT, ATTENTION_ADDED)) + model.mlp_width // tensor
    whole = 2 * model.embed_dim + 2 * model.embed_dim // tensor + inner
    if program.attention == "xla":  # float32 scores and probabilities of each head
        whole += 2 * (model.num_heads // tensor) * max(lengths.row, lengths.encoder or 0) * 4 // width
    names, experts = saved_names(model), experts_of(model)
    gathered = gathered_bytes(program, width)
    if names is None:
        stacks = residuals_by_stack(program).values()
        kept, block = sum(layers * of_layer for layers, of_layer in stacks), max(of_layer for _, of_layer in stacks)
        kept += cast_bytes(program)
    else:
        kept = tokens * width * model.num_layers * sum(sizes[name] for name in names)
        kept -= tokens * width * unkept_numbers(program, names)
        parts = math.gcd(model.row_parts, rows)
        ends = 2 * model.embed_dim  # the block's input and result, of all rows
        block = tokens * width * (ends + (whole - ends) // parts)
        gathered *= 1 if parts == 1 else 2  # gradients of all its weights, until those of the last part are added
    vocab = model.vocab_size // tensor // stages.head_shares
    head = 2 * 4 * min(tokens, model.loss_chunk_tokens) * vocab + width * model.embed_dim * vocab
    if stages.on:
        blocks, _ = held_numbers(program, program.abstract_grads)
        gathered = 4 * blocks // stages.held_layers  # gradients of a layer, before they are added
        kept = kept_inputs(program) + (TRANSIT + stages.held + stages.later) * hop_bytes(program)
        head += 2 * tokens * width * model.embed_dim  # the last stage's result and its gradient, on every stage
    work = gathered + round(BLOCK_SLACK * block + attention_memory(program))
    if experts is not None:
        reduced = jnp.dtype(cfg.train.reduce_dtype).itemsize
        work = round(block_memory(program, width, reduced, staged=stages.on) + attention_memory(program))
    total = kept + max(work, head)
    on_gpu = program.mesh.devices.flat[0].platform == "gpu"
    return round(GPU_SLACK * total) if on_gpu and names is not None else total


def unkept_numbers(program: Program, names: Collection[str]) -> int:
    """Per token, of the activations with these names in all layers, those that no device keeps: the experts' own, where
    rows are sent to them."""
    if resting_parts(program) == 1:
        return 0
    own, tensor = known_experts(program.cfg.model), program.mesh.shape["tensor"]
    layers = program.cfg.model.num_layers - own.first_dense
    return len({MLP_GATE, MLP_UP} & set(names)) * layers * own.chosen * own.mlp_dim // tensor


def kept_inputs(program: Program) -> int:
    """Bytes of the inputs of its layers that a stage of a pipeline keeps, of all microbatches under way at one time."""
    stages = stages_of(program.cfg, program.mesh.shape)
    return stages.slots * stages.kept_layers * hop_bytes(program) if stages.on else 0


def gathered_bytes(program: Program, width: int) -> int:
    """Bytes of the weights of one block while it is computed: whole where devices share them, `width` an element.

    With them the gradient of the largest, not summed over devices yet; over slices or copies (mesh data), those of all.
    """
    shape, params = program.mesh.shape, program.abstract_state.params
    if program.cfg.rules != "zero3" or shape["fsdp"] * shape["context"] == 1:
        return 0
    sizes = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if "blocks" in jax.tree_util.keystr(path):
            split = shape["tensor"] if "tensor" in str(leaf.sharding.spec) else 1
            sizes.append(leaf.size // program.cfg.model.num_layers // split)
    summing = 4 * sum(sizes) if shape["data"] > 1 else 0
    return width * (sum(sizes) + max(sizes)) + summing


def cast_bytes(program: Program) -> int:
    """Bytes of the device's own parts of the weights in the type of the products, where several microbatches gather
    them: XLA casts them once, before the first. With remat BLOCK_SLACK stands for it."""
    cfg = program.cfg
    operand = number_bytes(cfg.model, on_tpu(program.mesh))["operand"]
    shared = program.mesh.shape["fsdp"] * program.mesh.shape["context"] > 1
    gathers = cfg.rules == "zero3" and cfg.train.num_microbatches > 1 and shared
    return shard_bytes(program.abstract_state.params) * operand // 4 if gathers and operand < 4 else 0


def activation_sizes(model: ModelConfig, tensor: int) -> dict[str, int]:
    """Elements per token of each named activation of a block on one of `tensor` devices."""
    D, mlp = model.embed_dim, model.mlp_width
    sizes = {BLOCK_INPUT: D, ATTENTION_ADDED: D, QUERY: model.query_width, ATTENTION_OUT: model.result_width}
    sizes |= {KEY: model.key_width, VALUE: model.value_width, MLP_GATE: mlp, MLP_UP: mlp}
    sizes |= {LATENT: tensor * model.latent_width}  # whole on each
    return {name: sizes[name] // tensor for name in model.activation_names}


def usable_memory(topology: Topology) -> tuple[int, str]:
    """(bytes that a program may use on one device, why so many)."""
    there = topology.chip.hbm_bytes
    if topology.platform != "gpu":
        return there, "all of it is the program's"
    for name in GPU_FRACTION_VARIABLES:
        if text := os.environ.get(name):
            try:
                fraction = float(text)
            except ValueError:
                fraction = math.nan
            if not 0 < fraction <= 1:
                raise BadInput(f"{name}={text!r} must be a number above 0, at most 1, such as 0.9")
            return int(there * fraction), f"{name}={text} of it is for jax"
    way_out = f"set {GPU_FRACTION_VARIABLES[0]}=0.92 here and in training for more"
    return int(there * GPU_FRACTION), f"jax takes {GPU_FRACTION:.0%} of a GPU's memory; {way_out}"


def memory_rows(program: Program, need: MemoryNeed) -> tuple[MemoryRow, ...]:
    """Memory of one device by kind. The state is counted from the shardings that training uses."""
    cfg, state = program.cfg, program.abstract_state
    count = units.count(cfg.model.num_params)
    learned = units.count(sum(leaf.size for leaf in jax.tree.leaves(program.abstract_grads)))
    stages, tensor = stages_of(cfg, program.mesh.shape), program.mesh.shape["tensor"]
    both = math.prod(program.mesh.shape[axis] for axis in ("fsdp", "expert", "context")) * tensor
    over = {"zero1": (tensor, both), "zero2": (tensor, both), "zero3": (both, both)}[cfg.rules]
    rest = [stages.size if names_axis(tree, "pipeline") else 1 for tree in (state.params, state.opt_state)]
    over = tuple(parts * stage for parts, stage in zip(over, rest))
    share = lambda parts: f" / {parts}" if parts > 1 else ""
    moments, average = shard_bytes(state.opt_state), shard_bytes(state.ema)
    rows = [
        MemoryRow("parameters", need.params, f"4 B x {count}{share(over[0])}"),
        MemoryRow("moments", moments, f"{moments_in_words(cfg.optim, learned)}{share(over[1])}"),
    ]
    if average:
        rows.append(MemoryRow("average of parameters", average, f"4 B x {learned}{share(over[1])}"))
    if stages.on:
        rows += stage_rows(program, need)
    else:
        rows.append(MemoryRow("gradients", need.grads, f"4 B x {learned}{share(over[0])}, at most"))
    if need.summed:
        rows.append(MemoryRow("gradients summed so far", need.summed, f"4 B x {learned}{share(both)}: microbatches"))
    if need.padding:
        rows.append(MemoryRow("padding", need.padding, "of the above, to a TPU's tiles of 8 x 128 numbers"))
    made = units.plural(cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards, "row")
    cut = f" / {program.mesh.shape['context']}" if program.mesh.shape["context"] > 1 else ""
    what = f"{made} of {cfg.row_lengths.row:,}{cut} tokens, remat={cfg.model.remat}: estimate"
    if shared := attention_memory(program):
        what += f"; {units.size(shared)} of others' keys and values among them ({attention_way(program)})"
    return (*rows, MemoryRow("activations", need.activations - kept_inputs(program), what))


def moments_in_words(optim: OptimConfig, learned: str) -> str:
    """What the optimizer keeps of so many parameters."""
    if optim.name == "adafactor":
        return f"4 B for each row and column of the matrices of {learned}"
    a_moment = f"{MOMENT_BYTES[optim.moment_dtype]} B" + " and scales" * (optim.moment_dtype == "int8")
    if optim.name == "muon":
        return f"{a_moment} x {learned}, and again outside the blocks' matrices,"
    return f"{MOMENTS_IN_WORDS[optim.name]} x {a_moment} x {learned}"


def stage_rows(program: Program, need: MemoryNeed) -> list[MemoryRow]:
    """What a stage of a pipeline holds through a step."""
    cfg, shape = program.cfg, program.mesh.shape
    stages, tensor = stages_of(cfg, shape), shape["tensor"]
    numbers = [
        units.count(sum(held_numbers(program, tree)))
        for tree in (program.abstract_state.params, program.abstract_grads)
    ]
    of_stage = f"of a stage{f', its part of tensor {tensor}' if tensor > 1 else ''}"
    kept = f"{stages.slots} of {stages.runs} {'chunks' if stages.chunks > 1 else 'microbatches'} under way"
    layers = units.plural(stages.kept_layers, "layer")
    return [
        MemoryRow("gathered weights", need.weights, f"{compute_bytes(cfg)} B x {numbers[0]} {of_stage}: once a step"),
        MemoryRow("gradients", need.grads, f"4 B x {numbers[1]} {of_stage}: summed through the step"),
        MemoryRow("inputs of layers", kept_inputs(program), f"{kept} x {layers} x {units.size(hop_bytes(program))}"),
    ]


def names_axis(abstract: Any, axis: str) -> bool:
    """True if the sharding of some array of such a tree names a mesh axis."""
    return any(axis in str(leaf.sharding.spec) for leaf in jax.tree.leaves(abstract))


def fitting_parts(program: Program, usable: int) -> int | None:
    """The fewest microbatches with which the estimate fits into so many bytes; None if none does."""
    cfg, chunks = program.cfg, stages_of(program.cfg, program.mesh.shape).chunks
    for parts in units.divisors(cfg.rows_per_step):
        if cfg.rows_per_step // parts % program.batch_shards or chunks > 1 and parts % program.mesh.shape["pipeline"]:
            continue
        train = dataclasses.replace(cfg.train, num_microbatches=parts)
        wanted = dataclasses.replace(program, cfg=dataclasses.replace(cfg, train=train))
        if memory_need(wanted).total <= usable:
            return parts
    return None
