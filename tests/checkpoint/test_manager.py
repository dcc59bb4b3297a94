"""A checkpoint is the state bit for bit, on any mesh, or one clear line that says why not."""

import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.checkpoint.manager import CheckpointConfig, Checkpoints, kept_steps
from jaxscale.exits import Exit, Stop


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    epoch: int


def shardings(mesh_shape, tree):
    devices = jax.devices()[: int(np.prod(mesh_shape))]
    mesh = jax.make_mesh(mesh_shape, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=devices)
    spec = lambda leaf: jax.sharding.PartitionSpec("data", "tensor") if leaf.ndim == 2 else jax.sharding.PartitionSpec()
    return jax.tree.map(lambda leaf: jax.sharding.NamedSharding(mesh, spec(leaf)), tree)


def init(seed=0, width=16):
    key = jax.random.key(seed)
    params = {
        "block": {"w": jax.random.normal(key, (32, width)), "b": jnp.full((4,), 0.1, jnp.bfloat16)},
        "flags": jnp.array([True, False, True]),
    }
    frozen = {"block": {"w": True, "b": False}, "flags": False}  # masked: MaskedNode and EmptyState among the leaves
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adam(1e-3), frozen))
    return jnp.int32(3), params, optimizer.init(params)


@functools.cache
def make_state(mesh_shape=(4, 2), **settings):
    shape = jax.eval_shape(lambda: init(**settings))
    return State(*jax.jit(lambda: init(**settings), out_shardings=shardings(mesh_shape, shape))(), epoch=7)


def abstract(mesh_shape=(4, 2), **settings):
    shape = jax.eval_shape(lambda: init(**settings))
    return State(
        *jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            shape,
            shardings(mesh_shape, shape),
        ),
        epoch=0,
    )


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.fixture
def checkpoints(tmp_path):
    with_room = Checkpoints(tmp_path, CheckpointConfig())
    yield with_room
    with_room.close()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with steps 10 and 20 of two different states, to be copied and not touched."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("two_steps"), CheckpointConfig())
    checkpoints.save(10, make_state(seed=1), {"data": {"epoch": 1}, "pair": (1, 2)})
    checkpoints.save(20, make_state(seed=2), {"data": {"epoch": 2}})
    checkpoints.close()
    return checkpoints.directory


@pytest.fixture
def saved(two_steps, checkpoints):
    """Checkpoints in a copy of two_steps."""
    shutil.copytree(two_steps, checkpoints.directory, dirs_exist_ok=True)
    return checkpoints


def stop_of(action, *arguments, **settings):
    with pytest.raises(Stop) as caught:
        action(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return caught.value


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


def test_donating_the_state_right_after_save_does_not_change_what_is_saved(checkpoints):
    grow = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + leaf, tree), donate_argnums=0)
    state = {"w": jnp.arange(1, 2_000_001, dtype=jnp.float32)}
    for step in range(1, 4):
        expected = np.array(state["w"])
        checkpoints.save(step, state, {})
        for _ in range(3):
            state = grow(state)
        checkpoints.wait()
        found = checkpoints.restore(step, {"w": jax.ShapeDtypeStruct((2_000_000,), jnp.float32)})
        np.testing.assert_array_equal(found["w"], expected)


def test_save_returns_before_the_files_are_there(checkpoints):
    state = {"w": jnp.asarray(np.random.default_rng(0).normal(size=4_000_000), jnp.float32)}
    blocked_seconds = checkpoints.save(1, state, {})
    assert checkpoints.latest_step() is None and blocked_seconds > 0
    deadline = time.monotonic() + 60
    while checkpoints.pending_step is not None and time.monotonic() < deadline:
        checkpoints.poll()
        time.sleep(0.01)
    assert checkpoints.latest_step() == 1


def test_only_steps_that_hold_a_checkpoint_count(saved):
    for name in ("99", "98.orbax-checkpoint-tmp-5", "097", "rewound-30", "²"):
        (saved.directory / name).mkdir()
    (saved.directory / "98.orbax-checkpoint-tmp-5" / "state").mkdir()
    (saved.directory / "96").mkdir()
    (saved.directory / "96" / "notes.txt").write_text("mine")
    (saved.directory / "95").write_text("a file")
    assert saved.all_steps() == [10, 20]
    assert Checkpoints(saved.directory / "nothing", CheckpointConfig()).latest_step() is None


def test_old_steps_go_and_foreign_folders_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2, keep_every_steps=4))
    (tmp_path / "1000").mkdir()
    (tmp_path / "5").mkdir()
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "notes.txt").write_text("mine")
    for step in range(1, 8):
        checkpoints.save(step, {"w": jnp.ones(3)}, {})
    checkpoints.close()
    assert checkpoints.all_steps() == [4, 6, 7]
    assert (tmp_path / "0" / "notes.txt").exists() and (tmp_path / "1000").exists()
    again = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))  # another process, another rule
    again.save(8, {"w": jnp.ones(3)}, {})
    again.close()
    assert again.all_steps() == [8]


