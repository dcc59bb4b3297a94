"""Links per mesh axis, and bytes per collective. On a TPU slice an axis can span several torus dimensions.

Weights are all-gathered and their gradients reduce-scattered over several mesh axes, in shapes that are fast on TPUs.
TPU memory stores the last two dimensions of an array in tiles of 8 x 128 (openxla.org/xla/tiled_layout), and XLA:TPU
reduce-scatters only some shapes efficiently. The rules below were found in compiled programs (jax 0.10.2 with libtpu
0.0.42.1 and jax 0.12.0.1 with libtpu 0.0.50.1, v5e, v5p and v6e, 8 to 512 chips, 2026-11-22).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from jaxscale.kernels.hardware import Device
from jaxscale.units import divisors

Axis = str | tuple[str, ...]  # a mesh axis, or several mesh axes as one


class LinkStage(NamedTuple):
    """One step of a collective along a mesh axis."""

    groups: tuple[tuple[int, ...], ...]  # groups of positions along the axis that exchange data
    between_slices: bool = False  # True if the stage uses DCN


class CollectiveBytes(NamedTuple):
    """Bytes per device of all collectives of one kind and purpose along a mesh axis."""

    axis: str
    kind: str  # name in HLO: all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute
    nbytes: float  # bytes of the whole arrays, after a gather or before a reduce-scatter


def link_stages(mesh: Mesh, axis: str, *, torus_at_once: bool = False) -> tuple[LinkStage, ...]:
    """Returns one stage for each torus dimension that `axis` spans, the slowest-varying first, or () if only one.

    In one collective over several dimensions, XLA:TPU would all-reduce and slice instead of reduce-scatter (libtpu
    0.0.51 for v5e, v5p and v6e, 2026-11-21). Stages return the same shards. On GPUs there are no stages, because NCCL
    chooses routes. torus_at_once: whether all dimensions within a slice are one stage, and DCN is a second stage.
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
    """Reorders the devices of a mesh such that the torus dimension with the most links varies slowest along each axis.

    Arrays are largest in the last stage of an all-gather and in the first stage of a reduce-scatter, which use that
    dimension. DCN between slices transfers the smallest arrays.
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
    """Returns the number of links along a coordinate: 0 for slices, 3 for cores, 2 in a ring of `size`, else 1."""
    points = [coordinates(device) for device in devices.flat]
    if coordinate == 0:
        return 0
    if coordinate == len(points[0]) - 1:
        return 3  # the cores of a chip share its memory
    sides = [1 + max(column) for column in zip(*points)][1:-1]
    dims = 3 if min(sides) > 1 else 2  # on any chip, slices smaller than a cube have no rings
    return 2 if size == sides[coordinate - 1] and wraps(dims, sides, size) else 1


def wraps(num_dims: int, shape: Sequence[int], size: int) -> bool:
    """Returns True if a dimension of this size has wraparound links in a slice of this shape.

    3D slices of 4x4x4 cubes have wraparound links in all dimensions, and other 3D slices have none. 2D slices have
    wraparound links only along a full side of a pod. Sources: page of each TPU version in cloud.google.com/tpu/docs,
    and accelerator_to_spec_map.py of MaxText.
    """
    return all(side % 4 == 0 for side in shape) if num_dims == 3 else size == 16


def axis_line(devices: np.ndarray, dimension: int) -> np.ndarray:
    """Returns the devices along one dimension of a mesh, starting at the first device."""
    return np.moveaxis(devices, dimension, 0).reshape(devices.shape[dimension], -1)[:, 0]


def scatter_along(x: jax.Array, axis: Axis, dimension: int, stages: tuple[LinkStage, ...]) -> jax.Array:
    """Reduce-scatters x along `dimension` over a mesh axis, stage by stage."""
    for groups in [stage.groups for stage in stages] or [None]:
        x = lax.psum_scatter(x, axis, scatter_dimension=dimension, axis_index_groups=groups, tiled=True)
    return x


def gather_along(x: jax.Array, axis: Axis, dimension: int, stages: tuple[LinkStage, ...]) -> jax.Array:
    """All-gathers x along `dimension` over a mesh axis. Inverse of scatter_along().

    For up to two stages within a slice, one collective is used. Over three torus dimensions, it would all-reduce
    zero-padded arrays, which sends twice the bytes (libtpu 0.0.51 for v5p:4x4x4 and 8x8x16, 2026-11-21).
    """
    left_to_xla = len(stages) <= 2 and not any(stage.between_slices for stage in stages)
    for groups in [None] if left_to_xla else [stage.groups for stage in reversed(stages)]:
        x = lax.all_gather(x, axis, axis=dimension, axis_index_groups=groups, tiled=True)
    return x


def ring_bytes(kind: str, nbytes: float, size: int) -> float:
    """Returns the bytes that each of `size` devices sends in a collective, the minimum of any algorithm.

    nbytes: bytes of the whole arrays. Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009.
    """
    if kind == "collective-permute":
        return nbytes
    return (2 if kind == "all-reduce" else 1) * nbytes * (size - 1) / size


def coordinates(device: Device) -> tuple[int, ...]:
    """Returns (slice, coordinates on the torus, core) of the device."""
    return (getattr(device, "slice_index", 0), *device.coords, getattr(device, "core_on_chip", 0))


def stage_sizes(points: ArrayLike) -> tuple[int, ...]:
    """Splits a line of devices into nested runs along one coordinate each. Returns their lengths, outermost first.

    [(0,0), (0,1), (1,0), (1,1)] gives (2, 2). A line that cannot be split, such as a snake, is a single run.
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
    """Returns True if the points can be split into runs of this length in which only one coordinate changes."""
    if len(points) % length:
        return False
    runs = points.reshape(-1, length, points.shape[1])
    return bool(np.count_nonzero((runs != runs[:, :1]).any(axis=(0, 1))) <= 1)


