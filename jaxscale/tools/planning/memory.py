"""Memory of a plan by kind with formulas, and usable memory of a device. The estimate is in program/memory.py."""

import dataclasses
import math
import os

import jax

from jaxscale import units
from jaxscale.build import Program
from jaxscale.core.optim.config import OptimConfig
from jaxscale.program.memory import (
    MOMENT_BYTES,
    MemoryNeed,
    compute_bytes,
    device_rows,
    exchange_bytes,
    hop_bytes,
    memory_need,
    saved_input_bytes,
    shard_bytes,
    stage_elements,
)
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.topology import Topology

# Fraction of GPU memory that JAX preallocates, which limits programs: docs.jax.dev, "GPU memory allocation".
GPU_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
GPU_FRACTION = 0.75
MOMENT_LABELS = {"adamw": "2 moments", "lion": "1 moment", "sgd": "momentum", "lamb": "2 moments"}


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    kind: str
    num_bytes: int
    source: str


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
                raise BadInput(f"{name}={text!r} must be a number above 0 and at most 1, such as 0.9")
            return int(hbm_bytes * fraction), f"jax preallocates the fraction {name}={text} of it"
    fix = f"to use more, set {GPU_FRACTION_VARIABLES[0]}=0.92 for this command and for training"
    return int(hbm_bytes * GPU_FRACTION), f"jax preallocates {GPU_FRACTION:.0%} of a GPU's memory; {fix}"


def memory_rows(program: Program, need: MemoryNeed) -> tuple[MemoryRow, ...]:
    """Returns the memory of one device by kind. The size of the state follows from the training shardings."""
    cfg, plan, state = program.cfg, program.plan, program.abstract_state
    count = units.count(cfg.model.num_params)
    trainable = units.count(sum(leaf.size for leaf in jax.tree.leaves(program.abstract_grads)))
    all_shards = math.prod(program.mesh.shape[axis] for axis in ("fsdp", "expert", "context", "tensor"))
    is_staged = lambda tree: any("pipeline" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(tree))
    stage_shards = [plan.pipeline.size if is_staged(tree) else 1 for tree in (state.params, state.opt_state)]
    # shards of parameters, then of moments
    state_shards = [(all_shards if cfg.rules == "zero3" else plan.tensor.size) * stage_shards[0]]
    state_shards.append(all_shards * stage_shards[1])
    divided_by = lambda parts: f" / {parts}" if parts > 1 else ""
    moments, average = shard_bytes(state.opt_state), shard_bytes(state.ema)
    rows = [
        MemoryRow("parameters", need.params, f"4 B x {count}{divided_by(state_shards[0])}"),
        MemoryRow("moments", moments, f"{moments_formula(cfg.optim, trainable)}{divided_by(state_shards[1])}"),
    ]
    if average:
        rows.append(MemoryRow("average of parameters", average, f"4 B x {trainable}{divided_by(state_shards[1])}"))
    if plan.pipeline.size > 1:
        rows += stage_rows(program, need)
    else:
        rows.append(MemoryRow("gradients", need.grads, f"4 B x {trainable}{divided_by(state_shards[0])}, at most"))
    if need.accumulated:
        source = f"4 B x {trainable}{divided_by(all_shards)}: summed over microbatches"
        rows.append(MemoryRow("accumulated gradients", need.accumulated, source))
    if need.padding:
        rows.append(MemoryRow("padding", need.padding, "padding of the arrays above to TPU tiles of 8 x 128 elements"))
    num_rows, tokens = (
        units.plural(device_rows(program), "row"),
        f"{cfg.row_lengths.row:,}{divided_by(plan.context.size)}",
    )
    source = f"{num_rows} of {tokens} tokens, remat={cfg.model.remat}: estimate"
    if remote_kv := exchange_bytes(program):
        source += f"; includes {units.size(remote_kv)} of remote keys and values ({plan.context_exchange.name})"
    return (*rows, MemoryRow("activations", need.activations - saved_input_bytes(program), source))


def moments_formula(optim: OptimConfig, trainable: str) -> str:
    """Returns text with the formula for the optimizer state. trainable: number of parameters as text."""
    if optim.name == "adafactor":
        return f"4 B per row and column of the matrices of {trainable}"
    a_moment = f"{MOMENT_BYTES[optim.moment_dtype]} B" + " and scales" * (optim.moment_dtype == "int8")
    if optim.name == "muon":
        return f"({a_moment} x {trainable}, twice outside the blocks' matrices)"
    return f"{MOMENT_LABELS[optim.name]} x {a_moment} x {trainable}"


def stage_rows(program: Program, need: MemoryNeed) -> list[MemoryRow]:
    """Returns the memory of the arrays that a pipeline stage holds throughout a step."""
    plan, schedule = program.plan, program.plan.schedule_size
    numbers = [
        units.count(sum(stage_elements(program, tree)))
        for tree in (program.abstract_state.params, program.abstract_grads)
    ]
    suffix = f"of a stage{f' / tensor {plan.tensor.size}' if plan.tensor.size > 1 else ''}"
    runs = f"{schedule.chunk_runs} {'chunks' if schedule.num_chunks > 1 else 'microbatches'}"
    layers = units.plural(saved_input_bytes(program) // schedule.num_slots // hop_bytes(program), "layer")
    inputs = f"{schedule.num_slots} of {runs} in flight x {layers} x {units.size(hop_bytes(program))}"
    return [
        MemoryRow("gathered weights", need.weights, f"{compute_bytes(program)} B x {numbers[0]} {suffix}: per step"),
        MemoryRow("gradients", need.grads, f"4 B x {numbers[1]} {suffix}: accumulated over the step"),
        MemoryRow("layer inputs", saved_input_bytes(program), inputs),
    ]


def find_microbatches(program: Program, usable: int) -> int | None:
    """Returns the smallest number of microbatches whose estimated memory fits into `usable` bytes, or None."""
    cfg, pipeline = program.cfg, program.plan.pipeline
    for parts in units.divisors(cfg.rows_per_step):
        if cfg.rows_per_step // parts % program.batch_shards or pipeline.num_chunks > 1 and parts % pipeline.size:
            continue
        train = dataclasses.replace(cfg.train, num_microbatches=parts)
        candidate = program.with_cfg(dataclasses.replace(cfg, train=train))
        if memory_need(candidate).total <= usable:
            return parts
    return None
