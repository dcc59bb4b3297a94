"""Statistics of each layer and of groups of parameters, by a separate program that runs every so many steps.

It takes the gradients of a step's batch once more, with a recorder of the activations, and makes the update without
applying it: the training step is compiled without a trace of it, and trains to the same bits whether it runs or not.

L layers, of all stacks in the order that a batch goes through them
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxscale.data.batch import Batch
from jaxscale.ops.recorder import POSITIONS, SOWN, Intermediates
from jaxscale.optim.groups import is_masked
from jaxscale.sharding.batch_axes import BatchAxes
from jaxscale.sharding.offload import is_on_host
from jaxscale.sharding.shardings import is_axes
from jaxscale.sharding.tensor_axis import TensorAxis
from jaxscale.training import guard
from jaxscale.training.state import TrainState
from jaxscale.training.step import Gradients

DEVICE = jax.memory.Space.Device
EMBEDDING, HEAD, NORMS = "embedding", "head", "norms"  # groups of the parameters outside of blocks
ZERO_GRAD = "zero_grad"
BLOCK = re.compile(r"(\w*blocks)/(?:(\d+)/)?")  # how the path of a block's parameter begins

# {name: {number of a stack's first layer: float32[its layers], or a group: float32[]}}, and under ZERO_GRAD
# {path of a parameter: bool[], or bool[layers] of a stacked one}
Statistics = dict[str, dict[str, jax.Array]]
StatisticsStep = Callable[[TrainState, Batch], Statistics]


class Groups(NamedTuple):
    """The group that each parameter's sum of squares is added to: layers come first, then the others."""

    num_layers: int
    others: tuple[str, ...]
    places: tuple[np.ndarray | int, ...]  # of each parameter; an array, [layers], for one that is stacked
    names: tuple[str, ...]  # of each parameter: its path


def parameter_groups(axes: Any, stacks: Mapping[str, int]) -> Groups:
    """Each layer, and of what is outside of them EMBEDDING (tables of tokens and of positions), HEAD and NORMS.

    axes: the logical axes of the parameters. stacks: as layer_stacks() has them.
    """
    starts, num_layers = {}, 0
    for name, layers in stacks.items():
        starts[name], num_layers = num_layers, num_layers + layers
    leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
    paths = [(jax.tree_util.keystr(path, simple=True, separator="/"), names) for path, names in leaves]
    found = {outer_group(path, names) for path, names in paths if not BLOCK.match(path)}
    others = tuple(name for name in (EMBEDDING, HEAD, NORMS) if name in found)

    def place(path: str, names: tuple[str, ...]) -> np.ndarray | int:
        block = BLOCK.match(path)
        if not block:
            return num_layers + others.index(outer_group(path, names))
        stack, layer = block.groups()
        return starts[stack] + (int(layer) if layer else np.arange(stacks[stack]))

    places = tuple(place(path, names) for path, names in paths)
    return Groups(num_layers, others, places, tuple(path for path, _ in paths))


def outer_group(path: str, axes: tuple[str, ...]) -> str:
    """The group of a parameter outside of blocks."""
    if path.partition("/")[0] in ("head", "bias_vocab"):
        return HEAD
    return EMBEDDING if {"vocab", "position"} & set(axes) else NORMS


def make_statistics_step(
    gradients: Gradients, optimizer: optax.GradientTransformationExtraArgs, groups: Groups
) -> StatisticsStep:
    """Builds the pure (state, batch) -> Statistics of the step that this state would take on this batch.

    gradients: whose means have a SOWN part, as joined() makes it. The update is that of a step which is not refused.
    Norms are L2.
    """

    def statistics_step(state: TrainState, batch: Batch) -> Statistics:
        means, grads = gradients(state, batch)
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
        by_group = lambda values: {"0": values[:layers]} | dict(zip(groups.others, values[layers:]))
        grouped = {name: by_group(values) for name, values in norms.items()}
        return layer_statistics(means[SOWN]) | grouped | {ZERO_GRAD: zero_gradients(groups, grads)}

    return statistics_step


def group_norms(groups: Groups, tree: Any, before: Any = None) -> jax.Array:
    """float32[groups]: the L2 norm of each group of a tree like the parameters.

    before: the parameters, where the tree is updates: of a parameter on the host, an update is the new parameter.
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_masked)
    olds = [None] * len(leaves) if before is None else jax.tree.leaves(before)
    squares = jnp.zeros(groups.num_layers + len(groups.others), jnp.float32)
    for leaf, old, place in zip(leaves, olds, groups.places, strict=True):
        if is_masked(leaf):  # frozen: it has neither gradient nor update
            continue
        squares = squares.at[place].add(reduced(sum_of_squares, leaf, old, stacked=isinstance(place, np.ndarray)))
    return jnp.sqrt(squares)


def zero_gradients(groups: Groups, grads: Any) -> dict[str, jax.Array]:
    """{path: True where every entry of the gradient is exactly zero} of the trained parameters, by layer of a stack.

    Entries are compared themselves: the square of a small one underflows.
    """
    leaves = zip(groups.names, groups.places, jax.tree.leaves(grads, is_leaf=is_masked), strict=True)
    return {
        name: reduced(lambda x: jnp.all(x == 0), leaf, stacked=isinstance(place, np.ndarray))
        for name, place, leaf in leaves
        if not is_masked(leaf)
    }


def sum_of_squares(x: jax.Array) -> jax.Array:
    """float32[]: the sum of the squared entries."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def reduced(
    reduction: Callable[[jax.Array], jax.Array], leaf: jax.Array, old: jax.Array | None = None, *, stacked: bool
) -> jax.Array:
    """The reduction of a parameter to one number, or to [layers] of a stack. From an array on the host, of which the
    device never holds more than a layer of a stack, `old` is subtracted."""
    if not is_on_host(leaf):
        return jax.vmap(reduction)(leaf) if stacked else reduction(leaf)
    pair = [leaf] if old is None else [leaf, old]

    def visit(pair):
        here = jax.device_put(pair, DEVICE)
        return reduction(here[0] - here[1] if len(here) > 1 else here[0])

    if not stacked:
        return visit(pair)
    at = lambda i: [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in pair]
    return jax.lax.map(lambda i: visit(at(i)), jnp.arange(leaf.shape[0]))


