"""Tensor parallelism inside shard_map: devices shard heads, MLPs and the vocabulary.

Between matmuls a device has some positions of the residual stream (sequence parallelism, arXiv:2205.05198). It
all-gathers the positions before a matmul with column-sharded weights, and reduce-scatters after a matmul with
row-sharded weights. A replicated parameter is applied to local positions or heads only, so its local gradient is a
partial sum, which BatchAxes.reduce_accumulated() completes.

B batch  T position  D embed
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxscale.core.axes.context_axis import NO_CONTEXT_AXIS, ContextAxis
from jaxscale.kernels.collectives import CollectiveBytes, LinkStage, gather_along, link_stages, scatter_along

AXIS = "tensor"
POSITIONS = 1  # the sharded dimension of the residual stream [B, T, D]


@dataclasses.dataclass(frozen=True)
class TensorAxis:
    """The devices that shard matmuls. With one device, every method is the identity.

    stages: steps of a collective, or () if it has one step. context: axis that shards the sequence first. In the
    methods, "all positions" are the positions of this device's context shard.
    """

    size: int = 1
    stages: tuple[LinkStage, ...] = ()
    context: ContextAxis = NO_CONTEXT_AXIS

    def row_length(self, x_BTD: jax.Array) -> int:
        """Returns the length of a whole sequence. x_BTD: local positions."""
        return x_BTD.shape[POSITIONS] * self.size * self.context.size

    def local_from_row(self, x_BT: jax.Array) -> jax.Array:
        """Returns the local positions of whole sequences."""
        return self.local(self.context.local(x_BT))

    def all_gather(self, x_BTD: jax.Array) -> jax.Array:
        """Returns all positions, gathered from the devices. The backward pass reduce-scatters."""
        return x_BTD if self.size == 1 else _gather(self.stages, x_BTD)

    def reduce_scatter(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the local positions of the sum over the devices. The backward pass all-gathers."""
        return x_BTD if self.size == 1 else _scatter(self.stages, x_BTD)

    def all_gather_last(self, x: jax.Array) -> jax.Array:
        """Returns x with its last axis gathered."""
        return x if self.size == 1 else lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)

    def local(self, x_BT: jax.Array) -> jax.Array:
        """Returns the local positions of an array with all positions."""
        if self.size == 1:
            return x_BT
        length = x_BT.shape[POSITIONS] // self.size
        return lax.dynamic_slice_in_dim(x_BT, lax.axis_index(AXIS) * length, length, POSITIONS)

    def pad_remote(self, x: jax.Array, value: float) -> jax.Array:
        """Returns x with its last axis padded to full size. Entries outside of the local shard are `value`."""
        if self.size == 1:
            return x
        size = x.shape[-1]
        full = jnp.full((*x.shape[:-1], size * self.size), value, x.dtype)
        return lax.dynamic_update_slice_in_dim(full, x, lax.axis_index(AXIS) * size, x.ndim - 1)

    def scale_gradient(self, tree: Any) -> Any:
        """Identity for values that every device computes. Divides their gradients by the number of devices."""
        scaled = lambda x: x / self.size + lax.stop_gradient(x - x / self.size)
        return tree if self.size == 1 else jax.tree.map(scaled, tree)

    def run_in_halves(self, f: Callable[..., Any], *inputs: Any) -> Any:
        """Computes f(*inputs) separately for each half of the batch. f must treat sequences independently.

        Matmuls of one half overlap with collectives of the other half. On a single device, or for an odd number of
        sequences, f is called once.
        """
        rows = len(jax.tree.leaves(inputs)[0])
        if self.size == 1 or rows % 2:
            return f(*inputs)
        half = lambda start: jax.tree.map(lambda x: lax.slice_in_dim(x, start, start + rows // 2), inputs)
        return concat_row_parts([f(*half(0)), f(*half(rows // 2))])

    def bytes_sent(self, nbytes: float) -> list[CollectiveBytes]:
        """Returns the bytes of an all-gather and a reduce-scatter of `nbytes`, which cost as much as one all-reduce."""
        return [CollectiveBytes(AXIS, "all-reduce", nbytes)] if self.size > 1 else []

    def bytes_held(self, nbytes: int) -> int:
        """Returns the bytes of a block's activations of width embed_dim: two residual streams with local positions, and
        the inputs of attention and MLP with all positions. nbytes: bytes of one stream with all positions."""
        return 2 * nbytes + 2 * nbytes // self.size

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard the vocabulary."""
        return (AXIS,) if self.size > 1 else ()

    def local_ids(self, ids_BT: jax.Array, num_local: int) -> jax.Array:
        """Returns the index of each token id in the local shard of a table, or num_local for ids in other shards.

        An id outside of the vocabulary is treated as in another shard. Checks of the data reject such ids before a run.
        """
        if not self.vocab_axes:
            return ids_BT
        ids_BT = ids_BT - lax.axis_index(self.vocab_axes) * num_local
        return jnp.where((ids_BT >= 0) & (ids_BT < num_local), ids_BT, num_local)

    def reduce_scatter_lookup(self, x_BTD: jax.Array) -> jax.Array:
        """Reduce-scatters embeddings from a sharded table. A token's embedding is nonzero on one device only."""
        return self.reduce_scatter(x_BTD)

    def vocab_sum(self, x: jax.Array) -> jax.Array:
        """Sums over the devices that shard the vocabulary. Not differentiable."""
        return lax.psum(x, self.vocab_axes) if self.vocab_axes else x

    def vocab_max(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over the devices that shard the vocabulary. Not differentiable."""
        return lax.pmax(x, self.vocab_axes) if self.vocab_axes else x

    def sum(self, x: jax.Array) -> jax.Array:
        """Sums over the devices. Not differentiable."""
        return x if self.size == 1 else lax.psum(x, AXIS)

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over the devices. Not differentiable."""
        return x if self.size == 1 else lax.pmax(x, AXIS)


NO_TENSOR_AXIS = TensorAxis()


def concat_row_parts(parts: list[Any]) -> Any:
    """Concatenates the results of parts of a batch. A result is an array [B, ...], or a tuple of such an array and a
    tree of sums over the part, which are added."""
    if not isinstance(parts[0], tuple):
        return jnp.concatenate(parts)
    arrays, sums = zip(*parts)
    return jnp.concatenate(arrays), jax.tree.map(lambda *values: sum(values), *sums)


def make_tensor_axis(mesh: Mesh, *, torus_at_once: bool = False, context: ContextAxis = NO_CONTEXT_AXIS) -> TensorAxis:
    """Returns the tensor axis of a mesh. torus_at_once: see link_stages(). context: see TensorAxis."""
    return TensorAxis(mesh.shape[AXIS], link_stages(mesh, AXIS, torus_at_once=torus_at_once), context)


def _gathered(stages: tuple[LinkStage, ...], x_BTD: jax.Array) -> jax.Array:
    return gather_along(x_BTD, AXIS, POSITIONS, stages)


def _scattered(stages: tuple[LinkStage, ...], x_BTD: jax.Array) -> jax.Array:
    return scatter_along(x_BTD, AXIS, POSITIONS, stages)


_gather = jax.custom_vjp(_gathered, nondiff_argnums=(0,))
_scatter = jax.custom_vjp(_scattered, nondiff_argnums=(0,))
_gather.defvjp(lambda stages, x_BTD: (_gather(stages, x_BTD), None), lambda stages, _, dy: (_scattered(stages, dy),))
_scatter.defvjp(lambda stages, x_BTD: (_scatter(stages, x_BTD), None), lambda stages, _, dy: (_gathered(stages, dy),))
