"""Sharding rules, which map logical axes to mesh axes, and the shardings that follow from the rules."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None

ROUTER = "router"  # the expert axis of a router, which is replicated
ACTIVATIONS: dict[str, MeshAxes] = {
    "act_batch": ("data", "fsdp", "expert"),
    "act_seq": None,  # replicated over context, whose devices slice positions inside shard_map (context_axis.py)
}
# Weights are replicated over data, fsdp and context. The tensor axis shards matmuls.
TENSOR: dict[str, MeshAxes] = ACTIVATIONS | {
    "embed": None,
    "expert_embed": None,
    "latent": None,  # low-rank input from which queries, or keys and values, are projected
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
    "layers": None,
    "norm": None,  # scales and biases [D]; sharding would save little memory, and each array would need an all-gather
    "position": None,
    "lora_rank": None,
    ROUTER: None,
    "channels": None,  # output of a matrix that is replicated over tensor and applied to local positions
}
# Weights are also sharded over fsdp, context and expert. The expert axis shards the experts of expert weights.
FSDP_AXES = ("fsdp", "expert", "context")
FSDP_TENSOR = TENSOR | {"embed": FSDP_AXES, "latent": FSDP_AXES, "expert_embed": ("fsdp", "context")}


@dataclasses.dataclass(frozen=True)
class Rules:
    """Sharding rules of each kind of array in a train state."""

    params: Mapping[str, MeshAxes]
    grads: Mapping[str, MeshAxes]
    moments: Mapping[str, MeshAxes]


# ZeRO stages (arXiv:1910.02054). Stage 1 shards optimizer moments, 2 also gradients, 3 also parameters (FSDP).
RULES = {
    "zero1": Rules(params=TENSOR, grads=TENSOR, moments=FSDP_TENSOR),
    "zero2": Rules(params=TENSOR, grads=FSDP_TENSOR, moments=FSDP_TENSOR),
    "zero3": Rules(params=FSDP_TENSOR, grads=FSDP_TENSOR, moments=FSDP_TENSOR),
}


def partition_spec(axes: tuple[str, ...], rules: Mapping[str, MeshAxes]) -> PartitionSpec:
    """Converts logical axes to a PartitionSpec. Raises ValueError for an unknown axis or a mesh axis used twice."""
    if missing := [axis for axis in axes if axis not in rules]:
        raise ValueError(f"no sharding rule for {missing} in {axes}; the table has {sorted(rules)}")
    mesh_axes = [rules[axis] for axis in axes]
    used = [name for one in mesh_axes for name in mesh_axis_names(one)]
    if clash := sorted({name for name in used if used.count(name) > 1}):
        raise ValueError(f"mesh axes {clash} appear twice in {dict(zip(axes, mesh_axes))}")
    return PartitionSpec(*mesh_axes)


def weight_dtype(axes: tuple[str, ...], dtype: Any) -> Any:
    """Returns the dtype of a weight in matmuls. Routers use float32, because rounding can change selected experts."""
    return "float32" if ROUTER in axes else dtype


def axis_size(axis: str, rules: Mapping[str, MeshAxes], mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of shards of a logical axis on a mesh of this shape."""
    return math.prod(mesh_shape[name] for name in mesh_axis_names(rules[axis]))


def mesh_axis_names(mesh_axes: MeshAxes) -> tuple[str, ...]:
    """Returns the mesh axes of a rule as a tuple."""
    return () if mesh_axes is None else (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)


Gather = Callable[[jax.Array, tuple[str, ...], Any], jax.Array]  # gather(weight, logical_axes, dtype) -> full weight


def no_gather(w: jax.Array, axes: tuple[str, ...], dtype: Any) -> jax.Array:
    """Returns w unchanged, for models with replicated weights."""
    return w


def tree_shardings(mesh: Mesh, axes_tree: Any, rules: Mapping[str, MeshAxes]) -> Any:
    """Returns NamedShardings for a tree whose leaves are tuples of logical axes. () means replicated."""
    sharding = lambda axes: NamedSharding(mesh, without_idle_axes(partition_spec(axes, rules), mesh))
    return jax.tree.map(sharding, axes_tree, is_leaf=is_axes)


def without_idle_axes(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Removes mesh axes of size 1 from each dimension, except for the first mesh axis of the dimension."""

    def used(mesh_axes: MeshAxes) -> MeshAxes:
        if not (names := mesh_axis_names(mesh_axes)):
            return None
        others = [name for name in names[1:] if mesh.shape[name] > 1]
        return (names[0], *others) if others else names[0]

    return PartitionSpec(*map(used, spec))


def is_axes(leaf: Any) -> bool:
    """Returns True for a tuple of logical axes, but not for optax's named tuples."""
    return isinstance(leaf, tuple) and not hasattr(leaf, "_fields") and all(isinstance(axis, str) for axis in leaf)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a replicated value."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, rules: Mapping[str, MeshAxes]) -> NamedSharding:
    """Returns the sharding of a [rows, T] array of a batch."""
    return NamedSharding(mesh, partition_spec(("act_batch", "act_seq"), rules))


def check_divides(
    params: Any, axes_tree: Any, rules: Mapping[str, MeshAxes], mesh_shape: Mapping[str, int]
) -> list[str]:
    """Returns a message for each logical axis whose length is not a multiple of its number of devices."""
    found: dict[tuple[str, int], str] = {}
    for path, axes in jax.tree_util.tree_leaves_with_path(axes_tree, is_leaf=is_axes):
        leaf = functools.reduce(lambda tree, key: tree[key.key], path, params)
        for axis, length in zip(axes, leaf.shape, strict=True):
            parts = axis_size(axis, rules, mesh_shape)
            if length % parts:
                names = " x ".join(name for name in mesh_axis_names(rules[axis]) if mesh_shape[name] > 1)
                found[axis, length] = f"{axis}={length} is not a multiple of the {parts} devices along mesh {names}"
    return list(found.values())


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Returns a tree of jax.ShapeDtypeStruct with these shardings."""
    struct = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(struct, shapes, shardings)
