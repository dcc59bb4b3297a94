"""Real processes on this machine as one run: the same losses as one process, and one end for all of them."""

import json
import re
import signal
import time

import numpy as np
import processes
import pytest
import tiny

from jaxscale import main
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.system.exits import Exit

STEPS = 40
VALUES = dict(
    seq_len=16,
    batch_tokens="16 rows",
    train_tokens=f"{STEPS} steps",
    model=tiny.LLAMA | dict(vocab_size=272, num_layers=1),
    optim=dict(peak_lr=1e-2, min_lr=1e-3, warmup_tokens="2 steps"),
    eval=dict(every_steps=20, num_rows=8),
    checkpoint=dict(save_every_steps=10),
    monitor=dict(log_every_steps=1, tensorboard=False, progress="lines"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a config and a small corpus."""
    folder, rng = tmp_path_factory.mktemp("home"), np.random.default_rng(0)
    words = "def return import while class lambda yield self None True for in".split()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(" ".join(rng.choice(words, 8 + number)))
    evals = dict(some=dict(kind="text", files=str(folder / "0*.txt"), every_steps=20))
    values = VALUES | dict(data=dict(files=str(folder / "*.txt")), evals=evals)
    (folder / "tiny.py").write_text(f"def get_config():\n    return {values!r}\n")
    return folder


@pytest.fixture(scope="module")
def straight(home, tmp_path_factory):
    """The work folder of the same run in one process with 8 devices."""
    workdir = tmp_path_factory.mktemp("runs") / "straight"
    assert main.main([f"--config={home / 'tiny.py'}", f"--workdir={workdir}"]) == 0
    return workdir


def start(count, devices, home, workdir, *flags, **more):
    flags = [f"--config={home / 'tiny.py'}", f"--workdir={workdir}", *flags]
    return processes.Processes(count, devices, workdir.parent, flags, **more)


def metrics(workdir, name):
    """{step: value} of training records."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def saved_steps(workdir):
    return Checkpoints(workdir / "checkpoints", CheckpointConfig()).all_steps()


def assert_same_run(workdir, straight, last=STEPS):
    """The same tokens in every step, and losses that differ by the order of sums alone."""
    for name in ("loss", "grad_norm", "validation/loss", "evals/some/bits_per_byte"):
        found, expected = metrics(workdir, name), metrics(straight, name)
        assert max(found) == last and sorted(found) == sorted(step for step in expected if step <= last)
        np.testing.assert_allclose([found[step] for step in found], [expected[step] for step in found], rtol=1e-5)
    hashes, expected = metrics(workdir, "tokens_hash"), metrics(straight, "tokens_hash")
    assert hashes == {step: expected[step] for step in hashes} and len(set(expected.values())) == STEPS


@pytest.mark.fault("F12")
@pytest.mark.fault("F5")
@pytest.mark.soak
def test_a_signal_to_one_of_two_saves_both_at_one_step_and_one_process_goes_on(home, straight, tmp_path):
    workdir = tmp_path / "run"
    with start(2, 2, home, workdir, "--config.checkpoint.save_every_steps=0") as both:
        both.wait_for("step 3/")
        both.running[1].send_signal(signal.SIGTERM)
        assert both.codes() == [Exit.PREEMPTED] * 2 == [10, 10]
        (step,) = saved_steps(workdir)
        assert 3 < step < STEPS
        for number in range(2):
            assert f"stopped (preempted, exit 10): SIGTERM: saved step {step}; the same" in both.log(number)
            assert "Traceback" not in both.log(number)
        assert "step 3/" not in both.log(1)  # only the first speaks
    assert main.main([f"--config={home / 'tiny.py'}", f"--workdir={workdir}"]) == 0  # 8 devices of one process
    assert_same_run(workdir, straight)


@pytest.mark.soak  # test_roll_call names them without a process
def test_who_is_missing_is_named_by_the_command_itself(home, tmp_path):
    with start(3, 1, home, tmp_path / "run", "--roll_call_seconds=1", numbers=[0]) as alone:
        assert alone.codes() == [Exit.PEER_LOST] == [13]
        (line,) = alone.log(0).splitlines()
    assert re.match(
        r"stopped \(peer_lost, exit 13\): roll call: after 1 s, missing process 1 of 3, process 2 of 3", line
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 2)])
def test_losses_and_tokens_are_those_of_one_process(home, straight, tmp_path, count, devices):
    workdir = tmp_path / "run"
    flags = ["--config.sample.num_tokens=10", "--config.sample.every_steps=15"]
    with start(count, devices, home, workdir, *flags) as running:
        assert running.codes() == [0] * count, running.log(0)
    assert_same_run(workdir, straight)
    assert saved_steps(workdir) == [20, 30, 40] and (workdir / "sample.txt").exists()
    samples = [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in samples] == [15, 30, STEPS]
    one, other = (Checkpoints(folder / "checkpoints", CheckpointConfig()) for folder in (workdir, straight))
    assert one.read_run(STEPS)["data"] == other.read_run(STEPS)["data"]


