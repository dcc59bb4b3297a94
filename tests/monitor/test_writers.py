"""What is written is valid JSON, complete after a crash, and without the steps that a resumed run repeats."""

import io
import json
import resource
import shutil

import pytest

from jaxscale.runtime.monitor import sinks
from jaxscale.runtime.monitor.config import MonitorConfig
from jaxscale.runtime.monitor.writers import Writer, json_record

PLAIN = MonitorConfig(tensorboard=False, progress="off")


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.fault("H13")
def test_a_line_holds_the_step_first_and_the_names_in_the_order_given(tmp_path):
    writer = Writer(tmp_path, PLAIN, 10)
    writer.write(1, {"loss": 2.5, "mfu": None, "note": "a\nb"})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.5, "mfu": null, "note": "a\\nb"}\n'
    writer.close()


def test_numbers_that_json_lacks_become_null_and_are_named():
    record = json_record(3, {"loss": float("nan"), "grad_norm": float("-inf"), "lr": 0.1})
    record = json.loads(json.dumps(record, allow_nan=False))
    assert record == {"step": 3, "loss": None, "grad_norm": None, "lr": 0.1, "nonfinite": ["loss", "grad_norm"]}


def test_going_on_drops_later_steps_and_a_torn_last_line(tmp_path):
    first = Writer(tmp_path, PLAIN, 10)
    for step in range(1, 6):
        first.write(step, {"loss": float(step)})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    stream = io.StringIO()
    second = Writer(tmp_path, PLAIN, 10, start_step=3, stream=stream)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]
    assert "dropped 1 damaged line" in stream.getvalue()
    assert "metrics.jsonl: dropped steps 4 to 5, which are repeated\n" in stream.getvalue()
    second.write(4, {"loss": 0.5})
    second.close()
    assert [(record["step"], record["loss"]) for record in records(tmp_path)][2:] == [(3, 3.0), (4, 0.5)]


def test_a_run_that_begins_anew_keeps_nothing_of_what_was_there_and_says_so(tmp_path):
    for told in ("", "metrics.jsonl: dropped steps 0 to 2, which are repeated\n"):
        stream = io.StringIO()
        writer = Writer(tmp_path, PLAIN, 10, stream=stream)
        assert stream.getvalue() == told
        for step in range(3):
            writer.write(step, {"loss": 1.0})
        writer.close()
    assert [record["step"] for record in records(tmp_path)] == [0, 1, 2]


def test_a_last_line_without_its_newline_is_not_glued_to_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}')
    writer = Writer(tmp_path, PLAIN, 10, start_step=2)
    writer.write(3, {"loss": 3.0})
    writer.close()
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


def test_nothing_is_rewritten_when_nothing_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n')
    inode = path.stat().st_ino
    Writer(tmp_path, PLAIN, 10, start_step=1).close()
    assert path.stat().st_ino == inode


def test_every_line_is_on_disk_before_write_returns(tmp_path):
    writer = Writer(tmp_path, PLAIN, 10)
    writer.write(1, {"loss": 1.0})
    assert records(tmp_path) == [{"step": 1, "loss": 1.0}]
    writer.close()


def test_processes_that_are_not_primary_write_nothing(tmp_path, capsys):
    writer = Writer(tmp_path, MonitorConfig(), 10, primary=False)
    writer.write(1, {"loss": 1.0})
    writer.say("hello")
    writer.close()
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_the_first_the_last_and_every_nth_step_are_due(tmp_path):
    writer = Writer(tmp_path, MonitorConfig(log_every_steps=10, tensorboard=False, progress="off"), 35, start_step=3)
    assert [step for step in range(4, 36) if writer.due(step)] == [4, 10, 20, 30, 35]
    writer.close()


def test_log_every_steps_must_be_positive():
    with pytest.raises(ValueError, match="log_every_steps=0"):
        MonitorConfig(log_every_steps=0)


def tensorboard_events(folder):
    """All events, read with tensorboardX's own messages from the record format (length, crc, data, crc)."""
    from tensorboardX.proto import event_pb2

    for path in sorted((folder / "tensorboard").iterdir()):
        raw, at = path.read_bytes(), 0
        while at < len(raw):
            length = int.from_bytes(raw[at : at + 8], "little")
            yield event_pb2.Event.FromString(raw[at + 12 : at + 12 + length])
            at += length + 16


def test_tensorboard_gets_the_numbers_and_hides_the_steps_run_again(tmp_path):
    cfg = MonitorConfig(progress="off")
    first = Writer(tmp_path, cfg, 10)
    first.write(1, {"loss": 2.5, "mfu": None, "note": "text"})
    first.write(2, {"loss": 2.25})
    first.close()
    second = Writer(tmp_path, cfg, 10, start_step=1)  # within the same second: another file all the same
    second.write(2, {"loss": 2.125})
    second.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    events = list(tensorboard_events(tmp_path))
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert scalars == [(1, "loss", 2.5), (2, "loss", 2.25), (2, "loss", 2.125)]
    assert [event.step for event in events if event.session_log.status == 1] == [0, 2]  # 1: START, hide from here on


@pytest.mark.fault("F4")
def test_a_full_disk_is_said_once_and_every_record_is_there_when_it_has_room_again(tmp_path, monkeypatch):
    stream = io.StringIO()
    writer = Writer(tmp_path, MonitorConfig(progress="off"), 100, stream=stream)
    writer.write(1, {"loss": 1.0})
    writer.sinks[-1].records.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 9, hard))
    monkeypatch.setattr(sinks, "FLUSH_SECONDS", 0.0)  # every write is also a flush
    try:
        for step in range(2, 6):
            writer.write(step, {"loss": 1.0})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stream.getvalue().count("metrics.jsonl could not be written and will be retried: File too large") == 1
    assert stream.getvalue().count("tensorboard lacks metrics that metrics.jsonl has: File too large") == 1
    writer.write(6, {"loss": 1.0})
    writer.close()
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2  # of before and after


@pytest.mark.fault("F26")
def test_a_folder_that_was_removed_ends_no_run_and_its_loss_is_said(tmp_path):
    (tmp_path / "run").mkdir()
    stream = io.StringIO()
    writer = Writer(tmp_path / "run", PLAIN, 100, stream=stream)
    shutil.rmtree(tmp_path / "run")
    writer.write(1, {"loss": 1.0})
    writer.close()
    assert "metrics.jsonl lacks the last records" in stream.getvalue() and "No such file" in stream.getvalue()


def test_what_waits_for_a_disk_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxscale.runtime.monitor.records.MAX_UNWRITTEN", 3)
    (tmp_path / "run").mkdir()
    stream = io.StringIO()
    writer = Writer(tmp_path / "run", PLAIN, 100, stream=stream)
    (tmp_path / "run").rename(tmp_path / "away")
    for step in range(1, 6):
        writer.write(step, {"loss": 1.0})
    assert stream.getvalue().count("its oldest lines are lost") == 1
    (tmp_path / "away").rename(tmp_path / "run")
    writer.close()
    assert [record["step"] for record in records(tmp_path / "run")] == [3, 4, 5]
