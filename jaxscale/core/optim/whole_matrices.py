"""Applies a function to whole matrices of sharded stacks, with an all-to-all over layers instead of an all-gather.

A stack [L, m, n] whose rows or columns are sharded over P devices becomes L / P whole matrices on each, by one
all-to-all per sharded dimension; replicas (mesh.data) divide the work too. Results return the same way. If P does not
divide the number of matrices, stacks of the same matrix shape are concatenated (gate and up, the layers of an unrolled
model) and padded with zeros.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxscale.core.optim.matrices import Dims

MatrixFn = Callable[[jax.Array], jax.Array]  # [b, m, n] -> [b, m, n], each matrix independently


@dataclasses.dataclass(frozen=True)
class StackSharding:
    """Sharding of a stack of matrices: the mesh axes of each dimension, and those along which it is replicated."""

    dims: Dims
    mesh_axes: tuple[tuple[str, ...], ...]
    replica_axes: tuple[str, ...]

    @property
    def sharded_dims(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """(dimension of flatten()'s result, its mesh axes) for each sharded dimension of a matrix."""
        return tuple((1 + i, self.mesh_axes[d]) for i, d in enumerate(self.dims.unstacked) if self.mesh_axes[d])

    def flatten(self, x: jax.Array) -> jax.Array:
        """Returns [matrices, rows..., cols...]."""
        matrix_shape = [x.shape[d] for d in self.dims.unstacked]
        return x.transpose(self.dims.stack + self.dims.unstacked).reshape(-1, *matrix_shape)

    def unflatten(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Inverts flatten() for an array of this shape."""
        order = self.dims.stack + self.dims.unstacked
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return x.reshape([shape[d] for d in order]).transpose(inverse)


def stack_sharding(dims: Dims, spec: PartitionSpec, mesh: Mesh, slow: Sequence[str] = ()) -> StackSharding:
    """Returns the sharding that the spec describes. slow: mesh axes whose replicas compute redundantly."""
    names = lambda entry: () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    entries = tuple(spec) + (None,) * (len(dims.stack + dims.unstacked) - len(spec))
    mesh_axes = tuple(tuple(name for name in names(entry) if mesh.shape[name] > 1) for entry in entries)
    used = {name for axes in mesh_axes for name in axes} | set(slow)
    replicas = tuple(name for name, size in mesh.shape.items() if size > 1 and name not in used)
    return StackSharding(dims, mesh_axes, replicas)


def map_whole_matrices(
    f: MatrixFn, arrays: Sequence[jax.Array], shardings: Sequence[StackSharding], mesh: Mesh
) -> list[jax.Array]:
    """Applies f to every matrix of these stacks, each whole on one device; results have the shardings of the stacks."""
    run = lambda arrays: map_local_stacks(f, arrays, shardings, dict(mesh.shape))
    if mesh.size == 1:
        return run(list(arrays))
    specs = [PartitionSpec(*[axes or None for axes in sharding.mesh_axes]) for sharding in shardings]
    return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(list(arrays))


def map_local_stacks(
    f: MatrixFn, arrays: list[jax.Array], shardings: Sequence[StackSharding], mesh_shape: dict[str, int]
) -> list[jax.Array]:
    """map_whole_matrices on one device's shards, inside shard_map."""
    flat = [sharding.flatten(x) for x, sharding in zip(arrays, shardings)]
    groups: dict[tuple, list[int]] = {}
    for i, (x, sharding) in enumerate(zip(flat, shardings)):
        divides = x.shape[0] % num_workers(sharding, mesh_shape) == 0
        key = (x.shape[1:], len(sharding.dims.rows), sharding.sharded_dims, sharding.replica_axes)
        groups.setdefault((i,) if divides else key, []).append(i)
    results = list(arrays)
    for members in groups.values():
        stack = jnp.concatenate([flat[i] for i in members]) if len(members) > 1 else flat[members[0]]
        mapped = map_exchanged(f, stack, shardings[members[0]], mesh_shape)
        ends = [sum(flat[n].shape[0] for n in members[: i + 1]) for i in range(len(members) - 1)]
        for i, part in zip(members, jnp.split(mapped, ends)):
            results[i] = shardings[i].unflatten(part, arrays[i].shape)
    return results


def num_workers(sharding: StackSharding, mesh_shape: dict[str, int]) -> int:
    """Number of devices that divide the matrices of a stack between them."""
    num_shards = math.prod(mesh_shape[name] for _, names in sharding.sharded_dims for name in names)
    return num_shards * num_replicas(sharding, mesh_shape)


def num_replicas(sharding: StackSharding, mesh_shape: dict[str, int]) -> int:
    """Number of devices that hold the same shard."""
    return math.prod(mesh_shape[name] for name in sharding.replica_axes)


def map_exchanged(f: MatrixFn, x: jax.Array, sharding: StackSharding, mesh_shape: dict[str, int]) -> jax.Array:
    """Applies f to the matrices of which x [b, rows..., cols...] is the local shard; returns the local shard."""
    number = x.shape[0]
    x = jnp.pad(x, [(0, -number % num_workers(sharding, mesh_shape)), *[(0, 0)] * (x.ndim - 1)])
    if sharding.replica_axes:
        count = x.shape[0] // num_replicas(sharding, mesh_shape)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(sharding.replica_axes) * count, count)
    for d, names in sharding.sharded_dims:
        x = lax.all_to_all(x, names, split_axis=0, concat_axis=d, tiled=True)
    num_row_dims = len(sharding.dims.rows)
    rows, cols = math.prod(x.shape[1 : 1 + num_row_dims]), math.prod(x.shape[1 + num_row_dims :])
    x = f(x.reshape(-1, rows, cols)).reshape(x.shape)
    for d, names in reversed(sharding.sharded_dims):
        x = lax.all_to_all(x, names, split_axis=d, concat_axis=0, tiled=True)
    if sharding.replica_axes:
        x = lax.all_gather(x, sharding.replica_axes, tiled=True)
    return x[:number]
