"""Real processes that hang, freeze or cannot write: none is waited for for ever, and all say why."""

import re
import resource
import signal
import time

import processes
import pytest
import tiny

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.system.exits import Exit

VALUES = dict(
    seq_len=16,
    batch_tokens="16 rows",
    train_tokens="100000 steps",
    model=tiny.LLAMA | dict(vocab_size=272, num_layers=1),
    optim=dict(peak_lr=1e-2, min_lr=1e-3, warmup_tokens="2 steps"),
    eval=dict(num_rows=0),
    checkpoint=dict(save_every_steps=10),
    monitor=dict(log_every_steps=1, tensorboard=False, progress="lines"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a config."""
    folder = tmp_path_factory.mktemp("home")
    for number in range(20):
        (folder / f"{number:02}.txt").write_text("def return import while class lambda " * (number + 2))
    values = VALUES | dict(data=dict(files=str(folder / "*.txt")))
    (folder / "tiny.py").write_text(f"def get_config():\n    return {values!r}\n")
    return folder


def start(count, home, workdir, *flags, **more):
    flags = [f"--config={home / 'tiny.py'}", f"--workdir={workdir}", *flags]
    return processes.Processes(count, 1, workdir.parent, flags, **more)


def saved_steps(workdir):
    return Checkpoints(workdir / "checkpoints", CheckpointConfig()).all_steps()


def hanging(phase, only=1):
    env = {"JAXSCALE_HANG_AT": phase, "JAXSCALE_ONLY_PROCESS": str(only)}
    return lambda number: {"env": env}


SOAK = pytest.mark.soak
HANGS = [
    pytest.param("data", 5, 3, "process 1: data of step 5", marks=SOAK),  # test_watchdog has one process of each kind
    pytest.param("step", 9, 3, "process [01]: step", marks=SOAK),  # the other one stands in its step as well
    pytest.param("save", 1, 10, "process [01]: save of step 10", marks=SOAK),
    pytest.param("compile", 1, 30, "process 1: compile of step 1", marks=SOAK),
    pytest.param("eval", 2, 30, "process [01]: eval of step 1", marks=SOAK),
    pytest.param("restore", 1, 30, "process 1: restore", marks=SOAK),
]


@pytest.mark.fault("F8")
@pytest.mark.parametrize(("phase", "number", "seconds", "told"), HANGS)
def test_a_process_that_hangs_ends_all_with_stacks_and_code_15(home, tmp_path, phase, number, seconds, told):
    workdir = tmp_path / "run"
    flags = [f"--config.hang.{phase}_seconds={seconds}"]  # the other budgets are long
    if phase == "eval":
        flags += ["--config.eval.num_rows=8", "--config.eval.every_steps=5"]
    with start(2, home, workdir, *flags, own=hanging(f"{phase}:{number}")) as running:
        if phase == "data":
            running.wait_for("step 3/")
        began = time.monotonic()
        assert running.codes() == [Exit.HANG] * 2 == [15, 15], running.log(0) + running.log(1)
        if phase == "data":
            assert time.monotonic() - began < seconds + 5 + 5  # the last for the step up to there, on a busy machine
        line = rf"^stopped \(hang, exit 15\): {told} .*\(hang.{phase}_seconds"
        assert [len(re.findall(line, running.log(n), re.MULTILINE)) for n in range(2)] == [1, 1]
    files = sorted((workdir / "stacks").iterdir())
    assert [file.name[0] for file in files] == ["0", "1"]
    assert "hang_point" in files[1].read_text() and f"in phase {phase}" in files[1].read_text()
    assert "Thread MainThread" in files[0].read_text()


@pytest.mark.fault("F8")
@pytest.mark.soak
def test_long_phases_with_budgets_of_their_own_do_not_trip_the_one_of_a_step(home, tmp_path):
    flags = ["--config.hang.step_seconds=4", "--config.hang.data_seconds=4", "--config.train_tokens=12 steps"]
    flags += ["--config.model.num_layers=16", "--config.model.scan_layers=False"]  # long to compile, and quick
    with start(2, home, tmp_path / "run", *flags) as running:
        running.wait_for("versions: ")
        began = time.monotonic()
        running.wait_for("step 1/")
        assert time.monotonic() - began > 4
        assert running.codes() == [0, 0], running.log(0)
    assert not (tmp_path / "run" / "stacks").exists()


@pytest.mark.fault("F9")
@pytest.mark.soak
def test_a_write_that_fails_on_one_process_ends_both_with_its_cause(home, tmp_path):
    workdir = tmp_path / "run"
    began = time.monotonic()
    with start(2, home, workdir) as running:
        running.wait_for("versions: ")  # by then text was tokenized into the cache
        resource.prlimit(running.running[1].pid, resource.RLIMIT_FSIZE, (8_000, resource.RLIM_INFINITY))
        assert running.codes() == [Exit.STORAGE] * 2 == [14, 14], running.log(0) + running.log(1)
        assert time.monotonic() - began < 60 + 60  # to the first save, and after it
        for number in range(2):
            assert "File too large" in running.log(number).splitlines()[-1], running.log(number)
        assert "process 1: File too large" in running.log(0).splitlines()[-1]
    assert saved_steps(workdir) == []


@pytest.mark.fault("F21")
@pytest.mark.soak
@pytest.mark.parametrize("frozen", [1, 0])
def test_a_frozen_process_is_left_behind_and_writes_nothing_when_it_thaws(home, tmp_path, frozen):
    workdir = tmp_path / "run"
    with start(2, home, workdir) as running:
        running.wait_for("step 14/")
        began = time.monotonic()
        running.running[frozen].send_signal(signal.SIGSTOP)
        assert running.running[1 - frozen].wait(60) == Exit.PEER_LOST == 13, running.log(1 - frozen)
        assert time.monotonic() - began < 20
        told = rf"stopped \(peer_lost, exit 13\): process {frozen} of 2 .*has not responded for 10 s or more \(frozen"
        assert re.search(told, running.log(1 - frozen)), running.log(1 - frozen)
        steps = saved_steps(workdir)
        running.running[frozen].send_signal(signal.SIGCONT)
        code = running.running[frozen].wait(60)
        assert code in (Exit.PEER_LOST, -signal.SIGABRT), running.log(frozen)
        assert saved_steps(workdir) == steps


@pytest.mark.fault("F22")
@pytest.mark.soak
def test_the_others_name_the_first_process_when_it_is_killed(home, tmp_path):
    with start(2, home, tmp_path / "run") as running:
        running.wait_for("step 4/")
        began = time.monotonic()
        running.running[0].kill()
        assert running.codes() == [-9, Exit.PEER_LOST] and time.monotonic() - began < 5
        last = running.log(1).splitlines()[-1]
    assert re.match(r"stopped \(peer_lost, exit 13\): process 0 of 2 .*was lost; restart all", last), last
