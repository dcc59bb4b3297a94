"""One run writes a work folder: on a disk and in a bucket, among processes, machines, and clocks that jump."""

import dataclasses
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from gcs_emulator import Emulator
from gcs_weather import Weather

from jaxscale.runtime.checkpoint.config import LockConfig
from jaxscale.runtime.checkpoint.lock import LEASES, RunLock
from jaxscale.runtime.checkpoint.lock_stores import FileLock, ObjectLock, process_state, this_process
from jaxscale.system.exits import Exit, Stop
from jaxscale.system.storage import open_bucket

HOLD = """
import sys, time
from jaxscale.runtime.checkpoint.lock import RunLock
from jaxscale.runtime.checkpoint.config import LockConfig
from jaxscale.system.exits import run_and_exit

def main(argv):
    with RunLock(argv[0], LockConfig(lease_seconds=float(argv[1]))) as lock:
        print("locked", flush=True)
        sys.stdin.readline()
        while True:
            lock.poll()
            lock.check()
            time.sleep(0.01)

run_and_exit(main)
"""
OTHER_KERNEL = dict(host="far", pid=1, kernel="another boot", namespace="pid:[1]")


class Steady:
    """A monotonic clock that a sleep moves on."""

    def __init__(self):
        self.now, self.slept, self.at_sleep = 100.0, [], lambda: None

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept.append(seconds)
        self.at_sleep()


@pytest.fixture(params=["disk", "bucket"])
def workdir(request, tmp_path, monkeypatch):
    if request.param == "disk":
        yield str(tmp_path / "run")
        return
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    with Emulator() as gcs:
        for name, value in gcs.environment().items():
            monkeypatch.setenv(name, value)
        yield "gs://bucket/run"


@pytest.fixture
def gcs(monkeypatch):
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    with Emulator() as emulator:
        for name, value in emulator.environment().items():
            monkeypatch.setenv(name, value)
        yield emulator


def store(workdir):
    if workdir.startswith("gs://"):
        return ObjectLock(workdir)
    pathlib.Path(workdir).mkdir(exist_ok=True)
    return FileLock(pathlib.Path(workdir))


def elsewhere(**changed):
    """A process of another machine."""
    return dataclasses.replace(this_process(), **(OTHER_KERNEL | changed))


def lock(workdir, **how):
    said = how.pop("said", [])
    return RunLock(workdir, how.pop("cfg", LockConfig(lease_seconds=20)), log=said.append, **how)


