"""Bytes per device of a training step. The state is exact, activations are an estimate.

The axes of the plan return the bytes that their collectives need (core/axes), and this module adds them. Routing is
assumed to be balanced: all experts get the same number of rows, and one all-to-all round is enough.
"""

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.core.axes.context_axis import AttentionBytes
from jaxscale.core.axes.expert_axis import EXPERTS
from jaxscale.core.models.config import (
    ATTENTION_ADDED,
    BLOCK_INPUT,
    BLOCKS,
    DENSE,
    KEY,
    LATENT,
    MLP_GATE,
    MLP_UP,
    QUERY,
    VALUE,
    ExpertsConfig,
    ModelConfig,
    saved_names,
)
from jaxscale.core.shardings import mesh_axis_names
from jaxscale.kernels.collectives import LANES, on_tpu
from jaxscale.kernels.compiler_options import PIPELINE, PIPELINED_GATHER
from jaxscale.kernels.config import ATTENTION_OUT
from jaxscale.kernels.host_memory import HOST
from jaxscale.kernels.matmul.expert_all_to_all import round_capacity
from jaxscale.program.residuals import element_bytes, residuals_by_stack, tiled_bytes

F32 = 4
NUM_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 1, "adafactor": 0, "lamb": 2}  # lower bounds
MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
MATRIX, EXPERT_MATRIX = ("embed", "mlp"), (EXPERTS, "expert_embed", "mlp")  # logical axes of most weights
# Ratio of peak memory to the sum of a block's arrays, because XLA:TPU does not reuse every buffer. Fitted to the ten
# TPU results in the headers of configs/ (libtpu 0.0.51, 2026-11-21). tests/planning/test_plan_memory.py compares them.
BLOCK_SLACK = 1.25
# XLA:GPU needs about twice as much for the same arrays in three compilations in the same headers (jax 0.10.2), all with
# remat="full". The cause is unknown, so the factor applies only with remat.
GPU_SLACK = 2.15


