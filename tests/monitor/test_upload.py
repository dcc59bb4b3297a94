"""What is given to an uploader reaches the bucket whole and in the end, and nobody ever waits for it."""

import threading
import time

import pytest
from gcs_emulator import Emulator
from gcs_weather import Weather

from jaxscale.runtime.monitor import upload
from jaxscale.runtime.monitor.config import MonitorConfig
from jaxscale.runtime.monitor.upload import Uploader
from jaxscale.runtime.monitor.writers import Writer

SECONDS = 20  # longer than anything here takes


@pytest.fixture
def gcs(monkeypatch):
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    monkeypatch.setattr(upload, "FIRST_WAIT", 0.01)
    with Emulator() as emulator:
        for name, value in emulator.environment().items():
            monkeypatch.setenv(name, value)
        yield emulator


def open_uploader(url, **settings):
    return Uploader(url, upload.ExclusiveObject(url).write, **settings)


def wait_until(happened):
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_object_holds_what_was_put_last_and_all_that_was_added_since(gcs):
    uploader = open_uploader("gs://bucket/run/events.jsonl")
    uploader.put("gone")
    uploader.put("a\n")
    uploader.append("b\n")
    assert uploader.flush(SECONDS) and gcs.get("bucket", "run/events.jsonl") == b"a\nb\n" and uploader.problem is None
    uploader.append("é\n")
    assert uploader.flush(SECONDS) and gcs.get("bucket", "run/events.jsonl").decode() == "a\nb\né\n"


@pytest.mark.fault("F18")
def test_whatever_the_service_does_nobody_waits_and_one_copy_is_kept():
    begun, go_on, sent = threading.Event(), threading.Event(), []

    def write(content):
        begun.set()
        go_on.wait()
        sent.append(content)

    uploader = Uploader("x", write)
    uploader.put("0")
    assert begun.wait(SECONDS)
    began = time.monotonic()
    for number in range(1000):
        uploader.put(str(number) * 100)
    assert time.monotonic() - began < 1 and uploader.pieces == ["999" * 100] and not uploader.flush(0.01)
    go_on.set()
    assert uploader.flush(SECONDS) and sent == [b"0", b"999" * 100]  # and none of those between


@pytest.mark.fault("F17")
def test_a_busy_service_is_ridden_out_without_a_word(gcs):
    gcs.weather = Weather(burst=5, status=429)
    uploader = open_uploader("gs://bucket/run/x")
    uploader.put("text")
    assert uploader.flush(SECONDS) and gcs.get("bucket", "run/x") == b"text" and uploader.problem is None


@pytest.mark.fault("F21")
def test_a_run_that_stood_still_leaves_alone_what_another_has_written_since(gcs):
    zombie = open_uploader("gs://bucket/run/x")
    zombie.put("old")
    assert zombie.flush(SECONDS)
    new = open_uploader("gs://bucket/run/x")
    new.put("new")
    assert new.flush(SECONDS)
    zombie.append(" and older")
    wait_until(lambda: zombie.problem)
    assert "another process has written gs://bucket/run/x" in zombie.problem
    new.append("er")
    assert new.flush(SECONDS) and gcs.get("bucket", "run/x") == b"newer" and not zombie.flush(0.2)


def test_a_try_whose_answer_was_lost_does_not_end_the_uploads(gcs):
    uploader = open_uploader("gs://bucket/run/x")
    uploader.put("1")
    assert uploader.flush(SECONDS)
    gcs.put("bucket", "run/x", b"12")  # what our next try writes, in a generation that we are not told
    uploader.append("2")
    assert uploader.flush(SECONDS)
    uploader.append("3")
    assert uploader.flush(SECONDS) and gcs.get("bucket", "run/x") == b"123" and uploader.problem is None


@pytest.mark.fault("F18")
def test_a_refusal_is_told_at_once_with_what_is_missing_and_forgotten_when_it_is_over(gcs):
    gcs.weather = Weather(lacks={"storage.objects.create"})
    uploader = open_uploader("gs://bucket/run/x")
    uploader.put("text")
    wait_until(lambda: uploader.problem)
    assert "gs://bucket/run/x could not be uploaded" in uploader.problem and "(403)" in uploader.problem
    assert "needs storage.objects.create, for example through the role Storage Object User" in uploader.problem
    gcs.weather = Weather()
    assert uploader.flush(SECONDS) and uploader.problem is None


@pytest.mark.fault("F18")
@pytest.mark.fault("F27")
def test_an_outage_is_told_once_it_has_lasted_a_minute_of_a_steady_clock(gcs):
    now = [0.0]
    gcs.weather = Weather(down=True)
    uploader = open_uploader("gs://bucket/run/x", clock=lambda: now[0])
    uploader.put("text")
    wait_until(lambda: uploader.failures == 1)
    assert uploader.problem is None
    now[0] += upload.QUIET_SECONDS
    uploader.skip_pause()
    wait_until(lambda: uploader.problem)
    gcs.weather = Weather()
    assert uploader.flush(SECONDS) and gcs.get("bucket", "run/x") == b"text" and uploader.problem is None


def test_uploads_are_apart_by_the_pause_and_longer_for_a_long_text():
    now, sent = [0.0], []
    uploader = Uploader("x", sent.append, every_seconds=10, clock=lambda: now[0])
    uploader.put("1")
    wait_until(lambda: uploader.sent == 1)
    assert uploader.due == 10
    uploader.append("2")
    time.sleep(0.05)
    assert sent == [b"1"]
    uploader.put("3" * 30_000_000)
    assert uploader.flush(SECONDS) and uploader.due == 30


@pytest.mark.fault("F17")
@pytest.mark.soak
def test_metrics_of_a_run_in_a_bucket_are_there_after_close_and_a_resumed_run_adds_to_them(gcs):
    cfg = MonitorConfig(tensorboard=True, progress="off")
    gcs.weather = Weather(every=2)
    for start in (0, 2):
        writer = Writer("gs://bucket/run", cfg, 10, start)
        for step in range(start + 1, start + 4):
            writer.write(step, {"loss": float(step)})
        writer.upload_soon()
        gcs.weather = Weather()
        writer.close()
    found = gcs.get("bucket", "run/metrics.jsonl").decode().splitlines()
    assert [line.partition(",")[0] for line in found] == [f'{{"step": {step}' for step in (1, 2, 3, 4, 5)]


@pytest.mark.fault("F18")
def test_a_run_says_on_its_console_that_its_metrics_may_not_be_written(gcs, capsys, monkeypatch):
    monkeypatch.setattr("jaxscale.runtime.monitor.writers.LAST_SECONDS", 0.1)
    gcs.put("bucket", "run/metrics.jsonl", b"")
    gcs.weather = Weather(lacks={"storage.objects.delete"})
    writer = Writer("gs://bucket/run", MonitorConfig(progress="off"), 10)
    writer.write(1, {"loss": 1.0})
    wait_until(lambda: writer.metrics_file.problem)
    writer.write(2, {"loss": 1.0})
    writer.write(3, {"loss": 1.0})
    writer.close()
    told = [line for line in capsys.readouterr().out.splitlines() if "storage.objects.delete" in line]
    assert len(told) == 2 and "metrics.jsonl lacks the last records" in told[1]
