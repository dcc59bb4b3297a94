"""Saving holds nobody up, and a save that fails is known one step later, with its cause, and tried again."""

import contextlib
import json
import os
import pathlib
import resource
import shutil
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckpt_states import abstract, assert_same_bits, make_state, stop_of
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import read_last_good
from jaxscale.runtime.checkpoint.storage_errors import no_inodes_message, stop_if_unwritable
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop

ROOT = os.geteuid() == 0


class Notes(list):
    """Events, as they come."""

    def __call__(self, kind, step=None, **facts):
        self.append((kind, step, facts))

    def of(self, kind):
        return [(step, facts) for found, step, facts in self if found == kind]


@pytest.fixture
def notes():
    return Notes()


@pytest.fixture
def noted(tmp_path, notes):
    """Checkpoints in an empty folder whose events are kept."""
    checkpoints = Checkpoints(tmp_path / "run", CheckpointConfig(), note=notes)
    yield checkpoints
    checkpoints.close()


@pytest.fixture
def small_files():
    """A function that lets files grow to so many bytes, as a full disk would for a test that is not root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size or soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_devices_with_copies_of_an_array_each_write_a_part_of_a_large_one_and_one_writes_a_small_one(noted, tmp_path):
    copied = NamedSharding(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), PartitionSpec())
    shapes = {"large": (1024, 512), "small": (1024, 511)}  # halves of 1 MiB, and of less
    values = {name: np.random.default_rng(0).normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    state = jax.device_put(values, copied)
    noted.save(1, state, {"step": 1})
    noted.wait()
    (found,) = (tmp_path / "run" / "1" / "state" / "array_metadatas").iterdir()
    told = [one["array_metadata"] for one in json.loads(found.read_text())["array_metadatas"]]
    assert {one["param_name"]: tuple(one["write_shape"]) for one in told} == shapes | {"large": (512, 512)}
    restored = noted.restore(1, state)
    assert all(np.array_equal(restored[name], values[name]) for name in values)


def big_state(seed=0, number=500_000):
    return {"w": jnp.asarray(np.random.default_rng(seed).normal(size=number), jnp.float32)}


def ended(checkpoints):
    """Waits as a training loop does between two steps, without asking anything."""
    deadline = time.monotonic() + 60
    while checkpoints.busy and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.mark.slow
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
    state = big_state(number=4_000_000)
    blocked_seconds = checkpoints.save(1, state, {})
    assert checkpoints.latest_step() is None and checkpoints.busy and blocked_seconds > 0
    ended(checkpoints)
    checkpoints.poll(2)
    assert checkpoints.latest_step() == 1


def test_the_compiled_copy_is_made_ready_for_the_first_save(checkpoints):
    state = make_state()
    checkpoints.prepare(state)
    checkpoints.preparing.join()
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", None)  # nothing may be compiled any more
        checkpoints.save(1, state, {})
    checkpoints.wait()
    assert checkpoints.all_steps() == [1]


def test_a_save_waits_for_the_one_before_and_says_so(noted, notes):
    noted.save(1, big_state(), {})
    noted.save(2, big_state(1), {})
    noted.wait()
    assert noted.all_steps() == [1, 2]
    ((step, facts),) = notes.of("alarm")
    assert step == 2 and facts["waited"] > 0


def test_a_save_is_put_off_where_the_one_before_takes_too_long(tmp_path, notes):
    noted = Checkpoints(tmp_path, CheckpointConfig(wait_seconds=0), note=notes)
    noted.save(1, big_state(), {})
    noted.save(2, big_state(), {})
    noted.poll(3)
    assert not noted.retry_due or not noted.busy
    ended(noted)
    noted.poll(4)
    assert noted.retry_due
    noted.save(4, big_state(), {})
    noted.wait()
    assert noted.all_steps() == [1, 4] and not noted.retry_due
    assert [step for step, _ in notes.of("saved")] == [1, 4] and notes.of("alarm")[0][0] == 2


@pytest.mark.parametrize("step", [15, 20])
def test_saving_a_step_twice_or_going_back_is_an_error_at_once(saved, step):
    saved.save(step, make_state(), {})
    ended(saved)
    error = stop_of(saved.poll, step + 1)
    assert error.code == Exit.STORAGE and f"step {step} was not saved" in str(error) and "step 20" in str(error)


def test_a_foreign_folder_in_the_way_is_named_and_left_alone(saved):
    (saved.directory / "30").mkdir()
    (saved.directory / "30" / "notes.txt").write_text("mine")
    saved.save(30, make_state(), {})
    error = stop_of(saved.wait)
    assert error.code == Exit.STORAGE and f"{saved.directory / '30'} already exists; move it away" in str(error)
    assert (saved.directory / "30" / "notes.txt").read_text() == "mine"
    saved.save(31, make_state(), {}, wait=True)
    assert saved.all_steps() == [10, 20, 31]


# Failures.


@pytest.mark.fault("F4")
def test_a_full_disk_is_known_at_the_next_step_and_the_save_is_tried_again(noted, notes, small_files):
    noted.save(1, big_state(), {}, wait=True)
    small_files(100_000)
    noted.save(2, big_state(1), {})
    ended(noted)
    assert not noted.retry_due
    noted.poll(3)  # the step after it failed
    ((step, facts),) = notes.of("save_failed")
    assert step == 2 and facts["in_row"] == 1
    assert "File too large" in facts["cause"] and "needs 2.1 MiB, has" in facts["cause"]
    assert noted.retry_due and noted.all_steps() == [1]
    small_files(None)  # the disk has room again
    noted.save(3, big_state(3), {})
    noted.poll(4)
    assert not noted.retry_due
    noted.wait()
    assert noted.all_steps() == [1, 3] and read_last_good(noted.directory)["step"] == 3
    assert sorted(path.name for path in noted.directory.iterdir()) == ["1", "3", "last_good.json"]
    assert_same_bits(noted.restore(1, jax.eval_shape(big_state)), big_state())


@pytest.mark.fault("F4")
def test_failures_in_a_row_end_the_run_and_others_do_not(noted, notes, small_files):
    def fail(step):
        small_files(100_000)
        noted.save(step, big_state(), {})
        ended(noted)
        small_files(None)

    for step in (1, 2):
        fail(step)
        noted.poll(step)
    noted.save(3, big_state(), {})
    ended(noted)
    for step in (4, 5):
        fail(step)
        noted.poll(step)
    fail(6)
    error = stop_of(noted.poll, 6)
    assert error.code == Exit.STORAGE and "saving step 6" in str(error) and "failed 3 consecutive times" in str(error)
    assert "File too large" in str(error) and "step 3 is the newest complete one" in str(error)
    assert [facts["in_row"] for _, facts in notes.of("save_failed")] == [1, 2, 1, 2, 3]


@pytest.mark.fault("F4")
def test_the_last_save_of_a_run_is_tried_again_before_it_is_given_up(noted, notes, small_files):
    small_files(100_000)
    error = stop_of(noted.save, 5, big_state(), {}, wait=True)
    assert error.code == Exit.STORAGE and "failed 3 consecutive times" in str(error) and "no earlier" in str(error)
    assert [step for step, _ in notes.of("save_failed")] == [5, 5, 5]
    assert noted.all_steps() == []


@pytest.fixture
def own_disk(tmp_path):
    """A file system of 8 MB that only root can make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], capture_output=True)
    if made.returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the traceback is printed, too
