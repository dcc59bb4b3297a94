"""Normalisation over the last axis, with statistics in float32 and the result in the input's dtype.

D embed  B batch  T position  N heads  H head dim
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.core.axes.tensor_axis import TensorAxis
from jaxscale.kernels.gradient import custom_vjp
from jaxscale.kernels.matmul.project import barrier_on_cpu

F32 = jnp.float32


@functools.partial(custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Returns x / sqrt(mean(x**2) + eps) * scale (arXiv:1910.07467). x: [..., D].

    The custom backward pass saves x in its dtype instead of float32 copies.
    """
    x32 = x.astype(F32)
    return (x32 * inverse_rms(x32, eps) * expand(scale_D, x.ndim)).astype(x.dtype)


def _rms_norm_forward(x, scale_D, eps):
    return rms_norm(x, scale_D, eps), (x, scale_D)


def _rms_norm_backward(eps, saved, dy):
    x, scale_D = saved
    x32, dy32 = x.astype(F32), dy.astype(F32)
    inverse = inverse_rms(x32, eps)
    unit, dunit = x32 * inverse, dy32 * expand(scale_D, x.ndim)
    dx = inverse * (dunit - unit * barrier_on_cpu(jnp.mean(dunit * unit, axis=-1, keepdims=True)))
    dscale_D = jnp.sum(dy32 * unit, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dscale_D.astype(scale_D.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def inverse_rms(x32: jax.Array, eps: float) -> jax.Array:
    """Returns 1 / sqrt(mean(x**2) + eps), [..., 1].

    The barrier prevents XLA:CPU from materializing the result and the scale in the shape of x.
    """
    return barrier_on_cpu(lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps))


@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def rms_norm_heads(x_BTNH: jax.Array, scale_NH: jax.Array, eps: float, tensor: TensorAxis) -> jax.Array:
    """Returns RMSNorm over all heads of a position (arXiv:2501.00656), which may be sharded over the tensor axis."""
    x32 = x_BTNH.astype(F32)
    return (x32 * inverse_rms_heads(x32, eps, tensor) * scale_NH.astype(F32)[None, None]).astype(x_BTNH.dtype)


def _rms_norm_heads_forward(x_BTNH, scale_NH, eps, tensor):
    return rms_norm_heads(x_BTNH, scale_NH, eps, tensor), (x_BTNH, scale_NH)


def _rms_norm_heads_backward(eps, tensor, saved, dy_BTNH):
    x_BTNH, scale_NH = saved
    x32, dy32 = x_BTNH.astype(F32), dy_BTNH.astype(F32)
    inverse = inverse_rms_heads(x32, eps, tensor)
    unit, dunit = x32 * inverse, dy32 * scale_NH.astype(F32)[None, None]
    dx_BTNH = inverse * (dunit - unit * mean_heads(dunit * unit, tensor))
    return dx_BTNH.astype(x_BTNH.dtype), jnp.sum(dy32 * unit, axis=(0, 1)).astype(scale_NH.dtype)


rms_norm_heads.defvjp(_rms_norm_heads_forward, _rms_norm_heads_backward)


def inverse_rms_heads(x32_BTNH: jax.Array, eps: float, tensor: TensorAxis) -> jax.Array:
    """Returns 1 / sqrt(mean(x**2) + eps) over all heads of all devices, [B, T, 1, 1]."""
    return lax.rsqrt(mean_heads(x32_BTNH * x32_BTNH, tensor) + eps)


def mean_heads(x32_BTNH: jax.Array, tensor: TensorAxis) -> jax.Array:
    """Returns the mean over all heads of all devices, [B, T, 1, 1]."""
    return tensor.sum(jnp.mean(x32_BTNH, axis=(2, 3), keepdims=True)) / tensor.size


def layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array, eps: float) -> jax.Array:
    """Returns (x - mean) / sqrt(variance + eps) * scale + bias (arXiv:1607.06450). x: [..., D]."""
    x32 = x.astype(F32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (centred * inverse * expand(scale_D, x.ndim) + expand(bias_D, x.ndim)).astype(x.dtype)


def expand(vector_D: jax.Array, ndim: int) -> jax.Array:
    """Returns the vector in float32 as [1, ..., 1, D] with `ndim` axes."""
    return vector_D.astype(F32).reshape((1,) * (ndim - 1) + (-1,))
