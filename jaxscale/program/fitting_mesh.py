"""Suggests a valid mesh for a config whose mesh does not divide its model or batch."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxscale import units
from jaxscale.build import Program, add_stages, make_program, parallel_settings
from jaxscale.config import RunConfig
from jaxscale.core.config import MESH_AXES, MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.models.sharded import ShardedModel, shard_model
from jaxscale.core.plan import resolve_plan
from jaxscale.core.shardings import axis_size, check_divides
from jaxscale.program.auto_dtype import for_device
from jaxscale.program.budget import BEGINNING, Budget, Position, remaining_stages, resolve_budget
from jaxscale.system.exits import BadInput

MAX_TENSOR = 16  # on larger axes, all-reduces of activations would cost more than matmuls
MAX_BATCH_FACTOR = 2.0  # maximum change of the batch size
MAX_TRIES = 3  # number of meshes to try, because some are rejected later, for example if they do not map to the torus
UNCOUNTED = 10**12  # tokens per epoch of data that is not read; the compiled step does not depend on it


def fitting_program(
    cfg: RunConfig, devices: Sequence[Any], budget: Budget | None = None, position: Position = BEGINNING
) -> Program:
    """Returns the program of a run. Raises BadInput if the mesh is invalid, and suggests a valid mesh if it finds one.

    budget: budget of the run; None if the data size is unknown. position: position at which the run resumes.
    """
    cfg = for_device(cfg, devices[0])

    def make(candidate: RunConfig) -> Program:
        amounts = budget or resolve_budget(candidate, UNCOUNTED, position)
        stages = remaining_stages(amounts, candidate.seq_len, position.next_batch)
        return add_stages(make_program(candidate, amounts.without_ramps, devices), amounts, stages)

    try:
        return make(cfg)
    except BadInput as error:
        if suggestion := suggest_mesh(cfg, devices, make):
            raise BadInput(f"{error}; {suggestion}") from None
        raise


def suggest_mesh(cfg: RunConfig, devices: Sequence[Any], make: Callable[[RunConfig], Program]) -> str:
    """Returns the flags of a mesh that `make` accepts, or ''. Changes only data, fsdp, tensor and the batch."""

    def preference(candidate: RunConfig) -> tuple[float, ...]:
        # unchanged batch, smallest tensor axis, closest batch, most sharded state
        batch_change = abs(math.log(candidate.rows_per_step / cfg.rows_per_step))
        return batch_change > 0, candidate.mesh.tensor, batch_change, candidate.mesh.data

    try:
        mesh = make_mesh(MeshConfig(), devices[:1])
        alone = shard_model(cfg.model, resolve_plan(cfg.model, mesh, parallel_settings(cfg)), cfg.lora)
        candidates = sorted(candidate_configs(cfg, alone, len(devices)), key=preference)
    except BadInput:  # the mesh is not the cause
        return ""
    for candidate in candidates[:MAX_TRIES]:
        try:
            make(candidate)
        except BadInput:
            continue
        sizes = [(axis, getattr(cfg.mesh, axis), getattr(candidate.mesh, axis)) for axis in MESH_AXES]
        changed = {f"mesh.{axis}": size for axis, now, size in sizes if now not in (-1, size)}
        batch = ""
        if candidate.rows_per_step != cfg.rows_per_step:
            changed["batch_tokens"] = candidate.tokens_per_step
            batch = f" (changes the batch from {cfg.rows_per_step:,} to {candidate.rows_per_step:,} sequences)"
        if candidate.train.num_microbatches != cfg.train.num_microbatches:
            changed["train.num_microbatches"] = candidate.train.num_microbatches
        flags = " ".join(f"--config.{name}={value}" for name, value in changed.items())
        return f"settings that work on these {len(devices):,} devices: {flags}{batch}"
    return ""


def candidate_configs(cfg: RunConfig, alone: ShardedModel, num_devices: int) -> Iterator[RunConfig]:
    """Yields a config for each mesh that divides the model, with the nearest batch size. alone: model on one device."""
    others = {axis: getattr(cfg.mesh, axis) for axis in MESH_AXES if axis not in ("data", "fsdp", "tensor")}
    other_devices = math.prod(others.values())
    if other_devices < 1 or num_devices % other_devices:
        return
    for tensor, data in itertools.product(units.divisors(num_devices // other_devices), repeat=2):
        fsdp, remainder = divmod(num_devices // other_devices, tensor * data)
        if remainder or tensor > MAX_TENSOR:
            continue
        shape = others | {"data": data, "fsdp": fsdp, "tensor": tensor}
        tables = (alone.plan.rules.params, alone.plan.rules.moments)
        if any(check_divides(alone.shapes, alone.axes, table, shape) for table in tables):
            continue
        shards = axis_size("act_batch", alone.plan.rules.params, shape)
        rows = max(1, round(cfg.rows_per_step / shards)) * shards
        multiple = shape["tensor"] * (2 * shape["context"] if shape["context"] > 1 else 1)
        if cfg.seq_len % multiple or not 1 / MAX_BATCH_FACTOR <= rows / cfg.rows_per_step <= MAX_BATCH_FACTOR:
            continue
        parts = max(part for part in units.divisors(rows // shards) if part <= cfg.train.num_microbatches)
        yield dataclasses.replace(
            cfg,
            mesh=MeshConfig(**shape),
            batch_tokens=cfg.batch_tokens if rows == cfg.rows_per_step else rows * cfg.seq_len,
            train=dataclasses.replace(cfg.train, num_microbatches=parts),
        )
