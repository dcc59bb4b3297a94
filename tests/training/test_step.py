"""The step: the same on any mesh, compiled once, and unharmed by bad gradients."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.core.models.config import RematName
from jaxscale.core.optim.config import GroupConfig
from jaxscale.runtime.run.startup_log import group_table

STEPS = 4
MESHES = [
    pytest.param({"mesh.data": 8, "mesh.fsdp": 1, "train.num_microbatches": 2}, 8, marks=pytest.mark.soak),
    pytest.param({"rules": "zero3"}, 8, marks=pytest.mark.soak),  # the rules of mesh.tensor below
    ({"rules": "zero2", "mesh.data": 2, "mesh.fsdp": 2, "train.num_microbatches": 2}, 4),
    pytest.param({"rules": "zero1"}, 8, marks=pytest.mark.soak),
    ({"mesh.tensor": 2, "train.num_microbatches": 4}, 4),
    pytest.param({"train.num_microbatches": 4}, 1, marks=pytest.mark.soak),
    ({"mesh.fsdp": 2, "model.remat": "full", "model.row_parts": 2}, 2),
    pytest.param(
        {
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
            "model.remat": "save",
            "model.remat_save": ("query",),
            "model.row_parts": 2,
            "model.scan_layers": False,
        },
        4,
        marks=pytest.mark.soak,
    ),
]


def run(program, batches, state=None):
    """(state on the devices, metrics of each step)."""
    state, seen = program.init() if state is None else state, []
    for batch in batches:
        state, metrics = program.train_step(state, tiny.on_mesh(program, batch))
        seen.append({name: value.item() for name, value in jax.device_get(metrics).items() if value.ndim == 0})
    return state, seen


def column(seen, name):
    return [metrics[name] for metrics in seen]


TRACED = ("none", "full", "minimal")  # of the others each keeps other activations, and no weight either


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat", [name if name in TRACED else pytest.param(name, marks=pytest.mark.soak) for name in get_args(RematName)]
)
def test_gathered_weights_are_gathered_again_for_the_backward_pass(remat):
    names = {"model.remat": remat} | ({"model.remat_save": ("query",)} if remat == "save" else {})
    program = tiny.program({"model.embed_dim": 32, "model.num_layers": 3, **names}, 8)
    jaxpr = str(program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr)
    tables, weights = 2, 7  # embedding and head once, the matrices of a layer in the forward and in the backward scan
    assert jaxpr.count("= all_gather[") == tables + 2 * weights


BATCHES = [tiny.packed_batch(n) for n in range(STEPS)]


@pytest.fixture(scope="module")
def one_device():
    state, seen = run(tiny.program(), BATCHES)
    return tiny.host(state), seen


@pytest.fixture(scope="module")
def first():
    return tiny.host(tiny.program().init())


@pytest.mark.parametrize(("overrides", "num_devices"), MESHES, ids=str)
def test_losses_do_not_depend_on_the_mesh_and_the_step_compiles_once(overrides, num_devices, one_device, first):
    program = tiny.program(overrides, num_devices)
    own = "mesh.tensor" in overrides  # its own first state; elsewhere that of one device, which saves drawing it again
    state, seen = run(program, BATCHES, None if own else tiny.placed(program, first))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(column(seen, name), column(one_device[1], name), rtol=1e-5)  # sums in another order
    assert column(seen, "lr") == column(one_device[1], "lr")
    assert program.train_step._cache_size() == 1
    for made, planned in zip(jax.tree.leaves(state), jax.tree.leaves(program.abstract_state), strict=True):
        assert made.sharding.is_equivalent_to(planned.sharding, made.ndim)


def test_training_lowers_the_loss(one_device):
    losses = column(run(tiny.program(), [BATCHES[0]] * 8)[1], "loss")
    assert losses[-1] < losses[0] - 0.3


def test_metrics_are_those_of_the_step(one_device):
    state, seen = one_device
    assert column(seen, "real_tokens") == [batch.weights.sum() for batch in BATCHES]
    np.testing.assert_allclose(column(seen, "lr")[:3], [5e-3, 1e-2, 1e-2], rtol=1e-6)
    assert column(seen, "loss") == column(seen, "objective")
    assert set(column(seen, "loss_scale")) == {1.0} and set(column(seen, "skipped")) == {0}
    assert state.step == STEPS


# Bad gradients. A batch's weights multiply its loss, so they can make any gradient.


def poisoned(value):
    """A batch in which one token's weight is `value`."""
    weights_BT = BATCHES[1].weights.copy()
    weights_BT[1, 2] = value
    return BATCHES[1]._replace(weights=weights_BT)


