"""Embedding lookup, and exact next-token cross-entropy in chunks, without materialising all logits.

Chunks split T, so that the rows of a sharded batch remain on their devices.

B batch  T position  D embed  V vocab  c positions per chunk  M = B * c rows of a chunk's matmul
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.core.axes.tensor_axis import NO_TENSOR_AXIS, TensorAxis
from jaxscale.kernels.gradient import custom_vjp
from jaxscale.kernels.matmul.project import barrier_on_cpu, matmul_transposed, weight_gradient

F32 = jnp.float32


class LossSums(NamedTuple):
    """Sums over weighted tokens, float32[]. Only `total` has a gradient."""

    total: jax.Array  # nats + z_loss * z, the training loss before division by the token count
    nats: jax.Array  # weight * cross-entropy
    z: jax.Array  # weight * logsumexp**2 (arXiv:2204.02311, section 5), without the coefficient
    row_nats: jax.Array | None = None  # float32[B]: nats of each row, with LossSettings.per_row


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Static settings of a loss."""

    chunk_tokens: int  # maximum tokens per chunk, but at least one position of every row
    softcap: float | None = None  # c: logits become c * tanh(logits / c)
    tensor: TensorAxis = NO_TENSOR_AXIS  # axis that shards the columns of w
    z_loss: float = 0.0  # coefficient of z in LossSums.total
    per_row: bool = False  # whether to return LossSums.row_nats


@jax.named_scope("loss")
def token_nats(
    h_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array, cfg: LossSettings
) -> tuple[jax.Array, jax.Array]:
    """Returns (cross-entropy in nats, logsumexp of the logits), each float32 [B, T].

    w is cast to h.dtype for the matmul. All later operations are float32.
    """
    return map_chunks(functools.partial(chunk_nats, tensor=cfg.tensor), h_BTD, w_DV, targets_BT, cfg)


@jax.named_scope("loss")
def token_nats_and_greedy(
    h_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array, cfg: LossSettings
) -> tuple[jax.Array, jax.Array]:
    """Returns (float32 cross-entropy in nats, True where the target has the highest logit), each [B, T]."""

    def one_chunk(logits_BcV, local_ids_Bc):
        nats_Bc, _ = chunk_nats(logits_BcV, local_ids_Bc, cfg.tensor)
        target_Bc1 = jnp.take_along_axis(logits_BcV, local_ids_Bc[..., None], axis=-1, mode="fill", fill_value=-jnp.inf)
        max_Bc = cfg.tensor.vocab_max(jnp.max(logits_BcV, axis=-1))
        return nats_Bc, cfg.tensor.vocab_max(target_Bc1[..., 0]) >= max_Bc

    return map_chunks(one_chunk, h_BTD, w_DV, targets_BT, cfg)


def map_chunks(
    f: Callable, h_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array, cfg: LossSettings
) -> tuple[jax.Array, jax.Array]:
    """Applies f(logits_BcV, local_ids_Bc) to each chunk. Concatenates its two results [B, c] to two arrays [B, T]."""
    w_DV = w_DV.astype(h_BTD.dtype)

    def one_chunk(chunk):
        h_BcD, targets_Bc = chunk
        return f(chunk_logits(h_BcD, w_DV, cfg.softcap), cfg.tensor.local_ids(targets_Bc, w_DV.shape[1]))

    chunks = tuple(split_chunks(array, cfg.chunk_tokens) for array in (h_BTD, targets_BT))
    first_nBc, second_nBc = lax.map(one_chunk, chunks)
    return merge_chunks(first_nBc, h_BTD.shape[1]), merge_chunks(second_nBc, h_BTD.shape[1])


