"""Splits the axes of a parameter into stack axes (layers, experts) and the rows and columns of a matrix, by name."""

import dataclasses
from typing import Any

import jax

from jaxscale.core.optim.groups import is_exempt

STACK_AXES = ("layers", "experts")
HEADS = ("heads", "kv_heads")
ROUTER = "router"


@dataclasses.dataclass(frozen=True)
class Dims:
    """Dimensions of a parameter: stack (layers, experts), rows and cols; cols is () if it is not a matrix.

    A leaf of a pytree.
    """

    stack: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """True if there are rows and columns."""
        return bool(self.cols)

    @property
    def unstacked(self) -> tuple[int, ...]:
        """Dimensions of the tensor of one layer or expert."""
        return self.rows + self.cols


def matrix_dims(axes: tuple[str, ...], *, each_head: bool = False) -> Dims:
    """Returns the dimensions of a parameter with these logical axes.

    Heads and head_dim together are rows or columns: [D, N, H] is D x NH and [N, H, D] is NH x D. each_head: heads are a
    stack axis instead, of D x H and H x D matrices.
    """
    stack_axes = STACK_AXES + (HEADS if each_head else ())
    stack = tuple(d for d, axis in enumerate(axes) if axis in stack_axes)
    unstacked = tuple(d for d in range(len(axes)) if d not in stack)
    num_row_dims = 2 if unstacked and axes[unstacked[0]] in HEADS else 1
    return Dims(stack, unstacked[:num_row_dims], unstacked[num_row_dims:])


def tree_dims(axes_tree: Any, *, each_head: bool = False) -> Any:
    """Returns a tree of Dims, one for each leaf of axes_tree (leaves: tuples of logical axes)."""
    dims = lambda axes: matrix_dims(axes, each_head=each_head)
    return jax.tree.map(dims, axes_tree, is_leaf=lambda leaf: isinstance(leaf, tuple))


def is_hidden_matrix(name: str, axes: tuple[str, ...]) -> bool:
    """True for matrices of the blocks except routers; False for embeddings, the head, norms and biases."""
    in_block = name.partition(".")[0].endswith("blocks")
    return in_block and ROUTER not in axes and not is_exempt(name, axes) and matrix_dims(axes).is_matrix
