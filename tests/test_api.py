"""`import jaxscale`: few calls, imported when they are used, the same functions that the command line calls."""

import html
import inspect
import json
import pathlib
import subprocess
import sys

import made_model
import numpy as np
import pytest
import tiny

import jaxscale
from jaxscale import schema
from jaxscale.api import inference, measuring, writing
from jaxscale.cli import evaluate as evaluate_verb
from jaxscale.cli import plan as plan_verb
from jaxscale.cli import prepare as prepare_verb
from jaxscale.cli import sample as sample_verb
from jaxscale.cli import trace as trace_verb
from jaxscale.settings import config_file
from jaxscale.system.exits import BadInput, Exit, Stop

TEXTS = ("def f(x):\n    return x\n" * 20, "import sys\n" * 40)


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_the_package_imports_nothing_else_of_weight():
    code = (
        "import sys; before = set(sys.modules); import time; began = time.perf_counter(); import jaxscale;"
        "dir(jaxscale)\n"
        "took = time.perf_counter() - began; new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new & {'jax', 'jaxlib', 'numpy', 'flax', 'optax', 'orbax', 'grain', 'IPython'}), took < 1)"
    )
    assert run_python(code) == ["[] True"]


@pytest.mark.soak
def test_a_call_has_jax_keep_its_compiled_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS"):  # simulated devices have no cache
        monkeypatch.delenv(name, raising=False)
    lines = run_python("import jaxscale; jaxscale.report; import jax; print(jax.config.jax_compilation_cache_dir)")
    assert lines == [str(tmp_path / "jaxscale" / "compiled")]


def test_the_calls_are_those_of_the_command_line():
    assert jaxscale.load_config is config_file.load_config and jaxscale.open_model is inference.open_model
    assert jaxscale.trace is trace_verb.trace and jaxscale.prepare is prepare_verb.prepare
    assert writing.write_all is sample_verb.write_all
    assert jaxscale.plan is plan_verb.api.plan
    assert all(inspect.getdoc(getattr(jaxscale, name)) for name in jaxscale.__all__)
    assert set(jaxscale.__all__) <= set(dir(jaxscale))