def joined(means: dict[str, Any], batch_axes: BatchAxes, tensor: TensorAxis) -> dict[str, Any]:
    """The means of accumulate() with the intermediates of all devices and microbatches: float32[layers], where it was
    float32[microbatches, layers] of this device. As they are where nothing was recorded."""
    if SOWN not in means:
        return means
    sums = lambda x: tensor.sum(batch_axes.sum(jnp.sum(x, axis=0)))
    maxima = lambda x: tensor.max(batch_axes.max(jnp.max(x, axis=0)))
    seen = tuple(Intermediates(jax.tree.map(sums, of.sums), jax.tree.map(maxima, of.maxima)) for of in means[SOWN])
    return means | {SOWN: seen}


def layer_statistics(stacks: Sequence[Intermediates]) -> Statistics:
    """Root mean squares over the entries of all positions with text, and the largest scores of attention."""
    found: Statistics = {}
    start = 0
    for seen in stacks:
        positions = seen.sums[POSITIONS]
        for name, total in seen.sums.items():
            if name != POSITIONS:
                found.setdefault(f"{name}_rms", {})[str(start)] = jnp.sqrt(total / positions)
        for name, largest in seen.maxima.items():
            found.setdefault(name, {})[str(start)] = largest
        start += positions.shape[0]
    return found


def named(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """{'stats/activation_rms/00': number, ..., 'stats/grad_norm/embedding': number} of fetched Statistics.

    Numbers of layers have as many digits as the last needs, two at least: the order of the text is that of the layers.
    Of ZERO_GRAD it has the parameters whose gradient is zero only: 'stats/zero_grad/blocks/1/mlp/up' is 1.0.
    """
    zero = statistics.get(ZERO_GRAD, {})
    statistics = {name: parts for name, parts in statistics.items() if name != ZERO_GRAD}
    starts = [(int(key), values) for parts in statistics.values() for key, values in parts.items() if key.isdigit()]
    last = max(start + len(values) for start, values in starts) - 1
    digits = max(2, len(str(last)))
    numbers = {}
    for name, parts in statistics.items():
        for key, values in parts.items():
            if key.isdigit():
                layers = enumerate(values.tolist(), int(key))
                numbers |= {f"stats/{name}/{layer:0{digits}}": value for layer, value in layers}
            else:
                numbers[f"stats/{name}/{key}"] = float(values)
    numbers |= {f"stats/{ZERO_GRAD}/{name}": 1.0 for path, flags in zero.items() for name in flagged(path, flags)}
    return dict(sorted(numbers.items()))


def flagged(path: str, flags: np.ndarray) -> list[str]:
    """The path if its flag is set; of a stacked parameter a path for each layer whose flag is set."""
    if not flags.ndim:
        return [path] * bool(flags)
    stack, _, rest = path.partition("/")
    return [f"{stack}/{layer}/{rest}" for layer in np.flatnonzero(flags)]


class Watch:
    """Runs the program when it is due, and keeps its seconds out of the throughput. It holds nothing of the state."""

    def __init__(
        self, step: StatisticsStep | None, every_steps: int, exclude: Callable[[float], None], phase: Callable
    ):
        """exclude: takes seconds out of the throughput."""
        self.step, self.every_steps, self.exclude, self.phase = step, every_steps, exclude, phase

    def begin(self, step: int, state: TrainState, batch: Batch) -> Statistics | None:
        """Sends the program on its way if statistics of this step are due; the first time it is compiled.

        Before the step itself, which writes its results in the place of the state.
        """
        if self.step is None or not self.every_steps or step % self.every_steps:
            return None
        with self.phase("statistics", step), self.excluded():
            return self.step(state, batch)

    def end(self, step: int, found: Statistics | None) -> dict[str, float]:
        """The numbers by name, {} if they were not due. Waits for them, while the step itself is on the devices' list.

        To be called when the step before is known to be done: the time until the numbers are there is theirs.
        """
        if found is None:
            return {}
        with self.phase("statistics", step), self.excluded():
            return named(jax.device_get(found))

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """A block whose seconds are no training time."""
        began = time.monotonic()
        yield
        self.exclude(time.monotonic() - began)
