"""The named device mesh. It always has all six axes, so that any PartitionSpec is valid on any machine."""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxscale.schema import setting
from jaxscale.sharding.rules import MESH_AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each mesh axis; one axis may be -1 and takes what is left."""

    pipeline: int = setting(1, "pipeline stages (1 in this version)")
    data: int = setting(1, "copies of the model that each see other rows")
    fsdp: int = setting(-1, "devices that share one copy of parameters, gradients or moments; they see other rows too")
    expert: int = setting(1, "groups of experts (1 in this version)")
    context: int = setting(1, "parts of a sequence (1 in this version)")
    tensor: int = setting(1, "devices that split each matrix product")

    def __post_init__(self):
        for axis in MESH_AXES:
            size = getattr(self, axis)
            if size < 1 and size != -1:
                raise ValueError(f"{axis}={size} must be a positive number of devices, or -1 for what is left")
            if axis in ("pipeline", "expert", "context") and size != 1:
                raise ValueError(f"{axis}={size} is not built yet; leave it 1 and use data, fsdp and tensor")
        if len(free := [axis for axis in MESH_AXES if getattr(self, axis) == -1]) > 1:
            raise ValueError(
                f"only one axis may be -1, not {free}; set all but one (fsdp is -1 unless you say otherwise)"
            )


def mesh_shape(cfg: MeshConfig, num_devices: int) -> dict[str, int]:
    """Axis to size, with -1 filled in. Raises ValueError if the sizes do not multiply to the devices."""
    shape = {axis: getattr(cfg, axis) for axis in MESH_AXES}
    fixed = math.prod(size for size in shape.values() if size != -1)
    used = {axis: size for axis, size in shape.items() if size != 1}
    if -1 in shape.values():
        if num_devices % fixed:
            raise ValueError(f"mesh={used} needs a multiple of {fixed} devices, and there are {num_devices}")
        return {axis: num_devices // fixed if size == -1 else size for axis, size in shape.items()}
    if fixed != num_devices:
        raise ValueError(
            f"mesh={used or 'all 1'} multiplies to {fixed} devices, and there are {num_devices}; make one axis -1"
        )
    return shape


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over `devices` (all devices unless given), axes in MESH_AXES order, every axis of type Auto."""
    devices = list(jax.devices() if devices is None else devices)
    shape = mesh_shape(cfg, len(devices))
    auto = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(tuple(shape.values()), MESH_AXES, axis_types=auto, devices=devices)
