"""cuDNN's packed attention but for its kernel: by what that is told, a plain kernel gives plain attention's values."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import assert_equal_to_plain

from jaxscale.kernels.attention import cudnn, resolve_attention
from jaxscale.kernels.attention.cudnn import CudnnCall, Kernel, document_numbers, find_spans
from jaxscale.kernels.config import AttentionNeeds


def plain_kernel(window=None):
    """What cuDNN promises of packed documents: it reads each at the place in memory that it is told, and leaves the
    rest of its results as they were, here nan. D: the documents of a round."""

    def lay_out(q, k, spans):
        """(arrays to documents [D, T, N, H], documents to arrays, seen by whom [D, 1, T, T])"""
        call = CudnnCall(*q.shape, dtype=q.dtype, documents=spans.lengths_BC.shape[1], window=window)
        lengths, _, *places = (
            place.reshape(-1)[: spans.lengths_BC.size] for place in call.lengths_and_offsets(spans, k)
        )
        own_T, K = np.arange(call.T), k.shape[2]
        kept_DT = own_T[None] < lengths[:, None]
        token_DT = {n: place[:, None] // (n * call.H) + own_T[None] for n, place in zip((K, call.N), reversed(places))}
        spread = lambda x_DTKH: jnp.repeat(x_DTKH, call.N // x_DTKH.shape[2], axis=2)

        def take(x):
            flat, at = x.reshape(-1, *x.shape[2:]), jnp.where(kept_DT, token_DT[x.shape[2]], q.size)
            return spread(flat.at[at].get(mode="fill", fill_value=0))

        def put(x_DTNH, heads):
            x_DTKH = x_DTNH.reshape(*x_DTNH.shape[:2], heads, -1, call.H).sum(3)
            flat = jnp.full((call.B * call.T, heads, call.H), jnp.nan, q.dtype)
            flat = flat.at[jnp.where(kept_DT, token_DT[heads], q.size)].set(x_DTKH, mode="drop")
            return flat.reshape(call.B, call.T, heads, call.H)

        behind_TT = own_T[:, None] - own_T[None, :]
        near_TT = (behind_TT >= 0) & (behind_TT < (window or call.T))
        return take, put, (near_TT[None] & kept_DT[:, :, None] & kept_DT[:, None, :])[:, None]

    def scores(q, k, seen, take):
        return jnp.where(seen, jnp.einsum("dtnh,dsnh->dnts", take(q), take(k)) * q.shape[-1] ** -0.5, -jnp.inf)

    def forward(q, k, v, spans):
        take, put, seen = lay_out(q, k, spans)
        score = scores(q, k, seen, take)
        statistics = jax.scipy.special.logsumexp(score, axis=-1)
        share = jnp.where(seen, jnp.exp(score - statistics[..., None]), 0)
        return put(jnp.einsum("dnts,dsnh->dtnh", share, take(v)), q.shape[2]), statistics

    def backward(q, k, v, spans, out, statistics, dout):
        take, put, seen = lay_out(q, k, spans)
        share = jnp.where(seen, jnp.exp(scores(q, k, seen, take) - statistics[..., None]), 0)
        drift = jnp.einsum("dtnh,dtnh->dnt", take(dout), take(out))[..., None]
        draw = share * (jnp.einsum("dtnh,dsnh->dnts", take(dout), take(v)) - drift) * q.shape[-1] ** -0.5
        return (
            put(jnp.einsum("dnts,dsnh->dtnh", draw, take(k)), q.shape[2]),
            put(jnp.einsum("dnts,dtnh->dsnh", draw, take(q)), k.shape[2]),
            put(jnp.einsum("dnts,dtnh->dsnh", share, take(dout)), k.shape[2]),
        )

    return Kernel(forward, backward)


def draw_inputs(ids_BT, N=4, K=2, H=8):
    ids_BT = jnp.asarray(ids_BT, jnp.int32)
    random, (B, T) = np.random.default_rng(0), ids_BT.shape
    draw = lambda heads: jnp.asarray(random.standard_normal((B, T, heads, H)), jnp.float32)
    return draw(N), draw(K), draw(K), ids_BT, draw(N)


ROWS = [[1] * 5 + [2] * 1 + [3] * 4 + [0] * 2, [1] * 2 + [2] * 10]  # 4 documents, the last of them padding, and 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "documents"),
    [(None, 3), (3, 1), *[pytest.param(*case, marks=pytest.mark.soak) for case in ((None, 1), (3, 3))]],
)
def test_packed_attention_is_plain_attention_also_of_rows_with_more_documents_than_a_round_holds(documents, window):
    attend = cudnn.make_packed_attend(window=window, kernel=plain_kernel(window), documents=documents)
    assert_equal_to_plain(attend, draw_inputs(ROWS), window=window)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=3), st.integers(1, 4))
def test_the_rounds_name_every_document_once_in_the_order_of_memory(ids, documents):
    B, numbers = len(ids), document_numbers(jnp.asarray(ids, jnp.int32))
    right = []  # (first token over all rows, tokens) of each run of one number
    for row, values in enumerate(ids):
        runs = [len(list(run)) for _, run in itertools.groupby(values)]
        right += [(row * 7 + sum(runs[:place]), run) for place, run in enumerate(runs)]
    room, found = B * documents, []
    for number in range(-(-len(right) // room)):
        spans = find_spans(numbers, number, documents)
        lengths, begins = np.asarray(spans.lengths_BC).ravel(), np.asarray(spans.begins_BC).ravel()
        assert spans.lengths_BC.shape == (B, documents) and spans.begins_BC.shape == (B, documents + 1)
        found += [(begin, length) for begin, length in zip(begins, lengths)]
        assert (np.diff(begins[: room + 1]) == lengths).all()  # each ends where the next begins
    assert found[: len(right)] == right
    assert all(length == 0 and begin == B * 7 for begin, length in found[len(right) :])


@pytest.mark.parametrize(("rows", "calls"), [(15, 1), (16, 2), (45, 4)])
def test_more_numbers_than_the_kernel_counts_are_taken_in_parts(rows, calls):
    shapes = [jax.ShapeDtypeStruct((rows, 32_768, heads, 128), jnp.bfloat16) for heads in (32, 8, 8)]
    trace = str(jax.make_jaxpr(cudnn.make_packed_attend())(*shapes, jax.ShapeDtypeStruct((rows, 32_768), jnp.int32)))
    assert trace.count("target_name=__cudnn$fmhaSoftmax") == 2 * calls  # the second of each in further rounds


def test_a_row_with_more_numbers_than_the_kernel_counts_is_one_line_with_a_way_out():
    with pytest.raises(
        ValueError, match=r"fewer than 2\^31 elements .* not 524288 tokens .*; use a larger mesh.tensor"
    ):
        CudnnCall(1, 524_288, 32, 128, dtype=jnp.bfloat16, documents=16, window=None)


def test_hopper_and_newer_read_packed_documents_and_older_cards_a_bias():
    class Card:
        def __init__(self, compute_capability):
            self.compute_capability = compute_capability
            self.device_kind = "a card"

    needs = AttentionNeeds(head_dim=128, dtype="bfloat16")
    inputs = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in draw_inputs(ROWS, H=128)]
    inputs[3] = jax.ShapeDtypeStruct((2, 12), jnp.int32)
    for capability in ("9.0", "10.0"):
        attend = resolve_attention("auto", "gpu", needs, Card(capability))[0]
        trace = str(jax.make_jaxpr(attend)(*inputs[:4]))
        assert "__cudnn$fmhaSoftmax" in trace and "2,1,12,12" not in trace
    older = [resolve_attention("auto", "gpu", needs, card)[0] for card in (Card("8.0"), Card("8.9"), None)]
    assert all(attend.__qualname__.startswith("make_masked_attend") for attend in older)
