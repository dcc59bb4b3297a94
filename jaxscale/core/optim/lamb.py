"""LAMB (arXiv:1904.00962): scales each tensor's Adam update, weight decay included, to the norm of the tensor."""

from typing import Any

import jax
import optax

from jaxscale.core.optim.groups import is_masked
from jaxscale.core.optim.matrices import Dims


def scale_by_trust(dims_tree: Any) -> optax.GradientTransformation:
    """optax.scale_by_trust_ratio for each tensor of a layer or expert rather than for the whole stack.

    dims_tree: a tree of Dims like the parameters.
    """
    tx = optax.scale_by_trust_ratio()

    def update(updates, state, params=None):
        def scale_leaf(update, param, dims: Dims):
            if is_masked(update):
                return update
            f = lambda update, param: tx.update(update, optax.EmptyState(), param)[0]
            for _ in dims.stack:  # the stack dimensions come first
                f = jax.vmap(f)
            return f(update, param)

        return jax.tree.map(scale_leaf, updates, params, dims_tree, is_leaf=is_masked), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
