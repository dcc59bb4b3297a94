"""The kernels for Hopper cards, in JAX's interpreter of their dialect and by the card's own compiler."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import SingleDeviceSharding

from jaxscale.build import make_program
from jaxscale.kernels.compiler_options import SLICE_FUSION
from jaxscale.kernels.matmul import grouped, grouped_hopper, slots
from jaxscale.program.budget import resolve_budget
from jaxscale.tools.planning.topology import open_topology

PROGRAM = """
import jax, numpy as np, jax.numpy as jnp
from jaxscale.kernels.matmul.grouped import hopper_matmuls, is_hopper

if not is_hopper(jax.devices()[0]):
    raise SystemExit(3)
products = hopper_matmuls()
for rows, contracted, width, counts in (
    (1000, 192, 320, [70, 0, 130, 400, 1, 0, 399]), (504, 64, 64, [1] * 400), (777, 100, 72, [300, 477]),
):
    own, groups = sum(counts), np.repeat(np.arange(len(counts)), counts)
    keys = jax.random.split(jax.random.key(rows), 3)
    of_none = (jnp.arange(rows) >= own)[:, None]
    draw = lambda key, *shape: jax.random.normal(key, shape).astype(jnp.bfloat16)
    x, dy = (jnp.where(of_none, jnp.nan, draw(key, rows, size)) for key, size in zip(keys, (contracted, width)))
    w, counts = draw(keys[2], len(counts), contracted, width), jnp.asarray(counts)
    exact = [np.asarray(array, np.float64) for array in (x[:own], w, dy[:own])]
    dw = np.zeros(w.shape)
    np.add.at(dw, groups, np.einsum("rc,ro->rco", exact[0], exact[2]))
    for got, right, most in (
        (products.forward(x, w, counts)[:own], np.einsum("rc,rco->ro", exact[0], exact[1][groups]), 3e-3),
        (products.input_grad(dy, w, counts)[:own], np.einsum("ro,rco->rc", exact[2], exact[1][groups]), 3e-3),
        (products.weight_grad(x, dy, counts, jnp.float32), dw, 1e-5),
    ):
        error = np.linalg.norm(np.asarray(got, np.float64) - right) / np.linalg.norm(right)
        assert error < most, (rows, contracted, width, error)