def test_a_save_whose_cause_cannot_be_found_is_a_failure_and_not_a_success(noted, notes, small_files, monkeypatch):
    def no_answer(path):
        raise ValueError("embedded null byte")

    monkeypatch.setattr(shutil, "disk_usage", no_answer)
    small_files(1000)
    with pytest.raises(Stop) as stopped:
        noted.save(5, big_state(), {"step": 5}, wait=True)
    assert stopped.value.code == Exit.STORAGE and "ended without a result" in str(stopped.value)
    assert not notes.of("saved") and noted.all_steps() == []


def test_a_disk_that_does_not_answer_has_inodes_as_far_as_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "statvfs", lambda path: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
    assert no_inodes_message(tmp_path) == ""


def test_a_failed_save_is_no_longer_in_progress_when_it_is_reported(noted, small_files):
    seen = []
    noted.saver.reports.failed = lambda step, cause: seen.append((step, noted.saver.busy))
    small_files(1000)
    noted.save(5, big_state(), {"step": 5})
    noted.saver.join(60)
    assert seen == [(5, False)] and noted.take_failure()
    small_files(None)


@pytest.mark.fault("F4")
def test_too_little_room_is_found_before_a_byte_is_written(own_disk, notes):
    checkpoints = Checkpoints(own_disk / "run", CheckpointConfig(), note=notes)
    checkpoints.save(1, big_state(), {}, wait=True)
    (own_disk / "ballast").write_bytes(bytes(4_500_000))
    checkpoints.save(2, big_state(), {})
    ended(checkpoints)
    checkpoints.poll(3)
    ((step, facts),) = notes.of("save_failed")
    assert step == 2 and facts["cause"].startswith("No space left on device (needs 2.1 MiB, has 1.")
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["1", "last_good.json"]
    (own_disk / "ballast").unlink()
    checkpoints.save(3, big_state(), {}, wait=True)
    assert checkpoints.all_steps() == [1, 3]


