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
from jaxscale.core.axes.batch_axes import on_tpu
from jaxscale.core.models.config import (
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
from jaxscale.core.optim.config import OptimConfig
from jaxscale.kernels.config import ATTENTION_OUT
from jaxscale.kernels.host_memory import HOST
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.context import context_exchange_memory
from jaxscale.tools.planning.expert_traffic import expert_shards, moe_block_bytes, require_experts
from jaxscale.tools.planning.residuals import element_bytes, residuals_by_stack, tiled_bytes
from jaxscale.tools.planning.stages import compute_bytes, hop_bytes, pipeline_stages, stage_elements
from jaxscale.tools.planning.topology import Topology

# Fraction of GPU memory that jax preallocates, an upper limit for programs: docs.jax.dev, "GPU memory allocation".
GPU_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
GPU_FRACTION = 0.75
NUM_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 1, "adafactor": 0, "lamb": 2}  # at least
MOMENT_LABELS = {"adamw": "2 moments", "lion": "1 moment", "sgd": "momentum", "lamb": "2 moments"}
MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
# Peak over the sum of a block's arrays, since XLA:TPU does not reuse every buffer. Fitted to the ten TPU results in the
# headers of configs/ (libtpu 0.0.51, 2026-11-21); tests/planning/test_plan_memory.py compares.
BLOCK_SLACK = 1.25
# XLA:GPU uses about twice as much for the same arrays: three compilations in the same headers (jax 0.10.2), all with
# remat="full". The cause is unknown, so the factor applies to remat only.
GPU_SLACK = 2.15
HOP_BUFFERS = 4  # of a pipeline stage: send and receive, activations and gradients


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    kind: str
    num_bytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device by purpose."""

    params: int
    moments: int  # and the EMA of the parameters
    grads: int
    activations: int  # estimate
    accumulated: int = 0  # gradients of earlier microbatches, in addition to the current one's
    padding: int = 0  # of all but activations, to whole TPU tiles
    weights: int = 0  # of a pipeline stage, gathered once a step

    @property
    def state(self) -> int:
        """Bytes that do not depend on the batch size."""
        return self.params + self.moments + self.grads + self.weights

    @property
    def total(self) -> int:
        return self.state + self.accumulated + self.padding + self.activations


def memory_need(program: Program) -> MemoryNeed:
    """Returns bytes on each device at the peak of a step: float32 parameters, moments, gradients, and activations."""
    state = program.abstract_state
    params = shard_bytes(state.params)
    # Upper bound: a microbatch's gradients are sharded like the parameters, or more finely, and are not offloaded.
    trainable = jax.tree.map(lambda p, g: p if jax.tree.leaves(g) else None, state.params, program.abstract_grads)
    grads = shard_bytes(trainable) + host_bytes(trainable)
    accumulated = shard_bytes(program.abstract_grads) if program.cfg.train.num_microbatches > 1 else 0
    weights = stage_weight_bytes(program)
    if is_pipelined := bool(weights):  # a stage accumulates into one buffer
        grads, accumulated = 4 * sum(stage_elements(program, program.abstract_grads)), 0
    moments = shard_bytes((state.opt_state, state.ema))
    padding = 0
    if on_tpu(program.mesh):
        padded = {tree: padding_bytes(getattr(state, tree)) for tree in ("params", "opt_state", "ema")}
        grad_padding = padded["params"] + (padding_bytes(program.abstract_grads) if accumulated else 0)
        padding = sum(padded.values()) + (0 if is_pipelined else grad_padding)
    return MemoryNeed(params, moments, grads, activation_bytes(program), accumulated, padding, weights)


def stage_weight_bytes(program: Program) -> int:
    """Returns bytes of a pipeline stage's weights, gathered once a step in the compute dtype; 0 without a pipeline."""
    if not pipeline_stages(program.cfg, program.mesh.shape).is_pipelined:
        return 0
    return compute_bytes(program.cfg) * sum(stage_elements(program, program.abstract_state.params))


def memory_lower_bound(cfg: RunConfig, num_devices: int) -> MemoryNeed:
    """Returns a lower bound for a mesh that cannot be made: the state sharded evenly over all devices."""
    params = 4 * cfg.model.num_params // num_devices
    has_momentum = cfg.optim.name != "sgd" or cfg.optim.b1 > 0
    if cfg.lora.on:
        return MemoryNeed(params, 0, 0, 0)
    moments = NUM_MOMENTS[cfg.optim.name] * has_momentum * params * MOMENT_BYTES[cfg.optim.moment_dtype] // 4
    return MemoryNeed(params, moments + cfg.train.ema.on * params, params, 0)


