"""launch/speedrun.sh: five stages and a card, each with a mark, sized by one dial."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from scripts import LAUNCH, ROOT, printed, shell
from xla_flags import xla_flags

from jaxscale.settings import config_file

STAGES = ["data", "tokenizer", "base", "chat", "evaluate", "card"]


def stages_of(text):
    """{stage: its commands as words}."""
    found = {}
    for line in text.splitlines():
        if line.startswith("# "):
            found[line[2:]] = []
        else:
            found[list(found)[-1]].append(shlex.split(line))
    return found


def test_a_dry_run_shows_every_stage_and_touches_nothing(tmp_path):
    folder = tmp_path / "run"
    found = stages_of(printed("speedrun.sh", "--depth=3", f"--folder={folder}", "--dry-run", "--", "--config.seed=1"))
    assert list(found) == STAGES and not folder.exists()
    (base,), (chat,) = found["base"], found["chat"]
    assert base[:4] == ["python3", "-m", "jaxscale.cli", "train"] and base[-1] == "--config.seed=1"
    assert f"--config={ROOT}/configs/auto.py:depth=3" in base and "--config.model.vocab_size=3072" in base
    assert f"--config={ROOT}/configs/finetune.py:full,{folder}/base" in chat and "--config.seed=1" not in chat
    assert [command[3] for command in found["evaluate"]] == ["evaluate"] * 2
    assert f"--choice=questions={folder}/data/questions.jsonl" in found["evaluate"][0]


def test_its_help_tells_the_size_of_the_model_that_it_makes():
    (base,) = stages_of(printed("speedrun.sh", "--depth=4", "--folder=run", "--dry-run"))["base"]
    (file,) = (word.removeprefix("--config=") for word in base if word.startswith("--config="))
    (size,) = (word.removeprefix("--config.model.") for word in base if word.startswith("--config.model.vocab_size"))
    cfg = config_file.load_config(file, {f"model.{size.partition('=')[0]}": size.partition("=")[2]})
    (told,) = re.findall(r"--depth=4 +(\S+) parameters", printed("speedrun.sh", "--help"))
    assert float(told) == pytest.approx(cfg.model.num_params, rel=0.02)


def test_own_data_stand_in_the_place_of_the_librarys():
    own = ("--text=a b/*.jsonl", "--chat=c.jsonl", "--held=h.txt", "--price=2", "--dry-run")
    found = stages_of(printed("speedrun.sh", *own))
    assert found["data"] == [] and "--input=a b/*.jsonl" in found["tokenizer"][0]
    assert "--config.data.files=c.jsonl" in found["chat"][0] and "--text=held=h.txt" in found["evaluate"][0]
    assert not [word for word in found["evaluate"][0] if word.startswith("--choice")]
    assert all("--price=2" in command for command in found["card"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--depth=0"], "--depth=0 must be a positive integer"),
        (["--text=a"], "own data needs --text, --chat and --held"),
        (["--text=a", "--chat=b", "--held=c", "--most_bytes=5"], "applies only to the standard library"),
        (["--only=sleep"], "the stages are data tokenizer base chat evaluate card"),
        (["--config=x"], "put training flags after --"),
        (["--folder=gs://bucket/x"], "must be a local folder"),
    ],
)
def test_what_a_person_got_wrong_is_one_line(arguments, told):
    done = shell("speedrun.sh", *arguments)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and told in line


def recorder(folder, fails=""):
    """A python that writes down its verb, and fails at one."""
    script = folder / "python"
    script.write_text(f'#!/bin/bash\necho "$3" >>{folder}/called\n[[ "$3" != "{fails}" ]] || exit 10\n')
    script.chmod(0o755)
    return script


def test_it_goes_on_behind_the_last_stage_that_is_done(tmp_path):
    folder, called = tmp_path / "run", tmp_path / "called"
    (folder).mkdir()
    (folder / "card.md").write_text("the card\n")
    options = ("--depth=1", f"--folder={folder}")
    env = {"JAXSCALE_PYTHON": str(recorder(tmp_path, fails="evaluate"))}
    assert shell("speedrun.sh", *options, env=env).returncode == 10
    assert called.read_text().split() == ["--output=" + f"{folder}/data", "prepare", "train", "train", "evaluate"]
    assert sorted(path.name for path in (folder / "stages").iterdir()) == ["base", "chat", "data", "tokenizer"]
    called.unlink()
    env = {"JAXSCALE_PYTHON": str(recorder(tmp_path))}
    done = shell("speedrun.sh", *options, env=env)
    assert done.returncode == 0 and "== base: already done" in done.stdout and done.stdout.endswith("the card\n")
    assert called.read_text().split() == ["evaluate", "evaluate", "report", "report"]
    other = shell("speedrun.sh", "--depth=2", f"--folder={folder}", env=env)
    assert other.returncode == 2 and "was started with other options" in other.stderr


@pytest.mark.soak
def test_a_small_one_is_killed_goes_on_and_writes_its_card(tmp_path):
    """Everything for real, on the standard library: killed in pretraining once a checkpoint is there."""
    pytest.importorskip("rustbpe")
    folder = tmp_path / "run"
    small = ["--config.seq_len=128", "--config.batch_tokens=2048", "--config.train_tokens=60 steps"]
    small += ["--config.checkpoint.save_every_steps=10", "--config.eval.num_rows=16"]
    command = ["bash", LAUNCH / "speedrun.sh", "--depth=1", "--most_bytes=1000000", f"--folder={folder}", "--", *small]
    env = os.environ | {"JAXSCALE_PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(1)}
    env["PYTHONPATH"] = str(ROOT)
    with open(tmp_path / "first.log", "w") as log:
        first = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        for _ in range(2400):
            if first.poll() is not None or list((folder / "base" / "checkpoints").glob("[1-9]0/commit_success.txt")):
                break
            time.sleep(0.1)
        os.killpg(first.pid, signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL, (tmp_path / "first.log").read_text()
    assert {path.name for path in (folder / "stages").iterdir()} == {"data", "tokenizer"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "== tokenizer: already done" in done.stdout and "resuming from step" in done.stdout
    assert {path.name for path in (folder / "stages").iterdir()} == set(STAGES)
    card = (folder / "card.md").read_text()
    assert "| held: bits per byte" in card and "| questions: accuracy" in card and "completed all steps" in card
    assert "<html" in (folder / "report.html").read_text()
    told = [json.loads(line) for line in (folder / "chat" / "evals.jsonl").read_text().splitlines()]
    assert 0 <= told[-1]["evals/questions/acc"] <= 1 and told[-1]["evals/held/bits_per_byte"] > 0
