"""The optimizer as one optax transformation: clip, moments, decoupled decay, learning rate.

The learning rate is read from the step that the train state counts (attempted steps), handed over as `step=`, because
optax's own count stands still on a skipped step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from jaxscale.optim.adafactor import FactoredState, factored_axes, scale_by_factored
from jaxscale.optim.config import OptimConfig
from jaxscale.optim.groups import Group, dotted, frozen_mask
from jaxscale.optim.lamb import scale_by_trust
from jaxscale.optim.low_precision_moments import Blocks, is_blocks, scale_axes, stored
from jaxscale.optim.matrices import is_hidden_matrix, tree_dims
from jaxscale.optim.muon import orthogonalised
from jaxscale.optim.offload import is_masked, renewed, streamed
from jaxscale.optim.schedules import Schedule, make_schedule
from jaxscale.optim.whole_matrices import make_place

UNCUT = "norm"  # a logical axis that no mesh cuts


def optim_schedule(
    cfg: OptimConfig,
    *,
    warmup_steps: int,
    total_steps: int,
    decay_start: int | None = None,
    factors: Sequence[tuple[int, float]] = (),
) -> Schedule:
    """The learning rate at any step of a run with these settings. decay_start, factors: as of make_schedule."""
    return make_schedule(
        decay=cfg.decay,
        peak_lr=cfg.peak_lr,
        min_lr=cfg.min_lr,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        decay_fraction=cfg.decay_fraction,
        decay_shape=cfg.decay_shape,
        decay_start=decay_start,
        factors=factors,
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where parameters and moments are, for rules that look at whole tensors.

    axes, specs: trees like the parameters, of logical axes and of the moments' PartitionSpecs. slow: mesh axes along
    which no work is shared out.
    """

    axes: Any
    specs: Any
    mesh: jax.sharding.Mesh
    slow: tuple[str, ...] = ()


def make_optimizer(
    cfg: OptimConfig, schedule: Schedule, groups: Any, is_stacked: Any = None, layout: Layout | None = None
) -> optax.GradientTransformationExtraArgs:
    """update(grads, state, params, step=..., ok=..., lr_factor=1.0) -> (updates, state).

    Args: groups: a tree of Group like the parameters. is_stacked: as streamed() wants it, to offload. layout: for
    rules that look at whole tensors. ok: read where moments or parameters are offloaded, which stay as they were if it
    is False. Updates of offloaded parameters are the new parameters, as renewed() says; of frozen ones, zeros.
    """
    rest = lambda tx: tx if cfg.moment_dtype == "float32" else stored(tx, cfg.moment_dtype, required(layout).axes)
    adam = lambda: rest(optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps))
    moments = {
        "adamw": adam,
        "lion": lambda: rest(optax.scale_by_lion(cfg.b1, cfg.b2)),
        "sgd": lambda: rest(optax.trace(cfg.b1)) if cfg.b1 else optax.identity(),
        "muon": lambda: muon(cfg, required(layout), rest(optax.trace(cfg.muon_momentum, nesterov=True)), adam()),
        "adafactor": lambda: scale_by_factored(tree_dims(required(layout).axes), cfg.scale_by_parameter),
        "lamb": adam,
    }[cfg.name]()
    if cfg.offload_moments:
        moments = streamed(moments, is_stacked)
    clip = optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity()
    last = lambda groups: (add_decay(groups), scale_by_lr(schedule, groups))
    if cfg.offload_params:  # as many parts as otherwise, for the checkpoint's sake
        end = (optax.identity(), renewed(lambda group: optax.chain(*last(group)), groups, is_stacked))
    else:
        end = last(groups)
    if cfg.name == "lamb":
        end = (end[0], scale_by_trust(tree_dims(required(layout).axes)), end[1])
    inner = optax.chain(clip, moments, *end)
    frozen = frozen_mask(groups)
    if not any(jax.tree.leaves(frozen)):
        return inner
    labels = jax.tree.map(lambda stays: "frozen" if stays else "learns", frozen)
    return optax.multi_transform({"learns": inner, "frozen": optax.set_to_zero()}, labels)


def required(layout: Layout | None) -> Layout:
    """The layout, for a rule that needs it."""
    assert layout is not None, "this optimizer looks at whole tensors: pass their layout"
    return layout