LANES, SUBLANES = 128, 8  # size of a tile, to multiples of which the last two axes are padded
# XLA:TPU seems to process equal groups of tiles in turn, if the number of tiles has a divisor of medium size. It
# all-reduced groups of at least 307 tiles on lines of 2 chips, 251 on lines of 4 and 167 on lines of 8, and groups of
# 113 to 131 on v5p:8x8x8. The latter are not padded, because padding GPT-2's 3 x 131 tiles moves 4% more HBM bytes on
# v5e:2x4. Multiples of 16 tiles were all reduce-scattered on lines of 2 to 8 chips, but not on lines of 16 v5e.
SMALLEST_GROUP, LARGEST_GROUP = 16, 150
Partition = tuple[tuple[int, tuple[str, ...]], ...]  # (dimension, mesh axes that shard it)


@dataclasses.dataclass(frozen=True)
class Communication:
    """Settings of weight and gradient collectives.

    dtype: dtype of gradient sums. stages: link_stages() of each mesh axis. tiled: whether arrays have a TPU tiling.
    """

    dtype: Any
    stages: tuple[tuple[str, tuple[LinkStage, ...]], ...]
    tiled: bool

    def collective_axes(self, names: tuple[str, ...]) -> tuple[Axis, ...]:
        """Returns the axes of successive collectives: one per mesh axis on TPUs, a single one on other devices.

        On GPUs, an 8B model with fsdp over 8 nodes and context within nodes sent 54.4 GB per step over the network with
        separate collectives, and 6.8 GB with a single collective (jax 0.12.0.1, 2026-11-24).
        """
        return names if self.tiled else (names,)

    def stages_along(self, name: Axis) -> tuple[LinkStage, ...]:
        """Returns the stages of a collective along an axis, or () for several axes together."""
        return dict(self.stages).get(name, ()) if isinstance(name, str) else ()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gather_shards(partition: Partition, dtype: Any, communication: Communication, w: jax.Array) -> jax.Array:
    """Returns the weight cast to `dtype` and all-gathered. Its gradient is reduce-scattered."""
    w = w.astype(dtype)
    for dimension, names in partition:
        for name in reversed(communication.collective_axes(names)):
            w = gather_along(w, name, dimension, communication.stages_along(name))
    return w.astype(jnp.promote_types(dtype, communication.dtype))


