"""Adafactor and LAMB, which scale updates by statistics of the whole tensor of each layer and expert."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.core.optim.groups import Dims, is_masked, matrix_dims
from jaxscale.core.optim.moments import FACTORED_FIELDS, FactoredState

DECAY_EXPONENT = 0.8  # second-moment decay rate 1 - step**-0.8, section 7.2
MAX_UPDATE_RMS = 1.0  # clipping threshold d, section 6
EPS_SQUARES, EPS_PARAM_RMS = 1e-30, 1e-3  # epsilon 1 and 2 of algorithm 4


def scale_by_factored(dims_tree: Any, scale_by_parameter: bool) -> optax.GradientTransformation:
    """Divides gradients by the root of their second moment and clips the RMS of each tensor's update to 1.

    dims_tree: a tree of Dims like the parameters. scale_by_parameter: whether updates are scaled by the parameter RMS.
    """

    def init(params):
        count = jnp.zeros((), jnp.int32)
        if not jax.tree.leaves(params):  # optax's placeholder for parameters
            return FactoredState(count, params, params, params)
        zeros = lambda field: lambda p, dims: init_moment(p, dims, field)
        trees = [jax.tree.map(zeros(field), params, dims_tree, is_leaf=is_masked) for field in FACTORED_FIELDS]
        return FactoredState(count, *trees)

    def update(updates, state, params=None):
        decay_rate = 1.0 - (state.count + 1.0) ** -DECAY_EXPONENT

        def update_leaf(grad, rows, cols, full, param, dims):
            if is_masked(grad):
                return grad, rows, cols, full
            squares = jnp.square(grad) + EPS_SQUARES
            ema = lambda old, new: decay_rate * old + (1 - decay_rate) * new
            if dims.is_matrix:
                rows, cols = ema(rows, squares.mean(dims.cols)), ema(cols, squares.mean(dims.rows))
                new = grad * inverse_root(rows, cols, dims)
            else:
                full = ema(full, squares)
                new = grad * jax.lax.rsqrt(full)
            new = new / jnp.maximum(1.0, rms(new, dims) / MAX_UPDATE_RMS)
            if scale_by_parameter:
                new = new * jnp.maximum(EPS_PARAM_RMS, rms(param, dims))
            return new, rows, cols, full

        flat = lambda tree: jax.tree.leaves(tree, is_leaf=is_masked)
        trees = (updates, state.rows, state.cols, state.full, params, dims_tree)
        results = [update_leaf(*leaves) for leaves in zip(*map(flat, trees), strict=True)]
        structure = jax.tree.structure(updates, is_leaf=is_masked)
        new, *moments = [structure.unflatten(leaves) for leaves in zip(*results)]
        return new, FactoredState(jnp.asarray(optax.safe_increment(state.count)), *moments)

    return optax.GradientTransformation(init, update)


def init_moment(param: Any, dims: Dims, field: str) -> Any:
    """Returns zeros for a field of FactoredState, or a MaskedNode if the field does not apply to the parameter."""
    if is_masked(param) or dims.is_matrix == (field == "full"):
        return optax.MaskedNode()
    reduced = reduced_dims(dims, field)
    return jnp.zeros([size for d, size in enumerate(param.shape) if d not in reduced], param.dtype)


def inverse_root(rows: jax.Array, cols: jax.Array, dims: Dims) -> jax.Array:
    """Returns 1 / sqrt(rows x cols / mean(rows)), the inverse square root of the factored second moment."""
    rows, cols = jnp.expand_dims(rows, dims.cols), jnp.expand_dims(cols, dims.rows)
    return jax.lax.rsqrt(rows / rows.mean(dims.rows, keepdims=True)) * jax.lax.rsqrt(cols)


def rms(x: jax.Array, dims: Dims) -> jax.Array:
    """Returns the root mean square of each tensor in a stack. Reduced dimensions have size 1."""
    return jnp.sqrt(jnp.square(x).mean(dims.unstacked, keepdims=True))


def reduced_dims(dims: Dims, field: str) -> tuple[int, ...]:
    """Returns the parameter dimensions that are averaged in a field of FactoredState."""
    return {"rows": dims.cols, "cols": dims.rows, "full": ()}[field]


def scale_by_trust(dims_tree: Any) -> optax.GradientTransformation:
    """Scales each tensor's Adam update, including weight decay, to the norm of the tensor (LAMB, arXiv:1904.00962).

    Applies optax.scale_by_trust_ratio to the tensor of each layer and expert separately.
    dims_tree: a tree of Dims with the structure of the parameters.
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


def factored_axes(axes: tuple[str, ...], field: str) -> tuple[str, ...]:
    """Returns the logical axes of a FactoredState field, given the parameter's axes."""
    reduced = reduced_dims(matrix_dims(axes), field)
    return tuple(axis for d, axis in enumerate(axes) if d not in reduced)
