"""What a query may see beside its own past: a prefix, a whole document, another row; and which kernels can do it.

B batch  T query position  S key position  N heads  H head dim
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels.attention import resolve_attention, xla
from jaxscale.kernels.attention.xla import MaskSpec
from jaxscale.kernels.config import AttentionNeeds

B, T, S, N, K, H = 2, 9, 7, 4, 2, 8
IDS_BT = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 2, 2, 3, 3, 3, 3]], np.int32)
IDS_BS = np.array([[1, 1, 2, 2, 2, 2, 0], [1, 2, 2, 2, 3, 3, 3]], np.int32)
PREFIX_BT = np.array([[1, 1, 0, 0, 1, 1, 1, 0, 0], [1, 0, 0, 1, 1, 1, 1, 1, 0]], np.int32)


def arrays(keys, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return draw(B, T, N, H), draw(B, keys, K, H), draw(B, keys, K, H)


def by_hand(q, k, v, seen_BTS, bias_NTS=0.0, scale=H**-0.5):
    """Attention over exactly these pairs, from its definition, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    score = np.einsum("BTNH,BSNH->BNTS", q, k) * scale + bias_NTS
    share = np.where(seen_BTS[:, None], np.exp(score - score.max(axis=-1, keepdims=True)), 0)
    return np.einsum("BNTS,BSNH->BTNH", share / share.sum(axis=-1, keepdims=True), v)


def test_a_prefix_is_seen_by_all_of_its_document_and_by_no_other():
    same = IDS_BT[:, :, None] == IDS_BT[:, None, :]
    seen = same & (np.tri(T, dtype=bool)[None] | (PREFIX_BT[:, None, :] > 0))
    inputs = arrays(T)
    np.testing.assert_allclose(
        xla.make_attend()(*inputs, MaskSpec(IDS_BT, PREFIX_BT)), by_hand(*inputs, seen), rtol=1e-4, atol=1e-5
    )


def test_without_a_prefix_a_scope_is_plain_causal_attention():
    inputs = arrays(T)
    plain = xla.make_attend()(*inputs, jnp.asarray(IDS_BT))
    for prefix_BT in (None, np.zeros_like(IDS_BT)):
        np.testing.assert_array_equal(xla.make_attend()(*inputs, MaskSpec(jnp.asarray(IDS_BT), prefix_BT)), plain)


def test_in_both_directions_a_query_sees_its_whole_document():
    inputs = arrays(T)
    out = xla.make_attend()(*inputs, jnp.asarray(IDS_BT), causal=False)
    np.testing.assert_allclose(out, by_hand(*inputs, IDS_BT[:, :, None] == IDS_BT[:, None, :]), rtol=1e-4, atol=1e-5)


def test_across_rows_a_query_sees_the_keys_of_its_own_document():
    inputs, seen = arrays(S), IDS_BT[:, :, None] == IDS_BS[:, None, :]
    out = xla.make_attend()(*inputs, MaskSpec(IDS_BT, key_segment_ids_BS=IDS_BS), causal=False)
    np.testing.assert_allclose(out, by_hand(*inputs, seen), rtol=1e-4, atol=1e-5)


def test_across_rows_a_query_without_any_key_gets_nothing():
    nobody_BS = np.where(IDS_BS == 2, 7, IDS_BS)
    out = np.asarray(xla.make_attend()(*arrays(S), MaskSpec(IDS_BT, key_segment_ids_BS=nobody_BS), causal=False))
    assert not out[IDS_BT == 2].any() and out[IDS_BT != 2].all()


@pytest.mark.parametrize("scale", [1.0, 0.3, None])
def test_a_bias_is_added_to_the_scores_of_each_head(scale):
    inputs, bias_NTS = arrays(T), np.random.default_rng(1).normal(size=(N, T, T)).astype(np.float32)
    same = IDS_BT[:, :, None] == IDS_BT[:, None, :]
    out = xla.make_attend()(*inputs, jnp.asarray(IDS_BT), bias_NTS=jnp.asarray(bias_NTS), scale=scale)
    exact = by_hand(*inputs, same & np.tri(T, dtype=bool)[None], bias_NTS, H**-0.5 if scale is None else scale)
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-5)


WANTED = {"prefix": "a bidirectional prefix", "bidirectional": "bidirectional attention", "bias": "bias"}


@pytest.mark.parametrize("need", WANTED)
@pytest.mark.parametrize(("platform", "best"), [("cpu", "blockwise"), ("gpu", "cudnn"), ("tpu", "splash")])
def test_a_kernel_that_cannot_is_an_error_and_auto_says_why_it_took_another(platform, best, need):
    needs = AttentionNeeds(head_dim=64, dtype="bfloat16", **{need: True})
    attend, (_, name, why) = resolve_attention("auto", platform, needs)
    if name == best:
        pytest.skip(f"{best} can")
    assert name == "xla" and best in why and WANTED[need] in why
    with pytest.raises(ValueError, match=best):
        resolve_attention(best, platform, needs)
    assert resolve_attention("xla", platform, needs)[1] == ("xla", "xla", "")


@pytest.mark.slow
def test_gradients_of_a_biased_score_reach_the_bias():
    inputs, bias_NTS = arrays(T), jnp.zeros((N, T, T))
    loss = lambda bias: jnp.sum(jnp.sin(xla.make_attend()(*inputs, jnp.asarray(IDS_BT), causal=False, bias_NTS=bias)))
    moved = jax.grad(loss)(bias_NTS)
    same = IDS_BT[:, :, None] == IDS_BT[:, None, :]
    assert not np.asarray(moved)[:, ~same.any(axis=0)].any() and np.abs(moved).max() > 1e-3