def test_kept_steps_are_the_newest_and_the_multiples():
    assert kept_steps({1, 2, 3, 4, 5, 6}, keep_last=2, keep_every_steps=3) == {3, 5, 6}
    assert kept_steps({1, 2, 3}, keep_last=5, keep_every_steps=0) == {1, 2, 3}


def test_saving_a_step_twice_or_going_back_is_an_error(saved):
    for step in (20, 15):
        error = stop_of(saved.save, step, make_state(), {})
        assert error.code == Exit.STORAGE and f"step {step} was not saved" in str(error) and "step 20" in str(error)


def test_a_foreign_folder_in_the_way_is_named(saved):
    (saved.directory / "30").mkdir()
    (saved.directory / "30" / "notes.txt").write_text("mine")
    error = stop_of(saved.save, 30, make_state(), {})
    assert error.code == Exit.STORAGE and str(saved.directory / "30") in str(error)


def test_another_shape_name_or_dtype_is_a_config_mismatch(saved):
    wanted = abstract((1, 1), width=64)
    error = stop_of(saved.restore, 20, wanted)
    assert error.code == Exit.CONFIG_MISMATCH
    assert "params/block/w is float32[32,16] in the checkpoint and float32[32,64] in this config" in str(error)

    block = {"w": abstract().params["block"]["w"], "bias": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}
    error = stop_of(saved.restore, 20, abstract()._replace(params=abstract().params | {"block": block}))
    assert error.code == Exit.CONFIG_MISMATCH
    assert "params/block/bias is missing in the checkpoint and bfloat16[4] in this config" in str(error)

    block = {"w": abstract().params["block"]["w"], "b": jax.ShapeDtypeStruct((4,), jnp.float32)}
    error = stop_of(saved.restore, 20, abstract()._replace(params=abstract().params | {"block": block}))
    assert error.code == Exit.CONFIG_MISMATCH and "bfloat16[4]" in str(error)


def data_files(checkpoints, step):
    """The files that hold array data, largest first."""
    folder = checkpoints.directory / str(step) / "state"
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name == "d"]
    return sorted(files, key=lambda path: -path.stat().st_size)


def flip_bit(path, bit):
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(raw)


def test_a_flipped_bit_is_never_trained_on(checkpoints):
    rng = np.random.default_rng(5)
    state = {"w": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32), "b": jnp.ones((8,), jnp.bfloat16)}
    shape = jax.eval_shape(lambda: state)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    found = 0
    for trial in range(12):
        path = data_files(checkpoints, 1)[trial % 2]
        original = path.read_bytes()
        flip_bit(path, int(rng.integers(len(original) * 8)))
        try:
            assert_same_bits(checkpoints.restore(1, shape), state)  # a bit that no array is read from
        except Stop as error:
            assert error.code == Exit.CHECKPOINT_CORRUPT and "\n" not in str(error)
            found += "bits of w" in str(error)
        path.write_bytes(original)
    assert found >= 3  # most flips read back as plausible numbers and only the fingerprint sees them


def test_a_flipped_bit_in_the_run_item_is_always_found(saved):
    path = saved.directory / "20" / "run" / "metadata"
    original = path.read_bytes()
    for bit in range(0, len(original) * 8, 41):
        flip_bit(path, bit)
        assert stop_of(saved.read_run, 20).code == Exit.CHECKPOINT_CORRUPT
        path.write_bytes(original)
    assert saved.read_run(20) == {"data": {"epoch": 2}}


@pytest.mark.parametrize("damage", ["truncated", "deleted", "no state", "no run", "no arrays", "not readable"])
def test_what_cannot_be_read_is_one_line_with_the_way_out(saved, damage):
    folder = saved.directory / "20"
    if damage == "truncated":
        for path in data_files(saved, 20):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "deleted":
        for path in data_files(saved, 20):
            path.unlink()
    elif damage == "no arrays":
        (folder / "state" / "manifest.ocdbt").unlink()
    elif damage == "not readable":
        (folder / "state" / "_METADATA").write_text("{")
    else:
        shutil.rmtree(folder / damage.removeprefix("no "))
    assert saved.latest_step() == 20  # a damaged newest step is not passed over in silence
    error = stop_of(saved.restore, 20, abstract())
    assert error.code == Exit.CHECKPOINT_CORRUPT
    assert "step 20" in str(error) and f"move {folder} away to go on from step 10" in str(error)
    assert len(str(error)) < 700


def test_without_an_older_step_the_line_says_so(checkpoints):
    checkpoints.save(5, {"w": jnp.ones(3)}, {})
    checkpoints.wait()
    (checkpoints.directory / "5" / "run" / "metadata").write_text("{")
    assert "there is no older step" in str(stop_of(checkpoints.read_run, 5))