def test_no_room_hides_a_call():
    root = pathlib.Path(jaxscale.__file__).parent
    rooms = {path.stem for path in root.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not rooms & set(jaxscale.__all__)


def test_a_name_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(AttributeError, match="no attribute 'trian'; it has ConvertOptions, convert, evaluate"):
        jaxscale.trian  # noqa: B018


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """The untrained tiny model over bytes."""
    folder = tmp_path_factory.mktemp("api") / "run"
    made_model.make_workdir(folder, scale=2.0)
    return str(folder)


@pytest.fixture(scope="module")
def model(workdir):
    return jaxscale.open_model(workdir, say=lambda line: None)


@pytest.mark.slow
def test_sample_writes_what_the_verb_writes(workdir, model, capsys):
    sample_verb.main([f"--workdir={workdir}", "--prompt=def f", "--num_tokens=6", "--temperature=0", "--json"])
    said = json.loads(capsys.readouterr().out)["text"]
    assert jaxscale.sample(model, "def f", num_tokens=6, temperature=0.0) == said
    assert jaxscale.sample(model, [], num_tokens=6) == []
    assert capsys.readouterr().out == ""


@pytest.mark.soak
def test_several_prompts_are_a_list_of_texts(workdir, model):
    one = jaxscale.sample(model, "def f", num_tokens=6, temperature=0.0)
    assert jaxscale.sample(workdir, ["x", "def f"], num_tokens=6, temperature=0.0)[1] == one


@pytest.mark.soak  # tests/cli/test_evaluate_command.py compares the numbers in the default suite
def test_evaluate_measures_what_the_verb_measures(workdir, model, tmp_path, capsys):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    evaluate_verb.main([f"--workdir={workdir}", f"--text=own={tmp_path}/*.txt", "--json"])
    said = json.loads(capsys.readouterr().out)
    found = jaxscale.evaluate(model, text={"own": f"{tmp_path}/*.txt"}, save=True)
    assert found["own"] == {
        name.removeprefix("evals/own/"): v for name, v in said.items() if name.startswith("evals/own/")
    }
    assert np.isfinite(found["own"]["bits_per_byte"])
    (line,) = (pathlib.Path(workdir) / "evals.jsonl").read_text().splitlines()
    assert json.loads(line)["evals/own/bits_per_byte"] == found["own"]["bits_per_byte"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model: jaxscale.evaluate(model, text={"a": "missing/*.txt"}), r"text\['a'\].*missing"),
        (lambda model: jaxscale.evaluate(model, text={"a": "x"}, cloze={"a": "y"}), "'a' is the name of two"),
        (lambda model: jaxscale.evaluate(model), "the config has no evals"),
        (lambda model: jaxscale.sample(model, num_tokens=0), "num_tokens=0 and batch=8 must be whole numbers"),
        (lambda model: jaxscale.sample(model, num_tokens=np.int64(5), seed="a"), "seed='a' must be a whole number"),
        (lambda model: jaxscale.sample(model, temperature="hot"), "temperature='hot' must be a number"),
        (lambda model: jaxscale.sample(model, num_tokens=2.5), "num_tokens=2.5 must be a whole number"),
        (
            lambda model: jaxscale.sample(model, system="Be brief."),
            "system='Be brief.' applies only to .* also give chat=True",
        ),
        (lambda model: jaxscale.sample(model, "hi", chat=True), "bytes has no chat template"),
        (lambda model: jaxscale.sample(model, top_p=2.0), "top_p"),
        (
            lambda model: jaxscale.sample(model, seed=2**32),
            "seed=4294967296 must be .* to 4294967295",
        ),
        (lambda model: jaxscale.sample(model, stop=""), "a stop string is empty"),
        (lambda model: jaxscale.report("nowhere/run", price="cheap"), "^price=cheap must be dollars"),
        (lambda model: jaxscale.sample("nowhere/run"), "nowhere/run"),
        (lambda model: jaxscale.report(), "report needs a work folder"),
        (lambda model: jaxscale.report("nowhere/run"), "nowhere/run"),
        (lambda model: jaxscale.train(None, "x", stop_after=0), "stop_after=0 must be a whole number, 1 or more"),
        (
            lambda model: jaxscale.train("quickstart.py", "x"),
            r"cfg='quickstart.py' is not a config; to train from a file, use train\(load_config",
        ),
        (lambda model: jaxscale.train(None, "x", allow_change="optim.peek_lr"), "^allow_change=optim.peek_lr is not"),
        (lambda model: jaxscale.evaluate(model, text={"a": "x"}, batch_tokens=0), "^batch_tokens=0 must be a whole"),
        *[
            (lambda model, name=name: jaxscale.trace("nowhere", **{"step": 1} | {name: -1}), f"^{name}=-1 must be a")
            for name in ("step", "row", "characters")
        ],
        (lambda model: jaxscale.evaluate(model, text="a.txt"), "text='a.txt' must be a dict of named evaluators"),
    ],
)
def test_what_a_person_got_wrong_is_one_line(call, told, model):
    with pytest.raises(ValueError, match=told) as error:
        call(model)
    assert isinstance(error.value, BadInput) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    """A run of four steps with nothing beside it: the file's sample, whose prompt is left, is switched off."""
    file = tmp_path_factory.mktemp("config") / "tiny.py"
    file.write_text(f"def get_config():\n    return {schema.merge(tiny.VALUES, {'sample.prompt': 'def '})!r}\n")
    bare = {"eval.num_rows": 0, "sample.num_tokens": 0, "monitor.statistics_every_steps": 0, "mesh.fsdp": 1}
    bare |= {"model.num_layers": 1, "monitor.tensorboard": False, "train_tokens": "4 steps", "mesh.data": -1}
    return jaxscale.load_config(str(file), bare)


def test_it_trains_and_shows_its_report(cfg, tmp_path):
    run = jaxscale.train(cfg, str(tmp_path / "run"), stop_after=2)
    assert run.step == 2 and np.isfinite(run.metrics["loss"]) and str(run) == str(tmp_path / "run")
    shown = jaxscale.report(run)
    frame = shown._repr_html_()
    assert frame.startswith('<iframe srcdoc="') and 'sandbox="allow-scripts"' in frame
    inner = frame.partition('srcdoc="')[2].partition('"')[0]  # no quote of the page ends it
    assert html.unescape(inner) == shown.page and "<html" in shown.page
    assert pathlib.Path(shown.save(str(tmp_path / "page.html"))).read_text() == shown.page and "report of" in repr(
        shown
    )


@pytest.mark.soak
def test_it_goes_on_and_leaves_what_is_complete_alone(cfg, tmp_path, capsys):
    run = jaxscale.train(cfg, str(tmp_path / "run"), stop_after=2)
    assert "going on" not in capsys.readouterr().out
    assert jaxscale.train(cfg, str(run)).step == 4
    assert "resuming from step 2" in capsys.readouterr().out
    assert jaxscale.train(cfg, str(run)).step == 4
    assert "complete at step 4" in capsys.readouterr().out


def test_one_task_of_lm_eval_may_be_a_word(model, monkeypatch):
    def stop(request, named):
        raise ValueError(f"asked for {request.tasks}")

    monkeypatch.setattr(measuring, "check_request", stop)
    with pytest.raises(ValueError, match=r"asked for \('sciq',\)"):
        jaxscale.evaluate(model, lm_eval="sciq")


def test_what_a_person_can_mend_is_shown_in_a_notebook_as_its_line():
    assert BadInput("seq_len=1 must be at least 2")._render_traceback_() == ["error: seq_len=1 must be at least 2"]
    assert Stop(Exit.PREEMPTED, "saved")._render_traceback_() == ["stopped (preempted, exit 10): saved"]