@jax.named_scope("loss")
def summed_cross_entropy(
    h_BTD: jax.Array,
    w_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    cfg: LossSettings,
) -> LossSums:
    """Returns the sums over all tokens. No gradients are computed for targets and weights.

    Under differentiation, the forward pass also computes the gradients of h and w, so that logits are computed once.
    The gradient of w is accumulated in float32. If w is sharded, the gradient of h is a partial sum.
    """
    total, *sums = _summed(cfg, h_BTD, w_DV, targets_BT, weights_BT)
    return LossSums(total, *jax.tree.map(lax.stop_gradient, sums))


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _summed(cfg, h_BTD, w_DV, targets_BT, weights_BT):
    nats_BT, lse_BT = token_nats(h_BTD, w_DV, targets_BT, cfg)
    nats, z = jnp.sum(nats_BT * weights_BT), jnp.sum(lse_BT * lse_BT * weights_BT)
    return nats + cfg.z_loss * z, nats, z, jnp.sum(nats_BT * weights_BT, axis=1) if cfg.per_row else None


def _forward(cfg, h_BTD, w_DV, targets_BT, weights_BT):
    tensor, softcap, z_loss, per_row = cfg.tensor, cfg.softcap, cfg.z_loss, cfg.per_row
    w_cast_DV = w_DV.astype(h_BTD.dtype)

    def one_chunk(sums, chunk):
        h_BcD, targets_Bc, weights_Bc = chunk
        targets_Bc = tensor.local_ids(targets_Bc, w_DV.shape[1])
        logits_BcV = chunk_logits(h_BcD, w_cast_DV, softcap)
        nats_Bc, lse_Bc = chunk_nats(logits_BcV, targets_Bc, tensor)
        prob_BcV = jnp.exp(logits_BcV - lse_Bc[..., None])
        dlse_Bc = weights_Bc * (1 + 2 * z_loss * lse_Bc)  # d total / d logsumexp
        target_BcV = targets_Bc[..., None] == lax.broadcasted_iota(jnp.int32, (1, 1, logits_BcV.shape[-1]), 2)
        g_BcV = prob_BcV * dlse_Bc[..., None] - jnp.where(target_BcV, weights_Bc[..., None], 0.0)
        if softcap is not None:
            g_BcV = g_BcV * (1 - jnp.square(logits_BcV / softcap))
        g_MV = barrier_on_cpu((g_BcV * float16_scale(h_BcD.dtype)).astype(h_BcD.dtype).reshape(-1, g_BcV.shape[-1]))
        dh_MD = matmul_transposed(g_MV, w_cast_DV)
        dw_DV = weight_gradient(h_BcD, g_MV)
        rows_B = jnp.sum(nats_Bc * weights_Bc, axis=1) if per_row else None
        step = (jnp.sum(nats_Bc * weights_Bc), jnp.sum(lse_Bc * lse_Bc * weights_Bc), rows_B, dw_DV)
        return jax.tree.map(jnp.add, sums, step), dh_MD.astype(h_BcD.dtype).reshape(h_BcD.shape)

    rows_B = jnp.zeros(h_BTD.shape[0], F32) if per_row else None
    zeros = (jnp.zeros((), F32), jnp.zeros((), F32), rows_B, jnp.zeros(w_DV.shape, F32))
    arrays = h_BTD, targets_BT, weights_BT  # padding has weight 0
    chunks = tuple(split_chunks(array, cfg.chunk_tokens) for array in arrays)
    (nats, z, rows_B, dw_DV), dh_nBcD = lax.scan(one_chunk, zeros, chunks)
    saved = (merge_chunks(dh_nBcD, h_BTD.shape[1]), dw_DV, jnp.zeros((), w_DV.dtype))
    return (nats + z_loss * z, nats, z, rows_B), saved


def _backward(cfg, saved, cotangents):
    dh_BTD, dw_DV, w_like = saved
    scale = cotangents[0].astype(F32) / float16_scale(dh_BTD.dtype)
    return (dh_BTD.astype(F32) * scale).astype(dh_BTD.dtype), (dw_DV * scale).astype(w_like.dtype), None, None


_summed.defvjp(_forward, _backward)


def float16_scale(dtype: jnp.dtype) -> float:
    """Returns a power of two that scales float16 gradients out of the subnormal range, or 1 for other dtypes.

    Gradients of logits are computed before the loss scale is known and are at most about 1. float16's maximum is 65504.
    """
    return 1024.0 if dtype == jnp.float16 else 1.0


