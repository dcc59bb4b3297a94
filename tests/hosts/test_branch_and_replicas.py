"""Two processes take the same decision about copies that differ, and begin with the same weights of another run."""

import json

import processes
import pytest
import tiny

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.monitor.events import read_events
from jaxscale.system.exits import Exit

VALUES = tiny.VALUES | dict(
    train_tokens="8 steps",
    mesh=dict(data=4, fsdp=1),
    eval=dict(num_rows=0),
    optim=dict(name="sgd", b1=0.0, peak_lr=1e-2, min_lr=1e-3, warmup_tokens="2 steps"),
    train=dict(replicas=dict(every_steps=2)),
    checkpoint=dict(save_every_steps=4, keep_last=9),
    monitor=dict(log_every_steps=1, tensorboard=False, progress="lines"),
)
KEPT = CheckpointConfig(keep_last=9)
OTHER = 1 << 11  # the first device of process 1: jax numbers those of simulated hosts like this


def start(home, name, *flags, **env):
    (home / name).mkdir()
    (home / "tiny.py").write_text(f"def get_config():\n    return {VALUES!r}\n")
    flags = [f"--config={home / 'tiny.py'}", f"--workdir={home / name / 'run'}", *flags]
    return processes.Processes(2, 2, home / name, flags, own=lambda number: {"env": dict(env)})


def fingerprints(folder, step):
    leaves = Checkpoints(folder / "checkpoints", CheckpointConfig()).read_record(step)["leaves"]
    return {name: leaf[2] for name, leaf in leaves.items()}


@pytest.mark.soak
@pytest.mark.fault("F25")
def test_a_fault_on_the_second_process_is_named_by_both_and_a_passing_one_leaves_no_trace(tmp_path):
    with start(tmp_path, "straight") as run:
        assert run.codes() == [0, 0], run.log(0) + run.log(1)
    with start(tmp_path, "passing", JAXSCALE_FLIP_BIT=f"5:{OTHER}") as run:
        assert run.codes() == [0, 0], run.log(0) + run.log(1)
        assert "the fault was transient" in run.log(0)
    assert fingerprints(tmp_path / "passing" / "run", 8) == fingerprints(tmp_path / "straight" / "run", 8)
    with start(tmp_path, "lasting", JAXSCALE_FLIP_BIT=f"5:{OTHER}:99") as run:
        assert run.codes() == [Exit.SILENT_CORRUPTION] * 2, run.log(0) + run.log(1)
        for number in (0, 1):
            assert f"after step 6, device {OTHER} (cpu, process 1) has different bits in params/" in run.log(number)


@pytest.mark.soak
def test_both_begin_with_the_same_weights_of_another_run(tmp_path):
    with start(tmp_path, "old") as run:
        assert run.codes() == [0, 0], run.log(0) + run.log(1)
    flags = [f"--init_from={tmp_path / 'old' / 'run'}", "--config.optim.peak_lr=1e-30", "--config.optim.min_lr=0"]
    with start(tmp_path, "branch", *flags, "--config.optim.weight_decay=0", "--config.train_tokens=4 steps") as run:
        assert run.codes() == [0, 0], run.log(0) + run.log(1)
    old, new = fingerprints(tmp_path / "old" / "run", 8), fingerprints(tmp_path / "branch" / "run", 4)
    assert {n: p for n, p in new.items() if "params" in n} == {n: p for n, p in old.items() if "params" in n}
    written = json.loads((tmp_path / "branch" / "run" / "config.json").read_text())
    assert written["ancestry"][0]["step"] == 8


@pytest.mark.soak
def test_both_begin_their_decay_early_after_the_same_step_and_go_on_as_a_branch(tmp_path):
    flags = ["--deadline=45s", "--config.limit.on_overrun=decay", "--config.optim.decay=constant"]
    flags += ["--config.optim.decay_tokens=20 steps", "--config.train_tokens=1000000 steps"]
    flags += ["--config.checkpoint.save_every_steps=0"]
    with start(tmp_path, "trunk", *flags) as run:
        assert run.codes() == [0, 0], run.log(0) + run.log(1)
    ((begin, until),) = [(e["step"], e["until"]) for e in read_events(tmp_path / "trunk" / "run") if "until" in e]
    assert 0 < until - begin <= 20  # fewer where the deadline is too near for all of them
    assert Checkpoints(tmp_path / "trunk" / "run" / "checkpoints", KEPT).latest_step() == until
    branch = [f"--branch_from={tmp_path}/trunk/run/checkpoints/{begin}", f"--decay_tokens={until - begin} steps"]
    with start(tmp_path, "branch", *branch) as run:
        assert run.codes() == [0, 0], run.log(0) + run.log(1)
    trunk, other = (fingerprints(tmp_path / name / "run", until) for name in ("trunk", "branch"))
    assert trunk == other, "the same decay, decided before"
