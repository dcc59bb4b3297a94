"""The event log: durable, never rewritten, readable after a crash; and what becomes of abandoned metrics."""

import json
import resource
import time

import pytest
from gcs_emulator import Emulator
from gcs_weather import Weather

from jaxscale.runtime.monitor.events import Events, read_events
from jaxscale.runtime.monitor.records import abandon
from jaxscale.system.exits import Exit, Stop


def test_events_are_read_back_as_they_were_noted(tmp_path):
    events = Events(tmp_path, primary=True, clock=lambda: 1_700_000_000.5)
    events.note("started", 0)
    events.note("rewind", 14, to=8, skip_batches=[[8, 13]])
    events.close()
    events.note("stopped", 14)  # too late
    first = {"time": "2023-11-14T22:13:20.500+00:00", "event": "started", "step": 0}
    assert read_events(tmp_path) == [first, first | {"event": "rewind", "step": 14, "to": 8, "skip_batches": [[8, 13]]}]
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o077 == 0


def test_a_log_that_nothing_was_noted_in_leaves_no_trace(tmp_path):
    Events(tmp_path, primary=True).close()
    Events(tmp_path, primary=False).note("started", 0)
    assert read_events(tmp_path) == [] and not list(tmp_path.iterdir())


def test_a_torn_last_line_is_dropped_and_never_glued_to_the_next(tmp_path):
    Events(tmp_path, primary=True).note("started", 0)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": "", "event": "skip')
    assert [event["event"] for event in read_events(tmp_path)] == ["started"]
    Events(tmp_path, primary=True).note("resumed", 4)
    assert [event["event"] for event in read_events(tmp_path)] == ["started", "resumed"]


def test_a_damaged_line_inside_is_an_error_that_names_it(tmp_path):
    (tmp_path / "events.jsonl").write_text(
        '{"event": "started", "step": 0}\n{"event"\n{"event": "resumed", "step": 1}\n'
    )
    with pytest.raises(ValueError, match=r"events.jsonl:2 is not an event"):
        read_events(tmp_path)


def test_abandoned_metrics_are_kept_once_whatever_was_interrupted(tmp_path):
    metrics = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3, 4)) + '{"step": 5, "lo'
    (tmp_path / "metrics.jsonl").write_text(metrics)
    assert abandon(tmp_path, 2, rewind=1) == 2
    (tmp_path / "metrics.jsonl").write_text(metrics)  # as if killed before this one was written
    abandon(tmp_path, 2, rewind=1)
    read = lambda name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert [line["step"] for line in read("metrics.jsonl")] == [1, 2]
    assert [(line["rewind"], line["step"]) for line in read("abandoned.jsonl")] == [(1, 3), (1, 4)]
    assert abandon(tmp_path, 2, rewind=2) == 0


def kinds(workdir):
    return [event["event"] for event in read_events(workdir)]


@pytest.mark.fault("F4")
def test_a_full_disk_ends_no_run_and_loses_no_event_but_a_rewind_must_be_there(tmp_path):
    events = Events(tmp_path, primary=True)
    events.note("started", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "events.jsonl").stat().st_size + 9, hard))
    try:
        events.note("alarm", 3, cause="x" * 99)
        assert kinds(tmp_path) == ["started"] and (tmp_path / "events.jsonl").read_text().endswith("\n")
        with pytest.raises(Stop, match="a rewind cannot be recorded: File too large") as stop:
            events.note("rewind", 4, to=2)
        assert stop.value.code == Exit.STORAGE
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    events.note("stopped", 4)
    assert kinds(tmp_path) == ["started", "alarm", "rewind", "stopped"]


@pytest.mark.fault("F26")
def test_events_of_a_folder_that_went_away_are_written_when_it_is_back(tmp_path):
    events = Events(tmp_path / "run", primary=True)
    events.note("started", 0)
    (tmp_path / "run").mkdir()
    events.close()
    assert kinds(tmp_path / "run") == ["started"]


@pytest.fixture
def gcs(monkeypatch):
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    with Emulator() as emulator:
        for name, value in emulator.environment().items():
            monkeypatch.setenv(name, value)
        yield emulator


@pytest.mark.fault("F21")
def test_in_a_bucket_a_run_that_stood_still_replaces_no_event_of_the_one_that_followed(gcs):
    frozen = Events("gs://b/run", primary=True)
    frozen.note("started", 0)
    assert frozen.sync(20)
    following = Events("gs://b/run", primary=True)
    following.note("rewind", 14, to=8)
    frozen.note("alarm", 15)
    began = time.monotonic()
    assert not frozen.sync(20)
    with pytest.raises(Stop, match="another process has written gs://b/run/events.jsonl"):
        frozen.note("rewind", 15, to=14)
    frozen.close()
    assert time.monotonic() - began < 10 and not frozen.file.uploader.thread.is_alive()
    following.note("stopped", 16)
    following.close()
    assert kinds("gs://b/run") == ["started", "rewind", "stopped"]


@pytest.mark.fault("F21")
def test_in_a_bucket_what_another_wrote_before_the_first_upload_stays(gcs):
    gcs.put("b", "run/events.jsonl", b'{"event": "started", "step": 0}\n')
    gcs.weather = Weather(lacks={"storage.objects.create"})
    frozen = Events("gs://b/run", primary=True)
    frozen.note("resumed", 4)
    gcs.put("b", "run/events.jsonl", b'{"event": "rewind", "step": 14}\n')
    gcs.weather = Weather()
    assert not frozen.sync(20) and kinds("gs://b/run") == ["rewind"]


@pytest.mark.fault("F18")
def test_the_end_of_a_run_waits_as_long_for_its_events_as_for_its_metrics(gcs, monkeypatch):
    monkeypatch.setattr("jaxscale.runtime.monitor.events.LAST_SECONDS", 0.1)
    events = Events("gs://b/run", primary=True)
    events.note("started", 0)
    assert events.sync(20)
    gcs.weather = Weather(down=True)
    events.note("stopped", 4)
    began = time.monotonic()
    events.close()
    assert time.monotonic() - began < 10
    gcs.weather = Weather()
    events.file.uploader.thread.join(40)  # nothing is sent once the folder may be another's
    assert kinds("gs://b/run") == ["started"]


def test_in_a_bucket_a_rewind_is_there_before_note_returns(monkeypatch):
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    with Emulator() as gcs:
        for name, value in {"STORAGE_EMULATOR_HOST": gcs.endpoint, "EPATH_USE_TF": "false"}.items():
            monkeypatch.setenv(name, value)
        gcs.put("b", "run/events.jsonl", b'{"time": "", "event": "started", "step": 0}\n{"torn')
        events = Events("gs://b/run", primary=True)
        events.note("rewind", 14, to=8)
        assert [json.loads(line)["event"] for line in gcs.get("b", "run/events.jsonl").splitlines()] == [
            "started",
            "rewind",
        ]
        assert [event["step"] for event in read_events("gs://b/run")] == [0, 14]
        events.note("stopped", 14)
        events.close()
        assert len(gcs.get("b", "run/events.jsonl").splitlines()) == 3
