"""Projections (activation times weight) by einsum, or in a form that is fast on XLA:CPU, and matmul precision.

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
PRECISIONS = {"tf32": "tensorfloat32", "highest": "highest"}  # {setting: jax_default_matmul_precision}
MAKE_QUANTIZED = "jaxscale.kernels.matmul.quantized:make_project"  # imported if model.matmul_dtype is set
PRODUCT = "product"  # checkpoint_name of every projection, for remat policies


def einsum_project(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Casts w to x.dtype, and returns the einsum of x and w in x.dtype.

    The gradient of w is accumulated and returned in the dtype of w. JAX's gradient would be rounded to x.dtype before
    the sum over devices.
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
    """Returns einsum_project(), computed twice as fast in bfloat16 on XLA:CPU (2.2 times backward, 2026-11-20).

    XLA:CPU uses its fast library for bfloat16 operands only if a matmul of two matrices contracts the last axis of the
    left matrix and returns float32. The gradient of w is accumulated in float32. The contracted axes must be the last
    axes of x and the first axes of w, in the same order.
    """
    return checkpoint_name(_project(contracted_axes(spec), x, w), PRODUCT)


@functools.cache
def contracted_axes(spec: str) -> int:
    """Returns how many axes `spec` contracts, which must be the last of x and the first of w: 2 for "BTNH,NHD->BTD"."""
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
    """Returns (x as [M, C], w cast to x.dtype as [C, O])."""
    size = math.prod(w.shape[:count])
    return x.reshape(-1, size), w.astype(x.dtype).reshape(size, -1)


def matmul_transposed(left_MC: jax.Array, right_OC: jax.Array) -> jax.Array:
    """Returns left @ right.T, float32 [M, O]."""
    return lax.dot_general(left_MC, right_OC, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def weight_gradient(x_ABC: jax.Array, dy_MO: jax.Array) -> jax.Array:
    """Returns x.T @ dy, float32 [C, O], where M combines the axes A and B of x."""
    if x_ABC.dtype == dy_MO.dtype == jnp.float32:
        # XLA:CPU transposes x without a copy, while it packs the operand.
        x_MC = x_ABC.reshape(-1, x_ABC.shape[-1])
        return lax.dot_general(x_MC, dy_MO, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    dw_CO = jnp.matmul(transposed(x_ABC), dy_MO, preferred_element_type=jnp.float32)
    return barrier_on_cpu(dw_CO)  # XLA:CPU cannot run a bfloat16 matmul with a folded transpose


def transposed(x_ABC: jax.Array) -> jax.Array:
    """Returns x as a materialized array [C, A * B], because a folded transpose halves the speed of a bfloat16 matmul.

    The transpose precedes the reshape. Otherwise XLA would fold it despite the barrier, and move rows that are sharded
    along A.
    """
    C = x_ABC.shape[-1]
    return barrier_on_cpu(x_ABC.transpose(2, 0, 1).reshape(C, -1))


def barrier_on_cpu(x: jax.Array) -> jax.Array:
    """Returns x, with an optimization barrier on CPUs. On other devices XLA may fuse x with its consumers.

    On TPUs a barrier would materialize x, 0.5 GiB in the loss of a 7B model (libtpu 0.0.51 for v5e, 2026-11-21).
    """
    return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)


def quantized_project(unquantized: Project, name: MatmulDtype) -> Project:
    """Returns the projection with this operand dtype, or `unquantized` for "none". Raises BadInput without qwix."""
    return unquantized if name == "none" else pkgutil.resolve_name(MAKE_QUANTIZED)(name)


def with_matmul_precision(name: str, f: Callable) -> Callable:
    """Returns f with the float32 matmul precision 'default', 'tf32' or 'highest', including its backward pass."""
    if name == "default":
        return f

    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        with jax.default_matmul_precision(PRECISIONS[name]):
            return f(*args, **kwargs)

    return wrapper
