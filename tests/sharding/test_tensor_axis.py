"""What devices share along the tensor axis is what one device would compute.

B batch  T position  D embed  V vocab
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.config import RunConfig
from jaxscale.core.axes.tensor_axis import NO_TENSOR_AXIS, make_tensor_axis
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.kernels.collectives import LinkStage
from jaxscale.kernels.vocabulary import LossSettings, lookup, lookup_sharded, summed_cross_entropy, token_nats
from jaxscale.program.budget import resolve_budget

STAGES = (LinkStage(((0, 2), (1, 3))), LinkStage(((0, 1), (2, 3))))  # a line of 4 devices as 2 rows of 2
RNG = np.random.default_rng(0)
X_BTD = RNG.normal(size=(2, 8, 4)).astype(np.float32)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def on_four(f, in_specs, out_specs, stages=()):
    """f(tensor, ...) on four devices that share along the tensor axis."""
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=4), jax.devices()[:4])
    tensor = dataclasses.replace(make_tensor_axis(mesh), stages=stages)
    return jax.jit(
        jax.shard_map(functools.partial(f, tensor), mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


CUT = P(None, "tensor")  # along positions


@pytest.mark.parametrize("stages", [(), STAGES], ids=["one link", "two links"])
def test_positions_are_gathered_and_sums_scattered_forward_and_backward(stages):
    """Each device scales all positions by its own number; the sum of that is cut again."""

    def f(tensor, x_BTD, dy_BTD):
        own = 1.0 + jax.lax.axis_index("tensor")
        y_BTD, pull = jax.vjp(lambda x_BTD: tensor.reduce_scatter(own * tensor.all_gather(x_BTD)), x_BTD)
        return y_BTD, *pull(dy_BTD)

    dy_BTD = RNG.normal(size=X_BTD.shape).astype(np.float32)
    y_BTD, dx_BTD = on_four(f, (CUT, CUT), (CUT, CUT), stages)(X_BTD, dy_BTD)
    close(y_BTD, 10 * X_BTD)
    close(dx_BTD, 10 * dy_BTD)


@pytest.mark.parametrize(("rows", "parts"), [(4, 2), (3, 1)])
def test_even_rows_are_taken_in_halves_and_no_row_changes(rows, parts):
    taken = []

    def f(tensor, x_BTD, ids_BT):
        def run(x_BTD, ids_BT):
            taken.append(len(x_BTD))
            return tensor.reduce_scatter(jnp.tanh(tensor.all_gather(x_BTD)) * tensor.all_gather(ids_BT)[..., None])

        return tensor.run_in_halves(run, x_BTD, ids_BT)

    x_BTD = RNG.normal(size=(rows, 8, 4)).astype(np.float32)
    ids_BT = RNG.integers(0, 8, (rows, 8)).astype(np.float32)
    close(on_four(f, (CUT, CUT), CUT)(x_BTD, ids_BT), 4 * np.tanh(x_BTD) * ids_BT[..., None])
    assert taken == [rows // parts] * parts


def test_a_device_takes_its_own_positions_and_ids():
    f = on_four(lambda tensor, x_BT: (tensor.local(x_BT), tensor.local_ids(tensor.local(x_BT), 2)), P(), (CUT, CUT))
    ids_BT = np.array([[0, 7, 2, 5, 4, 4, 1, 6]], np.int32)
    own_BT, rows_BT = f(ids_BT)
    np.testing.assert_array_equal(own_BT, ids_BT)
    np.testing.assert_array_equal(rows_BT, [[0, 2, 0, 2, 0, 0, 2, 0]])  # 2: past the end of what the device holds


def test_a_shared_table_is_looked_up_like_a_whole_one():
    table_VD = RNG.normal(size=(8, 4)).astype(np.float32)
    ids_BT = RNG.integers(0, 8, (2, 8)).astype(np.int32)
    dx_BTD = RNG.normal(size=(2, 8, 4)).astype(np.float32)

    def f(tensor, table_VD, dx_BTD):
        x_BTD, pull = jax.vjp(lambda table_VD: lookup_sharded(table_VD, ids_BT, "float32", tensor), table_VD)
        return x_BTD, *pull(dx_BTD)

    x_BTD, dtable_VD = on_four(f, (P("tensor"), CUT), (CUT, P("tensor")))(table_VD, dx_BTD)
    exact_BTD, pull = jax.vjp(lambda table_VD: lookup(table_VD, ids_BT, "float32"), table_VD)
    np.testing.assert_array_equal(x_BTD, exact_BTD)
    close(dtable_VD, pull(dx_BTD)[0])


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_cross_entropy_over_a_shared_vocabulary_is_that_over_a_whole_one(softcap):
    w_DV = RNG.normal(size=(4, 12)).astype(np.float32)
    targets_BT = RNG.integers(0, 12, (2, 8)).astype(np.int32)
    weights_BT = RNG.random((2, 8)).astype(np.float32)
    how = dict(chunk_tokens=6, softcap=softcap)

    def f(tensor, h_BTD, w_DV):
        def total(h_BTD, w_DV):
            h_BTD = tensor.all_gather(h_BTD)
            return summed_cross_entropy(
                h_BTD, w_DV, targets_BT, weights_BT, LossSettings(z_loss=1e-2, tensor=tensor, **how)
            ).total

        value, grads = jax.value_and_grad(total, (0, 1))(h_BTD, w_DV)
        return value, grads, token_nats(tensor.all_gather(h_BTD), w_DV, targets_BT, LossSettings(tensor=tensor, **how))

    shared = on_four(f, (CUT, P(None, "tensor")), (P(), (CUT, P(None, "tensor")), P()))(X_BTD, w_DV)
    jax.tree.map(close, shared, f(NO_TENSOR_AXIS, X_BTD, w_DV))


MODELS = {
    "llama": tiny.LLAMA | {"num_kv_heads": 4, "qk_norm": True},
    "gpt2": tiny.GPT2 | {"num_heads": 4, "dropout": 0.3},
    "relative": tiny.RELATIVE,
}


def program_of(model, mesh, num_devices, **train):
    dtype = train.get("reduce_dtype", "float32")
    model = MODELS[model] | {"remat": "none", "compute_dtype": dtype}
    values = tiny.VALUES | {"model": model, "mesh": mesh, "train": train}
    cfg = schema.from_dict(RunConfig, values)
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:num_devices])


@pytest.mark.parametrize(
    "model, mesh",
    [
        pytest.param("llama", {"fsdp": 1, "tensor": 4}, marks=pytest.mark.soak),
        pytest.param("gpt2", {"fsdp": 1, "tensor": 4}, marks=pytest.mark.soak),
        pytest.param("llama", {"fsdp": 2, "tensor": 4}, marks=pytest.mark.soak),
        pytest.param("gpt2", {"fsdp": 2, "tensor": 4}, marks=pytest.mark.soak),
        pytest.param("relative", {"fsdp": 2, "tensor": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_step_gives_every_parameter_the_gradient_of_one_device(model, mesh):
    """Moments after one step are gradients: those of norms, biases and positions are sums over the devices too."""
    steps = [program_of(model, {"fsdp": 1}, 1), program_of(model, mesh, mesh["fsdp"] * mesh["tensor"])]
    moments, first = [], tiny.host(steps[0].init())
    for program in steps:
        state, _ = program.train_step(tiny.placed(program, first), tiny.on_mesh(program, tiny.packed_batch(0)))
        moments.append(tiny.host(state.opt_state))
    alone, shared = (jax.tree.leaves_with_path(tree) for tree in moments)
    assert len(alone) == len(shared) > 20
    for (path, left), (_, right) in zip(alone, shared):
        np.testing.assert_allclose(right, left, rtol=2e-4, atol=1e-7, err_msg=jax.tree_util.keystr(path))


@pytest.mark.soak
def test_sums_in_bfloat16_are_near_those_in_float32():
    losses = []
    for dtype in ("float32", "bfloat16"):
        program = program_of("llama", {"data": 2, "fsdp": 2, "tensor": 2}, 8, reduce_dtype=dtype)
        state, metrics = program.train_step(program.init(), tiny.on_mesh(program, tiny.packed_batch(0)))
        _, after = program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(0)))
        losses.append([float(metrics["loss"]), float(after["loss"]), float(metrics["grad_norm"])])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-2)
    assert losses[0] != losses[1]


def test_rows_that_the_axis_does_not_divide_are_refused_with_what_fits():
    with pytest.raises(ValueError, match=r"seq_len=18 is not a multiple of mesh.tensor=4.*use seq_len=16"):
        tiny.program({"mesh.tensor": 4, "seq_len": 18, "batch_tokens": 18 * 8, "model.num_kv_heads": 4}, 8)
