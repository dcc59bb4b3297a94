"""A mesh that works, for a config whose own mesh does not divide its model or its batch: found by arithmetic."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxscale import units
from jaxscale.auto_dtype import for_device
from jaxscale.budget import BEGINNING, Budget, Position, remaining_stages, resolve_budget
from jaxscale.build import Program, add_stages, make_program
from jaxscale.config import RunConfig
from jaxscale.model_on_mesh import shard_run_model
from jaxscale.models.sharded import ShardedModel
from jaxscale.sharding.config import MESH_AXES, MeshConfig
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.rules import axis_size
from jaxscale.sharding.shardings import check_divides
from jaxscale.system.exits import BadInput

MAX_TENSOR = 16  # beyond it the sums of activations cost more than the products that they feed
MOST_TIMES = 2.0  # larger or smaller a batch: beyond it the run is another one
TRIED = 3  # meshes: some are refused for what arithmetic does not see, such as a torus that they do not lie on
UNCOUNTED = 10**12  # tokens of an epoch of data that are not opened; the compiled step does not depend on it


def fitting_program(
    cfg: RunConfig, devices: Sequence[Any], budget: Budget | None = None, position: Position = BEGINNING
) -> Program:
    """The program, with those of the stages that remain. A refusal names the flags of a mesh that works, if one does.

    Args: budget: of the run; without one, as of data that nobody has counted. position: where the run resumes.
    Raises BadInput.
    """
    cfg = for_device(cfg, devices[0])

    def make(wanted: RunConfig) -> Program:
        amounts = budget or resolve_budget(wanted, UNCOUNTED, position)
        stages = remaining_stages(amounts, wanted.seq_len, position.next_batch)
        return add_stages(make_program(wanted, amounts.without_ramps, devices), amounts, stages)

    try:
        return make(cfg)
    except BadInput as error:
        if found := find_fitting(cfg, devices, make):
            raise BadInput(f"{error}; {found}") from None
        raise


def find_fitting(cfg: RunConfig, devices: Sequence[Any], make: Callable[[RunConfig], Program]) -> str:
    """What to change for a mesh that `make` accepts, in words; '' where none is found. The other axes stay."""
    try:
        mesh = make_mesh(MeshConfig(), devices[:1])
        alone = shard_run_model(dataclasses.replace(cfg, mesh=MeshConfig()), mesh, torus_at_once=False)
        found = sorted(fitting_configs(cfg, alone, len(devices)), key=lambda wanted: order(cfg, wanted))
    except BadInput:  # it is not the mesh that it is refused for
        return ""
    for wanted in found[:TRIED]:
        try:
            make(wanted)
        except BadInput:
            continue
        sizes = [(axis, getattr(cfg.mesh, axis), getattr(wanted.mesh, axis)) for axis in MESH_AXES]
        changed = {f"mesh.{axis}": size for axis, now, size in sizes if now not in (-1, size)}
        batch = ""
        if wanted.rows_per_step != cfg.rows_per_step:
            changed["batch_tokens"] = wanted.tokens_per_step
            batch = f" (a batch of {wanted.rows_per_step:,} rows, which was {cfg.rows_per_step:,})"
        if wanted.train.num_microbatches != cfg.train.num_microbatches:
            changed["train.num_microbatches"] = wanted.train.num_microbatches
        flags = " ".join(f"--config.{name}={value}" for name, value in changed.items())
        return f"on these {len(devices):,} devices this works: {flags}{batch}"
    return ""


def all_meshes(num_devices: int) -> Iterator[dict[str, int]]:
    """Sizes of data, fsdp and tensor that multiply to the devices. What cannot be made is found out by making it."""
    for tensor in units.divisors(num_devices):
        if tensor <= MAX_TENSOR:
            for data in units.divisors(num_devices // tensor):
                yield {"data": data, "fsdp": num_devices // tensor // data, "tensor": tensor}


def fitting_configs(cfg: RunConfig, alone: ShardedModel, num_devices: int) -> Iterator[RunConfig]:
    """The config on each mesh that divides its parameters and positions, with the batch nearest to its own.

    alone: the model on one device.
    """
    others = {axis: getattr(cfg.mesh, axis) for axis in MESH_AXES if axis not in ("data", "fsdp", "tensor")}
    beside = math.prod(others.values())
    if beside < 1 or num_devices % beside:
        return
    for mesh in all_meshes(num_devices // beside):
        shape = others | mesh
        tables = (alone.rules.params, alone.rules.moments)
        if any(check_divides(alone.shapes, alone.axes, table, shape) for table in tables):
            continue
        shards = axis_size("act_batch", alone.rules.params, shape)
        rows = max(1, round(cfg.rows_per_step / shards)) * shards
        multiple = shape["tensor"] * (2 * shape["context"] if shape["context"] > 1 else 1)
        if cfg.seq_len % multiple or not 1 / MOST_TIMES <= rows / cfg.rows_per_step <= MOST_TIMES:
            continue
        parts = max(part for part in units.divisors(rows // shards) if part <= cfg.train.num_microbatches)
        yield dataclasses.replace(
            cfg,
            mesh=MeshConfig(**shape),
            batch_tokens=cfg.batch_tokens if rows == cfg.rows_per_step else rows * cfg.seq_len,
            train=dataclasses.replace(cfg.train, num_microbatches=parts),
        )


def order(cfg: RunConfig, wanted: RunConfig) -> tuple[float, ...]:
    """The sooner named, the smaller: the batch kept, the least tensor, the nearest batch, the most sharded state."""
    times = abs(math.log(wanted.rows_per_step / cfg.rows_per_step))
    return times > 0, wanted.mesh.tensor, times, wanted.mesh.data
