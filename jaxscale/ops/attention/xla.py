"""Attention as XLA compiles it from the definition: the reference for every other form.

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim
N = K * G query heads  V of values and results, H but for latent attention
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.config import ATTENTION_OUT

HIDDEN = -1e30  # a score that softmax turns into exactly 0, finite so that no row becomes nan


class Scope(NamedTuple):
    """What an attention takes in the place of segment_ids_BT, if it can do more than read one row causally."""

    segment_ids_BT: jax.Array
    prefix_BT: jax.Array | None = None  # int32: 1 for a key that every query of its document sees; none: there is none
    key_segment_ids_BS: jax.Array | None = None  # of keys from another row than the queries; none: of the same
    places_T: jax.Array | None = (
        None  # of the queries among the keys, where they are some of a row's; none: all, in order
    )


def as_scope(segments: jax.Array | Scope) -> Scope:
    """Segment numbers as the scope that says no more."""
    return segments if isinstance(segments, Scope) else Scope(segments)


def narrowed(segment_ids_BT: jax.Array, prefix_BT: jax.Array | None) -> jax.Array | Scope:
    """The plainest form of the two, which every kernel takes where there is no prefix."""
    return segment_ids_BT if prefix_BT is None else Scope(segment_ids_BT, prefix_BT)


def make_attend(*, softcap: float | None = None, window: int | None = None):
    """attend(q_BTNH, k_BSKH, v_BSKV, segments) -> out_BTNV: causal, within the segment, scale 1/sqrt(H).

    softcap: scores become softcap * tanh(score / softcap) (arXiv:2408.00118).
    window: a query sees the newest `window` keys up to its own (arXiv:2310.06825); None: all of them.
    """

    def attend(
        q_BTNH,
        k_BSKH,
        v_BSKV,
        segments: jax.Array | Scope,
        *,
        causal: bool = True,
        bias_NTS: jax.Array | None = None,
        scale: float | None = None,
    ) -> jax.Array:
        """Softmax attention with float32 scores and probabilities rounded to v.dtype before the product; in q.dtype.

        segments: of the queries, or a Scope. causal: a query sees no later key, but for those of a prefix. bias_NTS:
        added to the scores. scale: of the products of queries and keys, in place of 1/sqrt(H).
        """
        scope = as_scope(segments)
        B, T, N, H = q_BTNH.shape
        S, K = k_BSKH.shape[1:3]
        q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
        score_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
        if scale != 1.0:
            score_BKGTS *= H**-0.5 if scale is None else scale
        if softcap is not None:
            score_BKGTS = softcap * jnp.tanh(score_BKGTS / softcap)
        if bias_NTS is not None:
            score_BKGTS += bias_NTS.astype(jnp.float32).reshape(1, K, N // K, T, S)
        seen_B11TS = seen(scope, T, S, causal, window)[:, None, None]
        share_BKGTS = jax.nn.softmax(jnp.where(seen_B11TS, score_BKGTS, HIDDEN), axis=-1).astype(v_BSKV.dtype)
        if scope.key_segment_ids_BS is not None:  # a query may have no key in another row, as padding has none
            share_BKGTS = jnp.where(seen_B11TS, share_BKGTS, 0)
        out_BTKGV = jnp.einsum("BKGTS,BSKV->BTKGV", share_BKGTS, v_BSKV)
        return checkpoint_name(out_BTKGV.reshape(B, T, N, -1), ATTENTION_OUT)

    return attend


def seen(scope: Scope, T: int, S: int, causal: bool, window: int | None) -> jax.Array:
    """bool[B, T, S]: whether a query may look at a key."""
    key_ids_BS = scope.segment_ids_BT if scope.key_segment_ids_BS is None else scope.key_segment_ids_BS
    same_BTS = scope.segment_ids_BT[:, :, None] == key_ids_BS[:, None, :]
    if not causal:
        return same_BTS
    if scope.places_T is None:
        seen_TS = jnp.tri(T, S, dtype=bool)
        if window is not None:
            seen_TS &= ~jnp.tri(T, S, k=-window, dtype=bool)
    else:
        behind_TS = scope.places_T[:, None] - jnp.arange(S, dtype=jnp.int32)[None, :]
        seen_TS = (behind_TS >= 0) & (behind_TS < (S if window is None else window))
    if scope.prefix_BT is None:
        return same_BTS & seen_TS[None]
    return same_BTS & (seen_TS[None] | (scope.prefix_BT[:, None, :] > 0))
