"""Shardings of whole trees and of batches, and how the rows of a batch get onto the devices."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.sharding.rules import Placement, axis_size, names_of, partition_spec

Gather = Callable[[jax.Array, tuple[str, ...], Any], jax.Array]  # gather(weight, logical_axes, dtype) -> whole weight


def whole_already(w: jax.Array, axes: tuple[str, ...], dtype: Any) -> jax.Array:
    """w as it is: the gather of a model whose weights every device holds."""
    return w


def tree_shardings(mesh: Mesh, axes_tree: Any, rules: Mapping[str, Placement]) -> Any:
    """A tree of NamedShardings from a tree whose leaves are tuples of logical axes; () is a scalar on every device."""
    place = lambda axes: NamedSharding(mesh, without_idle_axes(partition_spec(axes, rules), mesh))
    return jax.tree.map(place, axes_tree, is_leaf=is_axes)


def without_idle_axes(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """The same placement, of several mesh axes for one dimension only the first and those of more than one device."""

    def brief(place: Placement) -> Placement:
        if not (names := names_of(place)):
            return None
        first, *rest = names
        longer = [name for name in rest if mesh.shape[name] > 1]
        return (first, *longer) if longer else first

    return PartitionSpec(*map(brief, spec))


def is_axes(leaf: Any) -> bool:
    """True for a tuple of logical axes; optax's own tuples hold states, not names."""
    return isinstance(leaf, tuple) and not hasattr(leaf, "_fields") and all(isinstance(axis, str) for axis in leaf)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of a value that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


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
                names = " x ".join(name for name in names_of(rules[axis]) if mesh_shape[name] > 1)
                found[axis, length] = f"{axis}={length} is not a multiple of the {parts} devices of mesh {names}"
    return list(found.values())


def leaf_at(tree: Any, path: tuple) -> Any:
    """The leaf of a nested dict at a jax key path."""
    for key in path:
        tree = tree[key.key]
    return tree


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """A tree of jax.ShapeDtypeStruct with these shardings."""
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(place, shapes, shardings)


def local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> list[int]:
    """Rows of a [rows, T] array that some device of this process holds, in order."""
    rows: set[int] = set()
    for index in sharding.addressable_devices_indices_map(shape).values():
        assert index is not None  # the map is of addressable devices, and each holds a part
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
