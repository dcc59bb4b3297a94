"""Latent attention: what it computes, beside keys and values written out head by head, and that no mesh changes it.

B batch  T position  D embed  N heads  H head dim  C rank of keys and values  R part of a head that RoPE turns
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxscale.build import make_program
from jaxscale.core.models.latent_attention import EPS, LatentAttention
from jaxscale.core.models.layers import split_model
from jaxscale.core.models.model import make_model
from jaxscale.core.plan import UNSHARDED
from jaxscale.kernels.rope import make_rotation
from jaxscale.program.budget import resolve_budget
from jaxscale.program.memory import activation_sizes
from jaxscale.tools.planning.speed import recomputed_flops

SIZES = dict(kv_rank=8, q_rank=12, nope_dim=8, rope_dim=4, value_dim=10)
YARN = dict(name="yarn", factor=4.0, original_max_len=8, mscale=1.0, mscale_all_dim=0.8)
LATENT = tiny.LLAMA | dict(num_kv_heads=4, head_dim=12, latent=SIZES, rope_scaling=YARN)
LITE = LATENT | dict(latent=SIZES | dict(q_rank=0, value_dim=14))
EXPERTS = dict(number=8, chosen=2, mlp_dim=16, shared_dim=8, first_dense=1, bias=True, score="sigmoid", groups=4)
DEEPSEEK = LATENT | dict(num_layers=3, experts=EXPERTS | dict(groups_chosen=2, group_best=2, scale=2.5))


def config(model):
    return tiny.config({"model": model}).model


def two_steps(settings, devices, first=None):
    """(loss and norm of the gradient of the second step, the parameters after it, the first state)"""
    cfg = tiny.config({"optim.name": "sgd", "train.num_microbatches": 2, "mesh.fsdp": 1} | settings)
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[:devices])
    first = tiny.host(program.init()) if first is None else first
    state = tiny.placed(program, first)
    for n in range(2):
        state, metrics = program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(n)))
    return [float(metrics[name]) for name in ("loss", "grad_norm")], tiny.host(state.params), first


MESHES = {
    "tensor": (LATENT, {"mesh.tensor": 2}),
    "fsdp x tensor": (LATENT, {"mesh.fsdp": 2, "mesh.tensor": 2}),
    "experts, fsdp x tensor": (DEEPSEEK, {"mesh.fsdp": 2, "mesh.tensor": 2}),
    "context x tensor": (LATENT, {"mesh.context": 2, "mesh.tensor": 2}),
    "context, a ring": (LITE | dict(attention="blockwise"), {"mesh.context": 2, "context.attention": "ring"}),
    "positions for heads": (LITE, {"mesh.context": 2, "mesh.data": 2, "context.attention": "ulysses"}),
    "pipeline x fsdp": (LATENT | dict(remat="full"), {"mesh.pipeline": 2, "mesh.fsdp": 2}),
    "data, ZeRO-2": (LATENT, {"mesh.data": 2, "mesh.fsdp": 2, "rules": "zero2"}),
    "rows sent": (DEEPSEEK, {"mesh.expert": 2, "mesh.fsdp": 2, "expert.exchange": "send"}),
}


@pytest.mark.soak  # by default tests/models/test_mixtures.py shares a model with latents among devices
@pytest.mark.parametrize("cut", MESHES)
def test_losses_and_gradients_are_those_of_one_device(cut):
    model, mesh = MESHES[cut]
    one, after, first = two_steps({"model": model}, 1)
    devices = math.prod(size for name, size in mesh.items() if name.startswith("mesh."))
    many, many_after, _ = two_steps({"model": model} | mesh, devices, first)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    for got, right in zip(jax.tree.leaves(many_after), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-6)  # float32 sums taken in another order


def head_by_head(module, cfg, x_BTD, positions_BT, ids_BT):
    """The definition (arXiv:2405.04434, appendix C), with softmax over the whole row of each head by itself."""
    own, weights = cfg.latent, {name: leaf[...] for name, leaf in vars(module).items() if isinstance(leaf, nnx.Param)}
    rms = lambda x, scale: x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * scale[None, None]
    pair = jnp.arange(own.rope_dim // 2)
    scaling = cfg.rope_scaling
    rotation = make_rotation(positions_BT, own.rope_dim, cfg.rope_base, scaling)
    cos, sin = rotation.cos_BTH[..., pair], -rotation.sin_BTH[..., pair]

    def turned(x):
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    down = x_BTD @ weights["wkv_down"]
    kv, shared = rms(down[..., : own.kv_rank], weights["kv_norm"]), turned(down[..., own.kv_rank :])
    queries = rms(x_BTD @ weights["wq_down"], weights["q_norm"]) if own.q_rank else x_BTD
    T = x_BTD.shape[1]
    seen_BTS = (ids_BT[:, :, None] == ids_BT[:, None]) & jnp.tri(T, dtype=bool)[None]
    scale = cfg.head_dim**-0.5 * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2
    added = 0.0
    for head in range(cfg.num_heads):
        q = queries @ weights["wq_up" if own.q_rank else "wq"][:, head]
        q = jnp.concatenate([q[..., : own.nope_dim], turned(q[..., own.nope_dim :])], axis=-1)
        made = kv @ weights["wkv_up"][:, head]
        k = jnp.concatenate([made[..., : own.nope_dim], shared], axis=-1)
        score = jnp.where(seen_BTS, scale * jnp.einsum("BTH,BSH->BTS", q, k), -jnp.inf)
        added += jax.nn.softmax(score) @ made[..., own.nope_dim :] @ weights["wo"][head]
    return added


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [pytest.param(LATENT, id="queries compressed"), pytest.param(LITE, id="queries not", marks=pytest.mark.soak)],
)
def test_values_and_gradients_are_those_of_heads_written_out_one_by_one(model):
    cfg, batch = config(model), tiny.packed_batch(0, rows=3)
    module = LatentAttention(cfg, rngs=nnx.Rngs(params=0), plan=UNSHARDED)
    graphdef, params = nnx.split(module)
    params = jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(jax.random.key(2), leaf.shape), params)
    x_BTD, dy_BTD = jax.random.normal(jax.random.key(1), (2, 3, tiny.SEQ_LEN, cfg.embed_dim))
    rotation = make_rotation(jnp.asarray(batch.positions), cfg.rope_dim, cfg.rope_base, cfg.rope_scaling)
    ids_BT = jnp.asarray(batch.segment_ids)
    ours = lambda params, x_BTD: nnx.merge(graphdef, params)(x_BTD, rotation, ids_BT)
    plain = lambda params, x_BTD: head_by_head(nnx.merge(graphdef, params), cfg, x_BTD, batch.positions, ids_BT)
    got, right = (tiny.values_and_gradients(f, dy_BTD, params, x_BTD) for f in (ours, plain))
    np.testing.assert_allclose(got[0], right[0], rtol=1e-5, atol=1e-5)
    for one, other in zip(got, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", [LATENT, LITE, DEEPSEEK], ids=["queries compressed", "queries not", "experts"])
def test_the_formula_counts_the_arrays(model):
    cfg = config(model)
    shapes = split_model(jax.eval_shape(lambda key: make_model(cfg, key=key), jax.random.key(0)))[1]
    named = jax.tree_util.tree_leaves_with_path(shapes)
    balance = sum(leaf.size for path, leaf in named if "router_" in jax.tree_util.keystr(path))
    assert cfg.num_params == sum(leaf.size for _, leaf in named) - balance
    counted = {name.removeprefix("attention."): math.prod(sizes) for name, sizes in cfg.matrices().items()}
    arrays = {
        name: leaf.size // leaf.shape[0] for name, leaf in shapes["blocks"]["attention"].items() if "norm" not in name
    }
    assert {name: counted[name] for name in arrays} == arrays


def test_flops_are_those_counted_by_hand():
    # D=16 N=4 F=32 L=2 V=64; multiply-adds for one token in the forward pass, at a row of T=10
    projections = 16 * 12 + 12 * 4 * 12 + 16 * (8 + 4) + 8 * 4 * (8 + 10) + 4 * 10 * 16
    attention = 4 * (12 + 10) * 10 / 2  # scores and values, over half the row on average
    forward = 2 * (projections + 3 * 16 * 32 + attention) + 16 * 64
    assert config(LATENT).flops_per_token(10) == 3 * 2 * forward
    full = config(LATENT | dict(remat="full"))
    # All of the forward pass but the MLP's last product and the output projection, which no gradient needs again.
    assert recomputed_flops(full, 10) == 2 * (forward - 16 * 64 - 2 * 32 * 16)


def test_the_activations_of_a_block_have_their_widths():
    sizes = activation_sizes(config(LATENT), 2)
    assert (sizes["latent"], sizes["query"], sizes["key"], sizes["value"]) == (12 + 8 + 4, 24, 24, 20)
    assert sizes["attention_out"] == 20


@pytest.mark.parametrize(
    "changes, told",
    [
        (dict(head_dim=16), r"head_dim=16 must equal latent.nope_dim \+ latent.rope_dim = 12"),
        (dict(num_kv_heads=2), "num_kv_heads=2 must equal num_heads=4 with latent"),
        (dict(qk_norm=True), "qk_norm=True cannot be combined with latent"),
        (dict(query_scalar=3.0), "query_scalar=3.0 cannot be combined with latent"),
        (dict(latent=SIZES | dict(rope_dim=3)), "rope_dim=3 must be even"),
        (dict(latent=SIZES | dict(kv_rank=0)), "kv_rank=0 must be at least 1"),
        (
            dict(latent=None, head_dim=8, remat="save", remat_save=("latent",)),
            "'latent', which is not an activation of",
        ),
    ],
)
def test_what_does_not_go_with_latents_is_refused_by_name(changes, told):
    with pytest.raises(ValueError, match=told):
        config(LATENT | changes)
