"""Statistics of layers and groups of parameters, which a separate program computes every few steps.

The program recomputes the gradients of the step's batch while recording activations, and computes the update without
applying it. It is not part of the training step, so training is bitwise equal with and without statistics.

L layers of all stacks, in forward order
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxscale.core import guard
from jaxscale.core.batch import Batch
from jaxscale.core.gradients import Gradients
from jaxscale.core.optim.groups import is_masked
from jaxscale.core.recorder import POSITIONS, SOWN, Intermediates
from jaxscale.core.shardings import is_axes
from jaxscale.core.state import TrainState
from jaxscale.kernels.host_memory import is_on_host

DEVICE = jax.memory.Space.Device
EMBEDDING, HEAD, NORMS = "embedding", "head", "norms"  # groups of the parameters outside of blocks
ZERO_GRAD = "zero_grad"
BLOCK = re.compile(r"(\w*blocks)/(?:(\d+)/)?")  # prefix of the paths of parameters in blocks

# {statistic: {index of a stack's first layer: float32[layers of the stack], group: float32[]}}. The value of ZERO_GRAD
# is {path of a parameter: bool[], or bool[layers] if stacked}.
Statistics = dict[str, dict[str, jax.Array]]
StatisticsStep = Callable[[TrainState, Batch], Statistics]


class StatisticsGroups(NamedTuple):
    """Groups of parameters: one group per layer, followed by the groups outside of blocks."""

    num_layers: int
    outer_names: tuple[str, ...]
    indices: tuple[np.ndarray | int, ...]  # index of the group of each parameter; [layers] if stacked
    paths: tuple[str, ...]  # path of each parameter


def statistics_groups(axes: Any, stacks: Mapping[str, int]) -> StatisticsGroups:
    """Groups parameters by layer. Parameters outside of blocks are in EMBEDDING (tokens, positions), HEAD or NORMS.

    axes: logical axes of the parameters. stacks: ModelConfig.layer_stacks.
    """
    starts, num_layers = {}, 0
    for name, layers in stacks.items():
        starts[name], num_layers = num_layers, num_layers + layers
    leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
    params = [(jax.tree_util.keystr(path, simple=True, separator="/"), names) for path, names in leaves]
    present = {outer_group(path, names) for path, names in params if not BLOCK.match(path)}
    outer_names = tuple(name for name in (EMBEDDING, HEAD, NORMS) if name in present)

    def index(path: str, names: tuple[str, ...]) -> np.ndarray | int:
        block = BLOCK.match(path)
        if not block:
            return num_layers + outer_names.index(outer_group(path, names))
        stack, layer = block.groups()
        return starts[stack] + (int(layer) if layer else np.arange(stacks[stack]))

    indices = tuple(index(path, names) for path, names in params)
    return StatisticsGroups(num_layers, outer_names, indices, tuple(path for path, _ in params))


def outer_group(path: str, axes: tuple[str, ...]) -> str:
    """Returns the group of a parameter outside of blocks."""
    if path.partition("/")[0] in ("head", "bias_vocab"):
        return HEAD
    return EMBEDDING if {"vocab", "position"} & set(axes) else NORMS


def make_statistics_step(
    gradients: Gradients, optimizer: optax.GradientTransformationExtraArgs, groups: StatisticsGroups
) -> StatisticsStep:
    """Returns a pure function (state, batch) -> Statistics of a step with this state and batch.

    gradients: must have a recorder, which adds intermediates to its means under SOWN. The update is that of an accepted
    step. Norms are L2 norms.
    """

    def statistics_step(state: TrainState, batch: Batch) -> Statistics:
        means, grads = gradients.compute(state, batch)
        lr_factor = guard.lr_factor(state.guard, state.step)
        updates, _ = optimizer.update(
            grads, state.opt_state, state.params, step=state.step, ok=jnp.bool(True), lr_factor=lr_factor
        )
        norms = {
            "grad_norm": group_norms(groups, grads),
            "update_norm": group_norms(groups, updates, state.params),
            "weight_norm": group_norms(groups, state.params),
        }
        norms["update_ratio"] = norms["update_norm"] / norms["weight_norm"]
        layers = groups.num_layers
        by_group = lambda values: {"0": values[:layers]} | dict(zip(groups.outer_names, values[layers:]))
        grouped = {name: by_group(values) for name, values in norms.items()}
        return layer_statistics(means[SOWN]) | grouped | {ZERO_GRAD: zero_gradients(groups, grads)}

    return statistics_step


def group_norms(groups: StatisticsGroups, tree: Any, before: Any = None) -> jax.Array:
    """Returns float32[groups], the L2 norm of each group of a tree like the parameters.

    before: the old parameters if the tree contains updates. The update of an offloaded parameter is its new value.
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_masked)
    olds = [None] * len(leaves) if before is None else jax.tree.leaves(before)
    sum_of_squares = lambda x: jnp.sum(jnp.square(x.astype(jnp.float32)))
    squares = jnp.zeros(groups.num_layers + len(groups.outer_names), jnp.float32)
    for leaf, old, index in zip(leaves, olds, groups.indices, strict=True):
        if is_masked(leaf):  # a frozen parameter has no gradient and no update
            continue
        squares = squares.at[index].add(reduce_leaf(sum_of_squares, leaf, old, stacked=isinstance(index, np.ndarray)))
    return jnp.sqrt(squares)


def zero_gradients(groups: StatisticsGroups, grads: Any) -> dict[str, jax.Array]:
    """Returns {path: True if the gradient is exactly zero} for trained parameters, per layer if stacked.

    Compares entries instead of a norm, because the squares of small entries underflow.
    """
    leaves = zip(groups.paths, groups.indices, jax.tree.leaves(grads, is_leaf=is_masked), strict=True)
    return {
        path: reduce_leaf(lambda x: jnp.all(x == 0), leaf, stacked=isinstance(index, np.ndarray))
        for path, index, leaf in leaves
        if not is_masked(leaf)
    }


def reduce_leaf(
    reduction: Callable[[jax.Array], jax.Array], leaf: jax.Array, old: jax.Array | None = None, *, stacked: bool
) -> jax.Array:
    """Reduces a leaf to a scalar, or to [layers] if stacked.

    A leaf in host memory is copied to the device, layer by layer if stacked, and `old`, if any, is subtracted.
    """
    if not is_on_host(leaf):
        return jax.vmap(reduction)(leaf) if stacked else reduction(leaf)
    pair = [leaf] if old is None else [leaf, old]

    def reduce_on_device(pair):
        copied = jax.device_put(pair, DEVICE)
        return reduction(copied[0] - copied[1] if len(copied) > 1 else copied[0])

    if not stacked:
        return reduce_on_device(pair)
    at = lambda i: [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in pair]
    return jax.lax.map(lambda i: reduce_on_device(at(i)), jnp.arange(leaf.shape[0]))


def layer_statistics(stacks: Sequence[Intermediates]) -> Statistics:
    """Returns root mean squares over non-padding positions, and the largest attention scores."""
    statistics: Statistics = {}
    start = 0
    for stack in stacks:
        positions = stack.sums[POSITIONS]
        for name, total in stack.sums.items():
            if name != POSITIONS:
                statistics.setdefault(f"{name}_rms", {})[str(start)] = jnp.sqrt(total / positions)
        for name, maxima in stack.maxima.items():
            statistics.setdefault(name, {})[str(start)] = maxima
        start += positions.shape[0]
    return statistics
