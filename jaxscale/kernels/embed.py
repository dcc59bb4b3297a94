"""Embedding lookup. B batch  T position  V vocab  D embed"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.core.axes.tensor_axis import TensorAxis
from jaxscale.kernels.gradient import custom_vjp


def lookup_sharded(table_VD: jax.Array, ids_BT: jax.Array, dtype: Any, tensor: TensorAxis) -> jax.Array:
    """lookup() of the local positions in a table whose rows are sharded over the tensor axis."""
    if not tensor.vocab_axes:
        return lookup(table_VD, ids_BT, dtype)
    return tensor.reduce_scatter_lookup(lookup(table_VD, tensor.local_ids(ids_BT, table_VD.shape[0]), dtype, 0.0))


@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def lookup(table_VD: jax.Array, ids_BT: jax.Array, dtype: Any, missing: float = math.nan) -> jax.Array:
    """Returns dtype[B, T, D], rows of the table; `missing` for an id out of range.

    The gradients of a row are summed in float32.
    """
    return jnp.take(table_VD.astype(dtype), ids_BT, axis=0, fill_value=missing)


def _forward(table_VD, ids_BT, dtype, missing):
    return lookup(table_VD, ids_BT, dtype, missing), (ids_BT, jnp.zeros((table_VD.shape[0], 0), table_VD.dtype))


def _backward(dtype, missing, saved, dx_BTD):
    ids_BT, table_like_V0 = saved
    zeros_VD = jnp.zeros((table_like_V0.shape[0], dx_BTD.shape[-1]), jnp.float32)
    return zeros_VD.at[ids_BT].add(dx_BTD.astype(jnp.float32)).astype(table_like_V0.dtype), None


lookup.defvjp(_forward, _backward)
