"""All-gather of a weight and reduce-scatter of its gradient over several mesh axes, in shapes that are fast on TPUs.

TPU memory stores the last two dimensions of an array in tiles of 8 x 128 (openxla.org/xla/tiled_layout), and XLA:TPU
reduce-scatters only some shapes efficiently. The rules here were read off compiled programs: jax 0.10.2 with libtpu
0.0.42.1 and jax 0.12.0.1 with libtpu 0.0.50.1, v5e, v5p and v6e, 8 to 512 chips, 2026-11-22.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from jaxscale.kernels.torus import Axis, LinkStage, gather_along, scatter_along
from jaxscale.units import divisors

LANES, SUBLANES = 128, 8  # of a tile, to which the last two axes are padded
# XLA:TPU seems to process equal groups of tiles in turn, if a divisor of medium size exists. It all-reduced groups of
# at least 307 tiles on lines of 2 chips, 251 on lines of 4 and 167 on lines of 8; also of 113 to 131 on v5p:8x8x8,
# which are not padded, since padding GPT-2's 3 x 131 tiles moves 4% more HBM bytes on v5e:2x4.
SMALLEST_GROUP, LARGEST_GROUP = 16, 150  # multiples of 16 tiles: all on lines of 2 to 8, not all on lines of 16 v5e
Partition = tuple[tuple[int, tuple[str, ...]], ...]  # (dimension, mesh axes it is sharded over)


@dataclasses.dataclass(frozen=True)
class Communication:
    """Settings of weight and gradient collectives.

    dtype: in which gradients are summed. stages: for each mesh axis that spans several links, the devices that share
    each link. tiled: arrays have a TPU's tiled memory layout.
    """

    dtype: Any
    stages: tuple[tuple[str, tuple[LinkStage, ...]], ...]
    tiled: bool

    def collective_axes(self, names: tuple[str, ...]) -> tuple[Axis, ...]:
        """Returns the axes of successive collectives: each mesh axis alone on TPUs, all together elsewhere.

        NCCL gathers within a node last, after most data crossed the network: separately, an 8B model with fsdp over 8
        nodes and context inside sent 54.4 GB over the network per step, together 6.8 (jax 0.12.0.1, 2026-11-24).
        """
        return names if self.tiled else (names,)

    def stages_along(self, name: Axis) -> tuple[LinkStage, ...]:
        """Returns the links of an axis that a collective uses one after the other; () for several axes together."""
        return dict(self.stages).get(name, ()) if isinstance(name, str) else ()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gather_shards(partition: Partition, dtype: Any, communication: Communication, w: jax.Array) -> jax.Array:
    """Returns the weight cast to `dtype` and all-gathered; its gradient is reduce-scattered."""
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

    The sharded dimension is made outermost in memory first: along the innermost dimension XLA:TPU pads the parts to 128
    lanes, and sums the last stage in full on every device (libtpu 0.0.51 for v5e, 2026-11-21). The rows of a stack of
    matrices are scattered in place (v5p:4x4x4, v6e:8x8 and v5e:8x8, libtpu 0.0.51, 2026-11-24).
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
    """True if the devices are TPUs."""
    return mesh.devices.flat[0].platform == "tpu"


def pad_for_scatter(x: jax.Array) -> jax.Array:
    """Returns x in a shape that XLA:TPU reduce-scatters along the first dimension; `unpad` reverts the shape of a
    shard.

    XLA:TPU all-reduces some shapes instead, which sends twice the bytes. One is a matrix whose column tiles cannot be
    divided into equal groups of 16 to 150: 151,936 columns are 1,187 tiles, a prime. It is padded by at most 15 tiles.
    Another is a second-last dimension below the 8 rows of a tile, such as 4 heads: it is merged with the last. (With
    one head the compiler fails on v5e:8x8: "not implemented for 2nd-minor compaction".)
    """
    if x.ndim > 2 and x.shape[-2] < SUBLANES:
        x = x.reshape(len(x), -1)
    if x.ndim == 2 and not has_equal_groups(-(-x.shape[1] // LANES)):
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (SMALLEST_GROUP * LANES))))
    return x


def unpad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a shard of the result of `pad_for_scatter`, with the original trailing dimensions."""
    return x if x.shape[1:] == shape else x[:, : math.prod(shape)].reshape(-1, *shape)


def has_equal_groups(tiles: int) -> bool:
    """True if that many tiles fit in one group, or divide into equal groups."""
    fits = lambda group: SMALLEST_GROUP <= group <= LARGEST_GROUP
    return tiles <= LARGEST_GROUP or any(map(fits, divisors(tiles)))
