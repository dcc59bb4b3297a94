"""A branch takes what it is told to, bit for bit and straight into place, or says in one line what does not fit."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import kept_run
import numpy as np
import optax
import pytest
import tiny
from ckpt_states import data_files, flip_bit
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.core.models.lora_mup_config import LoraConfig
from jaxscale.core.state import LossScale, init_state
from jaxscale.runtime.checkpoint.branch import BranchPlan, branch_state, check_lora_scale, open_source
from jaxscale.runtime.checkpoint.config import CheckpointConfig, InitConfig
from jaxscale.runtime.checkpoint.derived_weights import merge_lora
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.system.exits import BadInput, Exit, Stop

OLD_VOCAB, WIDTH = 12, 8
SPECS = {"embedding": ("tensor", "data"), "head": ("data", "tensor"), "w": (None, "data", "tensor")}


def model(seed, vocab=OLD_VOCAB, head="head", width=WIDTH):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "embedding": jax.random.normal(keys[0], (vocab, WIDTH)),
        "blocks": {"mlp": {"w": jax.random.normal(keys[1], (2, WIDTH, width))}, "norm": jnp.ones((2, WIDTH))},
        head: jax.random.normal(keys[2], (WIDTH, vocab)),
    }


@functools.cache
def program(seed=0, optimizer=optax.adam, ema=False, mesh=(1, 1), **shape):
    """As much of a Program as a branch looks at: the state of a model of 4 arrays."""

    def init():
        params = model(seed, **shape)
        one = jnp.ones(())
        scale = LossScale(one, jnp.zeros((), jnp.int32))
        return init_state(params, optimizer(1e-3), scale, jax.random.key(seed), params if ema else None)

    devices = jax.devices()[: mesh[0] * mesh[1]]
    mesh = jax.make_mesh(mesh, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    spec = lambda path: PartitionSpec(*SPECS.get(getattr(path[-1], "key", None), ()))
    abstract = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec(path))),
        jax.eval_shape(init),
    )
    cfg = types.SimpleNamespace(
        lora=LoraConfig(), model=types.SimpleNamespace(vocab_size=shape.get("vocab", OLD_VOCAB))
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return types.SimpleNamespace(init=jax.jit(init, out_shardings=shardings), abstract_state=abstract, cfg=cfg)


def trained(state, by):
    """The state with other bits everywhere, as after `by` steps."""
    added = lambda tree: jax.tree.map(lambda leaf: leaf + leaf.dtype.type(by), tree)
    return added(state._replace(key=None))._replace(key=state.key)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """(folder, the states of steps 3 and 7) of a run with an average."""
    folder = tmp_path_factory.mktemp("old")
    states = {step: trained(program(seed=1, ema=True).init(), by=step) for step in (3, 7)}
    states = {step: s._replace(ema=trained(s, by=50).params) for step, s in states.items()}
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    for step, state in states.items():
        run = {
            "config": {"model": {"vocab_size": OLD_VOCAB}},
            "ancestry": [{"path": "older", "step": 1, "sha256": "x"}],
        }
        checkpoints.save(step, state, run)
    checkpoints.close()
    return folder, {step: tiny.host(state) for step, state in states.items()}


def branch(old, new=None, **settings):
    """(state on the host, the state that a new run would have, lines)."""
    folder, new, lines = old[0], new or program(), []
    settings = {"from_path": str(folder)} | settings
    state = branch_state(new, InitConfig(**settings), lines.append)
    for leaf, planned in zip(jax.tree.leaves(state), jax.tree.leaves(new.abstract_state), strict=True):
        assert leaf.sharding == planned.sharding and leaf.dtype == planned.dtype and leaf.shape == planned.shape
    return tiny.host(state), tiny.host(new.init()), lines


def refusal(old, new=None, **settings):
    with pytest.raises(ValueError) as error:
        branch(old, new, **settings)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.slow
def test_weights_alone_come_from_the_newest_step_and_all_else_is_new(old):
    state, fresh, lines = branch(old)
    tiny.assert_same_bits(state.params, old[1][7].params)
    tiny.assert_same_bits(state._replace(params=None), fresh._replace(params=None))
    assert lines == [
        f"init: params of {old[0]}/checkpoints/7",
        "init: loaded   params/blocks/mlp: w; 128 numbers",
        "init: loaded   params/blocks: norm; 16 numbers",
        "init: loaded   params: embedding, head; 192 numbers",
        "init: fresh    opt_state: all; 673 numbers",
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize("path", ["{}/checkpoints/3", "{}/checkpoints"])
def test_a_step_can_be_named(old, path):
    state, _, _ = branch(old, from_path=path.format(old[0]))
    tiny.assert_same_bits(state.params, old[1][3 if path.endswith("3") else 7].params)


def test_a_run_may_be_called_by_a_number(old, tmp_path):
    (tmp_path / "2026").symlink_to(old[0])
    assert open_source(str(tmp_path / "2026")).step == 7


def test_the_state_brings_the_optimizer_along_but_not_the_step(old):
    state, fresh, _ = branch(old, what="state")
    tiny.assert_same_bits((state.params, state.opt_state), (old[1][7].params, old[1][7].opt_state))
    tiny.assert_same_bits((state.step, state.key, state.guard), (fresh.step, fresh.key, fresh.guard))
    assert state.ema is None


def test_the_average_can_be_what_the_new_run_begins_with(old):
    state, _, _ = branch(old, what="ema")
    tiny.assert_same_bits(state.params, old[1][7].ema)


@pytest.mark.parametrize(("what", "field"), [("params", "params"), ("ema", "ema"), ("state", "ema")])
def test_a_new_average_begins_as_the_weights_unless_the_old_one_comes_along(old, what, field):
    state, _, lines = branch(old, program(ema=True), what=what)
    tiny.assert_same_bits(state.ema, getattr(old[1][7], field))
    assert ("init: fresh    ema: a copy of the weights" in lines) == (what != "state")


def test_it_is_read_straight_into_the_shards_of_another_mesh_and_both_trees_can_be_donated(old):
    new = program(ema=True, mesh=(4, 2))
    state = branch_state(new, InitConfig(from_path=str(old[0])), lambda line: None)
    for leaf, planned in zip(jax.tree.leaves(state), jax.tree.leaves(new.abstract_state), strict=True):
        assert leaf.sharding == planned.sharding
    tiny.assert_same_bits(tiny.host(state.params), old[1][7].params)
    jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0)(state)  # no buffer is given twice


def test_random_weights_are_given_up_before_the_others_are_read(old):
    made = []
    new = types.SimpleNamespace(**vars(program()) | {"init": lambda: made.append(program().init()) or made[0]})
    source = open_source(str(old[0]))

    def restore(*args, **more):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(made[0].params))
        return source.checkpoints.restore(*args, **more)

    watched = types.SimpleNamespace(restore=restore, directory=source.checkpoints.directory)
    source_watched = dataclasses.replace(source, checkpoints=watched)
    branch_state(new, InitConfig(from_path=str(old[0])), lambda line: None, source_watched)
    assert made


# Names.


def test_arrays_can_have_other_names_here(old):
    new = program(head="output")
    state, _, _ = branch(old, new, what="state", rename=("/head$=>/output",))
    tiny.assert_same_bits(state.params["output"], old[1][7].params["head"])
    tiny.assert_same_bits(state.opt_state[0].mu["output"], old[1][7].opt_state[0].mu["head"])


def test_what_is_skipped_stays_as_a_new_model_has_it(old):
    state, fresh, lines = branch(old, skip=("head",))
    tiny.assert_same_bits(state.params["head"], fresh.params["head"])
    tiny.assert_same_bits(state.params["blocks"], old[1][7].params["blocks"])
    assert "init: fresh    params: head; 96 numbers" in lines and "init: left out params/head" in lines


def test_names_that_do_not_fit_are_told_with_the_nearest(old):
    told = refusal(old, program(head="header"))
    assert told == (
        f"init.from_path: {old[0]}/checkpoints/7 does not fit this config: params/header is not in the checkpoint "
        "(nearest: params/head); params/head is in the checkpoint, but not in this config "
        "(nearest: params/header or params/embedding); use "
        "init.rename or init.skip, or the model config of the checkpoint"
    )


def test_shapes_that_do_not_fit_are_told(old):
    told = refusal(old, program(width=4))
    mismatch = (
        "params/blocks/mlp/w is float32[2,8,8] in the checkpoint, but float32[2,8,4] in this config; use init.rename"
    )
    assert mismatch in told


def test_another_optimizer_is_refused_with_its_state_and_welcome_without(old):
    assert "opt_state/0/trace/embedding is not in the checkpoint (nearest: " in refusal(
        old, program(optimizer=momentum), what="state"
    )
    branch(old, program(optimizer=momentum))


def momentum(lr):
    return optax.sgd(lr, momentum=0.9)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rename": ("heat=>output",)}, "init.rename='heat=>output' matches no leaf of .*similar: params/head"),
        ({"rename": ("embedding|head=>one",)}, "init.rename maps several arrays of .* to params/one"),
        ({"skip": ("lm_head",)}, "init.skip='lm_head' matches no leaf of the checkpoint .*; similar: .*params/head"),
        ({"from_path": "nowhere"}, "init.from_path=nowhere contains no checkpoint"),
        ({"from_path": "{}/checkpoints/4"}, "has no step 4; use step 3 or 7"),
    ],
    ids=str,
)
def test_rules_that_do_nothing_and_places_that_hold_nothing_are_refused(old, settings, told):
    settings = {k: v.format(old[0]) if k == "from_path" else v for k, v in settings.items()}
    with pytest.raises(ValueError, match=told):
        branch(old, **settings)


def test_an_average_that_was_never_kept_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(1, program().init(), {})
    checkpoints.close()
    assert "has only guard, key, loss_scale, opt_state, params, step" in refusal((tmp_path, None), what="ema")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rename": ("a->b",)}, "rename='a->b' must have the form 'REGEX=>REPLACEMENT'"),
        ({"skip": ("(",)}, "rename or skip has an invalid regular expression '\\('"),
        (
            {"from_path": None, "what": "ema"},
            "what requires a checkpoint with initial weights; set from_path",
        ),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        InitConfig(**{"from_path": "x"} | settings)


# The vocabulary.


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1), (1, 8)], ids=str)
def test_a_larger_vocabulary_gets_rows_that_are_the_mean_of_the_old_ones(old, mesh):
    new = program(vocab=16, mesh=mesh)  # 8 devices divide the new size and not the old one
    state, _, lines = branch(old, new, resize_vocab=True, what="state")
    for now, then in ((state.params, old[1][7].params), (state.opt_state[0].nu, old[1][7].opt_state[0].nu)):
        np.testing.assert_array_equal(now["embedding"][:OLD_VOCAB], then["embedding"])
        np.testing.assert_array_equal(now["head"][:, :OLD_VOCAB], then["head"])
        mean = then["embedding"].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(now["embedding"][OLD_VOCAB:], np.tile(mean, (4, 1)), rtol=1e-6)  # float32 sums
    tiny.assert_same_bits(state.params["blocks"], old[1][7].params["blocks"])
    assert "init: resized  params/head: 12 -> 16; the 4 added rows are the mean of the old rows" in lines


def test_or_rows_as_a_new_model_has_them(old):
    state, fresh, _ = branch(old, program(vocab=16), resize_vocab=True, new_rows="init")
    np.testing.assert_array_equal(state.params["head"][:, :OLD_VOCAB], old[1][7].params["head"])
    np.testing.assert_array_equal(state.params["head"][:, OLD_VOCAB:], fresh.params["head"][:, OLD_VOCAB:])


def test_a_smaller_vocabulary_loses_its_last_rows(old):
    state, _, lines = branch(old, program(vocab=10), resize_vocab=True)
    np.testing.assert_array_equal(state.params["embedding"], old[1][7].params["embedding"][:10])
    assert "init: resized  params/embedding: 12 -> 10; the last 2 rows are removed" in lines


def test_another_vocabulary_is_refused_unless_asked_for(old):
    told = refusal(old, program(vocab=16))
    mismatch = "params/embedding is float32[12,8] in the checkpoint, but float32[16,8] in this config"
    assert f"{mismatch} (init.resize_vocab=true resizes it)" in told
    assert "params/blocks/mlp/w is" in refusal(
        old, program(vocab=16, width=12), resize_vocab=True
    )  # 12 is no vocabulary


# Descent.


def test_a_branch_records_what_it_descends_from(old):
    first, second = open_source(str(old[0])).ancestry
    assert (first["path"], first["step"]) == (str(old[0] / "checkpoints"), 7) and len(first["sha256"]) == 64
    assert second == {"path": "older", "step": 1, "sha256": "x"}


def test_begun_again_it_is_the_same_ancestor_or_none(old):
    ancestor = open_source(f"{old[0]}/checkpoints/3").ancestry[0]
    assert open_source(str(old[0]), ancestor).step == 3  # though 7 is newer
    with pytest.raises(ValueError, match="step 3 has the sha256 .*, but this run started from"):
        open_source(str(old[0]), ancestor | {"sha256": "other"})
    with pytest.raises(ValueError, match="step 5, the origin of this run, no longer exists"):
        open_source(str(old[0]), ancestor | {"step": 5})


def test_one_changed_bit_in_the_other_run_is_seen(old, tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(1, program().init(), {})
    checkpoints.close()
    for file in data_files(tmp_path / "checkpoints", 1):  # which of them a restore reads is Orbax's affair
        flip_bit(file, file.stat().st_size * 4)
    with pytest.raises(Stop) as stop:
        branch((tmp_path, None), what="state")
    assert stop.value.code is Exit.CHECKPOINT_CORRUPT


def test_settings_of_adapters_that_this_version_does_not_know_are_named(run, tmp_path):
    kept_run.reseal(run, 30, run={"config": {"lora": {"rank": 2, "dropout": 0.1}}, "step": 30})
    with pytest.raises(BadInput, match="30: lora.dropout is not a setting of LoraConfig"):
        merge_lora(run, 30, tmp_path / "merged")
    source = open_source(str(run.directory.parent))
    with pytest.raises(BadInput, match="30: lora.dropout is not a setting of LoraConfig"):
        check_lora_scale(source, BranchPlan(), LoraConfig())
