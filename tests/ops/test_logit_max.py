"""The largest score is that of the whole table of scores, however it is cut; the bound is never below it.

B batch  T query position  S key position  K kv heads  N query heads  H head dim
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels.attention import xla
from jaxscale.kernels.attention.xla import (
    MaskSpec,
    as_mask_spec,
    attention_logit_bound,
    attention_logit_max,
    visible_pairs,
)

B, T, S, N, K, H = 2, 13, 9, 4, 2, 8
IDS_BT = np.array([[1] * 5 + [2] * 6 + [0] * 2, [1] * 13], np.int32)
PREFIX_BT = np.array([[1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0], [1] * 8 + [0] * 5], np.int32)
KEY_IDS_BS = np.array([[1] * 4 + [2] * 3 + [0] * 2, [1] * 9], np.int32)


def draw(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def whole(q_BTNH, k_BSKH, segments, *, window=None, causal=True, bias_NTS=None, scale=None):
    """From the table of all scores; hidden ones are those that the kernel hides."""
    scope = as_mask_spec(segments)
    k_BSNH = np.repeat(np.asarray(k_BSKH), N // K, axis=2)
    score_BNTS = np.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH) * (H**-0.5 if scale is None else scale)
    if bias_NTS is not None:
        score_BNTS = score_BNTS + np.asarray(bias_NTS)[None]
    seen_BTS = np.asarray(xla.attention_mask(scope, q_BTNH.shape[1], k_BSKH.shape[1], causal, window))
    seen_BTS = seen_BTS & np.asarray(scope.segment_ids_BT > 0)[:, :, None]
    return score_BNTS.max(where=seen_BTS[:, None], initial=-np.inf)


CASES = {
    "causal": (T, IDS_BT, {}),
    "window": (T, IDS_BT, dict(window=3)),
    "both directions": (T, IDS_BT, dict(causal=False)),
    "prefix": (T, MaskSpec(IDS_BT, PREFIX_BT), {}),
    "another row": (S, MaskSpec(IDS_BT, key_segment_ids_BS=KEY_IDS_BS), dict(causal=False, scale=1.0)),
    "bias": (T, IDS_BT, dict(causal=False, scale=1.0, bias_NTS=3 * draw(N, T, T))),
}


@pytest.mark.slow
@pytest.mark.parametrize("block", [4, 256])
@pytest.mark.parametrize("case", CASES)
def test_the_largest_score_is_that_of_the_whole_table(case, block):
    length, segments, how = CASES[case]
    segments = jax.tree.map(jnp.asarray, segments)
    q_BTNH, k_BSKH = draw(B, T, N, H), draw(B, length, K, H)[::-1]
    hidden = q_BTNH.at[0, 11:].set(100.0)  # padding with enormous queries
    found = attention_logit_max(hidden, k_BSKH, segments, block=block, **how)
    np.testing.assert_allclose(found, whole(hidden, k_BSKH, segments, **how), rtol=1e-6)
    assert found < 50
    if "bias" not in case:
        bound = attention_logit_bound(hidden, k_BSKH, segments, **how)
        assert found < bound < 50


def test_the_bound_is_the_longest_query_times_the_longest_key_of_a_head():
    q_BTNH, k_BSKH = draw(1, T, 1, H), draw(1, S, 1, H)
    lengths = [np.linalg.norm(np.asarray(x)[0, :, 0], axis=-1).max() for x in (q_BTNH, k_BSKH)]
    scope = MaskSpec(jnp.ones((1, T), jnp.int32), key_segment_ids_BS=jnp.ones((1, S), jnp.int32))
    np.testing.assert_allclose(
        attention_logit_bound(q_BTNH, k_BSKH, scope), lengths[0] * lengths[1] / H**0.5, rtol=1e-6
    )


def test_a_bound_with_a_bias_is_refused():
    with pytest.raises(ValueError, match="the bound does not support an attention bias"):
        attention_logit_bound(draw(B, T, N, H), draw(B, T, K, H), jnp.asarray(IDS_BT), bias_NTS=draw(N, T, T))


def test_without_text_there_is_no_largest_score():
    nothing = jnp.zeros((B, T), jnp.int32)
    assert attention_logit_max(draw(B, T, N, H), draw(B, T, K, H), nothing) == -np.inf


def test_blocks_that_no_query_sees_are_not_visited():
    assert visible_pairs(13, 13, 4, 4, causal=True, window=None).tolist() == [
        [i, j] for i in range(4) for j in range(i + 1)
    ]
    assert visible_pairs(13, 13, 4, 4, causal=True, window=2).tolist() == [
        [0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]
    ]  # fmt: skip
    assert len(visible_pairs(13, 9, 4, 4, causal=False, window=None)) == 4 * 3
