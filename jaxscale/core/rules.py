"""Tables from logical axes to mesh axes: the only file that knows both vocabularies."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

MeshAxes = str | tuple[str, ...] | None

ROUTER = "router"  # the expert axis of a router, replicated
ACTIVATIONS: dict[str, MeshAxes] = {
    "act_batch": ("data", "fsdp", "expert"),
    "act_seq": None,  # replicated over context, whose devices slice their positions inside shard_map (context_axis.py)
}
# Replicated over data, fsdp and context; the tensor axis shards the matmuls.
TENSOR: dict[str, MeshAxes] = ACTIVATIONS | {
    "embed": None,
    "expert_embed": None,
    "latent": None,  # the low-rank input of the queries, or of the keys and values, of all heads
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
    "layers": None,
    "norm": None,  # scales and biases [D]: sharding them would save nothing and cost a gather each
    "position": None,
    "lora_rank": None,
    ROUTER: None,
    "channels": None,  # output of a matrix that is replicated over tensor and applied to local positions
}
# One copy is also sharded over fsdp and context; over the expert axis except expert weights, whose experts it shards.
FSDP_AXES = ("fsdp", "expert", "context")
FSDP_TENSOR = TENSOR | {"embed": FSDP_AXES, "latent": FSDP_AXES, "expert_embed": ("fsdp", "context")}


@dataclasses.dataclass(frozen=True)
class Rules:
    """A rule table for each kind of array in a train state."""

    params: Mapping[str, MeshAxes]
    grads: Mapping[str, MeshAxes]
    moments: Mapping[str, MeshAxes]


# ZeRO stages (arXiv:1910.02054): 1 shards the optimizer's moments, 2 also gradients, 3 also parameters (= FSDP).
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
    """Returns the dtype of a weight in matmuls: float32 for a router, since top-k depends on the last bits."""
    return "float32" if ROUTER in axes else dtype


def axis_size(axis: str, rules: Mapping[str, MeshAxes], mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of shards of a logical axis on a mesh of this shape."""
    return math.prod(mesh_shape[name] for name in mesh_axis_names(rules[axis]))


def mesh_axis_names(mesh_axes: MeshAxes) -> tuple[str, ...]:
    """Returns the mesh axes of a rule as a tuple."""
    return () if mesh_axes is None else (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)
