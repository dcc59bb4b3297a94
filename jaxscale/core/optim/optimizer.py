"""The optimizer as one optax transformation: gradient clipping, moments, decoupled weight decay, learning rate.

The learning rate is a function of the train state's step (attempted steps), passed as `step=`. The step count of optax
does not increase in skipped steps.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.core.optim.config import STABLE, OptimConfig
from jaxscale.core.optim.groups import ParamGroup, dotted, is_hidden_matrix, is_masked, tree_dims
from jaxscale.core.optim.moments import (
    FACTORED_FIELDS,
    FactoredState,
    QuantizedMoment,
    cast_moments,
    is_quantized,
    offload_moments,
    offload_params,
    scale_axes,
)

Schedule = Callable[[jax.Array | int], jax.Array]  # int32 step -> float32 learning rate
UNSHARDED = "norm"  # a logical axis that is never sharded


def optim_schedule(
    cfg: OptimConfig,
    *,
    warmup_steps: int,
    total_steps: int,
    decay_start: int | None = None,
    factors: Sequence[tuple[int, float]] = (),
) -> Schedule:
    """Returns a function from the step to the learning rate, float32[]: linear warmup, then cfg.decay.

    Steps are counted from 0. The learning rate of step 0 is peak / warmup_steps.

    cosine, linear: decays from the end of the warmup to the last step. wsd: stays at the peak, then decays over the
    last `decay_fraction` of all steps, or from step `decay_start`. The decay is linear or 1 - sqrt (arXiv:2404.06395,
    arXiv:2405.18392). inverse_sqrt: peak x sqrt(warmup / (step + 1)) (arXiv:1706.03762). piecewise: each pair (step,
    factor) in `factors` sets the rate to peak x factor from that step (arXiv:2401.02954). constant: stays at the peak;
    with decay_start, decays from that step like wsd.

    Schedules that decay to min_lr reach it at step total_steps - 1, unless the whole run is warmup.
    """
    decay, peak_lr = cfg.decay, cfg.peak_lr
    if decay_start is not None:
        start = max(warmup_steps, decay_start)
    elif decay == "wsd":
        start = max(warmup_steps, total_steps - round(cfg.decay_fraction * total_steps))
    else:
        start = warmup_steps
    span = max(1, total_steps - 1 - start)

    def decayed(step: jax.Array) -> jax.Array:
        progress = jnp.clip((step - start) / span, 0.0, 1.0)
        if decay == "cosine":
            shape = 0.5 * (1 + jnp.cos(jnp.pi * progress))
        elif cfg.decay_shape == "one_minus_sqrt" and decay in STABLE:
            shape = 1 - jnp.sqrt(progress)
        else:
            shape = 1 - progress
        shape = jnp.where(step >= total_steps - 1, 0.0, shape)  # also if the decay has 0 or 1 steps
        return shape * peak_lr + (1 - shape) * cfg.min_lr  # exact at both ends

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warm = peak_lr * (step + 1) / max(1, warmup_steps)
        if decay == "inverse_sqrt":
            lr = peak_lr * jnp.sqrt(max(1, warmup_steps) / (step + 1))
        elif decay == "piecewise" or (decay == "constant" and decay_start is None):
            lr = jnp.full((), peak_lr, jnp.float32)
            for begin, factor in factors:
                lr = jnp.where(step >= begin, peak_lr * factor, lr)
        else:
            lr = decayed(step)
        return jnp.where(step < warmup_steps, warm, lr)

    return schedule


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """Sharding of parameters and moments, for update rules that need whole tensors.

    axes: logical axes of each parameter. specs: PartitionSpec of each moment. slow: mesh axes with a slow network,
    along which work is replicated.
    """

    axes: Any
    specs: Any
    mesh: jax.sharding.Mesh
    slow: tuple[str, ...] = ()


def make_optimizer(
    cfg: OptimConfig, schedule: Schedule, groups: Any, is_stacked: Any = None, layout: ParamLayout | None = None
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer with update(grads, state, params, step=..., ok=..., lr_factor=1.0) -> (updates, state).

    groups: a tree of ParamGroup like the parameters. is_stacked: see offload_moments(). layout: required by update
    rules that need whole tensors. ok: if False, offloaded moments and parameters do not change; unused without
    offloading. The updates of offloaded parameters are their new values, and those of frozen parameters are zeros.
    """
    cast = lambda tx: tx if cfg.moment_dtype == "float32" else cast_moments(tx, cfg.moment_dtype, required(layout).axes)
    adam = lambda: cast(optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps))
    moments = {
        "adamw": adam,
        "lion": lambda: cast(optax.scale_by_lion(cfg.b1, cfg.b2)),
        "sgd": lambda: cast(optax.trace(cfg.b1)) if cfg.b1 else optax.identity(),
        "muon": lambda: muon(cfg, required(layout), cast(optax.trace(cfg.muon_momentum, nesterov=True)), adam()),
        "adafactor": lambda: adafactor(cfg, required(layout)),
        "lamb": adam,
    }[cfg.name]()
    if cfg.offload_moments:
        moments = offload_moments(moments, is_stacked)
    clip = optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity()
    last = lambda groups: (add_decay(groups), scale_by_lr(schedule, groups))
    if cfg.offload_params:  # the chain has the same length, so that checkpoints have the same tree
        tail = (
            optax.identity(),
            offload_params(lambda group: optax.chain(*last(group)), groups, is_stacked),
        )
    else:
        tail = last(groups)
    if cfg.name == "lamb":
        from jaxscale.core.optim.adafactor_lamb import scale_by_trust

        tail = (tail[0], scale_by_trust(tree_dims(required(layout).axes)), tail[1])
    tx = optax.chain(clip, moments, *tail)
    frozen = jax.tree.map(lambda group: group.frozen, groups)
    if not any(jax.tree.leaves(frozen)):
        return tx
    labels = jax.tree.map(lambda is_frozen: "frozen" if is_frozen else "learns", frozen)
    return optax.multi_transform({"learns": tx, "frozen": optax.set_to_zero()}, labels)


