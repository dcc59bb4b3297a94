"""A lock while its storage does not answer, or while another one only looks at it."""

import dataclasses
import fcntl
import json
import os
import shutil
import threading
import time

import pytest
from gcs_emulator import Emulator
from gcs_weather import CUTS, Fault, Weather

from jaxscale.runtime.checkpoint.config import LockConfig
from jaxscale.runtime.checkpoint.lock import LEASES, RunLock
from jaxscale.runtime.checkpoint.lock_stores import FileLock, read_owner, this_process
from jaxscale.system.exits import Exit, Stop

FAR = dict(host="far", pid=1, kernel="another boot", namespace="pid:[1]")


class Steady:
    """A monotonic clock that a sleep moves on."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def gcs(monkeypatch):
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    with Emulator() as emulator:
        for name, value in emulator.environment().items():
            monkeypatch.setenv(name, value)
        yield emulator


def quiet(workdir, lease=20.0, **how):
    return RunLock(workdir, LockConfig(lease_seconds=lease), log=lambda line: None, **how)


@pytest.mark.fault("F18")
def test_a_step_asks_a_bucket_that_is_away_once_and_quickly(gcs):
    clock = Steady()
    with quiet("gs://bucket/run", clock=clock) as held:
        gcs.weather = Weather(down=True)
        clock.now += LEASES * 20 + 1
        began = time.monotonic()
        held.poll()
        assert time.monotonic() - began < 5 and "closed connection" in held.cause
        gcs.weather = Weather()


@pytest.mark.fault("F18")
def test_a_step_does_not_wait_for_a_renewal_that_is_under_way(tmp_path):
    clock = Steady()
    with quiet(str(tmp_path), clock=clock) as held, held.request_lock:
        clock.now += LEASES * 20 + 1
        done = threading.Thread(target=held.poll, daemon=True)
        done.start()
        done.join(5)
        assert not done.is_alive() and not held.cause


@pytest.mark.fault("F18")
def test_the_first_renewal_that_fails_says_so_and_is_tried_again_soon(gcs):
    with quiet("gs://bucket/run", lease=0.5) as held:
        gcs.weather = Weather(down=True)
        began = time.monotonic()
        while not held.cause:
            assert time.monotonic() - began < 5
            time.sleep(0.01)
        gcs.weather = Weather()
        while held.cause:
            assert time.monotonic() - began < 10
            time.sleep(0.01)
        held.check()


@pytest.mark.fault("F17")
def test_broken_connections_and_lost_answers_leave_a_lock_its_holders(gcs, monkeypatch):
    monkeypatch.setattr("jaxscale.system.bucket.FIRST_WAIT", 0.001)
    gcs.weather = Weather(share=0.1, kinds=CUTS)
    with quiet("gs://bucket/run", lease=0.01) as held:
        for _ in range(50):
            held.check()
        with pytest.raises(Stop) as stop:
            quiet("gs://bucket/run").__enter__()
        assert stop.value.code == Exit.LOCK_HELD
        gcs.weather = Weather()
        held.check()


@pytest.mark.fault("F34")
@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_folder_that_is_moved_or_deleted_is_told_as_that_and_not_made_anew(tmp_path, how):
    workdir, away = tmp_path / "run", tmp_path / "away"
    with quiet(str(workdir)) as held:
        held.check()
        workdir.rename(away)
        if how == "deleted":
            shutil.rmtree(away)
        with pytest.raises(Stop) as stop:
            held.check()
    told = f"{workdir} was moved to {away} while" if how == "moved" else f"{workdir} was deleted while"
    assert (
        stop.value.code == Exit.STORAGE and told in str(stop.value) and "no new folder was created" in str(stop.value)
    )
    assert not workdir.exists()


@pytest.mark.fault("F17")
def test_a_lock_is_given_back_though_a_few_tries_fail(gcs, monkeypatch):
    monkeypatch.setattr("jaxscale.system.bucket.FIRST_WAIT", 0.001)
    with quiet("gs://bucket/run"):
        gcs.faults.append(Fault("status", method="DELETE", times=3))
    assert "run/lock" not in gcs.names("bucket")


def test_who_only_looks_at_a_new_lock_leaves_its_holder_the_flock(tmp_path):
    lock, me = FileLock(tmp_path), this_process()
    (tmp_path / "new").touch()
    looker = os.open(tmp_path / "new", os.O_RDWR)
    fcntl.flock(looker, fcntl.LOCK_EX)
    look_ends = threading.Timer(0.3, os.close, (looker,))
    look_ends.start()
    lock.flock_and_write(os.open(tmp_path / "new", os.O_RDWR), me)
    look_ends.join()
    (tmp_path / "new").rename(tmp_path / "lock")
    assert FileLock(tmp_path).read_state().is_flocked is True
    lock.release()


def test_a_process_that_lives_keeps_its_lock_even_without_its_flock(tmp_path):
    lock = FileLock(tmp_path)
    lock.create(this_process())
    lock.release()
    with pytest.raises(Stop, match="in use by process") as stop:
        quiet(str(tmp_path)).__enter__()
    assert stop.value.code == Exit.LOCK_HELD


@pytest.mark.fault("F15")
@pytest.mark.parametrize(("theirs", "waited"), [(60.0, 180), (1.0, 60), (None, 60)])
def test_a_holder_is_dead_after_three_of_the_longer_lease(tmp_path, theirs, waited):
    FileLock(tmp_path).create(dataclasses.replace(this_process(), lease_seconds=theirs, **FAR))
    clock = Steady()
    with quiet(str(tmp_path), clock=clock, sleep=clock.sleep) as held:
        assert waited - 0.1 <= clock.now - 100 <= waited + 3
        assert FileLock(tmp_path).read_state().owner.lease_seconds == 20 and held.me.lease_seconds == 20


def test_the_lock_of_an_older_version_has_no_lease():
    me = this_process()
    old = {name: value for name, value in dataclasses.asdict(me).items() if name != "lease_seconds"}
    assert read_owner(json.dumps(old).encode()) == me
