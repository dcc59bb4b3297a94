"""A package outside of jaxscale adds a writer by an entry point; MLflow is the example, in mlflow_writer/."""

import importlib.util
import io
import json
import os
import pathlib
import shutil
import sqlite3
import subprocess
import sys
import tomllib

import pytest

from jaxscale import schema
from jaxscale.api.training import load_train_config
from jaxscale.runtime.monitor.config import MonitorConfig
from jaxscale.runtime.monitor.sinks import missing_packages
from jaxscale.runtime.monitor.writers import Writer
from jaxscale.system.exits import BadInput, run_and_exit

EXAMPLE = pathlib.Path(__file__).parent / "mlflow_writer"
LISTING = """
class Run:
    address = "a list"
    opened = []

    def __init__(self, service_run):
        self.calls = [(service_run.run_name, service_run.id, service_run.attempt, service_run.settings)]
        Run.opened.append(self)

    def write(self, step, metrics):
        self.calls.append((step, metrics))

    def write_text(self, step, name, text):
        self.calls.append((step, name, text))

    def close(self):
        self.calls.append("closed")
"""


def install(folder, project, **modules):
    """Puts modules into a folder with the metadata that pip would write from this pyproject.toml."""
    about = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{a} = {b}\n" for a, b in entries.items()) for group, entries in groups]
    (about / "entry_points.txt").write_text("\n".join(lines))
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs writers: {name: 'module:attribute'}, and their modules."""

    def add(writers, **modules):
        project = {"name": "some-writers", "version": "1", "entry-points": {"jaxscale.writers": writers}}
        install(tmp_path / "site", project, **modules)
        monkeypatch.syspath_prepend(tmp_path / "site")
        for module in modules:
            monkeypatch.delitem(sys.modules, module, raising=False)

    return add


def written(folder, names, stream=None, start_step=0):
    cfg = MonitorConfig(progress="lines" if stream else "off", writers=names)
    writer = Writer(folder, cfg, 10, start_step, stream=stream or io.StringIO())
    writer.write(start_step + 1, {"loss": 2.5, "mfu": None, "tokens_hash": "ab"})
    writer.sample(start_step + 1, "Once", "Once <upon>\na time")
    writer.close()


def test_a_writer_of_another_package_gets_metrics_text_and_the_id_to_resume(tmp_path, installed):
    installed({"listing": "listing:Run"}, listing=LISTING)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"config": {"seed": 3}}))
    stream = io.StringIO()
    written(run, ("listing",), stream)
    written(run, ("listing",), start_step=4)
    import listing  # pyright: ignore[reportMissingImports]

    kept = json.loads((run / "writers" / "listing.json").read_text())
    assert [opened.calls for opened in listing.Run.opened] == [
        [
            ("run", kept["id"], attempt, {"seed": 3, "attempts": attempt}),
            (step, {"loss": 2.5, "tokens_hash": "ab", "attempt": attempt}),
            (step, "sample", "Once <upon>\na time"),
            "closed",
        ]
        for attempt, step in ((1, 1), (2, 5))
    ]
    assert "listing: a list\n" in stream.getvalue() and len(list((run / "tensorboard").iterdir())) == 2


def test_a_package_that_cannot_be_imported_is_told_of_once(tmp_path, installed):
    installed({"broken": "broken:Run"}, broken="import no_such_module_of_any_package")
    stream = io.StringIO()
    written(tmp_path, ("broken",), stream)
    (line,) = [line for line in stream.getvalue().splitlines() if "broken" in line]
    assert "broken lacks metrics that metrics.jsonl has: ModuleNotFoundError: No module named" in line
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_an_unknown_writer_is_one_line_with_the_nearest_names_and_exit_2(tmp_path, installed, capsys):
    installed({"mlflow": "nothing:at_all"})
    train = lambda argv: load_train_config("quickstart", {"monitor.writers": "mlfow"}, str(tmp_path))
    with pytest.raises(SystemExit) as left:
        run_and_exit(train)
    told = "error: monitor.writers='mlfow' is not an installed writer; nearest: mlflow (docs/watch.md)\n"
    assert left.value.code == 2 and capsys.readouterr().err == told
    assert load_train_config("quickstart", {"monitor.writers": "mlflow"}, str(tmp_path)).monitor.writers == ("mlflow",)
    with pytest.raises(BadInput, match="'tensorbord' is not an installed writer; nearest: "):
        written(tmp_path, ("tensorbord",))


def test_without_similar_names_all_writers_are_named():
    assert missing_packages(["zzz"]) == [
        "monitor.writers='zzz' is not an installed writer; nearest: trackio or wandb (docs/watch.md)"
    ]


def test_the_config_of_a_run_is_read_where_its_writer_is_not_installed():
    assert schema.from_dict(MonitorConfig, {"writers": ["elsewhere"]}).writers == ("elsewhere",)
    assert schema.from_dict(MonitorConfig, {"writers": "elsewhere, wandb"}).writers == ("elsewhere", "wandb")


USE = """
import json, sys
from jaxscale.runtime.monitor.writers import Writer
from jaxscale.runtime.monitor.config import MonitorConfig
name, folder = sys.argv[1:]
cfg = MonitorConfig(tensorboard=False, progress="lines", writers=(name,))
for start, steps in ((0, range(1, 8)), (5, range(6, 11))):
    writer = Writer(folder, cfg, 10, start)
    for sink in writer.sinks:
        sink.close_seconds = 90.0  # the tables of a new database take seconds
    for step in steps:
        writer.write(step, {"loss": 1 / step, "mfu": None, "tokens_hash": "ab", "layer/0/rms": float("nan")})
    writer.sample(steps[-1], "Once", "Once <upon>\\na time")
    writer.close()
    assert not writer.reported, writer.reported
