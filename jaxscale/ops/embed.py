"""Rows of a table by number. B batch  T position  V vocab  D embed"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table_VD: jax.Array, ids_BT: jax.Array, dtype: Any) -> jax.Array:
    """dtype[B, T, D]: rows of the table. The gradients of a row are summed in float32, however often it is used."""
    return jnp.take(table_VD.astype(dtype), ids_BT, axis=0)


def _forward(table_VD, ids_BT, dtype):
    return lookup(table_VD, ids_BT, dtype), (ids_BT, jnp.zeros((table_VD.shape[0], 0), table_VD.dtype))


def _backward(dtype, saved, dx_BTD):
    ids_BT, like_table = saved
    zeros_VD = jnp.zeros((like_table.shape[0], dx_BTD.shape[-1]), jnp.float32)
    return zeros_VD.at[ids_BT].add(dx_BTD.astype(jnp.float32)).astype(like_table.dtype), None


lookup.defvjp(_forward, _backward)
