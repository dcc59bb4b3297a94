"""A batch in which no token has weight changes nothing, is reported as what it is, and does not end the run."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.config import RunConfig
from jaxscale.core.config import GuardConfig
from jaxscale.core.guard import GOOD, MIN_WINDOW_STEPS, NO_TARGETS, SKIP, check, init_guard
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.eval.perplexity import evaluate, make_eval_step
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.training import loop

EMPTY = tiny.packed_batch(0)._replace(weights=np.zeros((tiny.ROWS, tiny.SEQ_LEN), np.float32))
EXPERTS = {
    "model": tiny.LLAMA | {"experts": dict(number=4, chosen=2, mlp_dim=8, bias=True)},
    "train.aux_losses": {"balance_loss": 0.01, "router_z_loss": 0.001},
}
PIPELINE = {"mesh.pipeline": 2, "model.remat": "full", "train.num_microbatches": 4}
soak = functools.partial(pytest.param, marks=pytest.mark.soak)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "num_devices"),
    [
        ({}, 1),
        soak(EXPERTS | {"optim.name": "muon"}, 1),
        soak(EXPERTS | PIPELINE | {"optim.name": "sgd"}, 2),
        soak({"mesh.context": 2, "mesh.data": 2, "optim.name": "lamb", "optim.moment_dtype": "int8"}, 4),
        soak({"model.compute_dtype": "float16", "train.ema.decay": 0.9, "optim.name": "adafactor"}, 2),
        soak({"mesh.tensor": 2, "train.num_microbatches": 2, "optim.offload_moments": True}, 2),
    ],
    ids=["dense", "experts", "stages", "context", "float16", "tensor"],
)
def test_a_step_without_targets_leaves_the_state_as_it_was(overrides, num_devices):
    cfg = schema.from_dict(RunConfig, schema.merge(tiny.VALUES, overrides))
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[:num_devices])
    state = program.init()
    for trained in range(2):  # before the first good step, and after one
        before = tiny.host(state)
        state, metrics = program.train_step(state, tiny.on_mesh(program, EMPTY))
        after, metrics = tiny.host(state), tiny.host(metrics)
        for name in ("params", "opt_state", "ema", "guard"):
            tiny.assert_same_bits(getattr(after, name), getattr(before, name))
        assert after.step == before.step + 1
        assert all(np.isfinite(value).all() for value in jax.tree.leaves(metrics))
        assert metrics["real_tokens"] == 0 and metrics["verdict"] == NO_TARGETS and not metrics["skipped"]
        state, metrics = program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(1)))
        assert metrics["verdict"] == GOOD and np.isfinite(metrics["loss"])


def test_steps_without_targets_enter_no_window_and_count_as_no_trouble():
    state, judge = init_guard(10), jax.jit(functools.partial(check, GuardConfig(window_steps=10, spike_sigma=4.0)))
    for _ in range(2 * MIN_WINDOW_STEPS):
        ok, verdict, state = judge(state, jnp.float32(3.0), jnp.float32(1.0))
    for loss, norm in ((0.0, 0.0), (1e6, 1e5)) * 20:  # the second as losses of experts, which no token divides
        ok, verdict, after = judge(state, jnp.float32(loss), jnp.float32(norm), no_targets=jnp.bool(True))
        assert not ok and verdict == NO_TARGETS
        tiny.assert_same_bits(after, state)
    assert judge(state, jnp.float32(3.0), jnp.float32(1.0), no_targets=jnp.bool(False))[1] == GOOD
    ordered = judge(state._replace(order=jnp.int32(SKIP)), jnp.float32(0), jnp.float32(0), no_targets=jnp.bool(True))
    assert not ordered[0]
    assert judge(state, jnp.float32(np.nan), jnp.float32(0), no_targets=jnp.bool(True))[1] != NO_TARGETS


def drop_most_targets(batch, n, rows):
    """A transform of data.transforms: two of three batches lose their targets."""
    return batch if n % 3 == 2 else batch._replace(weights=np.zeros_like(batch.weights))


def test_a_run_of_which_most_batches_have_no_targets_goes_to_its_end(tmp_path):
    values = {
        "data.transforms": ("test_no_targets:drop_most_targets",), "train_tokens": "40 steps", "eval.num_rows": 0,
        "monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1,
        "checkpoint.save_every_steps": 0,
    }  # fmt: skip
    make = tiny.reuse(tiny.program())
    run = open_run(tiny.config(values), str(tmp_path / "run"), lambda line: None, make_program=make)
    state = loop.train(run)
    assert int(state.step) == 40
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    has_targets = [record["batch_index"] % 3 == 2 for record in records]
    assert [record["loss"] is not None for record in records] == has_targets
    assert [record["train/real_tokens"] > 0 for record in records] == has_targets
    assert not any(record["skipped"] or record.get("nonfinite") for record in records)
    alarms = [event for event in read_events(tmp_path / "run") if event["event"] == "alarm"]
    assert [event["batch"] for event in alarms] == [n for n in range(40) if n % 3 != 2]
    assert {event["what"] for event in alarms} == {"no targets"}


@pytest.mark.slow
def test_a_validation_set_without_targets_has_no_loss():
    program = tiny.program()
    step = make_eval_step(program.model.unstaged.token_losses, 1)
    nowhere = np.zeros((tiny.ROWS, tiny.SEQ_LEN), np.int32)
    assert evaluate(step, program.init().params, [(EMPTY, nowhere, nowhere)], ["text"]) == {}
