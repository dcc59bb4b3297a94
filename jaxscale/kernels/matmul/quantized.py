"""Quantized projections by qwix, with 8-bit operands and float32 accumulation.

Scales are dynamic: the absolute maximum of each row of the left operand and each column of the right operand, in the
local shard. So rounding differs slightly with mesh.tensor > 1. Weights remain float32 in the train state.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.kernels.config import MatmulDtype
from jaxscale.kernels.matmul.project import PRODUCT, Project, contracted_axes
from jaxscale.system import packages
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Operand dtypes of the three matmuls of a training step. None means unquantized."""

    forward: Any  # dtype of x and w in y = x w
    dx: tuple[Any, Any]  # dtypes of dy and w in dx = dy w'
    dw: tuple[Any, Any]  # dtypes of x and dy in dw = x' dy


RECIPES = {
    # Weight gradients are unquantized, because an outlier token would determine the scale of all tokens.
    "int8": Recipe(jnp.int8, (jnp.int8, jnp.int8), (None, None)),
    # Four exponent bits forward, and five for gradients, whose range is larger (arXiv:2209.05433).
    "fp8": Recipe(jnp.float8_e4m3fn, (jnp.float8_e5m2, jnp.float8_e4m3fn), (jnp.float8_e4m3fn, jnp.float8_e5m2)),
}


def make_project(name: MatmulDtype) -> Project:
    """Returns the projection with this operand dtype, which must not be "none". Raises BadInput without qwix."""
    if not packages.is_installed("qwix"):
        raise BadInput(f"model.matmul_dtype={name!r} needs qwix: pip install 'jaxscale[quant]'")
    return functools.partial(project, RECIPES[name])


def project(recipe: Recipe, spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns einsum_project() with quantized operands, forward and backward."""
    return checkpoint_name(_project(recipe, contracted_axes(spec), x, w), PRODUCT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _project(recipe, count, x, w):
    return product(x, w, range(x.ndim - count, x.ndim), range(count), (recipe.forward,) * 2, x.dtype)


def _forward(recipe, count, x, w):
    return _project(recipe, count, x, w), (x, w)


def _backward(recipe, count, saved, dy):
    x, w = saved
    batch_ndim = x.ndim - count
    dx = product(dy, w, range(batch_ndim, dy.ndim), range(count, w.ndim), recipe.dx, x.dtype)
    dw = product(x, dy, range(batch_ndim), range(batch_ndim), recipe.dw, w.dtype)
    return dx, dw


_project.defvjp(_forward, _backward)


def product(left: jax.Array, right: jax.Array, left_axes, right_axes, types: tuple[Any, Any], dtype: Any) -> jax.Array:
    """Contracts left_axes with right_axes. Operands are quantized to `types`, and the result is cast to `dtype`."""
    import qwix

    def quantize(array, axes, kind):
        if kind is None:
            return array.astype(left.dtype)
        channel_axes = [axis for axis in range(array.ndim) if axis not in axes]
        return qwix.quantize(array, kind, channelwise_axes=channel_axes, scale_dtype=jnp.float32)

    return qwix.dot_general(
        quantize(left, left_axes, types[0]),
        quantize(right, right_axes, types[1]),
        ((tuple(left_axes), tuple(right_axes)), ((), ())),
        preferred_element_type=jnp.float32,
    ).astype(dtype)
