"""A work folder that is taken over, moved or deleted under a run that lives: that one writes nothing more anywhere."""

import os
import signal
import subprocess
import sys
import time

import pytest
import tiny
from gcs_emulator import Emulator
from xla_flags import xla_flags

from jaxscale.runtime.checkpoint.lock_stores import process_state
from jaxscale.system.exits import Exit

VALUES = dict(
    seq_len=16,
    batch_tokens="16 rows",
    train_tokens="1000000 steps",
    model=tiny.LLAMA | dict(vocab_size=272, num_layers=1),
    optim=dict(peak_lr=1e-2, min_lr=1e-3, warmup_tokens="2 steps"),
    data=dict(name="synthetic"),
    eval=dict(num_rows=0),
    checkpoint=dict(save_every_steps=10, keep_last=2),
    monitor=dict(log_every_steps=1, progress="lines", statistics_every_steps=0),
    sample=dict(num_tokens=0),
)
SECONDS = 180  # for anything that is waited for


class Trainer:
    """The training command in a process of its own."""

    def __init__(self, folder, name, workdir, *flags, env=()):
        config = folder / "tiny_config.py"
        config.write_text(f"def get_config():\n    return {VALUES!r}\n")
        self.file = folder / f"{name}.log"
        env = os.environ | {"XLA_FLAGS": xla_flags(1), "PYTHONUNBUFFERED": "1"} | dict(env)
        command = [sys.executable, "-m", "jaxscale.main", f"--config={config}", f"--workdir={workdir}", *flags]
        with self.file.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.process.kill()
        self.process.wait()

    @property
    def log(self):
        return self.file.read_text(errors="replace")

    def wait_for(self, text):
        wait_until(lambda: text in self.log or self.process.poll() is not None, self)
        assert text in self.log, self.log[-2000:]

    def freeze(self):
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(self.process.pid)[0] == "T", self)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def end(self):
        """(exit code, its last line)."""
        code = self.process.wait(SECONDS)
        assert "Traceback" not in self.log, self.log[-2000:]
        return code, self.log.strip().splitlines()[-1]


def wait_until(happened, trainer):
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, trainer.log[-2000:]
        time.sleep(0.01)


def files_of(folder):
    """{name: content} of all that is in a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.fault("F21")
@pytest.mark.fault("F32")
@pytest.mark.soak  # by default: test_lock and test_lost_folder for the lock and the saves, test_fence for all writers
def test_a_run_that_wakes_up_in_a_folder_of_another_writes_nothing(tmp_path):
    workdir = tmp_path / "run"
    with Trainer(tmp_path, "old", workdir) as old:
        wait_until((workdir / "checkpoints" / "last_good.json").exists, old)
        old.freeze()
        with Trainer(tmp_path, "new", workdir, "--steal_lock") as new:
            new.wait_for("was taken over: stolen")
            new.wait_for("resuming from step")
            wait_until(lambda: new.log.count("tok/s") > 5, new)
            new.freeze()  # so that all of its files can be compared
            before = files_of(workdir)
            old.thaw()
            code, line = old.end()
            assert code == Exit.LOCK_HELD and "was taken over by process" in line and "without writing" in line
            assert files_of(workdir) == before
            new.thaw()
            new.process.send_signal(signal.SIGTERM)
            assert new.end()[0] == Exit.PREEMPTED


@pytest.mark.fault("F34")
@pytest.mark.soak  # test_lock_outage does it with the lock alone
@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_folder_that_is_moved_or_deleted_under_a_run_is_not_made_anew(tmp_path, how):
    workdir, away = tmp_path / "run", tmp_path / "away"
    with Trainer(tmp_path, "log", workdir, "--config.lock.lease_seconds=1") as trainer:
        trainer.wait_for("step 12/")
        if how == "moved":
            workdir.rename(away)
        else:
            while subprocess.run(["rm", "-rf", workdir], stderr=subprocess.DEVNULL).returncode:
                pass  # the run made a file between rm's look at a folder and its removal
        code, line = trainer.end()
    told = f"{workdir} was moved to {away} while" if how == "moved" else f"{workdir} was deleted while"
    assert code == Exit.STORAGE and told in line and "no new folder was created" in line, line
    assert not workdir.exists()


@pytest.mark.soak
@pytest.mark.fault("F32")
def test_a_run_that_wakes_up_in_a_bucket_of_another_writes_nothing(tmp_path):
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    flags = ["--config.monitor.tensorboard=False", "--config.lock.lease_seconds=5"]
    with Emulator() as gcs:
        workdir, env = "gs://bucket/run", gcs.environment()
        objects = lambda: {name: gcs.get("bucket", name) for name in gcs.names("bucket")}
        with Trainer(tmp_path, "old", workdir, *flags, env=env) as old:
            wait_until(lambda: "run/checkpoints/last_good.json" in gcs.names("bucket"), old)
            old.freeze()
            with Trainer(tmp_path, "new", workdir, *flags, "--steal_lock", env=env) as new:
                new.wait_for("resuming from step")
                wait_until(lambda: new.log.count("tok/s") > 5, new)
                new.freeze()
                time.sleep(1)  # for requests that were under way
                before = objects()
                old.thaw()
                code, line = old.end()
                assert code == Exit.LOCK_HELD and "without writing" in line, line
                after = objects()
                changed = [name for name in after | before if after.get(name) != before.get(name)]
                assert all("/state/" in name for name in changed), changed  # pieces of arrays that count for nothing
