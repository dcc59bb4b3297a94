"""A run's exports come and go beside it, and nothing that happens to one of them reaches the run."""

import json
import sys
import threading
import time

import pytest
import tiny
from hf_folders import make_folder, read_folder

from jaxscale.cli import convert
from jaxscale.runtime.checkpoint.config import CheckpointConfig, ExportConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.periodic_export import OURS, Exporter, periodic_exports
from jaxscale.runtime.checkpoint.retention import pin, pinned_steps
from jaxscale.runtime.monitor.events import Events
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.runtime.training.loop_services import Services


class Watched(Exporter):
    """An exporter whose process is another command; `started` are the steps that it was started for."""

    def __init__(self, workdir, source, **settings):
        self.events, self.said, self.started, self.source = [], [], [], source
        note = lambda kind, step=None, **facts: self.events.append((kind, step, facts))
        super().__init__(ExportConfig(**settings), workdir, note, self.said.append)

    def command(self, step):
        self.started.append(step)
        return [sys.executable, "-S", "-c", self.source, str(self.workdir / "export" / str(step))]


WRITE = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1]); folder.mkdir(parents=True, exist_ok=True)
(folder / "model.safetensors").touch(); (folder / "config.json").touch()
"""


def wait_for(happened):
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_step_that_is_due_is_exported_and_old_ones_go(tmp_path):
    exporter = Watched(tmp_path, WRITE, every_steps=10, keep=2)
    for step in (5, 10, 15, 20, 30, 35):
        exporter.note("saved", step, health="clean")
        exporter.note("alarm", step, cause="another event")
        wait_for(lambda: exporter.thread is None)
    exporter.finish()
    assert exporter.started == [10, 20, 30, 35]  # the last one too
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == ["30", "35"]
    assert [step for kind, step, _ in exporter.events if kind == "exported"] == [10, 20, 30, 35]
    assert len([kind for kind, *_ in exporter.events if kind == "saved"]) == 6
    assert not [line for line in exporter.said if "WARNING" in line]
    assert pinned_steps(tmp_path / "checkpoints") == set()


def test_a_failed_export_is_a_warning_and_no_more(tmp_path):
    exporter = Watched(tmp_path, "import sys; sys.exit('error: no room on the disk')", every_steps=10)
    exporter.note("saved", 10)
    exporter.finish()
    (_, (kind, step, facts)) = exporter.events
    assert (kind, step) == ("alarm", 10) and facts["cause"] == "no export of step 10: error: no room on the disk"
    assert any(line.startswith("WARNING: no export of step 10") for line in exporter.said)
    assert pinned_steps(tmp_path / "checkpoints") == set()


def test_the_step_stays_pinned_while_it_is_exported_and_nobody_waits(tmp_path):
    exporter = Watched(tmp_path, "import time; time.sleep(60)", every_steps=10)
    began = time.monotonic()
    exporter.note("saved", 10)
    assert time.monotonic() - began < 5
    wait_for(lambda: exporter.child is not None)
    exporter.note("saved", 20)
    exporter.note("saved", 30)  # comes too soon for 20, which is left out
    assert pinned_steps(tmp_path / "checkpoints") == {10, 30}
    assert ("alarm", 20) in [(kind, step) for kind, step, _ in exporter.events]
    exporter.abort()
    exporter.child.wait()
    wait_for(lambda: exporter.thread is None)
    assert exporter.started == [10] and pinned_steps(tmp_path / "checkpoints") == {10, 30}
    for step in (10, 30):
        (tmp_path / "checkpoints" / str(step)).mkdir()
    (tmp_path / "checkpoints" / "pinned" / "40").write_text("2026-11-22T00:00:00+00:00\n")  # a person's
    again = Watched(tmp_path, WRITE, every_steps=10, keep=0)
    again.resume_pending()
    again.finish()
    assert again.started[-1] == 30 and pinned_steps(tmp_path / "checkpoints") == {40}


def test_the_end_of_a_run_waits_for_its_export_and_a_crash_does_not(tmp_path):
    made, cfg = [], ExportConfig(every_steps=2)

    class Quick(Exporter):
        def command(self, step):
            made.append(step)
            return ["true"]

    class Slow(Exporter):
        def command(self, step):
            return ["sleep", "60"]

    with periodic_exports(cfg, tmp_path, lambda *a, **k: None, print, primary=True, make_exporter=Quick) as note:
        note("saved", 2)
        note("saved", 3)
    assert made[-1] == 3 and not [t for t in threading.enumerate() if t.name == "export"]
    ended = time.monotonic()
    with pytest.raises(KeyError):
        with periodic_exports(cfg, tmp_path, lambda *a, **k: None, print, primary=True, make_exporter=Slow) as note:
            note("saved", 4)
            raise KeyError
    assert time.monotonic() - ended < 30
    with periodic_exports(cfg, tmp_path, made.append, print, primary=False) as note:
        assert note == made.append  # the others of a run export nothing


def test_what_could_not_be_pushed_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    cfg = ExportConfig(every_steps=2, push_to="org/name")
    with pytest.raises(ValueError, match="HF_TOKEN"), periodic_exports(cfg, tmp_path, print, print, primary=True):
        raise AssertionError


def test_an_export_that_was_finished_when_the_run_was_killed_is_told_and_not_made_again(tmp_path):
    for step in (10, 20):
        folder = tmp_path / "export" / str(step)
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    (folder / ".converting.json").touch()  # of step 20: its push had not come to an end
    (tmp_path / "checkpoints" / "pinned").mkdir(parents=True)
    exporter = Watched(tmp_path, WRITE, every_steps=10, keep=0)
    for step in (10, 20):
        (tmp_path / "checkpoints" / str(step)).mkdir()
        pin(tmp_path / "checkpoints", step, OURS)
        exporter.resume_pending()
        wait_for(lambda: exporter.thread is None)
    assert exporter.started == [20] and pinned_steps(tmp_path / "checkpoints") == set()
    assert [event[:2] for event in exporter.events] == [("exported", 10), ("exported", 20)]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"export.every_steps": -1}, "export: every_steps=-1 must be 0 or more"),
        ({"export.every_steps": 7}, "export.every_steps=7 must be a multiple of checkpoint.save_every_steps=500"),
        ({"export.push_to": "org/name"}, "push_to requires exports, but every_steps=0"),
        ({"export.every_steps": 500, "export.push_to": "name"}, "must be a Hugging Face Hub repository"),
        ({"export.every_steps": 500, "export.ema": True}, "export.ema=true needs an EMA"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, told):
    with pytest.raises(ValueError, match=told):
        tiny.config(overrides)


@pytest.mark.soak
def test_a_training_run_leaves_its_exports(tmp_path):
    quiet = {"monitor.progress": "off", "monitor.tensorboard": False, "eval.num_rows": 0}
    often = {"train_tokens": "6 steps", "checkpoint.save_every_steps": 2, "export.every_steps": 4}
    cfg = tiny.config(quiet | often | {"export.keep": 0, "export.dtype": "float32"})
    folder, events = str(tmp_path / "run"), Events(str(tmp_path / "run"), primary=True)
    with periodic_exports(cfg.export, folder, events.note, lambda line: None, primary=True) as note:
        train_to_completion(open_run(cfg, folder, lambda line: None, services=Services(note)))
    exports = tmp_path / "run" / "export"
    assert sorted(path.name for path in exports.iterdir())[-1] == "6"
    assert Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig()).all_steps() == [2, 4, 6]
    assert convert.main([f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}", "--dtype=float32"]) == 0
    assert read_folder(exports / "6").keys() == read_folder(tmp_path / "out").keys()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {"exported"} <= {event["event"] for event in events}, events


@pytest.mark.soak
def test_a_real_export_is_the_one_that_the_command_makes(tmp_path):
    values = make_folder(tmp_path / "hf")
    assert convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'run'}"]) == 0
    events = []
    note = lambda kind, step=None, **facts: events.append((kind, step, facts))
    exporter = Exporter(ExportConfig(every_steps=1), tmp_path / "run", note, events.append)
    exporter.request(0)
    exporter.finish()
    assert [event[:2] for event in events if event[0] == "exported"] == [("exported", 0)], events
    assert read_folder(tmp_path / "run" / "export" / "0").keys() == values.keys()
