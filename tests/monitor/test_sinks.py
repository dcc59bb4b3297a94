"""Other writers get every record, and whatever they do, the run goes on and metrics.jsonl is whole."""

import importlib.util
import io
import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import time

import pytest
from no_packages import no_distribution

from jaxscale import schema
from jaxscale.runtime.monitor.config import MonitorConfig
from jaxscale.runtime.monitor.sinks import ServiceRun, Sink
from jaxscale.runtime.monitor.writers import Writer

PLAIN = MonitorConfig(tensorboard=False, progress="off")


class Service:
    """A service that keeps what it gets, and waits where it is told to."""

    address = "somewhere"

    def __init__(self, service_run):
        self.service_run, self.records, self.finished = service_run, [], False
        self.gate = threading.Event()
        self.gate.set()

    def write(self, step, metrics):
        self.gate.wait(20)
        self.records.append((step, metrics))

    def close(self):
        self.finished = True


def opened(folder, made, *, gate=None, **limits):
    """A sink whose services are appended to `made`."""

    def open_service(begin):
        made.append(Service(begin))
        if gate:
            made[-1].gate = gate
        return made[-1]

    return Sink("test", folder, open_service, **limits)


def test_every_record_arrives_in_order_and_the_end_is_waited_for(tmp_path):
    sink = opened(tmp_path, made := [])
    for step in range(1, 50):
        sink.write(step, {"loss": 1 / step})
    sink.close()
    assert made[0].records == [(step, {"loss": 1 / step, "attempt": 1}) for step in range(1, 50)]
    assert made[0].finished and sink.problem is None and sink.announcement == "test: somewhere"


def test_a_run_keeps_its_id_and_counts_attempts_also_where_it_begins_again_without_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"seed": 3}}))
    made = []
    for _ in range(4):
        opened(tmp_path, made).close()
    begins = [service.service_run for service in made]
    assert len({begin.id for begin in begins}) == 1 and [begin.attempt for begin in begins] == [1, 2, 3, 4]
    assert begins[0].settings == {"seed": 3, "attempts": 1}
    assert (tmp_path / "writers").stat().st_mode & 0o777 == 0o700


def test_secrets_do_not_reach_a_service(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "correcthorsebattery")
    (tmp_path / "config.json").write_text(json.dumps({"config": {"data": {"files": "x?key=correcthorsebattery"}}}))
    assert "correcthorse" not in json.dumps(ServiceRun(tmp_path, "test").settings)


def test_a_service_that_stands_still_keeps_nobody_waiting(tmp_path):
    gate = threading.Event()
    sink = opened(tmp_path, [], gate=gate, max_pending=10, close_seconds=0.3)
    began = time.monotonic()
    for step in range(1000):
        sink.write(step, {"loss": 1.0})
    assert time.monotonic() - began < 0.2 and sink.lost >= 988
    assert sink.problem == "test lacks metrics that metrics.jsonl has: it is too slow"
    sink.close()
    assert 0.25 < time.monotonic() - began < 2.0
    gate.set()


ERRORS = [RuntimeError("no route\nto host"), SystemExit(1), ValueError("hf_" + "a" * 20)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_service_that_fails_is_told_of_once_and_the_file_is_whole(tmp_path, error):
    def fail(begin):
        raise error

    stream = io.StringIO()
    writer = Writer(tmp_path, MonitorConfig(tensorboard=False, progress="lines"), 10, stream=stream)
    writer.sinks = [Sink("test", tmp_path, fail)]
    writer.sinks[0].finished.wait(10)
    for step in range(1, 4):
        writer.write(step, {"loss": 1.0})
    writer.close()
    (line,) = [line for line in stream.getvalue().splitlines() if "lacks metrics" in line]
    assert f"test lacks metrics that metrics.jsonl has: {type(error).__name__}: " in line and "hf_aaa" not in line
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.metadata.distribution", no_distribution)
    cfg = MonitorConfig(tensorboard=False, progress="off", writers=("wandb", "trackio"))
    with pytest.raises(
        ValueError, match=r"'wandb' needs a missing package; run pip install 'jaxscale\[wandb\]'.*\[trackio\]"
    ):
        Writer(tmp_path, cfg, 10)


def test_writers_are_named_on_a_command_line_with_commas_between():
    named = lambda text: schema.from_dict(MonitorConfig, {"writers": text}).writers
    assert named("wandb") == ("wandb",) and named("wandb, trackio") == ("wandb", "trackio") and named("()") == ()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("wandb,wandb", "have duplicates"),
        (["wandb", "wandb"], "have duplicates"),
        ([3], "is not one of wandb, trackio"),
    ],
)
def test_writers_that_cannot_be_are_refused(value, told):
    with pytest.raises(ValueError, match=told):
        schema.from_dict(MonitorConfig, {"writers": value})