"""
ROWS, CONTRACTED, WIDTH = 150, 64, 72  # no multiple of a tile, nor of what TMA copies
COUNTS = [70, 0, 1, 69]  # and ten rows of none
BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture
def interpreted(monkeypatch):
    if not hasattr(plgpu, "force_gpu_interpret_mode"):
        pytest.skip("jax 0.11 is the first whose interpreter of Mosaic GPU runs these")
    monkeypatch.setattr(grouped_hopper, "CORES", 1)
    with plgpu.force_gpu_interpret_mode():
        yield


def operands():
    keys = jax.random.split(jax.random.key(0), 3)
    own_R1 = jnp.arange(ROWS)[:, None] < sum(COUNTS)
    x_RC = jnp.where(own_R1, jax.random.normal(keys[0], (ROWS, CONTRACTED)), jnp.nan).astype(BF16)
    w_ECO = jax.random.normal(keys[1], (len(COUNTS), CONTRACTED, WIDTH)).astype(BF16)
    dy_RO = jnp.where(own_R1, jax.random.normal(keys[2], (ROWS, WIDTH)), jnp.nan).astype(BF16)
    return x_RC, w_ECO, dy_RO


def test_values_and_gradients_are_those_of_rows_with_their_own_matrices(interpreted):
    x_RC, w_ECO, dy_RO = operands()
    counts_E, own = jnp.asarray(COUNTS), sum(COUNTS)
    groups_R = np.repeat(np.arange(len(COUNTS)), COUNTS)
    plain = lambda x, w: jnp.einsum("RC,RCO->RO", x[:own].astype(F32), w[groups_R])
    right, pull = jax.vjp(plain, x_RC.astype(F32), w_ECO.astype(F32))
    dx, dw = pull(dy_RO[:own].astype(F32))
    products = grouped.hopper_matmuls()
    rounding = dict(rtol=2**-8, atol=2**-6)
    np.testing.assert_allclose(products.forward(x_RC, w_ECO, counts_E)[:own].astype(F32), right, **rounding)
    np.testing.assert_allclose(products.input_grad(dy_RO, w_ECO, counts_E)[:own].astype(F32), dx[:own], **rounding)
    np.testing.assert_allclose(products.weight_grad(x_RC, dy_RO, counts_E, F32), dw, rtol=1e-5, atol=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 300], [128, 128, 44], [1] * 300, [0, 0, 0]])
def test_tiles_hold_each_row_of_a_group_once(counts):
    tiles, most = grouped_hopper.group_tiles(jnp.asarray(counts), 300)
    taken = [
        (group, row) for group, tile, begin, end in np.asarray(tiles).T for row in range(begin, end)
        if tile == row // grouped_hopper.TILE_R
    ]  # fmt: skip
    ends = np.cumsum(counts)
    assert taken == [(g, row) for g, end in enumerate(ends) for row in range(end - counts[g], end)]
    assert tiles.shape == (4, most)


def test_a_card_gives_what_float64_gives():
    if not any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is no NVIDIA GPU on this machine")
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": ""}
    code = subprocess.run([sys.executable, "-c", PROGRAM], env=environment).returncode
    if code == 3:
        pytest.skip("the GPU is no Hopper")
    assert code == 0


def test_hopper_cards_have_kernels_in_16_bits_and_others_say_why_not():
    hopper, ampere = (types.SimpleNamespace(compute_capability=version) for version in ("9.0", "8.0"))
    kernels, choice = grouped.resolve_expert_kernels("gpu", hopper, "bfloat16")
    assert kernels.map_experts is grouped.run_grouped and choice.name == "hopper" and not choice.reason
    for device, dtype in ((hopper, "float32"), (ampere, "bfloat16"), (None, "bfloat16")):
        kernels, choice = grouped.resolve_expert_kernels("gpu", device, dtype)
        assert kernels.map_experts.func is slots.run_in_slots and kernels.map_experts.args == (slots.ON_GPU,)
        assert "Hopper" in choice.reason and not kernels.as_bits
    on_cpu, choice = grouped.resolve_expert_kernels("cpu", None, "float32")
    assert not choice.reason and on_cpu.map_experts.args == (slots.ON_CPU,)


needs_plugin = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="jax's CUDA plugin, which compiles for these cards, is not installed",
)


@pytest.mark.aot
@needs_plugin
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_cards_compiler_takes_them(dtype):
    """Its memory is that of the results."""
    device = SingleDeviceSharding(open_topology("h200:1x1").devices[0])
    make = lambda shape, dtype=BF16: jax.ShapeDtypeStruct(shape, dtype, sharding=device)
    x, w, dy, counts = make((4096, 512)), make((8, 512, 768)), make((4096, 768)), make((8,), jnp.int32)
    products = grouped.hopper_matmuls()
    weight_grad = lambda x, dy, counts: products.weight_grad(x, dy, counts, dtype)
    for f, given in ((products.forward, (x, w)), (products.input_grad, (dy, w)), (weight_grad, (x, dy))):
        compiled = jax.jit(f).lower(*given, counts).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.aot
@needs_plugin
@pytest.mark.parametrize(("option", "times"), [({}, 3), ({f"compiler.{SLICE_FUSION}": True}, 5)])
def test_a_loop_that_keeps_what_a_kernel_gives_runs_it_once(option, times):
    """Of a layer forward there are gate, up and down; XLA would run the first two again, to keep them."""
    values = {
        "model.num_layers": 2, "model.embed_dim": 256, "model.num_heads": 2, "model.num_kv_heads": 2, "seq_len": 256,
        "model.head_dim": 128, "model.compute_dtype": "bfloat16", "model.attention": "auto", "model.remat": "minimal",
        "model.experts": dict(number=8, chosen=2, mlp_dim=256), "batch_tokens": "8 rows",
    }  # fmt: skip
    cfg = tiny.config(values | option)
    program = make_program(cfg, resolve_budget(cfg, None), open_topology("h200:1x1").devices)
    text = program.train_step.lower(program.abstract_state, program.abstract_batch).compile().as_text()
    kernels = re.findall(r'custom-call\(.*"mosaic_gpu.*op_name="([^"]*)"', text)
    assert sum("/jvp()/" in name and "hopper_project" in name for name in kernels) == times, kernels
