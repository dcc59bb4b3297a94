"""Attention as XLA compiles it from the definition: the reference for every other form.

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.attention.names import ATTENTION_OUT

HIDDEN = -1e30  # a score that softmax turns into exactly 0, finite so that no row becomes nan


def make_attend(*, softcap: float | None = None, window: int | None = None):
    """attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH: causal, within the segment, scale 1/sqrt(H).

    softcap: scores become softcap * tanh(score / softcap) (arXiv:2408.00118).
    window: a query sees the newest `window` keys up to its own (arXiv:2310.06825); None: all of them.
    """
    return functools.partial(attend, softcap=softcap, window=window)


def attend(
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, *, softcap: float | None = None, window: int | None = None
) -> jax.Array:
    """Softmax attention with float32 scores and probabilities rounded to v.dtype before the product; in q.dtype."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    score_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * H**-0.5
    if softcap is not None:
        score_BKGTS = softcap * jnp.tanh(score_BKGTS / softcap)
    seen_TS = jnp.tri(T, dtype=bool)
    if window is not None:
        seen_TS &= ~jnp.tri(T, k=-window, dtype=bool)
    seen_BTS = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]) & seen_TS[None]
    score_BKGTS = jnp.where(seen_BTS[:, None, None], score_BKGTS, HIDDEN)
    share_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(v_BSKH.dtype)
    out_BTNH = jnp.einsum("BKGTS,BSKH->BTKGH", share_BKGTS, v_BSKH).reshape(B, T, N, H)
    return checkpoint_name(out_BTNH, ATTENTION_OUT)