def trained_things(state):
    return tiny.host((state.params, state.opt_state, state.key))


BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "overflow": 3e38}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_a_bad_gradient_changes_nothing_and_is_counted(value):
    program = tiny.program()
    state, _ = run(program, BATCHES[:1])
    before = trained_things(state)
    state, seen = run(program, [poisoned(value)] * 2, state)
    tiny.assert_same_bits(trained_things(state), before)
    assert column(seen, "skipped_total") == [1, 2] and column(seen, "skipped_in_row") == [1, 2]
    assert column(seen, "skipped") == [1, 1]
    state, seen = run(program, BATCHES[2:3], state)
    assert (seen[0]["skipped_total"], seen[0]["skipped_in_row"]) == (2, 0)  # and the next step trains
    assert not np.array_equal(np.asarray(state.params["head"]), before[0]["head"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tiny.host(state)))


def test_an_absurd_gradient_changes_nothing_and_is_counted():
    program = tiny.program()
    weights_BT = np.zeros_like(BATCHES[0].weights)
    weights_BT[1, :2] = 1e6, 1 - 1e6  # they add up to one token, and almost nothing divides what is left of them
    state = program.init()
    before = trained_things(state)
    state, seen = run(program, [BATCHES[0]._replace(weights=weights_BT)], state)
    tiny.assert_same_bits(trained_things(state), before)
    assert column(seen, "skipped") == [1] and 1e4 < seen[0]["grad_norm"] < np.inf


def test_the_learning_rate_follows_attempted_steps():
    program = tiny.program()
    state, seen = run(program, [BATCHES[0], poisoned(np.nan), poisoned(np.nan), BATCHES[1]])
    np.testing.assert_allclose(column(seen, "lr"), [program.schedule(step) for step in range(4)], rtol=1e-6)
    assert int(state.step) == 4 and int(state.opt_state[1].count) == 2  # optax counts what was applied


SGD = {"optim.name": "sgd", "optim.b1": 0.0, "optim.weight_decay": 0.0, "optim.clip_norm": 0.0}


@pytest.mark.slow
def test_the_update_uses_the_rate_of_attempted_steps():
    """Under SGD without momentum an update is the gradient times the rate, so a skip shows in its size."""
    program = tiny.program(SGD)

    def update(skips):
        state = program.init()
        before = tiny.host(state.params)
        state, _ = run(program, [poisoned(np.nan)] * skips + [BATCHES[0]], state)
        return np.linalg.norm(np.asarray(state.params["head"]) - before["head"])

    np.testing.assert_allclose(update(1) / update(0), 2.0, rtol=1e-4)  # warmup: 5e-3 at step 0, 1e-2 at step 1


@pytest.fixture(scope="module")
def frozen_with_z_loss():
    """(program, parameters before, after, metrics) with frozen tables and an auxiliary loss."""
    groups = (GroupConfig(pattern="embedding|head", frozen=True),)
    program = tiny.program({"optim.groups": groups, "train.aux_losses.z_loss": 1e-3})
    state = program.init()
    before = tiny.host(state.params)
    state, seen = run(program, BATCHES[:2], state)
    return program, before, tiny.host(state.params), seen


@pytest.mark.slow
def test_a_frozen_parameter_stays_and_does_not_count_in_the_norm(frozen_with_z_loss):
    _, before, after, seen = frozen_with_z_loss
    for name in ("embedding", "head"):
        tiny.assert_same_bits(after[name], before[name])
    assert not np.array_equal(after["blocks"]["mlp"]["up"], before["blocks"]["mlp"]["up"])
    assert seen[0]["grad_norm"] < 0.95 * run(tiny.program(), BATCHES[:1])[1][0]["grad_norm"]


def test_auxiliary_losses_are_reported_apart(frozen_with_z_loss):
    _, _, _, seen = frozen_with_z_loss
    np.testing.assert_allclose(seen[0]["objective"], seen[0]["loss"] + 1e-3 * seen[0]["z_loss"], rtol=1e-6)
    assert seen[0]["z_loss"] > 1


