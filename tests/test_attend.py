"""What surrounds a run ends in order: how it ended is noted while the folder is still its own."""

import dataclasses
import errno
import os
import pathlib
import shutil

import jax
import pytest
import tiny

from jaxscale.runtime.checkpoint.lock import RunLock
from jaxscale.runtime.monitor.events import Events, read_events
from jaxscale.runtime.run.options import DEFAULT_OPTIONS
from jaxscale.runtime.run.services import run_services
from jaxscale.settings.config_file import load_config
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.paths import locked

MAKE = {
    "a pipe": os.mkfifo,
    "a folder": pathlib.Path.mkdir,
    "a broken link": lambda path: path.symlink_to(path.parent.parent / "none"),
}


class Alone:
    """One process: what is said, kept."""

    process = 0

    def __init__(self):
        self.said = []

    def __call__(self, line):
        self.said.append(line)

    def on_hang(self, heard):
        """Nobody tells."""

    def report_hang(self, line):
        """Nobody hears."""


@pytest.fixture
def cfg(tmp_path):
    (tmp_path / "tiny.py").write_text(f"def get_config():\n    return {tiny.VALUES!r}\n")
    return load_config(str(tmp_path / "tiny.py"))


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (Stop(Exit.NON_FINITE, "diverged"), 17), (KeyError("x"), 1)], ids=str
)
def test_how_a_run_ended_is_noted_under_its_lock(cfg, tmp_path, monkeypatch, error, code):
    workdir, locked, note = tmp_path / "run", [], Events.note

    def watched(events, kind, *rest, **facts):
        locked.append((kind, (workdir / "lock").exists()))
        note(events, kind, *rest, **facts)

    monkeypatch.setattr(Events, "note", watched)
    try:
        with run_services(cfg, str(workdir), DEFAULT_OPTIONS, Alone()) as services:
            services.note("started", 0)
            if error:
                raise error
    except (Stop, KeyError) as raised:
        assert raised is error
    assert locked == [("started", True), ("stopped", True)] and not (workdir / "lock").exists()
    services.note("alarm", 1)  # too late
    events = read_events(workdir)
    assert [event["event"] for event in events] == ["started", "stopped"] and events[1]["code"] == code


@pytest.mark.fault("F4")
def test_a_disk_that_fails_at_the_end_leaves_the_verdict_as_it_is(cfg, tmp_path):
    with pytest.raises(Stop, match="no room") as stop:
        with run_services(cfg, str(tmp_path / "run"), DEFAULT_OPTIONS, Alone()) as services:
            services.note("started", 0)
            shutil.rmtree(tmp_path / "run")
            raise Stop(Exit.STORAGE, "no room")
    assert stop.value.code == Exit.STORAGE


def test_a_start_that_is_refused_leaves_no_trace(cfg, tmp_path):
    with RunLock(tmp_path / "run"):
        with pytest.raises(Stop) as stop, run_services(cfg, str(tmp_path / "run"), DEFAULT_OPTIONS, Alone()):
            raise AssertionError("two runs in one folder")
        assert stop.value.code == Exit.LOCK_HELD and [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    with pytest.raises(ValueError), run_services(cfg, str(tmp_path / "run"), DEFAULT_OPTIONS, Alone()):
        raise ValueError("before anything was noted")
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.fault("F32")
def test_only_who_holds_the_lock_removes_what_is_half_written(cfg, tmp_path, monkeypatch):
    half = tmp_path / "run" / f".metrics.jsonl.{'0' * 16}.tmp"
    half.parent.mkdir()
    half.touch()
    for process, left in ((1, True), (0, False)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with run_services(cfg, str(tmp_path / "run"), DEFAULT_OPTIONS, Alone()):
            assert half.exists() is left


@pytest.mark.fault("F32")
def test_one_file_that_cannot_be_renewed_keeps_no_other_from_it_and_is_told(cfg, tmp_path, monkeypatch):
    run, alone, replace = tmp_path / "run", Alone(), os.replace
    unfinished = run / "checkpoints" / "7.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "events.jsonl").touch()

    def failing(source, target):
        if str(target).endswith("events.jsonl"):
            raise OSError(errno.EIO, "the disk fails")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with RunLock(run):
        lock = (run / "lock").read_bytes()
    (run / "lock").write_bytes(lock)
    with (run / "metrics.jsonl").open("a") as old:
        with run_services(cfg, str(run), dataclasses.replace(DEFAULT_OPTIONS, steal_lock=True), alone):
            assert os.fstat(old.fileno()).st_nlink == 0 and not unfinished.exists()
    (line,) = [line for line in alone.said if "WARNING" in line]
    assert line.endswith("may still write to events.jsonl (the disk fails)")


@pytest.mark.fault("F35")
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a broken link"])
@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "events.jsonl", "samples.jsonl", "config.json"])
def test_what_is_no_file_in_the_place_of_one_is_one_line_and_keeps_nobody_waiting(cfg, tmp_path, kind, name):
    workdir = tmp_path / "run"
    workdir.mkdir()
    MAKE[kind](workdir / name)
    with pytest.raises(BadInput, match=f"{name} must be a (regular )?file, but is .*; (move|remove)"):
        with run_services(cfg, str(workdir), DEFAULT_OPTIONS, Alone()):
            raise AssertionError("begun")
    assert [path.name for path in workdir.iterdir()] == [name] and not (tmp_path / "none").exists()


@pytest.mark.fault("F35")
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a broken link"])
def test_a_lock_of_data_that_is_no_file_is_one_line_too(tmp_path, kind):
    MAKE[kind](tmp_path / "lock")
    with pytest.raises(BadInput, match="lock must be a file, .*; move or delete"), locked(tmp_path / "lock"):
        raise AssertionError("held")
    assert not (tmp_path / "none").exists()
