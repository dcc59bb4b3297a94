"""A run from the command line to its end: it goes on, or is refused, and never loses or repeats a step."""

import dataclasses
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny
from xla_flags import xla_flags

from jaxscale import main, schema
from jaxscale.build import make_program
from jaxscale.config import RunConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.monitor.console import printable
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.run.resume_checks import open_same_data
from jaxscale.runtime.training import loop
from jaxscale.settings.config_file import load_config
from jaxscale.system import paths
from jaxscale.system.bucket import Bucket
from jaxscale.system.bucket_errors import Transient
from jaxscale.system.exits import Exit, Stop
from jaxscale.tools.preflight.compiled import without_compilation_cache

STEPS = 16
VALUES = dict(
    seq_len=16,
    batch_tokens="16 rows",
    train_tokens=f"{STEPS} steps",
    model=tiny.LLAMA | dict(vocab_size=272, num_layers=1),
    optim=dict(peak_lr=1e-2, min_lr=1e-3, warmup_tokens="2 steps"),
    eval=dict(every_steps=8, num_rows=8),
    checkpoint=dict(save_every_steps=6),
    monitor=dict(log_every_steps=1, tensorboard=False, progress="lines"),
)
WORDS = "def return import while class lambda yield self None True for in if else".split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a config and a corpus of 20 short documents."""
    folder = tmp_path_factory.mktemp("home")
    rng = random.Random(0)
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(" ".join(rng.choices(WORDS, k=8 + number)))
    values = VALUES | dict(data=dict(files=str(folder / "*.txt")))
    (folder / "tiny.py").write_text(f"def get_config():\n    return {values!r}\n")
    return folder


def config(home, overrides=None):
    return load_config(str(home / "tiny.py"), overrides)


compiled = {}


def program(cfg, budget):
    """The program of a config, made once for all of its runs."""
    key = repr((cfg, budget))
    if key not in compiled:
        compiled[key] = make_program(cfg, budget)
    return compiled[key]


def train(home, workdir, overrides=None, stop_after=None):
    """Trains, or is told to stop by a signal during step `stop_after` (counted from 1)."""
    run = open_run(config(home, overrides), str(workdir), log=lambda text: None, make_program=program)
    steps = [run.start_step]

    def train_step(state, batch):
        steps[0] += 1
        if steps[0] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return run.train_step(state, batch)

    try:
        loop.train(dataclasses.replace(run, train_step=train_step))
    except Stop as stop:
        assert (stop.code, steps[0]) == (Exit.PREEMPTED, stop_after), str(stop)


def command(home, workdir, *flags):
    """The command itself, in this process."""
    return main.main([f"--config={home / 'tiny.py'}", f"--workdir={workdir}", *flags])


def refusal(home, workdir, *flags):
    """(exit code, message) with which the command ends; nothing in the work folder may have changed."""
    before = contents(workdir)
    with pytest.raises(Stop) as stop:
        command(home, workdir, *flags)
    assert contents(workdir) == before
    return stop.value.code, str(stop.value)


def contents(folder):
    return {str(path): path.stat().st_mtime_ns for path in pathlib.Path(folder).rglob("*") if path.is_file()}


def metrics(workdir, *names):
    """{step: values} of training records."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: tuple(line[name] for name in names) for line in lines if "loss" in line}


