"""--workdir=gs://: the training command against a service that is busy, down, or closed, killed and started again.

The service is an emulator on this machine: this proves the protocol and what we do with its answers, not Google's
service. Every process is the real command; only the addresses in its environment are not.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import warnings

import jax
import pytest
import tiny
from gcs_emulator import Emulator
from gcs_weather import CUTS, Weather
from xla_flags import xla_flags

from jaxscale.system.exits import Exit

pytest.importorskip("gcsfs", reason="gcsfs is not installed")

CONFIG = """
import ml_collections

def get_config():
    c = ml_collections.ConfigDict({values!r})
    c.checkpoint = dict(save_every_steps=4, keep_last=2)
    c.monitor = dict(log_every_steps=1, progress="lines", tensorboard=False)
    c.eval, c.sample = dict(num_rows=0), dict(num_tokens=0)
    return c
"""
STEPS, SECONDS = 16, 300  # a process that has not ended by then is killed, and the test fails
# What the role Storage Object User does not have: a run must not need it.
ROLE = {"storage.buckets.get"}


class Trainers:
    """Starts the training command, and ends whatever of it is left."""

    def __init__(self, folder, gcs):
        self.folder, self.gcs, self.started = folder, gcs, []
        self.config = folder / "tiny_config.py"
        self.config.write_text(CONFIG.replace("{values!r}", repr(tiny.VALUES | {"train_tokens": f"{STEPS} steps"})))

    def start(self, workdir="gs://bucket/run", *flags):
        env = os.environ | self.gcs.environment() | {
            "JAX_PLATFORMS": "cpu", "JAXSCALE_HUGE_PAGES": "0", "PYTHONUNBUFFERED": "1",
            "XLA_FLAGS": xla_flags(1),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }  # fmt: skip
        log = self.folder / f"{len(self.started)}.log"
        command = [sys.executable, "-m", "jaxscale.main", f"--config={self.config}", f"--workdir={workdir}", *flags]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        process.log = lambda: log.read_text(errors="replace")
        self.started.append(process)
        return process

    def finish(self, process):
        """The exit code and all output."""
        return process.wait(SECONDS), process.log()

    def end(self):
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def gcs():
    with Emulator() as emulator:
        emulator.weather = Weather(lacks=ROLE)
        yield emulator


@pytest.fixture
def trainers(tmp_path, gcs):
    made = Trainers(tmp_path, gcs)
    yield made
    made.end()


def wait_until(happened, process):
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert process.poll() is None and time.monotonic() < deadline, process.log()
        time.sleep(0.005)


def committed(gcs):
    """Steps whose checkpoints count."""
    found = [re.fullmatch(r"run/checkpoints/(\d+)/commit_success.txt", name) for name in gcs.names("bucket")]
    return sorted(int(match.group(1)) for match in found if match)


def fetched(gcs, folder):
    """The run as files of this machine."""
    for name in gcs.names("bucket"):
        if name.startswith("run/") and not name.endswith("/"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gcs.get("bucket", name))
    return folder / "run"


def lines(folder):
    """Of each step, what the run says of it, clocks left out. Steps that were run twice must not stand twice."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [(record["tokens_hash"], record["loss"], record["grad_norm"], record["batch_index"]) for record in records]


def state(folder, step=STEPS):
    """All arrays of a checkpoint, read by stock Orbax."""
    import orbax.checkpoint

    with orbax.checkpoint.PyTreeCheckpointer() as reader, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sharding info not provided")
        return jax.device_get(reader.restore(pathlib.Path(folder).absolute() / "checkpoints" / str(step) / "state"))


def run_with_kills(trainers, gcs, kills):
    """Kills the run each time a further checkpoint is committed, with what comes after it under way."""
    for number in range(kills):
        known = max(committed(gcs), default=0)
        process = trainers.start()
        wait_until(lambda known=known: max(committed(gcs), default=0) > known, process)
        if number == 0:
            yield process
        time.sleep(0.05 * number)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.fault("F15")
