"""Trials as real processes, and the command line."""

import dataclasses
import json
import os
import pathlib
import shlex

import pytest
from made_results import BASE

from jaxscale.cli.lab import main
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.tools.lab import precision, running
from jaxscale.tools.lab.trial import Base, folder_of, outcome_of, read_result

SMALL = ["--config=configs/lab.py", "--config.train_tokens=20 steps", "--config.eval.num_rows=8"]


def test_a_dry_run_prints_a_command_for_each_run_that_is_not_done(tmp_path, capsys):
    words = ["vary", *SMALL, "--vary=optim.peak_lr=1e-3,2e-3", "--seeds=2", f"--workdir={tmp_path}", "--dry_run"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(set(lines)) == 4 and all(
        line.startswith("python -m jaxscale.main --config=configs/lab.py ") for line in lines
    )
    folder = tmp_path / "runs" / lines[0].rpartition("/")[2].strip("'")
    folder.mkdir(parents=True)
    left = lambda: main(words) == 0 and len(capsys.readouterr().out.splitlines())
    (folder / "config.json").write_text(json.dumps({"budget": {"total_steps": 20}}))
    events = [{"event": "started", "step": 0}, {"event": "saved", "step": 12}, {"event": "stopped", "code": 0}]
    write = lambda: (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    write()
    assert left() == 4, "left before its last step"
    events[1]["step"] = 20
    write()
    assert left() == 3
    events[1:] = [{"event": "stopped", "code": 17}]
    write()
    assert left() == 3, "it diverged, which is a result"


def test_an_experiment_on_a_large_config_may_be_made_on_a_small_one(tmp_path, capsys):
    words = ["vary", "--config=configs/1b.py", "--small", "--config.train_tokens=100_000", f"--workdir={tmp_path}"]
    assert main([*words, "--vary=optim.b2=0.9,0.95", "--seeds=1", "--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith("python ") for line in lines)
    for setting in ("model.embed_dim=128", "train_tokens=100_000", "optim.warmup_tokens=9.53%"):  # 1,000 steps
        assert f"--config.{setting} " in lines[0], lines[0]
    told = ["model.embed_dim=256", "model.num_layers=4", "seq_len=128", "optim.min_lr=1e-5"]
    words = ["vary", "--config=configs/1b.py", "--small", *(f"--config.{one}" for one in told), f"--workdir={tmp_path}"]
    assert main([*words, "--vary=optim.b2=0.9", "--seeds=1", "--dry_run"]) == 0
    line = capsys.readouterr().out
    settings = dict(word.removeprefix("--config.").split("=", 1) for word in shlex.split(line) if "--config." in word)
    small, own = (Base.load("configs/1b.py", each).cfg for each in (settings, {}))
    assert all(f"--config.{one} " in line for one in told) and line.count("embed_dim=") == 1, line
    assert small.optim.peak_lr == pytest.approx(own.optim.peak_lr * own.model.embed_dim / 256)
    ratio = own.train_tokens / own.model.num_params
    assert small.train_tokens / small.model.num_params == pytest.approx(ratio, rel=1e-3)


def test_every_form_of_precision_can_be_named(tmp_path, capsys):
    names = ",".join(precision.FORMS)
    assert main(["precision", *SMALL, f"--names={names}", "--seeds=1", f"--workdir={tmp_path}", "--dry_run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(precision.FORMS)


def test_an_accelerator_takes_one_run_at_a_time():
    assert running.default_jobs("tpu") == running.default_jobs("cuda,cpu") == 1
    assert running.default_jobs("cpu") == len(os.sched_getaffinity(0))


def test_a_trial_is_known_by_all_its_settings_and_by_nothing_else():
    one, same = (BASE.with_settings({"optim.peak_lr": rate}, 1) for rate in (2e-3, "0.002"))
    assert one.name == same.name and one.cfg.seed == BASE.cfg.seed + 1
    others = [BASE.with_settings({"optim.peak_lr": 2e-3}, 2), BASE.with_settings({"optim.peak_lr": 2e-3}, 1, kill_at=5)]
    assert len({one.name, *(other.name for other in others)}) == 3


@pytest.mark.parametrize(
    "words, told",
    [
        (["vary"], "lab vary needs --vary=NAME=VALUE,VALUE"),
        (["vary", "--vary=optim.peak_lr"], "must be NAME=VALUE,VALUE"),
        (["rate", "--vary=optim.b1=0.9"], "remove it from lab rate"),
        (["rate", "--rates=0"], "must be positive numbers"),
        (["rate", "--rates=1e-3,nan"], "must be positive numbers"),
        (["width", "--sizes=inf"], "must be positive numbers"),
        (["vary", "--vary=optim.peak_lr=1e-3,0.001"], "optim.peak_lr=1e-3 and optim.peak_lr=0.001 give the same"),
        (["vary", "--vary=seed=0,1"], "set the number of seeds with --seeds=N"),
        (["rate", "--config.eval.num_rows=0"], "eval.num_rows=0, but the lab compares held-out losses"),
        (["precision", "--names=bfloat17"], "float16 dynamic scale, float16 no scale, int8 products"),
        (["optimizers", "--names=adam"], "is not an optimizer; use adamw"),
        (["rate", "--target=10"], "--target applies only to jaxscale lab ladder; remove it from lab rate"),
        (["ladder", "--target=1"], "must be one number above 1"),
        (
            ["ladder", "--config.train_tokens=20 steps"],
            "train_tokens='20 steps' must be an integer in this experiment",
        ),
        (["shape", "--config=configs/gpt2_124m.py"], "does not support 'gpt2'; use a dense Llama"),
        (["resume", "--seeds=2"], "remove --seeds"),
        (["vary", "--vary=optim.peak_lrr=1"], "peak_lrr"),
        (["rates"], "jaxscale lab has no verb 'rates'"),
    ],
)
def test_a_wrong_command_line_is_told_before_anything_runs(words, told, tmp_path):
    with pytest.raises(BadInput, match=told):
        main([*words, f"--workdir={tmp_path}"])
    assert not list(tmp_path.iterdir())


def test_a_trial_is_stopped_when_it_can_no_longer_be_watched(tmp_path):
    trial = dataclasses.replace(BASE.with_settings({"optim.peak_lr": "1e-3"}), kill_at=1)
    folder = folder_of(trial, tmp_path)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / running.KILLED).symlink_to(tmp_path / "nowhere" / "file")  # so that it cannot be written
    with pytest.raises(FileNotFoundError):
        running.run_all([trial], tmp_path, jobs=1, say=print)
    commands = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if str(folder).encode() in command]
    assert outcome_of(folder) is None  # it was stopped, and did not train to its end


@pytest.mark.soak
def test_runs_that_end_diverge_fail_and_are_killed(tmp_path, capsys):
    words = ["vary", *SMALL, "--vary=optim.peak_lr=2e-3,1e4", "--seeds=1", f"--workdir={tmp_path}"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert "optim.peak_lr=2e-3 has the lowest loss" in first and "Runs diverged at optim.peak_lr=1e4" in first
    assert (tmp_path / "vary.html").exists()
    assert main(words) == 0 and "2 of 2 runs are already done" in capsys.readouterr().out
    assert main(["resume", *SMALL, f"--workdir={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("are bit-identical") == 2

    broken = BASE.with_settings({"data.name": "files"}, also={"data.files": str(tmp_path / "none*.txt")})
    with pytest.raises(Stop, match="none") as stopped:
        running.run_all([broken], tmp_path, jobs=1, say=print)
    assert stopped.value.code == Exit.BAD_INPUT and outcome_of(folder_of(broken, tmp_path)) is None
    with pytest.raises(BadInput, match="is not finished"):
        read_result(broken, tmp_path)
