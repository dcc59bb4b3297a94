"""Adapters: the base's loss at first, nothing else moves or is paid for, and any mesh gives the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.config import RunConfig
from jaxscale.core.models.layers import split_model
from jaxscale.core.models.lora import Adapted, adapter_specs, add_adapter, add_adapters, is_adapter, make_lora_project
from jaxscale.core.models.lora_mup_config import LoraConfig, lora_flops, lora_params
from jaxscale.core.models.model import logits, make_model
from jaxscale.core.plan import UNSHARDED
from jaxscale.kernels.matmul.project import cpu_project, einsum_project
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.run.startup_log import group_table
from jaxscale.runtime.training.replicas import make_replica_check
from jaxscale.runtime.training.statistics_runner import flatten_statistics

LORA = {"lora.rank": 4}
SPECS = ("BTD,DNH->BTNH", "BTNH,NHD->BTD", "BTD,DF->BTF")


def named(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def losses(program, steps, first=None):
    state = first or program.init()
    found = []
    for n in range(steps):
        state, metrics = program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(n)))
        found.append(float(metrics["loss"]))
    return found, state


@pytest.mark.soak  # tests/test_finetuning.py does the same with a run
@pytest.mark.parametrize("other", [{}, {"model.scan_layers": False}, {"model.name": "gpt2"}], ids=str)
def test_the_first_loss_is_the_base_s_bit_for_bit_and_only_adapters_move(other):
    base, program = tiny_program(other), tiny_program(other | LORA)
    before, plain = named(tiny.host(program.init().params)), named(tiny.host(base.init().params))
    tiny.assert_same_bits({name: leaf for name, leaf in before.items() if not is_adapter(name)}, plain)
    found, state = losses(program, 3)
    assert found[0] == losses(base, 1)[0][0]
    after = named(tiny.host(state.params))
    for name, leaf in before.items():
        assert np.array_equal(leaf, after[name]) != is_adapter(name), name


def tiny_program(overrides):
    """tiny.program, or that of GPT-2."""
    if overrides.get("model.name") != "gpt2":
        return tiny.program(overrides)
    values = tiny.VALUES | {"model": tiny.GPT2}
    cfg = schema.from_dict(RunConfig, schema.merge(values, overrides))
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:1])


def uncached(overrides):
    """tiny.program, for settings that cannot be the key of a cache."""
    cfg = tiny.config(overrides)
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:1])


@pytest.mark.soak
def test_scanned_and_unrolled_layers_draw_the_same_adapters():
    draw = lambda cfg: split_model(make_model(cfg.model, key=jax.random.key(0), lora=cfg.lora))[1]
    stacked, layers = (draw(tiny.config(LORA | {"model.scan_layers": scan}))["blocks"] for scan in (True, False))
    for layer in "01":
        here = stacked["attention"]["wo_lora_a"][int(layer)]
        assert np.array_equal(here, layers[layer]["attention"]["wo_lora_a"]) and here.std() > 0.05
    assert not stacked["attention"]["wo_lora_b"].any()


@pytest.mark.soak  # tests/test_finetuning.py opens a run with adapters on eight devices
@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}], ids=str)
def test_losses_do_not_depend_on_the_mesh(mesh):
    overrides = LORA | {f"mesh.{axis}": size for axis, size in mesh.items()} | {"train.num_microbatches": 2}
    expected, one = losses(tiny.program(LORA), 4)
    found, state = losses(tiny.program(overrides, 8), 4)
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # float32 sums taken in another order
    b = named(tiny.host(state.params))["blocks.attention.wo_lora_b"]
    np.testing.assert_allclose(b, named(tiny.host(one.params))["blocks.attention.wo_lora_b"], atol=1e-4)
    assert np.abs(b).max() > 1e-2


@pytest.mark.soak
def test_frozen_parameters_have_no_moments_no_gradients_no_average_and_share_their_buffer():
    program = tiny.program(LORA | {"train.ema.decay": 0.9})
    state = program.abstract_state
    adapters = {name for name in named(state.params) if is_adapter(name)}
    assert len(adapters) == 14 and set(named(program.abstract_grads)) == set(named(state.ema)) == adapters
    moments = {name.rpartition("mu.")[2] for name in named(state.opt_state) if ".mu." in name}
    assert moments == adapters
    compiled = program.train_step.lower(state, program.abstract_batch).compile()
    aliased = compiled.memory_analysis().alias_size_in_bytes
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert aliased >= state_bytes - 1024  # every array of the state is written in its own place


@pytest.mark.soak
def test_a_step_costs_no_gradient_of_frozen_matrices():
    wide = {"model.embed_dim": 64, "model.mlp_dim": 128, "model.vocab_size": 512}
    cost = {}
    for rank in (0, 1):
        program = tiny.program(wide | {"lora.rank": rank})
        compiled = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
        cost[rank] = compiled.cost_analysis()["flops"], program.cfg.flops_per_token
    assert cost[1][0] < 0.72 * cost[0][0]  # 4 of 6, the adapters, and what is no product
    assert cost[1][1] == pytest.approx(cost[0][1] * 0.69, rel=0.01)
    cfg = tiny.config(wide | {"lora.rank": 1})
    assert lora_params(cfg.model, cfg.lora) * 6 - 2 * 101888 == pytest.approx(lora_flops(cfg.model, cfg.lora), rel=0.2)


@pytest.mark.soak
def test_statistics_gradient_norms_and_replicas_know_of_adapters_alone():
    sizes = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "train.ema.decay": 0.9}
    program = tiny.program(LORA | sizes, 8)
    state, batch = program.init(), tiny.on_mesh(program, tiny.packed_batch(0))
    numbers = flatten_statistics(jax.device_get(program.statistics(state, batch)))
    assert all(np.isfinite(number) for number in numbers.values())
    assert numbers["stats/grad_norm/embedding"] == numbers["stats/update_norm/head"] == 0
    assert numbers["stats/grad_norm/00"] > 0 and numbers["stats/weight_norm/embedding"] > 0
    norms = program.gradient_norms(state, batch)
    assert len(norms) == 14 and all(map(is_adapter, norms))
    check = make_replica_check(program.mesh, program.abstract_state)
    state, _ = program.train_step(state, batch)
    assert check(state).same


def test_weight_decay_groups_and_the_table_know_adapters():
    groups = ({"pattern": "_lora_b$", "lr_multiplier": 16.0, "weight_decay": 0.0},)
    program = uncached(LORA | {"optim.groups": groups})
    table = {row[0]: row[4] for row in group_table(program.model.shapes, program.model.shardings, program.groups)}
    assert table["blocks.attention.wq"] == table["embedding"] == "frozen"
    assert table["blocks.attention.wq_lora_a"] == "decay 0.1"
    assert table["blocks.attention.wq_lora_b"] == "decay 0, lr x16 (_lora_b$)"
    with pytest.raises(ValueError, match="matches no parameter; use names among blocks.attention.wk_lora_a"):
        uncached(LORA | {"optim.groups": ({"pattern": "embedding"},)})


def test_targets_choose_matrices_and_a_wrong_one_is_told():
    program = tiny.program({"lora.rank": 2, "lora.targets": (r"attention\.w[qv]$",)})
    adapters = {name for name in named(program.abstract_state.params) if is_adapter(name)}
    assert adapters == {f"blocks.attention.w{which}_lora_{part}" for which in "qv" for part in "ab"}
    moments = {name.rpartition("mu.")[2] for name in named(program.abstract_state.opt_state) if ".mu." in name}
    assert moments == set(named(program.abstract_grads)) == adapters  # what is frozen has neither
    with pytest.raises(ValueError, match="matches no matrix; use names among blocks.attention.wk, blocks.attention.wo"):
        tiny.program({"lora.rank": 2, "lora.targets": ("embedding",)})


@pytest.mark.cases(1)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("axes", "shape", "of_a", "of_b"),
    [
        (("embed", "heads", "head_dim"), (256, 4, 8), (256, 6), (6, 4, 8)),
        (("heads", "head_dim", "embed"), (4, 64, 16), (4, 64, 6), (6, 16)),
    ],
)
def test_an_adapter_is_alpha_over_rank_times_a_normal_matrix_and_zeros(axes, shape, of_a, of_b, stacked):
    cfg, owner, layers = LoraConfig(rank=6, alpha=3.0), nnx.Module(), (3,) * stacked
    owner.w = nnx.Param(jnp.zeros((*layers, *shape)), axes=("layers",) * stacked + axes)
    add_adapter(owner, "w", owner.w, None if stacked else 0, cfg, jax.random.key(0))
    a, b = np.asarray(owner.w_lora_a.get_value()), owner.w_lora_b.get_value()
    assert a.shape == (*layers, *of_a) and b.shape == (*layers, *of_b) and not b.any()
    assert a.std() == pytest.approx(256**-0.5, rel=0.1) and abs(a.mean()) < 0.005  # of 1,536 draws or more
    assert not stacked or len({layer.tobytes() for layer in a}) == 3
    assert cfg.scale == owner.w_lora_a.lora_scale == 0.5
    begin = ("layers",) * stacked
    assert owner.w_lora_a.axes == (*begin, *axes[: len(of_a) - 1], "lora_rank")  # cut as the inputs of the matrix
    assert owner.w_lora_b.axes == (*begin, "lora_rank", *axes[len(of_a) - 1 :])  # and its outputs


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (dict(rank=-1), "must be at least 1"),
        (dict(alpha=0.0), "must be above 0"),
        (dict(rank=1, targets=()), "targets is empty"),
        (dict(rank=1, targets=("(",)), "not a valid regular expression"),
    ],
)
def test_wrong_settings_are_one_line(settings, told):
    with pytest.raises(ValueError, match=told):
        LoraConfig(**settings)


@pytest.mark.parametrize("overrides", [{"optim.offload_params": True}, {f"model.{k}": v for k, v in tiny.T5.items()}])
def test_what_takes_no_adapters_is_refused(overrides):
    with pytest.raises(ValueError, match="does not support adapters|cannot be combined|is not a setting"):
        tiny.config(LORA | overrides)


PRODUCTS = [(project, spec) for project in (cpu_project, einsum_project) for spec in SPECS]
QUICK, *SLOW = PRODUCTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("project", "spec"), [QUICK, *(pytest.param(*product, marks=pytest.mark.soak) for product in SLOW)]
)
def test_a_product_with_an_adapter_is_that_with_the_merged_matrix_and_so_are_its_gradients(project, spec):
    sizes = dict(B=2, T=3, D=8, N=2, H=4, F=6, r=2)
    (x_axes, w_axes), (down, up) = spec.split("->")[0].split(","), adapter_specs(spec)
    draw = lambda axes, seed: jax.random.normal(jax.random.key(seed), tuple(sizes[axis] for axis in axes))
    x, w = draw(x_axes, 0), draw(w_axes, 1)
    a, b = (draw(side.split("->")[0].split(",")[1], seed) for seed, side in ((2, down), (3, up)))
    beside = lambda a, b: make_lora_project(project)(spec, x, Adapted(w, a, b, 0.5))
    merged = lambda a, b: jnp.einsum(spec, x, w + 0.5 * jnp.tensordot(a, b, 1))
    np.testing.assert_allclose(beside(a, b), merged(a, b), rtol=1e-4, atol=1e-4)
    grads = lambda f: jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b))), argnums=(0, 1))(a, b)
    for left, right in zip(grads(beside), grads(merged)):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-3)


def test_without_adapters_the_model_is_untouched():
    cfg = tiny.config().model
    plain = make_model(cfg, key=jax.random.key(0))
    assert plain.blocks.attention.plan.project is UNSHARDED.project
    adapted = make_model(cfg, key=jax.random.key(0), lora=LoraConfig(rank=2))
    tokens_BT = jnp.asarray(tiny.packed_batch(0).tokens)
    np.testing.assert_array_equal(logits(plain, tokens_BT), logits(adapted, tokens_BT))
    assert len(jax.tree.leaves(split_model(add_adapters(plain, LoraConfig(rank=1), jax.random.key(1)))[1])) == 26
