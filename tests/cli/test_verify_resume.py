"""Killing a run twice and starting it again equals never stopping; and the proof sees it where that is not so."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.cli import rehearse, two_runs, verify
from jaxscale.cli.two_runs import TwoRuns
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import nest
from jaxscale.runtime.monitor.machine import HostLoad
from jaxscale.settings.command_line import parse
from jaxscale.settings.config_file import load_config
from jaxscale.settings.unread import as_read
from jaxscale.system.exits import Exit, Stop

STEPS = 12
CONFIG = """
import ml_collections

def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens, c.train_tokens = 32, 8 * 32, 10**6
    c.model = dict(name="gpt2", vocab_size=264, num_layers=2, embed_dim=32, num_heads=2, max_seq_len=32, dropout=0.1)
    c.train = dict(num_microbatches=2)
    c.data = dict(name="files", files={files!r})
    return c
"""


MIXTURE = CONFIG.replace("gpt2", "llama").replace(
    "max_seq_len=32, dropout=0.1",
    "num_kv_heads=2, head_dim=16, mlp_dim=64, experts=dict(number=8, chosen=2, mlp_dim=16, bias=True, bias_rate=0.01)",
)


@pytest.fixture(params=[CONFIG, MIXTURE], ids=["gpt2", "a mixture, whose bias moves"])
def config(request, tmp_path):
    """A tiny GPT-2 with dropout, so that the random key matters, on a text of some epochs; or experts in balance."""
    folder = tmp_path
    words = [f"word {i * i % 97}\n" * (1 + i % 5) for i in range(40)]
    for number in range(8):
        (folder / f"{number}.txt").write_text("".join(words[number::8]))
    file = folder / "tiny.py"
    file.write_text(request.param.replace("{files!r}", repr(str(folder / "*.txt"))))
    return file


@pytest.mark.fault("F3")
@pytest.mark.soak  # test_training_in_a_bucket kills a run once and compares it
def test_a_run_killed_twice_equals_one_left_alone(config, tmp_path):
    command = [sys.executable, "-m", "jaxscale.cli", "verify", "resume", f"--config={config}"]
    done = subprocess.run([*command, f"--workdir={tmp_path / 'w'}"], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": killed ") == 2 and "from step 0: killed after step" in done.stdout
    assert "  train_tokens: 1000000 -> '12 steps'" in done.stdout
    assert done.stdout.splitlines()[-1] == "resume: exact"
    assert not (tmp_path / "w").exists()  # nothing is left behind


def write_run(folder: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """A work folder like that of a finished run, without the run."""
    rng = np.random.default_rng(seed)
    params = {"w": rng.normal(size=(4, 3)).astype("float32"), "b": rng.normal(size=3).astype(jnp.bfloat16)}
    state = {"params": params, "key": np.array([seed, 1], "uint32"), "step": np.array(STEPS, "int32")}
    write_checkpoint(folder, state, {"data": {"batch_index": STEPS, "seed": seed}, "config": {"seed": seed}})
    drawn = lambda: dict(step_seconds=rng.uniform(), loss=rng.uniform())
    lines = [dict(step=n + 1, batch_index=n, tokens_hash=f"{seed}{n}", **drawn()) for n in range(STEPS)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_checkpoint(folder, state, run):
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    checkpoints.save(STEPS, state, run)
    checkpoints.close()


@pytest.fixture
def finished(tmp_path):
    return write_run(tmp_path / "finished")


def change_line(folder, number, **values):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | values)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_the_same_is_exact_whatever_the_clock_said(finished, tmp_path):
    other = write_run(tmp_path / "other")
    change_line(other, 3, step_seconds=99.0, **dict.fromkeys(HostLoad().metrics(), 0.5))
    found = two_runs.compare(finished, other, STEPS)
    assert found.passes and found.lines()[-1] == "resume: exact"


def test_another_run_is_not_exact(finished, tmp_path):
    found = two_runs.compare(finished, write_run(tmp_path / "other", seed=1), STEPS)
    differing = {what for what, _, count in found.rows if count != "0"}
    assert differing == {"state: params", "state: key", "data position", "resolved config", "token ids", "metrics"}
    assert f"resume: NOT exact, {len(found.differences)} differences" in found.lines()


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["params/w", "params/b", "key", "step"])
def test_one_flipped_bit_of_the_state_is_found(finished, tmp_path, name):
    other = write_run(tmp_path / "other")
    checkpoints = two_runs.checkpoints_of(other)
    record = checkpoints.read_record(STEPS)
    state, run = two_runs.read_leaves(checkpoints, STEPS, record["leaves"], list(record["leaves"])), record["run"]
    leaf = state[name].copy()
    state[name] = np.frombuffer(bytes([leaf.tobytes()[0] ^ 1]) + leaf.tobytes()[1:], leaf.dtype).reshape(leaf.shape)
    shutil.rmtree(other / "checkpoints" / str(STEPS))
    write_checkpoint(other, nest(state), run)
    (line,) = two_runs.compare(finished, other, STEPS).differences
    assert line.startswith(f"state: {name.split('/')[0]}: {name}: 1 of ")


def test_a_zero_of_the_other_sign_is_a_difference():
    assert "0 of 1 numbers differ" in two_runs.leaf_difference("w", np.zeros(1), -np.zeros(1))


@pytest.mark.parametrize(("name", "what"), [("tokens_hash", "token ids"), ("loss", "metrics")])
def test_one_changed_step_of_the_metrics_is_found(finished, tmp_path, name, what):
    other = write_run(tmp_path / "other")
    change_line(other, 5, **{name: "another"})
    found = two_runs.compare(finished, other, STEPS)
    assert [line for line in found.differences if line.startswith(f"{what}: step 5: {name} is ")]


def test_what_was_done_before_a_kill_is_compared_too(finished):
    early = two_runs.read_metrics(finished)
    assert two_runs.compare(finished, finished, STEPS, [early]).passes
    changed = {3: early[3] | {"loss": 0.0}}
    (line,) = two_runs.compare(finished, finished, STEPS, [early, changed]).differences
    assert line.startswith("metrics before a kill: step 3: loss is ")


def test_a_missing_step_is_not_exact(finished, tmp_path):
    other = write_run(tmp_path / "other")
    lines = (other / "metrics.jsonl").read_text().splitlines()
    (other / "metrics.jsonl").write_text("\n".join(lines[:-1]))
    assert "token ids: step 12 is missing" in str(two_runs.compare(finished, other, STEPS).differences)


def test_a_run_that_ends_by_itself_says_why(tmp_path):
    code = "import sys; print('first'); print('error: x=3 is wrong'); sys.exit(2)"
    shared = dict(trained=tiny.config(), folder=tmp_path, logs=tmp_path, steps=STEPS, env={}, say=print)
    runs = TwoRuns(command=[sys.executable, "-S", "-c", code], **shared)
    with pytest.raises(Stop, match="^exit 2, .*: error: x=3 is wrong$") as stop:
        runs.run("straight")
    assert stop.value.code == Exit.BAD_INPUT
    quick = dataclasses.replace(runs, command=[sys.executable, "-S", "-c", ""])
    with pytest.raises(Stop, match="expected to be killed, but: exit 0"):
        quick.run("straight", kill_at="step:7")


GIVEN = {  # what training takes
    "evaluators": "evals.words.kind=text evals.words.files=README.md",
    "exports": "export.every_steps=100 checkpoint.save_every_steps=50 export.dtype=float32",
    "samples": "sample.prompt=x sample.every_steps=7 sample.num_tokens=9",
    "validation": "eval.every_steps=50 checkpoint.keep_best=2",
    "data elsewhere": "data.name=files data.files=/elsewhere/*.txt data.val_fraction=0.1",
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("given", GIVEN)
def test_the_runs_of_a_proof_take_each_config_that_training_takes(tmp_path, given):
    flags = [f"--config.{one}" for one in GIVEN[given].split()]
    words = ["--config=configs/quickstart.py", f"--workdir={tmp_path / 'w'}", *flags]
    _, wanted = verify.prepared(parse(words, verify.VerifyFlags), copies=1)
    wanted = verify.resume_settings(wanted, STEPS, 1)
    rehearsed = rehearse.plan_rehearsal(parse(words, rehearse.RehearseFlags)).trained
    for cfg in (wanted, rehearsed):
        shared = dict(folder=tmp_path, logs=tmp_path, steps=STEPS, env={}, say=print)
        TwoRuns(trained=cfg, command=["true"], **shared).start("straight").wait()
        found = load_config(str(tmp_path / "config.py"))
        assert as_read(found) == as_read(cfg) and found.train_tokens == cfg.train_tokens
    assert rehearsed.evals == load_config("configs/quickstart.py", parse(flags, verify.VerifyFlags).overrides).evals


def test_a_folder_that_holds_something_is_refused(finished):
    with pytest.raises(ValueError, match="is not empty"):
        verify.new_folder(str(finished))


@pytest.mark.parametrize("given", [False, True])
def test_ctrl_c_removes_a_temporary_folder_and_no_other(tmp_path, monkeypatch, given):
    def interrupt(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", interrupt)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    workdir = str(tmp_path / "given") if given else None
    with pytest.raises(KeyboardInterrupt):
        verify.verify_resume(tiny.config(), STEPS, 1, workdir, say=lambda text: None)
    assert [path.name for path in tmp_path.iterdir()] == (["given"] if given else [])