def shard_shapes(abstract: Any, on_host: bool = False) -> list[tuple[tuple[int, ...], int]]:
    """Returns (local shape, bytes of an element) of each array in a tree of ShapeDtypeStructs with shardings."""
    leaves = [leaf for leaf in jax.tree.leaves(abstract) if (leaf.sharding.memory_kind == HOST) == on_host]
    return [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in leaves]


def shard_bytes(abstract: Any, on_host: bool = False) -> int:
    """Returns one device's bytes of such a tree: in its own memory, or in host memory."""
    return sum(size * math.prod(shape) for shape, size in shard_shapes(abstract, on_host))


def host_bytes(abstract: Any) -> int:
    """Returns one device's bytes of such a tree in host memory."""
    return shard_bytes(abstract, on_host=True)


def padding_bytes(abstract: Any) -> int:
    """Returns bytes that TPU tiling adds to one device's arrays of such a tree, without those in host memory."""
    return sum(tiled_bytes(shape, size, tpu=True) - size * math.prod(shape) for shape, size in shard_shapes(abstract))


def activation_bytes(program: Program) -> int:
    """Returns bytes saved for the backward pass of one microbatch on one device, plus the largest working set.

    Without remat: every array in tools/planning/residuals.py, of all blocks. With remat: the arrays that the policy
    saves, and one whole block (or one of its row chunks): the residual stream twice and its normalised forms (4 D),
    attention's inputs and output, and the MLP's inner arrays. Offloaded arrays do not count. The working set is the
    larger of one block with its gathered weights, and the output projection with the logits of one loss chunk and their
    gradient. A pipeline stage saves layer inputs of several microbatches (Stages.slots) and the buffers that it sends;
    under context parallelism a block also holds remote keys and values. Blocks of experts: experts.moe_block_bytes.
    """
    cfg, shape = program.cfg, program.mesh.shape
    model, lengths, stages = cfg.model, cfg.row_lengths, pipeline_stages(cfg, shape)
    rows = cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards
    tokens = rows * (lengths.row + (lengths.encoder or 0)) // shape["context"]
    width, tensor = compute_bytes(cfg), shape["tensor"]
    sizes = activation_sizes(model, tensor)
    inner = sum(sizes[name] for name in sizes if name not in (BLOCK_INPUT, ATTENTION_ADDED)) + model.mlp_width // tensor
    block_elements = 2 * model.embed_dim + 2 * model.embed_dim // tensor + inner
    if program.plan.attention.name == "xla":  # float32 scores and probabilities per head
        block_elements += 2 * (model.num_heads // tensor) * max(lengths.row, lengths.encoder or 0) * 4 // width
    saved_activations, experts = saved_names(model), model.experts
    gathered = gathered_weight_bytes(program, width)
    if saved_activations is None:
        stacks = residuals_by_stack(program).values()
        saved = sum(layers * layer_bytes for layers, layer_bytes in stacks)
        block = max(layer_bytes for _, layer_bytes in stacks)
        saved += cast_weight_bytes(program)
    else:
        saved = tokens * width * model.num_layers * sum(sizes[name] for name in saved_activations)
        saved -= tokens * width * unsaved_elements(program, saved_activations)
        parts = math.gcd(model.row_parts, rows)
        inout = 2 * model.embed_dim  # the block's input and output, of all rows
        block = tokens * width * (inout + (block_elements - inout) // parts)
        gathered *= 1 if parts == 1 else 2  # weight gradients, until the last chunk's are added
    vocab = model.vocab_size // tensor // stages.head_shards
    head = 2 * 4 * min(tokens, model.loss_chunk_tokens) * vocab + width * model.embed_dim * vocab
    if stages.is_pipelined:
        blocks, _ = stage_elements(program, program.abstract_grads)
        gathered = 4 * blocks // stages.layer_slots  # one layer's gradients before accumulation
        num_buffers = HOP_BUFFERS + stages.pending_cotangents + stages.deferred
        saved = saved_input_bytes(program) + num_buffers * hop_bytes(program)
        head += 2 * tokens * width * model.embed_dim  # the last stage's output and its gradient, on every stage
    if experts is None:
        block = gathered + round(BLOCK_SLACK * block + context_exchange_memory(program))
    else:
        reduced = jnp.dtype(cfg.train.reduce_dtype).itemsize
        block = moe_block_bytes(program, width, reduced, staged=stages.is_pipelined)
        block = round(block + context_exchange_memory(program))
    total = saved + max(block, head)
    on_gpu = program.mesh.devices.flat[0].platform == "gpu"
    return round(GPU_SLACK * total) if on_gpu and saved_activations is not None else total


def unsaved_elements(program: Program, activations: Collection[str]) -> int:
    """Returns elements per token of these activations, over all layers, that are never saved: the experts' own, where
    rows are sent to the experts."""
    if expert_shards(program) == 1:
        return 0
    experts, tensor = require_experts(program.cfg.model), program.mesh.shape["tensor"]
    layers = program.cfg.model.num_layers - experts.first_dense
    return len({MLP_GATE, MLP_UP} & set(activations)) * layers * experts.chosen * experts.mlp_dim // tensor


def saved_input_bytes(program: Program) -> int:
    """Returns bytes of the layer inputs that a pipeline stage saves, of all microbatches in flight."""
    stages = pipeline_stages(program.cfg, program.mesh.shape)
    return stages.slots * stages.saved_input_layers * hop_bytes(program) if stages.is_pipelined else 0


def gathered_weight_bytes(program: Program, width: int) -> int:
    """Returns bytes of one block's weights while it is computed: all-gathered, `width` bytes an element.

    Adds the unreduced gradient of the largest array; across slices or copies (mesh data), of all arrays.
    """
    shape, params = program.mesh.shape, program.abstract_state.params
    if program.cfg.rules != "zero3" or shape["fsdp"] * shape["context"] == 1:
        return 0
    sizes = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if "blocks" in jax.tree_util.keystr(path):
            split = shape["tensor"] if "tensor" in str(leaf.sharding.spec) else 1
            sizes.append(leaf.size // program.cfg.model.num_layers // split)
    unreduced = 4 * sum(sizes) if shape["data"] > 1 else 0
    return width * (sum(sizes) + max(sizes)) + unreduced


def cast_weight_bytes(program: Program) -> int:
    """Returns bytes of the local weight shards cast to the compute dtype, where several microbatches gather them.

    XLA casts them once, before the first microbatch. With remat BLOCK_SLACK covers it.
    """
    cfg = program.cfg
    operand = element_bytes(cfg.model, on_tpu(program.mesh))["operand"]
    shared = program.mesh.shape["fsdp"] * program.mesh.shape["context"] > 1
    gathers = cfg.rules == "zero3" and cfg.train.num_microbatches > 1 and shared
    return shard_bytes(program.abstract_state.params) * operand // 4 if gathers and operand < 4 else 0


def activation_sizes(model: ModelConfig, tensor: int) -> dict[str, int]:
    """Returns elements per token of each named activation of a block on one of `tensor` devices."""
    D, mlp = model.embed_dim, model.mlp_width
    sizes = {BLOCK_INPUT: D, ATTENTION_ADDED: D, QUERY: model.query_width, ATTENTION_OUT: model.result_width}
    sizes |= {KEY: model.key_width, VALUE: model.value_width, MLP_GATE: mlp, MLP_UP: mlp}
    sizes |= {LATENT: tensor * model.latent_width}  # replicated over tensor
    return {name: sizes[name] // tensor for name in model.activation_names}


def usable_memory(topology: Topology) -> tuple[int, str]:
    """Returns (bytes that a program may use on one device, the reason)."""
    hbm_bytes = topology.chip.hbm_bytes
    if topology.platform != "gpu":
        return hbm_bytes, "all of it is available to the program"
    for name in GPU_FRACTION_VARIABLES:
        if text := os.environ.get(name):
            try:
                fraction = float(text)
            except ValueError:
                fraction = math.nan
            if not 0 < fraction <= 1:
                raise BadInput(f"{name}={text!r} must be a number above 0, at most 1, such as 0.9")
            return int(hbm_bytes * fraction), f"jax preallocates {name}={text} of it"
    fix = f"for more, set {GPU_FRACTION_VARIABLES[0]}=0.92 here and in training"
    return int(hbm_bytes * GPU_FRACTION), f"jax preallocates {GPU_FRACTION:.0%} of a GPU's memory; {fix}"


def memory_rows(program: Program, need: MemoryNeed) -> tuple[MemoryRow, ...]:
    """Returns memory of one device by kind. The state is counted from the shardings that training uses."""
    cfg, state = program.cfg, program.abstract_state
    count = units.count(cfg.model.num_params)
    trainable = units.count(sum(leaf.size for leaf in jax.tree.leaves(program.abstract_grads)))
    stages, tensor = pipeline_stages(cfg, program.mesh.shape), program.mesh.shape["tensor"]
    all_shards = math.prod(program.mesh.shape[axis] for axis in ("fsdp", "expert", "context")) * tensor
    state_shards = (all_shards if cfg.rules == "zero3" else tensor, all_shards)  # of parameters and moments
    stage_shards = [stages.size if is_sharded_over(tree, "pipeline") else 1 for tree in (state.params, state.opt_state)]
    state_shards = tuple(parts * stage for parts, stage in zip(state_shards, stage_shards))
    divided_by = lambda parts: f" / {parts}" if parts > 1 else ""
    moments, average = shard_bytes(state.opt_state), shard_bytes(state.ema)
    rows = [
        MemoryRow("parameters", need.params, f"4 B x {count}{divided_by(state_shards[0])}"),
        MemoryRow("moments", moments, f"{moments_formula(cfg.optim, trainable)}{divided_by(state_shards[1])}"),
    ]
    if average:
        rows.append(MemoryRow("average of parameters", average, f"4 B x {trainable}{divided_by(state_shards[1])}"))
    if stages.is_pipelined:
        rows += stage_rows(program, need)
    else:
        rows.append(MemoryRow("gradients", need.grads, f"4 B x {trainable}{divided_by(state_shards[0])}, at most"))
    if need.accumulated:
        source = f"4 B x {trainable}{divided_by(all_shards)}: microbatches"
        rows.append(MemoryRow("accumulated gradients", need.accumulated, source))
    if need.padding:
        rows.append(MemoryRow("padding", need.padding, "of the above, to TPU tiles of 8 x 128 elements"))
    num_rows = units.plural(cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards, "row")
    divided_tokens = f" / {program.mesh.shape['context']}" if program.mesh.shape["context"] > 1 else ""
    source = f"{num_rows} of {cfg.row_lengths.row:,}{divided_tokens} tokens, remat={cfg.model.remat}: estimate"
    if remote_kv := context_exchange_memory(program):
        source += f"; includes {units.size(remote_kv)} of remote keys and values ({program.plan.context_exchange.name})"
    return (*rows, MemoryRow("activations", need.activations - saved_input_bytes(program), source))


def moments_formula(optim: OptimConfig, trainable: str) -> str:
    """Returns the formula of the optimizer state for this many parameters."""
    if optim.name == "adafactor":
        return f"4 B for each row and column of the matrices of {trainable}"
    a_moment = f"{MOMENT_BYTES[optim.moment_dtype]} B" + " and scales" * (optim.moment_dtype == "int8")
    if optim.name == "muon":
        return f"{a_moment} x {trainable}, and again outside the blocks' matrices,"
    return f"{MOMENT_LABELS[optim.name]} x {a_moment} x {trainable}"


def stage_rows(program: Program, need: MemoryNeed) -> list[MemoryRow]:
    """Returns the arrays that a pipeline stage holds through a step."""
    cfg, shape = program.cfg, program.mesh.shape
    stages, tensor = pipeline_stages(cfg, shape), shape["tensor"]
    numbers = [
        units.count(sum(stage_elements(program, tree)))
        for tree in (program.abstract_state.params, program.abstract_grads)
    ]
    suffix = f"of a stage{f' / tensor {tensor}' if tensor > 1 else ''}"
    in_flight = f"{stages.slots} of {stages.chunk_runs} {'chunks' if stages.chunks > 1 else 'microbatches'} in flight"
    inputs = f"{in_flight} x {units.plural(stages.saved_input_layers, 'layer')} x {units.size(hop_bytes(program))}"
    return [
        MemoryRow("gathered weights", need.weights, f"{compute_bytes(cfg)} B x {numbers[0]} {suffix}: once a step"),
        MemoryRow("gradients", need.grads, f"4 B x {numbers[1]} {suffix}: accumulated over the step"),
        MemoryRow("layer inputs", saved_input_bytes(program), inputs),
    ]


def is_sharded_over(abstract: Any, axis: str) -> bool:
    """True if any array of such a tree is sharded over a mesh axis."""
    return any(axis in str(leaf.sharding.spec) for leaf in jax.tree.leaves(abstract))


def find_microbatches(program: Program, usable: int) -> int | None:
    """Returns the fewest microbatches whose estimate fits into `usable` bytes, or None."""
    cfg, chunks = program.cfg, pipeline_stages(program.cfg, program.mesh.shape).chunks
    for parts in units.divisors(cfg.rows_per_step):
        if cfg.rows_per_step // parts % program.batch_shards or chunks > 1 and parts % program.mesh.shape["pipeline"]:
            continue
        train = dataclasses.replace(cfg.train, num_microbatches=parts)
        candidate = program.with_cfg(dataclasses.replace(cfg, train=train))
        if memory_need(candidate).total <= usable:
            return parts
    return None
