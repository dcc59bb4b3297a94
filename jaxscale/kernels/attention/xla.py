"""Attention as plain einsums and softmax: the reference for every other kernel.

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim
N = K * G query heads  V value and output head dim: H, except in latent attention
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.kernels.config import ATTENTION_OUT

MASK_VALUE = -1e30  # softmax gives exactly 0; finite, so that a fully masked row is not nan


class MaskSpec(NamedTuple):
    """A mask that segment ids alone do not define; passed in place of segment_ids_BT."""

    segment_ids_BT: jax.Array
    prefix_BT: jax.Array | None = None  # int32: 1 for a key visible to every query of its document
    key_segment_ids_BS: jax.Array | None = None  # None: keys come from the same row as the queries
    query_positions_T: jax.Array | None = None  # index of each query among the keys; None: arange(T)


def as_mask_spec(segments: jax.Array | MaskSpec) -> MaskSpec:
    """Wraps bare segment ids in a MaskSpec."""
    return segments if isinstance(segments, MaskSpec) else MaskSpec(segments)


def make_mask_spec(segment_ids_BT: jax.Array, prefix_BT: jax.Array | None) -> jax.Array | MaskSpec:
    """Returns a MaskSpec, or the bare segment ids, which every kernel accepts, without a prefix."""
    return segment_ids_BT if prefix_BT is None else MaskSpec(segment_ids_BT, prefix_BT)


def make_attend(*, softcap: float | None = None, window: int | None = None):
    """Returns attend(q_BTNH, k_BSKH, v_BSKV, segments) -> out_BTNV: causal, within the segment, scale 1/sqrt(H).

    softcap: scores become softcap * tanh(score / softcap) (arXiv:2408.00118).
    window: a query sees its own and the window - 1 keys before it (arXiv:2310.06825); None: all keys before it.
    """

    def attend(
        q_BTNH,
        k_BSKH,
        v_BSKV,
        segments: jax.Array | MaskSpec,
        *,
        causal: bool = True,
        bias_NTS: jax.Array | None = None,
        scale: float | None = None,
    ) -> jax.Array:
        """Softmax attention with float32 scores and probabilities rounded to v.dtype before the product; in q.dtype.

        segments: segment ids of the queries, or a MaskSpec. causal: later keys are masked, except those of a prefix.
        bias_NTS: added to the scores. scale: of q @ k, instead of 1/sqrt(H).
        """
        spec = as_mask_spec(segments)
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
        mask_B11TS = attention_mask(spec, T, S, causal, window)[:, None, None]
        prob_BKGTS = jax.nn.softmax(jnp.where(mask_B11TS, score_BKGTS, MASK_VALUE), axis=-1).astype(v_BSKV.dtype)
        if spec.key_segment_ids_BS is not None:  # padding has no key in another row
            prob_BKGTS = jnp.where(mask_B11TS, prob_BKGTS, 0)
        out_BTKGV = jnp.einsum("BKGTS,BSKV->BTKGV", prob_BKGTS, v_BSKV)
        return checkpoint_name(out_BTKGV.reshape(B, T, N, -1), ATTENTION_OUT)

    return attend


def attention_mask(spec: MaskSpec, T: int, S: int, causal: bool, window: int | None) -> jax.Array:
    """bool[B, T, S]: True where a query attends to a key."""
    key_ids_BS = spec.segment_ids_BT if spec.key_segment_ids_BS is None else spec.key_segment_ids_BS
    same_segment_BTS = spec.segment_ids_BT[:, :, None] == key_ids_BS[:, None, :]
    if not causal:
        return same_segment_BTS
    if spec.query_positions_T is None:
        mask_TS = jnp.tri(T, S, dtype=bool)
        if window is not None:
            mask_TS &= ~jnp.tri(T, S, k=-window, dtype=bool)
    else:
        distance_TS = spec.query_positions_T[:, None] - jnp.arange(S, dtype=jnp.int32)[None, :]
        mask_TS = (distance_TS >= 0) & (distance_TS < (S if window is None else window))
    if spec.prefix_BT is None:
        return same_segment_BTS & mask_TS[None]
    return same_segment_BTS & (mask_TS[None] | (spec.prefix_BT[:, None, :] > 0))
