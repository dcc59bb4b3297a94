"""Devices along each axis of the mesh."""

import dataclasses

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")  # slowest link first


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
                raise BadInput(f"{axis}={size} must be a positive number of devices, or -1 for what is left")
            if axis in ("pipeline", "expert", "context") and size != 1:
                raise BadInput(f"{axis}={size} is not built yet; leave it 1 and use data, fsdp and tensor")
        if len(free := [axis for axis in MESH_AXES if getattr(self, axis) == -1]) > 1:
            raise BadInput(
                f"only one axis may be -1, not {free}; set all but one (fsdp is -1 unless you say otherwise)"
            )
