"""The average of the parameters is what numpy says, cut as moments are, and costs nothing where it is off."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tiny

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import named_leaves
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.run.startup_log import make_sample
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer
from jaxscale.runtime.training import loop
from jaxscale.runtime.training.loop import evaluate_with_ema

DECAY = 0.75
ON = {"train.ema.decay": DECAY}
QUIET = {"monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1}


def trained(program, batches, state=None):
    """The parameters and the average after each step, on the host, and the last state."""
    state, seen = program.init() if state is None else state, []
    for batch in batches:
        state, _ = program.train_step(state, tiny.on_mesh(program, batch))
        seen.append(tiny.host((state.params, state.ema)))
    return seen, state


def spoilt(batch):
    weights_BT = batch.weights.copy()
    weights_BT[1, 2] = np.nan
    return batch._replace(weights=weights_BT)


SHARED = (ON | {"train.ema.start_step": 2, "rules": "zero1", "mesh.fsdp": 2}, 2)  # moments are cut, parameters are not


@pytest.mark.slow
def test_it_is_the_average_that_numpy_computes_and_a_skipped_step_leaves_it_alone():
    program, start = tiny.program(*SHARED), SHARED[0]["train.ema.start_step"]
    expected = tiny.host(program.init().params)
    tiny.assert_same_bits(tiny.host(program.init().ema), expected)
    batches = [tiny.packed_batch(n) for n in range(5)]
    batches[3] = spoilt(batches[3])
    seen, state = trained(program, batches)
    for step, (params, ema) in enumerate(seen):
        if step == 3:
            tiny.assert_same_bits((params, ema), seen[2])
            continue
        kept = 0.0 if step < start else DECAY
        terms = [(kept, expected), (1 - kept, params)]
        scaled = [jax.tree.map(functools.partial(np.multiply, share, dtype=np.float64), tree) for share, tree in terms]
        expected = jax.tree.map(np.add, *scaled)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ema, expected)  # float32
        if step < start:
            tiny.assert_same_bits(ema, params)
    moments = state.opt_state[1].mu
    for average, moment in zip(jax.tree.leaves(state.ema), jax.tree.leaves(moments), strict=True):
        assert average.sharding.is_equivalent_to(moment.sharding, average.ndim)


@pytest.mark.soak
def test_it_changes_nothing_else():
    without = {name: value for name, value in SHARED[0].items() if not name.startswith("train.ema")}
    seen, _ = trained(tiny.program(*SHARED), [tiny.packed_batch(n) for n in range(2)])
    plain, _ = trained(tiny.program(without, 2), [tiny.packed_batch(n) for n in range(2)])
    for (params, _), (without, none) in zip(seen, plain):
        assert none is None
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), params, without
        )  # fused other


def test_where_it_is_off_a_checkpoint_has_no_trace_of_it():
    assert not [name for name in named_leaves(tiny.program().abstract_state) if name.startswith("ema")]
    assert [name for name in named_leaves(tiny.program(*SHARED).abstract_state) if name.startswith("ema")]


@pytest.mark.soak
def test_going_on_from_a_checkpoint_has_the_same_average_as_never_stopping(tmp_path):
    program = tiny.program(*SHARED)
    batches = [tiny.packed_batch(n) for n in range(4)]
    straight, _ = trained(program, batches)
    _, state = trained(program, batches[:2])
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(2, state, {})
    checkpoints.wait()
    seen, _ = trained(program, batches[2:], checkpoints.restore(2, program.abstract_state))
    checkpoints.close()
    tiny.assert_same_bits(seen, straight[2:])


@pytest.mark.slow
def test_both_are_validated(tmp_path):
    few = {"train_tokens": "6 steps", "eval.num_rows": 8, "eval.every_steps": 3}
    cfg, make = tiny.config(QUIET | few | SHARED[0]), tiny.reuse(tiny.program(*SHARED))  # compiled by a test above
    run = open_run(cfg, str(tmp_path / "run"), log=lambda text: None, make_program=make)
    state = loop.train(dataclasses.replace(run, save_every_steps=0))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    both = [line for line in lines if "validation_ema/loss" in line]
    assert [line["step"] for line in both] == [0, 3, 6]
    first, last = both[0], both[-1]
    assert first["validation_ema/loss"] == pytest.approx(first["validation/loss"], rel=1e-6)
    assert last["validation_ema/loss"] != last["validation/loss"]
    assert last["validation_ema/loss"] == run.evaluate(state.ema)["validation/loss"]


@pytest.mark.soak
def test_a_sample_is_of_the_one_that_is_asked_for():
    shared, tokenizer = tiny.program({"model.vocab_size": 257}), ByteTokenizer()
    settings = ON | {"model.vocab_size": 257, "sample.num_tokens": 9, "sample.prompt": "A"}
    asking = lambda ema: tiny.config(settings | {"sample.ema": ema})
    write = {ema: make_sample(dataclasses.replace(shared, cfg=asking(ema)), tokenizer) for ema in (False, True)}
    weights, average = (jax.tree.map(lambda leaf, by=by: leaf * by, shared.init().params) for by in (2, -2))
    text, other = (write[False](shared.abstract_state._replace(params=params)) for params in (weights, average))
    assert text != other and text[0] == other[0] == "A"
    assert write[True](shared.abstract_state._replace(params=weights, ema=average)) == other


def test_validation_without_it_is_as_before():
    state = tiny.program().abstract_state
    assert evaluate_with_ema(lambda params: {"validation/loss": 1.0}, state) == {"validation/loss": 1.0}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (ON | {"optim.offload_params": True}, "train.ema.decay and optim.offload_params cannot be combined"),
        ({"sample.ema": True}, "sample.ema=true needs an EMA of the weights"),
        ({"train.ema.decay": 1.0}, "decay=1.0 must be at least 0 and below 1"),
        ({"train.ema.start_step": 3}, "start_step=3 must be at least 0, and requires decay above 0"),
    ],
)
def test_what_cannot_work_is_refused(overrides, told):
    with pytest.raises(ValueError, match=told):
        tiny.config(overrides)
