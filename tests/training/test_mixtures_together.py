"""Mixtures of experts beside what else a run has: half precision, an average, statistics, replicas, other meshes."""

import json

import jax
import numpy as np
import pytest
import tiny

from jaxscale import main
from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.training.replicas import make_replica_check
from jaxscale.runtime.training.statistics_runner import flatten_statistics

EXPERTS = dict(number=4, chosen=2, mlp_dim=8, bias=True)
SHARED = {"mesh.expert": 2, "mesh.data": 2, "mesh.fsdp": 1}
HALF = {"model.compute_dtype": "float16", "train.ema.decay": 0.9, "expert.exchange": "send"}


def make(settings, devices):
    cfg = tiny.config({"model": tiny.LLAMA | {"experts": EXPERTS}} | SHARED | settings)
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:devices])


@pytest.mark.soak
@pytest.mark.parametrize(
    "settings",
    [HALF, {"optim.offload_moments": True, "expert.exchange": "gather"}, {"model.scan_layers": False}],
    ids=["half precision, an average", "moments in the host's memory", "unrolled layers"],
)
def test_what_else_a_run_has_goes_with_experts(settings):
    program = make(settings, 4)
    state, batch = program.init(), tiny.on_mesh(program, tiny.packed_batch(0))
    alone = make(settings | {"mesh.expert": 1, "mesh.data": 1, "expert.exchange": "auto"}, 1)
    of_one = (alone.init(), tiny.on_mesh(alone, tiny.packed_batch(0)))
    numbers, right = (
        flatten_statistics(jax.device_get(one.statistics(*given)))
        for one, given in ((program, (state, batch)), (alone, of_one))
    )
    assert numbers.keys() == right.keys() and numbers["stats/grad_norm/00"] > 0
    rounding = 1e-2 if settings is HALF else 1e-4
    for name, number in numbers.items():
        np.testing.assert_allclose(number, right[name], rtol=rounding, err_msg=name)
    seen = [tiny.host(state.params)]
    for _ in range(2):
        state, metrics = program.train_step(state, batch)
        assert not metrics["skipped"] and np.isfinite(metrics["grad_norm"])
        seen.append(tiny.host(state.params))
    before, between, after = seen
    check = make_replica_check(program.mesh, program.abstract_state)
    assert check(state).same
    if program.cfg.model.scan_layers:
        assert not any(check(with_one_changed(state, name)).same for name in ("gate", "router", "router_bias"))
    assert any((now != then).any() for now, then in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))
    if settings is HALF:
        of_steps = lambda *params: params[0] * 0.81 + params[1] * 0.09 + params[2] * 0.1  # decay 0.9
        right = jax.tree.map(of_steps, before, between, after)
        for name in ("gate", "down", "router"):
            mean, other = (tree["blocks"]["mlp"][name] for tree in (tiny.host(state.ema), right))
            np.testing.assert_allclose(mean, other, rtol=1e-6, atol=1e-7)


@pytest.mark.soak
def test_a_step_that_overflows_moves_no_balance():
    program = make(HALF | {"train.loss_scale.initial": 2.0**60, "train.loss_scale.max": 2.0**60}, 4)
    state = program.init()
    before = tiny.host(state.params)
    state, metrics = program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(0)))
    assert metrics["skipped"] and float(state.loss_scale.value) < 2.0**60
    tiny.assert_same_bits(tiny.host(state.params), before)


@pytest.mark.soak
def test_a_run_goes_on_with_more_and_fewer_devices_that_share_experts(tmp_path):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 200)
    values = tiny.VALUES | dict(
        model=tiny.LLAMA | dict(vocab_size=272, experts=EXPERTS | dict(first_dense=1)),
        data=dict(files=str(tmp_path / "*.txt")),
        train=dict(aux_losses=dict(balance_loss=0.01)),
        train_tokens="6 steps",
        mesh=dict(fsdp=-1),
        eval=dict(every_steps=6, num_rows=8),
        checkpoint=dict(save_every_steps=2),
        monitor=dict(log_every_steps=1, tensorboard=False),
    )
    (tmp_path / "run.py").write_text(f"def get_config():\n    return {values!r}\n")
    config, straight, workdir = f"--config={tmp_path / 'run.py'}", tmp_path / "straight", tmp_path / "run"
    assert main.main([config, f"--workdir={straight}", "--config.mesh.fsdp=1", "--config.mesh.data=8"]) == 0
    sent = "--config.expert.exchange=send"
    for stop, flags in ((2, ["--config.mesh.expert=2", sent]), (4, ["--config.mesh.expert=4", sent]), (6, [])):
        assert main.main([config, f"--workdir={workdir}", f"--stop_after={stop}", *flags]) in (0, None), flags
    found, wanted = (lines(folder) for folder in (workdir, straight))
    assert [line["tokens_hash"] for line in found] == [line["tokens_hash"] for line in wanted]
    np.testing.assert_allclose([one["loss"] for one in found], [one["loss"] for one in wanted], rtol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("exchange", ["gather", "send"])
def test_a_router_that_is_no_number_moves_nothing(exchange):
    program = make({"expert.exchange": exchange}, 4)
    batch, state = tiny.on_mesh(program, tiny.packed_batch(0)), program.init()
    params = state.params["blocks"]["mlp"]
    router = params["router"].at[0, 0, 3].set(np.nan)
    state = with_mlp(state, router=jax.device_put(router, params["router"].sharding))
    before = tiny.host(state.params)
    state, metrics = program.train_step(state, batch)
    assert metrics["skipped"]
    tiny.assert_same_bits(tiny.host(state.params), before)


def with_mlp(state, **changed):
    """The state with other arrays in its mixtures."""
    blocks = state.params["blocks"]
    return state._replace(params=state.params | {"blocks": blocks | {"mlp": blocks["mlp"] | changed}})


def with_one_changed(state, name):
    """The state, one number of it changed on one device alone."""
    array = state.params["blocks"]["mlp"][name]
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    parts[3].flat[0] += 1e-3
    parts = [jax.device_put(part, shard.device) for part, shard in zip(parts, array.addressable_shards, strict=True)]
    return with_mlp(state, **{name: jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)})


def lines(workdir):
    """What was written of each step."""
    read = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in read if "loss" in line]