def _gather_forward(partition, dtype, communication, w):
    return gather_shards(partition, dtype, communication, w), jnp.zeros((), w.dtype)


def _gather_backward(partition, dtype, communication, like_w, grad):
    return (reduce_scatter(grad, partition, communication).astype(like_w.dtype),)


gather_shards.defvjp(_gather_forward, _gather_backward)


def reduce_scatter(x: jax.Array, partition: Partition, communication: Communication) -> jax.Array:
    """Returns this device's shard of the sum of x over the axes of the partition, in the communication dtype.

    The sharded dimension is first moved outermost in memory. If it were innermost, XLA:TPU would pad the shards to 128
    lanes and compute the whole last stage on every device (libtpu 0.0.51 for v5e, 2026-11-21). Rows of stacked matrices
    do not need to be moved (v5p:4x4x4, v6e:8x8 and v5e:8x8, libtpu 0.0.51, 2026-11-24).
    """
    x = x.astype(communication.dtype)
    for dimension, names in partition:
        if communication.tiled and x.ndim == 3 and dimension == 1:
            x = with_layout_constraint(x, Layout((0, 1, 2)))
            for name in communication.collective_axes(names):
                x = scatter_along(x, name, 1, communication.stages_along(name))
            continue
        x = jnp.moveaxis(x, dimension, 0)
        shape = x.shape[1:]
        x = pad_for_scatter(x) if communication.tiled else x
        x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
        for name in communication.collective_axes(names):
            x = scatter_along(x, name, 0, communication.stages_along(name))
        x = jnp.moveaxis(unpad(x, shape), 0, dimension)
    return x


def on_tpu(mesh: Mesh) -> bool:
    """Returns True if the devices are TPUs."""
    return mesh.devices.flat[0].platform == "tpu"


def pad_for_scatter(x: jax.Array) -> jax.Array:
    """Returns x in a shape that XLA:TPU reduce-scatters along the first dimension. unpad() restores a shard.

    XLA:TPU all-reduces other shapes, which sends twice the bytes. If the column tiles of a matrix cannot be divided
    into equal groups of 16 to 150 tiles, the matrix is padded by at most 15 tiles. For example, 151,936 columns are
    1,187 tiles, a prime number. A second-last dimension smaller than the 8 rows of a tile, such as 4 heads, is merged
    with the last dimension. (With one head, compilation fails: "not implemented for 2nd-minor compaction", v5e:8x8.)
    """
    if x.ndim > 2 and x.shape[-2] < SUBLANES:
        x = x.reshape(len(x), -1)
    if x.ndim == 2 and not has_equal_groups(-(-x.shape[1] // LANES)):
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (SMALLEST_GROUP * LANES))))
    return x


def unpad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a shard of the result of pad_for_scatter() with the original trailing dimensions."""
    return x if x.shape[1:] == shape else x[:, : math.prod(shape)].reshape(-1, *shape)


def has_equal_groups(tiles: int) -> bool:
    """Returns True if this number of tiles fits in one group or can be divided into equal groups."""
    fits = lambda group: SMALLEST_GROUP <= group <= LARGEST_GROUP
    return tiles <= LARGEST_GROUP or any(map(fits, divisors(tiles)))


@jax.custom_vjp
def order_on_cpu(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (x, w) unchanged. On CPUs, w waits for x. In the backward pass, x's gradient waits for w's gradient.

    Otherwise XLA:CPU may start the collective of w while collectives in the loop over layers run. JAX gives them
    the same id, so simulated devices would hang or abort (jax 0.10.2). Optimization barriers do not help, because
    XLA:CPU removes them before it orders collectives.
    """
    return x, wait_on_cpu(w, x)


def wait_on_cpu(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns x unchanged. On CPUs, adds a data dependency on `other` by a condition that is never true."""
    depend = lambda x, other: jnp.where(jnp.isnan(jnp.nan_to_num(other.ravel()[0])), jnp.nan, x)
    return lax.platform_dependent(x, other, cpu=depend, default=lambda x, _: x)


order_on_cpu.defvjp(lambda x, w: ((x, wait_on_cpu(w, x)), None), lambda _, grads: (wait_on_cpu(*grads), grads[1]))
