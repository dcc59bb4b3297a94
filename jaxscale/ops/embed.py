"""Rows of a table by number. B batch  T position  V vocab  D embed"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.ops.gradient import custom_vjp
from jaxscale.sharding.tensor_axis import TensorAxis


def lookup_shared(table_VD: jax.Array, ids_BT: jax.Array, dtype: Any, tensor: TensorAxis) -> jax.Array:
    """The device's own positions of lookup(), where each device holds a part of the table's rows."""
    if not tensor.vocab_axes:
        return lookup(table_VD, ids_BT, dtype)
    return tensor.reduce_scatter_lookup(lookup(table_VD, tensor.local_ids(ids_BT, table_VD.shape[0]), dtype, 0.0))


@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def lookup(table_VD: jax.Array, ids_BT: jax.Array, dtype: Any, missing: float = math.nan) -> jax.Array:
    """dtype[B, T, D]: rows of the table; `missing` for an id that is past its end.

    The gradients of a row are summed in float32, however often it is used.
    """
    return jnp.take(table_VD.astype(dtype), ids_BT, axis=0, fill_value=missing)


def _forward(table_VD, ids_BT, dtype, missing):
    return lookup(table_VD, ids_BT, dtype, missing), (ids_BT, jnp.zeros((table_VD.shape[0], 0), table_VD.dtype))


def _backward(dtype, missing, saved, dx_BTD):
    ids_BT, like_table = saved
    zeros_VD = jnp.zeros((like_table.shape[0], dx_BTD.shape[-1]), jnp.float32)
    return zeros_VD.at[ids_BT].add(dx_BTD.astype(jnp.float32)).astype(like_table.dtype), None


lookup.defvjp(_forward, _backward)