@pytest.mark.fault("F26")
def test_a_disk_that_turns_read_only_is_told_at_the_next_step(own_disk, notes):
    checkpoints = Checkpoints(own_disk / "run", CheckpointConfig(), note=notes)
    checkpoints.save(1, big_state(), {}, wait=True)
    subprocess.run(["mount", "-o", "remount,ro", own_disk], check=True)
    checkpoints.save(2, big_state(), {})
    ended(checkpoints)
    checkpoints.poll(3)
    ((step, facts),) = notes.of("save_failed")
    assert step == 2 and "Read-only file system" in facts["cause"] and "for writing" in facts["cause"]
    assert stop_of(checkpoints.check_room, big_state()).code == Exit.NO_GO  # and so would the next start say
    subprocess.run(["mount", "-o", "remount,rw", own_disk], check=True)
    checkpoints.save(3, big_state(), {}, wait=True)
    assert checkpoints.all_steps() == [1, 3]


@pytest.mark.fault("F26")
@pytest.mark.skipif(ROOT, reason="root may write everywhere")
def test_a_folder_without_permission_is_named_with_what_is_missing(noted, notes):
    noted.save(1, big_state(), {}, wait=True)
    noted.directory.chmod(0o500)
    try:
        noted.save(2, big_state(), {})
        ended(noted)
        noted.poll(3)
        error = stop_of(noted.check_room, big_state())
    finally:
        noted.directory.chmod(0o700)
    ((_, facts),) = notes.of("save_failed")
    assert "Permission denied" in facts["cause"] and f"write permission for {noted.directory}" in facts["cause"]
    assert error.code == Exit.NO_GO and "Permission denied" in str(error)


@pytest.mark.fault("F26")
def test_a_run_folder_that_was_removed_is_made_anew_and_said(noted, notes):
    noted.save(1, big_state(), {}, wait=True)
    shutil.rmtree(noted.directory.parent / "run")
    noted.save(2, big_state(), {}, wait=True)
    assert noted.all_steps() == [2]
    assert any("was removed during the run" in facts["cause"] for _, facts in notes.of("alarm"))


@pytest.mark.fault("F36")
def test_a_disk_without_inodes_is_not_called_full(own_disk, notes):
    checkpoints = Checkpoints(own_disk / "run", CheckpointConfig(), note=notes)
    checkpoints.save(1, big_state(), {}, wait=True)
    there = os.statvfs(own_disk)
    limit = f"remount,nr_inodes={there.f_files - there.f_ffree}"
    subprocess.run(["mount", "-o", limit, own_disk], check=True)
    checkpoints.save(2, big_state(), {})
    ended(checkpoints)
    checkpoints.poll(3)
    ((_, facts),) = notes.of("save_failed")
    assert facts["cause"].startswith(f"no inodes left on the disk of {own_disk}/run: it has free bytes"), facts
    new = stop_of(Checkpoints(own_disk / "new", CheckpointConfig()).check_room, jax.eval_shape(big_state))
    assert new.code == Exit.NO_GO and "no inodes left on the disk" in str(new)
    config = stop_of(stop_if_unwritable, lambda: paths.write_json(own_disk / "config.json", {}), own_disk)
    assert config.code == Exit.STORAGE and "no inodes left on the disk" in str(config)


