"""Processes on this machine that share the rows of a batch: the run is the one that a single process makes."""

import json
import random
import re
import shutil

import numpy as np
import processes
import pytest
import tiny

from jaxscale import main
from jaxscale.cli import trace
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.system.exits import Exit

STEPS, ROWS, SEQ_LEN = 24, 16, 16
COUNTED = ("tokens_seen", "train/real_tokens", "tokens_hash", "batch_index", "gated_rows")  # of the data alone
LEARNED = ("loss", "grad_norm", "train/web/loss", "train/code/loss")
VALUES = dict(
    seq_len=SEQ_LEN,
    batch_tokens=f"{ROWS} rows",
    train_tokens=f"{STEPS} steps",
    model=tiny.LLAMA | dict(vocab_size=272, num_layers=1, attention="blockwise"),
    train=dict(num_microbatches=2),
    optim=dict(peak_lr=1e-2, min_lr=1e-3, warmup_tokens="2 steps"),
    eval=dict(every_steps=12, num_rows=8),
    checkpoint=dict(save_every_steps=4, keep_last=9),
    monitor=dict(log_every_steps=1, tensorboard=False, progress="lines"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a config and a corpus of two sources, whose documents are packed."""
    folder, draw = tmp_path_factory.mktemp("home"), random.Random(1)
    for name, alphabet in (("web", "abcdefghijklm "), ("code", "0123456789+-")):
        for i in range(40):
            (folder / f"{name}{i:02}.txt").write_text("".join(draw.choices(alphabet, k=draw.randint(4, 60))))
    (folder / "web99.txt").write_text("z" * 300)  # the gate is to find something
    data = dict(
        files={name: str(folder / f"{name}*.txt") for name in ("web", "code")},
        mixture={"web": 0.7, "code": 0.3},
        cache_dir=str(folder / "cache"),
        gate=dict(on=True, max_run=8, max_top_share=1.0, min_distinct_share=0.0),
    )
    (folder / "tiny.py").write_text(f"def get_config():\n    return {VALUES | dict(data=data)!r}\n")
    return folder


@pytest.fixture(scope="module")
def alone(home, tmp_path_factory):
    """The work folder of the run of one process, whose rows nobody shares."""
    workdir = tmp_path_factory.mktemp("runs") / "alone"
    assert main.main([f"--config={home / 'tiny.py'}", f"--workdir={workdir}"]) == 0
    return workdir


def start(count, home, workdir, *flags, devices=1, **env):
    """The run with mesh.context of as many as there are processes, unless a flag says otherwise."""
    flags = [f"--config={home / 'tiny.py'}", f"--workdir={workdir}", f"--config.mesh.context={count}", *flags]
    return processes.Processes(count, devices, workdir.parent, flags, own=lambda number: {"env": dict(env)})


def finished(count, home, workdir, *flags, **more):
    with start(count, home, workdir, *flags, **more) as running:
        assert running.codes() == [0] * count, running.log(0)
    return workdir


def records(workdir):
    """{step: what was written of it}."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


def numbers(workdir):
    """{step: loss and norm of the gradient}, to the last digit."""
    return {step: (line["loss"], line["grad_norm"]) for step, line in records(workdir).items()}


def saved(workdir, step=STEPS):
    """{leaf of a checkpoint: fingerprint of its bits}."""
    record = Checkpoints(workdir / "checkpoints", CheckpointConfig()).read_record(step)
    return {name: leaf[2] for name, leaf in record["leaves"].items()}


def position(workdir):
    """The position in the data at the end of the run."""
    return Checkpoints(workdir / "checkpoints", CheckpointConfig()).read_run(STEPS)["data"]


def assert_same_rows(workdir, alone, steps=STEPS):
    """Each row was read once and counted once, and was learned from as by one process."""
    found, expected = records(workdir), records(alone)
    assert sorted(found) == list(range(1, steps + 1)) and found[steps]["tokens_seen"] == steps * ROWS * SEQ_LEN
    for step, line in found.items():
        assert [line[name] for name in COUNTED] == [expected[step][name] for name in COUNTED]
        np.testing.assert_allclose([line[n] for n in LEARNED], [expected[step][n] for n in LEARNED], rtol=1e-5)
        if line["step_seconds"]:
            assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(ROWS * SEQ_LEN, rel=1e-3)
        parts = [part for name, part in line.items() if name.startswith("goodput/") and name.endswith("_seconds")]
        assert sum(parts) == pytest.approx(2 * line["goodput/wall_seconds"], abs=0.02)  # it is the sum of the others


@pytest.mark.soak
def test_two_that_share_rows_count_and_learn_from_each_once(home, alone, tmp_path):
    workdir = finished(2, home, tmp_path / "run", "--stop_after=4")
    assert_same_rows(workdir, alone, steps=4)
    assert sum(line["gated_rows"] for line in records(alone).values()) > 0


@pytest.fixture(scope="module")
def shared(home, tmp_path_factory):
    """The work folder of the run of four processes, two and two of which share rows."""
    return finished(4, home, tmp_path_factory.mktemp("runs") / "shared", "--config.mesh.context=2")


def listed(workdir, capsys, *flags):
    capsys.readouterr()
    assert trace.main([f"--workdir={workdir}", "--json", *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.soak
def test_documents_of_shared_rows_are_traced_as_those_of_one_process(home, alone, shared, capsys):
    assert_same_rows(shared, alone)
    steps = {step: listed(alone, capsys, f"--step={step}") for step in (7, 23)}
    shown = json.loads(steps[7].splitlines()[0])
    document = f"--doc={shown['id'] or shown['shard'] + ':' + str(shown['number'])}"
    for flags, expected in [(f"--step={step}", text) for step, text in steps.items()] + [(document, None)]:
        expected = expected or listed(alone, capsys, flags)
        assert listed(shared, capsys, flags) == expected != ""
    assert position(shared) == position(alone)


@pytest.mark.soak
@pytest.mark.parametrize("count", [2, 4])
def test_all_that_share_one_row_train_the_same(home, alone, tmp_path, count):
    assert_same_rows(finished(count, home, tmp_path / "run"), alone)


@pytest.mark.fault("F7")
@pytest.mark.soak
@pytest.mark.parametrize("killed", [1, 2])
def test_one_that_is_lost_is_named_and_the_run_goes_on_as_if_it_had_not_been(home, shared, tmp_path, killed):
    workdir, flag, others = tmp_path / "run", "--config.mesh.context=2", {0, 1, 2, 3} - {killed}
    with start(4, home, workdir, flag) as running:
        running.wait_for("step 14/")
        running.running[killed].kill()
        codes = running.codes()
        assert codes == [-9 if number == killed else Exit.PEER_LOST for number in range(4)]
        for number in others:
            assert re.search(rf"stopped \(peer_lost, exit 13\): process {killed} of 4 .* lost", running.log(number))
    assert numbers(finished(4, home, workdir, flag)) == numbers(shared)
    assert saved(workdir) == saved(shared) and position(workdir) == position(shared)


@pytest.mark.soak
@pytest.mark.parametrize(("count", "context"), [(1, 1), (4, 1), (4, 4)])
def test_a_checkpoint_goes_on_where_others_share_rows(home, shared, tmp_path, monkeypatch, count, context):
    def go_on(workdir, *flags):
        shutil.copytree(shared, workdir)
        for step in (16, 20, 24):
            shutil.rmtree(workdir / "checkpoints" / str(step))
        flags = [f"--config.mesh.context={context}", *flags]
        if count > 1:
            return finished(count, home, workdir, *flags)
        assert main.main([f"--config={home / 'tiny.py'}", f"--workdir={workdir}", *flags]) == 0
        return workdir

    with monkeypatch.context() as patch:
        patch.setenv("JAXSCALE_SPOIL_BATCHES", "12:13:nan")  # a step that is skipped leaves what was restored
        skipped = saved(go_on(tmp_path / "skipped", "--stop_after=13"), 13)
    same = [name for name, bits in saved(shared, 12).items() if skipped[name] == bits]
    learned = [name for name in skipped if name.startswith(("params", "opt_state")) and not name.endswith("count")]
    assert len(learned) >= 30 and set(learned) <= set(same)
    workdir = go_on(tmp_path / "run")
    assert_same_rows(workdir, shared)
    before = lambda folder: {step: pair for step, pair in numbers(folder).items() if step <= 12}
    assert before(workdir) == before(shared)


@pytest.mark.soak
def test_a_replay_of_shared_rows_has_the_same_bits(home, tmp_path):
    fragile = [
        "--config.train.guard.max_skipped_in_row=2",
        "--config.train.recovery.rewind_margin_steps=2",
        "--config.train.guard.window_steps=10",
    ]
    old = finished(2, home, tmp_path / "old", *fragile, JAXSCALE_SPOIL_BATCHES="13:16:nan")
    events = [json.loads(line)["event"] for line in (old / "events.jsonl").read_text().splitlines()]
    assert "rewind" in events
    new = finished(2, home, tmp_path / "new", *fragile, f"--replay={old}")
    assert numbers(new) == numbers(old) and saved(new) == saved(old)