@dataclasses.dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device by purpose."""

    params: int
    moments: int  # including the EMA of the parameters
    grads: int
    activations: int  # estimated
    accumulated: int = 0  # accumulated gradients, in addition to those of the current microbatch
    padding: int = 0  # padding of all arrays except activations to whole TPU tiles
    weights: int = 0  # weights of a pipeline stage, gathered once per step

    @property
    def state(self) -> int:
        """Bytes that do not depend on the batch size."""
        return self.params + self.moments + self.grads + self.weights

    @property
    def total(self) -> int:
        return self.state + self.accumulated + self.padding + self.activations


def memory_need(program: Program) -> MemoryNeed:
    """Returns the peak bytes per device in a training step: parameters, moments, gradients and activations."""
    state = program.abstract_state
    params = shard_bytes(state.params)
    # Upper bound. Gradients of a microbatch are sharded like the parameters or over more devices, and not offloaded.
    trainable = jax.tree.map(lambda p, g: p if jax.tree.leaves(g) else None, state.params, program.abstract_grads)
    grads = shard_bytes(trainable) + host_bytes(trainable)
    accumulated = shard_bytes(program.abstract_grads) if program.cfg.train.num_microbatches > 1 else 0
    weights = stage_weight_bytes(program)
    if is_pipelined := bool(weights):  # a stage accumulates gradients in one buffer
        grads, accumulated = F32 * sum(stage_elements(program, program.abstract_grads)), 0
    moments = shard_bytes((state.opt_state, state.ema))
    padding = 0
    if on_tpu(program.mesh):
        padded = {tree: padding_bytes(getattr(state, tree)) for tree in ("params", "opt_state", "ema")}
        grad_padding = padded["params"] + (padding_bytes(program.abstract_grads) if accumulated else 0)
        padding = sum(padded.values()) + (0 if is_pipelined else grad_padding)
    return MemoryNeed(params, moments, grads, activation_bytes(program), accumulated, padding, weights)


def memory_lower_bound(cfg: RunConfig, num_devices: int) -> MemoryNeed:
    """Returns a lower bound for any mesh: the bytes of the state if it is sharded evenly over all devices."""
    params = F32 * cfg.model.num_params // num_devices
    has_momentum = cfg.optim.name != "sgd" or cfg.optim.b1 > 0
    if cfg.lora.on:
        return MemoryNeed(params, 0, 0, 0)
    moments = NUM_MOMENTS[cfg.optim.name] * has_momentum * params * MOMENT_BYTES[cfg.optim.moment_dtype] // F32
    return MemoryNeed(params, moments + cfg.train.ema.on * params, params, 0)


def shard_shapes(abstract: Any, on_host: bool = False) -> list[tuple[tuple[int, ...], int]]:
    """Returns (local shape, bytes per element) of each array in a tree of ShapeDtypeStructs with shardings."""
    leaves = [leaf for leaf in jax.tree.leaves(abstract) if (leaf.sharding.memory_kind == HOST) == on_host]
    return [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in leaves]


def shard_bytes(abstract: Any, on_host: bool = False) -> int:
    """Returns the bytes per device of a tree of ShapeDtypeStructs in device memory, or in host memory if `on_host`."""
    return sum(size * math.prod(shape) for shape, size in shard_shapes(abstract, on_host))


def host_bytes(abstract: Any) -> int:
    """Returns the bytes per device of a tree of ShapeDtypeStructs in host memory."""
    return shard_bytes(abstract, on_host=True)


def padding_bytes(abstract: Any) -> int:
    """Returns the bytes per device that TPU tiling adds to a tree of ShapeDtypeStructs in device memory."""
    return sum(tiled_bytes(shape, size, tpu=True) - size * math.prod(shape) for shape, size in shard_shapes(abstract))


class StageElements(NamedTuple):
    """Number of array elements per device in a pipelined step, sharded only over tensor, pipeline and expert."""

    layers: int  # elements of layers, without experts
    experts: int
    others: int


def stage_elements(program: Program, tree: Any) -> StageElements:
    """Returns the number of elements in the arrays of one stage. tree: pytree with the structure of the parameters."""
    plan, sizes = program.plan, {"layers": 0, "experts": 0, "others": 0}
    vocab_shards = plan.pipeline.size if plan.pipeline.shards_vocab else 1
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = functools.reduce(lambda tree, key: tree[key.key], path, program.model.axes)
        is_sharded = any("tensor" in mesh_axis_names(plan.rules.params[axis]) for axis in axes)
        num_shards = (plan.tensor.size if is_sharded else 1) * (plan.expert.size if EXPERTS in axes else 1)
        if path[0].key == BLOCKS:
            name = "experts" if EXPERTS in axes else "layers"
            sizes[name] += math.prod(leaf.shape[1:]) * plan.pipeline.layer_slots // num_shards
        else:
            sizes["others"] += leaf.size // num_shards // (vocab_shards if "vocab" in axes else 1)
    return StageElements(**sizes)


def stage_weight_bytes(program: Program) -> int:
    """Returns the bytes of a pipeline stage's weights, gathered in the compute dtype, or 0 without a pipeline."""
    if program.plan.pipeline.size == 1:
        return 0
    return compute_bytes(program) * sum(stage_elements(program, program.abstract_state.params))


def compute_bytes(program: Program) -> int:
    """Returns bytes per element of the compute dtype."""
    return jnp.dtype(program.cfg.model.compute_dtype).itemsize


def device_rows(program: Program) -> int:
    """Returns the number of sequences per microbatch and device."""
    return program.cfg.rows_per_step // program.cfg.train.num_microbatches // program.batch_shards


def device_tokens(program: Program) -> int:
    """Returns the number of tokens per microbatch and device, before the tensor axis shards the positions."""
    cfg = program.cfg
    return cfg.tokens_per_step // cfg.train.num_microbatches // program.batch_shards // program.plan.context.size


def hop_bytes(program: Program) -> int:
    """Returns the local bytes of one microbatch's residual stream, which each stage sends to the next stage."""
    return device_tokens(program) * program.cfg.model.embed_dim // program.plan.tensor.size * compute_bytes(program)


