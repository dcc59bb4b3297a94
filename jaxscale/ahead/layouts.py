"""Meshes that are worth a guess: sizes of all axes that multiply to the devices, and how stages share the layers."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxscale import units
from jaxscale.config import RunConfig
from jaxscale.models.config import BLOCKS
from jaxscale.planning.fitting import MAX_TENSOR
from jaxscale.planning.positions import LEAST_POSITIONS
from jaxscale.planning.stages import Stages
from jaxscale.sharding.config import MESH_AXES, ContextConfig, ExpertConfig, PipelineConfig

MAX_PIPELINE = 32  # stages: beyond it the bubble asks for more microbatches than batches have rows
MAX_CHUNKS = 4  # of a stage: from there on each more takes less than a fifth of the bubble, and sends as much again
MOST_LACKING = 1.15  # layers that stages have room for, over those that there are
LEAST_RUNS = 1  # of chunks, a stage: with fewer a stage stands still for more than half of the time

Layout = dict[str, int]  # sizes by mesh axis, and 'chunks'


def all_layouts(cfg: RunConfig, num_devices: int, num_slices: int = 1) -> Iterator[Layout]:
    """Every layout with pipeline, context and expert within reason, those without any of them first.

    Copies of the model (data) beside stages, shared positions or shared experts only as many as there are slices:
    within a slice fsdp sends as little and holds less.
    """
    inner = [
        {"pipeline": pipeline, "expert": expert, "context": context, "tensor": tensor, "chunks": chunks}
        for pipeline, chunks in stage_sizes(cfg, num_devices)
        for expert in expert_sizes(cfg, num_devices)
        for context in context_sizes(cfg, num_devices)
        for tensor in units.divisors(num_devices)
        if tensor <= MAX_TENSOR
    ]
    for one in inner:
        left, rest = divmod(num_devices, math.prod(one[axis] for axis in ("pipeline", "expert", "context", "tensor")))
        shared = one["tensor"] * (2 * one["context"] if one["context"] > 1 else 1)  # halves of a zigzag
        if rest or cfg.seq_len % shared:
            continue
        plain = one["pipeline"] == one["context"] == one["expert"] == 1
        for data in units.divisors(left):
            if plain or data in (1, num_slices):
                yield one | {"data": data, "fsdp": left // data}


def stage_sizes(cfg: RunConfig, num_devices: int) -> list[tuple[int, int]]:
    """[(stages, chunks of each)] for the layers of the model: without a pipeline first."""
    layers, before, found = cfg.model.layer_stacks.get(BLOCKS, 0), cfg.model.leading_layers, [(1, 1)]
    if not layers or not cfg.model.scan_layers or cfg.optim.offload_params:
        return found
    for size, chunks in itertools.product(units.divisors(num_devices)[1:], (1, 2, MAX_CHUNKS)):
        if size * chunks <= layers and size <= MAX_PIPELINE:
            stages = Stages(size, layers, 1, chunks, leading_layers=before)
            if size * chunks * stages.chunk_work <= MOST_LACKING * (layers + before):
                found.append((size, chunks))
    return found


def expert_sizes(cfg: RunConfig, num_devices: int) -> list[int]:
    """Numbers of devices among which the experts of a layer can be shared equally; 1 for a model without any."""
    experts = getattr(cfg.model, "experts", None)
    return units.divisors(math.gcd(experts.number, num_devices)) if experts else [1]


def context_sizes(cfg: RunConfig, num_devices: int) -> list[int]:
    """Powers of two that cut a row into halves of a zigzag and leave each device enough positions."""
    sizes, size = [1], 2
    while num_devices % size == 0 and cfg.seq_len % (2 * size) == 0 and cfg.seq_len // size >= LEAST_POSITIONS:
        sizes.append(size)
        size *= 2
    return sizes if cfg.model.kind == "decoder" else [1]


def layout_parts(cfg: RunConfig, layout: Layout) -> list[int]:
    """Numbers of microbatches that divide the rows of a batch, and that the stages can use."""
    rows, size, chunks = cfg.rows_per_step, layout["pipeline"], layout["chunks"]
    shards = layout["data"] * layout["fsdp"] * layout["expert"]
    parts = [part for part in units.divisors(rows) if rows // part % shards == 0]
    if size == 1:
        return parts
    return [part for part in parts if chunks * part >= LEAST_RUNS * size and (chunks == 1 or part % size == 0)]


def layout_settings(cfg: RunConfig, layout: Layout) -> dict[str, Any]:
    """The settings of a layout by dotted name. What is set for an axis of one device, which nobody would read, goes."""
    found: dict[str, Any] = {f"mesh.{axis}": layout[axis] for axis in MESH_AXES}
    if layout["pipeline"] == 1:
        found |= {f"pipeline.{name}": value for name, value in vars(PipelineConfig()).items()}
    else:
        found["pipeline.chunks"] = layout["chunks"]
        found |= {"model.remat": "full", "model.remat_save": (), "model.remat_offload": ()}
    for axis, default in (("context", ContextConfig()), ("expert", ExpertConfig())):
        if layout[axis] == 1:
            found |= {f"{axis}.{name}": value for name, value in vars(default).items()}
    return found


def schedules(cfg: RunConfig, layout: Layout) -> list[str]:
    """The schedules of stages that are worth a guess: the config's own, and those that keep the inputs of few
    microbatches, with the smaller bubble or without a second pass for gradients of weights."""
    return list(dict.fromkeys([cfg.pipeline.schedule, "1f1b", "zero_bubble"])) if layout["pipeline"] > 1 else []


def spans(layouts: Sequence[Layout]) -> str:
    """'pipeline 1, 2, 4; data 1, 2; ...': the sizes of each axis among these layouts."""
    sizes = {axis: sorted({layout[axis] for layout in layouts}) for axis in MESH_AXES}
    return "; ".join(f"{axis} {', '.join(map(str, found))}" for axis, found in sizes.items() if len(found) > 1)