def required(layout: ParamLayout | None) -> ParamLayout:
    """Returns the layout. Asserts that it is not None."""
    assert layout is not None, "this optimizer needs whole tensors; pass layout"
    return layout


def muon(
    cfg: OptimConfig, layout: ParamLayout, momentum: optax.GradientTransformation, adam: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Returns Muon: orthogonalized momentum for the matrices in blocks, and Adam for all other parameters."""
    from jaxscale.core.optim.muon import orthogonalize, stack_sharding

    label = lambda path, axes: "muon" if is_hidden_matrix(dotted(path), axes) else "adamw"
    labels = jax.tree_util.tree_map_with_path(label, layout.axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    dims = jax.tree.leaves(tree_dims(layout.axes, each_head=cfg.muon_heads == "each"))
    sharding = lambda dims, spec: stack_sharding(dims, spec, layout.mesh, layout.slow)
    shardings = [sharding(*pair) for pair in zip(dims, jax.tree.leaves(layout.specs), strict=True)]
    matrices = optax.chain(momentum, orthogonalize(shardings, layout.mesh, cfg.muon_dtype, cfg.muon_steps))
    return optax.multi_transform({"muon": matrices, "adamw": adam}, labels)


def adafactor(cfg: OptimConfig, layout: ParamLayout) -> optax.GradientTransformation:
    """Returns gradients divided by the root of factored second moments."""
    from jaxscale.core.optim.adafactor_lamb import scale_by_factored

    return scale_by_factored(tree_dims(layout.axes), cfg.scale_by_parameter)


def add_decay(groups: Any) -> optax.GradientTransformation:
    """Adds decoupled weight decay: the parameter times the weight decay of its group (arXiv:1711.05101)."""

    def update(updates, state, params=None):
        return map_with_groups(lambda u, p, group: u + group.weight_decay * p, groups, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_lr(schedule: Schedule, groups: Any) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by -schedule(step) * lr_factor times the multiplier of the group."""

    def update(updates, state, params=None, *, step: Any = None, lr_factor: Any = 1.0, **extra):
        lr = schedule(step) * lr_factor
        return map_with_groups(lambda u, group: -lr * group.lr_multiplier * u, groups, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def map_with_groups(f: Callable, groups: Any, *trees: Any) -> Any:
    """Maps f(leaf, ..., group) over trees of parameters. Leaves masked by optax are unchanged."""

    def map_leaf(group: ParamGroup, *leaves):
        return leaves[0] if is_masked(leaves[0]) else f(*leaves, group)

    flat_groups, treedef = jax.tree.flatten(groups)
    flat = [jax.tree.leaves(tree, is_leaf=is_masked) for tree in trees]
    return jax.tree.unflatten(treedef, [map_leaf(*leaves) for leaves in zip(flat_groups, *flat, strict=True)])


def trainable(tree: Any, groups: Any) -> Any:
    """Returns the tree with the leaves of frozen parameters replaced by optax.MaskedNode."""
    return jax.tree.map(lambda group, leaf: optax.MaskedNode() if group.frozen else leaf, groups, tree)


def combine(trained: Any, params: Any) -> Any:
    """Returns the tree `trained` with its masked leaves taken from `params`."""
    return jax.tree.map(lambda frozen, leaf: frozen if is_masked(leaf) else leaf, params, trained)


def moment_axes(
    optimizer: optax.GradientTransformation,
    params: Any,
    axes_tree: Any,
    axis_size: Callable[[str], int] = lambda axis: 1,
) -> Any:
    """Returns the logical axes of each leaf of the optimizer state.

    Moments have the axes of their parameter, counts have (), and factored moments lack the reduced axes. params: shapes
    of the parameters, from jax.eval_shape. axis_size: returns the number of shards of a logical axis.
    """
    state = jax.eval_shape(optimizer.init, params)
    flat_axes, _ = jax.tree.flatten(axes_tree, is_leaf=lambda leaf: isinstance(leaf, tuple))
    param_axes = jax.tree.unflatten(jax.tree.structure(params), [AxesLeaf(axes) for axes in flat_axes])

    def leaf_axes(leaf: Any, axes: Any) -> Any:
        if is_masked(leaf):  # a frozen parameter has no moments and no axes
            return leaf
        if not is_quantized(leaf):
            return axes
        scales: Any = AxesLeaf(scale_axes(axes.axes, leaf.codes, leaf.scales, axis_size, UNSHARDED))
        return QuantizedMoment(axes, scales)

    state_axes = optax.tree_utils.tree_map_params(
        optimizer,
        leaf_axes,
        state,
        param_axes,
        transform_non_params=lambda _: AxesLeaf(()),
        is_leaf=lambda leaf: is_masked(leaf) or is_quantized(leaf),
    )
    state_axes = jax.tree.map(drop_reduced_axes, state_axes, is_leaf=lambda part: isinstance(part, FactoredState))
    return jax.tree.map(lambda leaf: leaf.axes, state_axes)


def drop_reduced_axes(part: Any) -> Any:
    """Removes the reduced axes of each field from a FactoredState of AxesLeaf."""
    if not isinstance(part, FactoredState):
        return part
    from jaxscale.core.optim.adafactor_lamb import factored_axes

    drop = lambda field: jax.tree.map(lambda leaf: AxesLeaf(factored_axes(leaf.axes, field)), getattr(part, field))
    return part._replace(**{field: drop(field) for field in FACTORED_FIELDS})


@dataclasses.dataclass(frozen=True)
class AxesLeaf:
    """A tuple of logical axes, as one leaf of a pytree."""

    axes: tuple[str, ...]
