"""Placing arrays: shardings for whole trees, and the constraint that models put on their activations."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.sharding.rules import Placement, axis_size, names_of, partition_spec

Constrain = Callable[..., jax.Array]  # constrain(x, "act_batch", "act_seq", ...) -> x
Gather = Callable[[jax.Array, tuple[str, ...], Any], jax.Array]  # gather(weight, logical_axes, dtype) -> whole weight


def unconstrained(x: jax.Array, *axes: str) -> jax.Array:
    """x as it is: for a model on one device, or outside a mesh."""
    return x


def whole_already(w: jax.Array, axes: tuple[str, ...], dtype: Any) -> jax.Array:
    """w as it is: the gather of a model whose weights every device holds."""
    return w


def make_constrain(mesh: Mesh, rules: Mapping[str, Placement]) -> Constrain:
    """constrain(x, *logical_axes), which tells XLA where an activation lives. Nothing is said on a mesh of one.

    Under shard_map only of those mesh axes that are still the partitioner's. A length that they do not divide stays
    whole, as when a prompt is sampled from.
    """
    if mesh.size == 1:
        return unconstrained

    def constrain(x: jax.Array, *axes: str) -> jax.Array:
        assert x.ndim == len(axes), f"{axes} for an array of shape {x.shape}"
        manual = manual_axes()
        left = [tuple(name for name in names_of(place) if name not in manual) for place in partition_spec(axes, rules)]
        sizes = [math.prod(mesh.shape[name] for name in names) for names in left]
        spec = PartitionSpec(
            *[names or None if n % size == 0 else None for names, size, n in zip(left, sizes, x.shape)]
        )
        if manual:
            return jax.lax.with_sharding_constraint(x, spec) if max(sizes) > 1 else x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return constrain


def manual_axes() -> frozenset[str]:
    """The mesh axes over which the function that is being traced is written for one device (jax.shard_map)."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def tree_shardings(mesh: Mesh, axes_tree: Any, rules: Mapping[str, Placement]) -> Any:
    """A tree of NamedShardings from a tree whose leaves are tuples of logical axes; () is a scalar on every device."""
    return jax.tree.map(lambda axes: NamedSharding(mesh, partition_spec(axes, rules)), axes_tree, is_leaf=is_axes)


def is_axes(leaf: Any) -> bool:
    """True for a tuple of logical axes; optax's own tuples hold states, not names."""
    return isinstance(leaf, tuple) and not hasattr(leaf, "_fields") and all(isinstance(axis, str) for axis in leaf)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of a value that every device holds whole."""
    return NamedSharding(mesh, jax.sharding.PartitionSpec())


def batch_sharding(mesh: Mesh, rules: Mapping[str, Placement]) -> NamedSharding:
    """The sharding of a [rows, T] array of a batch."""
    return NamedSharding(mesh, partition_spec(("act_batch", "act_seq"), rules))


def check_divides(
    params: Any, axes_tree: Any, rules: Mapping[str, Placement], mesh_shape: Mapping[str, int]
) -> list[str]:
    """One line for each logical axis that the mesh does not divide: what, how long, by how many devices."""
    found: dict[tuple[str, int], str] = {}
    for path, axes in jax.tree_util.tree_leaves_with_path(axes_tree, is_leaf=is_axes):
        for axis, length in zip(axes, leaf_at(params, path).shape, strict=True):
            parts = axis_size(axis, rules, mesh_shape)
            if length % parts:
                found[axis, length] = f"{axis}={length} is not a multiple of the {parts} devices of mesh {rules[axis]}"
    return list(found.values())


def leaf_at(tree: Any, path: tuple) -> Any:
    """The leaf of a nested dict at a jax key path."""
    for key in path:
        tree = tree[key.key]
    return tree


def local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> list[int]:
    """Rows of a [rows, T] array that some device of this process holds, in order."""
    rows: set[int] = set()
    for index in sharding.addressable_devices_indices_map(shape).values():
        rows.update(range(*index[0].indices(shape[0])))
    return sorted(rows)


def put_rows(tree: Any, rows: list[int], num_rows: int, sharding: NamedSharding) -> Any:
    """Global arrays [num_rows, T] from this process's rows (numpy, in the order of `rows`) of each leaf."""
    if len(rows) == num_rows and jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    place_of = {row: place for place, row in enumerate(rows)}

    def put(leaf):
        def read(index):
            wanted = [place_of[row] for row in range(*index[0].indices(num_rows))]
            return leaf[wanted][:, index[1]]

        return jax.make_array_from_callback((num_rows, leaf.shape[1]), sharding, read)

    return jax.tree.map(put, tree)