def final_state(home, workdir):
    checkpoints = Checkpoints(workdir / "checkpoints", config(home).checkpoint)
    step = checkpoints.latest_step()
    leaves = checkpoints.read_record(step)["leaves"]
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype, _) in leaves.items()}
    return step, tiny.host(checkpoints.restore(step, shapes))


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory):
    """The work folder of a run that was never stopped, to be read only."""
    workdir = tmp_path_factory.mktemp("runs") / "straight"
    train(home, workdir)
    return workdir


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of it, to be gone on with."""
    return pathlib.Path(shutil.copytree(finished, tmp_path / "copy"))


def test_a_run_writes_what_it_is_and_what_it_measured(home, finished):
    written = json.loads((finished / "config.json").read_text())
    assert schema.from_dict(RunConfig, written["config"]) == config(home)
    assert written["budget"]["total_steps"] == STEPS
    assert written["versions"]["jax"] == jax.__version__ and "python" in written["versions"]
    assert "git_commit" in written
    found = metrics(finished, "tokens_seen", "batch_index", "skipped_total", "learning_rate")
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found[STEPS][:3] == (STEPS * 256, STEPS - 1, 0)
    assert found[STEPS][3] == pytest.approx(1e-3)
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    validation = [line for line in lines if "validation/bits_per_byte" in line]
    assert [line["step"] for line in validation] == [0, 8, 16]
    assert validation[-1]["validation/bits_per_byte"] < validation[0]["validation/bits_per_byte"] - 1


def test_an_epoch_ends_inside_the_run_and_inside_a_batch(home):
    cfg = config(home)
    corpus = open_data(cfg.data, seq_len=16, vocab_size=272, seed=0, say=lambda text: None)
    batches, rest = divmod(len(corpus.train_rows), cfg.rows_per_step)
    assert 3 < batches < 10 and rest  # the runs below are stopped before and after it


@pytest.mark.fault("F3")
def test_stopped_three_times_and_gone_on_with_it_equals_never_stopping(home, finished, tmp_path):
    workdir = tmp_path / "run"
    for stop_after in (3, 7, 12, None):
        train(home, workdir, stop_after=stop_after)
    names = "loss", "grad_norm", "learning_rate", "tokens_hash", "batch_index", "tokens_seen"
    assert metrics(workdir, *names) == metrics(finished, *names)
    tiny.assert_same_bits(final_state(home, workdir), final_state(home, finished))


@pytest.mark.fault("F12")
@pytest.mark.soak  # test_going_on and test_together do it too
def test_another_mesh_goes_on_with_the_same_data_and_nearly_the_same_losses(home, finished, tmp_path):
    workdir = tmp_path / "run"
    train(home, workdir, stop_after=6)
    train(home, workdir, {"mesh.data": 4, "mesh.fsdp": 1, "mesh.tensor": 2, "rules": "zero1"})
    assert metrics(workdir, "tokens_hash") == metrics(finished, "tokens_hash")
    losses, expected = metrics(workdir, "loss"), metrics(finished, "loss")
    np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=1e-4)
    assert losses[6] == expected[6] and losses[7] == pytest.approx(expected[7], rel=1e-5)


def test_unchanged_it_is_complete(home, copy, capsys):
    before = contents(copy)
    assert command(home, copy) == 0
    assert f"this run is complete at step {STEPS}; to continue, raise --config.train_tokens" in capsys.readouterr().out
    assert contents(copy) == before


@pytest.mark.slow
def test_more_tokens_go_on_to_a_sample_and_the_new_horizon_and_each_change_are_told(home, finished, copy, capsys):
    cadence = ["--config.monitor.log_every_steps=2", "--config.eval.every_steps=0", "--config.checkpoint.keep_last=1"]
    cadence += ["--config.sample.num_tokens=40", "--config.sample.prompt=def "]
    assert command(home, copy, f"--config.train_tokens={STEPS + 4} steps", *cadence) == 0
    out = capsys.readouterr().out
    assert f"the learning rate follows the new schedule of {STEPS + 4} steps instead of {STEPS}" in out
    assert f"resuming from step {STEPS}" in out
    found = metrics(copy, "batch_index", "learning_rate")
    assert [step for step in found if step > STEPS] == [STEPS + 1, STEPS + 2, STEPS + 4]
    assert found[STEPS + 4] == (STEPS + 3, pytest.approx(1e-3)) and found[STEPS + 1][1] > 1.1e-3
    rates = metrics(finished, "learning_rate")[STEPS][0], found[STEPS + 1][1]
    jump = f"the learning rate jumps from {rates[0]:.4g} at step {STEPS} to {rates[1]:.4g} at step {STEPS + 1}"
    assert jump in out and f"monitor.log_every_steps: {config(home).monitor.log_every_steps} -> 2" in out
    changed = {change["name"]: change for change in json.loads((copy / "config.json").read_text())["changed"]}
    assert set(changed) >= {"train_tokens", "monitor.log_every_steps", "checkpoint.keep_last"}
    assert changed["train_tokens"]["alters"] and not changed["monitor.log_every_steps"]["alters"]
    assert changed["train_tokens"]["learning_rate"] == pytest.approx(rates)
    text = (copy / "sample.txt").read_text()
    assert text.startswith("def ") and len(text) > 4 and printable(text) in out


@pytest.mark.soak
def test_the_way_without_a_jump_that_is_offered_has_none(home, copy, capsys):
    said, longer = [], f"{STEPS + 4} steps"
    run = open_run(config(home, {"train_tokens": longer}), str(copy), said.append)
    run.writer.close()
    (offer,) = [line for line in said if "instead: press Ctrl-C twice now, and restart with" in line]
    assert command(home, copy, f"--config.train_tokens={longer}", *offer.partition("restart with ")[2].split()) == 0
    assert "jumps" not in capsys.readouterr().out
    rates = metrics(copy, "learning_rate")
    assert [rate for step, (rate,) in rates.items() if step >= STEPS] == pytest.approx([1e-3] * 5)


@pytest.mark.fault("F13")
def test_a_changed_setting_is_refused_with_what_differs(home, copy):
    code, told = refusal(home, copy, "--config.optim.peak_lr=2e-2", "--config.seed=3", "--config.train_tokens=99 steps")
    assert code is Exit.CONFIG_MISMATCH == 11
    assert ": optim.peak_lr: 0.01 -> 0.02; seed: 0 -> 3; use another --workdir" in told
    assert "train_tokens" not in told


@pytest.mark.fault("F13")
def test_a_run_that_was_stopped_before_its_first_checkpoint_is_still_that_run(home, tmp_path):
    run = open_run(config(home), str(tmp_path / "run"), log=lambda text: None)
    run.writer.close()
    assert refusal(home, tmp_path / "run", "--config.seed=3")[0] is Exit.CONFIG_MISMATCH


@pytest.mark.fault("F14")
def test_changed_data_are_refused(home, copy):
    text = (home / "03.txt").read_text()
    try:
        (home / "03.txt").write_text(text.replace("e", "E"))
        code, told = refusal(home, copy, "--config.train_tokens=99 steps")
    finally:
        (home / "03.txt").write_text(text)
    assert code is Exit.DATA_MISMATCH == 12 and "the data have changed since the run started" in told


@pytest.mark.parametrize("item", ["run", "state"])
def test_a_damaged_checkpoint_is_an_error_and_never_a_new_beginning(home, copy, item):
    for file in (copy / "checkpoints" / str(STEPS) / item).rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(Stop) as stop:
        command(home, copy, "--config.train_tokens=99 steps", "--config.checkpoint.on_corrupt=stop")
    assert stop.value.code is Exit.CHECKPOINT_CORRUPT == 19
    assert f"step {STEPS} cannot be read: {item}" in str(stop.value)
    assert "to resume from step 12" in str(stop.value)
    assert len(metrics(copy, "loss")) == STEPS


@pytest.mark.fault("F26")
def test_a_start_on_a_full_disk_is_one_line_and_loses_nothing(home, copy, capsys):
    before, (soft, hard) = contents(copy), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(Stop) as stop, without_compilation_cache():  # whose files would be too large as well
            command(home, copy, f"--config.train_tokens={STEPS + 2} steps")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stop.value.code is Exit.STORAGE and "File too large" in str(stop.value) and "\n" not in str(stop.value)
    assert {path: when for path, when in contents(copy).items() if path in before} == before
    run = open_run(config(home, {"train_tokens": f"{STEPS + 4} steps"}), str(copy), lambda text: None)
    run.writer.close()
    assert run.start_step == STEPS


def test_data_that_cannot_be_reached_or_kept_now_are_not_called_other_data(home, copy):
    with pytest.raises(ValueError, match="the cache .*02.txt/x.* cannot be written: .*; set data.cache_dir"):
        command(home, copy, f"--config.train_tokens={STEPS + 2} steps", f"--config.data.cache_dir={home / '02.txt'}/x")

    def unreachable(cfg, **settings):
        Bucket("http://localhost", None).wait(Transient("503"), 99, "gs://bucket/index.json")

    with pytest.raises(
        Stop, match="gs://bucket/index.json: 99 consecutive attempts.*restart when the storage is reachable$"
    ) as stop:
        open_same_data(DataConfig(), {"data": {}}, print, open_data=unreachable)
    assert stop.value.code == Exit.STORAGE


@pytest.mark.fault("F2")
def test_from_a_damaged_checkpoint_it_falls_back_aloud_and_ends_as_if_it_never_was(home, copy, tmp_path, capsys):
    without = pathlib.Path(shutil.copytree(copy, tmp_path / "without"))
    shutil.rmtree(without / "checkpoints" / str(STEPS))
    for file in (copy / "checkpoints" / str(STEPS) / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-40])
    for workdir in (copy, without):
        command(home, workdir, f"--config.train_tokens={STEPS + 2} steps")
        out = capsys.readouterr().out
        assert (f"resuming from step 12, {STEPS - 12} steps before it" in out) == (workdir == copy)
        assert (f"step {STEPS}, the last complete step" in out) == (workdir == without)
    names = "loss", "tokens_hash"
    assert metrics(copy, *names) == metrics(without, *names)
    tiny.assert_same_bits(final_state(home, copy), final_state(home, without))


def test_the_command_says_what_each_setting_is(capsys):
    assert main.main(["--help", "all"]) == 0
    out = capsys.readouterr().out
    assert "--workdir=FOLDER" in out and "--config.optim.peak_lr=0.0003" in out


# The process.


def process(*arguments, **more):
    """A process of our own with one device, to end before the test does."""
    flags = xla_flags(1)
    return subprocess.Popen(
        [sys.executable, "-m", "jaxscale.main", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=pathlib.Path(main.__file__).parent.parent, env=os.environ | {"XLA_FLAGS": flags}, **more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.fault("F6")
def test_a_process_that_is_told_to_stop_saves_and_leaves_with_code_10(home, tmp_path):
    flags = ["--config.train_tokens=100000 steps", "--config.eval.num_rows=0", "--config.checkpoint.save_every_steps=0"]
    with process(f"--config={home / 'tiny.py'}", f"--workdir={tmp_path / 'run'}", *flags) as running:
        for line in running.stdout:
            if line.startswith("step 3/"):
                running.send_signal(signal.SIGTERM)
                break
        _, told = running.communicate(timeout=60)
    assert running.returncode == Exit.PREEMPTED == 10, told
    step = Checkpoints(tmp_path / "run" / "checkpoints", config(home).checkpoint).latest_step()
    assert f"stopped (preempted, exit 10): SIGTERM: saved step {step}" in told and step >= 3
    assert len(told.splitlines()) == 1 and "Traceback" not in told


@pytest.mark.soak  # test_preflight_command starts a process that ends so, test_exits does without one
def test_a_wrong_setting_is_one_line_and_code_2(home, tmp_path):
    with process(
        f"--config={home / 'tiny.py'}", f"--workdir={tmp_path / 'run'}", "--config.optim.peek_lr=1"
    ) as running:
        _, told = running.communicate(timeout=60)
    assert running.returncode == Exit.BAD_INPUT == 2
    assert told == "error: optim.peek_lr is not a setting of OptimConfig; did you mean 'peak_lr'?\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.fault("F18")
def test_a_start_whose_bucket_is_away_is_one_line_and_the_code_for_storage(home, monkeypatch):
    def away(path):
        raise type("HttpError", (Exception,), {"__module__": "gcsfs.retry"})("Service Unavailable, 503")

    monkeypatch.setattr(type(paths.as_path("gs://bucket/run")), "exists", away)
    with pytest.raises(Stop, match="^gs://bucket/run cannot be reached: .*503; restart") as stop:
        command(home, "gs://bucket/run")
    assert stop.value.code == Exit.STORAGE
