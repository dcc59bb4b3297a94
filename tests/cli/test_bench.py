"""What bench prints and refuses. Nothing here asserts a speed: clocks of a shared machine prove nothing."""

import contextlib
import dataclasses
import io
import json
import math
import shlex
import sys

import pytest

from jaxscale.cli import bench, bench_against
from jaxscale.core.models.lora_mup_config import MupConfig
from jaxscale.settings.command_line import parse
from jaxscale.settings.config_file import load_config
from jaxscale.system import process
from jaxscale.tools.qualify import step

pytestmark = pytest.mark.slow

TINY = [
    "--spec=T",
    "--config.seq_len=16",
    "--config.batch_tokens=8 rows",
    "--config.model.vocab_size=32",
    "--config.model.num_layers=1",
    "--config.model.embed_dim=16",
    "--config.model.num_heads=2",
    "--config.model.num_kv_heads=2",
    "--config.model.head_dim=8",
    "--config.model.mlp_dim=16",
    "--config.model.attention=xla",
]
BESIDE = [  # which takes time beside the steps that are timed
    "--config.evals.words.kind=text",
    "--config.evals.words.files=README.md",
    "--config.export.every_steps=100",
    "--config.checkpoint.save_every_steps=50",
]
OTHER = {"sys": "other", "tok_s": 50.0, "loss0": 3.47, "lossN": 3.46}


def command_that_prints(folder, text, name="other.py"):
    """A command line for a script that prints the text."""
    (folder / name).write_text(f"import os\nprint({text!r})\n")
    return shlex.join([sys.executable, str(folder / name)])


