"""Products of activations with weights, as einsum writes them and as XLA:CPU runs them fast, and their precision.

M rows of x  C contracted size  O output size of the weight
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Project = Callable[[str, jax.Array, jax.Array], jax.Array]  # (einsum spec, activation, weight) -> activation
PRECISIONS = {"tf32": "tensorfloat32", "highest": "highest"}  # of settings, as jax has them
PRODUCT = "product"  # the name of every projection's result, for remat policies


def einsum_project(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum of x with w cast to x.dtype, in x.dtype. The gradient of w is summed and returned in w's own dtype.

    jax's own rule would round it to x.dtype first, before the devices' parts of it are summed.
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
    """What einsum_project returns, 2 times as fast forward and 2.2 backward for bfloat16 on XLA:CPU (2026-11-20).

    Every product is one of two matrices whose left operand contracts its last axis and whose result is float32: only
    that form reaches the fast library, with bfloat16 operands as they are. (A float32 gradient of w is another, see
    weight_gradient.) So the gradient of w is accumulated and returned in float32 where w is float32. The contracted
    axes must end x and begin w, in one order.
    """
    return checkpoint_name(_project(contracted_axes(spec), x, w), PRODUCT)


@functools.cache
def contracted_axes(spec: str) -> int:
    """How many axes `spec` contracts: 2 for "BTNH,NHD->BTD". Asserts that they end x and begin w."""
    inputs, output = spec.replace(" ", "").split("->")
    x_axes, w_axes = inputs.split(",")
    count = sum(axis in x_axes for axis in w_axes)
    kept, contracted = x_axes[: len(x_axes) - count], x_axes[len(x_axes) - count :]
    assert count and w_axes[:count] == contracted and output == kept + w_axes[count:], f"{spec} is no projection"
    return count


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(count, x, w):
    x_MC, w_CO = flatten(count, x, w)
    y_MO = separate_on_cpu(jnp.matmul(x_MC, w_CO, preferred_element_type=jnp.float32))
    return y_MO.astype(x.dtype).reshape(x.shape[: x.ndim - count] + w.shape[count:])


def _forward(count, x, w):
    return _project(count, x, w), (x, w)


def _backward(count, saved, dy):
    x, w = saved
    x_MC, w_CO = flatten(count, x, w)
    dy_MO, x_ABC = dy.reshape(-1, w_CO.shape[1]), x_MC.reshape(x.shape[0], -1, x_MC.shape[1])
    dx_MC = separate_on_cpu(matmul_transposed(dy_MO, w_CO))
    return dx_MC.astype(x.dtype).reshape(x.shape), weight_gradient(x_ABC, dy_MO).astype(w.dtype).reshape(w.shape)


_project.defvjp(_forward, _backward)


def flatten(count: int, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as [M, C] and w, cast to x.dtype, as [C, O]."""
    size = math.prod(w.shape[:count])
    return x.reshape(-1, size), w.astype(x.dtype).reshape(size, -1)


def matmul_transposed(left_MC: jax.Array, right_OC: jax.Array) -> jax.Array:
    """left @ right.T, float32 [M, O]."""
    return lax.dot_general(left_MC, right_OC, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def weight_gradient(x_ABC: jax.Array, dy_MO: jax.Array) -> jax.Array:
    """x.T @ dy, float32 [C, O], where the rows M are A and B of x in order."""
    if x_ABC.dtype == dy_MO.dtype == jnp.float32:
        # XLA:CPU turns x as it packs it for the product, and writes no turned copy of it.
        x_MC = x_ABC.reshape(-1, x_ABC.shape[-1])
        return lax.dot_general(x_MC, dy_MO, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    dw_CO = jnp.matmul(transposed(x_ABC), dy_MO, preferred_element_type=jnp.float32)
    return separate_on_cpu(dw_CO)  # a transpose folded into a bfloat16 product is one XLA:CPU cannot run


def transposed(x_ABC: jax.Array) -> jax.Array:
    """x as [C, A * B], written out in memory. Without the barrier XLA folds it into the product: half the speed,
    of bfloat16.

    Turned before the rows are joined: a plain x.T is still folded, and rows sharded along A stay where they are.
    """
    C = x_ABC.shape[-1]
    return separate_on_cpu(x_ABC.transpose(2, 0, 1).reshape(C, -1))


def separate_on_cpu(x: jax.Array) -> jax.Array:
    """x computed apart from what reads it, on a CPU; elsewhere as XLA likes, which adds a sum to the product before it.

    On TPUs a barrier costs the product's own array: 0.5 GiB in the loss of a 7B (libtpu 0.0.51 for v5e, 2026-11-21).
    """
    return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)


def with_precision(name: str, f: Callable) -> Callable:
    """f, traced so that float32 products have this precision, 'default', 'tf32' or 'highest': backward passes too."""
    if name == "default":
        return f

    @functools.wraps(f)
    def precise(*args, **kwargs):
        with jax.default_matmul_precision(PRECISIONS[name]):
            return f(*args, **kwargs)

    return precise
