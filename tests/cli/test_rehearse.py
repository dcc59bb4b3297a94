"""A rehearsal says GO for a run that works, else NO-GO with the reason, and clears away after itself."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import tiny
from xla_flags import xla_flags

from jaxscale import units
from jaxscale.cli import rehearse, two_runs
from jaxscale.cli.rehearse import NO, NOTE, OK, Rehearsal, RehearsalReport
from jaxscale.cli.two_runs import comparable
from jaxscale.runtime.checkpoint import write
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.write import MARGIN
from jaxscale.runtime.run.options import RunOptions
from jaxscale.settings.command_line import flags_of, parse
from jaxscale.system.exits import BadInput, Exit, Stop

ROOT = pathlib.Path(rehearse.__file__).parent.parent.parent
VALUES = tiny.VALUES | dict(
    train_tokens="40 steps",
    model=tiny.LLAMA | dict(vocab_size=272, num_layers=1),
    eval=dict(num_rows=8, every_steps=4),
)


@pytest.fixture
def config(tmp_path):
    """A config file on a small corpus."""
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for number in range(20):
        (tmp_path / "data" / f"{number}.txt").write_text(" ".join(map(str, rng.integers(0, 99, 60))))
    file = tmp_path / "tiny.py"
    values = VALUES | dict(data=dict(files=str(tmp_path / "data" / "*.txt")))
    file.write_text(f"def get_config():\n    return {values!r}\n")
    return file


@pytest.mark.soak
def test_a_run_that_works_goes_and_nothing_is_left(config, tmp_path):
    workdir = tmp_path / "runs" / "one"
    code = f"""
import sys
from jaxscale.cli import rehearse
from jax._src import xla_bridge
compare = rehearse.compare_runs
def compare_runs(*arguments):
    print("devices were asked for:", xla_bridge.backends_are_initialized())
    compare(*arguments)
rehearse.compare_runs = compare_runs
sys.exit(rehearse.main(["--config={config}", "--workdir={workdir}"]))
"""
    flags = xla_flags(2)
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == Exit.DONE, done.stdout + done.stderr
    *lines, verdict = done.stdout.splitlines()
    assert verdict == "GO" and "devices were asked for: False" in lines
    table = lines[lines.index("") + 1 :]
    marks = {line.split("  ")[0]: line for line in table if line}
    assert {"storage", "start", "train", "evaluate", "save", "space", "kill", "resume", "compare"} <= set(marks)
    assert "killed by SIGKILL after step 7, newest checkpoint 3" in marks["kill"]  # 6 was being written
    assert "bitwise identical at step 8" in marks["compare"]
    assert "40 steps" in marks["the run"]  # the horizon is the real run's
    assert not (tmp_path / "runs").exists()


def made(tmp_path, code="", **changes):
    """A rehearsal whose training is a few lines of Python with the work folder in `workdir`."""
    prelude = """
