"""What lives in the host's memory between steps trains to the same numbers, and is really there."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.core.models.moe_balance import is_balance_param
from jaxscale.core.optim.groups import dotted
from jaxscale.core.optim.moments import DEVICE, HOST, offload_moments
from jaxscale.kernels.host_memory import check_host_memory
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.sampling.config import Sampling
from jaxscale.runtime.sampling.generator import Engine, Generator


def run(overrides, num_devices=8, num_steps=3):
    """(the state, losses) after some steps."""
    cfg = tiny.config(overrides)
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[:num_devices])
    state, losses = program.init(), []
    for n in range(num_steps):
        state, metrics = program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(n)))
        losses.append(float(metrics["loss"]))
    return state, losses


EXPERTS = dict(number=8, chosen=2, mlp_dim=16, shared_dim=8, first_dense=1, bias=True, score="sigmoid")
MIXTURE = {"model": tiny.LLAMA | {"experts": EXPERTS, "num_layers": 3}, "mesh.expert": 2, "mesh.fsdp": 2}


def apart(tree):
    """(all leaves but those that the step moves by its counts, and these, which stay on the device)"""
    found = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        found[is_balance_param(dotted(path))].append(leaf)
    return found


def memory_kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "num_devices"),
    [
        ({"optim.name": "sgd", "model.num_layers": 1}, 2),
        pytest.param({}, 2, marks=pytest.mark.soak),
        pytest.param(
            {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "optim.name": "lion", "train.num_microbatches": 2},
            8,
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {
                "model": tiny.GPT2,
                "model.scan_layers": False,
                "optim.name": "sgd",
                "optim.groups": [{"pattern": ".*wq", "frozen": True}],
            },
            1,
            marks=pytest.mark.soak,
        ),
    ],
    ids=["sgd", "adamw", "lion", "frozen"],
)
def test_moments_on_the_host_train_to_the_same_numbers(overrides, num_devices):
    plain, losses = run(overrides, num_devices)
    offloaded, same_losses = run(overrides | {"optim.offload_moments": True}, num_devices)
    assert memory_kinds(offloaded.opt_state) == {"pinned_host"} and memory_kinds(offloaded.params) == {"device"}
    np.testing.assert_allclose(same_losses, losses, rtol=1e-6)
    for left, right in zip(jax.tree.leaves(offloaded), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)  # the same sums, fused otherwise


@pytest.mark.parametrize(
    ("overrides", "num_devices"),
    [
        pytest.param({"train.num_microbatches": 2}, 8, marks=pytest.mark.soak),
        pytest.param(
            {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "model.remat": "full"}, 8, marks=pytest.mark.soak
        ),
        pytest.param(
            {
                "model": tiny.GPT2,
                "model.scan_layers": False,
                "optim.name": "sgd",
                "optim.groups": [{"pattern": ".*wq", "frozen": True}],
            },
            1,
            marks=pytest.mark.soak,
        ),
        pytest.param(MIXTURE | {"expert.exchange": "send"}, 4, marks=pytest.mark.soak),
        pytest.param(
            MIXTURE | {"expert.exchange": "gather", "model.scan_layers": False, "optim.name": "lion"},
            4,
            marks=pytest.mark.soak,
        ),
    ],
    ids=["fsdp", "tensor", "frozen", "experts sent", "experts gathered"],
)
def test_parameters_on_the_host_train_to_the_same_numbers(overrides, num_devices):
    plain, losses = run(overrides, num_devices)
    for moments in ("device", "pinned_host"):
        settings = {"optim.offload_params": True, "optim.offload_moments": moments == "pinned_host"}
        offloaded, same_losses = run(overrides | settings, num_devices)
        learned, balance = apart(offloaded.params)
        assert memory_kinds(learned) == {"pinned_host"} and memory_kinds(balance) <= {"device"}
        assert memory_kinds(apart(offloaded.opt_state)[0]) == {moments}
        np.testing.assert_allclose(same_losses, losses, rtol=1e-6)
        for left, right in zip(jax.tree.leaves(offloaded), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)  # the same sums, fused otherwise


@pytest.mark.soak
def test_parameters_on_the_host_are_evaluated_and_sampled_from_as_others_are():
    programs = [tiny.program({"optim.offload_params": offload}, 8) for offload in (False, True)]
    found = []
    for program in programs:
        params, batch = program.init().params, tiny.on_mesh(program, tiny.packed_batch(0))
        nats = jax.jit(program.model.token_losses)(params, batch)
        generator = Generator(Engine(program.model, batch=2, longest=12), params)
        found.append((nats, np.stack(list(generator.generate([[5, 9], [7]], Sampling(temperature=1.0), 9)))))
    for left, right in zip(*found):
        np.testing.assert_allclose(left, right, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "experts", [None, pytest.param(EXPERTS | {"first_dense": 0}, marks=pytest.mark.soak)], ids=bool
)
def test_a_step_that_is_not_ok_leaves_parameters_on_the_host_as_they_were(experts):
    model = tiny.LLAMA | ({"experts": experts} if experts else {"num_layers": 1})
    cfg = tiny.config({"model": model, "mesh.fsdp": 2, "optim.offload_params": True, "optim.name": "sgd"})
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[:2])
    state = program.init()
    kinds = [{"pinned_host"}, {"device"} if experts else set()]
    assert [memory_kinds(part) for part in apart(state.params)] == kinds
    norm = state.params["final_norm"]
    broken = jax.device_put(np.full(norm.shape, np.inf, np.float32), norm.sharding)
    state = state._replace(params=state.params | {"final_norm": broken})
    before = tiny.host(state.params)
    after, metrics = program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(0)))
    assert metrics["skipped"]
    tiny.assert_same_bits(tiny.host(after.params), before)


def test_a_step_that_is_not_ok_leaves_moments_on_the_host_as_they_were():
    tx = offload_moments(optax.scale_by_adam(), {"stacked": True, "single": False})
    grads = {"stacked": jnp.ones((2, 3)), "single": jnp.ones(3)}
    there = lambda state: jax.tree.map(lambda leaf: jax.device_put(leaf, HOST) if leaf.ndim else leaf, state)
    state = there(tx.init(grads))
    update = jax.jit(lambda grads, state, ok: tx.update(grads, state, ok=ok))
    added, after = update(grads, state, True)
    tiny.assert_same_bits(tiny.host(update(grads, state, False)[1]), tiny.host(state))
    want, wanted_state = optax.scale_by_adam().update(grads, jax.device_put(state, DEVICE))
    for left, right in zip(jax.tree.leaves((added, after)), jax.tree.leaves((want, wanted_state)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "field"), [("offload_moments", "opt_state"), ("offload_params", "params")])
def test_a_checkpoint_of_what_is_on_the_host_comes_back_to_the_host(setting, field, tmp_path):
    program = tiny.program({f"optim.{setting}": True}, 2)
    assert jax.tree.structure(program.abstract_state) == jax.tree.structure(tiny.program({}, 2).abstract_state)
    state = program.init()
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(1, state, {"step": 1})
    checkpoints.wait()
    restored = checkpoints.restore(1, program.abstract_state)
    checkpoints.close()
    assert memory_kinds(getattr(restored, field)) == {"pinned_host"}
    tiny.assert_same_bits(tiny.host(restored), tiny.host(state))


def test_devices_without_host_memory_are_refused_before_anything_is_compiled():
    kinds = [types.SimpleNamespace(kind=kind) for kind in ("device", "unpinned_host")]
    device = types.SimpleNamespace(device_kind="Chip", addressable_memories=lambda: kinds)
    mesh = types.SimpleNamespace(devices=np.array([device]))
    with pytest.raises(ValueError) as error:
        check_host_memory("optim.offload_moments=true", mesh)
    assert str(error.value) == (
        "optim.offload_moments=true needs devices with pinned_host memory, but Chip has device, unpinned_host; "
        "remove the setting"
    )