@pytest.mark.fault("F12")
@pytest.mark.soak
@pytest.mark.parametrize("mesh", [{"data": 1, "fsdp": 2, "tensor": 2}, {"data": 4, "fsdp": 1}], ids=str)
def test_other_meshes_over_processes_train_the_same(home, straight, tmp_path, mesh):
    flags = [f"--config.mesh.{axis}={size}" for axis, size in mesh.items()]
    with start(2, 2, home, tmp_path / "run", *flags) as running:
        assert running.codes() == [0, 0], running.log(0)
    assert_same_run(tmp_path / "run", straight)


@pytest.mark.fault("F7")
@pytest.mark.fault("F22")
@pytest.mark.soak
@pytest.mark.parametrize(("count", "killed"), [(2, 0), (2, 1), (4, 2)])
def test_a_killed_process_ends_the_others_at_once_and_the_run_goes_on(home, straight, tmp_path, count, killed):
    workdir = tmp_path / "run"
    with start(count, 1, home, workdir, "--config.train_tokens=100000 steps", "--config.eval.every_steps=0") as running:
        running.wait_for("step 14/")
        while not saved_steps(workdir):  # the save of step 10 may take longer than four steps
            assert running.running[killed].poll() is None, running.log(killed)
            time.sleep(0.05)
        running.running[killed].kill()
        began = time.monotonic()
        codes = running.codes()
        assert time.monotonic() - began < 5
        assert codes == [-9 if number == killed else Exit.PEER_LOST for number in range(count)]
        for number in set(range(count)) - {killed}:
            told = re.findall(
                rf"stopped \(peer_lost, exit 13\): process {killed} of {count} .* was lost", running.log(number)
            )
            assert len(told) == 1, running.log(number)
    newest = saved_steps(workdir)[-1]
    with start(count, 1, home, workdir, f"--config.train_tokens={newest + 3} steps") as again:
        assert again.codes() == [0] * count, again.log(0)
        assert f"resuming from step {newest}" in again.log(0)


@pytest.mark.soak
def test_another_config_in_one_is_told_by_all(home, tmp_path):
    own = lambda number: {"flags": ["--config.seed=1"]} if number == 1 else {}
    with start(2, 1, home, tmp_path / "run", own=own) as running:
        assert running.codes() == [Exit.BAD_INPUT] * 2
        for number in range(2):
            assert "roll call: process 1 of 2" in running.log(number)
            assert "seed is '1', but '0' on process 0" in running.log(number)


@pytest.mark.soak
def test_an_error_of_one_alone_ends_all_with_its_code_and_cause(home, tmp_path):
    (tmp_path / "file").write_text("")
    own = lambda number: {"env": {"XDG_CACHE_HOME": str(tmp_path / "file")}} if number == 1 else {}
    with start(2, 1, home, tmp_path / "run", own=own) as running:
        assert running.codes() == [Exit.BAD_INPUT] * 2, running.log(0)
        told = f"error: the cache {tmp_path / 'file' / 'jaxscale'} cannot be written: "
        assert running.log(1).splitlines()[-1].startswith(told)
        last = running.log(0).splitlines()[-1]
        assert last.startswith("stopped (bad_input, exit 2): process 1 of 2 (") and f" ended: {told}" in last


@pytest.mark.soak
def test_a_work_folder_that_is_not_shared_is_refused(home, tmp_path):
    def own(number):
        (tmp_path / str(number)).mkdir()
        return {"cwd": tmp_path / str(number)}

    flags = [f"--config={home / 'tiny.py'}", "--workdir=run"]
    with processes.Processes(2, 1, tmp_path, flags, own=own) as running:
        assert running.codes() == [Exit.BAD_INPUT] * 2
        assert "workdir=run of process 1 is not the folder of process 0" in running.log(1)
        assert "process 1 of 2" in running.log(0) and "is not the folder of process 0" in running.log(0)
    assert not (tmp_path / "1" / "run").exists()
