"""Moments and parameters in the host's memory: those of one layer visit the device at a time, and go back renewed.

Brought over all at once they fill the device just when the gradients do: XLA starts every copy as early as it can.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def streamed(tx: optax.GradientTransformation, is_stacked: Any) -> optax.GradientTransformationExtraArgs:
    """`tx` for moments on the host. Its update takes ok, a bool[], and changes no moment where that is False.

    tx must treat each entry of a parameter by itself, as Adam does, and its state be a tuple of trees like the
    parameters and of scalars. is_stacked: a tree like the parameters, True where the first axis is that of layers.
    """

    def update(updates, state: Any, params=None, *, ok: Any = None, **extra):
        grads, treedef = jax.tree.flatten(updates)
        is_moment = [jax.tree.structure(field) == treedef for field in state]
        old = list(zip(*[treedef.flatten_up_to(field) for field, flag in zip(state, is_moment) if flag]))

        def visit(grad, moments):
            """(what is added to the parameter, its renewed moments on the host, the renewed scalars)."""
            here = iter(jax.device_put(moments, DEVICE))
            before = type(state)(*[next(here) if flag else field for field, flag in zip(state, is_moment)])
            added, after = cast(tuple[Any, Any], tx.update(grad, before))
            kept = [jnp.where(ok, new, was) for new, was in zip(after, before)]
            back = jax.device_put([leaf for leaf, flag in zip(kept, is_moment) if flag], HOST)
            return added, back, [leaf for leaf, flag in zip(kept, is_moment) if not flag]

        def visit_layers(grads, moments):
            """The same for all layers in turn: each array is overwritten where it stands."""

            def layer(i, arrays):
                at = lambda array: jax.lax.dynamic_index_in_dim(array, i, keepdims=False)
                put = lambda array, part: jax.lax.dynamic_update_index_in_dim(array, part, i, 0)
                grads, moments, _ = arrays
                added, back, scalars = visit(at(grads), [at(leaf) for leaf in moments])
                return put(grads, added), [put(leaf, part) for leaf, part in zip(moments, back)], scalars

            scalars = [field for field, flag in zip(state, is_moment) if not flag]
            return jax.lax.fori_loop(0, grads.shape[0], layer, (grads, list(moments), scalars))

        flags = flags_like(updates, is_stacked)
        results = [(visit_layers if flag else visit)(*leaf) for *leaf, flag in zip(grads, old, flags, strict=True)]
        added, renewed, scalars = zip(*results)
        trees = iter([treedef.unflatten(leaves) for leaves in zip(*renewed)])
        rest = iter(scalars[0])
        fields = [next(trees) if flag else next(rest) for flag in is_moment]
        return treedef.unflatten(added), type(state)(*fields)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def renewed(
    make_tx: Callable[[Any], optax.GradientTransformation], groups: Any, is_stacked: Any
) -> optax.GradientTransformationExtraArgs:
    """For parameters on the host: its updates are the new parameters, on the host, or the old ones if ok is False.

    make_tx: from the group of a parameter to what makes its updates, without moments and for each entry by itself.
    groups, is_stacked: trees like the parameters; the latter as for streamed().
    """

    def update(updates, state: Any, params=None, *, ok: Any = None, **extra):
        def visit(grad, param, group):
            here, tx = jax.device_put(param, DEVICE), make_tx(group)
            added, _ = tx.update(grad, tx.init(here), here, **extra)
            changed: Any = optax.apply_updates(here, added)
            return jax.device_put(jnp.where(ok, changed, here), HOST)

        def visit_layers(grads, params, group):
            def layer(i, params):
                at = lambda array: jax.lax.dynamic_index_in_dim(array, i, keepdims=False)
                return jax.lax.dynamic_update_index_in_dim(params, visit(at(grads), at(params), group), i, 0)

            return jax.lax.fori_loop(0, grads.shape[0], layer, params)

        def new(grad, param, group, flag):
            return grad if is_masked(grad) else (visit_layers if flag else visit)(grad, param, group)

        return jax.tree.map(new, updates, params, groups, is_stacked, is_leaf=is_masked), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def is_masked(leaf: Any) -> bool:
    """True for what optax leaves in the place of a parameter that a transformation is not for."""
    return isinstance(leaf, optax.MaskedNode)


def flags_like(updates: Any, flags: Any) -> list[bool]:
    """The flags of the parameters that have updates: optax masks the others out."""
    leaves = jax.tree.leaves(updates, is_leaf=is_masked)
    return [flag for flag, leaf in zip(jax.tree.leaves(flags), leaves, strict=True) if not is_masked(leaf)]
