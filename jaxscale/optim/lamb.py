"""LAMB (arXiv:1904.00962): Adam's updates, decay included, as long as the tensor that they are for."""

from typing import Any

import jax
import optax

from jaxscale.optim.matrices import Dims
from jaxscale.optim.offload import is_masked


def scale_by_trust(dims_tree: Any) -> optax.GradientTransformation:
    """optax.scale_by_trust_ratio for each tensor of a layer, and of an expert, not for a stack of them.

    dims_tree: a tree of Dims like the parameters.
    """
    tx = optax.scale_by_trust_ratio()

    def update(updates, state, params=None):
        def one(update, param, dims: Dims):
            if is_masked(update):
                return update
            f = lambda update, param: tx.update(update, optax.EmptyState(), param)[0]
            for _ in dims.stack:  # they come first
                f = jax.vmap(f)
            return f(update, param)

        return jax.tree.map(one, updates, params, dims_tree, is_leaf=is_masked), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
