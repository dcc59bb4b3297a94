"""QK-clip: which heads shrink, by how much, on every mesh; what it refuses."""

import jax
import numpy as np
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget
from jaxscale.system.exits import BadInput

LATENT = tiny.LLAMA | dict(
    num_kv_heads=4, head_dim=12, latent=dict(q_rank=8, kv_rank=8, rope_dim=4, nope_dim=8, value_dim=8)
)
STILL = {"optim.peak_lr": 0.0, "optim.min_lr": 0.0, "optim.weight_decay": 0.0, "model.num_layers": 1}


def program(overrides, number=1):
    cfg = tiny.config(overrides)
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:number])


def stepped(program, steps, large=8.0):
    """([metrics], parameters) of some steps on one batch, with queries so many times as large."""
    state = program.init()
    grow = lambda path, x: x * large if jax.tree_util.keystr(path).split("'")[-2] in ("wq", "wq_up") else x
    state = state._replace(params=jax.tree_util.tree_map_with_path(grow, state.params))
    batch, found = jax.device_put(tiny.packed_batch(0), program.batch_sharding), []
    for _ in range(steps):
        state, metrics = program.train_step(state, batch)
        found.append({name: np.asarray(metrics[name]) for name in metrics})
    return found, tiny.host(state.params)


def layer_norm(x, scale, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


def largest_scores(params):
    """float[N]: of the first layer of GPT-2 over the batch, pair by pair."""
    batch, block = tiny.packed_batch(0), jax.tree.map(lambda x: np.asarray(x[0], np.float64), params["blocks"])
    x_BTD = np.asarray(params["embedding"], np.float64)[batch.tokens]
    x_BTD = x_BTD + np.asarray(params["position_embedding"], np.float64)[batch.positions]
    x_BTD = layer_norm(x_BTD, block["scale_attention"], block["bias_attention"])
    heads = lambda name: (
        x_BTD @ block["attention"][f"w{name}"].transpose(1, 0, 2)[:, None]
        + (block["attention"][f"bias_{name}"][:, None, None])
    )
    scores_NBTS = heads("q") @ heads("k").swapaxes(-1, -2) * heads("q").shape[-1] ** -0.5
    ids_BT = batch.segment_ids
    seen_BTS = (ids_BT[:, :, None] == ids_BT[:, None, :]) & (ids_BT > 0)[:, :, None] & np.tri(tiny.SEQ_LEN, dtype=bool)
    return np.where(seen_BTS, scores_NBTS, -np.inf).max((1, 2, 3))


@pytest.mark.slow
def test_a_step_is_that_without_a_clip_and_then_each_heads_weights_by_its_root():
    own = {"model": tiny.GPT2 | {"num_layers": 1}, "optim.name": "sgd"}
    plain, clipped = (program(own | {"optim.qk_clip": limit}) for limit in (None, 0.02))
    assert jax.tree.structure(plain.abstract_state) == jax.tree.structure(clipped.abstract_state)  # nothing to resume
    (_,), wanted = stepped(plain, 1, large=2.0)
    (told,), found = stepped(clipped, 1, large=2.0)
    params = tiny.host(plain.init().params)
    params["blocks"]["attention"]["wq"] *= 2.0
    top_N = largest_scores(params)
    assert told["attention_logit_max"] == pytest.approx(top_N.max(), rel=1e-5)
    assert 0 < told["qk_clipped"] == (top_N > 0.02).sum()
    root_N = np.sqrt(np.minimum(1.0, 0.02 / top_N))
    for which in "qk":
        for name, shape in ((f"w{which}", (1, 1, -1, 1)), (f"bias_{which}", (1, -1, 1))):
            wanted["blocks"]["attention"][name] = wanted["blocks"]["attention"][name] * root_N.reshape(shape)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-8), found, wanted)


@pytest.mark.soak
@pytest.mark.parametrize("model", [tiny.LLAMA, LATENT], ids=["grouped", "latent"])
def test_scores_of_heads_that_were_too_large_are_the_limit_afterwards(model):
    limit = 1.0
    made = program({"model": model} | STILL | {"optim.qk_clip": limit, "train.num_microbatches": 2})
    (before, after), params = stepped(made, 2)
    assert before["attention_logit_max"] > 1.5 * limit and before["qk_clipped"] > 0
    assert after["attention_logit_max"] == pytest.approx(limit, rel=1e-5)
    kept = ("wk", "wkv_down", "wv")  # shared by heads, or no part of the scores
    first = tiny.host(made.init().params)["blocks"]["attention"]
    for name in set(kept) & set(first):
        np.testing.assert_array_equal(params["blocks"]["attention"][name], first[name])


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [dict(data=2, fsdp=2, tensor=2), dict(data=2, context=2, fsdp=2)], ids=str)
@pytest.mark.parametrize("heads", [4, 2], ids=["own keys", "shared keys"])
def test_the_clip_does_not_depend_on_the_mesh(mesh, heads):
    own = {"optim.qk_clip": 1.0, "optim.name": "muon", "model.num_kv_heads": heads, "model.scan_layers": False}
    on_mesh = own | {f"mesh.{axis}": size for axis, size in mesh.items()} | {"train.num_microbatches": 2}
    (one, params), (many, found) = stepped(program(own), 3), stepped(program(on_mesh, 8), 3)
    for wanted, told in zip(one, many):
        assert told["qk_clipped"] == wanted["qk_clipped"]
        for name in ("loss", "attention_logit_max"):
            assert told[name] == pytest.approx(wanted[name], rel=1e-5)
    assert one[0]["qk_clipped"] > 0
    close = lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, found, params)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            {"model.qk_norm": True},
            "optim.qk_clip=100 cannot be combined with model.qk_norm=true, which normalizes queries and keys",
        ),
        ({"lora.rank": 2}, "optim.qk_clip=100 cannot be combined with lora.rank=2"),
        (
            {"mesh.pipeline": 2},
            "optim.qk_clip=100 cannot be combined with mesh.pipeline=2, whose stages do not record attention scores",
        ),
        ({"model": tiny.T5, "data.objective": {"name": "span_corruption"}}, "cannot be combined with model.name='t5'"),
        ({"optim.qk_clip": 0.0}, "qk_clip=0.0 must be above 0; use none to disable it"),
    ],
)
def test_what_it_cannot_go_with_is_refused_in_one_line(overrides, line):
    with pytest.raises(BadInput, match=line):
        tiny.config({"optim.qk_clip": 100.0} | overrides)


def test_a_ring_is_refused():
    own = {"optim.qk_clip": 100.0, "mesh.context": 2, "context.attention": "ring"}
    with pytest.raises(BadInput, match="qk_clip=100 needs all keys of a sequence on each device, but ring attention"):
        program(own, 2)
