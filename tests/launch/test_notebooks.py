"""The notebooks beside the quick start run from top to bottom on a CPU, and what their cells show is looked at."""

import importlib.util
import json
import re
import resource
import subprocess
import sys

import notebooks
import pytest
from notebooks import NOTEBOOKS, SECONDS, cells, code_of, printed, settings, shown, text
from scripts import LAUNCH, ROOT
from xla_flags import xla_flags


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs_and_is_valid(notebook):
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(notebook, as_version=4))
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(notebook, "code"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_setting_has_a_field_in_colab(notebook):
    plain = ("OVERRIDES", "EXTRAS", "#")  # a list and a dict, for which Colab has no field
    lines = [line for line in settings(notebook).splitlines() if " = " in line and not line.startswith(plain)]
    assert len(lines) >= 2 and all("# @param {type:" in line for line in lines)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_says_what_to_change_on_a_t4_and_on_a_tpu(notebook):
    words = "\n".join(text(cell) for cell in cells(notebook, "markdown"))
    assert "T4" in words and "TPU" in words and "CPU" in words


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_machine_that_lacks_jaxscale_gets_it_whatever_jax_it_has(notebook, there, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if there or name != "jaxscale" else None)
    monkeypatch.setattr(subprocess, "run", lambda command, **how: ran.append(command))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.chdir(notebook.parent)
    values = dict(REPO="", FOLDER=str(tmp_path / "run"), WORKDIR=str(tmp_path / "run"), EXTRAS=[])
    exec(text(cells(notebook, "code")[1]), values)  # the cell that installs
    if there:
        assert ran == []
    else:
        (command,) = ran
        package = command[command.index("-e") + 1]
        path, _, extras = package.partition("[")
        assert path == str(ROOT) and (package == path or re.fullmatch(r"[a-z]+(,[a-z]+)*\]", extras))


def cpu_seconds():
    """Of all processes that have been waited for: what a machine that does nothing else would take at most."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(name, settings) -> the cells of an executed notebook, in less than the promised time."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", xla_flags(1))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    def execute(name, **values):
        began = cpu_seconds()
        own = dict(REPO="", FOLDER=str(tmp_path / name), EXTRAS=[], OVERRIDES={}) | values
        book = notebooks.run(LAUNCH / "notebooks" / f"{name}.ipynb", ROOT / "launch", **own)
        assert cpu_seconds() - began < SECONDS
        return code_of(book), tmp_path / name

    return execute


@pytest.mark.soak
def test_data_to_tokens(run):
    pytest.importorskip("rustbpe")
    found, folder = run("data_to_tokens", MOST_BYTES=1_000_000, VOCAB_SIZE=1024, STEPS=20)
    install, raw, prepare, report, manifest, train, trace = found
    documents = int(printed(raw).split("}")[1].split()[0])
    assert documents > 20 and "exact_dedup" in printed(prepare)
    assert "<iframe" in shown(report)[0] and "exact_dedup" in shown(report)[0]
    assert "tokens of 1024" in printed(manifest)
    told = json.loads((folder / "tokens" / "manifest.json").read_text())
    assert told and "done: 20 steps" in printed(train)
    bar = [output["data"] for output in train["outputs"] if "text/html" in output.get("data", {})]
    assert len(bar) == 1 and "<progress" in bar[0]["text/html"] and "20/20" in bar[0]["text/plain"]
    assert "raw.jsonl" in printed(trace)


@pytest.mark.soak
def test_finetune(run):
    pytest.importorskip("jinja2")
    found, folder = run("finetune", STEPS=120)
    install, made, bring_in, before, tune, after, out = found
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert name in printed(made) and name in printed(out)
    assert "step 0, llama" in printed(bring_in) and "done: 120 steps" in printed(tune)
    asked = [line for line in printed(before).splitlines() if line.startswith("What is ")]
    assert len(asked) == 4 and asked == [line for line in printed(after).splitlines() if line.startswith("What is ")]
    right = int(printed(after).splitlines()[-1].split()[0])
    assert right >= 3 and printed(before) != printed(after)
    learnt = [json.loads(line)["messages"][1]["content"] for line in (folder / "chat.jsonl").read_text().splitlines()]
    assert not any(answer in printed(before) for answer in learnt)


@pytest.mark.soak
def test_read_a_run(run):
    found, folder = run("read_a_run", RUNS=[], STEPS=60)
    install, train, report, both, numbers, checkpoints, ask = found
    assert printed(train).count("done: 60 steps") == 2
    (one,), (two,) = shown(report), shown(both)
    assert one.startswith("<iframe srcdoc=") and "rate0.003" in one and "rate0.0003" in two
    lines = [line for line in printed(numbers).splitlines() if line.startswith("step")]
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert len(losses) >= 3 and losses[-1] < losses[0] - 0.5
    assert "started" in printed(numbers) and "60" in printed(checkpoints)
    assert "\ndef main" in printed(ask) and "bits_per_byte" in shown(ask, "text/plain")[0]


@pytest.mark.soak
def test_plan_a_pod(run):
    names = ["v5p-256", "v6e:16x16", "h100:8x8"]
    found, folder = run("plan_a_pod", CONFIG="configs/7b.py", TOPOLOGIES=names, DEADLINE="30d")
    install, one, others, budget = found
    assert "6.74B" in printed(one) and "deadline" in printed(one)
    assert all(f"{name}: " in printed(others) for name in names)
    assert printed(others).count("dollars") == len(names) and "get_config" in printed(budget)


@pytest.mark.soak
def test_lab(run):
    flags = ["--vary=optim.peak_lr=1e-3,8e-3", "--seeds=1"]
    small = {"train_tokens": 60_000}
    values = dict(CONFIG="configs/lab.py", EXPERIMENT="vary", FLAGS=flags, OVERRIDES=small)
    found, folder = run("lab", **values)
    install, plan, runs, page, report = found
    assert printed(plan).count("jaxscale.main") == 2 and "[2/2]" in printed(runs)
    assert "<iframe" in shown(page)[0] and "peak_lr=8e-3" in shown(page)[0] and (folder / "vary.html").exists()
    assert shown(report)[0].startswith("<iframe srcdoc=")
