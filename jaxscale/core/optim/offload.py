"""Moments and parameters in host memory: each layer's are copied to the device, updated and copied back in turn.

Copied all at once they fill the device at the same time as the gradients: XLA starts each copy as early as it can.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jaxscale.core.optim.groups import is_masked

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def offload_moments(tx: optax.GradientTransformation, is_stacked: Any) -> optax.GradientTransformationExtraArgs:
    """Returns `tx` for moments on the host. Its update takes ok, a bool[]; if False, no moment changes.

    tx must be elementwise, as Adam is, and its state a tuple of trees like the parameters and of scalars.
    is_stacked: a tree like the parameters, True where the first axis is that of layers.
    """

    def update(updates, state: Any, params=None, *, ok: Any = None, **extra):
        grads, treedef = jax.tree.flatten(updates)
        is_moment = [jax.tree.structure(field) == treedef for field in state]
        old = list(zip(*[treedef.flatten_up_to(field) for field, flag in zip(state, is_moment) if flag]))

        def update_param(grad, moments):
            """Returns (update, new moments on the host, new scalars)."""
            on_device = iter(jax.device_put(moments, DEVICE))
            before = type(state)(*[next(on_device) if flag else field for field, flag in zip(state, is_moment)])
            param_update, after = cast(tuple[Any, Any], tx.update(grad, before))
            fields = [jnp.where(ok, new, old) for new, old in zip(after, before)]
            on_host = jax.device_put([leaf for leaf, flag in zip(fields, is_moment) if flag], HOST)
            return param_update, on_host, [leaf for leaf, flag in zip(fields, is_moment) if not flag]

        def update_layers(grads, moments):
            """Runs update_param for each layer in turn, overwriting the arrays in place."""

            def layer(i, arrays):
                at = lambda array: jax.lax.dynamic_index_in_dim(array, i, keepdims=False)
                put = lambda array, part: jax.lax.dynamic_update_index_in_dim(array, part, i, 0)
                grads, moments, _ = arrays
                layer_update, new, scalars = update_param(at(grads), [at(leaf) for leaf in moments])
                return put(grads, layer_update), [put(leaf, part) for leaf, part in zip(moments, new)], scalars

            scalars = [field for field, flag in zip(state, is_moment) if not flag]
            return jax.lax.fori_loop(0, grads.shape[0], layer, (grads, list(moments), scalars))

        flags = flags_like(updates, is_stacked)
        leaves = zip(grads, old, flags, strict=True)
        results = [(update_layers if flag else update_param)(*leaf) for *leaf, flag in leaves]
        new_updates, moments, scalars = zip(*results)
        trees = iter([treedef.unflatten(leaves) for leaves in zip(*moments)])
        new_scalars = iter(scalars[0])
        fields = [next(trees) if flag else next(new_scalars) for flag in is_moment]
        return treedef.unflatten(new_updates), type(state)(*fields)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def offload_params(
    make_tx: Callable[[Any], optax.GradientTransformation], groups: Any, is_stacked: Any
) -> optax.GradientTransformationExtraArgs:
    """For parameters on the host: updates are the new parameters, on the host, or the old ones if ok is False.

    make_tx: returns the transformation of a parameter's group, elementwise and without moments. groups, is_stacked:
    trees like the parameters; the latter as in offload_moments().
    """

    def update(updates, state: Any, params=None, *, ok: Any = None, **extra):
        def update_param(grad, param, group):
            on_device, tx = jax.device_put(param, DEVICE), make_tx(group)
            param_update, _ = tx.update(grad, tx.init(on_device), on_device, **extra)
            new: Any = optax.apply_updates(on_device, param_update)
            return jax.device_put(jnp.where(ok, new, on_device), HOST)

        def update_layers(grads, params, group):
            def layer(i, params):
                at = lambda array: jax.lax.dynamic_index_in_dim(array, i, keepdims=False)
                return jax.lax.dynamic_update_index_in_dim(params, update_param(at(grads), at(params), group), i, 0)

            return jax.lax.fori_loop(0, grads.shape[0], layer, params)

        def new_param(grad, param, group, flag):
            return grad if is_masked(grad) else (update_layers if flag else update_param)(grad, param, group)

        return jax.tree.map(new_param, updates, params, groups, is_stacked, is_leaf=is_masked), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def flags_like(updates: Any, flags: Any) -> list[bool]:
    """Returns the flags of the parameters that have updates, those that optax does not mask."""
    leaves = jax.tree.leaves(updates, is_leaf=is_masked)
    return [flag for flag, leaf in zip(jax.tree.leaves(flags), leaves, strict=True) if not is_masked(leaf)]
