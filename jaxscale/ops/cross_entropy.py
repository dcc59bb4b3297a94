"""Next-token cross-entropy, exact, without ever holding all logits.

The positions are taken in chunks along T, so that rows of a sharded batch stay on their devices.

B batch  T position  D embed  V vocab  c positions of a chunk  M = B * c rows of a chunk's product
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.ops.gradient import custom_vjp
from jaxscale.ops.project import matmul_transposed, separate_on_cpu, weight_gradient
from jaxscale.sharding.tensor_axis import NO_TENSOR_AXIS, TensorAxis

F32 = jnp.float32


class LossSums(NamedTuple):
    """Sums over the weighted tokens, float32[]. Only `total` has a gradient."""

    total: jax.Array  # nats + z_loss * z: what training minimises, before the division by the token count
    nats: jax.Array  # weight * cross-entropy
    z: jax.Array  # weight * logsumexp**2 (arXiv:2204.02311, section 5), without the coefficient
    row_nats: jax.Array | None = None  # float32[B]: nats of each row, where asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What is fixed of a loss before it is compiled."""

    chunk_tokens: int  # whose logits exist at one time; at least one position of every row
    softcap: float | None = None  # c: logits become c * tanh(logits / c)
    tensor: TensorAxis = NO_TENSOR_AXIS  # the devices among which the columns of w are shared
    z_loss: float = 0.0  # coefficient of z in LossSums.total
    per_row: bool = False  # whether LossSums has the nats of each row


@jax.named_scope("loss")
def token_nats(
    h_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array, cfg: LossSettings
) -> tuple[jax.Array, jax.Array]:
    """(cross-entropy in nats, logsumexp of the logits), each float32 [B, T]; for evaluation.

    h is multiplied in its own dtype (w is cast to it), everything after in float32.
    """

    def one_chunk(logits_BcV, own_Bc):
        return chunk_nats(logits_BcV, own_Bc, cfg.tensor)

    return over_chunks(one_chunk, h_BTD, w_DV, targets_BT, cfg)


@jax.named_scope("loss")
def token_scores(
    h_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array, cfg: LossSettings
) -> tuple[jax.Array, jax.Array]:
    """(cross-entropy in nats, float32; whether no token is likelier than the target, bool), each [B, T]."""

    def one_chunk(logits_BcV, own_Bc):
        nats_Bc, _ = chunk_nats(logits_BcV, own_Bc, cfg.tensor)
        found_Bc1 = jnp.take_along_axis(logits_BcV, own_Bc[..., None], axis=-1, mode="fill", fill_value=-jnp.inf)
        top_Bc = cfg.tensor.vocab_max(jnp.max(logits_BcV, axis=-1))
        return nats_Bc, cfg.tensor.vocab_max(found_Bc1[..., 0]) >= top_Bc

    return over_chunks(one_chunk, h_BTD, w_DV, targets_BT, cfg)


def over_chunks(
    f: Callable, h_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array, cfg: LossSettings
) -> tuple[jax.Array, jax.Array]:
    """f(logits_BcV, targets as columns of these logits) -> two arrays [B, c], for all positions: [B, T]."""
    w_DV = w_DV.astype(h_BTD.dtype)

    def one_chunk(chunk):
        h_BcD, targets_Bc = chunk
        return f(chunk_logits(h_BcD, w_DV, cfg.softcap), cfg.tensor.local_ids(targets_Bc, w_DV.shape[1]))

    chunks = tuple(chunked(array, cfg.chunk_tokens) for array in (h_BTD, targets_BT))
    first_nBc, second_nBc = lax.map(one_chunk, chunks)
    return unchunked(first_nBc, h_BTD.shape[1]), unchunked(second_nBc, h_BTD.shape[1])


