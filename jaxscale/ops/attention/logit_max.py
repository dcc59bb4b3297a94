"""The largest score that attention meets, or a bound on it.

Scores are as attention computes them, before a softcap: scaled, with the bias that they may have. Where they grow
without end, attention falls onto single keys and training breaks down (arXiv:2302.05442; arXiv:2309.14322).

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim
N = K * G query heads; t and s are the queries and the keys of one block
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.ops.attention.xla import Scope, as_scope

EXACT = ("xla", "blockwise")  # forms of attention whose scores are computed again; of the others there is the bound
BLOCK = 256  # positions: scores of a pair of blocks are 1/4 MiB a row and head


def largest_score(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    segments: jax.Array | Scope,
    *,
    window: int | None = None,
    causal: bool = True,
    bias_NTS: jax.Array | None = None,
    scale: float | None = None,
    block: int = BLOCK,
    by_head: bool = False,
) -> jax.Array:
    """float32[], or float32[N] by_head: the largest score of a query with text and a key that it sees; -inf where there
    is no such pair.

    Arguments as attention takes them. Scores exist for one pair of blocks at a time.
    """
    scope = as_scope(segments)
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    queries, keys = min(block, T), min(block, S)
    q_BTKGH = filled(q_BTNH, 1, queries).reshape(B, -1, K, N // K, H)
    k_BSKH = filled(k_BSKH, 1, keys)
    key_ids_BS = scope.segment_ids_BT if scope.key_segment_ids_BS is None else scope.key_segment_ids_BS
    ids_BT, key_ids_BS = filled(scope.segment_ids_BT, 1, queries), filled(key_ids_BS, 1, keys)
    prefix_BS = None if scope.prefix_BT is None else filled(scope.prefix_BT, 1, keys)
    if bias_NTS is not None:
        bias_NTS = filled(filled(bias_NTS, 1, queries), 2, keys)
    in_order = scope.places_T is None
    places_T = jnp.arange(ids_BT.shape[1]) if scope.places_T is None else filled(scope.places_T, 0, queries)
    pairs = visible_pairs(T, S, queries, keys, causal=causal and prefix_BS is None and in_order, window=window)

    def visit(top_KG, pair):
        i, j = pair
        of_queries = lambda x: lax.dynamic_slice_in_dim(x, i * queries, queries, axis=1)
        of_keys = lambda x, axis=1: lax.dynamic_slice_in_dim(x, j * keys, keys, axis=axis)
        score_BKGts = jnp.einsum(
            "BtKGH,BsKH->BKGts", of_queries(q_BTKGH), of_keys(k_BSKH), preferred_element_type=jnp.float32
        )
        score_BKGts *= H**-0.5 if scale is None else scale
        if bias_NTS is not None:
            bias_Nts = of_keys(of_queries(bias_NTS), 2).astype(jnp.float32)
            score_BKGts += bias_Nts.reshape(1, K, N // K, queries, keys)
        ids_Bt = of_queries(ids_BT)
        seen_Bts = (ids_Bt[:, :, None] == of_keys(key_ids_BS)[:, None, :]) & (ids_Bt > 0)[:, :, None]
        if causal:
            places_t = lax.dynamic_slice_in_dim(places_T, i * queries, queries)
            behind_ts = places_t[:, None] - (j * keys + np.arange(keys))[None, :]
            near_ts = behind_ts >= 0 if window is None else (behind_ts >= 0) & (behind_ts < window)
            near_Bts = near_ts[None] if prefix_BS is None else near_ts[None] | (of_keys(prefix_BS)[:, None, :] > 0)
            seen_Bts &= near_Bts
        found_KG = jnp.max(score_BKGts, axis=(0, 3, 4), where=seen_Bts[:, None, None], initial=-jnp.inf)
        return jnp.maximum(top_KG, found_KG), None

    top_KG, _ = lax.scan(visit, jnp.full((K, N // K), -jnp.inf, jnp.float32), tuple(pairs.T))
    return top_KG.reshape(N) if by_head else jnp.max(top_KG)


def visible_pairs(T: int, S: int, queries: int, keys: int, *, causal: bool, window: int | None) -> np.ndarray:
    """int32[pairs, 2]: (block of queries, block of keys) of which a query may see a key."""
    found = []
    for i in range(-(-T // queries)):
        first, last = i * queries, (i + 1) * queries - 1
        end = min(-(-S // keys), last // keys + 1) if causal else -(-S // keys)
        begin = 0 if window is None or not causal else max(0, first - window + 1) // keys
        found += [(i, j) for j in range(begin, end)]
    return np.array(found, np.int32)


def filled(x: jax.Array, axis: int, block: int) -> jax.Array:
    """x with zeros behind its entries along an axis, up to whole blocks."""
    return jnp.pad(x, [(0, -length % block if d == axis else 0) for d, length in enumerate(x.shape)])


def score_bound(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    segments: jax.Array | Scope,
    *,
    scale: float | None = None,
    bias_NTS: jax.Array | None = None,
    **_,
) -> jax.Array:
    """float32[]: what no score with text exceeds, the longest query times the longest key of a head in a row, scaled.

    Causality, window and segments are not looked at: their pairs are among these. Raises ValueError for a bias.
    """
    if bias_NTS is not None:
        raise ValueError(
            "a bound on scores with a bias is not known here; attention with a bias is 'xla', which is exact"
        )
    scope = as_scope(segments)
    B, _, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    key_ids_BS = scope.segment_ids_BT if scope.key_segment_ids_BS is None else scope.key_segment_ids_BS
    squares = lambda x: jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)
    longest = lambda x, ids: jnp.max(squares(x), axis=1, where=(ids > 0)[:, :, None], initial=0.0)
    longest_q_BKG = longest(q_BTNH, scope.segment_ids_BT).reshape(B, K, N // K)
    both_BKG = longest_q_BKG * longest(k_BSKH, key_ids_BS)[:, :, None]
    return jnp.sqrt(jnp.max(both_BKG)) * (H**-0.5 if scale is None else scale)
