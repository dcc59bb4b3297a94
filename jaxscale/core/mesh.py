"""The named device mesh. It always has all six axes, so that any PartitionSpec is valid on any machine.

The chips of a TPU slice or GPU node are connected by a fast network (ICI, NVLink), and slices or nodes by a slow
network (DCN). Only DCN_AXES may cross slices or nodes. Each slice or node contains one block of the mesh.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxscale.core.config import MESH_AXES, MeshConfig
from jaxscale.kernels.collectives import most_links_outermost
from jaxscale.kernels.hardware import Device
from jaxscale.system.exits import BadInput
from jaxscale.units import divisors, or_list

DCN_AXES = ("pipeline", "data", "fsdp")  # outermost first: slices are assigned to data before fsdp


def mesh_shape(cfg: MeshConfig, num_devices: int) -> dict[str, int]:
    """Returns {axis: size} with -1 resolved. Raises BadInput if the product of sizes is not the number of devices."""
    shape = {axis: getattr(cfg, axis) for axis in MESH_AXES}
    fixed = math.prod(size for size in shape.values() if size != -1)
    used = {axis: size for axis, size in shape.items() if size != 1}
    if -1 in shape.values():
        if num_devices % fixed:
            raise BadInput(
                f"mesh={used} needs a multiple of {fixed} devices, but there are {num_devices}; "
                f"{nearest_size({axis: size for axis, size in used.items() if size != -1}, num_devices)}"
            )
        return {axis: num_devices // fixed if size == -1 else size for axis, size in shape.items()}
    if fixed != num_devices:
        raise BadInput(f"mesh={used or 'all 1'} needs {fixed} devices, but there are {num_devices}; set one axis to -1")
    return shape


def nearest_size(fixed: dict[str, int], num_devices: int) -> str:
    """Returns a fix such as 'use tensor=4': a size of one axis, innermost first, so that sizes divide num_devices."""
    for axis in reversed(fixed):
        share, remainder = divmod(num_devices, math.prod(size for other, size in fixed.items() if other != axis))
        if not remainder:
            return f"use {axis}={min(divisors(share), key=lambda part: abs(part - fixed[axis]))}"
    return f"use sizes among {or_list(divisors(num_devices))}"


def make_mesh(cfg: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """Returns the mesh of `devices` (default: all), with axes in the order of MESH_AXES and of type Auto.

    Raises BadInput if the product of sizes differs from the number of devices, or if an axis that may not span slices
    or nodes does not fit into one.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = mesh_shape(cfg, len(devices))
    return Mesh(most_links_outermost(arrange(shape, devices)), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def arrange(shape: dict[str, int], devices: Sequence[Device]) -> np.ndarray:
    """Returns the devices as an array of the given mesh shape, with network neighbours adjacent if possible.

    A torus dimension is split between two mesh axes only if the axes cannot be formed from whole dimensions.
    """
    sizes = tuple(shape.values())
    kind, number, group_of = device_groups(devices)
    if len(set(group_of)) == 1:
        if max(sizes) == len(devices) and devices[0].platform == "tpu":
            # Row by row. XLA:TPU can reduce-scatter along a torus dimension, but not along the snake order in which
            # mesh_utils arranges 8 or 16 chips of v5e and v6e.
            in_rows = sorted(devices, key=lambda device: (*device.coords, device.core_on_chip))
            return np.array(in_rows, dtype=object).reshape(sizes)
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    outer = dcn_shape(shape, kind, group_of)
    inner = tuple(size // outer[axis] for axis, size in shape.items())
    return mesh_utils.create_hybrid_device_mesh(
        inner,
        tuple(outer.values()),
        devices,
        process_is_granule=number == "process_index",
        allow_split_physical_axes=True,
    )


def device_groups(devices: Sequence[Device]) -> tuple[str, str, list[int]]:
    """Returns ("slice" or "node", device attribute with the index of the group, index for each device).

    Devices of several TPU slices have a slice_index. GPUs of a multi-node run also have one, the index of their NVLink
    domain. GPUs of an ahead-of-time topology are all in slice 0, with one process per node.
    """
    kind = "node" if devices[0].platform == "gpu" else "slice"
    slices = [getattr(device, "slice_index", 0) for device in devices]
    processes = [device.process_index for device in devices]
    if kind == "node" and len(set(slices)) == 1 and len(set(processes)) > 1 == jax.process_count():
        return kind, "process_index", processes
    return kind, "slice_index", slices


def dcn_shape(shape: dict[str, int], kind: str, group_of: Sequence[int]) -> dict[str, int]:
    """Returns {axis: number of slices or nodes}. Raises BadInput if an axis not in DCN_AXES would span several."""
    counts = [group_of.count(group) for group in sorted(set(group_of))]
    if len(set(counts)) != 1:
        raise BadInput(f"the {len(counts)} {kind}s must have equally many devices, not {or_list(sorted(set(counts)))}")
    left, outer = len(counts), dict.fromkeys(shape, 1)
    for axis in DCN_AXES:
        outer[axis] = math.gcd(shape[axis], left)
        left //= outer[axis]
    if left != 1:  # the axes within a group do not divide its devices
        inside = {axis: size for axis, size in shape.items() if size > 1 and axis not in DCN_AXES}
        raise BadInput(
            f"mesh={inside} must divide the {counts[0]} devices of a {kind}, because only {or_list(DCN_AXES)} may "
            f"span several {kind}s; {nearest_size(inside, counts[0])} and fsdp=-1 for the remaining devices"
        )
    return outer


def crossed_groups(mesh: Mesh) -> tuple[str, dict[str, int]]:
    """Returns ("slice" or "node", {axis: number of slices or nodes that the axis spans})."""
    kind, _, group_of = device_groups(list(mesh.devices.flat))
    return kind, dcn_shape(dict(mesh.shape), kind, group_of)