def test_the_table_tells_what_is_frozen(frozen_with_z_loss):
    table = {
        row[0]: row
        for row in group_table(
            frozen_with_z_loss[0].model.shapes, frozen_with_z_loss[0].model.shardings, frozen_with_z_loss[0].groups
        )
    }
    assert table["blocks.mlp.up"] == ("blocks.mlp.up", "2x16x32", "float32", "-, fsdp, tensor", "decay 0.1")
    assert table["head"][-1].startswith("frozen (") and table["final_norm"][-1] == "decay 0"


# float16.

FLOAT16 = {"model.compute_dtype": "float16", "train.loss_scale.growth_interval": 3, "train.loss_scale.max": 2.0**17}


@pytest.mark.slow
def test_float16_trains_like_float32(one_device):
    _, seen = run(tiny.program(FLOAT16), BATCHES)
    np.testing.assert_allclose(column(seen, "loss"), column(one_device[1], "loss"), rtol=3e-3)
    # Unscaled before its norm is taken and before it is clipped: the scale is 2**15.
    np.testing.assert_allclose(seen[0]["grad_norm"], one_device[1][0]["grad_norm"], rtol=1e-3)
    assert column(seen, "loss_scale") == [2.0**15] * 3 + [2.0**16] and column(seen, "skipped") == [0] * STEPS


@pytest.mark.slow
def test_float16_is_unscaled_before_it_is_clipped_and_the_norm_is_reported_before():
    """Under plain SGD a clipped update is the gradient times rate, clip norm and 1 / norm, whatever the loss scale."""
    moved, norms = [], []
    for overrides in ({}, {"model.compute_dtype": "float16", "optim.clip_norm": 0.01}):
        program = tiny.program(SGD | overrides)
        state = program.init()
        before = tiny.host(state.params)
        state, seen = run(program, BATCHES[:1], state)
        moved.append(np.asarray(state.params["head"]) - before["head"])
        norms.append(seen[0]["grad_norm"])
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-3)  # computed in float16, and far above clip_norm
    expected = moved[0] * 0.01 / norms[1]
    np.testing.assert_allclose(moved[1], expected, rtol=0.02, atol=0.01 * np.abs(expected).max())


def test_an_overflow_halves_the_scale_skips_the_step_and_good_steps_let_it_grow_again():
    program = tiny.program(FLOAT16)
    state = program.init()
    before = trained_things(state)
    huge = state._replace(loss_scale=state.loss_scale._replace(value=jnp.float32(2.0**40)))
    huge = jax.device_put(huge, jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state))
    state, seen = run(program, [BATCHES[0]], huge)
    assert seen[0]["skipped"] == 1 and not np.isfinite(seen[0]["grad_norm"])
    assert float(state.loss_scale.value) == 2.0**39
    tiny.assert_same_bits(trained_things(state), before)

    state, seen = run(program, BATCHES * 10, program.init())
    scales = column(seen, "loss_scale")
    assert scales[:9] == [2.0**15] * 3 + [2.0**16] * 3 + [2.0**17] * 3
    assert max(scales) == 2.0**17  # the cap
    assert program.train_step._cache_size() == 1


def test_a_scale_that_can_fall_no_further_stays():
    program = tiny.program(FLOAT16)
    state, seen = run(program, [poisoned(np.inf)] * 17)
    assert column(seen, "loss_scale") == [2.0**n for n in range(15, -1, -1)] + [1.0]


@pytest.mark.slow
def test_bfloat16_computes_in_half_and_keeps_single_precision_weights(one_device):
    program = tiny.program({"model.compute_dtype": "bfloat16"})
    state, seen = run(program, BATCHES)
    np.testing.assert_allclose(column(seen, "loss"), column(one_device[1], "loss"), rtol=1e-2)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.ndim}
    assert dtypes == {"float32"} and set(column(seen, "loss_scale")) == {1.0}


@pytest.mark.slow
def test_overflows_while_the_scale_can_still_fall_are_no_steps_in_a_row():
    program = tiny.program(FLOAT16)
    state = program.init()
    huge = state._replace(loss_scale=state.loss_scale._replace(value=jnp.float32(2.0**40)))
    huge = jax.device_put(huge, jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state))
    _, seen = run(program, BATCHES[:3], huge)
    assert column(seen, "skipped_total") == [1, 2, 3] and column(seen, "skipped_in_row") == [0, 0, 0]
