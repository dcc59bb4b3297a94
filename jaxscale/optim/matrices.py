"""Which axes of a parameter are a matrix, and which only number matrices: layers and experts, by their names."""

import dataclasses
from typing import Any

import jax

from jaxscale.optim.groups import is_exempt

NUMBERING = ("layers", "experts")  # axes of a stack
HEADS = ("heads", "kv_heads")
ROUTER = "router"


@dataclasses.dataclass(frozen=True)
class Dims:
    """The dimensions of a parameter. A leaf of a tree, as JAX sees it.

    stack: they number what belongs to one layer or one expert. rows, cols: of the matrix; cols is () where it is none.
    """

    stack: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether there is one."""
        return bool(self.cols)

    @property
    def own(self) -> tuple[int, ...]:
        """Those of one tensor of one layer or expert."""
        return self.rows + self.cols


def matrix_dims(axes: tuple[str, ...], *, each_head: bool = False) -> Dims:
    """The dimensions of a parameter with these logical axes.

    Heads are rows or columns together with what is in each: [D, N, H] is D x NH and [N, H, D] is NH x D. each_head:
    they number matrices instead, of D x H and H x D.
    """
    numbering = NUMBERING + (HEADS if each_head else ())
    stack = tuple(d for d, axis in enumerate(axes) if axis in numbering)
    own = tuple(d for d in range(len(axes)) if d not in stack)
    count = 2 if own and axes[own[0]] in HEADS else 1
    return Dims(stack, own[:count], own[count:])


def tree_dims(axes_tree: Any, *, each_head: bool = False) -> Any:
    """A tree of Dims, one for each leaf of axes_tree (leaves: tuples of logical axes)."""
    dims = lambda axes: matrix_dims(axes, each_head=each_head)
    return jax.tree.map(dims, axes_tree, is_leaf=lambda leaf: isinstance(leaf, tuple))


def is_hidden_matrix(name: str, axes: tuple[str, ...]) -> bool:
    """True for the matrices of the blocks, but for routers; False for embeddings, the head, norms and biases."""
    in_block = name.partition(".")[0].endswith("blocks")
    return in_block and ROUTER not in axes and not is_exempt(name, axes) and matrix_dims(axes).is_matrix
