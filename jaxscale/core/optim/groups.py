"""Parameter groups (learning-rate multiplier, weight decay, frozen), and row and column dimensions of parameters."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxscale.core.optim.config import GroupConfig
from jaxscale.core.shardings import ROUTER, is_axes
from jaxscale.system.exits import BadInput

FROZEN_BASE = "base"  # group of the frozen weights of a model with adapters
DEFAULT_GROUPS = ("decay", "no decay", FROZEN_BASE)
NO_DECAY_AXES = {"norm", "position"}  # axes of norm scales, biases and learned positions


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """Update settings of one parameter, as a leaf of a pytree."""

    name: str
    lr_multiplier: float
    weight_decay: float
    frozen: bool


def dotted(path: tuple) -> str:
    """Formats a jax key path as 'blocks.attention.wq'."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def assign_groups(
    axes_tree: Any,
    groups: tuple[GroupConfig, ...],
    weight_decay: float,
    weight_decay_all: bool,
    is_trainable: Callable[[str], bool] = lambda name: True,
    base_multiplier: Callable[[str], float] = lambda name: 1.0,
) -> Any:
    """Returns a tree with a ParamGroup for each leaf of axes_tree, whose leaves are tuples of logical axes.

    Weight decay applies to matrices, and with weight_decay_all also to norms, biases and embeddings. Parameters for
    which is_trainable(name) is False are frozen in every group. base_multiplier(name) multiplies the learning rate and
    divides the weight decay, so that the decay per step is unchanged (muP). Raises BadInput for unmatched patterns.
    """
    matched = {index: False for index in range(len(groups))}

    def assign(path: tuple, axes: tuple[str, ...]) -> ParamGroup:
        name = dotted(path)
        if not is_trainable(name):
            return ParamGroup(FROZEN_BASE, 1.0, 0.0, True)
        decays = weight_decay_all or not is_exempt(name, axes)
        default, multiplier = weight_decay if decays else 0.0, base_multiplier(name)
        for index, group in enumerate(groups):
            if re.search(group.pattern, name):
                matched[index] = True
                decay = default if group.weight_decay is None else group.weight_decay
                return ParamGroup(group.pattern, multiplier * group.lr_multiplier, decay / multiplier, group.frozen)
        return ParamGroup(DEFAULT_GROUPS[0 if default else 1], multiplier, default / multiplier, False)

    assigned = jax.tree_util.tree_map_with_path(assign, axes_tree, is_leaf=is_axes)
    names = [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(axes_tree, is_leaf=is_axes)]
    names = [name for name in names if is_trainable(name)]
    for index, found in matched.items():
        if not found:
            matched_earlier = any(re.search(groups[index].pattern, name) for name in names)
            problem = "matches only parameters of earlier groups; move it before them"
            problem = problem if matched_earlier else f"matches no parameter; use names among {', '.join(names)}"
            raise BadInput(f"optim.groups[{index}].pattern={groups[index].pattern!r} {problem}")
    return assigned


def is_exempt(name: str, axes: tuple[str, ...]) -> bool:
    """Returns True for norms, biases and embedding tables, which have no weight decay by default."""
    inner = [axis for axis in axes if axis != "layers"]
    leaf = name.rsplit(".", 1)[-1]
    return (
        NO_DECAY_AXES & set(inner) != set()
        or len(inner) < 2
        or leaf.startswith(("embedding", "bias", "scale"))
        or leaf.endswith("_norm")
    )


def is_masked(leaf: Any) -> bool:
    """Returns True for optax.MaskedNode, which replaces parameters that a transformation does not apply to."""
    return isinstance(leaf, optax.MaskedNode)


STACK_AXES = ("layers", "experts")
HEADS = ("heads", "kv_heads")


@dataclasses.dataclass(frozen=True)
class Dims:
    """Indices of the dimensions of a parameter. stack: layers and experts. cols: () if not a matrix."""

    stack: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """True if the parameter has rows and columns."""
        return bool(self.cols)

    @property
    def unstacked(self) -> tuple[int, ...]:
        """Dimensions of the tensor of one layer or expert."""
        return self.rows + self.cols


def matrix_dims(axes: tuple[str, ...], *, each_head: bool = False) -> Dims:
    """Returns the dimensions of a parameter with these logical axes.

    Heads and head_dim are merged, so [D, N, H] is a D x NH matrix and [N, H, D] is an NH x D matrix. With each_head,
    heads are a stack dimension instead.
    """
    stack_axes = STACK_AXES + (HEADS if each_head else ())
    stack = tuple(d for d, axis in enumerate(axes) if axis in stack_axes)
    unstacked = tuple(d for d in range(len(axes)) if d not in stack)
    num_row_dims = 2 if unstacked and axes[unstacked[0]] in HEADS else 1
    return Dims(stack, unstacked[:num_row_dims], unstacked[num_row_dims:])


def tree_dims(axes_tree: Any, *, each_head: bool = False) -> Any:
    """Returns a tree with the Dims of each leaf of axes_tree, whose leaves are tuples of logical axes."""
    dims = lambda axes: matrix_dims(axes, each_head=each_head)
    return jax.tree.map(dims, axes_tree, is_leaf=is_axes)


def is_hidden_matrix(name: str, axes: tuple[str, ...]) -> bool:
    """Returns True for matrices in blocks, except routers. Embeddings and the head are outside of blocks."""
    in_block = name.partition(".")[0].endswith("blocks")
    return in_block and ROUTER not in axes and not is_exempt(name, axes) and matrix_dims(axes).is_matrix
