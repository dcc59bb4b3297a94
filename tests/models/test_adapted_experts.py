"""Adapters of experts: one for each, through the products of their groups, on every mesh the same.

L layers  E experts  D embed  F width of an expert  R rows  r rank
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.core.models.lora import A, Adapted, B, is_adapter, make_lora_grouped_project
from jaxscale.core.models.lora_mup_config import lora_flops, lora_params
from jaxscale.core.optim.groups import dotted
from jaxscale.kernels.matmul.slots import ON_CPU, project_expert, run_in_slots
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.checkpoint.derived_weights import with_adapter

ALL = (r"attention\.w[qo]$", r"mlp\.(gate|up|down)$", r"shared\.up$")
BASE = {
    "model": tiny.LLAMA | {"experts": dict(number=4, chosen=2, mlp_dim=8, shared_dim=8)}, "optim.name": "sgd",
    "optim.b1": 1e-30, "mesh.fsdp": 1, "train.num_microbatches": 2, "lora.rank": 3,
}  # fmt: skip


def make(settings, devices=1):
    cfg = tiny.config(BASE | settings)
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:devices])


def named(tree):
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.slow
def test_a_product_with_adapters_is_that_with_the_merged_matrices_and_so_are_its_gradients():
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    x, w, a, b = draw(0, 60, 8), draw(1, 3, 8, 8), draw(2, 3, 8, 2), draw(3, 3, 2, 8)
    counts_E, expert_R = jnp.array([46, 0, 14]), np.repeat(np.arange(3), [46, 0, 14])
    run = lambda own, x, _, counts: make_lora_grouped_project(project_expert)(x, own, counts)
    beside = lambda x, a, b: run_in_slots(ON_CPU, run, Adapted(w, a, b, 0.5), x, jnp.ones(60), counts_E)
    merged = lambda x, a, b: jnp.einsum("RC,RCO->RO", x, (w + 0.5 * jnp.einsum("ECr,ErO->ECO", a, b))[expert_R])
    (one, *grads), (other, *wanted) = (tiny.values_and_gradients(f, jnp.cos(x), x, a, b) for f in (beside, merged))
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    for left, right in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-3)


def test_each_expert_has_its_own_and_they_are_counted_in_all_and_those_of_a_token():
    program = make({"lora.targets": ALL, "optim.groups": ({"pattern": "_lora_b$", "lr_multiplier": 2.0},)})
    cfg, leaves, axes = program.cfg, named(program.model.shapes), program.model.axes["blocks"]["mlp"]
    sizes = {name: leaf.size for name, leaf in leaves.items() if is_adapter(name)}
    assert leaves["blocks.mlp.down" + A].shape == (2, 4, 8, 3) and leaves["blocks.mlp.down" + B].shape == (2, 4, 3, 16)
    assert axes["gate" + A] == ("layers", "experts", "expert_embed", "lora_rank")
    assert axes["gate" + B] == ("layers", "experts", "lora_rank", "mlp")
    assert lora_params(cfg.model, cfg.lora) == sum(sizes.values())
    idle = sum(size for name, size in sizes.items() if name.split(".")[2].startswith(("gate", "up", "down"))) // 2
    assert lora_params(cfg.model, cfg.lora, active=True) == sum(sizes.values()) - idle
    assert lora_flops(cfg.model, cfg.lora) == 6 * (sum(sizes.values()) - idle) - 2 * cfg.model.matmul_params
    with pytest.raises(ValueError, match="'router' matches no matrix; use names among .*blocks.mlp.down"):
        make({"lora.targets": ("router",)})


def merged(params, scale):
    """The parameters without adapters, as ckpt merge_lora makes them, a box of each stack at a time."""
    found = {}
    for name, w in params.items():
        if is_adapter(name):
            continue
        a, b = (params.get(name + ending) for ending in (A, B))
        if a is not None:
            halves = [(slice(i, i + 1), *(slice(0, size) for size in w.shape[1:])) for i in range(len(w))]
            w = np.concatenate([with_adapter(w[box], box, a, b, scale) for box in halves])
        found[name] = w
    return found


@pytest.fixture(scope="module")
def alone():
    return trained({}, 1)


def trained(settings, devices):
    program = make({"lora.targets": ALL} | settings, devices)
    state = program.init()
    for n in range(3):
        state, metrics = program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(n)))
    return program, state, tiny.host(metrics)


@pytest.mark.soak
def test_the_merged_model_is_the_one_with_adapters(alone):
    program, state, _ = alone
    before, params = named(tiny.host(program.init().params)), named(tiny.host(state.params))
    assert {name for name in params if not np.array_equal(params[name], before[name])} == set(
        filter(is_adapter, params)
    )
    plain = make({"lora.rank": 0})
    leaves = merged(params, program.cfg.lora.scale)
    whole = jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(leaves[dotted(path)]), plain.model.shapes)
    batch = tiny.packed_batch(7)
    beside, together = (
        np.asarray(jax.jit(p.model.token_losses)(w, batch)) for p, w in ((program, state.params), (plain, whole))
    )
    np.testing.assert_allclose(beside, together, rtol=1e-4, atol=1e-5)


MESHES = {
    "rows sent, fsdp, tensor": ({"mesh.expert": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "expert.exchange": "send"}, 8),
    "experts gathered": ({"mesh.expert": 2, "mesh.data": 2, "expert.exchange": "gather"}, 4),
    "stages, context": ({"mesh.pipeline": 2, "mesh.context": 2, "model.remat": "full"}, 4),
}


@pytest.mark.soak
@pytest.mark.parametrize("cut", MESHES)
def test_losses_and_gradients_are_those_of_one_device(alone, cut):
    _, one_state, one = alone
    _, state, many = trained(*MESHES[cut])
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-5)
    grads = zip(jax.tree.leaves(tiny.host(one_state.opt_state)), jax.tree.leaves(tiny.host(state.opt_state)))
    for right, got in grads:
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-5 * max(np.abs(right).max(), 1e-2))
