"""The average is numpy's mean, and a checkpoint like any other."""

import json

import jax
import jax.numpy as jnp
import kept_run
import numpy as np
import pytest
import tensorstore

from jaxscale.runtime.checkpoint import array_store
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.derived_weights import average_steps, merge_lora
from jaxscale.runtime.checkpoint.lock_stores import folder_lock
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.verify import verify_folder
from jaxscale.system.exits import Exit, Stop


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def restored(folder, step, tree):
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    return checkpoints.restore(step, abstract(tree))


@pytest.mark.slow
def test_it_is_numpys_mean_bit_for_bit_and_restores_as_weights(kept, tmp_path):
    told = []
    done = average_steps(kept, [10, 30, 20], tmp_path / "mean", on_bytes=lambda *bytes_: told.append(bytes_))
    states = [kept_run.make_state(step)["params"] for step in kept_run.STEPS]
    mean = restored(tmp_path / "mean", 30, {"params": states[0]})["params"]
    for name in ("wide", "half"):
        want = np.mean(np.stack([np.asarray(state[name], np.float64) for state in states]), axis=0)
        np.testing.assert_array_equal(np.asarray(mean[name]), want.astype(states[0][name].dtype))
        assert mean[name].dtype == states[0][name].dtype
    assert mean["block"]["count"] == 5
    assert (done.step, done.num_leaves, done.num_bytes) == (30, 3, 96 * 40 * 4 + 7 * 3 * 2 + 4)
    assert told[-1] == (done.num_bytes, done.num_bytes)


def test_it_is_sealed_verified_and_says_what_was_averaged(kept, tmp_path):
    average_steps(kept, [10, 20], tmp_path / "mean")
    checkpoints = Checkpoints(tmp_path / "mean" / "checkpoints", CheckpointConfig())
    assert checkpoints.all_steps() == [20] and verify_folder(checkpoints.directory / "20").damages == ()
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["20"]
    record = checkpoints.read_record(20)
    assert sorted(record["leaves"]) == ["params/block/count", "params/half", "params/wide"]
    made = record["run"]["average"]
    assert (made["of"], made["steps"], made["what"]) == (str(kept.directory.parent), [10, 20], "params")
    assert made["records"] == [kept.read_record(step)["sha256"] for step in (10, 20)]
    assert record["run"]["config"] == kept.read_run(20)["config"]
    config = json.loads((tmp_path / "mean" / "config.json").read_text())
    assert (
        config["average"] == made
        and config["config"] == json.loads((kept.directory.parent / "config.json").read_text())["config"]
    )


def test_one_step_averages_to_itself_and_other_parts_of_the_state_become_weights(kept, tmp_path):
    average_steps(kept, [20], tmp_path / "one")
    state = kept_run.make_state(20)
    one = restored(tmp_path / "one", 20, {"params": state["params"]})["params"]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(state["params"])):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    average_steps(kept, [20], tmp_path / "moments", what="opt_state")
    moments = restored(tmp_path / "moments", 20, {"params": state["opt_state"]})["params"]
    np.testing.assert_array_equal(np.asarray(moments["wide"]), np.asarray(state["opt_state"]["wide"]))


def test_what_was_frozen_stands_in_an_average_of_averages_and_in_a_merge_of_them_as_it_is(tmp_path):
    params = {"w": jnp.ones((2, 3)), "w_lora_a": jnp.full((2, 1), 2.0), "w_lora_b": jnp.full((1, 3), 5.0)}
    state = {"params": params, "ema": {"w_lora_b": jnp.full((1, 3), 7.0)}}  # A is frozen too
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    for step in (1, 2):
        checkpoints.save(step, state, {"config": {"lora": {"rank": 1, "alpha": 1.0}}, "step": step}, wait=True)
    checkpoints.close()
    average_steps(checkpoints, [1, 2], tmp_path / "mean", what="ema")
    mean = restored(tmp_path / "mean", 2, {"params": params})["params"]
    assert jax.tree.map(lambda leaf: float(leaf.max()), mean) == {"w": 1.0, "w_lora_a": 2.0, "w_lora_b": 7.0}
    merge_lora(checkpoints, 2, tmp_path / "merged", what="ema")
    merged = restored(tmp_path / "merged", 2, {"params": {"w": params["w"]}})["params"]
    np.testing.assert_array_equal(np.asarray(merged["w"]), np.full((2, 3), 15.0))


