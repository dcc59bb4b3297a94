"""Products of activations with weights in 8 bits, by qwix: the operands are rounded, the sums are not.

Each row of the left operand and each column of the right one has a scale of its own, the largest magnitude in the
device's part of it (so that with mesh tensor > 1 the rounding differs a little), taken anew at every step; nothing is
calibrated beforehand. Weights stay float32 in the train state.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.config import MatmulDtype
from jaxscale.ops.kernels import Kernels
from jaxscale.ops.project import PRODUCT, contracted_axes
from jaxscale.system import packages
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The types of the operands of the three products of a training step; None: as they come."""

    forward: Any  # of x and w, in y = x w
    dx: tuple[Any, Any]  # of dy and w, in dx = dy w'
    dw: tuple[Any, Any]  # of x and dy, in dw = x' dy


RECIPES = {
    # The gradient of weights stays in the compute type: a scale for all tokens would follow the one outlier among them.
    "int8": Recipe(jnp.int8, (jnp.int8, jnp.int8), (None, None)),
    # arXiv:2209.05433: four bits of exponent forward, five for gradients, which span more powers of two.
    "fp8": Recipe(jnp.float8_e4m3fn, (jnp.float8_e5m2, jnp.float8_e4m3fn), (jnp.float8_e4m3fn, jnp.float8_e5m2)),
}


def with_matmul_dtype(kernels: Kernels, name: MatmulDtype) -> Kernels:
    """The kernels with the blocks' projections in this type. Raises BadInput where the library is missing."""
    if name == "none":
        return kernels
    if not packages.is_installed("qwix"):
        raise BadInput(f"model.matmul_dtype={name!r} needs qwix: pip install 'jaxscale[quant]'")
    return dataclasses.replace(kernels, project=functools.partial(project, RECIPES[name]))


def project(recipe: Recipe, spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """What einsum_project returns, but for the rounding of its operands, and with gradients rounded alike."""
    return checkpoint_name(_project(recipe, contracted_axes(spec), x, w), PRODUCT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _project(recipe, count, x, w):
    return product(x, w, range(x.ndim - count, x.ndim), range(count), (recipe.forward,) * 2, x.dtype)


def _forward(recipe, count, x, w):
    return _project(recipe, count, x, w), (x, w)


def _backward(recipe, count, saved, dy):
    x, w = saved
    kept = x.ndim - count  # axes of x that y has too
    dx = product(dy, w, range(kept, dy.ndim), range(count, w.ndim), recipe.dx, x.dtype)
    dw = product(x, dy, range(kept), range(kept), recipe.dw, w.dtype)
    return dx, dw


_project.defvjp(_forward, _backward)


def product(left: jax.Array, right: jax.Array, left_axes, right_axes, types: tuple[Any, Any], dtype: Any) -> jax.Array:
    """The product of both operands rounded to `types`, summed over left_axes and right_axes, in dtype."""
    import qwix

    def rounded(array, axes, kind):
        if kind is None:
            return array.astype(left.dtype)
        apart = [axis for axis in range(array.ndim) if axis not in axes]
        return qwix.quantize(array, kind, channelwise_axes=apart, scale_dtype=jnp.float32)

    return qwix.dot_general(
        rounded(left, left_axes, types[0]),
        rounded(right, right_axes, types[1]),
        ((tuple(left_axes), tuple(right_axes)), ((), ())),
        preferred_element_type=jnp.float32,
    ).astype(dtype)
