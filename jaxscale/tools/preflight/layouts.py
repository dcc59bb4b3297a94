"""Candidate meshes for a number of devices, with pipeline chunks."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from jaxscale import units
from jaxscale.config import RunConfig
from jaxscale.core.axes.pipeline_axis import make_pipeline_axis
from jaxscale.core.config import MESH_AXES, ContextConfig, ExpertConfig, PipelineConfig
from jaxscale.core.models.config import BLOCKS
from jaxscale.program.fitting_mesh import MAX_TENSOR
from jaxscale.tools.planning.cautions import MIN_POSITIONS

MAX_PIPELINE = 32  # stages; more would need more microbatches than a batch has sequences
MAX_CHUNKS = 4  # per stage; one more would remove less than a fifth of the bubble and send as much again
MAX_PADDING = 1.15  # largest ratio of layer slots in all stages to layers
MIN_RUNS = 1  # chunk runs per stage; with fewer, a stage is idle more than half of the time
MeshSizes = dict[str, int]  # {mesh axis: size}, and the number of 'chunks'


def all_layouts(cfg: RunConfig, num_devices: int, num_slices: int = 1) -> Iterator[MeshSizes]:
    """Yields all meshes with reasonable pipeline, context and expert sizes, starting with sizes of 1.

    If one of these axes is larger than 1, the data axis is 1 or the number of slices. Within a slice, fsdp sends no
    more bytes than data parallelism and needs less memory.
    """
    experts = getattr(cfg.model, "experts", None)
    expert_sizes = units.divisors(math.gcd(experts.number, num_devices)) if experts else [1]  # must divide the experts
    inner = [
        {"pipeline": pipeline, "expert": expert, "context": context, "tensor": tensor, "chunks": chunks}
        for pipeline, chunks in stage_sizes(cfg, num_devices)
        for expert in expert_sizes
        for context in context_sizes(cfg, num_devices)
        for tensor in units.divisors(num_devices)
        if tensor <= MAX_TENSOR
    ]
    for sizes in inner:
        inner_devices = math.prod(sizes[axis] for axis in ("pipeline", "expert", "context", "tensor"))
        data_devices, remainder = divmod(num_devices, inner_devices)
        divisor = sizes["tensor"] * (2 * sizes["context"] if sizes["context"] > 1 else 1)  # halves of a zigzag
        if remainder or cfg.seq_len % divisor:
            continue
        is_simple = sizes["pipeline"] == sizes["context"] == sizes["expert"] == 1
        for data in units.divisors(data_devices):
            if is_simple or data in (1, num_slices):
                yield sizes | {"data": data, "fsdp": data_devices // data}


def stage_sizes(cfg: RunConfig, num_devices: int) -> list[tuple[int, int]]:
    """Returns possible (stages, chunks per stage) for the layers of the model, starting with (1, 1)."""
    layers, leading, sizes = cfg.model.layer_stacks.get(BLOCKS, 0), cfg.model.leading_layers, [(1, 1)]
    if not layers or not cfg.model.scan_layers or cfg.optim.offload_params:
        return sizes
    for size, chunks in itertools.product(units.divisors(num_devices)[1:], (1, 2, MAX_CHUNKS)):
        if size * chunks <= layers and size <= MAX_PIPELINE:
            pipeline = make_pipeline_axis(size, PipelineConfig(chunks=chunks), layers, 0.0, leading)
            if size * chunks * pipeline.chunk_work <= MAX_PADDING * (layers + leading):
                sizes.append((size, chunks))
    return sizes


def context_sizes(cfg: RunConfig, num_devices: int) -> list[int]:
    """Returns the powers of two that are possible sizes of the context axis."""
    sizes, size = [1], 2
    while num_devices % size == 0 and cfg.seq_len % (2 * size) == 0 and cfg.seq_len // size >= MIN_POSITIONS:
        sizes.append(size)
        size *= 2
    return sizes if cfg.model.kind == "decoder" else [1]


def microbatch_choices(cfg: RunConfig, layout: MeshSizes) -> list[int]:
    """Returns the numbers of microbatches that divide the batch equally and that the schedule supports."""
    rows, size, chunks = cfg.rows_per_step, layout["pipeline"], layout["chunks"]
    shards = layout["data"] * layout["fsdp"] * layout["expert"]
    parts = [part for part in units.divisors(rows) if rows // part % shards == 0]
    if size == 1:
        return parts
    return [part for part in parts if chunks * part >= MIN_RUNS * size and (chunks == 1 or part % size == 0)]


def layout_settings(cfg: RunConfig, layout: MeshSizes) -> dict[str, Any]:
    """Returns {dotted name: value} for a mesh. For an axis of size 1, its other settings have default values."""
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
