"""A mixture that trains counts its tokens in records of its own, and says itself when it is sick."""

import dataclasses
import json

import numpy as np
import pytest
import tiny
from test_health_live import EXPERTS

from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.monitor.history import read_history
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.training import loop

MIXTURE = {
    "model": tiny.LLAMA | {
        "num_layers": 3, "experts": dict(number=8, chosen=2, mlp_dim=8, first_dense=1, bias=True, bias_rate=1.0),
    },
    "train_tokens": "110 steps", "monitor.progress": "off", "monitor.tensorboard": False, "eval.num_rows": 0,
    "monitor.statistics_every_steps": 200, "checkpoint.save_every_steps": 40, "checkpoint.verify_saved": False,
}  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def open_mixture():
    cfg = tiny.config(MIXTURE)
    make = tiny.reuse(make_program(cfg, resolve_budget(cfg, None)))
    return lambda folder, **more: open_run(
        tiny.config(MIXTURE | more), str(folder), lambda text: None, make_program=make
    )


@pytest.mark.soak
def test_counts_are_of_every_step_once_also_where_steps_are_run_again_and_a_sick_run_says_so(open_mixture, tmp_path):
    counted = []
    for stop_after in (40, 70, None):  # saved at 40 and 80; at 70 because it stops there
        run = open_mixture(tmp_path)
        run.experts.interval = run.experts.every_steps = 20  # so that the statistics' program need not be compiled
        if stop_after == 70:  # lost: as if it had been killed
            counts = [record for record in lines(tmp_path / "experts.jsonl")]
            assert [(record["step"], record["steps"]) for record in counts] == [(20, 20), (40, 20)]
            run.writer.experts(60, {"steps": 20, "first_layer": 1, "counts": [[7] * 8] * 2})
            run.writer.close()
            run = open_mixture(tmp_path)
            run.experts.interval = run.experts.every_steps = 20
        loop.train(dataclasses.replace(run, stop_after=stop_after))
        counted.append(lines(tmp_path / "experts.jsonl"))
    found = [(record["step"], record["steps"], record["first_layer"]) for record in counted[-1]]
    assert found == [(20, 20, 1), (40, 20, 1), (60, 20, 1), (80, 10, 1), (100, 20, 1)]
    for record in counted[-1]:
        counts_LE = np.array(record["counts"])
        assert counts_LE.shape == (2, 8) and len(set(counts_LE.sum(axis=1))) == 1
        assert 0 < counts_LE.sum() <= 2 * 2 * tiny.ROWS * tiny.SEQ_LEN * record["steps"]

    rows = [row for row in lines(tmp_path / "metrics.jsonl") if "loss" in row]
    assert EXPERTS - {"train/experts_dead"} <= rows[-1].keys(), "a start has too few steps to tell of dead ones"
    alert = next(event for event in read_events(tmp_path) if event["event"] == "alert")
    assert alert["what"] == "router_bias" and alert["causes"][0]["what"] == "the bias changes too fast"
    assert "model.experts.bias_rate is 1" in alert["causes"][0]["evidence"]

    history = read_history(tmp_path)
    assert history.experts.layers == range(1, 3) and [one.step for one in history.experts.windows][-1] == 100
