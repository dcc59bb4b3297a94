"""Moments in 16 and 8 bits: right in the mean, the same on every mesh, as small as they should be, and saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from stacks import losses, on_mesh, trained

from jaxscale.core.optim.config import OptimConfig
from jaxscale.core.optim.moments import cast_moments, dequantize, quantize, random_bits, to_bfloat16
from jaxscale.program.memory import memory_need
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.tools.planning.memory import memory_rows

RUNS = 400


def through_bfloat16(x, step):
    return to_bfloat16(x, random_bits(x.shape, step, 0)).astype(jnp.float32)


def through_int8(x, step, non_negative=False):
    return dequantize(quantize(x, 1, random_bits(x.shape, step, 0), non_negative=non_negative), 1)


def wide(positive):
    """[16, 512] numbers over four powers of ten, or over eight."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 512)) * 10.0 ** rng.uniform(-3, 0, size=(16, 512))
    return jnp.asarray(x**2 if positive else x, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("through", "positive", "apart"),
    [
        (through_bfloat16, False, 2**-7),
        (through_int8, False, 0.35),
        (functools.partial(through_int8, non_negative=True), True, 0.35),
    ],
    ids=["bfloat16", "int8", "uint8"],
)
def test_a_moment_comes_back_near_and_in_the_mean_right(through, positive, apart):
    x = wide(positive)
    back = jax.jit(lambda x, steps: jax.lax.map(lambda step: through(x, step), steps))(x, jnp.arange(RUNS))
    back, x = np.asarray(back), np.asarray(x)
    off = np.abs(back - x) / np.abs(x)
    assert np.quantile(off, 0.99) < apart
    mean = np.abs(back.mean(0, dtype=np.float64) - x) / np.abs(x)
    assert np.quantile(mean, 0.99) < 4 * apart / RUNS**0.5 and len(np.unique(back[:, 3, 5])) == 2
    assert not np.any(through(jnp.zeros((2, 64)), 1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_second_moment_falls_at_its_rate_however_slow(dtype):
    tx = cast_moments(optax.scale_by_adam(0.9, 0.999), dtype, {"w": ("embed", "mlp")})
    grads = {"w": jnp.ones((64, 128))}
    state = tx.init(grads)

    def step(state, number):
        zero = jnp.where(number == 0, grads["w"], 0.0).at[:, 0].set(1.0)  # each block's largest stays
        return tx.update({"w": zero}, state, step=number)[1], None

    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(1000)))(state)
    second = state.nu["w"].astype(jnp.float32) if dtype == "bfloat16" else dequantize(state.nu["w"], 1)
    wanted = 0.001 * 0.999**999
    np.testing.assert_allclose(np.mean(second[:, 1:]), wanted, rtol=0.03)  # 8,128 walks of their own


SOAK = pytest.mark.soak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("adamw", "int8"),
        pytest.param("lion", "bfloat16", marks=SOAK),
        pytest.param("adamw", "bfloat16", marks=SOAK),
        pytest.param("lion", "int8", marks=SOAK),
        pytest.param("muon", "bfloat16", marks=SOAK),
        pytest.param("muon", "int8", marks=SOAK),
    ],
)
def test_a_step_is_nearly_that_of_float32(name, dtype):
    few = dict(name=name, leaves=("wq", "norm"))  # cut in blocks and not
    settings = few | dict(moment_dtype=dtype)
    first, plain_first = (trained(on_mesh({}), steps=1, **kept)[0] for kept in (settings, few))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), first, plain_first)  # nothing was kept yet
    third, plain = (trained(on_mesh({}), steps=3, **kept)[0] for kept in (settings, few))
    off = jax.tree.map(lambda a, b: np.sqrt(np.mean((a - b) ** 2)) / 0.01, third, plain)
    most = {"bfloat16": 0.05, "int8": 0.25}[dtype] * (3 if name == "lion" else 1)  # of a sign, all or nothing
    assert 0 < max(jax.tree.leaves(off)) < most


@pytest.mark.soak
@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=SOAK)])
@pytest.mark.parametrize(
    ("shape", "rules"),
    [pytest.param(dict(fsdp=8), "zero3", marks=SOAK), (dict(data=2, fsdp=2, tensor=2), "zero1")],
    ids=["fsdp", "tensor"],
)
def test_a_mesh_rounds_as_one_device_does(name, shape, rules):
    settings = dict(name=name, moment_dtype="int8")
    one, found = trained(on_mesh({}), **settings)[0], trained(on_mesh(shape), rules, **settings)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, one)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_run_loses_little_by_it(name, dtype):
    kept = {"optim.name": name, "mesh.fsdp": 1}
    plain = losses(kept, 1, steps=20)
    narrow = losses(kept | {"optim.moment_dtype": dtype}, 1, steps=20)
    assert plain[-1] < 0.9 * plain[0]
    np.testing.assert_allclose(narrow, plain, rtol={"bfloat16": 0.001, "int8": 0.002}[dtype])


@pytest.mark.slow
def test_plan_counts_them_as_they_are_kept():
    sizes = {}
    for dtype in ("float32", "bfloat16", "int8"):
        program = tiny.program({"optim.moment_dtype": dtype}, 8)
        sizes[dtype] = memory_need(program).moments
        words = next(row.source for row in memory_rows(program, memory_need(program)) if row.kind == "moments")
        assert words.startswith({"float32": "2 moments x 4 B x", "bfloat16": "2 moments x 2 B x"}.get(
            dtype, "2 moments x 1 B and scales x"))  # fmt: skip
    count = sizes["float32"] - 4  # optax's own count of steps
    assert sizes["bfloat16"] == count // 2 + 4 and count // 4 < sizes["int8"] - 4 < 0.36 * count


@pytest.mark.soak
def test_moments_in_8_bits_are_saved_and_a_run_goes_on_from_them(tmp_path):
    program = tiny.program({"optim.moment_dtype": "int8"}, 8)
    batch = tiny.on_mesh(program, tiny.packed_batch(0))
    state, _ = program.train_step(program.init(), batch)
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(1, state, {"step": 1})
    checkpoints.wait()
    restored = checkpoints.restore(1, program.abstract_state)
    checkpoints.close()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(restored.opt_state)} == {"int8", "uint8", "float32", "int32"}
    tiny.assert_same_bits(tiny.host(restored), tiny.host(state))
    tiny.assert_same_bits(*[tiny.host(program.train_step(kept, batch)[0]) for kept in (state, restored)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(name="sgd", b1=0.0), "moment_dtype='int8' needs moments, but sgd with b1=0 has none"),
        (dict(offload_moments=True), "moment_dtype='int8' cannot be combined with offload_moments=true"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(moment_dtype="int8", **settings)