def test_zeros_are_written_too(tmp_path):
    state = {"params": {"w": jnp.zeros((4, 3)), "b": jnp.ones(2)}}
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    checkpoints.save(1, state, {})
    checkpoints.close()
    average_steps(checkpoints, [1], tmp_path / "mean")
    assert not np.any(restored(tmp_path / "mean", 1, state)["params"]["w"])
    base = array_store.kvstore_spec(tmp_path / "mean" / "checkpoints" / "1" / "state")
    names = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
    assert b"params.w/0.0" in names  # or nobody could tell zeros from a piece that was lost


@pytest.mark.fault("F2")
def test_a_damaged_source_is_named_and_nothing_counts_as_a_step(run, tmp_path):
    file, begin, _ = kept_run.location(run, 20, "params.wide")
    kept_run.flip_bit(run.directory / "20" / file, begin * 8 + 100)
    with pytest.raises(Stop, match="step 20 is damaged: params/wide: its bits differ .*; exclude that step") as caught:
        average_steps(run, [10, 20], tmp_path / "mean")
    assert caught.value.code == Exit.CHECKPOINT_CORRUPT and "\n" not in str(caught.value)
    assert Checkpoints(tmp_path / "mean" / "checkpoints", CheckpointConfig()).all_steps() == []
    average_steps(run, [10, 30], tmp_path / "mean")  # what the first try left behind is no hindrance


def test_a_folder_in_use_is_never_written_to(kept, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("x")
    with pytest.raises(ValueError, match="is not empty: it contains diary.txt; choose a new folder"):
        average_steps(kept, [10], tmp_path / "notes")
    with pytest.raises(ValueError, match="is not empty: it contains config.json"):
        average_steps(kept, [10], kept.directory.parent)
    at_it = tmp_path / "mean" / "checkpoints" / "averaging-10" / "state"
    at_it.mkdir(parents=True)
    with folder_lock(tmp_path / "mean" / "checkpoints", ""):
        with pytest.raises(ValueError, match="another process is writing into .*checkpoints; wait until it ends"):
            average_steps(kept, [10], tmp_path / "mean")
    assert at_it.exists()
    average_steps(kept, [10], tmp_path / "mean")
    with pytest.raises(ValueError, match="is not empty: it contains checkpoints/10"):
        average_steps(kept, [20], tmp_path / "mean")


def test_steps_that_do_not_fit_together_are_refused(run, tmp_path):
    with pytest.raises(ValueError, match="--what=ema: step 20 contains only done, epoch, flag, key"):
        average_steps(run, [10, 20], tmp_path / "mean", what="ema")
    leaves = run.read_record(10)["leaves"]
    kept_run.reseal(run, 10, leaves=leaves | {"params/wide": [[96, 41], "float32", 1]})
    with pytest.raises(ValueError, match="steps 10 and 20 differ in the shape or dtype of params/wide"):
        average_steps(run, [10, 20], tmp_path / "mean")


def test_whole_numbers_that_differ_have_no_mean(kept, tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    for step in (1, 2):
        checkpoints.save(step, {"params": {"w": jnp.ones(3), "seen": jnp.int32(step)}}, {})
        checkpoints.wait()
    checkpoints.close()
    with pytest.raises(ValueError, match=r"params/seen \(int32\) cannot be averaged"):
        average_steps(checkpoints, [1, 2], tmp_path / "mean")
