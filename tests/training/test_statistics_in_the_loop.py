"""In the loop: at the cadence, in the record of its step, outside the throughput, and without a bit of difference."""

import dataclasses
import json
import time

import jax
import numpy as np
import pytest
import tiny

from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.training import loop

QUIET = {"monitor.progress": "off", "monitor.log_every_steps": 1, "eval.num_rows": 0, "checkpoint.save_every_steps": 0}
MESH = {"mesh.data": 4, "mesh.fsdp": 2, "train.num_microbatches": 2}


def open_tiny(folder, every, overrides=None, program=None):
    """A run of 7 steps, on one device unless another program is given."""
    overrides = {"train_tokens": "7 steps", "monitor.statistics_every_steps": every} | (overrides or {})
    cfg, make = tiny.config(QUIET | overrides), tiny.reuse(program or tiny.program())
    return open_run(cfg, str(folder), log=lambda text: None, make_program=make)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def stats_of(record):
    return {name: value for name, value in record.items() if name.startswith("stats/")}


@pytest.mark.soak
def test_a_run_that_is_watched_at_every_step_is_the_same_bit_for_bit(tmp_path):
    program = tiny.program(MESH, 8)
    run = lambda every: open_tiny(tmp_path / str(every), every, MESH, program)
    states = {every: tiny.host(loop.train(run(every))) for every in (0, 1)}
    tiny.assert_same_bits(states[0], states[1])
    plain, watched = records(tmp_path / "0"), records(tmp_path / "1")
    for name in ("loss", "grad_norm", "tokens_hash"):
        assert [record[name] for record in plain] == [record[name] for record in watched]
    assert not any(stats_of(record) for record in plain) and all(stats_of(record) for record in watched)


@pytest.mark.slow
def test_numbers_are_in_the_record_of_their_step_and_in_tensorboard(tmp_path):
    run, seen = open_tiny(tmp_path / "run", 3, {"monitor.log_every_steps": 5}), []
    write = run.writer.write
    run.writer.write = lambda step, metrics: (seen.append((step, dict(metrics))), write(step, metrics))
    loop.train(run)
    found = {record["step"]: stats_of(record) for record in records(tmp_path / "run")}
    assert sorted(found) == [1, 3, 5, 6, 7]  # those that are logged, and those that are watched
    assert [step for step, numbers in found.items() if numbers] == [3, 6]
    for record in records(tmp_path / "run"):
        if numbers := stats_of(record):
            norms = [value for name, value in numbers.items() if name.startswith("stats/grad_norm/")]
            np.testing.assert_allclose(np.linalg.norm(norms), record["grad_norm"], rtol=1e-5)
    events = b"".join(path.read_bytes() for path in (tmp_path / "run" / "tensorboard").iterdir())
    assert events.count(b"stats/activation_rms/01") == 2


def test_they_are_fetched_when_the_step_itself_is_on_its_way_and_all_at_once(tmp_path, monkeypatch):
    run, events = open_tiny(tmp_path / "run", 2, {"train_tokens": "4 steps"}), []

    def called(name, f):
        def spy(*args):
            events.append(name)
            return f(*args)

        return spy

    device_get = jax.device_get
    monkeypatch.setattr(
        jax, "device_get", lambda tree: called("fetch" if "loss" in tree else "fetch stats", device_get)(tree)
    )
    wired = dataclasses.replace(
        run, train_step=called("step", run.train_step), statistics=called("stats", run.statistics)
    )
    loop.train(wired)
    second = ["stats", "step", "fetch", "fetch stats"]
    assert events == ["step", *second, "step", "fetch", *second, "fetch"]


@pytest.mark.soak
def test_their_time_is_no_training_time(tmp_path):
    slow = 0.5

    def statistics(state, batch):
        time.sleep(slow)
        return {"mlp_rms": {"0": jax.numpy.ones(2)}}

    run = open_tiny(tmp_path / "run", 1)
    loop.train(dataclasses.replace(run, statistics=statistics))
    seconds = [record["step_seconds"] for record in records(tmp_path / "run") if record["step_seconds"] is not None]
    assert len(seconds) == 6 and np.median(seconds) < slow


@pytest.mark.soak
def test_the_program_is_compiled_once_in_a_run(tmp_path):
    run = open_tiny(tmp_path / "run", 2)
    phases = []
    watchdog = run.services.watchdog
    dog = type(
        "Dog", (), {"phase": lambda self, name, step=None: (phases.append((name, step)), watchdog.phase(name, step))[1]}
    )()
    loop.train(dataclasses.replace(run, services=run.services._replace(watchdog=dog)))
    assert run.statistics._cache_size() == 1
    assert phases.count(("statistics", 2)) == phases.count(("statistics", 4)) == 2 and ("compile", 2) not in phases


@pytest.mark.slow
def test_the_console_line_is_as_it_was(tmp_path, capsys):
    lines = {}
    for every in (0, 1):
        loop.train(open_tiny(tmp_path / str(every), every, {"monitor.progress": "lines"}))
        lines[every] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    names = lambda line: [word for word in line.split() if word.isalpha()]
    assert len(lines[1]) == 7 and [names(line) for line in lines[0]] == [names(line) for line in lines[1]]


def test_a_negative_cadence_is_refused():
    with pytest.raises(ValueError, match="statistics_every_steps=-1 must be at least 0 .0: off."):
        tiny.config({"monitor.statistics_every_steps": -1})
