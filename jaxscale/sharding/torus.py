"""The links behind a mesh axis: on a TPU slice an axis may run along several dimensions of the torus in turn."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from jaxscale.hardware import Device

Axis = str | tuple[str, ...]  # of a mesh, or several as one


class LinkStage(NamedTuple):
    """One of the steps in which a collective along a mesh axis is taken."""

    groups: tuple[tuple[int, ...], ...]  # positions along the axis that exchange data with each other
    between_slices: bool = False  # through the data centre's network


def link_stages(mesh: Mesh, axis: str, *, torus_at_once: bool = False) -> tuple[LinkStage, ...]:
    """The torus dimensions that `axis` runs along, the slowest-varying first; () if only one.

    torus_at_once: all dimensions of a slice are one stage, and only the way between slices is another.

    The TensorCores of a TPU have a reduce-scatter for groups that lie on one dimension; over more of them at once they
    compute the sum of everything everywhere and keep a part (libtpu 0.0.51 for v5e, v5p and v6e, 2026-11-21). Taken
    stage by stage the parts end where they would in one go.

    On GPUs there are none, though devices that are compiled for have coordinates too, (slice, host, card): NCCL finds
    its own way over NVLink and network, where stages by host and card sent 8 times as much from host to host.
    """
    line = first_line(mesh.devices, mesh.axis_names.index(axis))
    if line[0].platform != "tpu":
        return ()
    points = [coordinates(device) for device in line]
    sizes = stage_sizes(points)
    if torus_at_once:
        slices = len({slice_number for slice_number, *_ in points})
        first_inside = points[0][0] == points[1][0] if len(points) > 1 else True
        sizes = (slices, len(line) // slices) if first_inside else (len(line) // slices, slices)
    if len(sizes) < 2 or 1 in sizes:
        return ()
    positions = np.arange(len(line)).reshape(sizes)
    groups = [np.moveaxis(positions, stage, -1).reshape(-1, size) for stage, size in enumerate(sizes)]
    crosses = lambda stage: len({points[place][0] for place in stage[0]}) > 1
    return tuple(LinkStage(tuple(map(tuple, stage.tolist())), crosses(stage)) for stage in groups)


def widest_outermost(devices: np.ndarray) -> np.ndarray:
    """The devices of a mesh in another order: along each axis the torus dimension with most links varies slowest.

    Taken stage by stage, a gather along the axis ends there, and a scatter begins there, where arrays are largest; what
    goes between slices does so while they are smallest.
    """
    if devices.flat[0].platform != "tpu":
        return devices
    for place in range(devices.ndim):
        line = first_line(devices, place)
        points = np.array([coordinates(device) for device in line])
        sizes = stage_sizes(points)
        strides = [math.prod(sizes[stage + 1 :]) for stage in range(len(sizes))]
        changed = [np.flatnonzero(points[stride] != points[0]) for stride in strides]
        if len(sizes) < 2 or any(len(coordinate) != 1 for coordinate in changed):
            continue
        widths = [links(devices, int(coordinate[0]), size) for coordinate, size in zip(changed, sizes)]
        order = sorted(range(len(sizes)), key=lambda stage: -widths[stage])
        positions = np.arange(len(line)).reshape(sizes).transpose(order).ravel()
        devices = np.take(devices, positions, axis=place)
    return devices


def links(devices: np.ndarray, coordinate: int, size: int) -> int:
    """Links of a chip that `size` devices along a coordinate can use: 2 in a ring, else 1; 0 between slices."""
    places = [coordinates(device) for device in devices.flat]
    if coordinate == 0:
        return 0
    if coordinate == len(places[0]) - 1:
        return 3  # the cores of a chip share its memory
    sides = [1 + max(column) for column in zip(*places)][1:-1]
    dims = 3 if min(sides) > 1 else 2  # under a cube no slice has rings, whichever chips it is of
    return 2 if size == sides[coordinate - 1] and wraps(dims, sides, size) else 1


def wraps(num_dims: int, shape: Sequence[int], size: int) -> bool:
    """True if a dimension of this size is closed to a ring in a slice of this shape.

    3D slices of whole 4x4x4 cubes are closed all round, smaller ones are open. On the 2D chips only a whole side of a
    pod is closed. Source: cloud.google.com/tpu/docs, page of the version, and MaxText's accelerator_to_spec_map.py,
    which is Google's own.
    """
    return all(side % 4 == 0 for side in shape) if num_dims == 3 else size == 16


def first_line(devices: np.ndarray, place: int) -> np.ndarray:
    """The devices of a mesh along one of its dimensions, from the first one on."""
    return np.moveaxis(devices, place, 0).reshape(devices.shape[place], -1)[:, 0]


def scatter_along(x: jax.Array, axis: Axis, dimension: int, stages: tuple[LinkStage, ...]) -> jax.Array:
    """The device's own part, along `dimension`, of the sum of x over a mesh axis: one link after the other."""
    for groups in [stage.groups for stage in stages] or [None]:
        x = lax.psum_scatter(x, axis, scatter_dimension=dimension, axis_index_groups=groups, tiled=True)
    return x


def gather_along(x: jax.Array, axis: Axis, dimension: int, stages: tuple[LinkStage, ...]) -> jax.Array:
    """The parts of all devices along a mesh axis, put together along `dimension`: the inverse of scatter_along.

    Over three links at once XLA:TPU would sum arrays that are zero but for a device's own part: twice the bytes (libtpu
    0.0.51 for v5p:4x4x4 and 8x8x16, 2026-11-21). Over one or two of a slice it gathers, and is left to it.
    """
    left_to_xla = len(stages) <= 2 and not any(stage.between_slices for stage in stages)
    for groups in [None] if left_to_xla else [stage.groups for stage in reversed(stages)]:
        x = lax.all_gather(x, axis, axis=dimension, axis_index_groups=groups, tiled=True)
    return x


def coordinates(device: Device) -> tuple[int, ...]:
    """Where the device is: slice, place on the torus, core."""
    return (getattr(device, "slice_index", 0), *device.coords, getattr(device, "core_on_chip", 0))


def stage_sizes(points: ArrayLike) -> tuple[int, ...]:
    """How a line of devices falls into nested runs, each along one coordinate; the outermost first.

    [(0,0), (0,1), (1,0), (1,1)] is (2, 2). What follows no such order (a snake, say) stays one run.
    """
    left, sizes = np.asarray(points), []
    while len(left) > 1:
        run = max(length for length in range(1, len(left) + 1) if is_straight(left, length))
        if run == 1:
            return (len(left), *sizes)
        sizes.insert(0, run)
        left = left[::run]
    return tuple(sizes)


def is_straight(points: np.ndarray, length: int) -> bool:
    """True if the points fall into runs of this length along which one coordinate changes, the same in all of them."""
    if len(points) % length:
        return False
    runs = points.reshape(-1, length, points.shape[1])
    return bool(np.count_nonzero((runs != runs[:, :1]).any(axis=(0, 1))) <= 1)
