"""Mixtures of experts: what they compute, beside all experts computed for all tokens, and that no mesh changes it.

B batch  T position  D embed  E experts  F width of an expert  L layers
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxscale.build import make_program
from jaxscale.core.models.config import EXPERT_COUNTS, EXPERT_ROUNDS, ROUTER_ENTROPY, ROUTER_SCORES
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.moe import SparseMlp
from jaxscale.core.models.moe_balance import ROUTER_BIAS, is_balance_param
from jaxscale.core.optim.groups import dotted
from jaxscale.core.plan import UNSHARDED
from jaxscale.program.budget import resolve_budget

EXPERTS = dict(number=8, chosen=2, mlp_dim=16)
DEEPSEEK = EXPERTS | dict(
    shared_dim=8, first_dense=1, bias=True, score="sigmoid", scale=2.5, groups=4, groups_chosen=2, group_best=2
)
LATENT = dict(num_kv_heads=4, head_dim=12, latent=dict(kv_rank=8, q_rank=12, nope_dim=8, rope_dim=4, value_dim=10))
LOSSES = {"router_z_loss": 1e-2, "balance_loss": 1e-1, "row_balance_loss": 1e-1}
BASE = {"optim.name": "sgd", "optim.b1": 1e-30, "train.num_microbatches": 2, "mesh.fsdp": 1, "train.aux_losses": LOSSES}


def model(experts, **more):
    return {"model": tiny.LLAMA | {"experts": experts} | more}


def two_steps(settings, devices, first=None):
    """(metrics of the second step, gradients and parameters after it, the first state)"""
    cfg = tiny.config(BASE | settings)
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[:devices])
    first = tiny.host(program.init()) if first is None else first
    state = tiny.placed(program, first)
    for n in range(2):
        state, metrics = program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(n)))
    return tiny.host(metrics), tiny.host((state.opt_state, state.params)), first


def computed_for_all(mlp: SparseMlp, x_BTD):
    """Every expert of every token, weighted: 0 where it was not chosen."""
    routes = mlp.routes(x_BTD.reshape(-1, x_BTD.shape[-1]))
    weight_nE = jnp.zeros_like(routes.logit_nE)
    weight_nE = weight_nE.at[jnp.arange(len(weight_nE))[:, None], routes.expert_nk].set(routes.weight_nk)
    x_nD = x_BTD.reshape(-1, x_BTD.shape[-1])
    h_nEF = jax.nn.silu(jnp.einsum("nD,EDF->nEF", x_nD, mlp.gate[...])) * jnp.einsum("nD,EDF->nEF", x_nD, mlp.up[...])
    return jnp.einsum("nEF,EFD,nE->nD", h_nEF, mlp.down[...], weight_nE).reshape(x_BTD.shape)


@pytest.mark.slow
@pytest.mark.parametrize("logits", ["any", "all to one"])
def test_values_and_gradients_are_those_of_all_experts_computed_for_all_tokens(logits):
    cfg = LlamaConfig(**{k: v for k, v in tiny.LLAMA.items() if k != "name"}, experts=tiny_experts())
    mlp = SparseMlp(cfg, rngs=nnx.Rngs(params=0), plan=UNSHARDED, shared=None)
    if logits == "all to one":
        mlp.router[...] = jnp.zeros_like(mlp.router[...])  # ties: two experts have all tokens, six none
    x_BTD, dy_BTD = jax.random.normal(jax.random.key(1), (2, 3, 16, 16))
    graphdef, params = nnx.split(mlp)
    ids_BT = jnp.ones((3, 16), jnp.int32)
    ours = lambda params, x_BTD: nnx.merge(graphdef, params)(x_BTD, ids_BT)[0]
    plain = lambda params, x_BTD: computed_for_all(nnx.merge(graphdef, params), x_BTD)
    got, right = (tiny.values_and_gradients(f, dy_BTD, params, x_BTD) for f in (ours, plain))
    np.testing.assert_allclose(got[0], right[0], rtol=1e-5, atol=1e-5)
    for one, other in zip(got, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def tiny_experts():
    return tiny.config(model(EXPERTS)).model.experts


MESHES = {
    "rows sent": {"mesh.expert": 2, "expert.exchange": "send"},
    "rows sent, fsdp, tensor": {"mesh.expert": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "expert.exchange": "send"},
    "experts gathered": {"mesh.expert": 4, "mesh.data": 2, "expert.exchange": "gather"},
    "fsdp x tensor": {"mesh.fsdp": 4, "mesh.tensor": 2},
    "context x tensor": {"mesh.context": 2, "mesh.tensor": 2, "mesh.data": 2},
    "data, ZeRO-2": {"mesh.data": 2, "mesh.fsdp": 4, "rules": "zero2"},
    "four microbatches": {"mesh.fsdp": 4, "train.num_microbatches": 4},
}


WHOLE = model(DEEPSEEK, num_layers=3, **LATENT)  # a layer without experts, then two with; attention by latents


@pytest.fixture(scope="module")
def alone():
    return two_steps(WHOLE, 1)


@pytest.mark.parametrize(
    "cut", [cut if cut == "rows sent" else pytest.param(cut, marks=pytest.mark.soak) for cut in MESHES]
)
def test_losses_gradients_and_balance_are_those_of_one_device(alone, cut):
    one, one_after, first = alone
    many, after, _ = two_steps(WHOLE | MESHES[cut], {"rows sent": 2, "four microbatches": 4}.get(cut, 8), first)
    rounds = {EXPERT_ROUNDS} if MESHES[cut].get("expert.exchange") == "send" else set()
    assert one.keys() | rounds == many.keys() and set(LOSSES) < one.keys()
    if rounds:  # two layers, two microbatches
        per_pass = 2 if cut == "rows sent" else 4 * 2  # devices with different rows; the tensor axis halves the rows
        assert many[EXPERT_ROUNDS][0] == 0 and many[EXPERT_ROUNDS].sum() == 2 * 2 * per_pass
    np.testing.assert_array_equal(many[EXPERT_COUNTS], one[EXPERT_COUNTS])
    for name in (*LOSSES, "loss", "objective", "grad_norm", ROUTER_ENTROPY, ROUTER_SCORES, ROUTER_BIAS):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-5, err_msg=name)
    for (path, right), got in zip(jax.tree_util.tree_leaves_with_path(one_after), jax.tree.leaves(after), strict=True):
        if is_balance_param(dotted(path)):
            np.testing.assert_array_equal(got, right)
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-5 * max(np.abs(right).max(), 1e-2))


def test_counts_are_of_text_alone_and_move_the_bias(alone):
    metrics, (_, params), _ = alone
    text = int((tiny.packed_batch(1).segment_ids > 0).sum())
    counts_LE = metrics[EXPERT_COUNTS]
    assert counts_LE.shape == (2, 8) and (counts_LE.sum(axis=1) == 2 * text).all()
    mlp = params["blocks"]["mlp"]
    np.testing.assert_allclose(mlp["router_load"], counts_LE / (2 * text), rtol=1e-6)
    last_LE = 1e-3 * np.sign(counts_LE.mean(axis=1, keepdims=True) - counts_LE)
    first_LE = (mlp["router_bias"] - last_LE) / 1e-3
    np.testing.assert_allclose(first_LE, np.round(first_LE), atol=1e-3)
    assert np.abs(np.round(first_LE)).max() == 1


@pytest.mark.slow
def test_a_token_changes_nothing_of_another_row(alone):
    program = tiny_program(WHOLE)
    batch = tiny.packed_batch(0)
    other = batch._replace(tokens=np.where(np.arange(16)[:, None] == 3, (batch.tokens + 1) % 64, batch.tokens))
    measure, params = jax.jit(program.model.token_losses), alone[2].params
    losses = [np.asarray(measure(params, b)) for b in (batch, other)]
    same = np.arange(16) != 3
    np.testing.assert_array_equal(losses[0][same], losses[1][same])
    assert (losses[0][3] != losses[1][3]).any()


def tiny_program(settings):
    cfg = tiny.config(BASE | settings)
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:1])


@pytest.mark.parametrize("experts", [EXPERTS, DEEPSEEK])
def test_parameters_are_counted_in_all_and_those_of_a_token(experts):
    cfg = tiny.config(model(experts, num_layers=3)).model
    shapes = jax.tree_util.tree_leaves_with_path(tiny_program(model(experts, num_layers=3)).model.shapes)
    sizes = {dotted(path): leaf.size for path, leaf in shapes if not is_balance_param(dotted(path))}
    assert cfg.num_params == sum(sizes.values())
    of_experts = sum(
        size for name, size in sizes.items() if name in {f"blocks.mlp.{w}" for w in ("gate", "up", "down")}
    )
    assert cfg.num_params - cfg.active_params == of_experts * 6 // 8
