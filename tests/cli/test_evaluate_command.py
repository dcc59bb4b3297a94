"""jaxscale evaluate: what a person types, sees, finds in the work folder, and is told."""

import functools
import json

import made_model
import numpy as np
import pytest
import verbs

import jaxscale
from jaxscale.cli import evaluate
from jaxscale.runtime.monitor.history import read_history
from jaxscale.tools.reporting.page import make_page

ITEMS = [{"context": "1 + 1 =", "choices": [" 3", " 2"], "answer": n % 2} for n in range(5)]
WORDS = [{"text": f"say hello to {name}"} for name in ("Ann", "Bo", "Cy")]
printed, told = functools.partial(verbs.printed, evaluate), functools.partial(verbs.told, evaluate)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    made_model.make_workdir(folder, {"train.ema.decay": 0.5}, steps=(3, 7), scale=3.0)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "wiki.txt").write_text("Some text of a wiki.\n\nAnd more of it, in two paragraphs.\n")
    (folder / "code.jsonl").write_text('{"body": "def f(): pass"}\n{"body": "x = 1"}\n')
    (folder / "ask.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    (folder / "words.jsonl").write_text("".join(json.dumps(item) + "\n" for item in WORDS))
    return folder


@pytest.mark.slow
def test_one_checkpoint_is_a_line_for_each_name(workdir, files, capsys):
    flags = [f"--workdir={workdir}", f"--text={files}/wiki.txt", "--text_documents=paragraph"]
    out, err = printed(capsys, *flags, f"--choice=ask={files}/ask.jsonl", f"--cloze=names={files}/words.jsonl")
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert list(lines) == ["wiki", "ask", "names"]
    assert "bits_per_byte " in lines["wiki"] and "±" in lines["wiki"] and "2 documents, " in lines["wiki"]
    assert lines["ask"].startswith("acc 0.") and "acc_norm" in lines["ask"] and lines["ask"].endswith("5 items")
    assert "perplexity" in lines["names"] and lines["names"].endswith("3 items")
    assert f"{workdir}/checkpoints/7: llama" in err and "ask: choice, 5 items" in err
    assert not (workdir / "evals.jsonl").exists()
    evaluate.show_lines({"evals/wiki/loss": 1.0, "evals/wiki/documents": 1, "evals/wiki/left_out": 2})
    assert capsys.readouterr().out == "wiki: loss 1; 1 document, 2 left out\n"


@pytest.mark.slow
def test_items_and_texts_that_are_damaged_are_counted_or_named(workdir, tmp_path, capsys):
    lines = [json.dumps(ITEMS[0]), "{", '{"a": 1}', json.dumps(ITEMS[0] | {"choices": [" 3", " 2" * 999]})]
    (tmp_path / "ask.jsonl").write_text("\n".join([*lines, json.dumps(ITEMS[1])]))
    (tmp_path / "wiki.jsonl").write_text('{"text": "some text"}\n{"text": 1}\n')
    flags = [f"--workdir={workdir}", f"--choice=ask={tmp_path}/ask.jsonl"]
    assert "ask.jsonl line 2 is not JSON" in told(*flags)
    out, err = printed(capsys, *flags, f"--text=wiki={tmp_path}/wiki.jsonl", "--damaged=skip")
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert lines["ask"].endswith("2 items, 3 left out") and lines["wiki"].endswith("1 left out")
    assert "ask: choice, 2 items, 3 left out (" in err
    assert "--damaged='no' is not one of stop, skip" in told(*flags, "--damaged=no")
    assert "--damaged applies only to --text" in told(f"--workdir={workdir}", "--damaged=skip")


@pytest.mark.slow
def test_no_number_depends_on_mesh_or_batch(workdir, files, capsys):
    flags = [f"--workdir={workdir}", f"--text=code={files}/code.jsonl", "--text_field=body", "--json", "--limit=1"]
    flags += [f"--cloze=names={files}/words.jsonl", "--step=3"]
    one = json.loads(printed(capsys, *flags, "--mesh.data=8", "--batch_tokens=64")[0])
    other = json.loads(printed(capsys, *flags, "--mesh.tensor=2")[0])
    assert one["step"] == 3 and one["evals/code/documents"] == one["evals/names/items"] == 1
    assert one.keys() == other.keys()
    for name in one:
        if name.startswith("evals/"):
            assert one[name] == pytest.approx(other[name], rel=1e-5)


@pytest.mark.slow
def test_all_checkpoints_are_a_table_a_file_and_curves(workdir, files, capsys):
    flags = [f"--workdir={workdir}", f"--text=wiki={files}/wiki.txt", f"--choice=ask={files}/ask.jsonl"]
    out, err = printed(capsys, *flags, "--steps=all")
    head, *rows = [line.split() for line in out.splitlines()]
    assert head[:2] == ["step", "wiki/perplexity"] and "ask/acc_norm" in head
    assert [row[0] for row in rows] == ["3", "7"] and rows[0][1] != rows[1][1]
    found = [json.loads(line) for line in (workdir / "evals.jsonl").read_text().splitlines()]
    assert [(record["step"], record["what"]) for record in found] == [(3, "params"), (7, "params")]
    printed(capsys, *flags, "--ema", "--step=7", "--save")
    last = json.loads((workdir / "evals.jsonl").read_text().splitlines()[-1])
    assert last["what"] == "ema" and last["evals_ema/wiki/loss"] != found[1]["evals/wiki/loss"]
    page = (workdir / "evals.html").read_text()
    history = read_history(workdir)
    assert history.evaluated("evals/wiki/bits_per_byte")[0] == [3, 7]
    for text in (page, make_page([history])):
        assert "Evaluations: bits per byte" in text and "Evaluations: accuracy" in text and "wiki, average" in text
    np.testing.assert_allclose(history.evaluated("evals/ask/acc")[1], [r["evals/ask/acc"] for r in found])


@pytest.mark.slow
def test_the_evals_of_the_config_are_measured_without_a_flag(tmp_path, files, capsys):
    evals = {"ask": {"kind": "choice", "file": str(files / "ask.jsonl")}}
    made_model.make_workdir(tmp_path, {"evals": evals})
    out, _ = printed(capsys, f"--workdir={tmp_path}", "--limit=2")
    assert out.startswith("ask: acc ") and out.endswith("; 2 items\n")


@pytest.mark.slow
def test_a_notebook_gets_the_same_numbers(workdir, files, capsys):
    out, _ = printed(capsys, f"--workdir={workdir}", f"--choice=ask={files}/ask.jsonl", "--json")
    found = jaxscale.evaluate(str(workdir), choice={"ask": f"{files}/ask.jsonl"})
    assert {f"evals/ask/{name}": value for name, value in found["ask"].items()} == {
        name: value for name, value in json.loads(out).items() if name.startswith("evals/")
    }


def test_help_begins_with_an_example(capsys):
    out, _ = printed(capsys, "--help")
    assert "jaxscale evaluate --workdir=" in "".join(out.splitlines()[:3])


@pytest.mark.parametrize(
    "flags, wanted",
    [
        (["--text=a"], "--workdir must be given"),
        (["--workdir=w", "--step=1", "--steps=all"], "use one of them"),
        (["--workdir=w", "--text=wiki=nowhere.txt"], "--text wiki=nowhere.txt does not exist"),
        (["--workdir=w", "--choice=nowhere.jsonl"], "--choice nowhere=nowhere.jsonl does not exist"),
        (["--workdir=w", "--cloze=a=x.jsonl,a=y.jsonl"], "the name a is used twice"),
        (["--workdir=w", "--stride=4", "--cloze=a"], "apply only to --text; also set --text"),
        (["--workdir=w", "--include_path=."], "--include_path applies only to --lm_eval"),
        (["--workdir=w", "--limit=0", "--text=a"], "--limit=0 must be a whole number, 1 or more"),
        (["--workdir=w", "--limit=0", "--lm_eval=a"], "--limit=0 must be a whole number, 1 or more"),
        (["--workdir=w", "--chat", "--text=a"], "--chat applies only to --lm_eval; also set --lm_eval"),
        (["--workdir=w", "--config=c.py"], "the settings are read from the work folder"),
        (["--workdir=/nowhere/run"], "--workdir=/nowhere/run contains no checkpoint"),
        (["--workdir=w", "--steps=all"], "contains no checkpoint"),
    ],
)
def test_bad_input_is_one_line(flags, wanted):
    assert wanted in told(*flags)


def test_a_step_or_data_that_do_not_fit_are_told(workdir, files):
    at = f"--workdir={workdir}"
    assert "the config has no evals" in told(at)
    assert "no checkpoint of step 5; existing steps: 3, 7" in told(at, "--steps=3,5")
    assert "is a single checkpoint" in told(f"{at}/checkpoints/3", "--steps=all")
    long = f"--cloze=c={files}/words.jsonl"
    assert "the continuation has 4 tokens, more than the context of 2" in told(at, long, "--context=2")
