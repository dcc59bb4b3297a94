"""A run that goes on is the run that never stopped: at any step, with any packing, on any other devices."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal

import jax
import numpy as np
import pytest
import tiny

from jaxscale import build, config, schema
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.training import loop
from jaxscale.system.exits import Exit, Stop

pytestmark = pytest.mark.slow

STEPS = 10
LENGTHS = (32, 64, 128, 48, 50)  # tokens of the documents, their end among them, in rows of 64
CHAINED = ("loss", "grad_norm", "learning_rate", "tokens_hash", "batch_index", "tokens_seen")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents that fill a row, half a row, two rows, or none of these."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(30):
        length = LENGTHS[number % len(LENGTHS)] - 1
        (folder / f"{number:02}.txt").write_text((f"{number} " * length)[:length])
    return folder


def settings(corpus, overrides=None):
    values = {
        "seq_len": 64, "batch_tokens": "8 rows", "train_tokens": f"{STEPS} steps",
        "model.vocab_size": 272, "model.num_layers": 1, "mesh.data": 4, "mesh.fsdp": 2,
        "data.name": "files", "data.files": str(corpus / "*.txt"), "data.packing": "concat", "data.val_fraction": 0,
        "checkpoint.save_every_steps": 4, "monitor.log_every_steps": 1, "monitor.tensorboard": False,
        "monitor.progress": "off",
    }  # fmt: skip
    return tiny.config(values | (overrides or {}))


MADE = {}


def make_once(cfg, budget, devices=None):
    """A program is made once for a mesh and a horizon: how rows are packed changes nothing in it."""
    key = json.dumps([dataclasses.asdict(cfg.mesh), cfg.rules, budget.total_steps, devices and len(devices)])
    if key not in MADE:
        MADE[key] = build.make_program(cfg, budget, devices)
    return dataclasses.replace(MADE[key], cfg=cfg)


def train(cfg, workdir, stop_after=None):
    """Trains to the end, or is told to stop during step `stop_after` (counted from 1)."""
    run = open_run(cfg, str(workdir), log=lambda text: None, make_program=make_once)
    if run is None:
        return None
    steps = [run.start_step]

    def train_step(state, batch):
        steps[0] += 1
        if steps[0] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return run.train_step(state, batch)

    try:
        return tiny.host(loop.train(dataclasses.replace(run, train_step=train_step)))
    except Stop as stop:
        assert (stop.code, steps[0]) == (Exit.PREEMPTED, stop_after), str(stop)


def metrics(workdir, *names):
    lines = [json.loads(line) for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: tuple(line[name] for name in names) for line in lines if "loss" in line}


def test_the_documents_end_inside_rows_and_at_their_ends_and_an_epoch_inside_a_batch(corpus):
    cfg = settings(corpus)
    data = open_data(cfg.data, seq_len=64, vocab_size=272, seed=1, say=lambda text: None)
    batches, rest = divmod(len(data.train_rows), 8)
    assert batches == 3 and rest  # steps 4 and 8 read rows of two epochs: stops lie before and after them
    depths = data.train_rows.locate(np.arange(len(data.train_rows))).depths
    assert (depths == 0).any() and (depths > 0).any()  # rows that begin with a document, and inside one


AWKWARD = (1, 3, 4, 5, 9)  # the first; at the epoch's end; the step of a save; after it; before the last


@pytest.mark.fault("F3")
@pytest.mark.soak  # tests/test_main.py stops a run three times
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_stopped_at_awkward_steps_it_ends_in_the_same_state_bit_for_bit(corpus, tmp_path, packing):
    cfg = settings(corpus, {"data.packing": packing})
    straight = train(cfg, tmp_path / "straight")
    for stop_after in AWKWARD:
        assert train(cfg, tmp_path / "run", stop_after) is None
    tiny.assert_same_bits(train(cfg, tmp_path / "run"), straight)
    assert metrics(tmp_path / "run", *CHAINED) == metrics(tmp_path / "straight", *CHAINED)
    assert train(cfg, tmp_path / "run") is None and sorted(metrics(tmp_path / "run", "loss")) == list(
        range(1, STEPS + 1)
    )


@pytest.fixture(scope="module")
def stopped_and_reference(corpus, tmp_path_factory):
    """(a run on a mesh of 4 x 2 that was stopped after step 4, the same gone on with there, its state after step 4)."""
    folder = tmp_path_factory.mktemp("topologies")
    cfg = settings(corpus, {"checkpoint.save_every_steps": 0})
    train(cfg, folder / "stopped", stop_after=4)
    shutil.copytree(folder / "stopped", folder / "reference")
    run = open_run(cfg, str(folder / "reference"), log=lambda text: None, make_program=make_once)
    state = tiny.host(run.state)
    loop.train(run)
    return folder / "stopped", metrics(folder / "reference", "loss", "tokens_hash"), state


@pytest.mark.fault("F12")
@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        pytest.param({"mesh.data": 8, "mesh.fsdp": 1}, 8, marks=pytest.mark.soak),
        ({"mesh.data": 1, "mesh.fsdp": 1}, 1),
        pytest.param({"mesh.data": 2, "mesh.fsdp": 4}, 8, marks=pytest.mark.soak),
        pytest.param({"mesh.data": 2, "mesh.fsdp": 2}, 4, marks=pytest.mark.soak),
        pytest.param({"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "rules": "zero1"}, 8, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_other_devices_go_on_with_the_same_state_and_batches(corpus, stopped_and_reference, tmp_path, mesh, devices):
    stopped, expected, state = stopped_and_reference
    on = jax.devices()[:devices]
    make = lambda cfg, budget: make_once(cfg, budget, on)
    shutil.copytree(stopped, tmp_path / "run")
    cfg = settings(corpus, {"checkpoint.save_every_steps": 0} | mesh)
    run = open_run(cfg, str(tmp_path / "run"), log=lambda text: None, make_program=make)
    first = jax.tree.leaves(run.state.params)[0]
    assert run.start_step == 4 and len(first.sharding.device_set) == devices
    tiny.assert_same_bits(tiny.host(run.state), state)
    loop.train(run)
    found = metrics(tmp_path / "run", "loss", "tokens_hash")
    assert {step: seen for step, (_, seen) in found.items()} == {step: seen for step, (_, seen) in expected.items()}
    apart = [abs(found[step][0] - expected[step][0]) for step in found]
    assert len(found) == STEPS and max(apart) < 1e-4  # float32 sums taken in another order
    assert np.isfinite(apart).all()


@pytest.mark.fault("F12")
def test_the_config_refuses_no_mesh_when_a_run_goes_on():
    assert {"mesh", "rules"} <= schema.changeable(config.RunConfig)
