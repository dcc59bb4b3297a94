"""A product with a weight that stays as it is and a correction of low rank that is learned (LoRA, arXiv:2106.09685).

The correction is a product beside that of the weight: x W + scale (x A) B. Adding A B to W first would be fewer
operations forward, but backward it asks for the gradient of all of W, a third of a training step's operations, which a
weight that is frozen spares; and it holds a second W.
"""

import dataclasses
from typing import Any

import jax

from jaxscale.ops.project import Project, contracted_axes

RANK = "lora_rank"  # the logical axis between A and B


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight with its adapter, in the place of the weight alone."""

    weight: jax.Array
    a: jax.Array  # the weight's contracted axes, then the rank
    b: jax.Array  # the rank, then the weight's other axes
    scale: float = dataclasses.field(metadata=dict(static=True))

    def __getitem__(self, index: Any) -> "Adapted":
        """Itself, for models write weight[...]."""
        assert index is ..., "an adapted weight is used whole"
        return self


def adapting(project: Project) -> Project:
    """`project`, which takes adapted weights too."""

    def run(spec: str, x: jax.Array, w: Any) -> jax.Array:
        if not isinstance(w, Adapted):
            return project(spec, x, w)
        down, up = side_specs(spec)
        return project(spec, x, w.weight) + project(up, w.scale * project(down, x, w.a), w.b)

    return run


def side_specs(spec: str) -> tuple[str, str]:
    """The two products of the adapter: 'BTNH,NHD->BTD' gives 'BTNH,NHr->BTr' and 'BTr,rD->BTD'."""
    count = contracted_axes(spec)
    inputs, output = spec.replace(" ", "").split("->")
    x_axes, w_axes = inputs.split(",")
    kept = x_axes[: len(x_axes) - count]
    return f"{x_axes},{w_axes[:count]}r->{kept}r", f"{kept}r,r{w_axes[count:]}->{output}"
