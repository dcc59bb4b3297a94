"""What grows faster than the documents is named, and every stage that is measured does its work."""

import pytest

from benchmarks.scale_loader import STAGES, costs_of, growth, loader_lines, make_set


def record(documents, cpu_seconds, memory_bytes):
    stage = {"cpu_seconds": cpu_seconds, "seconds": 1.0, "memory_bytes": memory_bytes, "count": 2}
    return {"documents": documents, "index_bytes": 6.8, "names_bytes": 16.0, "stages": {"open": stage}}


def test_growth_beyond_the_documents_is_a_finding_and_what_is_too_small_is_none():
    assert growth([record(100, 1.0, 50e6), record(400, 4.3, 60e6)]) == []
    assert growth([record(100, 1e-5, 10), record(400, 1e-3, 1000)]) == []
    told = growth([record(100, 1.0, 50e6), record(400, 4.5, 230e6)])
    assert [line.partition(" grows")[0] for line in told] == ["open: cpu_seconds", "open: memory_bytes"]
    assert "4.50 times while the documents grow 4.00 times, to 400" in told[0]
    assert loader_lines([record(100, 1.0, 50e6)])[-1] == "nothing grows faster than the documents"


@pytest.mark.slow
def test_every_stage_runs_on_a_made_up_set(tmp_path):
    make_set(tmp_path / "set", 3000, 4)
    for stage in STAGES.values():
        assert stage(tmp_path / "set") >= 1
    found = costs_of(lambda: len(bytearray(30_000_000)) // 30_000_000)
    assert found["count"] == 1 and found["memory_bytes"] < 60e6
