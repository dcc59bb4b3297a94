"""Projections (activation times weight) by einsum and by a form that is fast on XLA:CPU, and matmul precision.

M rows of x  C contracted size  O output size of the weight
"""

import functools
import math
import pkgutil
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.kernels.config import MatmulDtype

Project = Callable[[str, jax.Array, jax.Array], jax.Array]  # (einsum spec, activation, weight) -> activation
PRECISIONS = {"tf32": "tensorfloat32", "highest": "highest"}  # setting -> jax_default_matmul_precision
MAKE_QUANTIZED = "jaxscale.kernels.matmul.quantized:make_project"  # imported with model.matmul_dtype
PRODUCT = "product"  # checkpoint_name of every projection, for remat policies


def einsum_project(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum of x with w cast to x.dtype, in x.dtype. The gradient of w is accumulated and returned in w's dtype.

    JAX's rule would round it to x.dtype before the sum over devices.
    """
    return checkpoint_name(_einsum(spec, x, w), PRODUCT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum(spec, x, w):
    return jnp.einsum(spec, x, w.astype(x.dtype))


def _einsum_forward(spec, x, w):
    return _einsum(spec, x, w), (x, w)


def _einsum_backward(spec, saved, dy):
    x, w = saved
    inputs, output = spec.split("->")
    x_axes, w_axes = inputs.split(",")
    dx = jnp.einsum(f"{output},{w_axes}->{x_axes}", dy, w.astype(x.dtype))
    return dx, jnp.einsum(f"{x_axes},{output}->{w_axes}", x, dy, preferred_element_type=w.dtype)


_einsum.defvjp(_einsum_forward, _einsum_backward)


def cpu_project(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum_project, in bfloat16 on XLA:CPU 2 times as fast forward and 2.2 times backward (2026-11-20).

    XLA:CPU calls its fast library with bfloat16 operands only for a matmul of two matrices that contracts the last axis
    of the left one and has a float32 result. (weight_gradient() has an exception for float32.) The gradient of w is
    accumulated in float32. The contracted axes must be the last of x and the first of w, in one order.
    """
    return checkpoint_name(_project(contracted_axes(spec), x, w), PRODUCT)


@functools.cache
def contracted_axes(spec: str) -> int:
    """Number of axes that `spec` contracts: 2 for "BTNH,NHD->BTD". Asserts that they end x and begin w."""
    inputs, output = spec.replace(" ", "").split("->")
    x_axes, w_axes = inputs.split(",")
    count = sum(axis in x_axes for axis in w_axes)
    batch_axes, contracted = x_axes[: len(x_axes) - count], x_axes[len(x_axes) - count :]
    assert count and w_axes[:count] == contracted and output == batch_axes + w_axes[count:], (
        f"{spec} is not a projection"
    )
    return count


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(count, x, w):
    x_MC, w_CO = flatten(count, x, w)
    y_MO = barrier_on_cpu(jnp.matmul(x_MC, w_CO, preferred_element_type=jnp.float32))
    return y_MO.astype(x.dtype).reshape(x.shape[: x.ndim - count] + w.shape[count:])


def _forward(count, x, w):
    return _project(count, x, w), (x, w)


def _backward(count, saved, dy):
    x, w = saved
    x_MC, w_CO = flatten(count, x, w)
    dy_MO, x_ABC = dy.reshape(-1, w_CO.shape[1]), x_MC.reshape(x.shape[0], -1, x_MC.shape[1])
    dx_MC = barrier_on_cpu(matmul_transposed(dy_MO, w_CO))
    return dx_MC.astype(x.dtype).reshape(x.shape), weight_gradient(x_ABC, dy_MO).astype(w.dtype).reshape(w.shape)


_project.defvjp(_forward, _backward)


def flatten(count: int, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x as [M, C] and w, cast to x.dtype, as [C, O]."""
    size = math.prod(w.shape[:count])
    return x.reshape(-1, size), w.astype(x.dtype).reshape(size, -1)


def matmul_transposed(left_MC: jax.Array, right_OC: jax.Array) -> jax.Array:
    """left @ right.T, float32 [M, O]."""
    return lax.dot_general(left_MC, right_OC, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def weight_gradient(x_ABC: jax.Array, dy_MO: jax.Array) -> jax.Array:
    """x.T @ dy, float32 [C, O], where the rows M are A and B of x in order."""
    if x_ABC.dtype == dy_MO.dtype == jnp.float32:
        # XLA:CPU transposes x while it packs the operand, without a copy.
        x_MC = x_ABC.reshape(-1, x_ABC.shape[-1])
        return lax.dot_general(x_MC, dy_MO, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    dw_CO = jnp.matmul(transposed(x_ABC), dy_MO, preferred_element_type=jnp.float32)
    return barrier_on_cpu(dw_CO)  # XLA:CPU cannot run a bfloat16 matmul with a folded transpose


def transposed(x_ABC: jax.Array) -> jax.Array:
    """Returns x as [C, A * B], materialised: with the transpose folded into it, a bfloat16 matmul has half the speed.

    Transposed before the reshape: x.T of the reshaped array is folded despite the barrier, and rows sharded along A
    would move.
    """
    C = x_ABC.shape[-1]
    return barrier_on_cpu(x_ABC.transpose(2, 0, 1).reshape(C, -1))


def barrier_on_cpu(x: jax.Array) -> jax.Array:
    """Optimization barrier on a CPU. Elsewhere XLA may fuse x with its consumers.

    On TPUs a barrier materialises the result: 0.5 GiB in the loss of a 7B (libtpu 0.0.51 for v5e, 2026-11-21).
    """
    return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)


def quantized_project(unquantized: Project, name: MatmulDtype) -> Project:
    """Returns the projection with this operand dtype; `unquantized` for "none". Raises BadInput without qwix."""
    return unquantized if name == "none" else pkgutil.resolve_name(MAKE_QUANTIZED)(name)


def with_matmul_precision(name: str, f: Callable) -> Callable:
    """Traces f, and its backward pass, with float32 matmul precision 'default', 'tf32' or 'highest'."""
    if name == "default":
        return f

    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        with jax.default_matmul_precision(PRECISIONS[name]):
            return f(*args, **kwargs)

    return wrapper
