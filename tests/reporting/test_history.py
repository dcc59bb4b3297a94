"""A work folder is read as it is: torn, half, overlapping, still being written, or a million lines long."""

import json
import math

import pytest
from gcs_emulator import Emulator

from jaxscale.runtime.monitor import records
from jaxscale.runtime.monitor.history import read_history
from jaxscale.runtime.monitor.records import abandon


def write(folder, rows, name="metrics.jsonl"):
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def losses(found):
    return list(zip(*found.series("loss")))


def test_training_and_validation_of_one_step_are_both_kept(tmp_path):
    vitals = {"goodput/wall_seconds": 9.0, "goodput/step_seconds": 8.0, "device/power_watts": 300.0}
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "validation/loss": 2.5}]
    rows += [{"step": 2, "evals/wiki/acc": 0.5}]
    write(tmp_path, [row | vitals for row in rows])
    found = read_history(tmp_path)
    assert losses(found) == [(1, 3.0), (2, 2.0)] and found.series("validation/loss") == ([2], [2.5])
    assert found.series("evals/wiki/acc") == ([2], [0.5])
    assert found.abandoned == () and found.last_step == 2 and not any("twice" in line for line in found.problems)
    write(tmp_path, [row | vitals for row in [*rows, *rows[1:]]])  # killed after them, and run again
    found = read_history(tmp_path)
    assert losses(found) == [(1, 3.0), (2, 2.0)] and len(found.rows) == 4 and len(found.abandoned) == 3


def test_a_torn_last_line_and_damaged_ones_are_left_out_and_told(tmp_path):
    text = '{"step": 1, "loss": 3.0}\n{"st\n[1]\n{"loss": 1.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    found = read_history(tmp_path)
    assert losses(found) == [(1, 3.0), (2, 2.0)]
    told = "\n".join(found.problems)
    assert (
        "2 damaged lines skipped" in told and "1 line without a step" in told and "the last line is incomplete" in told
    )


def test_a_whole_last_line_without_its_newline_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}')
    assert losses(read_history(tmp_path)) == [(1, 3.0), (2, 2.0)]


def test_steps_that_are_told_twice_count_once_and_the_earlier_are_abandoned(tmp_path):
    first = [{"step": step, "loss": 9.0} for step in range(1, 6)] + [{"step": 3, "validation/loss": 8.0}]
    write(tmp_path, first[:5] + [{"step": step, "loss": 1.0} for step in range(3, 7)])
    found = read_history(tmp_path)
    assert losses(found) == [(1, 9.0), (2, 9.0), (3, 1.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    assert [(row["step"], row["rewind"]) for row in found.abandoned] == [(3, None), (4, None), (5, None)]
    assert any("steps 3 to 5 more than once" in line for line in found.problems)


def test_a_rewound_part_is_read_once_whatever_moment_a_crash_left_it_in(tmp_path):
    rows = [{"step": step, "loss": float(step), "step_seconds": 0.1 * step} for step in range(1, 7)]
    write(tmp_path, rows)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert abandon(tmp_path, 4, 1) == 2
    clean = read_history(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(before)  # as if the second of the two files had not been written
    torn = read_history(tmp_path)
    for found in (clean, torn):
        assert found.series("loss")[0] == [1, 2, 3, 4]
        assert [(row["step"], row["rewind"]) for row in found.abandoned] == [(5, 1), (6, 1)]


def test_numbers_that_are_none_are_named(tmp_path):
    text = '{"step": 1, "loss": NaN, "x": Infinity}\n{"step": 2, "loss": null, "nonfinite": ["loss"], "x": 1e999}\n'
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "loss": 1' + "0" * 30 + "}\n")
    found = read_history(tmp_path)
    assert [row["loss"] for row in found.rows] == [None, None, None] and found.series("x") == ([], [])
    assert [row["nonfinite"] for row in found.rows] == [["loss", "x"], ["loss", "x"], ["loss"]]


def test_missing_and_damaged_files_are_told_in_words(tmp_path):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "forecast.json").write_text('{"tokens": [1], "low": [], "middle": [1], "high": [1]}')
    found = read_history(tmp_path)
    assert found.config == {} and found.forecast is None and found.rows == ()
    told = "\n".join(found.problems)
    assert "metrics.jsonl does not exist" in told and "config.json is damaged" in told and "forecast.json needs" in told


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is not a work folder: it has none of metrics.jsonl"),
        (lambda path: path.write_text(""), "is a file"),
    ],
)
def test_a_folder_without_a_run_is_one_line(tmp_path, make, told):
    make(tmp_path / "x")
    with pytest.raises(ValueError, match=told) as error:
        read_history(tmp_path / "x")
    assert "\n" not in str(error.value)


def test_thinning_keeps_every_spike_and_says_so(tmp_path):
    rows = [{"step": n, "loss": 2 + math.sin(n), "grad_norm": 1.0, "step_seconds": 1.0} for n in range(1, 20_001)]
    rows[7776]["loss"], rows[3333]["grad_norm"], rows[5554]["step_seconds"] = 50.0, 70.0, 90.0
    rows[1234] |= {"skipped": 1}
    write(tmp_path, rows)
    found = read_history(tmp_path, most_values=4000)
    assert found.lines == 20_000 and len(found.rows) * 4 <= 2 * 4000 + 100
    assert max(found.series("loss")[1]) == 50 and max(found.series("grad_norm")[1]) == 70
    assert max(found.series("step_seconds")[1]) == 90 and any(row.get("skipped") for row in found.rows)
    assert found.series("loss")[0] == sorted(found.series("loss")[0])
    assert any("20,000 lines" in line for line in found.problems)
    assert len(read_history(tmp_path, most_values=None).rows) == 20_000


@pytest.mark.parametrize("count", range(95, 131))
def test_thinning_keeps_the_last_row_which_says_how_far_a_run_is(tmp_path, count):
    write(tmp_path, [{"step": n, "loss": 2.0, "grad_norm": 1.0} for n in range(1, count + 1)])
    assert read_history(tmp_path, most_values=30).last_step == count


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 100)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n' + "x" * 1000 + '\n{"step": 2, "loss": 2.0}\n')
    found = read_history(tmp_path)
    assert losses(found) == [(1, 1.0), (2, 2.0)] and any("1 damaged line" in line for line in found.problems)


def test_a_folder_in_a_bucket_is_read_where_it_is(monkeypatch):
    with Emulator() as gcs:
        for name, value in gcs.environment().items():
            monkeypatch.setenv(name, value)
        gcs.put("bucket", "run/metrics.jsonl", b'{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n')
        gcs.put("bucket", "run/events.jsonl", b'{"time": "2026-01-01T00:00:00+00:00", "event": "started", "step": 0}\n')
        gcs.put(
            "bucket", "run/supervise.jsonl", b'{"time": "2026-01-01T00:00:00+00:00", "event": "end", "number": 1}\n'
        )
        found = read_history("gs://bucket/run")
        assert losses(found) == [(1, 3.0), (2, 2.0)] and len(found.events) == len(found.supervised) == 1
        assert found.name == "run" and found.written_at is not None
        with pytest.raises(ValueError, match="is not a work folder"):
            read_history("gs://bucket/nothing")
