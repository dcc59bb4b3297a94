"""What a save may still do when its folder is another run's, or its storage answers no more."""

import errno
import pathlib
import shutil
import threading
import time

import jax.numpy as jnp
import pytest
import tensorstore
from ckpt_states import refuse_to_open, stop_of

from jaxscale.runtime.checkpoint import saver, write
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import read_last_good
from jaxscale.system.exits import Exit, Stop

STATE = {"w": jnp.arange(100.0)}


class Lock:
    """A lock that is lost at its n-th question; what the new holder writes is there from then on."""

    def __init__(self, folder, at):
        self.folder, self.at, self.asked = folder, at, 0

    def __call__(self):
        self.asked += 1
        if self.asked >= self.at:
            (self.folder / "7.orbax-checkpoint-tmp" / "theirs").mkdir(parents=True, exist_ok=True)
            raise Stop(Exit.LOCK_HELD, "the lock is held by another run")


class Notes(list):
    """Events, as they come."""

    def __call__(self, kind, step=None, **facts):
        self.append((kind, step, facts))

    def of(self, kind):
        return [facts for found, _, facts in self if found == kind]


STALE = OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.fault("F21")
@pytest.mark.parametrize("at", [1, 2, 3])
def test_who_has_lost_the_folder_removes_nothing_of_the_new_holder(saved, at):
    saved.cfg = saved.saver.cfg = CheckpointConfig(keep_last=1)
    lock = saved.saver.may_commit = Lock(saved.directory, at)  # before the folder is made, the commit, the tidying
    error = stop_of(saved.save, 30, STATE, {}, wait=True)
    assert error.code == Exit.LOCK_HELD and lock.asked == at
    assert (saved.directory / "7.orbax-checkpoint-tmp" / "theirs").exists()
    assert saved.all_steps() == ([10, 20] if at < 3 else [10, 20, 30]) and read_last_good(saved.directory)["step"] == 20


@pytest.mark.fault("F21")
def test_a_save_that_fails_after_the_folder_was_lost_leaves_what_is_there(saved, monkeypatch):
    saved.saver.may_commit = Lock(saved.directory, 2)
    theirs = saved.directory / "30.orbax-checkpoint-tmp"
    refuse_to_open(monkeypatch, lambda path: path == theirs, STALE)  # to write arrays into it
    assert stop_of(saved.save, 30, STATE, {}, wait=True).code == Exit.LOCK_HELD
    assert theirs.exists()


@pytest.mark.fault("F21")
def test_nothing_is_moved_aside_without_the_lock(saved):
    saved.saver.may_commit = Lock(saved.directory, 1)
    assert stop_of(saved.set_aside, 20, "damaged").code == Exit.LOCK_HELD
    assert saved.all_steps() == [10, 20]


def test_trouble_with_reading_back_is_an_alarm_and_the_save_counts(tmp_path, monkeypatch):
    notes = Notes()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), note=notes)
    refuse_to_open(monkeypatch, lambda path: tmp_path / "5" / "state" in path.parents, STALE)
    checkpoints.save(5, STATE, {}, wait=True)
    assert checkpoints.all_steps() == [5] and checkpoints.saver.last_saved == 5
    assert read_last_good(checkpoints.directory)["verified"] is False and notes.of("saved")[0]["verified"] is False
    assert "saved, but it could not be read back: Stale file handle" in notes.of("alarm")[0]["cause"]


def test_damage_is_told_before_trouble(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(max_failed_saves=1))
    real = saver.gathered

    def gathered(key, mine, seconds, made_of=list):
        failures = [["late", "TimeoutError"], ["w is another", saver.DAMAGED]] if key.endswith("/verify") else []
        others = [{"failure": failure} for failure in failures]
        return real(key, mine, seconds, lambda answers: made_of([*answers, *others]))

    monkeypatch.setattr(saver, "gathered", gathered)
    assert "process 2: w is another" in str(stop_of(checkpoints.save, 5, STATE, {}, wait=True))
    assert checkpoints.all_steps() == []


def test_a_try_after_a_commit_that_was_told_as_a_failure_is_no_error(tmp_path, monkeypatch):
    checkpoints, failing = Checkpoints(tmp_path, CheckpointConfig()), [True]
    renamed = lambda path: path == tmp_path and (tmp_path / "5").exists()  # and now it is to be synced
    refuse_to_open(monkeypatch, lambda path: renamed(path) and failing and failing.pop(), STALE)
    checkpoints.save(5, STATE, {"a": 1}, metrics={"validation/loss": 1.0}, wait=True)
    assert not failing and checkpoints.all_steps() == [5] and read_last_good(checkpoints.directory)["verified"]
    checkpoints.save(5, STATE, {"a": 1}, metrics={"validation/loss": 1.0}, wait=True)
    other = stop_of(checkpoints.save, 5, STATE, {"a": 2}, wait=True)
    assert other.code == Exit.STORAGE and "already has step 5" in str(other)


def test_leaving_waits_for_what_is_still_being_compiled(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.preparing = threading.Thread(target=time.sleep, args=(0.5,), daemon=True)
    checkpoints.preparing.start()
    checkpoints.saver.fatal = Stop(Exit.LOCK_HELD, "lost")
    checkpoints.close()
    assert not checkpoints.preparing.is_alive()


def test_a_save_that_its_storage_holds_up_is_left_behind_where_that_was_given_up(tmp_path):
    checkpoints, answers = Checkpoints(tmp_path, CheckpointConfig()), threading.Event()
    checkpoints.saver.may_commit = answers.wait
    late = threading.Timer(5, answers.set)  # so that a close which waits for it ends too
    late.start()
    checkpoints.save(5, STATE, {})
    checkpoints.close(most_seconds=0.1)
    assert checkpoints.busy and not answers.is_set()
    late.cancel()
    answers.set()
    checkpoints.close()
    assert checkpoints.all_steps() == [5]


def test_the_end_of_a_run_can_ask_how_its_save_went_without_an_error(tmp_path, monkeypatch):
    notes = Notes()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), note=notes)
    refuse_to_open(monkeypatch, lambda path: path.name.endswith("-tmp"), STALE)
    checkpoints.save(5, STATE, {})
    checkpoints.join()
    step, cause = checkpoints.take_failure()
    assert step == 5 and "Stale file handle" in cause and checkpoints.retry_due
    assert checkpoints.take_failure() is None and len(notes.of("save_failed")) == 1
    checkpoints.close()


@pytest.mark.fault("F32")
@pytest.mark.fault("F34")
@pytest.mark.skipif(not pathlib.Path(write.OPEN_FILES).is_dir(), reason="this system does not name open files")
def test_what_writes_arrays_follows_its_folder_and_never_makes_another(tmp_path):
    step, moved = tmp_path / "7.orbax-checkpoint-tmp", tmp_path / "moved"
    step.mkdir()
    opened = lambda place, name: tensorstore.KvStore.open({"driver": "file", "path": f"{place / name}/"}).result()
    with write.open_folder(step) as place:
        step.rename(moved)
        opened(place, "state").write("a", b"1").result()
        assert (moved / "state" / "a").read_bytes() == b"1"
        shutil.rmtree(moved)
        with pytest.raises(ValueError):
            opened(place, "state").write("b", b"2").result()
    assert not list(tmp_path.iterdir())