def attention_bytes(program: Program) -> AttentionBytes:
    """Returns the bytes of the local attention arrays for one layer and one microbatch."""
    cfg, model, needs, size = program.cfg, program.cfg.model, program.plan.needs, program.plan.context.size
    width, row, saved = compute_bytes(program), program.cfg.row_lengths.row, saved_names(model)
    bytes_per_feature = device_tokens(program) / program.plan.tensor.size * width
    keys = bytes_per_feature * (model.key_width + model.value_width)
    windowed, window = 0.0, needs.window or 1
    if needs.window is not None and window - 1 <= row // (2 * size):  # the window ends in the previous chunk
        windowed = needs.window_layers.windowed / needs.window_layers.total if needs.window_layers else 1.0
    return AttentionBytes(
        keys=keys,
        queries=bytes_per_feature * (model.query_width + model.result_width) / 2,
        float32_ratio=F32 / width,
        forward_passes=1 if saved is None else 2,
        ring_passes=1 if saved is None or ATTENTION_OUT in saved | set(cfg.model.remat_offload) else 2,
        tails=keys * 2 * (window - 1) * size / row,
        windowed=windowed,
    )


def exchange_bytes(program: Program) -> float:
    """Returns peak bytes of remote keys and values."""
    return program.plan.context.bytes_held(program.plan.context_exchange.name, attention_bytes(program))


def saved_input_bytes(program: Program) -> int:
    """Returns the bytes of the layer inputs that a pipeline stage saves for all microbatches in flight."""
    plan, num_leading = program.plan, program.cfg.model.layer_stacks.get(DENSE, 0)
    inputs = plan.schedule_size.num_slots * plan.pipeline.saved_inputs(num_leading)
    return inputs * hop_bytes(program) if plan.pipeline.size > 1 else 0


