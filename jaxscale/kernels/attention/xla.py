"""Attention by einsums and softmax, the reference for other kernels, and the largest logit or an upper bound of it.

Logits are scaled and include a bias, without softcap. If logits grow without bound, attention collapses onto single
keys and training diverges (arXiv:2302.05442; arXiv:2309.14322).

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim
N = K * G query heads  V head dim of values and outputs: H, except in latent attention
t and s are the queries and the keys of one block
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.kernels.config import ATTENTION_OUT

MASK_VALUE = -1e30  # softmax returns exactly 0; finite, so that a fully masked query is not nan
EXACT = ("xla", "blockwise")  # kernels for which logits are recomputed; for others the bound is recorded
LOGIT_BLOCK = 256  # positions per block; logits of a pair of blocks need 1/4 MiB per row and head


class MaskSpec(NamedTuple):
    """Segment ids and other inputs that define an attention mask. Passed as the argument segment_ids_BT."""

    segment_ids_BT: jax.Array
    prefix_BT: jax.Array | None = None  # int32: 1 for a key visible to every query of its document
    key_segment_ids_BS: jax.Array | None = None  # None: the keys are those of the queries' sequence
    query_positions_T: jax.Array | None = None  # index of each query in the sequence of keys; None: arange(T)


def as_mask_spec(segments: jax.Array | MaskSpec) -> MaskSpec:
    """Wraps bare segment ids in a MaskSpec."""
    return segments if isinstance(segments, MaskSpec) else MaskSpec(segments)


def make_mask_spec(segment_ids_BT: jax.Array, prefix_BT: jax.Array | None) -> jax.Array | MaskSpec:
    """Returns a MaskSpec if there is a prefix, else the segment ids, which every kernel accepts."""
    return segment_ids_BT if prefix_BT is None else MaskSpec(segment_ids_BT, prefix_BT)


def make_attend(*, softcap: float | None = None, window: int | None = None):
    """Returns attend(q_BTNH, k_BSKH, v_BSKV, segments) -> out_BTNV, causal within segments, with scale 1/sqrt(H).

    softcap: scores become softcap * tanh(score / softcap) (arXiv:2408.00118). window: number of latest keys that a
    query attends to, including the key at its own position (arXiv:2310.06825); None means all.
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
        """Returns softmax attention. Scores are float32, and probabilities are cast to v.dtype.

        segments: segment ids of the queries, or a MaskSpec. causal: whether later keys are masked, except those of a
        prefix. bias_NTS: added to the scores. scale: replaces 1/sqrt(H) as the factor of q @ k.
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
        if spec.key_segment_ids_BS is not None:  # padding may have no key in a different sequence
            prob_BKGTS = jnp.where(mask_B11TS, prob_BKGTS, 0)
        out_BTKGV = jnp.einsum("BKGTS,BSKV->BTKGV", prob_BKGTS, v_BSKV)
        return checkpoint_name(out_BTKGV.reshape(B, T, N, -1), ATTENTION_OUT)

    return attend


def attention_mask(spec: MaskSpec, T: int, S: int, causal: bool, window: int | None) -> jax.Array:
    """Returns bool[B, T, S], True where a query attends to a key."""
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


def attention_logit_max(q_BTNH: jax.Array, k_BSKH: jax.Array, segments: jax.Array | MaskSpec, **settings) -> jax.Array:
    """Returns the maximum of largest_logits(), float32[]."""
    return jnp.max(largest_logits(q_BTNH, k_BSKH, segments, **settings))


def head_logit_max(q_BTNH: jax.Array, k_BSKH: jax.Array, segments: jax.Array | MaskSpec, **settings) -> jax.Array:
    """Returns largest_logits() as float32[N]."""
    return largest_logits(q_BTNH, k_BSKH, segments, **settings).reshape(q_BTNH.shape[2])


def largest_logits(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    segments: jax.Array | MaskSpec,
    *,
    window: int | None = None,
    causal: bool = True,
    bias_NTS: jax.Array | None = None,
    scale: float | None = None,
    block: int = LOGIT_BLOCK,
) -> jax.Array:
    """Returns the largest logit of each head over non-padding queries and visible keys, float32[K, G]; -inf if none.

    Arguments are those of attend(). Computes the logits of one pair of blocks at a time.
    """
    spec = as_mask_spec(segments)
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    queries, keys = min(block, T), min(block, S)
    q_BTKGH = pad_to_blocks(q_BTNH, 1, queries).reshape(B, -1, K, N // K, H)
    k_BSKH = pad_to_blocks(k_BSKH, 1, keys)
    key_ids_BS = spec.segment_ids_BT if spec.key_segment_ids_BS is None else spec.key_segment_ids_BS
    ids_BT, key_ids_BS = pad_to_blocks(spec.segment_ids_BT, 1, queries), pad_to_blocks(key_ids_BS, 1, keys)
    prefix_BS = None if spec.prefix_BT is None else pad_to_blocks(spec.prefix_BT, 1, keys)
    if bias_NTS is not None:
        bias_NTS = pad_to_blocks(pad_to_blocks(bias_NTS, 1, queries), 2, keys)
    if spec.query_positions_T is None:
        positions_T = jnp.arange(ids_BT.shape[1])
    else:
        positions_T = pad_to_blocks(spec.query_positions_T, 0, queries)
    skip_blocks = causal and prefix_BS is None and spec.query_positions_T is None
    pairs = visible_pairs(T, S, queries, keys, causal=skip_blocks, window=window)

    def update(max_KG, pair):
        i, j = pair
        query_block = lambda x: lax.dynamic_slice_in_dim(x, i * queries, queries, axis=1)
        key_block = lambda x, axis=1: lax.dynamic_slice_in_dim(x, j * keys, keys, axis=axis)
        logit_BKGts = jnp.einsum(
            "BtKGH,BsKH->BKGts", query_block(q_BTKGH), key_block(k_BSKH), preferred_element_type=jnp.float32
        )
        logit_BKGts *= H**-0.5 if scale is None else scale
        if bias_NTS is not None:
            bias_Nts = key_block(query_block(bias_NTS), 2).astype(jnp.float32)
            logit_BKGts += bias_Nts.reshape(1, K, N // K, queries, keys)
        ids_Bt = query_block(ids_BT)
        mask_Bts = (ids_Bt[:, :, None] == key_block(key_ids_BS)[:, None, :]) & (ids_Bt > 0)[:, :, None]
        if causal:
            positions_t = lax.dynamic_slice_in_dim(positions_T, i * queries, queries)
            distance_ts = positions_t[:, None] - (j * keys + np.arange(keys))[None, :]
            visible_ts = distance_ts >= 0 if window is None else (distance_ts >= 0) & (distance_ts < window)
            visible_Bts = visible_ts[None]
            if prefix_BS is not None:
                visible_Bts |= key_block(prefix_BS)[:, None, :] > 0
            mask_Bts &= visible_Bts
        block_max_KG = jnp.max(logit_BKGts, axis=(0, 3, 4), where=mask_Bts[:, None, None], initial=-jnp.inf)
        return jnp.maximum(max_KG, block_max_KG), None

    return lax.scan(update, jnp.full((K, N // K), -jnp.inf, jnp.float32), tuple(pairs.T))[0]


def visible_pairs(T: int, S: int, queries: int, keys: int, *, causal: bool, window: int | None) -> np.ndarray:
    """Returns int32[pairs, 2], the pairs (query block, key block) in which a query attends to a key."""
    pairs = []
    for i in range(-(-T // queries)):
        first, last = i * queries, (i + 1) * queries - 1
        end = min(-(-S // keys), last // keys + 1) if causal else -(-S // keys)
        begin = 0 if window is None or not causal else max(0, first - window + 1) // keys
        pairs += [(i, j) for j in range(begin, end)]
    return np.array(pairs, np.int32)


def pad_to_blocks(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Pads x with zeros to whole blocks along an axis."""
    return jnp.pad(x, [(0, -length % block if d == axis else 0) for d, length in enumerate(x.shape)])


def attention_logit_bound(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    segments: jax.Array | MaskSpec,
    *,
    scale: float | None = None,
    bias_NTS: jax.Array | None = None,
    **_,
) -> jax.Array:
    """Returns an upper bound on the logits, float32[]: the largest scale * max|q| * max|k| over heads and sequences.

    Excludes padding. Ignores causality, window and segments, which only exclude pairs. Raises ValueError for a bias.
    """
    if bias_NTS is not None:
        raise ValueError("the bound does not support an attention bias; use attention='xla', whose logits are exact")
    spec = as_mask_spec(segments)
    B, _, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    key_ids_BS = spec.segment_ids_BT if spec.key_segment_ids_BS is None else spec.key_segment_ids_BS
    square_norms = lambda x: jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)
    max_norms = lambda x, ids: jnp.max(square_norms(x), axis=1, where=(ids > 0)[:, :, None], initial=0.0)
    max_q_BKG = max_norms(q_BTNH, spec.segment_ids_BT).reshape(B, K, N // K)
    bound_BKG = max_q_BKG * max_norms(k_BSKH, key_ids_BS)[:, :, None]
    return jnp.sqrt(jnp.max(bound_BKG)) * (H**-0.5 if scale is None else scale)
