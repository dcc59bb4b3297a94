"""Every form of attention promises the values and gradients of plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels.attention import blockwise, flash, resolve_attention, splash, unsupported_reason, xla
from jaxscale.kernels.config import ATTENTION_OUT, AttentionNeeds

SHAPES = {  # B, T, N, K, H, block
    "one block": (2, 16, 2, 2, 8, 16),
    "several blocks": (2, 64, 2, 2, 8, 16),
    "a shorter last block": (3, 37, 2, 2, 8, 16),
    "grouped heads": (2, 40, 6, 2, 8, 16),
    "one key-value head": (2, 33, 4, 1, 8, 16),
    "a single position": (1, 1, 2, 2, 8, 16),
}


def make_inputs(shape, dtype=jnp.float32, num_segments=3, value_dim=None):
    B, T, N, K, H, _ = shape
    V = value_dim or H
    random = np.random.default_rng(0)
    draw = lambda *size: jnp.asarray(random.standard_normal(size), dtype)
    segment_ids_BT = jnp.asarray(np.sort(random.integers(0, num_segments, (B, T)), axis=1), jnp.int32)
    return draw(B, T, N, H), draw(B, T, K, H), draw(B, T, K, V), segment_ids_BT, draw(B, T, N, V)


def value_and_gradients(attend, q, k, v, segment_ids_BT, dout):
    """(out, dq, dk, dv), float32 on the host."""

    def run(q, k, v, dout):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, segment_ids_BT), q, k, v)
        return out, *pull(dout)

    return [np.asarray(array.astype(jnp.float32)) for array in jax.jit(run)(q, k, v, dout)]


def assert_equal_to_plain(attend, inputs, **settings):
    """Fails unless value and gradients are plain attention's; gives plain attention's."""
    plain = value_and_gradients(xla.make_attend(**settings), *inputs)
    for got, right in zip(value_and_gradients(attend, *inputs), plain):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)  # float32 sums taken in another order
    return plain


BLOCKWISE = {
    "blockwise": lambda block, **settings: blockwise.make_attend(block_size=block, **settings),
    "long": lambda block, **settings: flash.make_attend(block=block, **settings),
}


# Whose blocks another shape has too: a single position in one, grouped heads in whole ones and a shorter one.
TWICE = ("one block", "several blocks", "a shorter last block")
CASES = [pytest.param(name, marks=pytest.mark.soak) if name in TWICE else name for name in SHAPES]


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", BLOCKWISE)
@pytest.mark.parametrize("name", CASES)
def test_attention_in_blocks_equals_plain_attention(name, form):
    assert_equal_to_plain(BLOCKWISE[form](SHAPES[name][-1]), make_inputs(SHAPES[name]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", BLOCKWISE)
def test_attention_in_blocks_caps_scores_as_plain_attention_does(form):
    shape = SHAPES["grouped heads"]
    inputs = make_inputs(shape)
    capped = assert_equal_to_plain(BLOCKWISE[form](shape[-1], softcap=2.0), inputs, softcap=2.0)
    assert np.abs(capped[0] - value_and_gradients(xla.make_attend(), *inputs)[0]).max() > 1e-3  # the cap did something


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", BLOCKWISE)
@pytest.mark.parametrize("window", [5, pytest.param(17, marks=pytest.mark.soak)])
def test_attention_in_blocks_sees_the_window_that_plain_attention_sees(window, form):
    shape = SHAPES["grouped heads"]
    assert_equal_to_plain(BLOCKWISE[form](shape[-1], window=window), make_inputs(shape), window=window)


def test_attention_for_long_rows_visits_only_blocks_that_see_each_other():
    walk = lambda window: flash.visible_pairs(64, 16, window).tolist()
    assert walk(None) == [[i, j] for i in range(4) for j in range(i + 1)]
    assert walk(1) == [[i, i] for i in range(4)]
    assert walk(17) == walk(2) == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]
    assert [2, 0] in walk(18)


@pytest.mark.slow
def test_attention_for_long_rows_needs_memory_in_proportion_to_the_row():
    attend = flash.make_attend(block=32)

    def temporaries(T):
        q, k, v, ids, dout = make_inputs((1, T, 2, 1, 8, 0))
        run = jax.jit(lambda q, k, v, dout: jax.vjp(lambda *qkv: attend(*qkv, ids), q, k, v)[1](dout))
        return run.lower(q, k, v, dout).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(1024) < 2.2 * temporaries(512)  # scores of all pairs would be 4 times as many


@pytest.mark.parametrize(
    "shape, settings",
    [
        pytest.param((2, 256, 2, 2, 16, 0), {}, marks=pytest.mark.soak),
        ((1, 200, 4, 2, 16, 0), {"window": 70, "softcap": 2.0}),  # filled up to whole blocks; grouped heads
    ],
    ids=["whole blocks", "window, softcap, groups, a shorter row"],
)
def test_splash_attention_equals_plain_attention(shape, settings):
    inputs = make_inputs(shape)
    blocks = splash.Blocks((128, 128), (256, 128), (128, 256))  # several, some of them wholly hidden
    got = value_and_gradients(splash.make_attend(**settings, blocks=blocks, interpret=True), *inputs)
    for one, right in zip(got, value_and_gradients(xla.make_attend(**settings), *inputs)):
        np.testing.assert_allclose(one, right, rtol=1e-5, atol=2e-5)  # float32 sums taken in another order


@pytest.mark.slow
@pytest.mark.parametrize("form", ["blockwise", "long", "splash", "cudnn"])
def test_values_may_have_another_size_than_keys(form):
    if form == "cudnn":
        assert "cudnn needs values and keys with the same head_dim" in unsupported_reason(
            form, AttentionNeeds(head_dim=8, dtype="bfloat16", value_dim=16), None
        )
        return
    shape = (1, 200, 2, 2, 24, 0) if form == "splash" else SHAPES["grouped heads"]
    attend = splash.make_attend(interpret=True) if form == "splash" else BLOCKWISE[form](16)
    for value_dim in (16,) if form == "splash" else (16, 40):  # its wider ones: test_context_parallel.py
        inputs = make_inputs(shape, value_dim=value_dim)
        out_BTNV, *_ = plain = value_and_gradients(xla.make_attend(), *inputs)
        q_BTNH, k_BSKH, v_BSKV, ids_BT, _ = inputs  # values are weighted number by number
        plainly = jax.jit(xla.make_attend())
        halves = [plainly(q_BTNH, k_BSKH, part, ids_BT) for part in jnp.split(v_BSKV, 2, axis=-1)]
        np.testing.assert_allclose(out_BTNV, jnp.concatenate(halves, axis=-1), rtol=1e-6, atol=1e-6)
        for got, right in zip(value_and_gradients(attend, *inputs), plain, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=2e-5)  # float32 sums taken in another order


def test_a_window_of_plain_attention_is_the_newest_keys_and_no_more():
    q, k, v, _, _ = make_inputs((1, 12, 2, 2, 8, 8))
    one_BT = jnp.ones((1, 12), jnp.int32)
    out = np.asarray(xla.make_attend(window=4)(q, k, v, one_BT))
    moved = np.asarray(xla.make_attend(window=4)(q, k.at[:, 3].add(3.0), v.at[:, 3].add(3.0), one_BT))
    assert (np.abs(moved - out).max(axis=(0, 2, 3)) > 0).tolist() == [False] * 3 + [True] * 4 + [False] * 5
    np.testing.assert_array_equal(xla.make_attend(window=12)(q, k, v, one_BT), xla.make_attend()(q, k, v, one_BT))


def narrow_and_wide(shape):
    """Inputs in bfloat16, and the same values in float32."""
    narrow = make_inputs(shape, jnp.bfloat16)
    return narrow, [array if array.dtype == jnp.int32 else array.astype(jnp.float32) for array in narrow]


FORMS = {
    "blockwise": (SHAPES["grouped heads"], blockwise.make_attend(block_size=16)),
    "long": (SHAPES["grouped heads"], flash.make_attend(block=16)),
    "splash": ((1, 128, 4, 2, 128, 0), splash.make_attend(interpret=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_attention_in_bfloat16_is_as_near_to_float32_as_plain_attention(form):
    shape, attend = FORMS[form]
    narrow, wide = narrow_and_wide(shape)
    exact = value_and_gradients(xla.make_attend(), *wide)
    got = value_and_gradients(attend, *narrow)
    plain = value_and_gradients(xla.make_attend(), *narrow)
    for exact_one, got_one, plain_one in zip(exact, got, plain):
        scale = np.abs(exact_one).max()
        # All round probabilities, score gradients and results to 8 bits: a few units in the last place of the largest.
        assert np.abs(got_one - exact_one).max() < 2**-6 * scale
        assert np.sqrt(np.mean((got_one - exact_one) ** 2)) < 1.5 * np.sqrt(np.mean((plain_one - exact_one) ** 2))


@pytest.mark.parametrize(
    "attend",
    [xla.make_attend(), blockwise.make_attend(block_size=8), flash.make_attend(block=8)],
    ids=["xla", "blockwise", "long"],
)
def test_no_position_sees_a_later_one_or_another_segment(attend):
    attend = jax.jit(attend)
    q, k, v, _, _ = make_inputs((1, 24, 2, 2, 8, 8))
    segment_ids_BT = jnp.asarray([[1] * 10 + [2] * 10 + [0] * 4], jnp.int32)
    out = np.asarray(attend(q, k, v, segment_ids_BT))
    moved = np.asarray(attend(q, k.at[:, 10:13].add(3.0), v.at[:, 10:13].add(3.0), segment_ids_BT))
    changed = np.abs(moved - out).max(axis=(0, 2, 3)) > 0
    np.testing.assert_array_equal(changed, [False] * 10 + [True] * 10 + [False] * 4)
    later = np.asarray(attend(q, k.at[:, 15:].add(3.0), v.at[:, 15:].add(3.0), segment_ids_BT))
    np.testing.assert_array_equal(later[:, :15], out[:, :15])


def test_attention_of_one_key_returns_its_value():
    q, k, v, _, _ = make_inputs((1, 4, 2, 2, 8, 8))
    alone_BT = jnp.arange(4, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(xla.make_attend()(q, k, v, alone_BT), v)


@pytest.mark.parametrize(("heads", "length", "together"), [(4, 256, 3), (2, 256, 6), (8, 512, 1)])
def test_rows_are_taken_together_as_long_as_their_scores_stay_in_the_cache(heads, length, together):
    seen = []

    def double(x_BKTGH):
        seen.append(len(x_BKTGH))
        return 2 * x_BKTGH

    x_BKTGH = jnp.arange(6 * heads * length, dtype=jnp.float32).reshape(6, heads, length, 1, 1)
    np.testing.assert_array_equal(blockwise.map_batch_chunks(double, 128, x_BKTGH), 2 * x_BKTGH)
    assert set(seen) == {together}


def test_long_rows_get_few_blocks_that_cover_every_position_once():
    for length in (1, 128, 129, 512, 1000, 4096, 5000):
        pieces = blockwise.block_ranges(length, blockwise.default_block(length))
        assert len(pieces) <= blockwise.MAX_BLOCKS
        assert [i for begin, end in pieces for i in range(begin, end)] == list(range(length))


def test_splash_pads_rows_little_and_never_cuts_them_into_small_blocks():
    for length in (1, 128, 129, 512, 1000, 1152, 4096, 4097, 5000, 32768):
        padded = splash.padded_length(length)
        block = splash.block_size(padded, splash.DEFAULT_BLOCKS.fwd[0])
        assert length <= padded < length + 256 and padded % block == 0 and block % 128 == 0
        assert block >= min(256, padded)
    assert splash.padded_length(4096) == 4096 and splash.block_size(4096, 512) == 512


def test_a_chips_own_blocks_are_used_where_they_fit():
    v6e = splash.blocks_for("TPU v6 lite")
    assert splash.blocks_for("TPU v4") == splash.blocks_for(None) == splash.DEFAULT_BLOCKS != v6e
    sizes = lambda length, most, itemsize=2, head_dim=128, **more: splash.block_sizes(
        length, most, itemsize, head_dim, **more
    )
    chosen = sizes(4096, v6e)
    assert (chosen.block_q, chosen.block_kv, chosen.block_q_dkv, chosen.block_kv_dkv) == (1024, 512, 1024, 1024)
    any_chips = sizes(4096, splash.DEFAULT_BLOCKS)
    assert sizes(4096, v6e, itemsize=4) == sizes(4096, v6e, head_dim=256) == any_chips  # they would not fit
    assert sizes(4096, v6e, window=2048) == any_chips  # most of a large block would be hidden
    assert sizes(2048, v6e) == sizes(2048, splash.DEFAULT_BLOCKS)


def needs(**settings):
    return AttentionNeeds(**{"head_dim": 128, "dtype": "bfloat16"} | settings)


@pytest.mark.parametrize(
    "platform, asked, chosen",
    [
        ("cpu", needs(dtype="float32", softcap=3.0, window=9), ("blockwise", "")),
        ("tpu", needs(softcap=3.0, window=9), ("splash", "")),
        ("tpu", needs(dtype="float32", head_dim=80), ("splash", "")),
        ("tpu", needs(dtype="float16"), ("xla", "splash supports bfloat16 or float32, not float16")),
        ("gpu", needs(window=9), ("cudnn", "")),
        ("gpu", needs(dtype="float16", head_dim=64), ("cudnn", "")),
        ("gpu", needs(dtype="float32"), ("xla", "cudnn supports bfloat16 or float16, not float32")),
        ("gpu", needs(softcap=3.0), ("xla", "cudnn does not support softcap")),
        (
            "gpu",
            needs(head_dim=256),
            ("xla", "cudnn needs a head_dim that is a multiple of 8 and at most 128, not 256"),
        ),
        ("gpu", needs(head_dim=4), ("xla", "cudnn needs a head_dim that is a multiple of 8 and at most 128, not 4")),
    ],
)
def test_auto_attention_is_the_platforms_own_and_says_why_when_it_is_not(platform, asked, chosen):
    assert resolve_attention("auto", platform, asked)[1] == ("auto", *chosen)


def test_auto_attention_leaves_cards_older_than_ampere_without_cudnn():
    class Card:
        def __init__(self, compute_capability):
            self.compute_capability = compute_capability

    told = "cudnn needs compute capability 8.0 (Ampere), but this GPU has 7.5"
    assert unsupported_reason("cudnn", needs(dtype="float16"), Card("7.5")) == told
    assert [unsupported_reason("cudnn", needs(), Card(text)) for text in ("8.0", "9.0", "10.0")] == [""] * 3


@pytest.mark.parametrize(
    "name, platform, dtype, words",
    [
        ("splash", "cpu", "bfloat16", "needs TPUs, not cpu; use 'auto' or 'xla'"),
        ("cudnn", "tpu", "bfloat16", "needs NVIDIA GPUs, not tpu"),
        ("splash", "tpu", "float16", "not float16; use 'auto' or 'xla'"),
        ("cudnn", "gpu", "float32", "not float32; use 'auto' or 'xla'"),
        ("flash", "cpu", "bfloat16", "model.attention=.flash. is unknown; use auto, xla, splash, cudnn or blockwise"),
    ],
)
def test_an_attention_that_the_platform_lacks_is_an_error_with_a_way_out(name, platform, dtype, words):
    with pytest.raises(ValueError, match=words) as error:
        resolve_attention(name, platform, needs(dtype=dtype))
    assert name in str(error.value) and "\n" not in str(error.value)


def test_blockwise_attention_takes_the_form_that_is_linear_in_memory_for_long_rows():
    traced = lambda platform, T: str(
        jax.make_jaxpr(resolve_attention("blockwise", platform, needs())[0])(*make_inputs((1, T, 2, 2, 8, 0))[:4])
    )
    assert "dynamic_update_slice" not in traced("cpu", 1024)
    assert "dynamic_update_slice" in traced("cpu", 1025) and "dynamic_update_slice" in traced("tpu", 64)


def forward_passes(attend, policy):
    """How often the backward pass of a checkpointed layer runs attention's softmax again: exponentials in its trace."""
    q, k, v, ids, dout = make_inputs((1, 16, 2, 2, 8, 16))
    layer = jax.checkpoint(lambda q, k, v: jnp.sin(attend(q, k, v, ids)), policy=policy)
    pull = jax.vjp(layer, q, k, v)[1]
    return str(jax.make_jaxpr(pull)(dout)).count(" exp ")


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", BLOCKWISE)
def test_a_remat_policy_that_keeps_attentions_result_runs_it_once(form):
    attend = BLOCKWISE[form](16)
    kept = forward_passes(attend, jax.checkpoint_policies.save_only_these_names(ATTENTION_OUT))
    again = forward_passes(attend, jax.checkpoint_policies.nothing_saveable)
    assert kept < again
