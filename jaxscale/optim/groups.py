"""Parameter groups: which decay, learn faster or slower, or not at all. Decided by name, once, before the run."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxscale.optim.config import GroupConfig
from jaxscale.system.exits import BadInput

FROZEN_BASE = "base"  # what adapters are added to
DEFAULT_GROUPS = ("decay", "no decay", FROZEN_BASE)
NO_DECAY_AXES = {"norm", "position"}  # scales and biases along the model width, and learned positions


@dataclasses.dataclass(frozen=True)
class Group:
    """What one parameter's updates are made with: a leaf of a tree, as JAX sees it."""

    name: str
    lr_multiplier: float
    weight_decay: float
    frozen: bool


def dotted(path: tuple) -> str:
    """A jax key path as 'blocks.attention.wq'."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def assign_groups(
    axes_tree: Any,
    groups: tuple[GroupConfig, ...],
    weight_decay: float,
    weight_decay_all: bool,
    learns: Callable[[str], bool] = lambda name: True,
    rate: Callable[[str], float] = lambda name: 1.0,
) -> Any:
    """A tree of Group, one for each leaf of axes_tree (leaves: tuples of logical axes).

    Without a group, matrices decay; norms, biases and embeddings do not, unless weight_decay_all. What does not learn,
    by its name, is frozen whatever the groups say. rate: of a name, what its learning rate is multiplied with besides;
    decay is divided by it, so that a step shrinks the parameter by as much as without. Raises BadInput for a pattern
    that finds nothing, with the names there are.
    """
    is_axes = lambda leaf: isinstance(leaf, tuple)
    matched = {index: False for index in range(len(groups))}

    def assign(path: tuple, axes: tuple[str, ...]) -> Group:
        name = dotted(path)
        if not learns(name):
            return Group(FROZEN_BASE, 1.0, 0.0, True)
        decays = weight_decay_all or not is_exempt(name, axes)
        default, own_rate = weight_decay if decays else 0.0, rate(name)
        for index, group in enumerate(groups):
            if re.search(group.pattern, name):
                matched[index] = True
                decay = default if group.weight_decay is None else group.weight_decay
                return Group(group.pattern, own_rate * group.lr_multiplier, decay / own_rate, group.frozen)
        return Group(DEFAULT_GROUPS[0 if default else 1], own_rate, default / own_rate, False)

    assigned = jax.tree_util.tree_map_with_path(assign, axes_tree, is_leaf=is_axes)
    names = [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(axes_tree, is_leaf=is_axes)]
    names = [name for name in names if learns(name)]
    for index, found in matched.items():
        pattern = groups[index].pattern
        if not found and not any(re.search(pattern, name) for name in names):
            raise BadInput(
                f"optim.groups[{index}].pattern={pattern!r} matches no parameter; there are {', '.join(names)}"
            )
        if not found:
            raise BadInput(
                f"optim.groups[{index}].pattern={pattern!r} only matches what earlier groups took; move it up"
            )
    return assigned


def is_exempt(name: str, axes: tuple[str, ...]) -> bool:
    """True for norms, biases and embedding tables, which are not decayed unless told otherwise."""
    inner = [axis for axis in axes if axis != "layers"]
    leaf = name.rsplit(".", 1)[-1]
    return (
        NO_DECAY_AXES & set(inner) != set()
        or len(inner) < 2
        or leaf.startswith(("embedding", "bias", "scale"))
        or leaf.endswith("_norm")
    )


def frozen_mask(assigned: Any) -> Any:
    """A tree of bools, True where the parameter never changes."""
    return jax.tree.map(lambda group: group.frozen, assigned)


def group_table(shapes: Mapping, specs: Mapping, assigned: Any) -> list[tuple[str, str, str, str, str]]:
    """Rows (parameter, shape, dtype, sharding, group) for the start of a run."""
    rows = []
    leaves = zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(specs), jax.tree.leaves(assigned))
    for (path, shape), sharding, group in leaves:
        axes = tuple(sharding.spec)
        place = ", ".join("-" if axis is None else axis if isinstance(axis, str) else "*".join(axis) for axis in axes)
        told = "frozen" if group.frozen else f"decay {group.weight_decay:g}"
        if group.lr_multiplier != 1 and not group.frozen:
            told += f", lr x{group.lr_multiplier:g}"
        if group.name not in DEFAULT_GROUPS:
            told += f" ({group.name})"
        rows.append((dotted(path), "x".join(map(str, shape.shape)) or "scalar", str(shape.dtype), place or "-", told))
    return rows