@pytest.fixture(scope="module")
def step_record():
    """The JSON of a tiny step, measured once for this file."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert bench.main(["step", "--json", "--steps=2", "--warmup=0", *TINY]) == 0
    return json.loads(printed.getvalue())


def test_a_step_says_what_ran_and_how_fast(step_record):
    assert step_record["tok_s"] > 0 and step_record["gflops"] > 0 and step_record["rss_mb"] > 0
    assert step_record["product_gflops"] > step_record["gflops"]  # of a step so small that it mostly waits
    assert (step_record["spec"], step_record["dtype"], step_record["rows"]) == ("T", "float32", 8)
    assert step_record["attention"] == "xla" and step_record["num_microbatches"] == 1
    assert step_record["versions"]["jax"] and step_record["date"]
    assert step_record["params"] == 2 * 32 * 16 + 4 * 16 * 16 + 3 * 16 * 16 + 3 * 16


def test_the_step_compiles_once_on_eight_devices(step_record):
    assert step_record["devices"] == "8 x cpu"
    assert step_record["compiled_times"] == 1


def test_losses_on_random_tokens_start_near_the_log_of_the_vocabulary(step_record):
    log_vocab = step_record["log_vocab"]
    assert step.loss_problem(*(step_record[name] for name in step.LOSSES)) is None
    assert "first loss is 9" in step.loss_problem(9.0, 3.4, log_vocab)
    assert "last loss is nan" in step.loss_problem(3.4, float("nan"), log_vocab)


@pytest.mark.parametrize(("config", "seen"), [("mixtral_8x7b", 11.196), ("olmoe_1b_7b", 11.237)])
def test_a_wide_models_loss_on_random_tokens_begins_higher_and_may_fall(config, seen):
    """Seen: where their steps began on one H200 (jax 0.11.2, 2026-11-26), with the usual initial weights."""
    model = load_config(f"configs/{config}.py", {}).model
    log_vocab, variance = math.log(model.vocab_size), step.logit_variance(model)
    assert log_vocab + variance / 2 == pytest.approx(seen, abs=0.02)
    assert step.loss_problem(seen, log_vocab, log_vocab, variance) is None
    assert "last loss" in step.loss_problem(seen, seen + 0.6, log_vocab, variance)
    wide = dataclasses.replace(model, mup=MupConfig(base_dim=model.embed_dim // 8))
    assert step.logit_variance(wide) == pytest.approx(variance / 64)


def test_a_step_is_told_to_people_in_words(step_record):
    text = "\n".join(step.step_lines(step_record))
    assert "compiled once" in text and "tokens/s" in text and "sane" in text


@pytest.mark.soak
def test_the_loop_saves_inside_its_segment_and_is_compared_with_the_bare_step(capsys):
    assert bench.main(["loop", "--steps=4", *TINY, *BESIDE]) == 0
    text = capsys.readouterr().out
    assert "a checkpoint every 4 steps: 1)" in text
    assert "95% of the bare step" in text and "for data" in text


def test_commands_run_in_turn_and_the_ratio_is_printed(step_record, tmp_path):
    ours = shlex.split(command_that_prints(tmp_path, json.dumps(step_record | {"tok_s": 100.0}), "ours.py"))
    theirs = command_that_prints(tmp_path, "hello\n" + json.dumps(OTHER) + "\nbye")
    said = []
    compared = bench_against.compare(ours, [theirs, theirs], rounds=2, say=said.append)
    assert [("ours.py" in line, "other.py" in line) for line in said] == [
        (False, False),
        (False, True),
        (False, True),
    ] * 2
    assert [found["ratio"] for found in bench_against.ratios(compared)] == [2.0, 2.0]
    text = "\n".join(bench_against.compare_lines(compared))
    assert "jaxscale / [1]: 2.000" in text and "at least as fast" in text and theirs in text
    assert "WARNING" not in text


def test_other_work_is_warned_of(step_record, tmp_path):
    ours = shlex.split(command_that_prints(tmp_path, json.dumps(step_record), "ours.py"))
    theirs = command_that_prints(tmp_path, json.dumps(OTHER | {"params": 1, "lossN": float("nan")}))
    compared = bench_against.compare(ours, [theirs], rounds=1, say=lambda text: None)
    text = "\n".join(bench_against.compare_lines(compared))
    assert "so the models differ" in text and "last loss is nan" in text


def test_the_other_command_gets_the_environment_of_the_shell(monkeypatch):
    for name in ("GLIBC_TUNABLES", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    before = bench_against.shell_environment()
    process.keep_compiled_programs()
    monkeypatch.setenv("GLIBC_TUNABLES", process.HUGE_PAGES)
    assert bench_against.shell_environment() == before
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert bench_against.shell_environment()["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=1"


def test_assignments_stand_in_front_of_a_command(tmp_path):
    (tmp_path / "env.py").write_text("import os\nprint('{\"tok_s\": ' + os.environ['RATE'] + '}')\n")
    words = bench_against.split_command(f"RATE=7 {shlex.join([sys.executable, str(tmp_path / 'env.py')])}")
    assert bench_against.run_one(words, {}, "env") == {"tok_s": 7}
    assert bench_against.take_assignments(["python", "a=b"]) == ({}, ["python", "a=b"])


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            "import sys; print('deep trouble', file=sys.stderr); sys.exit(3)",
            "command other ended with exit code 3: deep trouble",
        ),
        ("print('fast!')", 'the command must print a JSON line with a positive "tok_s": other'),
        ('print(\'{"tok_s": "many"}\')', 'the command must print a JSON line with a positive "tok_s": other'),
    ],
)
def test_a_command_that_fails_is_one_clear_line(script, told):
    with pytest.raises(ValueError) as caught:
        bench_against.run_one([sys.executable, "-c", script], {}, "other")
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["speed"],
            "bench has no verb 'speed'; verbs: step, loop, data, collectives",
        ),
        (["step", "--spec=U"], "--spec=U is unknown; pass S, T or M, or --config=FILE"),
        (["step", "--spec=S", "--config=a.py"], "pass only one"),
        (["step", "--steps=0"], "--steps=0 must be a whole number, 1 or more"),
        (["step", "--dtype=float8"], "model.compute_dtype"),
        (["loop", "--against=true"], "--against applies only to"),
        (["step", "--against"], "--against needs a value"),
        (["survive", "--steps=2"], "has moved; run `python -m benchmarks.survive` in a checkout of jaxscale"),
        (["step", "--against=A=1"], "has no command"),
        (["step", "--against=python 'a"], "is not valid shell syntax"),
        (["--agianst=x"], "--agianst=x is not a flag of this command"),
    ],
)
def test_bad_input_is_one_clear_line(argv, told):
    with pytest.raises(ValueError) as caught:
        bench.main(argv)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_program_is_named():
    with pytest.raises(ValueError, match="cannot run no-such-program-here"):
        bench_against.run_one(["no-such-program-here", "-x"], {}, "it")


def test_flags_of_bench_are_told_from_the_rest():
    argv = ["--against=a b;; c", "--json", "--steps=3", "--against", "d"]
    assert bench.jaxscale_step_command(argv)[-2:] == ["--json", "--steps=3"]  # our side is asked for JSON once
    assert parse(argv, bench.BenchFlags).flags.against == ("a b;; c", "d")
