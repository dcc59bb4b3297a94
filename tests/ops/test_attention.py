"""Blockwise attention promises the values and gradients of plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.attention import blockwise, choose_attention, xla

SHAPES = {  # B, T, N, K, H, block
    "one block": (2, 16, 2, 2, 8, 16),
    "several blocks": (2, 64, 2, 2, 8, 16),
    "a shorter last block": (3, 37, 2, 2, 8, 16),
    "grouped heads": (2, 40, 6, 2, 8, 16),
    "one key-value head": (2, 33, 4, 1, 8, 16),
    "a single position": (1, 1, 2, 2, 8, 16),
}


def make_inputs(shape, dtype=jnp.float32, num_segments=3):
    B, T, N, K, H, _ = shape
    random = np.random.default_rng(0)
    draw = lambda *size: jnp.asarray(random.standard_normal(size), dtype)
    segment_ids_BT = jnp.asarray(np.sort(random.integers(0, num_segments, (B, T)), axis=1), jnp.int32)
    return draw(B, T, N, H), draw(B, T, K, H), draw(B, T, K, H), segment_ids_BT, draw(B, T, N, H)


def value_and_gradients(attend, q, k, v, segment_ids_BT, dout):
    """(out, dq, dk, dv), float32 on the host."""

    def run(q, k, v, dout):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, segment_ids_BT), q, k, v)
        return out, *pull(dout)

    return [np.asarray(array.astype(jnp.float32)) for array in jax.jit(run)(q, k, v, dout)]


@pytest.mark.parametrize("rows_apart", [True, False], ids=["row by row", "rows together"])
@pytest.mark.parametrize("name", SHAPES)
def test_blockwise_attention_equals_plain_attention(name, rows_apart):
    inputs = make_inputs(SHAPES[name])
    attend = blockwise.make_attend(block_size=SHAPES[name][-1], rows_apart=rows_apart)
    for got, plain in zip(value_and_gradients(attend, *inputs), value_and_gradients(xla.attend, *inputs)):
        np.testing.assert_allclose(got, plain, rtol=1e-5, atol=1e-5)  # float32 sums taken in another order


def test_blockwise_attention_caps_scores_as_plain_attention_does():
    shape = SHAPES["grouped heads"]
    inputs = make_inputs(shape)
    attend = blockwise.make_attend(softcap=2.0, block_size=shape[-1])
    capped = value_and_gradients(xla.make_attend(softcap=2.0), *inputs)
    for got, plain in zip(value_and_gradients(attend, *inputs), capped):
        np.testing.assert_allclose(got, plain, rtol=1e-5, atol=1e-5)
    assert np.abs(capped[0] - value_and_gradients(xla.attend, *inputs)[0]).max() > 1e-3  # the cap did something


def test_blockwise_attention_in_bfloat16_is_as_near_to_float32_as_plain_attention():
    shape = SHAPES["grouped heads"]
    narrow = make_inputs(shape, jnp.bfloat16)
    wide = [array if array.dtype == jnp.int32 else array.astype(jnp.float32) for array in narrow]
    exact = value_and_gradients(xla.attend, *wide)
    got = value_and_gradients(blockwise.make_attend(block_size=shape[-1]), *narrow)
    plain = value_and_gradients(xla.attend, *narrow)
    for exact_one, got_one, plain_one in zip(exact, got, plain):
        scale = np.abs(exact_one).max()
        # Both round probabilities, score gradients and results to 8 bits: a few units in the last place of the largest.
        assert np.abs(got_one - exact_one).max() < 2**-6 * scale
        assert np.sqrt(np.mean((got_one - exact_one) ** 2)) < 1.5 * np.sqrt(np.mean((plain_one - exact_one) ** 2))


@pytest.mark.parametrize("attend", [xla.attend, blockwise.make_attend(block_size=8)], ids=["xla", "blockwise"])
def test_no_position_sees_a_later_one_or_another_segment(attend):
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
    np.testing.assert_array_equal(xla.attend(q, k, v, alone_BT), v)


def test_long_rows_get_few_blocks_that_cover_every_position_once():
    for length in (1, 128, 129, 512, 1000, 4096, 5000):
        pieces = blockwise.blocks(length, blockwise.default_block(length))
        assert len(pieces) <= blockwise.MOST_BLOCKS
        assert [i for begin, end in pieces for i in range(begin, end)] == list(range(length))


def test_auto_attention_is_blockwise_on_a_cpu_and_xla_elsewhere():
    assert [choose_attention("auto", platform)[1] for platform in ("cpu", "gpu", "tpu")] == ["blockwise", "xla", "xla"]
    assert choose_attention("xla", "cpu")[1] == "xla"


@pytest.mark.parametrize("name, platform, words", [("blockwise", "tpu", "use 'auto'"), ("flash", "cpu", "not known")])
def test_an_attention_that_the_platform_lacks_is_an_error_with_a_way_out(name, platform, words):
    with pytest.raises(ValueError, match=words) as error:
        choose_attention(name, platform)
    assert name in str(error.value) and "\n" not in str(error.value)
