"""Minutes of random faults against two supervised processes end bit for bit like a run that nothing happened to.

    JAXSCALE_SOAK_SECONDS=600 JAXSCALE_SOAK_SEED=7 pytest -n 0 -s -m soak tests/faults/test_soak.py

Rounds of one short run each, on a disk and, where the emulator serves TensorStore, in a bucket. The seed is printed.
"""

import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time

import gcs_emulator
import numpy as np
import processes
import pytest
import tiny
from xla_flags import xla_flags

import jaxscale
from jaxscale.cli import two_runs

pytestmark = [pytest.mark.soak, pytest.mark.fault("F30")]

SECONDS = float(os.environ.get("JAXSCALE_SOAK_SECONDS", "600"))
STEPS, SAVE_EVERY, COUNT = 60, 5, 2
PATIENCE = 400  # seconds without a change in the run's state: then it has failed
FILE_LIMIT = 256 * 1024  # bytes: more than any log here and less than a checkpoint's data file
VALUES = dict(
    seq_len=16,
    batch_tokens="8 rows",
    train_tokens=f"{STEPS} steps",
    model=tiny.LLAMA | dict(vocab_size=2048, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=256),
    optim=dict(peak_lr=1e-2, min_lr=1e-3, warmup_tokens="10 steps"),
    eval=dict(num_rows=0),
    checkpoint=dict(save_every_steps=SAVE_EVERY),
    monitor=dict(log_every_steps=1, tensorboard=False, progress="lines"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a config and a corpus of some epochs."""
    folder, rng = tmp_path_factory.mktemp("soak"), np.random.default_rng(0)
    words = "def return import while class lambda yield self None True for in".split()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(" ".join(rng.choice(words, 60 + number)))
    values = VALUES | dict(data=dict(files=str(folder / "*.txt")))
    (folder / "soak.py").write_text(f"def get_config():\n    return {values!r}\n")
    return folder


class Supervised:
    """Two processes of a run, each under a supervisor."""

    def __init__(self, home, workdir, logs, env=None):
        self.workdir, self.logs = workdir, logs
        logs.mkdir(parents=True)
        source = str(pathlib.Path(jaxscale.__file__).parent.parent)
        flags = xla_flags(1)
        self.env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": source, "PYTHONUNBUFFERED": "1"} | (env or {})
        port = processes.free_ports()
        policy = ["--backoff_seconds=1", "--max_backoff_seconds=2", "--min_seconds=0", "--max_fruitless=60"]
        self.supervisors = []
        for number in range(COUNT):
            command = [sys.executable, "-m", "jaxscale.cli", "supervise", *policy, f"--ledger={self.ledger(number)}"]
            command += ["--", f"--config={home / 'soak.py'}", f"--workdir={workdir}", f"--coordinator=localhost:{port}"]
            command += [f"--num_processes={COUNT}", f"--process_id={number}"]
            with self.log(number).open("wb") as log:
                self.supervisors.append(subprocess.Popen(command, stdout=log, stderr=log, env=self.env))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process in self.supervisors:
            process.kill()  # its training dies with it
            process.wait()

    def log(self, number):
        return self.logs / f"process{number}.log"

    def ledger(self, number):
        return self.logs / f"supervise{number}.jsonl"

    def events(self, number, event):
        """Lines of a ledger."""
        file = self.ledger(number)
        lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        return [line for line in lines if line["event"] == event]

    def starts(self):
        return [len(self.events(number, "start")) for number in range(COUNT)]

    def pid(self, number):
        """The training that runs now, None between two."""
        starts, ends = self.events(number, "start"), self.events(number, "end")
        return starts[-1]["pid"] if len(starts) > len(ends) else None

    def done(self):
        return all(process.poll() is not None for process in self.supervisors)

    def last_step(self, number=0):
        """The last step that the first process has told of since it was last started."""
        text = self.log(number).read_text(errors="replace").rpartition("supervise:")[2]
        lines = [line for line in text.splitlines() if line.startswith("step ")]
        return int(lines[-1].split()[1].split("/")[0]) if lines else None

    def wait_until(self, condition):
        """Returns True once the condition holds, False if the run is done before."""
        changed, state = time.monotonic(), None
        while not condition():
            if self.done():
                return False
            now = (self.starts(), self.last_step())
            if now != state:
                changed, state = time.monotonic(), now
            assert time.monotonic() - changed < PATIENCE, f"nothing has moved for {PATIENCE} s:\n{self.tails()}"
            time.sleep(0.05)
        return True

    def tails(self):
        """The last that each has told."""
        return "\n".join(self.log(number).read_text(errors="replace")[-4000:] for number in range(COUNT))

    def send(self, number, what):
        """A signal to a training, if it runs."""
        if pid := self.pid(number):
            try:
                os.kill(pid, what)
            except ProcessLookupError:
                return False
        return pid is not None

    def fail_writes(self, number, seconds):
        """For so long no file of this training may grow beyond the limit: EFBIG, as a full disk but for the number."""
        pid = self.pid(number)
        if pid is None:
            return False
        try:
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))
            time.sleep(seconds)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        except ProcessLookupError:  # it has left with 14 meanwhile
            pass
        return True


def bucket_variables(gcs):
    """The environment in which gcsfs and TensorStore speak to the emulator."""
    names = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
    return dict.fromkeys(names, gcs.endpoint) | {
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "fake", "EPATH_USE_TF": "false", "GOOGLE_CLOUD_PROJECT": "test",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }  # fmt: skip


PROBE = """
import sys, numpy as np
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
checkpoints = Checkpoints("gs://bucket/probe/checkpoints", CheckpointConfig())
state = {"w": np.arange(8.0, dtype="float32")}
checkpoints.save(1, state, {}); checkpoints.close()
again = Checkpoints("gs://bucket/probe/checkpoints", CheckpointConfig()).restore(1, state)
assert (again["w"] == state["w"]).all()
"""


def serves_tensorstore(gcs, folder):
    """'' if a checkpoint can be saved to and restored from the emulator, else why not."""
    gcs.put("bucket", "there", b"")
    env = os.environ | bucket_variables(gcs) | {"PYTHONPATH": str(pathlib.Path(jaxscale.__file__).parent.parent)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=90, cwd=folder
        )
    except subprocess.TimeoutExpired:
        return "a probe did not end in 90 s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1][:200]


@pytest.fixture(scope="module")
def gcs(tmp_path_factory):
    """The emulator, or None where it does not serve TensorStore."""
    with gcs_emulator.Emulator() as gcs:
        why = serves_tensorstore(gcs, tmp_path_factory.mktemp("probe"))
        if why:
            print(f"soak: no rounds in a bucket: {why}")
        yield None if why else gcs


def strike(run, rng, gcs, told):
    """One fault of a random kind; what was done."""
    victim = rng.randrange(COUNT)
    kinds = ["kill", "kill in the start", "term", "503" if gcs else "writes"]
    kind = rng.choice(kinds)
    if kind == "kill in the start":
        if not run.wait_until(lambda: run.pid(victim) is not None):
            return
        time.sleep(rng.uniform(0, 6))
    else:
        if not run.wait_until(lambda: run.last_step() is not None):
            return
        target, starts = (run.last_step() or 0) + rng.randint(1, 20), run.starts()
        if not run.wait_until(lambda: (run.last_step() or 0) >= target or run.starts() != starts):
            return
    at = run.last_step()
    if kind == "503":
        for method in ("GET", "POST", "PUT"):
            times = rng.randint(1, 8)
            gcs.faults.append(gcs_emulator.Fault("status", method=method, status=rng.choice([429, 503]), times=times))
        done = True
    elif kind == "writes":
        done = run.fail_writes(victim, rng.uniform(0.5, 4))
    else:
        done = run.send(victim, signal.SIGTERM if kind == "term" else signal.SIGKILL)
    if done:
        told.append(f"{kind} on process {victim} at step {at}")
        print(f"soak: {told[-1]}", flush=True)


def hold_ledger(run, number, told):
    """The seconds of a ledger add up to the wall, and no fault cost more than two saves' steps; failing writes four."""
    (last,) = run.events(number, "leave")
    parts = sum(last[f"{name}_seconds"] for name in ("up", "waiting", "keeping"))
    assert parts == pytest.approx(last["wall_seconds"], rel=0.01)
    # the save under way is lost as well as the steps since it began; a run leaves after three saves in a row that fail
    lost = [end["steps_lost"] for end in run.events(number, "end")]
    assert max(lost) <= (4 if any(fault.startswith("writes") for fault in told) else 2) * SAVE_EVERY, lost
    return last


def test_random_faults_change_nothing(home, gcs, tmp_path):
    seed = int(os.environ.get("JAXSCALE_SOAK_SEED", random.SystemRandom().randrange(10**6)))
    rng = random.Random(seed)
    print(f"soak: seed {seed} (JAXSCALE_SOAK_SEED), {SECONDS:g} s", flush=True)
    with Supervised(home, tmp_path / "reference", tmp_path / "reference-logs") as reference:
        reference.wait_until(reference.done)
    assert [process.returncode for process in reference.supervisors] == [0, 0], reference.tails()
    total, number, ends = 0, 0, time.monotonic() + SECONDS
    while number == 0 or time.monotonic() < ends:
        number += 1
        in_bucket = gcs if number % 2 == 0 else None
        workdir = f"gs://bucket/round{number}" if in_bucket else tmp_path / f"round{number}"
        told, env = [], bucket_variables(gcs) if in_bucket else {}
        with (
            Supervised(home, workdir, tmp_path / f"round{number}-logs", env) as run,
            pytest.MonkeyPatch.context() as mp,
        ):
            for name, value in env.items():
                mp.setenv(name, value)  # this process looks into the bucket too
            while not run.done() and time.monotonic() < ends:
                strike(run, rng, in_bucket, told)
            run.wait_until(run.done)
            assert [process.returncode for process in run.supervisors] == [0, 0], f"seed {seed}, {told}:\n{run.tails()}"
            found = two_runs.compare(tmp_path / "reference", workdir, STEPS)
            assert found.passes, f"seed {seed}, {told}: {found.differences[:5]}"
            last = [hold_ledger(run, n, told) for n in range(COUNT)][0]
        total += len(told)
        shown = {name: last[name] for name in ("starts", "wall_seconds", "steps_lost", "goodput")}
        print(
            f"soak: round {number}{' in a bucket' if in_bucket else ''}: {len(told)} faults, exact; {shown}", flush=True
        )
    print(f"soak: {number} rounds, {total} faults, all exact")
    assert total