@pytest.mark.fault("F36")
def test_a_start_that_is_killed_leaves_no_probe_and_the_next_one_removes_an_older_ones(noted):
    noted.directory.mkdir(parents=True)
    for name in ("..probe-1.0123456789abcdef.tmp", ".last_good.json.0123456789abcdef.tmp", ".of_somebody_else.tmp"):
        (noted.directory / name).touch()
    noted.check_room(jax.eval_shape(big_state))
    assert [path.name for path in noted.directory.iterdir()] == [".of_somebody_else.tmp"]


@pytest.mark.fault("F4")
def test_a_run_whose_checkpoints_have_no_room_is_refused_before_it_begins(own_disk):
    checkpoints = Checkpoints(own_disk / "run", CheckpointConfig(keep_last=3))
    error = stop_of(checkpoints.check_room, jax.eval_shape(big_state))
    assert error.code == Exit.NO_GO and "5 checkpoints of 1.9 MiB need 10.5 MiB" in str(error)
    Checkpoints(own_disk / "run", CheckpointConfig(keep_last=1)).check_room(jax.eval_shape(big_state))
    assert not list((own_disk / "run").iterdir())


@pytest.mark.fault("F4")
def test_a_run_that_goes_on_without_room_for_all_is_told_what_can_go_and_not_refused(own_disk, capsys):
    checkpoints = Checkpoints(own_disk / "run", CheckpointConfig(keep_last=2))
    for step in (1, 2):
        checkpoints.save(step, big_state(), {}, wait=True)
    assert checkpoints.set_aside_after(0, "rewound") == [1, 2]
    capsys.readouterr()
    checkpoints.check_room(jax.eval_shape(big_state))
    told = capsys.readouterr().out
    aside = sorted(str(path) for path in checkpoints.directory.glob("rewound-*"))
    assert told.startswith("WARNING: ") and "4 checkpoints of 1.9 MiB need 8.4 MiB" in told and len(aside) == 2
    assert told.endswith(f"which the run does not need: rm -r {aside[0]} {aside[1]}\n")
    checkpoints.save(3, big_state(), {}, wait=True)
    with contextlib.suppress(OSError), (own_disk / "ballast").open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    checkpoints.check_room(jax.eval_shape(big_state))  # not one byte is left
    assert "has 0 B free" in capsys.readouterr().out


def test_a_save_that_never_ends_stops_the_run(tmp_path):
    slow = Checkpoints(tmp_path / "run", CheckpointConfig(max_save_seconds=0.4), may_commit=lambda: time.sleep(3))
    slow.prepare(big_state())
    slow.preparing.join()
    slow.save(2, big_state(), {})
    time.sleep(0.5)
    error = stop_of(slow.poll, 3)
    assert error.code == Exit.STORAGE and "has not ended after" in str(error) and "max_save_seconds" in str(error)
    began = time.monotonic()
    slow.close()  # nor does leaving wait for it
    assert time.monotonic() - began < 1


def test_nothing_is_committed_without_the_lock_and_the_run_ends(tmp_path):
    def lost():
        raise Stop(Exit.LOCK_HELD, "the lock is held by another run")

    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), may_commit=lost)
    checkpoints.save(1, big_state(), {})
    ended(checkpoints)
    assert stop_of(checkpoints.poll, 2).code == Exit.LOCK_HELD
    assert list(pathlib.Path(tmp_path).iterdir()) == []
    checkpoints.close()


def test_the_state_of_many_devices_is_saved_from_where_it_is(noted):
    state = make_state((4, 2), seed=4)
    noted.save(1, state, {"x": 1}, wait=True)
    assert_same_bits(noted.restore(1, abstract((2, 4))), state)
