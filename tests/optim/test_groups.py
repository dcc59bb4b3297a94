"""Which parameters decay, learn at another rate, or not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.core.optim.config import GroupConfig, OptimConfig
from jaxscale.core.optim.groups import assign_groups
from jaxscale.core.optim.optimizer import make_optimizer, moment_axes
from jaxscale.runtime.run.startup_log import group_table

AXES = {
    "embedding": ("vocab", "embed"),
    "blocks": {
        "attention": {
            "wq": ("layers", "embed", "heads", "head_dim"),
            "bias_q": ("layers", "heads", "head_dim"),
            "q_norm": ("layers", "heads", "head_dim"),
        },
        "mlp": {"up": ("layers", "embed", "mlp"), "bias_up": ("layers", "mlp")},
        "mlp_norm": ("layers", "norm"),
    },
    "final_norm": ("norm",),
    "head": ("embed", "vocab"),
    "position_embedding": ("position", "embed"),
}
PARAMS = jax.tree.map(lambda axes: jnp.ones((2,) * len(axes)), AXES, is_leaf=lambda leaf: isinstance(leaf, tuple))


def assigned(*groups, weight_decay_all=False):
    """{dotted name: Group}."""
    tree = assign_groups(AXES, groups, 0.1, weight_decay_all)
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "frozen"))
    return {".".join(key.key for key in path): group for path, group in leaves}


def step(groups=(), name="adamw", grads=None, num=1, **settings):
    """(parameters, optimizer state, last updates) after `num` steps at a constant rate of 0.1 with gradients of 1."""
    cfg = OptimConfig(name=name, groups=groups, peak_lr=1.0, **({"clip_norm": 0.0} | settings))
    tree = assign_groups(AXES, cfg.groups, cfg.weight_decay, cfg.weight_decay_all)
    optimizer = make_optimizer(cfg, lambda step: jnp.float32(0.1), tree)
    params, state = PARAMS, optimizer.init(PARAMS)
    for number in range(num):
        grads = jax.tree.map(jnp.ones_like, params) if grads is None else grads
        updates, state = optimizer.update(grads, state, params, step=number)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state, updates


def test_norms_biases_and_embeddings_do_not_decay():
    decays = {name: group.weight_decay for name, group in assigned().items()}
    assert decays == {
        "embedding": 0, "blocks.attention.wq": 0.1, "blocks.attention.bias_q": 0,
        "blocks.attention.q_norm": 0, "blocks.mlp.up": 0.1,
        "blocks.mlp.bias_up": 0, "blocks.mlp_norm": 0, "final_norm": 0, "head": 0.1, "position_embedding": 0,
    }  # fmt: skip


def test_they_do_if_told_so():
    assert {group.weight_decay for group in assigned(weight_decay_all=True).values()} == {0.1}


def test_the_first_pattern_that_matches_counts():
    found = assigned(
        GroupConfig(pattern=r"\.wq$", lr_multiplier=2.0), GroupConfig(pattern="attention", lr_multiplier=3.0)
    )
    assert found["blocks.attention.wq"].lr_multiplier == 2.0
    assert found["blocks.attention.bias_q"].lr_multiplier == 3.0
    assert found["blocks.mlp.up"].lr_multiplier == 1.0


def test_a_group_keeps_the_decay_it_would_have_had_unless_it_says_another():
    found = assigned(
        GroupConfig(pattern="wq|final_norm", lr_multiplier=2.0),
        GroupConfig(pattern="head|^embedding", weight_decay=0.3),
    )
    assert found["blocks.attention.wq"].weight_decay == 0.1 and found["final_norm"].weight_decay == 0
    assert found["head"].weight_decay == found["embedding"].weight_decay == 0.3


def test_a_pattern_that_matches_nothing_is_an_error_with_the_names_there_are():
    with pytest.raises(ValueError) as error:
        assigned(GroupConfig(pattern="head"), GroupConfig(pattern="w_q"))
    told = (
        "optim.groups[1].pattern='w_q' matches no parameter; use names among blocks.attention.bias_q, "
        "blocks.attention.q_norm"
    )
    assert told in str(error.value)


def test_a_pattern_that_only_finds_what_is_taken_is_an_error():
    told = r"optim.groups\[1\].*matches only parameters of earlier groups; move it before them"
    with pytest.raises(ValueError, match=told):
        assigned(GroupConfig(pattern="attention"), GroupConfig(pattern="wq"))


@pytest.mark.slow
def test_frozen_parameters_stay_as_they_are_and_have_no_moments():
    params, state, _ = step((GroupConfig(pattern="attention|embedding", frozen=True),), num=3)
    np.testing.assert_array_equal(params["blocks"]["attention"]["wq"], PARAMS["blocks"]["attention"]["wq"])
    np.testing.assert_array_equal(params["embedding"], PARAMS["embedding"])
    assert not np.array_equal(params["head"], PARAMS["head"])
    moments = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)}
    assert any("head" in name for name in moments)
    assert not any("attention" in name or "embedding" in name for name in moments)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_a_multiplier_multiplies_the_update_exactly(name):
    plain = step(name=name)[2]
    faster = step((GroupConfig(pattern="head", lr_multiplier=4.0),), name)[2]
    np.testing.assert_array_equal(4.0 * plain["head"], faster["head"])
    np.testing.assert_array_equal(plain["embedding"], faster["embedding"])


def test_decay_is_decoupled_from_the_moments():
    with_decay, without = step(weight_decay=0.1)[0], step(weight_decay=0.0)[0]
    # learning rate 0.1 x decay 0.1 x parameter 1, whatever the gradient
    np.testing.assert_allclose(without["head"] - with_decay["head"], 0.01, rtol=1e-4)
    np.testing.assert_array_equal(without["final_norm"], with_decay["final_norm"])


@pytest.mark.parametrize("groups", [(), (GroupConfig(pattern="wq", frozen=True),)], ids=["plain", "frozen"])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_moments_inherit_the_axes_of_their_parameters(name, groups):
    cfg = OptimConfig(name=name, groups=groups)
    optimizer = make_optimizer(cfg, lambda step: 0.1, assign_groups(AXES, groups, 0.1, False))
    state = optimizer.init(PARAMS)
    axes = moment_axes(optimizer, jax.eval_shape(lambda: PARAMS), AXES)
    is_axes = lambda leaf: (
        isinstance(leaf, tuple) and all(isinstance(axis, str) for axis in leaf) and not hasattr(leaf, "_fields")
    )
    found = jax.tree.leaves(axes, is_leaf=is_axes)
    found = [leaf for leaf in found if is_axes(leaf)]
    by_shape = [len(leaf) for leaf in found]
    assert by_shape.count(0) <= 1 and len([n for n in by_shape if n]) == len(
        [x for x in jax.tree.leaves(state) if x.ndim]
    )


def test_the_table_tells_shape_place_and_group():
    shapes = {"head": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
    mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    place = {"head": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", None))}
    group = {"head": assigned(GroupConfig(pattern="head", lr_multiplier=2.0))["head"]}
    assert group_table(shapes, place, group) == [("head", "16x64", "float32", "fsdp, -", "decay 0.1, lr x2 (head)")]