"""
EXPECTED = [(step, 1 / step) for step in (*range(1, 8), *range(6, 11))]


def use(name, tmp_path, **environment):
    """The real package of a service, in a process of its own, through two attempts of a run."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {'mlflow-skinny' if name == 'mlflow' else name}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {"seed": 3}, "versions": {}}))
    keep = {key: text for key, text in os.environ.items() if not key.startswith(("WANDB_", "TRACKIO_", "MLFLOW_"))}
    keep |= {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path[1:]]), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", USE, name, str(tmp_path / "run")]
    done = subprocess.run(command, env=keep | environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_mlflow_continues_one_run_over_two_attempts(tmp_path, monkeypatch, store):
    uri = f"file://{tmp_path}/store" if store == "file" else f"sqlite:///{tmp_path}/store.db"
    if store == "sqlite" and importlib.util.find_spec("mlflow") and importlib.util.find_spec("sqlalchemy") is None:
        pytest.skip("mlflow-skinny has no sqlite store: pip install mlflow")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(tmp_path / "site", project)
    shutil.copy(EXAMPLE / "jaxscale_mlflow.py", tmp_path / "site")
    environment = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = use("mlflow", tmp_path, **environment)
    read = subprocess.run(
        [sys.executable, "-c", READ], env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert read.returncode == 0, read.stderr
    (run,) = json.loads(read.stdout)
    kept = json.loads((tmp_path / "run" / "writers" / "mlflow.json").read_text())
    assert f"mlflow: run {run['id']} in " in done.stdout and run["tags"]["jaxscale.id"] == kept["id"]
    assert run["status"] == "FINISHED" and run["name"] == "run" and run["config"] == {"seed": 3, "attempts": 2}
    assert sorted(map(tuple, run["loss"])) == sorted(EXPECTED)
    assert sorted(value for _, value in run["attempt"]) == [1.0] * 7 + [2.0] * 5
    assert run["metrics"] == ["attempt", "layer/0/rms", "loss"]
    assert run["text"] == "Once <upon>\na time" and run["texts"] == ["sample/10.txt", "sample/7.txt"]


READ = """
import json, mlflow
client = mlflow.MlflowClient()
experiment = client.get_experiment_by_name("jaxscale").experiment_id
found = []
for run in client.search_runs([experiment]):
    number, history = run.info.run_id, lambda name: client.get_metric_history(run.info.run_id, name)
    found.append({
        "id": number, "tags": run.data.tags, "status": run.info.status, "name": run.info.run_name,
        "metrics": sorted(run.data.metrics),
        **{name: [(metric.step, metric.value) for metric in history(name)] for name in ("loss", "attempt")},
        "config": mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/config.json"),
        "text": mlflow.artifacts.load_text(f"{run.info.artifact_uri}/sample/10.txt"),
        "texts": sorted(file.path for file in client.list_artifacts(number, "sample")),
    })
print(json.dumps(found))
"""


@pytest.mark.soak
def test_wandb_gets_generated_text_as_a_page(tmp_path):
    use("wandb", tmp_path, WANDB_MODE="offline")
    pages = [file.read_text() for file in (tmp_path / "run" / "wandb").rglob("*.html")]
    assert len(pages) == 2 and all("<pre>Once &lt;upon&gt;\na time</pre>" in page for page in pages)


@pytest.mark.slow
def test_trackio_gets_generated_text_as_a_code_block(tmp_path):
    use("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    database = sqlite3.connect(tmp_path / "trackio" / "jaxscale.db")
    rows = [(step, json.loads(text)) for step, text in database.execute("select step, metrics from metrics")]
    database.close()
    texts = [(step, metrics["sample"]["_value"]) for step, metrics in rows if "sample" in metrics]
    assert texts == [(step, "    Once <upon>\n    a time") for step in (7, 10)]
