"""The links behind a mesh axis: on a TPU slice an axis may run along several dimensions of the torus in turn."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

Groups = tuple[tuple[int, ...], ...]  # positions along a mesh axis that exchange data with each other


def link_stages(mesh: Mesh, axis: str) -> tuple[Groups, ...]:
    """Groups along `axis` for each torus dimension that it runs along, the slowest-varying first; () if only one.

    XLA:TPU has a reduce-scatter for groups that lie on one dimension; over more of them at once it computes the sum of
    everything everywhere and keeps a part (libtpu 0.0.51 for v5e, v5p and v6e, 2026-11-21). Taken stage by stage the
    parts end where they would in one go.

    On GPUs there are none, though devices that are compiled for have coordinates too, (slice, host, card): NCCL finds
    its own way over NVLink and network, where stages by host and card sent 8 times as much from host to host.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return ()
    place = mesh.axis_names.index(axis)
    line = np.moveaxis(mesh.devices, place, 0).reshape(mesh.devices.shape[place], -1)[:, 0]
    if any(getattr(device, "coords", None) is None for device in line):
        return ()
    sizes = stage_sizes([coordinates(device) for device in line])
    if len(sizes) < 2:
        return ()
    positions = np.arange(len(line)).reshape(sizes)
    groups = [np.moveaxis(positions, stage, -1).reshape(-1, size) for stage, size in enumerate(sizes)]
    return tuple(tuple(tuple(group) for group in stage.tolist()) for stage in groups)


def scatter_along(x: jax.Array, axis: str, dimension: int, stages: tuple[Groups, ...]) -> jax.Array:
    """The device's own part, along `dimension`, of the sum of x over a mesh axis: one link after the other."""
    for groups in stages or (None,):
        x = lax.psum_scatter(x, axis, scatter_dimension=dimension, axis_index_groups=groups, tiled=True)
    return x


def gather_along(x: jax.Array, axis: str, dimension: int, stages: tuple[Groups, ...]) -> jax.Array:
    """The parts of all devices along a mesh axis, put together along `dimension`: the inverse of scatter_along.

    Over three links at once XLA:TPU would sum arrays that are zero but for a device's own part: twice the bytes (libtpu
    0.0.51 for v5p:4x4x4 and 8x8x16, 2026-11-21). Over one or two it gathers, and is left to it.
    """
    for groups in reversed(stages) if len(stages) > 2 else (None,):
        x = lax.all_gather(x, axis, axis=dimension, axis_index_groups=groups, tiled=True)
    return x


def coordinates(device: jax.Device) -> tuple[int, ...]:
    """Where the device is: slice, place on the torus, core."""
    return (getattr(device, "slice_index", 0), *device.coords, getattr(device, "core_on_chip", 0))


def stage_sizes(points: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """How a line of devices falls into nested runs, each along one coordinate; the outermost first.

    [(0,0), (0,1), (1,0), (1,1)] is (2, 2). What follows no such order (a snake, say) stays one run.
    """
    points, sizes = np.asarray(points), []
    while len(points) > 1:
        run = max(length for length in range(1, len(points) + 1) if is_straight(points, length))
        if run == 1:
            return (len(points), *sizes)
        sizes.insert(0, run)
        points = points[::run]
    return tuple(sizes)


def is_straight(points: np.ndarray, length: int) -> bool:
    """True if the points fall into runs of this length along which one coordinate changes, the same in all of them."""
    if len(points) % length:
        return False
    runs = points.reshape(-1, length, points.shape[1])
    return np.count_nonzero((runs != runs[:, :1]).any(axis=(0, 1))) <= 1
