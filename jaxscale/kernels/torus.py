"""Links of a mesh axis and bytes of collectives: on a TPU slice an axis may span several torus dimensions in turn."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from jaxscale.kernels.hardware import Device

Axis = str | tuple[str, ...]  # of a mesh, or several as one


class LinkStage(NamedTuple):
    """One step of a collective along a mesh axis."""

    groups: tuple[tuple[int, ...], ...]  # positions along the axis that exchange data with each other
    between_slices: bool = False  # over DCN


class CollectiveBytes(NamedTuple):
    """All collectives of one kind and purpose along a mesh axis, of one device."""

    axis: str
    kind: str  # as in HLO: all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute
    nbytes: float  # of the whole arrays: gathered, or before a reduce-scatter


def link_stages(mesh: Mesh, axis: str, *, torus_at_once: bool = False) -> tuple[LinkStage, ...]:
    """Returns the torus dimensions that `axis` spans, the slowest-varying first; () if only one.

    torus_at_once: all dimensions within a slice are one stage, and DCN between slices is another.

    TPU TensorCores reduce-scatter among groups along one dimension; over more dimensions at once XLA:TPU all-reduces
    and slices (libtpu 0.0.51 for v5e, v5p and v6e, 2026-11-21). Stage by stage, shards end on the same devices as in
    one collective.

    () on GPUs, although devices of an ahead-of-time topology have coordinates too (slice, host, card): NCCL chooses its
    own routes, and stages by host and card sent 8 times as much between hosts.
    """
    line = axis_line(mesh.devices, mesh.axis_names.index(axis))
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
    crosses = lambda stage: len({points[index][0] for index in stage[0]}) > 1
    return tuple(LinkStage(tuple(map(tuple, stage.tolist())), crosses(stage)) for stage in groups)


def most_links_outermost(devices: np.ndarray) -> np.ndarray:
    """Reorders the devices of a mesh: along each axis the torus dimension with the most links varies slowest.

    A stage-by-stage gather ends there, and a reduce-scatter starts there, where arrays are largest; DCN between slices
    carries the smallest.
    """
    if devices.flat[0].platform != "tpu":
        return devices
    for dimension in range(devices.ndim):
        line = axis_line(devices, dimension)
        points = np.array([coordinates(device) for device in line])
        sizes = stage_sizes(points)
        strides = [math.prod(sizes[stage + 1 :]) for stage in range(len(sizes))]
        changed = [np.flatnonzero(points[stride] != points[0]) for stride in strides]
        if len(sizes) < 2 or any(len(coordinate) != 1 for coordinate in changed):
            continue
        widths = [num_links(devices, int(coordinate[0]), size) for coordinate, size in zip(changed, sizes)]
        order = sorted(range(len(sizes)), key=lambda stage: -widths[stage])
        positions = np.arange(len(line)).reshape(sizes).transpose(order).ravel()
        devices = np.take(devices, positions, axis=dimension)
    return devices


def num_links(devices: np.ndarray, coordinate: int, size: int) -> int:
    """Returns the links of a chip along a coordinate: 2 in a ring of `size`, otherwise 1; 0 between slices."""
    points = [coordinates(device) for device in devices.flat]
    if coordinate == 0:
        return 0
    if coordinate == len(points[0]) - 1:
        return 3  # the cores of a chip share its memory
    sides = [1 + max(column) for column in zip(*points)][1:-1]
    dims = 3 if min(sides) > 1 else 2  # slices smaller than a cube have no rings, on any chip
    return 2 if size == sides[coordinate - 1] and wraps(dims, sides, size) else 1


def wraps(num_dims: int, shape: Sequence[int], size: int) -> bool:
    """True if a dimension of this size has wraparound links in a slice of this shape.

    3D slices of whole 4x4x4 cubes have wraparound links in all dimensions, smaller ones in none. 2D chips have them
    only along a full side of a pod. Sources: cloud.google.com/tpu/docs, page of the version, and MaxText's
    accelerator_to_spec_map.py, by Google.
    """
    return all(side % 4 == 0 for side in shape) if num_dims == 3 else size == 16


def axis_line(devices: np.ndarray, dimension: int) -> np.ndarray:
    """Returns the devices along one dimension of a mesh, starting at the first device."""
    return np.moveaxis(devices, dimension, 0).reshape(devices.shape[dimension], -1)[:, 0]


def scatter_along(x: jax.Array, axis: Axis, dimension: int, stages: tuple[LinkStage, ...]) -> jax.Array:
    """Reduce-scatters x along `dimension` over a mesh axis, one link after the other."""
    for groups in [stage.groups for stage in stages] or [None]:
        x = lax.psum_scatter(x, axis, scatter_dimension=dimension, axis_index_groups=groups, tiled=True)
    return x


def gather_along(x: jax.Array, axis: Axis, dimension: int, stages: tuple[LinkStage, ...]) -> jax.Array:
    """All-gathers along `dimension` over a mesh axis: the inverse of scatter_along.

    Over three links at once XLA:TPU would all-reduce zero-padded arrays: twice the bytes (libtpu 0.0.51 for v5p:4x4x4
    and 8x8x16, 2026-11-21). Over one or two within a slice it all-gathers, so the choice is left to XLA.
    """
    left_to_xla = len(stages) <= 2 and not any(stage.between_slices for stage in stages)
    for groups in [None] if left_to_xla else [stage.groups for stage in reversed(stages)]:
        x = lax.all_gather(x, axis, axis=dimension, axis_index_groups=groups, tiled=True)
    return x


def ring_bytes(kind: str, nbytes: float, size: int) -> float:
    """Returns the bytes that each of `size` devices sends of arrays of `nbytes`, the minimum of any algorithm.

    Source: Patarasuk and Yuan, Journal of Parallel and Distributed Computing 69(2), 2009.
    """
    if kind == "collective-permute":
        return nbytes
    return (2 if kind == "all-reduce" else 1) * nbytes * (size - 1) / size


def coordinates(device: Device) -> tuple[int, ...]:
    """Returns (slice, coordinates on the torus, core) of the device."""
    return (getattr(device, "slice_index", 0), *device.coords, getattr(device, "core_on_chip", 0))


def stage_sizes(points: ArrayLike) -> tuple[int, ...]:
    """Returns the lengths of nested runs of a line of devices, each along one coordinate, the outermost first.

    [(0,0), (0,1), (1,0), (1,1)] is (2, 2). A line without such an order (a snake) is one run.
    """
    starts, sizes = np.asarray(points), []
    while len(starts) > 1:
        run = max(length for length in range(1, len(starts) + 1) if is_straight(starts, length))
        if run == 1:
            return (len(starts), *sizes)
        sizes.insert(0, run)
        starts = starts[::run]
    return tuple(sizes)


def is_straight(points: np.ndarray, length: int) -> bool:
    """True if the points divide into runs of this length, along which the same single coordinate changes."""
    if len(points) % length:
        return False
    runs = points.reshape(-1, length, points.shape[1])
    return bool(np.count_nonzero((runs != runs[:, :1]).any(axis=(0, 1))) <= 1)