def chunk_logits(h_BcD: jax.Array, w_DV: jax.Array, softcap: float | None) -> jax.Array:
    """Returns the logits of one chunk, float32 [B, c, V]. The matmul merges B and c, which is faster on CPUs."""
    B, c, D = h_BcD.shape
    logits_BcV = jnp.matmul(h_BcD.reshape(-1, D), w_DV, preferred_element_type=F32).reshape(B, c, -1)
    logits_BcV = barrier_on_cpu(logits_BcV)
    return logits_BcV if softcap is None else softcap * jnp.tanh(logits_BcV / softcap)


def chunk_nats(logits_BcV: jax.Array, local_ids_Bc: jax.Array, tensor: TensorAxis) -> tuple[jax.Array, jax.Array]:
    """Returns (cross-entropy, logsumexp), each float32 [B, c]. local_ids_Bc: target columns; V for remote columns."""
    max_Bc1 = tensor.vocab_max(jnp.max(logits_BcV, axis=-1, keepdims=True))
    lse_Bc = jnp.log(tensor.vocab_sum(jnp.sum(jnp.exp(logits_BcV - max_Bc1), axis=-1))) + max_Bc1[..., 0]
    missing = 0.0 if tensor.vocab_axes else jnp.nan
    target_Bc1 = jnp.take_along_axis(logits_BcV, local_ids_Bc[..., None], axis=-1, mode="fill", fill_value=missing)
    return lse_Bc - tensor.vocab_sum(target_Bc1[..., 0]), lse_Bc


def split_chunks(x_BT: jax.Array, chunk_tokens: int) -> jax.Array:
    """Splits [B, T, ...] into [n, B, c, ...], padded with zeros. B * c is at most chunk_tokens unless c is 1."""
    B, T = x_BT.shape[:2]
    num_chunks = -(-T // max(1, chunk_tokens // B))
    size = -(-T // num_chunks)  # chunks of equal size need little padding
    padding = [(0, 0), (0, num_chunks * size - T)] + [(0, 0)] * (x_BT.ndim - 2)
    return jnp.pad(x_BT, padding).reshape(B, num_chunks, size, *x_BT.shape[2:]).swapaxes(0, 1)


def merge_chunks(x_nBc: jax.Array, length: int) -> jax.Array:
    """Inverse of split_chunks(), without the padding."""
    n, B, c = x_nBc.shape[:3]
    return x_nBc.swapaxes(0, 1).reshape(B, n * c, *x_nBc.shape[3:])[:, :length]


def lookup_sharded(table_VD: jax.Array, ids_BT: jax.Array, dtype: Any, tensor: TensorAxis) -> jax.Array:
    """Same as lookup() for a table with sharded rows. Each device returns its local positions."""
    if not tensor.vocab_axes:
        return lookup(table_VD, ids_BT, dtype)
    return tensor.reduce_scatter_lookup(lookup(table_VD, tensor.local_ids(ids_BT, table_VD.shape[0]), dtype, 0.0))


@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def lookup(table_VD: jax.Array, ids_BT: jax.Array, dtype: Any, missing: float = math.nan) -> jax.Array:
    """Returns table rows, dtype[B, T, D], with `missing` for ids out of range. Sums the gradients in float32."""
    return jnp.take(table_VD.astype(dtype), ids_BT, axis=0, fill_value=missing)


def _lookup_forward(table_VD, ids_BT, dtype, missing):
    return lookup(table_VD, ids_BT, dtype, missing), (ids_BT, jnp.zeros((table_VD.shape[0], 0), table_VD.dtype))


def _lookup_backward(dtype, missing, saved, dx_BTD):
    ids_BT, table_like_V0 = saved
    zeros_VD = jnp.zeros((table_like_V0.shape[0], dx_BTD.shape[-1]), jnp.float32)
    return zeros_VD.at[ids_BT].add(dx_BTD.astype(jnp.float32)).astype(table_like_V0.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)
