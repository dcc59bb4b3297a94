"""A limit on the tokens of an expert: which ones it leaves out, that it counts them, and that training alone has it.

B batch  T position  D embed  E experts  k experts of a token
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxscale.build import make_program
from jaxscale.core.models.config import EXPERT_COUNTS, EXPERTS_DROPPED, ExpertsConfig
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.model import token_losses
from jaxscale.core.models.moe import SparseMlp
from jaxscale.core.plan import UNSHARDED
from jaxscale.kernels.matmul.routing import capacity_mask
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.training.expert_load import ExpertLoad

EXPERTS = dict(number=4, chosen=2, mlp_dim=8)
BASE = {
    "model": tiny.LLAMA | {"experts": EXPERTS | {"capacity_factor": 0.75}}, "optim.name": "sgd", "optim.b1": 1e-30,
    "mesh.fsdp": 1,
}  # fmt: skip


def make(settings, devices=1):
    cfg = tiny.config(BASE | settings)
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:devices])


def taken_in_turn(expert_BTk, text_BT, capacity):
    """One token after the other."""
    kept = np.zeros(expert_BTk.shape, bool)
    for row, experts_Tk in enumerate(expert_BTk):
        taken = dict.fromkeys(range(expert_BTk.max() + 1), 0)
        for position, experts_k in enumerate(experts_Tk):
            for choice, expert in enumerate(experts_k):
                kept[row, position, choice] = taken[expert] < capacity
                taken[expert] += text_BT[row, position]
    return kept


def test_an_expert_takes_the_first_tokens_of_each_row_and_what_is_no_text_takes_no_room():
    rng = np.random.default_rng(0)
    expert_BTk = rng.permuted(np.broadcast_to(np.arange(5, dtype=np.int32), (3, 12, 5)), axis=2)[:, :, :2]
    text_BT = np.arange(12)[None] < np.array([[12], [7], [0]])
    kept = np.asarray(capacity_mask(jnp.asarray(expert_BTk), jnp.asarray(text_BT), 5, 3))
    np.testing.assert_array_equal(kept, taken_in_turn(expert_BTk, text_BT, 3))
    assert not kept[0].all() and kept[2].all()


def test_a_capacity_is_the_factor_times_an_equal_share_rounded_up():
    cfg = lambda factor: ExpertsConfig(**EXPERTS | {"number": 8, "capacity_factor": factor})
    assert [cfg(1.25).capacity(T) for T in (16, 17, 1)] == [5, 6, 1] and cfg(0.0).capacity(16) is None
    with pytest.raises(ValueError, match="capacity_factor=-1.0 must not be negative"):
        cfg(-1.0)


@pytest.fixture(scope="module")
def limited():
    own = ExpertsConfig(**EXPERTS | {"capacity_factor": 0.75})
    cfg = LlamaConfig(**{k: v for k, v in tiny.LLAMA.items() if k != "name"}, experts=own)
    plan = UNSHARDED.replace(use_capacity=True)
    return SparseMlp(cfg, rngs=nnx.Rngs(params=0), plan=plan, shared=None)


@pytest.mark.soak
def test_values_and_gradients_are_those_of_the_experts_that_had_room(limited):
    x_BTD, dy_BTD = jax.random.normal(jax.random.key(1), (2, 2, 16, 16))
    ids_BT = jnp.ones((2, 16), jnp.int32)
    graphdef, params = nnx.split(limited)

    def ours(params, x_BTD):
        y_BTD, told = nnx.merge(graphdef, params)(x_BTD, ids_BT)
        return y_BTD, told.dropped

    def plain(params, x_BTD):
        mlp, x_nD = nnx.merge(graphdef, params), x_BTD.reshape(-1, 16)
        routes = mlp.routes(x_nD)
        kept_nk = taken_in_turn(np.asarray(kept_of).reshape(2, 16, 2), np.ones((2, 16), int), 6).reshape(32, 2)
        weight_nk = jnp.where(kept_nk, routes.weight_nk, 0.0)
        weight_nE = jnp.zeros((32, 4)).at[jnp.arange(32)[:, None], routes.expert_nk].set(weight_nk)
        of_gate, of_up = (jnp.einsum("nD,EDF->nEF", x_nD, w[...]) for w in (mlp.gate, mlp.up))
        y_nD = jnp.einsum("nEF,EFD,nE->nD", jax.nn.silu(of_gate) * of_up, mlp.down[...], weight_nE)
        return y_nD.reshape(x_BTD.shape), jnp.sum(~kept_nk)

    kept_of = limited.routes(x_BTD.reshape(-1, 16)).expert_nk
    (got, pull, dropped), (right, pull_right, wanted) = (jax.vjp(f, params, x_BTD, has_aux=True) for f in (ours, plain))
    assert int(dropped) == int(wanted) > 0
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)
    for one, other in zip(jax.tree.leaves(pull(dy_BTD)), jax.tree.leaves(pull_right(dy_BTD)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_token_moves_no_other_row_and_nothing_before_it_and_evaluation_has_no_limit():
    one_layer = {"model.num_layers": 1, "model.scan_layers": False}
    program, free = (make(one_layer | more) for more in ({}, {"model.experts.capacity_factor": 0.0}))
    params = program.init().params
    batch = tiny.packed_batch(0)
    tokens = batch.tokens.copy()
    tokens[4, 5] = (tokens[4, 5] + 1) % 64
    learning = jax.jit(lambda params, batch: token_losses(program.model.merge(params, training=True), batch))
    one, other = (np.asarray(learning(params, b)) for b in (batch, batch._replace(tokens=tokens)))
    moved_BT = (one != other) & (batch.weights > 0)
    assert moved_BT[4, 5:].any() and not moved_BT[4, :5].any() and not np.delete(moved_BT, 4, axis=0).any()
    measured, unlimited = (np.asarray(jax.jit(p.model.token_losses)(params, batch)) for p in (program, free))
    np.testing.assert_array_equal(measured, unlimited)
    assert (measured != one).any()


def two_steps(settings, devices):
    program = make({"train.num_microbatches": 2, "train.aux_losses": {"balance_loss": 1e-1}} | settings, devices)
    state = program.init()
    for n in range(2):
        state, metrics = program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(n)))
    return tiny.host(metrics), tiny.host(state.opt_state)


MESHES = {
    "rows sent": ({"mesh.expert": 2, "mesh.tensor": 2, "expert.exchange": "send"}, 4),
    "experts gathered, fsdp": ({"mesh.expert": 2, "mesh.fsdp": 2, "expert.exchange": "gather"}, 4),
    "stages, four microbatches": ({"mesh.pipeline": 2, "model.remat": "full", "train.num_microbatches": 4}, 2),
}


@pytest.mark.soak
@pytest.mark.parametrize("cut", MESHES)
def test_as_many_are_left_out_on_every_mesh_and_losses_are_those_of_one_device(cut):
    (one, one_grads), (many, grads) = two_steps({}, 1), two_steps(*MESHES[cut])
    for name in (EXPERTS_DROPPED, EXPERT_COUNTS):
        np.testing.assert_array_equal(many[name], one[name])
    assert one[EXPERTS_DROPPED].shape == (2,) and one[EXPERTS_DROPPED].min() > 0
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-5)
    for right, got in zip(jax.tree.leaves(one_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-5 * max(np.abs(right).max(), 1e-2))


def test_what_is_left_out_is_logged_as_one_number():
    fetched = {EXPERT_COUNTS: np.array([[3, 1], [4, 0]]), EXPERTS_DROPPED: np.array([2, 5], np.int32)}
    fetched |= {"real_tokens": 4, "router_entropy": np.ones(2), "router_scores": np.ones(2)}
    assert ExpertLoad(experts_per_token=1).add_step(fetched)["experts_dropped"] == 7 and EXPERTS_DROPPED not in fetched


def test_a_row_that_devices_share_has_no_limit():
    with pytest.raises(
        ValueError, match="mesh.context=2 does not support model.experts.capacity_factor=0.75, .*capacity_factor=0"
    ):
        make({"mesh.context": 2}, 2)
