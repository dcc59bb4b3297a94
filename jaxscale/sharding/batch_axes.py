"""Data and FSDP parallelism inside shard_map: all-gather weights, reduce-scatter and all-reduce gradients.

Left to itself, the SPMD partitioner all-reduces over the data axis once per microbatch; once per step is enough.

In a TPU's memory an array's last two dimensions lie in tiles of 8 x 128 numbers (openxla.org/xla/tiled_layout), and not
every shape scatters well. What XLA:TPU does with which was read off compiled programs: jax 0.10.2 with libtpu 0.0.42.1
and jax 0.12.0.1 with libtpu 0.0.50.1, v5e, v5p and v6e, 8 to 512 chips, 2026-11-22.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from jaxscale.sharding import context_axis, tensor_axis
from jaxscale.sharding.expert_axis import EXPERTS
from jaxscale.sharding.rules import Placement, Rules, names_of, read_as
from jaxscale.sharding.shardings import is_axes
from jaxscale.sharding.torus import Axis, LinkStage, gather_along, link_stages, scatter_along
from jaxscale.units import divisors

GATHERED = "gathered"  # the name of gathered weights for remat policies: never to be kept for the backward pass
LANES, SUBLANES = 128, 8  # of a tile, which the last two axes are filled up to
# It seems to take equal groups of tiles in turn, where some are neither too small nor too large. Summed whole were
# matrices whose groups are of at least 307 tiles on lines of 2 chips, 251 on lines of 4 and 167 on lines of 8. So were
# groups of 113 to 131 on v5p:8x8x8, which is left so: to pad GPT-2's 3 x 131 tiles moves 4% more in HBM on v5e:2x4.
SMALLEST_GROUP, LARGEST_GROUP = 16, 150  # multiples of 16 tiles: all on lines of 2 to 8, not all on lines of 16 v5e
Partition = tuple[tuple[int, tuple[str, ...]], ...]  # (dimension, mesh axes it is sharded over)


@dataclasses.dataclass(frozen=True)
class Communication:
    """How weights and gradients are communicated.

    dtype: of gradients, in which they are summed. stages: of a mesh axis with several links, the devices that share
    each. tiled: arrays lie in tiles, as in a TPU's memory.
    """

    dtype: Any
    stages: tuple[tuple[str, tuple[LinkStage, ...]], ...]
    tiled: bool

    def turns(self, names: tuple[str, ...]) -> tuple[Axis, ...]:
        """The axes that one collective after the other goes along: all at once where no torus wants them in turn.

        GPUs put weights together inside a node last, when most has been through the network: in turn 8B with fsdp over
        8 nodes and context inside them sent 54.4 GB there a step, at once 6.8 (jax 0.12.0.1, 2026-11-24).
        """
        return names if self.tiled else (names,)

    def stages_of(self, name: Axis) -> tuple[LinkStage, ...]:
        """The links of an axis, where they are taken one after the other; () for several axes at once."""
        return dict(self.stages).get(name, ()) if isinstance(name, str) else ()


@dataclasses.dataclass(frozen=True)
class BatchAxes:
    """Mesh axes of more than one device that shard the rows of a batch, and that whose devices share rows: over all of
    them weights are gathered and gradients summed. With none, every method is the identity.
    """

    mesh: Mesh
    rules: Rules
    axes: tuple[str, ...]  # that shard rows
    summed: tuple[str, ...]  # these, and that whose devices share rows
    communication: Communication
    resting: tuple[str, ...] = ()  # logical axes whose parts stay where they are, and are nobody else's

    @property
    def num_shards(self) -> int:
        """Shards of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def shard_map(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """jax.shard_map of f over the whole mesh; f itself on a single device."""
        if self.mesh.size == 1:
            return f
        return jax.shard_map(
            f,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # which axes a result varies over is for us to know: custom gradients hide it from jax
        )

    def batch_axes_in(self, place: Placement) -> tuple[str, ...]:
        """The axes that a placement names, of those over which gradients are summed."""
        return tuple(name for name in names_of(place) if name in self.summed)

    def partition(self, axes: tuple[str, ...], rules: Mapping[str, Placement]) -> Partition:
        """The dimensions of an array with these logical axes that the rules shard over the batch axes."""
        moving = ((d, rules[axis]) for d, axis in enumerate(axes) if axis not in self.resting)
        return tuple((d, names) for d, place in moving if (names := self.batch_axes_in(place)))

    def gather(self, w: jax.Array, axes: tuple[str, ...], dtype: Any) -> jax.Array:
        """The all-gathered weight, cast to `dtype` first; its gradient is reduce-scattered. Unsharded: as it is.

        If the communication dtype is wider the result has that dtype, and still only the values of `dtype`.
        """
        partition = self.partition(axes, self.rules.params)
        if not partition:
            return w
        narrow = jnp.dtype(read_as(axes, dtype))
        # Matrices of experts come together in place where rows are what is cut; by columns each would be copied after.
        turned = axes[0] == EXPERTS and self.communication.tiled and any(d == 2 for d, _ in partition)
        if turned:
            partition = tuple((1 if d == 2 else d, names) for d, names in partition)
            w = w.swapaxes(1, 2)
        whole = cast(jax.Array, _gather(partition, narrow, self.communication, w))
        return checkpoint_name(whole.swapaxes(1, 2) if turned else whole, GATHERED)

    def narrowed(self, params: Any, axes: Any, dtype: Any) -> Any:
        """Stacked shards in the dtype that they are gathered in, where their gradients are summed in it too.

        Cast before the loop over layers, they get a stack of gradients of that dtype and not of float32, with the same
        values: on v5p:2x2x4 a 7B's is 0.8 GiB smaller.
        """
        if self.communication.dtype != jnp.dtype(dtype):
            return params
        stacked = lambda a: a[:1] == ("layers",) and self.partition(a, self.rules.params)
        return self.map(lambda w, a: w.astype(read_as(a, dtype)) if stacked(a) else w, params, axes)

    def reduce_each(self, grads: Any, axes: Any) -> Any:
        """float32 gradients of one microbatch, reduce-scattered where only gradients are sharded (ZeRO-2)."""
        rules = self.rules
        return self.map(lambda g, a: self.scatter(g, self.missing(a, rules.grads, rules.params)), grads, axes)

    def reduce_last(self, grads: Any, axes: Any) -> Any:
        """float32 gradients of all microbatches, reduced over all devices, with the moments' sharding."""

        def reduce(grad, a):
            return self.sum_rest(self.scatter(grad, self.missing(a, self.rules.moments, self.rules.grads)), a)

        return self.map(reduce, grads, axes)

    def reduce_whole(self, grad: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """A float32 gradient of a whole weight, reduced over all devices, with the moments' sharding."""
        return self.sum_rest(self.scatter(grad, self.partition(axes, self.rules.moments)), axes)

    def sum_rest(self, grad: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """The sum over the devices that a gradient, scattered like the moments, has not been summed over yet."""
        done = {name for _, names in self.partition(axes, self.rules.moments) for name in names}
        done |= {name for axis in axes if axis in self.resting for name in names_of(self.rules.params[axis])}
        rest = tuple(name for name in self.summed if name not in done)
        if not any(tensor_axis.AXIS in names_of(self.rules.params[axis]) for axis in axes):
            rest += (tensor_axis.AXIS,)  # each device had its own positions or heads of it
        rest = tuple(name for name in rest if self.mesh.shape[name] > 1)
        return lax.psum(grad.astype(self.communication.dtype), rest).astype(jnp.float32) if rest else grad

    def missing(
        self, axes: tuple[str, ...], rules: Mapping[str, Placement], done: Mapping[str, Placement]
    ) -> Partition:
        """What the rules shard and `done` does not: of a dimension, the axes behind those that have cut it already."""
        cut = dict(self.partition(axes, done))
        found = [(d, names, cut.get(d, ())) for d, names in self.partition(axes, rules)]
        assert all(names[: len(first)] == first for _, names, first in found), f"not first what is cut already: {found}"
        return tuple((d, names[len(first) :]) for d, names, first in found if names != first)

    def scatter(self, grad: jax.Array, partition: Partition) -> jax.Array:
        """The device's own shard of the sum over the axes of the partition."""
        return reduce_scatter(grad, partition, self.communication).astype(jnp.float32) if partition else grad

    def map(self, f: Callable, grads: Any, axes: Any) -> Any:
        """f(gradient, its logical axes) over two trees; where there is no gradient, an empty subtree stays."""
        one = lambda a, g: f(g, a) if jax.tree.leaves(g) else g
        return jax.tree.map(one, axes, grads, is_leaf=is_axes) if self.mesh.size > 1 else grads

    def sum(self, tree: Any) -> Any:
        """The sums over the devices that hold other rows, or other positions of them."""
        return lax.psum(tree, self.summed) if self.summed else tree

    def max(self, tree: Any) -> Any:
        """The largest among the devices that hold other rows, or other positions of them."""
        return lax.pmax(tree, self.summed) if self.summed else tree

    def first_row(self, num_rows: int) -> jax.Array | int:
        """Where this device's rows begin in the batch."""
        return lax.axis_index(self.axes) * num_rows if self.axes else 0


def make_batch_axes(
    mesh: Mesh,
    rules: Rules,
    reduce_dtype: Any = jnp.float32,
    *,
    torus_at_once: bool = False,
    resting: tuple[str, ...] = (),
) -> BatchAxes:
    """The axes of this mesh that shard rows. torus_at_once: as for link_stages. resting: as of BatchAxes."""
    axes = tuple(name for name in names_of(rules.params["act_batch"]) if mesh.shape[name] > 1)
    shared = tuple(name for name in (context_axis.AXIS,) if mesh.shape[name] > 1)
    stages = tuple((name, link_stages(mesh, name, torus_at_once=torus_at_once)) for name in axes + shared)
    communication = Communication(jnp.dtype(reduce_dtype), stages, on_tpu(mesh))
    return BatchAxes(mesh, rules, axes, axes + shared, communication, resting)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(partition: Partition, dtype: Any, communication: Communication, w: jax.Array) -> jax.Array:
    w = w.astype(dtype)
    for dimension, names in partition:
        for name in reversed(communication.turns(names)):
            w = gather_along(w, name, dimension, communication.stages_of(name))
    return w.astype(jnp.promote_types(dtype, communication.dtype))


def _gather_forward(partition, dtype, communication, w):
    return _gather(partition, dtype, communication, w), jnp.zeros((), w.dtype)


def _gather_backward(partition, dtype, communication, like_w, grad):
    return (reduce_scatter(grad, partition, communication).astype(like_w.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def reduce_scatter(x: jax.Array, partition: Partition, communication: Communication) -> jax.Array:
    """This device's shard of the sum of x over the axes of the partition, in the communication dtype.

    The sharded dimension lies outermost in memory first: along the innermost axis XLA:TPU pads the parts to 128 lanes,
    and sums the last stage whole on every device (libtpu 0.0.51 for v5e, 2026-11-21). The rows of a stack of matrices
    are scattered where they lie (v5p:4x4x4, v6e:8x8 and v5e:8x8, libtpu 0.0.51, 2026-11-24).
    """
    x = x.astype(communication.dtype)
    for dimension, names in partition:
        if communication.tiled and x.ndim == 3 and dimension == 1:
            x = with_layout_constraint(x, Layout((0, 1, 2)))
            for name in communication.turns(names):
                x = scatter_along(x, name, 1, communication.stages_of(name))
            continue
        x = jnp.moveaxis(x, dimension, 0)
        shape = x.shape[1:]
        x = to_scatter(x) if communication.tiled else x
        x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
        for name in communication.turns(names):
            x = scatter_along(x, name, 0, communication.stages_of(name))
        x = jnp.moveaxis(from_scatter(x, shape), 0, dimension)
    return x


def on_tpu(mesh: Mesh) -> bool:
    """True where the devices are TPUs."""
    return mesh.devices.flat[0].platform == "tpu"


def to_scatter(x: jax.Array) -> jax.Array:
    """x in a shape that XLA:TPU scatters along the first dimension; `from_scatter` gives a part its own shape back.

    Some shapes it sums whole on every device, which sends twice the bytes. One is a matrix whose tiles across fall into
    no equal groups of a middling size: 151,936 columns are 1,187 tiles, a prime. It is padded by 15 tiles at most.
    Another are last dimensions of fewer rows than a tile has, as 4 heads: they become one. (Of one head it is an error
    of the compiler's on v5e:8x8, "not implemented for 2nd-minor compaction".)
    """
    if x.ndim > 2 and x.shape[-2] < SUBLANES:
        x = x.reshape(len(x), -1)
    if x.ndim == 2 and not falls_into_groups(-(-x.shape[1] // LANES)):
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (SMALLEST_GROUP * LANES))))
    return x


def from_scatter(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A part of what `to_scatter` returned, with the dimensions after the first that it was given."""
    return x if x.shape[1:] == shape else x[:, : math.prod(shape)].reshape(-1, *shape)


def falls_into_groups(tiles: int) -> bool:
    """True where that many tiles can be taken in equal groups, or at once."""
    fits = lambda group: SMALLEST_GROUP <= group <= LARGEST_GROUP
    return tiles <= LARGEST_GROUP or any(map(fits, divisors(tiles)))
