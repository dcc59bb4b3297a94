"""Adafactor (arXiv:1804.04235): the second moment of a matrix as the mean of each row and of each column.

Every matrix of a stack by itself, where optax's factors the two longest axes of a whole stack.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.optim.matrices import Dims, matrix_dims
from jaxscale.optim.offload import is_masked

DECAY_EXPONENT = 0.8  # of 1 - step**-0.8, the decay rate of the means: section 7.2
LARGEST_RMS = 1.0  # of an update: section 6
SQUARES_FLOOR, PARAMETERS_FLOOR = 1e-30, 1e-3  # epsilon 1 and 2 of algorithm 4


class FactoredState(NamedTuple):
    """What there is of each parameter; a MaskedNode for what it does not have."""

    count: jax.Array  # int32[]
    rows: Any  # of matrices: means over the columns
    cols: Any  # of matrices: means over the rows
    full: Any  # of all others: the moment of each number


def scale_by_factored(dims_tree: Any, by_parameter: bool) -> optax.GradientTransformation:
    """Gradients over the root of their second moment, the update of a tensor at most of root mean square 1.

    dims_tree: a tree of Dims like the parameters. by_parameter: times the root mean square of the parameter.
    """

    def init(params):
        count = jnp.zeros((), jnp.int32)
        if not jax.tree.leaves(params):  # optax's stand-in for parameters
            return FactoredState(count, params, params, params)
        zeros = lambda keep: lambda p, dims: zeros_of(p, dims, keep)
        trees = [jax.tree.map(zeros(keep), params, dims_tree, is_leaf=is_masked) for keep in ("rows", "cols", "full")]
        return FactoredState(count, *trees)

    def update(updates, state, params=None):
        rate = 1.0 - (state.count + 1.0) ** -DECAY_EXPONENT

        def one(grad, rows, cols, full, param, dims):
            if is_masked(grad):
                return grad, rows, cols, full
            squares = jnp.square(grad) + SQUARES_FLOOR
            blend = lambda old, new: rate * old + (1 - rate) * new
            if dims.is_matrix:
                rows, cols = blend(rows, squares.mean(dims.cols)), blend(cols, squares.mean(dims.rows))
                new = grad * inverse_root(rows, cols, dims)
            else:
                full = blend(full, squares)
                new = grad * jax.lax.rsqrt(full)
            new = new / jnp.maximum(1.0, rms(new, dims) / LARGEST_RMS)
            if by_parameter:
                new = new * jnp.maximum(PARAMETERS_FLOOR, rms(param, dims))
            return new, rows, cols, full

        flat = lambda tree: jax.tree.leaves(tree, is_leaf=is_masked)
        trees = (updates, state.rows, state.cols, state.full, params, dims_tree)
        results = [one(*leaves) for leaves in zip(*map(flat, trees), strict=True)]
        structure = jax.tree.structure(updates, is_leaf=is_masked)
        new, *moments = [structure.unflatten(leaves) for leaves in zip(*results)]
        return new, FactoredState(jnp.asarray(optax.safe_increment(state.count)), *moments)

    return optax.GradientTransformation(init, update)


def zeros_of(param: Any, dims: Dims, field: str) -> Any:
    """The first moment of a field of FactoredState: zeros, or a MaskedNode if the parameter has none there."""
    if is_masked(param) or dims.is_matrix == (field == "full"):
        return optax.MaskedNode()
    summed = {"rows": dims.cols, "cols": dims.rows, "full": ()}[field]
    return jnp.zeros([size for d, size in enumerate(param.shape) if d not in summed], param.dtype)


def inverse_root(rows: jax.Array, cols: jax.Array, dims: Dims) -> jax.Array:
    """One over the root of the moment that the means of rows and columns stand for: rows x cols / mean of rows."""
    rows, cols = jnp.expand_dims(rows, dims.cols), jnp.expand_dims(cols, dims.rows)
    return jax.lax.rsqrt(rows / rows.mean(dims.rows, keepdims=True)) * jax.lax.rsqrt(cols)


def rms(x: jax.Array, dims: Dims) -> jax.Array:
    """The root mean square of each tensor of a stack, its own dimensions kept."""
    return jnp.sqrt(jnp.square(x).mean(dims.own, keepdims=True))


def factored_axes(axes: tuple[str, ...], field: str) -> tuple[str, ...]:
    """The logical axes of a field of FactoredState, of a parameter with these: without those that are summed over."""
    dims = matrix_dims(axes)
    summed = {"rows": dims.cols, "cols": dims.rows, "full": ()}[field]
    return tuple(axis for d, axis in enumerate(axes) if d not in summed)