def test_a_full_disk_is_reported_with_its_cause_and_the_older_step_survives(saved):
    state = {"w": jnp.asarray(np.random.default_rng(0).normal(size=500_000), jnp.float32)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # as ENOSPC, for a test that is not root
    try:
        with pytest.raises(Stop) as caught:
            saved.save(30, state, {})
            while saved.pending_step is not None:
                saved.poll()
                time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = caught.value
    assert error.code == Exit.STORAGE and "saving step 30" in str(error) and "File too large" in str(error)
    assert "step 20 is the newest that is safe" in str(error) and "\n" not in str(error)
    assert saved.all_steps() == [10, 20]
    assert_same_bits(saved.restore(20, abstract()), make_state(seed=2))
    saved.save(31, state, {})  # the disk has room again
    saved.wait()
    assert saved.latest_step() == 31


NOISY = """
import pathlib, resource, sys, time
import jax, jax.numpy as jnp, numpy as np
from jaxscale.checkpoint.manager import CheckpointConfig, Checkpoints
from jaxscale.exits import Stop
checkpoints = Checkpoints(sys.argv[1], CheckpointConfig())
state = {name: jnp.asarray(np.random.default_rng(0).normal(size=300_000), jnp.float32) for name in "abcdefgh"}
checkpoints.save(1, state, {})
checkpoints.wait()
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
try:
    checkpoints.save(2, state, {})
    checkpoints.wait()
except Stop as error:
    print(int(error.code))
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
for path in pathlib.Path(sys.argv[1], "1", "state").rglob("d/*"):
    path.write_bytes(path.read_bytes()[:100])
for _ in range(2):
    try:
        checkpoints.restore(1, jax.eval_shape(lambda: state))
    except Stop as error:
        print(int(error.code))
checkpoints.close()
"""


def test_failures_print_nothing_but_their_one_line(tmp_path):
    command = [sys.executable, "-c", NOISY, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.stdout.split()) == ("", ["14", "19", "19"])


SAVER = """
import sys
import jax.numpy as jnp, numpy as np
from jaxscale.checkpoint.manager import CheckpointConfig, Checkpoints
checkpoints = Checkpoints(sys.argv[1], CheckpointConfig(keep_last=2))
values = np.random.default_rng(0).normal(size=2_000_000).astype(np.float32)
first = (checkpoints.latest_step() or 0) + 1
for step in range(first, first + 1000):
    checkpoints.save(step, {"w": jnp.asarray(values) + step}, {"step": step})
    print(step, flush=True)
"""


def test_kill_9_during_a_save_leaves_the_step_before_it_readable(tmp_path):
    values = np.random.default_rng(0).normal(size=2_000_000).astype(np.float32)
    reached, fell_into_a_save = 0, False
    for attempt, delay in enumerate((0.0, 0.02, 0.05, 0.01, 0.03, 0.07)):
        if attempt >= 3 and fell_into_a_save:  # the first three nearly always do; a busy machine may need more
            break
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""},
        )
        with process:
            for line in process.stdout:
                if int(line) >= reached + 3:
                    break
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        reached = int(line)
        fell_into_a_save |= any("tmp" in path.name for path in tmp_path.iterdir())
        checkpoints = Checkpoints(tmp_path, CheckpointConfig())
        latest = checkpoints.latest_step()
        assert latest >= reached - 1  # `reached` was begun after the one before it was committed
        restored = checkpoints.restore(latest, {"w": jax.ShapeDtypeStruct((2_000_000,), jnp.float32)})
        np.testing.assert_array_equal(restored["w"], values + np.float32(latest))
        assert checkpoints.read_run(latest) == {"step": latest}
        reached = latest
    assert fell_into_a_save


def test_what_a_killed_save_left_behind_goes_at_the_next_save(checkpoints):
    leftover = checkpoints.directory / "5.orbax-checkpoint-tmp" / "state"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("x" * 100)
    checkpoints.save(7, {"w": jnp.ones(3)}, {})
    checkpoints.wait()
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["7"]


def test_looking_for_a_checkpoint_does_not_import_orbax(tmp_path):
    code = (
        "import sys; from jaxscale.checkpoint.manager import CheckpointConfig, Checkpoints; "
        "Checkpoints(sys.argv[1], CheckpointConfig()).latest_step(); "
        "sys.exit('orbax.checkpoint' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env).returncode == 0


@pytest.mark.parametrize("settings", [{"keep_last": 0}, {"save_every_steps": -1}, {"keep_every_steps": -2}], ids=str)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        CheckpointConfig(**settings)


def test_a_file_where_the_checkpoints_should_be_is_one_line(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ValueError, match="checkpoints is a file where the folder of checkpoints belongs; move it away"):
        Checkpoints(tmp_path / "checkpoints", CheckpointConfig()).latest_step()