def muon(
    cfg: OptimConfig, layout: Layout, momentum: optax.GradientTransformation, adam: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Orthogonalised momentum for the blocks' matrices, and Adam's updates for all other parameters."""
    label = lambda path, axes: "muon" if is_hidden_matrix(dotted(path), axes) else "adamw"
    labels = jax.tree_util.tree_map_with_path(label, layout.axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    dims = jax.tree.leaves(tree_dims(layout.axes, each_head=cfg.muon_heads == "each"))
    place = lambda dims, spec: make_place(dims, spec, layout.mesh, layout.slow)
    places = [place(*both) for both in zip(dims, jax.tree.leaves(layout.specs), strict=True)]
    matrices = optax.chain(momentum, orthogonalised(places, layout.mesh, cfg.muon_dtype, cfg.muon_steps))
    return optax.multi_transform({"muon": matrices, "adamw": adam}, labels)


def add_decay(groups: Any) -> optax.GradientTransformation:
    """Adds each parameter times its group's weight decay: decoupled, after the moments (arXiv:1711.05101)."""

    def update(updates, state, params=None):
        return map_with_groups(lambda u, p, group: u + group.weight_decay * p, groups, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_lr(schedule: Schedule, groups: Any) -> optax.GradientTransformationExtraArgs:
    """Multiplies by minus the learning rate of `step`, times lr_factor and the group's multiplier."""

    def update(updates, state, params=None, *, step: Any = None, lr_factor: Any = 1.0, **extra):
        lr = schedule(step) * lr_factor
        return map_with_groups(lambda u, group: -lr * group.lr_multiplier * u, groups, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def map_with_groups(f: Callable, groups: Any, *trees: Any) -> Any:
    """f(leaf, ..., group) over trees of parameters; leaves masked out by optax are passed by."""

    def one(group: Group, *leaves):
        return leaves[0] if is_masked(leaves[0]) else f(*leaves, group)

    flat_groups, treedef = jax.tree.flatten(groups)
    flat = [jax.tree.leaves(tree, is_leaf=is_masked) for tree in trees]
    return jax.tree.unflatten(treedef, [one(*leaves) for leaves in zip(flat_groups, *flat, strict=True)])


def trainable(tree: Any, groups: Any) -> Any:
    """The trainable part of a tree like the parameters: frozen ones, which get no gradients, become MaskedNodes."""
    keep = lambda group, leaf: optax.MaskedNode() if group.frozen else leaf
    return jax.tree.map(keep, groups, tree)


def combine(trained: Any, params: Any) -> Any:
    """The trainable part, with the frozen parameters of `params`."""
    return jax.tree.map(lambda p, own: p if is_masked(own) else own, params, trained)


def moment_axes(
    optimizer: optax.GradientTransformation, params: Any, axes_tree: Any, parts: Callable[[str], int] = lambda axis: 1
) -> Any:
    """Logical axes for each leaf of the optimizer state: moments inherit their parameter's, counts have (), and means
    over rows or columns lack those.

    params: shapes (jax.eval_shape's) of the parameters. parts: into how many the mesh cuts an axis.
    """
    state = jax.eval_shape(optimizer.init, params)
    flat_axes, _ = jax.tree.flatten(axes_tree, is_leaf=lambda leaf: isinstance(leaf, tuple))
    boxed = jax.tree.unflatten(jax.tree.structure(params), [Axes(axes) for axes in flat_axes])

    def of_moment(leaf: Any, box: Any) -> Any:
        if is_masked(leaf):  # a frozen parameter has no moments, hence no axes
            return leaf
        if not is_blocks(leaf):
            return box
        scales: Any = Axes(scale_axes(box.axes, leaf.codes, leaf.scales, parts, UNCUT))
        return Blocks(box, scales)

    mapped = optax.tree_utils.tree_map_params(
        optimizer,
        of_moment,
        state,
        boxed,
        transform_non_params=lambda _: Axes(()),
        is_leaf=lambda leaf: is_masked(leaf) or is_blocks(leaf),
    )
    mapped = jax.tree.map(without_summed, mapped, is_leaf=lambda part: isinstance(part, FactoredState))
    return jax.tree.map(lambda box: box.axes, mapped)


def without_summed(part: Any) -> Any:
    """A part of a state with Axes for leaves; those of factored moments without the axes that they are summed over."""
    if not isinstance(part, FactoredState):
        return part
    fields = ("rows", "cols", "full")
    drop = lambda field: jax.tree.map(lambda box: Axes(factored_axes(box.axes, field)), getattr(part, field))
    return part._replace(**{field: drop(field) for field in fields})


@dataclasses.dataclass(frozen=True)
class Axes:
    """A tuple of axes as one leaf of a tree."""

    axes: tuple[str, ...]