@jax.named_scope("loss")
def summed_cross_entropy(
    h_BTD: jax.Array,
    w_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    cfg: LossSettings,
) -> LossSums:
    """Sums over all tokens. Differentiated, it forms the gradients of h and w with each chunk's logits in the forward
    pass, so no logits are computed twice; that of w is accumulated in float32. targets and weights have no gradient.

    Arguments as in token_nats. Where w is shared, the gradient of h is the device's part of a sum.
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
        share_BcV = jnp.exp(logits_BcV - lse_Bc[..., None])
        pull_Bc = weights_Bc * (1 + 2 * z_loss * lse_Bc)  # d total / d logsumexp
        target_BcV = targets_Bc[..., None] == lax.broadcasted_iota(jnp.int32, (1, 1, logits_BcV.shape[-1]), 2)
        g_BcV = share_BcV * pull_Bc[..., None] - jnp.where(target_BcV, weights_Bc[..., None], 0.0)
        if softcap is not None:
            g_BcV = g_BcV * (1 - jnp.square(logits_BcV / softcap))
        g_MV = separate_on_cpu((g_BcV * lift(h_BcD.dtype)).astype(h_BcD.dtype).reshape(-1, g_BcV.shape[-1]))
        dh_MD = matmul_transposed(g_MV, w_cast_DV)
        dw_DV = weight_gradient(h_BcD, g_MV)
        rows_B = jnp.sum(nats_Bc * weights_Bc, axis=1) if per_row else None
        step = (jnp.sum(nats_Bc * weights_Bc), jnp.sum(lse_Bc * lse_Bc * weights_Bc), rows_B, dw_DV)
        return jax.tree.map(jnp.add, sums, step), dh_MD.astype(h_BcD.dtype).reshape(h_BcD.shape)

    rows_B = jnp.zeros(h_BTD.shape[0], F32) if per_row else None
    zeros = (jnp.zeros((), F32), jnp.zeros((), F32), rows_B, jnp.zeros(w_DV.shape, F32))
    chunks = tuple(chunked(array, cfg.chunk_tokens) for array in (h_BTD, targets_BT, weights_BT))  # padding weighs 0
    (nats, z, rows_B, dw_DV), dh_nBcD = lax.scan(one_chunk, zeros, chunks)
    saved = (unchunked(dh_nBcD, h_BTD.shape[1]), dw_DV, jnp.zeros((), w_DV.dtype))
    return (nats + z_loss * z, nats, z, rows_B), saved


def _backward(cfg, saved, cotangents):
    dh_BTD, dw_DV, like_w = saved
    scale = cotangents[0].astype(F32) / lift(dh_BTD.dtype)
    return (dh_BTD.astype(F32) * scale).astype(dh_BTD.dtype), (dw_DV * scale).astype(like_w.dtype), None, None


_summed.defvjp(_forward, _backward)


def lift(dtype: jnp.dtype) -> float:
    """A power of two that lifts gradients out of float16's subnormal range, where the loss scale comes too late.

    The gradient of the logits is at most about 1, and formed before the scale is known; 2**10 leaves room below 65504.
    """
    return 1024.0 if dtype == jnp.float16 else 1.0


def chunk_logits(h_BcD: jax.Array, w_DV: jax.Array, softcap: float | None) -> jax.Array:
    """Logits of one chunk, float32 [B, c, V]; the product is of two matrices, which is the fast form on a CPU."""
    B, c, D = h_BcD.shape
    logits_BcV = jnp.matmul(h_BcD.reshape(-1, D), w_DV, preferred_element_type=F32).reshape(B, c, -1)
    logits_BcV = separate_on_cpu(logits_BcV)
    return logits_BcV if softcap is None else softcap * jnp.tanh(logits_BcV / softcap)


def chunk_nats(logits_BcV: jax.Array, own_Bc: jax.Array, tensor: TensorAxis) -> tuple[jax.Array, jax.Array]:
    """(cross-entropy, logsumexp), each float32 [B, c]. own: targets as columns of these logits, or V."""
    top_Bc1 = tensor.vocab_max(jnp.max(logits_BcV, axis=-1, keepdims=True))
    lse_Bc = jnp.log(tensor.vocab_sum(jnp.sum(jnp.exp(logits_BcV - top_Bc1), axis=-1))) + top_Bc1[..., 0]
    missing = 0.0 if tensor.vocab_axes else jnp.nan
    target_Bc1 = jnp.take_along_axis(logits_BcV, own_Bc[..., None], axis=-1, mode="fill", fill_value=missing)
    return lse_Bc - tensor.vocab_sum(target_Bc1[..., 0]), lse_Bc


def chunked(x_BT: jax.Array, chunk_tokens: int) -> jax.Array:
    """[B, T, ...] as [n, B, c, ...], T padded with zeros to n * c, where B * c is at most chunk_tokens (but c >= 1)."""
    B, T = x_BT.shape[:2]
    num_chunks = -(-T // max(1, chunk_tokens // B))
    size = -(-T // num_chunks)  # evenly, so that little is padding
    padding = [(0, 0), (0, num_chunks * size - T)] + [(0, 0)] * (x_BT.ndim - 2)
    return jnp.pad(x_BT, padding).reshape(B, num_chunks, size, *x_BT.shape[2:]).swapaxes(0, 1)


def unchunked(x_nBc: jax.Array, length: int) -> jax.Array:
    """The inverse of chunked, without its padding."""
    n, B, c = x_nBc.shape[:3]
    return x_nBc.swapaxes(0, 1).reshape(B, n * c, *x_nBc.shape[3:])[:, :length]