@pytest.mark.fault("F16")
@pytest.mark.fault("F17")
@pytest.mark.parametrize("kills", [1, 3])
@pytest.mark.soak
def test_a_run_in_a_busy_bucket_that_is_killed_equals_one_on_a_disk(trainers, gcs, tmp_path, kills):
    code, log = trainers.finish(trainers.start(tmp_path / "straight"))
    assert code == 0, log
    gcs.weather = Weather(every=21 // kills, status=503, lacks=ROLE)  # a client waits for seconds each time
    for first in run_with_kills(trainers, gcs, kills):
        if kills == 1:
            continue  # tests of the lock refuse a second one in less time
        code, log = trainers.finish(trainers.start())  # a second one beside it
        assert code == Exit.LOCK_HELD and f"in use by process {first.pid} on" in log, log
    gcs.weather = Weather(burst=2 * kills, status=429, lacks=ROLE)
    last = trainers.start()
    code, log = trainers.finish(last)
    assert code == 0 and f"the lock of process {trainers.started[-2].pid}" in log, log
    assert "resuming from step" in log and "WARNING" not in log, log
    run = fetched(gcs, tmp_path / "copy")
    assert lines(run) == lines(tmp_path / "straight")
    tiny.assert_same_bits(state(run), state(tmp_path / "straight"))
    assert committed(gcs) == [STEPS - 4, STEPS] and "run/lock" not in gcs.names("bucket")


@pytest.mark.fault("F18")
@pytest.mark.soak
@pytest.mark.parametrize(
    "lacks", ["storage.objects.create", pytest.param("storage.objects.delete", marks=pytest.mark.soak)]
)
def test_a_right_that_is_lost_under_way_is_named_and_ends_the_run(trainers, gcs, lacks):
    process = trainers.start("gs://bucket/run", "--config.lock.lease_seconds=1")
    wait_until(lambda: committed(gcs), process)
    gcs.weather = Weather(lacks={lacks, *ROLE})
    code, log = trainers.finish(process)
    assert code == Exit.STORAGE and lacks in log and "Traceback" not in log, log


@pytest.mark.soak
@pytest.mark.fault("F18")
def test_training_goes_on_without_its_bucket_and_saves_again_when_it_is_back(trainers, gcs, tmp_path):
    process = trainers.start()
    wait_until(lambda: committed(gcs), process)
    gcs.weather = Weather(down=True)
    time.sleep(60)
    assert process.poll() is None, process.log()
    gcs.weather = Weather(lacks=ROLE)
    code, log = trainers.finish(process)
    assert code == 0, log
    lines(fetched(gcs, tmp_path))


@pytest.mark.soak
@pytest.mark.fault("F18")
def test_a_bucket_that_stays_away_ends_the_run_with_the_code_for_storage(trainers, gcs):
    limits = ["--config.lock.lease_seconds=1", "--config.lock.outage_seconds=20"]
    process = trainers.start("gs://bucket/run", "--config.train_tokens=20000 steps", *limits)
    wait_until(lambda: committed(gcs), process)
    gcs.weather = Weather(down=True)
    code, log = trainers.finish(process)
    assert code == Exit.STORAGE, log


@pytest.mark.soak
@pytest.mark.fault("F17")
def test_a_run_of_which_a_quarter_of_all_requests_fails_equals_one_on_a_disk(trainers, gcs, tmp_path):
    """Cut in the middle of a body, done but not answered, refused for now, or silent for a while; and killed once."""
    code, log = trainers.finish(trainers.start(tmp_path / "straight"))
    assert code == 0, log
    gcs.weather = Weather(share=0.25, lacks=ROLE)
    first = trainers.start()
    wait_until(lambda: committed(gcs), first)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    code, log = trainers.finish(trainers.start())
    assert code == 0 and "resuming from step" in log and "WARNING" not in log, log
    run = fetched(gcs, tmp_path / "copy")
    assert "IncompleteRead" not in (run / "events.jsonl").read_text()
    assert lines(run) == lines(tmp_path / "straight")
    tiny.assert_same_bits(state(run), state(tmp_path / "straight"))


@pytest.mark.soak
@pytest.mark.fault("F15")
@pytest.mark.parametrize("weather", [{}, dict(share=0.25, kinds=CUTS)], ids=["fair", "bad"])
def test_of_two_that_start_at_the_same_moment_one_has_the_folder(trainers, gcs, tmp_path, weather):
    for _ in range(3):
        gcs.objects.clear()
        gcs.weather = Weather(lacks=ROLE, **weather)
        ends = [trainers.finish(process) for process in [trainers.start(), trainers.start()]]
        assert sorted(code for code, _ in ends) == [0, Exit.LOCK_HELD], ends
        log = next(log for code, log in ends if code == Exit.LOCK_HELD)
        assert "is in use by process" in log and "Traceback" not in log, log
        lines(fetched(gcs, tmp_path))
        assert STEPS in committed(gcs) and "run/lock" not in gcs.names("bucket")


@pytest.mark.soak
@pytest.mark.fault("F18")
@pytest.mark.parametrize("when", ["while it saves", "at the end"])
def test_a_minute_without_the_bucket_costs_a_run_no_step(trainers, gcs, tmp_path, when):
    process = trainers.start()
    if when == "while it saves":
        wait_until(lambda: any(name.startswith("run/checkpoints/4/state") for name in gcs.names("bucket")), process)
    else:
        wait_until(lambda: f"step {STEPS - 1}/" in process.log(), process)
    gcs.weather = Weather(down=True)
    time.sleep(60)
    assert process.poll() is None, process.log()
    gcs.weather = Weather(lacks=ROLE)
    code, log = trainers.finish(process)
    assert code == 0 and STEPS in committed(gcs), log
    lines(fetched(gcs, tmp_path))
