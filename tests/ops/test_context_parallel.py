"""Devices that share a row attend as one device does, whichever way they meet each other's keys.

B batch  T position  N query heads  K key-value heads  H head dim
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from twins import twins

from jaxscale.core.axes.context_axis import ContextAxis, make_context_axis
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.kernels.attention import context_parallel, flash, ring_flash, ring_splash, splash, xla
from jaxscale.kernels.attention.context_parallel import ContextLoad, resolve_context_exchange
from jaxscale.kernels.attention.xla import attention_logit_bound, attention_logit_max
from jaxscale.kernels.config import AttentionNeeds, WindowLayers
from jaxscale.system.exits import BadInput


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(flash, "BLOCK", 8)
    monkeypatch.setattr(context_parallel, "MIN_BLOCK", 2)


def make_inputs(B, T, N, K, H, V=None, num_segments=3):
    random = np.random.default_rng(0)
    draw = lambda *size: random.standard_normal(size).astype(np.float32)
    ids_BT = np.sort(random.integers(0, num_segments, (B, T)), axis=1).astype(np.int32)
    V = V or H
    return draw(B, T, N, H), draw(B, T, K, H), draw(B, T, K, V), ids_BT, draw(B, T, N, V)


def value_and_gradients(attend, q, k, v, ids, dout):
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)
    return out, *pull(dout)


def on_devices(f, size, arrays, *, zigzag=True):
    """f(context, *own positions of arrays) on devices that share rows: whole rows of what it returns."""
    mesh = make_mesh(MeshConfig(fsdp=1, context=size), jax.devices()[:size])
    context = make_context_axis(mesh, zigzag=zigzag)
    run = lambda *arrays: context.all_gather(f(context, *context.local(arrays)))
    shared = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(shared)(*arrays))


def plain(inputs, **how):
    return jax.tree.map(np.asarray, jax.jit(functools.partial(value_and_gradients, xla.make_attend(**how)))(*inputs))


FORMS = {
    "gather, plain": lambda context, **how: context_parallel.all_gather_kv(
        context_parallel.make_xla_positioned(**how), context
    ),
    "gather, blocks": lambda context, **how: context_parallel.all_gather_kv(
        flash.make_positioned_attend(**how), context
    ),
    "neighbours, plain": lambda context, **how: near(context_parallel.make_xla_positioned(**how), context, **how),
    "neighbours, blocks": lambda context, **how: near(flash.make_positioned_attend(**how), context, **how),
    "ulysses": lambda context, **how: context_parallel.ulysses(xla.make_attend(**how), context),
    "ring": lambda context, **how: ring_flash.make_attend(**how, context=context),
}


def near(standing, context, *, window, softcap):
    return context_parallel.with_neighbour_chunks(standing, None, window, context)  # None: it must not be needed


CASES = {  # devices, (B, T, N, K, H, V of values), softcap, window
    "causal": (4, (2, 64, 8, 4, 8), None, None),
    "softcap, all devices": (8, (1, 64, 8, 8, 8, 12), 2.0, None),
    "a short window": (4, (1, 128, 8, 4, 8), None, 5),
    "a window of several chunks": (4, (1, 128, 4, 4, 8), 2.0, 40),
}
SLOW = {("gather, plain", "softcap, all devices"), ("ulysses", "a short window"), ("ulysses", "softcap, all devices")}
SLOW |= {("ring", "softcap, all devices"), ("ring", "a short window")}
SLOW |= {("neighbours, plain", "a short window"), ("gather, plain", "a short window")}
WAYS = [
    pytest.param(form, case, marks=[pytest.mark.soak] * ((form, case) in SLOW))
    for form in FORMS
    for case in CASES
    if "neighbours" not in form or case == "a short window"
]


@pytest.mark.cases(3)
@pytest.mark.parametrize("form, case", WAYS)
def test_values_and_gradients_are_those_of_one_device(form, case):
    size, shape, softcap, window = CASES[case]
    inputs, how = make_inputs(*shape), dict(softcap=softcap, window=window)
    f = lambda context, *own: value_and_gradients(FORMS[form](context, **how), *own)
    for got, right in zip(on_devices(f, size, inputs, zigzag=form != "ulysses"), plain(inputs, **how)):
        np.testing.assert_allclose(got, right, rtol=1e-6, atol=5e-6)  # float32 sums taken in another order


SPLASH = {  # (softcap, window)
    "gather": (2.0, None),
    "neighbours": (None, 150),
    "ring": (2.0, None),
    "ring, a window of several chunks": (None, 450),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", twins([*SPLASH], "neighbours"))
def test_splash_of_shared_rows_is_plain_attention(form):
    blocks = splash.Blocks((128, 256), (128, 128), (256, 128))
    softcap, window = SPLASH[form]
    how = dict(softcap=softcap, window=window)

    def f(context, *own):
        if "ring" in form:
            attend = ring_splash.make_attend(**how, blocks=blocks, context=context, interpret=True)
            return value_and_gradients(attend, *own)
        standing = splash.make_positioned_attend(**how, blocks=blocks, interpret=True)
        gathered = context_parallel.all_gather_kv(standing, context)
        attend = gathered if window is None else context_parallel.with_neighbour_chunks(standing, None, window, context)
        return value_and_gradients(attend, *own)

    inputs = make_inputs(1, 1600, 2, 1, 16, 24)  # chunks of 200 positions, which are filled up
    for got, right in zip(on_devices(f, 4, inputs), plain(inputs, **how)):
        np.testing.assert_allclose(got, right, rtol=1e-6, atol=5e-6)  # float32 sums taken in another order


@pytest.mark.soak
def test_a_splash_ring_is_no_further_from_the_truth_in_bfloat16_than_gathered_keys():
    inputs = make_inputs(1, 1024, 2, 1, 16)
    right, how = plain(inputs), dict(softcap=None, window=None, interpret=True)
    rounded = [x if x.dtype == np.int32 else jnp.bfloat16(x) for x in inputs]

    def errors(attend_on):
        f = lambda context, *own: value_and_gradients(attend_on(context), *own)
        off = [got.astype(np.float32) - exact for got, exact in zip(on_devices(f, 4, rounded), right)]
        return np.array([np.sqrt(np.mean(x**2)) for x in off])

    in_ring = errors(lambda context: ring_splash.make_attend(**how, context=context))
    gathered = errors(lambda context: context_parallel.all_gather_kv(splash.make_positioned_attend(**how), context))
    print(in_ring, gathered)
    assert (in_ring < 1.1 * gathered).all()


@pytest.mark.parametrize("length", [131_072, 1_048_576])
@pytest.mark.parametrize("size", [8, 64])
def test_splash_visits_as_many_blocks_on_each_device(size, length):
    chunk = length // (2 * size)
    sizes = splash.block_sizes(chunk, splash.BLOCKS["TPU v5"], 2, 128, keys=length)
    starts_Cc = ContextAxis(size).chunk_starts(chunk)
    for block_q, block_kv in ((sizes.block_q, sizes.block_kv), (sizes.block_q_dkv, sizes.block_kv_dkv)):
        spans = splash.key_block_ranges(starts_Cc, chunk, length, None, block_q, block_kv)
        tables = splash.by_queries(*spans), splash.by_keys(*spans, length // block_kv)
        for table in tables:
            counts_C = table.active.reshape(size, -1).sum(axis=1, dtype=np.int64)
            assert len(set(counts_C.tolist())) == 1
            pairs = counts_C[0] * size * block_q * block_kv
            assert 1 <= pairs / (length * (length + 1) / 2) < 1 + 2 * block_kv / chunk  # no more than the diagonal


def seen_blocks(starts_C, chunk, length, window, block_q, block_kv):
    """bool[blocks of queries, of keys] by looking at every pair of positions."""
    places = np.concatenate([start + np.arange(chunk) for start in starts_C])[:, None]
    behind = places - np.arange(length)[None]
    seen = (behind >= 0) & (behind < (window or np.inf))
    return seen.reshape(len(places) // block_q, block_q, length // block_kv, block_kv).any(axis=(1, 3))


@pytest.mark.parametrize("window", [None, 1, 9, 20])
@pytest.mark.parametrize("blocks", [(4, 8), (8, 4), (8, 8)])
@pytest.mark.parametrize("keys", [96, 16], ids=["a row", "a chunk"])
def test_tables_visit_the_blocks_that_hold_a_visible_pair_and_no_others(keys, blocks, window):
    starts_Cc = (
        ContextAxis(3).chunk_starts(16) if keys == 96 else np.arange(6)[:, None] * 16
    )  # of some the window hides all
    oldest, newest = splash.key_block_ranges(starts_Cc, 16, keys, window, *blocks)
    tables = splash.by_queries(oldest, newest), splash.by_keys(oldest, newest, keys // blocks[1])
    for device, starts_c in enumerate(starts_Cc):
        right = seen_blocks(starts_c, 16, keys, window, *blocks)
        found = np.zeros_like(right), np.zeros_like(right)
        for table, seen, axis in zip(tables, (found[0], found[1].T), (0, 1)):
            block, active = (np.moveaxis(x[device, 0], axis, 0) for x in table)
            for number, (others, there) in enumerate(zip(block, active)):
                assert len(set(others[there > 0])) == there.sum()
                assert (others >= 0).all() and (others < seen.shape[1]).all()
                seen[number, others[there > 0]] = True
        for one in found:
            np.testing.assert_array_equal(one, right)


def test_pairs_of_blocks_are_equally_many_on_each_device_and_in_each_step_of_the_ring():
    starts_Cc = ContextAxis(4).chunk_starts(16)
    pairs_CP2 = flash.positioned_block_pairs(starts_Cc, 16, 8, None)
    assert [len(set(map(tuple, pairs_P2))) for pairs_P2 in pairs_CP2.tolist()] == [pairs_CP2.shape[1]] * 4 == [34] * 4
    assert sum(len(pairs_P2) for pairs_P2 in pairs_CP2) == 16 * 17 // 2  # the whole triangle, once
    away_XP2, _ = ring_flash.ring_block_pairs(4, 16, 8, None, is_local=False)
    home_XP2, _ = ring_flash.ring_block_pairs(4, 16, 8, None, is_local=True)
    assert [len(set(map(tuple, table))) for table in away_XP2.tolist()] == [8, 8]  # two pairs of chunks, whole
    assert [len(set(map(tuple, table))) for table in home_XP2.tolist()] == [10]


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", ["gather, blocks", "ring", "ulysses"])
def test_one_documents_token_moves_no_other_document(form):
    q, k, v, ids, _ = make_inputs(1, 64, 4, 4, 8)
    ids = np.array([[1] * 20 + [2] * 25 + [3] * 19], np.int32)
    moved = [np.where((np.arange(64) == 30)[None, :, None, None], x + 3, x) for x in (q, k, v)]
    f = lambda context, q, k, v, ids: FORMS[form](context, softcap=None, window=None)(q, k, v, ids)
    outs = [on_devices(f, 4, (*qkv, ids), zigzag=form != "ulysses") for qkv in ((q, k, v), moved)]
    changed_T = (outs[0] != outs[1]).any(axis=(0, 2, 3))
    np.testing.assert_array_equal(changed_T, (np.arange(64) >= 30) & (np.arange(64) < 45))


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", ["gather, plain", "ulysses"])
def test_a_prefix_is_seen_by_its_document_on_other_devices_too(form):
    q, k, v, ids, _ = make_inputs(1, 32, 4, 4, 8)
    prefix = (np.arange(32) % 11 < 4).astype(np.int32)[None]

    def f(context, q, k, v, ids, prefix):
        return FORMS[form](context, softcap=None, window=None)(q, k, v, xla.MaskSpec(ids, prefix))

    got = on_devices(f, 4, (q, k, v, ids, prefix), zigzag=form != "ulysses")
    right = xla.make_attend()(q, k, v, xla.MaskSpec(ids, jnp.asarray(prefix)))
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)
    assert np.abs(got - np.asarray(xla.make_attend()(q, k, v, ids))).max() > 1e-2


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "largest", [functools.partial(attention_logit_max, window=9), attention_logit_bound], ids=["exact", "bound"]
)
def test_the_largest_score_is_that_of_one_device(largest):
    q, k, _, ids, _ = make_inputs(2, 64, 4, 2, 8)

    def f(context, q, k, ids):
        found = context_parallel.over_all_keys(largest, context)(q, k, ids)
        return jnp.broadcast_to(context.max(found), (1, q.shape[1]))

    np.testing.assert_allclose(on_devices(f, 4, (q, k, ids))[0, 0], largest(q, k, ids), rtol=1e-6)


NEEDS = AttentionNeeds(head_dim=128, dtype="bfloat16")
LONG = ContextLoad(devices=8, kv_heads=8, rows=1, row_length=1 << 20, memory_bytes=95 << 30)


@pytest.mark.parametrize(
    "wish, attention, needs, work, form, told",
    [
        ("auto", "splash", NEEDS, LONG._replace(devices=1), "", ""),
        ("auto", "splash", NEEDS, LONG, "gather", "need 8.0 GiB per device"),
        ("auto", "splash", NEEDS, LONG._replace(kv_heads=32), "ulysses", "32.0 GiB per device, more than 1/8"),
        (
            "auto",
            "splash",
            NEEDS,
            LONG._replace(kv_heads=4, in_pipeline=True, rows=8),
            "gather",
            "cannot be split over 8, and ring sends would wait",
        ),
        ("auto", "splash", NEEDS, LONG._replace(kv_heads=20), "ring", "20 key-value heads per device cannot"),
        ("auto", "splash", NEEDS, LONG._replace(devices=64), "gather", "need 8.0 GiB per device"),
        ("auto", "splash", NEEDS, LONG._replace(devices=64, memory_bytes=32 << 30), "ring", "1/8 of its 32.0 GiB"),
        ("auto", "cudnn", NEEDS, LONG, "ulysses", "cudnn needs whole sequences"),
        ("ring", "splash", NEEDS, LONG, "ring", "set by context.attention"),
        ("auto", "splash", NEEDS, LONG._replace(kv_heads=20, in_pipeline=True), "gather", "need 20.0 GiB per device"),
        ("auto", "splash", AttentionNeeds(head_dim=128, dtype="bfloat16", window=4096), LONG, "gather", "4095"),
        ("auto", "blockwise", NEEDS, LONG._replace(rows=None), "gather", "very long sequences"),
    ],
)
def test_the_rule_chooses_and_says_why(wish, attention, needs, work, form, told):
    sharing = resolve_context_exchange(wish, attention, needs, work)
    assert sharing.name == form and told in sharing.reason


@pytest.mark.parametrize(
    "wish, attention, needs, work, told",
    [
        (
            "ulysses",
            "splash",
            NEEDS,
            LONG._replace(kv_heads=4),
            "4 key-value heads per device cannot be split over 8",
        ),
        ("gather", "cudnn", NEEDS, LONG, "context.attention='gather' is not supported: cudnn needs whole"),
        ("auto", "cudnn", NEEDS, LONG._replace(kv_heads=4), "model.attention='blockwise'"),
        (
            "auto",
            "xla",
            AttentionNeeds(head_dim=8, dtype="float32", bias=True),
            LONG,
            "mesh.context=8 does not support the attention bias",
        ),
        ("ring", "xla", AttentionNeeds(head_dim=8, dtype="float32", prefix=True), LONG, "is bidirectional"),
        ("ring", "splash", NEEDS, LONG._replace(in_pipeline=True), "all stages of mesh.pipeline"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wish, attention, needs, work, told):
    with pytest.raises(BadInput, match=told):
        resolve_context_exchange(wish, attention, needs, work)


def test_a_stack_of_which_some_layers_have_a_window_is_not_taken_for_one_of_windows():
    window_layers = AttentionNeeds(head_dim=128, dtype="bfloat16", window=4096, window_layers=WindowLayers(5, 6))
    assert resolve_context_exchange("auto", "splash", window_layers, LONG._replace(kv_heads=32)).name == "ulysses"
