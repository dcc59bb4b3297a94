"""A trained parameter that gets no gradient is found by name, in the statistics and in the alert of a real run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
import tiny

from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.training import loop
from jaxscale.runtime.training.statistics_runner import flatten_statistics

ZERO = "stats/zero_grad/"
LORA = {"lora.rank": 3}
QUIET = {
    "monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0,
    "checkpoint.save_every_steps": 0, "train_tokens": "6 steps", "monitor.statistics_every_steps": 1,
}  # fmt: skip


def without_gradient(state):
    """The state with a product in the second layer of which both factors are zero: neither can ever learn."""
    attention = state.params["blocks"]["attention"]
    zeros = {name: attention[name].at[1].set(0.0) for name in ("wv", "wo")}
    blocks = state.params["blocks"] | {"attention": attention | zeros}
    return state._replace(params=state.params | {"blocks": blocks})


def zero_names(program, state, batch=None):
    batch = tiny.on_mesh(program, tiny.packed_batch(0) if batch is None else batch)
    numbers = flatten_statistics(jax.device_get(program.statistics(state, batch)))
    assert all(numbers[name] == 1 for name in numbers if name.startswith(ZERO))
    return [name.removeprefix(ZERO) for name in numbers if name.startswith(ZERO)]


def alerts(folder):
    return [event for event in read_events(folder) if event["event"] == "alert" and event["what"] == "zero_gradient"]


def opened(folder, program, overrides=None):
    cfg = tiny.config(QUIET | (overrides or {}))
    return open_run(cfg, str(folder), log=lambda text: None, make_program=tiny.reuse(program))


@pytest.mark.slow
def test_a_real_run_names_the_parameters_that_get_no_gradient(tmp_path):
    run = opened(tmp_path / "run", tiny.program())
    loop.train(dataclasses.replace(run, state=without_gradient(run.state)))
    (alert,) = alerts(tmp_path / "run")
    dead = [f"blocks/1/attention/{name}" for name in ("wk", "wo", "wq", "wv")] + ["blocks/1/attention_norm"]
    assert alert["step"] == 3 and alert["numbers"]["parameters"] == dead and alert["numbers"]["since"] == 1
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert [name.removeprefix(ZERO) for name in last if name.startswith(ZERO)] == dead

    loop.train(opened(tmp_path / "healthy", tiny.program()))
    assert not alerts(tmp_path / "healthy") and ZERO not in (tmp_path / "healthy" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_gradient_too_small_for_its_square_is_not_zero():
    program = tiny.program()
    batch = tiny.packed_batch(0)
    state = program.init()
    tiny_scale = state._replace(params=state.params | {"final_norm": state.params["final_norm"] * 1e-25})
    assert zero_names(program, tiny_scale, batch) == []
    nothing = batch._replace(weights=jnp.zeros_like(batch.weights))
    assert {"embedding", "head", "blocks/0/mlp/up", "blocks/1/mlp/up"} <= set(zero_names(program, state, nothing))


@pytest.mark.soak
def test_adapters_have_no_gradient_at_their_first_step_alone_and_frozen_weights_are_left_out(tmp_path):
    program = tiny.program(LORA)
    first = zero_names(program, program.init())
    assert len(first) == 14 and all(name.endswith("_lora_a") for name in first)  # of 7 matrices in 2 layers
    loop.train(opened(tmp_path / "run", program, LORA))
    assert not alerts(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])[ZERO + first[0]] == 1


@pytest.mark.soak
@pytest.mark.parametrize(
    "overrides",
    [
        {"optim.offload_params": True},
        {"rules": "zero3"},
        {"model.scan_layers": False, "mesh.tensor": 2},
    ],
    ids=str,
)
def test_the_names_do_not_depend_on_mesh_offloading_or_scan(overrides):
    expected = {f"blocks/{layer}/{name}" for layer in (0, 1) for name in ("mlp/up", "attention/wq")}
    program = tiny.program(overrides, 8)
    batch = tiny.packed_batch(0)
    nothing = batch._replace(weights=jnp.zeros_like(batch.weights))
    assert expected <= set(zero_names(program, program.init(), nothing)) and zero_names(program, program.init()) == []


@pytest.mark.soak
def test_biases_and_loads_of_a_router_that_learn_without_gradient_are_left_out():
    experts = dict(number=8, chosen=2, mlp_dim=8, first_dense=1, bias=True)
    cfg = tiny.config({"model": tiny.LLAMA | {"num_layers": 3, "experts": experts}})
    program = tiny.make_program(cfg, tiny.resolve_budget(cfg, None), jax.devices()[:1])
    assert zero_names(program, program.init()) == []
