"""Benchmarks of the step and the run: what they print. Nothing here asserts a speed."""

import json

import pytest
import tiny

from benchmarks import layer_statistics, pipeline_stages, restart, sampling, survive
from jaxscale.cli import bench_loop
from jaxscale.core.axes.pipeline_schedules import make_schedule
from jaxscale.system.exits import BadInput

TINY = [
    "--spec=T",
    "--config.seq_len=16",
    "--config.batch_tokens=8 rows",
    "--config.model.vocab_size=32",
    "--config.model.num_layers=1",
    "--config.model.embed_dim=16",
    "--config.model.num_heads=2",
    "--config.model.num_kv_heads=2",
    "--config.model.head_dim=8",
    "--config.model.mlp_dim=16",
    "--config.model.attention=xla",
]
BESIDE = [  # which takes time beside the steps that are timed
    "--config.evals.words.kind=text",
    "--config.evals.words.files=README.md",
    "--config.export.every_steps=100",
    "--config.checkpoint.save_every_steps=50",
]


@pytest.mark.soak
def test_statistics_are_measured_beside_the_step(capsys):
    arguments = ["--steps=2", "--rounds=1", "--config.monitor.statistics_every_steps=50", *TINY]
    assert layer_statistics.main(["--json", *arguments]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["every_steps"] == 50 and record["numbers"] == 4 + 4 * 4  # one layer, embedding, head and norms
    assert record["cost"] == pytest.approx(record["statistics_seconds"] / record["step_seconds"] / 50)
    assert record["loop_seconds"]["with"] > 0 and len(record["loop_added_seconds"]) == 1
    assert f"every 50 steps that is {record['cost']:.2%}" in "\n".join(layer_statistics.statistics_lines(record))


@pytest.mark.parametrize(("cost", "verdict"), [(0.0123, "1.23% of the time: under 2%"), (0.02, ": NOT under 2%")])
def test_statistics_say_what_a_look_at_the_layers_costs(cost, verdict):
    record = dict(
        spec="T", attention="xla", numbers=44, every_steps=100, steps=20, rounds=3, step_seconds=0.1,
        statistics_seconds=0.12, statistics_in_steps=[1.1, 1.2, 1.3], cost=cost, loop_added_seconds=[0.1, 0.12, 0.2],
        loop_seconds={"without": 0.1, "with": 0.106}, loop_cost=0.012, compile_seconds={"step": 2.0, "statistics": 3.0},
        device_bytes={"step": 2**20, "statistics": None}, devices="1 x cpu",
    )  # fmt: skip
    lines = "\n".join(layer_statistics.statistics_lines(record))
    assert verdict in lines and "1.20 steps, the median of 3 rounds (1.10 to 1.30)" in lines
    assert "with one; added +120.0 ms" in lines and "step 1 MiB, statistics unknown" in lines


@pytest.mark.soak
def test_what_surviving_costs_is_told_part_by_part(monkeypatch, capsys):
    monkeypatch.setattr(survive, "SAVED_BYTES", 100_000)
    monkeypatch.setattr(survive, "CALLS", 5)
    guards, open_run = [], bench_loop.open_run
    seen = lambda cfg, *rest, **more: (guards.append(cfg.train.guard), open_run(cfg, *rest, **more))[1]
    monkeypatch.setattr(bench_loop, "open_run", seen)
    assert survive.main(["--json", "--steps=2", "--rounds=1", *TINY, *BESIDE]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [guard.spike_ratio for guard in guards] == [0.0]  # bare steps train on one batch alone
    assert set(record["parts_seconds"]) == {"guard", "fingerprints of a save", "watchdog", "lock"}
    assert set(record["loop_seconds"]) == {"without", "with"} and record["saved_bytes"] == 100_000
    assert min(record["step_seconds"], record["save_blocked_seconds"], *record["parts_seconds"].values()) > 0
    for part, blocked, told in ((0.009, 0.09, "under"), (0.011, 0.11, "NOT under")):
        lines = survive.survive_lines(record | {"parts_of_a_step": part, "save_blocked_seconds": blocked})
        assert f"of a step: {told} 1%" in "\n".join(lines) and f"({told} 100)" in lines[-1]


def test_a_restart_is_told_by_the_medians_of_its_turns():
    turns = [
        {"phases": {name: 1.0 + n for name, _ in restart.PHASES}, "still_seconds": 10.0 * n, "step": n}
        | {"steps_lost": n, "work_lost_seconds": 7.0 - n}
        for n in (3, 1, 2)
    ]
    middle = restart.medians(turns)
    assert middle["phases"]["restore"] == 3.0 and middle["still_seconds"] == 20.0 and middle["work_lost_seconds"] == 5.0
    record = {"processes": 4, "seconds": 20, "rounds": 3, "load": 1.0, "ways": {"local copies": middle}}
    lines = restart.restart_lines(record)
    assert "medians of 3 (load 1.0)" in lines[0] and any(
        line.split()[-1] == "2" for line in lines if "steps lost" in line
    )
    assert restart.STEP.match("step 61/489  loss 5.645  n/a tok/s")
    assert not restart.STEP.match("step 60/489  validation  loss 5.628  bits_per_byte 8.119")


@pytest.mark.soak
def test_writing_with_a_cache_is_timed_beside_full_passes(capsys):
    tiny_model = ["model.num_layers=1", "model.embed_dim=16", "model.head_dim=8", "model.num_heads=2"]
    tiny_model += ["model.num_kv_heads=2", "model.mlp_dim=16", "model.vocab_size=32", "mesh.data=8", "mesh.fsdp=1"]
    flags = [f"--config.{setting}" for setting in tiny_model]
    flags += ["--config.data.name=tokens", "--config.data.files=/nowhere/manifest.json"]  # no data are asked for
    sizes = ["--spec=T", "--prompt_tokens=20", "--num_tokens=4", "--rows=3"]
    assert sampling.main([*sizes, "--json", *flags]) == 0
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert "compiling for 8 rows, prompts of up to 24 tokens" in shown.err
    assert (record["rows"], record["mesh"]) == (8, "data=8")  # as many rows as the mesh can share
    assert record["ratio"] == pytest.approx(record["cached_tok_s"] / record["uncached_tok_s"], rel=0.02)
    told = "".join(sampling.sample_lines(record))
    assert told.startswith("T, ") and f"cached: {record['ratio']:,.2f} times" in told


def test_the_simulator_s_unit_counts_what_each_stage_does():
    cfg = tiny.config({"model.num_layers": 8, "train.num_microbatches": 4})
    passes = lambda name, V, M: pipeline_stages.in_units(cfg, make_schedule(name, 2, V, M))
    head = 3 * cfg.model.vocab_size * cfg.model.embed_dim / cfg.model.block_matrix_params / 2  # of each stage
    assert passes("1f1b", 1, 4) == pytest.approx(5 * 4 * (1 + 3) + 4 * head)  # 4 layers a stage
    assert passes("1f1b", 2, 4) == pytest.approx(9 * 2 * (1 + 3) + 4 * head)  # two chunks of 2
    assert passes("gpipe", 1, 4) == passes("1f1b", 1, 4)
    assert passes("zero_bubble", 1, 4) == pytest.approx(passes("1f1b", 1, 4) - 4)  # gradients of one turn's weights


@pytest.mark.soak
def test_a_step_of_each_schedule_is_timed_beside_the_simulator(monkeypatch):
    monkeypatch.setattr(pipeline_stages, "cuts", lambda stages: [pipeline_stages.Cut("1f1b", 1, 4)])
    told = []
    record = pipeline_stages.measure_stages(tiny.config(), 2, 1, told.append)
    (row,) = record["rows"]
    assert row["ratio"] == pytest.approx(1.0, rel=1e-12)
    assert row["measured_s"] > 0 and row["bubble"] == pytest.approx(0.2)
    assert told[0] == pipeline_stages.COLUMNS and told[1].split()[:4] == ["1f1b", "1", "4", "20.0%"]


def test_a_restart_needs_a_config():
    with pytest.raises(BadInput, match="pass --config=FILE"):
        restart.main(["--processes=2"])