def activation_bytes(program: Program) -> int:
    """Returns the bytes per device saved for the backward pass of a microbatch, plus the largest working set.

    Without remat, every block saves all arrays in program/residuals.py. With remat, every block saves the arrays of the
    remat policy, except offloaded arrays. The working set is the larger of (1) the arrays of one block, or of one chunk
    of its sequences, with the gathered weights, and (2) the output projection with the logits and gradients of a loss
    chunk. The arrays of a block are two copies of the residual stream, its normalised forms, the inputs and outputs of
    attention, and the inner arrays of the MLP. With context parallelism they include remote keys and values. A pipeline
    stage saves the layer inputs of several microbatches.
    """
    cfg, plan, model, rows = program.cfg, program.plan, program.cfg.model, device_rows(program)
    tokens = rows * (cfg.row_lengths.row + (cfg.row_lengths.encoder or 0)) // plan.context.size
    width, tensor, saved_activations = compute_bytes(program), plan.tensor.size, saved_names(model)
    block, parts = block_elements(program), 1
    gathered = gathered_weight_bytes(program)
    if saved_activations is None:
        stacks = residuals_by_stack(program).values()
        saved = sum(layers * layer_bytes for layers, layer_bytes in stacks) + cast_weight_bytes(program)
        block = max(layer_bytes for _, layer_bytes in stacks)
    else:
        sizes = activation_sizes(model, tensor)
        saved = tokens * width * model.num_layers * sum(sizes[name] for name in saved_activations)
        saved -= tokens * width * unsaved_elements(program, saved_activations)
        parts = math.gcd(model.row_parts, rows)
        inout = 2 * model.embed_dim  # input and output of the block, for all rows
        block = tokens * width * (inout + (block - inout) // parts)
    vocab = model.vocab_size // tensor // (plan.pipeline.size if plan.pipeline.shards_vocab else 1)
    head = 2 * F32 * min(tokens, model.loss_chunk_tokens) * vocab + width * model.embed_dim * vocab
    if plan.pipeline.size > 1:
        elements = stage_elements(program, program.abstract_grads)
        gathered = F32 * (elements.layers + elements.experts) // plan.pipeline.layer_slots  # before accumulation
        num_leading = model.layer_stacks.get(DENSE, 0)
        saved = plan.pipeline.bytes_held(plan.schedule_size, hop_bytes(program), num_leading)
        head += 2 * tokens * width * model.embed_dim  # output of the last stage and its gradient, on every stage
    elif parts > 1:
        gathered *= 2  # weight gradients exist until those of the last chunk are added
    if model.experts is None:
        block = gathered + round(BLOCK_SLACK * block + exchange_bytes(program))
    else:
        block = round(moe_block_bytes(program, model.experts) + exchange_bytes(program))
    total = saved + max(block, head)
    on_gpu = program.mesh.devices.flat[0].platform == "gpu"
    return round(GPU_SLACK * total) if on_gpu and saved_activations is not None else total


def block_elements(program: Program) -> int:
    """Returns the number of elements per token in the arrays of one block."""
    model, plan, lengths = program.cfg.model, program.plan, program.cfg.row_lengths
    tensor, sizes = plan.tensor.size, activation_sizes(model, plan.tensor.size)
    inner = sum(sizes[name] for name in sizes if name not in (BLOCK_INPUT, ATTENTION_ADDED)) + model.mlp_width // tensor
    elements = plan.tensor.bytes_held(model.embed_dim) + inner
    if plan.attention.name == "xla":  # float32 scores and probabilities per head
        keys = max(lengths.row, lengths.encoder or 0)
        elements += 2 * (model.num_heads // tensor) * keys * F32 // compute_bytes(program)
    return elements


def activation_sizes(model: ModelConfig, tensor: int) -> dict[str, int]:
    """Returns the elements per token and device of each named activation. tensor: size of the tensor axis."""
    D, mlp = model.embed_dim, model.mlp_width
    sizes = {BLOCK_INPUT: D, ATTENTION_ADDED: D, QUERY: model.query_width, ATTENTION_OUT: model.result_width}
    sizes |= {KEY: model.key_width, VALUE: model.value_width, MLP_GATE: mlp, MLP_UP: mlp}
    sizes |= {LATENT: tensor * model.latent_width}  # replicated over tensor
    return {name: sizes[name] // tensor for name in model.activation_names}


def unsaved_elements(program: Program, activations: Collection[str]) -> int:
    """Returns the elements per token, over all layers, of expert activations that expert parallelism never saves."""
    experts, plan = program.cfg.model.experts, program.plan
    if experts is None or plan.expert.size == 1:
        return 0
    layers = program.cfg.model.num_layers - experts.first_dense
    return len({MLP_GATE, MLP_UP} & set(activations)) * layers * experts.chosen * experts.mlp_dim // plan.tensor.size


def gathered_weight_bytes(program: Program) -> int:
    """Returns the bytes of the gathered weights of one block, or 0 if weights are not sharded."""
    sizes = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(program.abstract_state.params):
        if "blocks" in jax.tree_util.keystr(path):
            shards = program.plan.tensor.size if "tensor" in str(leaf.sharding.spec) else 1
            sizes.append(leaf.size // program.cfg.model.num_layers // shards)
    return program.plan.batch_axes.bytes_held(sizes, compute_bytes(program))


def cast_weight_bytes(program: Program) -> int:
    """Returns the bytes of the local weight shards in the compute dtype, if several microbatches gather them, else 0.

    XLA casts the shards once, before the first microbatch. With remat, BLOCK_SLACK includes these bytes.
    """
    cfg, shape = program.cfg, program.mesh.shape
    operand = element_bytes(cfg.model, on_tpu(program.mesh))["operand"]
    gathers = cfg.rules == "zero3" and cfg.train.num_microbatches > 1 and shape["fsdp"] * shape["context"] > 1
    return shard_bytes(program.abstract_state.params) * operand // F32 if gathers and operand < F32 else 0


def row_chunks(program: Program) -> int:
    """Returns the number of chunks into which a device splits its sequences in a block (see model.row_parts)."""
    return 1 if program.cfg.model.remat == "none" else math.gcd(program.cfg.model.row_parts, device_rows(program))


def rows_per_round(program: Program, experts: ExpertsConfig, parts: int) -> int:
    """Returns the token rows that a device exchanges per all-to-all round, for one of `parts` chunks of its tokens."""
    devices = program.plan.expert.size
    return devices * round_capacity(device_tokens(program) * experts.chosen // parts, devices)


def moe_block_bytes(program: Program, experts: ExpertsConfig) -> float:
    """Returns the peak bytes of weights and activations of a block with experts. The peak is in the backward pass.

    The formula follows the live ranges in three compiled programs (v5p:2x2x2 and v6e:2x4, libtpu 0.0.51, 2026-11-24)
    and has no fitted numbers. It adds the residuals of attention, with the kernel's logsumexp in 128 lanes; the
    residual stream, its normalised form and its gradient; the token rows sorted by expert, and their gradients; and
    three inner arrays of the experts (gate, up and a gradient), or one inner array and the weight gradients. If mlp_dim
    is less than embed_dim, the weight gradients are computed last, after three gradients of token rows. With expert
    parallelism, the weight gradients of all rounds are summed in an additional buffer.

    Unless weights are prefetched, each weight gradient is reduce-scattered when it is complete. Only one of the three
    weight gradients and one gradient of token rows are then live, as in compiled programs (docs/plan.md). The weights
    of a pipeline stage are already gathered, and its weight gradients are float32.
    """
    cfg, plan, model, parts = program.cfg, program.plan, program.cfg.model, row_chunks(program)
    width, tensor = compute_bytes(program), plan.tensor.size
    sends, staged = plan.expert.size > 1, plan.pipeline.size > 1
    tokens, embed, inner = device_tokens(program) // parts, model.embed_dim, experts.mlp_dim // tensor
    rows = tokens * experts.chosen
    sent_rows = rows_per_round(program, experts, parts) if sends else rows
    saved = model.query_width + model.key_width + model.value_width + model.result_width + 2 * embed
    saved = tokens * (saved / tensor + model.latent_width + embed + 3 * experts.shared_dim / tensor)
    saved += 2 * parts * tokens * embed / tensor if parts > 1 else 0  # input and output of the block, for all rows
    lse_lanes = LANES * model.num_heads / tensor if plan.attention.name == "splash" else 0
    expert_params = 3 * experts.number * embed * experts.mlp_dim / tensor / plan.expert.size
    prefetches = any(plan.compiler_options.values.get(option) for option in (PIPELINE[0], PIPELINED_GATHER[0]))
    weights = 0.0 if staged else block_weights(program, expert_params, prefetches)
    gathers = bool(plan.batch_axes.partition(EXPERT_MATRIX, plan.rules.params))
    reduced = F32 if staged or not gathers else jnp.dtype(cfg.train.reduce_dtype).itemsize
    scatters_early = not (sends or staged or prefetches)
    row_grads = 2 if inner >= embed else 3 if scatters_early else 5
    peak = max(
        width * sent_rows * (3 * inner + row_grads * embed),
        reduced * expert_params / (3 if scatters_early else 1) + width * sent_rows * (inner + 2 * embed),
    )
    peak += plan.expert.bytes_held(rows, width * embed) + (reduced * expert_params if sends or parts > 1 else 0.0)
    return width * (saved + weights) + F32 * tokens * (4 * experts.number + lse_lanes) + peak


def block_weights(program: Program, expert_params: float, prefetches: bool) -> float:
    """Returns the elements in the gathered weights of a block, including the prefetched weights of the next layer."""
    plan, model = program.plan, program.cfg.model
    next_layer = lambda axes: (
        prefetches and program.cfg.rules == "zero3" and bool(plan.batch_axes.partition(axes, plan.rules.params))
    )
    others = sum(math.prod(sizes) for sizes in model.matrices().values()) / plan.tensor.size
    return others * (1 + next_layer(MATRIX)) + expert_params * (1 + next_layer(EXPERT_MATRIX))
