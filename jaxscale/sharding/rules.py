"""Where array axes live on the mesh: the only file that knows both vocabularies."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

Placement = str | tuple[str, ...] | None

ROUTER = "router"  # the axis of the experts that a router scores, all on every device
ACTIVATIONS: dict[str, Placement] = {
    "act_batch": ("data", "fsdp", "expert"),
    "act_seq": None,  # whole on the devices of context, which take their own positions inside (context_axis.py)
}
# A copy on every device of data, fsdp and context; the tensor axis splits the products.
TENSOR: dict[str, Placement] = ACTIVATIONS | {
    "embed": None,
    "expert_embed": None,
    "latent": None,  # of what the queries, or the keys and values, of all heads come from
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
    "layers": None,
    "norm": None,  # scales and biases of D numbers: sharing them would save nothing and cost a gather each
    "position": None,
    "lora_rank": None,
    ROUTER: None,
    "channels": None,  # of a matrix that every device multiplies its own positions with
}
# And fsdp shares one copy, with the devices that share rows. Those of the expert axis have experts to share, and of all
# else a part.
SHARED = ("fsdp", "expert", "context")
FSDP_TENSOR = TENSOR | {"embed": SHARED, "latent": SHARED, "expert_embed": ("fsdp", "context")}


@dataclasses.dataclass(frozen=True)
class Rules:
    """A table for each kind of array in a train state."""

    params: Mapping[str, Placement]
    grads: Mapping[str, Placement]
    moments: Mapping[str, Placement]


# ZeRO stages (arXiv:1910.02054): 1 shares the optimizer's moments, 2 the gradients too, 3 the parameters too (= FSDP).
RULES = {
    "zero1": Rules(params=TENSOR, grads=TENSOR, moments=FSDP_TENSOR),
    "zero2": Rules(params=TENSOR, grads=FSDP_TENSOR, moments=FSDP_TENSOR),
    "zero3": Rules(params=FSDP_TENSOR, grads=FSDP_TENSOR, moments=FSDP_TENSOR),
}


def partition_spec(axes: tuple[str, ...], rules: Mapping[str, Placement]) -> PartitionSpec:
    """Turns logical axes into a PartitionSpec. Raises ValueError for an unknown axis or a mesh axis used twice."""
    if missing := [axis for axis in axes if axis not in rules]:
        raise ValueError(f"no sharding rule for {missing} in {axes}; the table has {sorted(rules)}")
    placed = [rules[axis] for axis in axes]
    used = [name for place in placed for name in names_of(place)]
    if clash := sorted({name for name in used if used.count(name) > 1}):
        raise ValueError(f"mesh axes {clash} appear twice in {dict(zip(axes, placed))}")
    return PartitionSpec(*placed)


def read_as(axes: tuple[str, ...], dtype: Any) -> Any:
    """The dtype in which products read a weight: `dtype`, but float32 for a router, whose choices hang on its bits."""
    return "float32" if ROUTER in axes else dtype


def axis_size(axis: str, rules: Mapping[str, Placement], mesh_shape: Mapping[str, int]) -> int:
    """Into how many parts the rules cut a logical axis on a mesh of this shape."""
    return math.prod(mesh_shape[name] for name in names_of(rules[axis]))


def names_of(place: Placement) -> tuple[str, ...]:
    """The mesh axes of a placement."""
    return () if place is None else (place,) if isinstance(place, str) else tuple(place)
