"""muP: nothing changes at the base's size; beyond it each parameter has the rate and scale of the tables, and the same
model can be had without it."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.model import logits, make_model
from jaxscale.core.optim.groups import dotted
from jaxscale.core.optim.optimizer import optim_schedule
from jaxscale.core.setup import make_updates
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.checkpoint.conversions import folding_factor, without_mup
from jaxscale.system.exits import BadInput

AT_BASE = dict(base_dim=16, base_head_dim=8, base_layers=2)  # the sizes of tiny.LLAMA
WIDE = dict(embed_dim=64, num_heads=8, num_kv_heads=4, head_dim=16, mlp_dim=128)  # in more and larger heads
MUP = dict(base_dim=16, base_head_dim=8)
EXPERTS = dict(number=4, chosen=2, mlp_dim=8, shared_dim=8, first_dense=1)


def config(optimizer="adamw", more=None, **model):
    named = {f"model.{name}": value for name, value in model.items()}
    return tiny.config(named | {"optim.name": optimizer} | (more or {}))


def program_of(cfg):
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:1])


def made(cfg):
    """(graphdef, parameters) of a new model."""
    return split_model(make_model(cfg, key=jax.random.key(0)))[:2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("adamw", {}),
        ("lion", {"tied_embeddings": True}),
        pytest.param("adamw", {"experts": EXPERTS}, marks=pytest.mark.soak),
    ],
    ids=["llama", "tied, lion", "experts"],
)
def test_at_the_size_of_the_base_everything_is_as_without(optimizer, settings):
    """Initial weights bit for bit; the step as jax traces it, its rates and decays among the numbers there."""
    traces, weights = [], []
    for mup in (AT_BASE, None):
        program = program_of(config(optimizer, mup=mup, **settings))
        traces.append(str(jax.make_jaxpr(program.train_step)(program.abstract_state, program.abstract_batch)))
        weights.append(tiny.host(made(program.cfg.model)[1]))
    tiny.assert_same_bits(*weights)
    assert traces[0] == traces[1]


def updates_of(cfg):
    schedule = optim_schedule(cfg.optim, **resolve_budget(cfg, None).schedule_steps)
    return make_updates(cfg.optim, program_of(cfg).model, schedule)


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        ("adamw", {"embedding": 1, "norm": 1, "wq": 1 / 4, "down": 1 / 4, "router": 1 / 4, "q_norm": 1, "head": 1}),
        ("sgd", {"embedding": 4, "norm": 4, "wq": 1, "down": 1, "router": 1 / 4, "q_norm": 2, "head": 4}),
    ],
)
def test_each_parameter_has_the_rate_of_the_tables_and_decays_as_in_the_base(optimizer, rates):
    """arXiv:2203.03466, table 8; the router is an output weight of table 3."""
    group = {"pattern": "wq", "lr_multiplier": 3.0}
    cfg = config(optimizer, {"optim.groups": [group]}, **WIDE, mup=MUP, experts=EXPERTS, qk_norm=True)
    groups = updates_of(cfg).groups
    found = {dotted(path): of for path, of in jax.tree_util.tree_leaves_with_path(groups)}
    names = {
        "embedding": "embedding", "norm": "blocks.mlp_norm", "wq": "blocks.attention.wq", "head": "head",
        "down": "dense_blocks.mlp.down", "router": "blocks.mlp.router", "q_norm": "blocks.attention.q_norm",
    }  # fmt: skip
    own = {short: found[name].lr_multiplier for short, name in names.items()}
    assert own == rates | {"wq": 3 * rates["wq"]}, "a group's own multiplier comes on top"
    shrinks = {short: found[name].weight_decay * own[short] for short, name in names.items()}
    wanted = dict.fromkeys(names, 0.1) | dict(embedding=0, norm=0, q_norm=0, wq=pytest.approx(0.3))
    assert shrinks == wanted


def test_eps_of_adam_shrinks_as_gradients_do():
    """A gradient as large as eps moves a parameter by half the rate, so the smaller eps shows in the first update."""
    cfg = config(more={"optim.eps": 1.0, "optim.clip_norm": 0.0}, **WIDE, num_layers=4, mup=MUP | dict(base_layers=2))
    sharded = program_of(cfg).model
    updates = updates_of(cfg)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), sharded.shapes)
    grads = jax.tree.map(lambda leaf: np.full(leaf.shape, 1 / 8, np.float32), sharded.shapes)  # 4 times 2 narrower
    update = lambda grads: updates.optimizer.update(grads, updates.optimizer.init(params), params, step=2)[0]
    moved = jax.jit(update)(grads)
    np.testing.assert_allclose(moved["embedding"], -updates.schedule(2) / 2, rtol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(
    "settings",
    [
        dict(qkv_bias=True, out_bias=True, tied_embeddings=True, logit_softcap=4.0),
        dict(qk_norm=True, norm_placement="both", scan_layers=False),
        dict(qk_norm=True, qk_norm_over="all_heads", norm_placement="after"),
        dict(experts=EXPERTS),
    ],
    ids=["biases, tied", "norms", "olmo", "experts"],
)
def test_the_same_model_without_it_has_its_factors_in_the_weights(settings):
    cfg = config(**WIDE, **settings, num_layers=4, mup=MUP | dict(base_layers=2)).model
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + 0.3 * rng.standard_normal(leaf.shape, np.float32), made(cfg)[1])
    fold = lambda path, leaf: leaf * folding_factor(cfg, dotted(path).replace(".", "/"))
    unless = lambda kept, path, leaf: leaf if kept in dotted(path) else fold(path, leaf)
    tokens_BT = tiny.packed_batch(0).tokens[:4]
    compute = lambda cfg, params: np.asarray(logits(merge_model(made(cfg)[0], params), tokens_BT))
    with_mup, plain = compute(cfg, params), without_mup(cfg)
    folding_factors = compute(plain, jax.tree_util.tree_map_with_path(fold, params))
    np.testing.assert_allclose(folding_factors, with_mup, rtol=1e-3, atol=1e-4)
    for kept in ("final_norm", "attention", "mlp"):  # each of the three kinds of factors does something
        others = jax.tree_util.tree_map_with_path(functools.partial(unless, kept), params)
        assert np.abs(compute(plain, others) - with_mup).max() > 0.01


def test_scores_are_divided_by_the_size_of_a_head_beyond_the_base():
    cfg = config(**WIDE, mup=MUP).model
    assert cfg.score_scalar**0.5 == pytest.approx(16 / 8**0.5)
    assert config(**WIDE, mup=dict(base_dim=16)).model.score_scalar is None, "heads of the base's size: as they are"


@pytest.mark.parametrize(
    ("settings", "optimizer", "text"),
    [
        (dict(mup=dict(base_dim=0)), "adamw", "base_dim=0 must be at least 1"),
        (dict(mup=MUP, scaled_embeddings=True), "adamw", "scaled_embeddings cannot be combined with mup"),
        (dict(mup=MUP, query_scalar=3.0), "adamw", "query_scalar=3.0 cannot be combined with mup.base_head_dim=8"),
        (dict(mup=AT_BASE), "sgd", "base_layers applies only to AdamW"),
    ],
)
def test_what_it_has_no_rule_for_is_refused(settings, optimizer, text):
    with pytest.raises(BadInput, match=text):
        config(optimizer, **settings)


def test_adapters_and_other_models_are_refused():
    with pytest.raises(BadInput, match="lora.rank cannot be combined with model.mup"):
        config(more={"lora.rank": 2}, mup=MUP)
    with pytest.raises(BadInput, match="model.mup is not a setting of Gpt2Config"):
        tiny.config({"model": tiny.GPT2 | {"mup": MUP}})
    cfg = config(mup=MUP)
    unknown = dataclasses.replace(cfg.optim)
    object.__setattr__(unknown, "name", "muon")  # as an optimizer that is new
    with pytest.raises(BadInput, match="does not support optim.name='muon'; use adamw, lion or sgd"):
        dataclasses.replace(cfg, optim=unknown)
