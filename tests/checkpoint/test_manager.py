"""A checkpoint is the state bit for bit, on any mesh, or one clear line that says what does not fit."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckpt_states import abstract, assert_same_bits, make_state, stop_of

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.write import import_orbax
from jaxscale.system.exits import Exit


@pytest.mark.fault("F12")
@pytest.mark.parametrize("mesh_shape", [(4, 2), (8, 1), (2, 4), (1, 1)], ids=str)
def test_the_state_comes_back_bit_for_bit_on_any_mesh(saved, mesh_shape):
    restored = saved.restore(10, abstract(mesh_shape))
    assert_same_bits(restored, make_state(seed=1))
    assert restored.params["block"]["w"].sharding == abstract(mesh_shape).params["block"]["w"].sharding
    assert restored.epoch == 7 and isinstance(restored.epoch, int)


def test_run_comes_back_as_json_without_orbax(saved):
    assert saved.read_run(10) == {"data": {"epoch": 1}, "pair": [1, 2]}


def test_a_part_of_the_state_can_be_restored_alone(saved):
    restored = saved.restore(20, {"params": abstract((1, 1)).params}, partial=True)
    assert_same_bits(restored["params"], make_state(seed=2).params)


def test_another_shape_name_or_dtype_is_a_config_mismatch(saved):
    wanted = abstract((1, 1), width=64)
    error = stop_of(saved.restore, 20, wanted)
    assert error.code == Exit.CONFIG_MISMATCH
    assert "params/block/w is float32[32,16] in the checkpoint, but float32[32,64] in this config" in str(error)

    block = {"w": abstract().params["block"]["w"], "bias": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}
    error = stop_of(saved.restore, 20, abstract()._replace(params=abstract().params | {"block": block}))
    assert error.code == Exit.CONFIG_MISMATCH
    assert "params/block/bias is missing in the checkpoint, but bfloat16[4] in this config" in str(error)

    block = {"w": abstract().params["block"]["w"], "b": jax.ShapeDtypeStruct((4,), jnp.float32)}
    error = stop_of(saved.restore, 20, abstract()._replace(params=abstract().params | {"block": block}))
    assert error.code == Exit.CONFIG_MISMATCH and "bfloat16[4]" in str(error)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_stock_orbax_reads_the_state(saved):
    reader = import_orbax().Checkpointer(import_orbax().PyTreeCheckpointHandler())
    found = reader.restore(saved.directory / "20" / "state")
    np.testing.assert_array_equal(found["params"]["block"]["w"], make_state(seed=2).params["block"]["w"])
    with import_orbax().CheckpointManager(saved.directory) as manager:
        assert manager.latest_step() == 20
        found = manager.restore(20, args=import_orbax().args.Composite(run=import_orbax().args.JsonRestore()))
    assert found.run["run"] == {"data": {"epoch": 2}}


def test_a_random_key_comes_back(checkpoints):
    state = {"key": jax.random.key(7), "on": jnp.array(True), "off": False}
    checkpoints.save(1, state, {}, wait=True)
    shape = jax.eval_shape(lambda: {"key": jax.random.key(0), "on": jnp.array(True)})
    found = checkpoints.restore(1, shape | {"off": True})
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(state["key"])).all()
    assert found["on"] and found["off"] is False


def test_looking_for_a_checkpoint_does_not_import_orbax(tmp_path):
    code = (
        "import sys; from jaxscale.runtime.checkpoint.config import CheckpointConfig; "
        "from jaxscale.runtime.checkpoint.manager import Checkpoints; "
        "Checkpoints(sys.argv[1], CheckpointConfig()).latest_step(); "
        "sys.exit('orbax.checkpoint' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env).returncode == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"keep_last": 0}, {"save_every_steps": -1}, {"keep_every_steps": -2}, {"keep_best": -1},
        {"max_failed_saves": 0}, {"max_save_seconds": 0},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        CheckpointConfig(**settings)