import json, os, pathlib, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
workdir = pathlib.Path(flags["workdir"])
"""
    cfg = tiny.config({"checkpoint.keep_last": 3, "checkpoint.save_every_steps": 100})
    one = Rehearsal(
        cfg=cfg,
        trained=comparable(cfg, keep_last=1),
        command=[sys.executable, "-S", "-c", prelude + code],
        workdir=str(tmp_path / "run"),
        folder=tmp_path / "run" / "rehearsal",
        logs=tmp_path / "run" / "rehearsal",
        steps=8,
        env=os.environ,
        say=lambda line: None,
    )
    return dataclasses.replace(one, **changes)


@pytest.fixture
def report():
    told = []
    return RehearsalReport(told.append)


def failing_row(report, phase, *arguments):
    """What the phase says when it fails."""
    with pytest.raises(Stop) as stop:
        phase(*arguments)
    return report.phase, str(stop.value)


def test_a_training_that_is_refused_is_no_go_with_its_own_line(tmp_path, report):
    one = made(tmp_path, "print('error: model.vocab_size=7 is wrong'); sys.exit(2)")
    what, seen = failing_row(report, rehearse.run_straight, one, report)
    assert what == "train" and seen.endswith("error: model.vocab_size=7 is wrong") and "exit 2" in seen


def test_a_horizon_that_is_shorter_than_the_rehearsal_is_no_go(tmp_path, report):
    what, seen = failing_row(report, rehearse.run_straight, made(tmp_path), report)
    assert what == "train" and "the run ended at step 0" in seen and "train_tokens=20 steps is less than" in seen


def test_a_run_that_does_not_go_on_from_its_checkpoint_is_no_go(tmp_path, report):
    save = "os.makedirs(workdir / 'checkpoints' / '3' / 'state', exist_ok=True); print('step 1/40  loss 1', flush=True)"
    crash = "; os.environ.get('JAXSCALE_CRASH_AT') == 'step:7' and os.kill(os.getpid(), 9)"
    what, seen = failing_row(report, rehearse.run_killed, made(tmp_path, save + crash), report)
    assert what == "resume" and "did not resume from step 3" in seen
    assert report.rows[0][:2] == ("kill", OK) and "killed by SIGKILL after step 7" in report.rows[0][3]


def test_a_kill_before_any_checkpoint_was_committed_is_no_go(tmp_path, report):
    what, seen = failing_row(report, rehearse.run_killed, made(tmp_path, "os.kill(os.getpid(), 9)"), report)
    assert what == "kill" and "no checkpoint to resume from" in seen


def test_a_run_that_is_not_killed_is_no_go(tmp_path, report):
    what, seen = failing_row(report, rehearse.run_killed, made(tmp_path, "print('done: 8 steps')"), report)
    assert what == "kill" and "but: exit 0, done: done: 8 steps" in seen


def write_run(folder, changed=()):
    """A finished run of 8 steps; some leaves with one other bit."""
    rng = np.random.default_rng(0)
    state = {"params": {"w": rng.normal(size=(4, 3)).astype("float32"), "b": np.ones(3, "float32")}}
    for name in changed:
        state["params"][name].view("uint32")[..., 0] ^= 1
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    checkpoints.save(8, state, {"data": {"batch_index": 8}, "config": {"seed": 0}})
    checkpoints.close()
    lines = [
        dict(step=n + 1, batch_index=n, tokens_hash=f"{n}", loss=1.0, step_seconds=rng.uniform()) for n in range(8)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_one_other_bit_of_the_state_is_no_go(tmp_path, report):
    one = made(tmp_path)
    write_run(one.folder / "straight")
    write_run(one.folder / "killed", changed=["w"])
    what, seen = failing_row(report, rehearse.compare_runs, one, report, {})
    assert what == "compare" and "params/w: 4 of 12 numbers differ" in seen


def test_a_state_is_compared_in_parts_that_fit(tmp_path, monkeypatch):
    for name in ("one", "other"):
        write_run(tmp_path / name)
    monkeypatch.setattr(two_runs, "READ_BYTES", 1)
    assert list(two_runs.batches(["a", "b", "c"], dict(a=1, b=9, c=1))) == [["a"], ["b"], ["c"]]
    assert two_runs.compare(tmp_path / "one", tmp_path / "other", 8).passes


def test_too_little_room_for_what_is_kept_is_no_go(tmp_path, report, monkeypatch):
    one = made(tmp_path)
    write_run(one.folder / "straight")
    size = 15 * 4
    for free in (4 * size * MARGIN, 4 * size, None):  # keep_last=3 and 2, and the rehearsal's own is there
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: types.SimpleNamespace(free=free))
        rehearse.check_space(one, report, free and int(free))
    assert [mark for _, mark, _, _ in report.rows] == [OK, NO, NOTE]  # None: a bucket
    assert f"4 checkpoints of {units.size(size)} need {units.size(4 * size * MARGIN)}" in report.rows[1][3]
    shutil.copytree(one.folder / "straight" / "checkpoints", tmp_path / "run" / "checkpoints")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=3 * size * MARGIN))
    rehearse.check_space(one, report, 3 * size)  # one of those that will be kept is there already
    assert report.rows[-1][1] == OK
    assert "has 198 B free" in write.check_before_run(tmp_path / "run" / "checkpoints", size, 3, [1])  # training's


def test_a_storage_that_cannot_be_written_is_no_go(tmp_path, report):
    (tmp_path / "run").write_text("a file")
    what, seen = failing_row(report, rehearse.try_storage, made(tmp_path), report)
    assert what == "storage" and str(tmp_path) in seen


def test_after_no_go_both_runs_stay_and_are_not_written_over(config, tmp_path, capsys):
    one = made(tmp_path, "(workdir / 'checkpoints').mkdir(parents=True); sys.exit(2)")
    assert rehearse.carry_out(one) == Exit.NO_GO
    told = capsys.readouterr().out
    assert "NO-GO; both runs are kept in" in told and (tmp_path / "run" / "rehearsal" / "straight").is_dir()
    with pytest.raises(ValueError, match="contains an earlier rehearsal that ended with NO-GO"):
        rehearse.main([f"--config={config}", f"--workdir={tmp_path / 'run'}"])


@pytest.mark.parametrize("there", [False, True])
def test_what_was_made_is_taken_away_and_nothing_else(tmp_path, there):
    one = made(tmp_path / "a" / "b")
    if there:
        (tmp_path / "a" / "b" / "run").mkdir(parents=True)
        (tmp_path / "a" / "b" / "run" / "config.json").write_text("{}")
    missing = rehearse.missing_folders(one.workdir)
    (one.folder / "straight").mkdir(parents=True)
    rehearse.clean_up(one, missing)
    assert [path.name for path in tmp_path.rglob("*")] == (["a", "b", "run", "config.json"] if there else [])


@pytest.mark.parametrize(
    ("overrides", "options", "told"),
    [
        ({}, {"steps": "7"}, "--steps=7 must be a whole number, 8 or more"),
        ({"init.from_path": "runs/a", "init.what": "run"}, {}, "rehearse with --config.init.what=state, which starts"),
        ({"limit.dollars": "3"}, {"budget_dollars": "3"}, "--budget_dollars=3 and --config.limit.dollars set the same"),
        ({"model.vocab_sise": "3"}, {}, "did you mean 'vocab_size'?"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(config, tmp_path, overrides, options, told):
    flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    flags += [f"--{name}={value}" for name, value in options.items()]
    with pytest.raises(ValueError) as error:
        rehearse.main([f"--config={config}", f"--workdir={tmp_path / 'w'}", *flags])
    assert told in str(error.value) and isinstance(error.value, BadInput)


def test_the_training_gets_all_that_it_was_given(config, tmp_path):
    options = {"workdir": str(tmp_path / "w"), "skip-data": "1:3", "coordinator": "h:1", "num_processes": "2"}
    options |= {"init_from": "runs/a", "allow_change": "optim.peak_lr", "run_dir_mode": "0750"}
    flags = [f"--config={config}", "--config.seed=7", "--config.checkpoint.keep_last=9", "--process_id=1"]
    flags += [f"--{name}={value}" for name, value in options.items()]
    one = rehearse.plan_rehearsal(parse(flags, rehearse.RehearseFlags))
    assert not one.is_first and one.name == "-1" and one.cfg.checkpoint.keep_last == 9
    told = {"--process_id=1", "--allow_change=optim.peak_lr", "--run_dir_mode=0750", "--stop_after=8"}
    assert told <= set(one.command) and one.trained.seed == 7 and one.trained.checkpoint.keep_last == 1
    assert one.trained.data.skip_batches == ((1, 3),) and one.trained.init.from_path == "runs/a"
    assert one.trained.checkpoint.wait_seconds == 3600  # however long a save takes, the next one waits


def test_every_flag_of_training_is_taken_or_left_out_on_purpose():
    ours = {"stop_after", "replay"}  # the rehearsal's own, and what begins with decisions of another run
    assert set(flags_of(RunOptions)) - ours - {"steal_lock"} <= set(rehearse.FORWARDED_FLAGS)