USE = """
import json, sys
from jaxscale.runtime.monitor.writers import Writer
from jaxscale.runtime.monitor.config import MonitorConfig
name, folder = sys.argv[1:]
cfg = MonitorConfig(tensorboard=False, progress="lines", writers=(name,))
for start, steps in ((0, range(1, 8)), (5, range(6, 11))):
    writer = Writer(folder, cfg, 10, start)
    for step in steps:
        writer.write(step, {"loss": 1 / step, "mfu": None, "tokens_hash": "ab"})
    writer.close()
    assert not writer.reported, writer.reported
"""


def use(name, tmp_path, **environment):
    """The real package, in a process of its own."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'jaxscale[{name}]'")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {"seed": 3}, "versions": {}}))
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "TRACKIO_"))}
    command = [sys.executable, "-c", USE, name, str(tmp_path / "run")]
    done = subprocess.run(
        command, env=keep | {"HOME": str(tmp_path)} | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done, json.loads((tmp_path / "run" / "writers" / f"{name}.json").read_text())


EXPECTED = [(step, 1) for step in range(1, 8)] + [(step, 2) for step in range(6, 11)]  # (step, attempt)


@pytest.mark.slow
def test_trackio_shows_steps_that_were_run_again_beside_those_given_up(tmp_path):
    _, kept = use("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    database = sqlite3.connect(tmp_path / "trackio" / "jaxscale.db")
    rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    database.close()
    found = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert {name for name, *_ in rows} == {f"run-{kept['id']}"}
    assert [(step, metrics["attempt"]) for step, metrics in found] == EXPECTED
    assert all(metrics["loss"] == 1 / step and "mfu" not in metrics for step, metrics in found)


@pytest.mark.soak
def test_wandb_draws_one_run_over_our_steps_with_the_attempt_beside_them(tmp_path):
    done, kept = use("wandb", tmp_path, WANDB_MODE="offline")
    from wandb.proto import wandb_internal_pb2

    history, ids, metrics = [], set(), {}
    for file in sorted(
        (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime
    ):
        for content in leveldb_records(file.read_bytes()[7:], skipped=7):
            record = wandb_internal_pb2.Record.FromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
            elif kind == "metric":
                metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            elif kind == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                history.append({name: json.loads(value) for name, value in items.items() if name[0] != "_"})
    assert ids == {kept["id"]} and metrics["*"] == "step"
    assert [(record["step"], record["attempt"]) for record in history] == EXPECTED
    assert all(record["loss"] == 1 / record["step"] and "mfu" not in record for record in history)
    assert "wandb: stored in" in done.stdout


@pytest.mark.soak
def test_wandb_that_is_disabled_is_said_to_send_nothing(tmp_path):
    done, _ = use("wandb", tmp_path, WANDB_MODE="disabled")
    assert "wandb: not sent" in done.stdout and "wandb: None" not in done.stdout


@pytest.mark.slow
def test_wandb_without_a_login_asks_nobody(tmp_path):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed: pip install 'jaxscale[wandb]'")
    code = (
        "import sys\nfrom jaxscale.runtime.monitor.sinks import OPENERS, Sink\n"
        "sink = Sink('wandb', sys.argv[1], OPENERS['wandb'])\nsink.finished.wait(60)\nprint(sink.problem)"
    )
    keep = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=keep | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "not logged in to W&B; set WANDB_API_KEY, or set WANDB_MODE=offline" in done.stdout, done.stderr


def leveldb_records(content, skipped):
    """The records of a log in LevelDB's format: 32 KiB blocks of (crc32, length, type) and data; 2 to 4 are parts.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md. skipped: bytes of the first block before it.
    """
    place, parts = skipped, b""
    content = bytes(skipped) + content
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if kind == 0:
            return
        parts = (b"" if kind in (1, 2) else parts) + content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