@pytest.fixture
def holding():
    """holding(workdir, lease_seconds): a process that holds the lock."""
    started = []

    def start(workdir, lease_seconds=20.0):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, workdir, str(lease_seconds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "locked\n", process.stderr.read()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.fault("F15")
def test_a_second_run_is_told_at_once_who_has_the_folder(workdir, holding):
    first = holding(workdir)
    began = time.monotonic()
    with pytest.raises(Stop, match=rf"in use by process {first.pid} on .*, started 20.*--steal_lock") as stop:
        lock(workdir).__enter__()
    assert stop.value.code == Exit.LOCK_HELD and time.monotonic() - began < 5


@pytest.mark.fault("F15")
def test_the_lock_of_a_run_that_was_killed_is_taken_over_at_once(workdir, holding):
    first, said, events = holding(workdir), [], []
    first.kill()
    first.wait()
    if not workdir.startswith("gs://"):
        pathlib.Path(workdir, ".lock.0123").write_text("of one that was killed while it took over")
    clock = Steady()
    note = lambda kind, step=None, **facts: events.append((kind, facts))
    with lock(workdir, said=said, clock=clock, sleep=clock.sleep, note=note) as second:
        second.check()
        assert second.previous_owner.pid == first.pid and not clock.slept
        assert workdir.startswith("gs://") or [path.name for path in pathlib.Path(workdir).iterdir()] == ["lock"]
    assert f"the lock of process {first.pid}" in said[0] and events[0][0] == "lock_stolen"


def test_a_run_that_ends_leaves_no_lock(workdir):
    with lock(workdir):
        assert store(workdir).read_state() is not None
    assert store(workdir).read_state() is None
    with pytest.raises(ZeroDivisionError), lock(workdir):
        raise ZeroDivisionError
    assert store(workdir).read_state() is None


def test_a_lock_file_is_its_owners_alone(tmp_path):
    with lock(str(tmp_path / "run")):
        assert (tmp_path / "run" / "lock").stat().st_mode & 0o777 == 0o600
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.fault("F15")
def test_the_lock_of_another_machine_is_taken_over_after_three_leases_without_a_sign(workdir):
    store(workdir).create(elsewhere())
    clock, said = Steady(), []
    with lock(workdir, said=said, clock=clock, sleep=clock.sleep) as second:
        assert sum(clock.slept) >= LEASES * 20 - 1e-6 and second.previous_owner.host == "far"
    assert "not visible from this host: the lock is taken over if it is not renewed for 60 s" in said[0]


@pytest.mark.fault("F15")
def test_another_machine_that_renews_its_lock_keeps_it(workdir):
    far, clock = elsewhere(), Steady()
    theirs = store(workdir)
    theirs.create(far)
    clock.at_sleep = lambda: len(clock.slept) == 5 and theirs.renew(far.renewed())
    with pytest.raises(Stop, match="in use by process 1 on far") as stop:
        lock(workdir, clock=clock, sleep=clock.sleep).__enter__()
    assert stop.value.code == Exit.LOCK_HELD and len(clock.slept) == 5


@pytest.mark.fault("F27")
@pytest.mark.parametrize("days", [-1, 1])
def test_no_clock_of_a_day_can_take_a_lock_away(workdir, days, monkeypatch):
    far, clock, real = elsewhere(started="1999-01-01T00:00:00+00:00"), Steady(), time.time
    theirs = store(workdir)
    theirs.create(far)
    if not workdir.startswith("gs://"):
        os.utime(theirs.path, (real() - days * 86_400,) * 2)
    monkeypatch.setattr(time, "time", lambda: real() + days * 86_400)
    clock.at_sleep = lambda: len(clock.slept) == 2 and theirs.renew(far.renewed())
    with pytest.raises(Stop, match="in use by process 1 on far"):
        lock(workdir, clock=clock, sleep=clock.sleep).__enter__()


def test_in_a_bucket_the_age_is_measured_by_the_services_clock_and_not_waited_for_twice(monkeypatch):
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    now = [1e9]
    with Emulator(clock=lambda: now[0]) as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        store("gs://bucket/run").create(elsewhere())
        now[0] += 45
        clock, said = Steady(), []
        with lock("gs://bucket/run", said=said, clock=clock, sleep=clock.sleep):
            assert sum(clock.slept) >= LEASES * 20 - 1e-6  # another 15 s by their clock, which stands still: 60 by ours
        store("gs://bucket/run").create(elsewhere())
        now[0] += 61
        clock = Steady()
        with lock("gs://bucket/run", clock=clock, sleep=clock.sleep):
            assert not clock.slept


@pytest.mark.fault("F21")
def test_a_process_that_stood_still_while_its_lock_was_taken_writes_no_more(workdir, holding):
    zombie = holding(workdir, lease_seconds=60)  # it has not renewed when it goes on
    os.kill(zombie.pid, signal.SIGSTOP)
    while process_state(zombie.pid)[0] != "T":
        time.sleep(0.01)
    clock = Steady()
    with lock(workdir, clock=clock, sleep=clock.sleep, cfg=LockConfig(lease_seconds=60)):
        assert sum(clock.slept) >= 180 - 1e-6  # who knows whether it will go on
        os.kill(zombie.pid, signal.SIGCONT)
        zombie.stdin.write("\n")
        zombie.stdin.flush()
        assert zombie.wait(60) == Exit.LOCK_HELD
        assert f"was taken over by process {os.getpid()}" in zombie.stderr.read()
        assert store(workdir).read_state().owner.pid == os.getpid()  # and its end did not give our lock back


@pytest.mark.fault("F21")
def test_the_thread_that_renews_notices_a_stolen_lock_without_a_save(workdir, holding):
    old = holding(workdir, lease_seconds=0.1)
    with lock(workdir, steal=True, said=(said := [])):
        assert "stolen" in said[0]
        old.stdin.write("\n")
        old.stdin.flush()
        assert old.wait(60) == Exit.LOCK_HELD


@pytest.mark.fault("F21")
def test_whoever_stood_still_for_three_leases_looks_at_the_lock_before_the_next_step(workdir):
    clock = Steady()
    with lock(workdir, clock=clock) as zombie:
        clock.now += LEASES * 20 + 1
        zombie.poll()  # nobody has taken it
        with lock(workdir, steal=True):
            zombie.poll()  # its own thread has not looked yet
            clock.now += LEASES * 20 + 1
            with pytest.raises(Stop, match="was taken over by") as stop:
                zombie.poll()
    assert stop.value.code == Exit.LOCK_HELD


@pytest.mark.cases(1)
def test_a_lock_that_was_deleted_is_lost(workdir):
    with lock(workdir) as held:
        if workdir.startswith("gs://"):
            held.store.bucket.delete(held.store.url, held.store.generation)
        else:
            held.store.path.unlink()
        for _ in range(2):
            with pytest.raises(Stop, match="or deleted while this process was suspended; this process has") as stop:
                held.check()
        with pytest.raises(Stop):
            held.poll()
    assert stop.value.code == Exit.LOCK_HELD


def test_a_renewed_lock_stays_ours_and_tells_how_often(workdir):
    with lock(workdir, cfg=LockConfig(lease_seconds=0.02)) as held:
        deadline = time.monotonic() + 20
        while (look := store(workdir).read_state()) is None or look.owner.beats < 3:  # None: replaced while it was read
            assert time.monotonic() < deadline
            time.sleep(0.01)
            held.check()
        held.poll()


def test_of_many_that_take_over_a_dead_lock_one_has_it(workdir):
    make_it = store(workdir)
    make_it.create(dataclasses.replace(this_process(), ticks=1))  # its process number was used again
    if isinstance(make_it, FileLock):
        make_it.release()
    winners, losers, begin = [], [], threading.Barrier(6)

    def start():
        begin.wait()
        try:
            winners.append(lock(workdir).__enter__())
        except Stop as stop:
            losers.append(stop)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for winner in winners:
        winner.__exit__(None, None, None)
    assert len(winners) == 1 and len(losers) == 5


def test_a_half_written_lock_of_a_dead_process_is_no_obstacle_for_ever(tmp_path):
    (tmp_path / "lock").write_bytes(b'{"token": "ab')
    clock = Steady()
    with lock(str(tmp_path), clock=clock, sleep=clock.sleep) as held:
        assert sum(clock.slept) >= 60 - 1e-6
        held.check()


def test_a_child_that_its_trainer_left_behind_holds_nothing(tmp_path, holding):
    first = holding(str(tmp_path))
    handle = os.open(tmp_path / "lock", os.O_RDWR)
    first.kill()
    first.wait()
    fcntl.flock(handle, fcntl.LOCK_EX)  # as a forked child would
    with lock(str(tmp_path)) as held:
        held.check()
    os.close(handle)


def test_of_a_container_beside_this_one_the_kernel_knows_by_its_flock(tmp_path):
    beside = dataclasses.replace(this_process(), pid=1, namespace="pid:[0]")
    theirs = FileLock(tmp_path)
    theirs.create(beside)
    clock = Steady()
    clock.at_sleep = lambda: len(clock.slept) == 3 and theirs.renew(beside.renewed())
    with pytest.raises(Stop, match="in use by process 1"):
        lock(str(tmp_path), clock=clock, sleep=clock.sleep).__enter__()
    theirs.release()  # as its death would
    with lock(str(tmp_path), clock=clock, sleep=clock.sleep) as held:
        held.check()
    assert len(clock.slept) == 3


@pytest.mark.fault("F18")
def test_a_bucket_that_does_not_answer_is_borne_for_a_while_and_then_ends_the_run(gcs, monkeypatch):
    monkeypatch.setattr("jaxscale.system.bucket.FIRST_WAIT", 0.001)
    clock = Steady()
    with lock("gs://bucket/run", clock=clock, cfg=LockConfig(lease_seconds=0.01, outage_seconds=600)) as held:
        gcs.weather = Weather(down=True)
        deadline = time.monotonic() + 20
        while not held.cause:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        clock.now += 599
        held.poll()
        with pytest.raises(ValueError, match="consecutive attempts failed"):
            held.check()  # no proof that the lock is ours: nothing may be committed
        clock.now += 2
        with pytest.raises(Stop, match=r"was unreachable for 601 s, longer than lock.outage_seconds=600: ") as stop:
            held.poll()
        assert stop.value.code == Exit.STORAGE
        gcs.weather = Weather()
        while held.cause:
            assert time.monotonic() < deadline + 20
            time.sleep(0.01)
        held.poll()
        held.check()


@pytest.mark.fault("F18")
def test_what_an_account_lacks_is_told_before_anything_else_happens(gcs):
    for lacks, told in (("storage.objects.create", "written"), ("storage.objects.get", "read")):
        gcs.weather = Weather(lacks={lacks})
        with pytest.raises(
            ValueError, match=rf"/lock cannot be {told}: this machine has no permission \(403\).* needs {lacks}, "
        ):
            lock("gs://bucket/run").__enter__()
    gcs.weather = Weather(unauthorised=True)
    with pytest.raises(ValueError, match=r"\(401\); it has no valid credentials; run gcloud auth application-default"):
        lock("gs://bucket/run").__enter__()


@pytest.mark.fault("F17")
def test_a_busy_service_costs_a_lock_nothing(gcs, monkeypatch):
    monkeypatch.setattr("jaxscale.system.bucket.FIRST_WAIT", 0.001)
    gcs.weather = Weather(every=3, burst=2, status=429)
    with lock("gs://bucket/run", cfg=LockConfig(lease_seconds=0.01)) as held:
        for _ in range(20):
            held.check()
            held.poll()


def test_an_answer_that_was_lost_makes_nobody_lose_his_own_lock(gcs, monkeypatch):
    """The service has written the object, the connection breaks, and the second try meets the first one's work."""
    monkeypatch.setattr("jaxscale.system.bucket.FIRST_WAIT", 0.001)
    with lock("gs://bucket/run") as held:
        open_bucket(writing=True).put(held.store.url, held.me.content())  # ours, in a generation we do not know of
        held.store.renew(held.me.renewed())
        held.check()


def test_the_other_processes_of_a_run_have_no_lock_of_their_own(tmp_path):
    others = lock(str(tmp_path / "run"))  # which the first process alone enters
    others.poll()
    others.check()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("field", "value"), [("lease_seconds", 0), ("outage_seconds", -1)])
def test_a_lease_of_no_time_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} must be"):
        LockConfig(**{field: value})
