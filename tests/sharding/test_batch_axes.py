"""What devices gather and sum by hand is what one device would compute.

B batch  D embed  F mlp
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.core.axes.batch_axes import GATHERED, make_batch_axes
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.shardings import RULES, partition_spec
from jaxscale.kernels.collectives import LinkStage

AXES = {"w": ("embed", "mlp"), "norm": ("norm",)}
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(16, 8)).astype(np.float32),
    "norm": RNG.normal(size=(16,)).astype(np.float32),
}
X_BD = RNG.normal(size=(8, 16)).astype(np.float32)
MESHES = [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]
STAGES = (LinkStage(((0, 2), (1, 3))), LinkStage(((0, 1), (2, 3))))  # a line of 4 devices as 2 rows of 2
CUBE = (  # a line of 8 devices as 2 planes of 2 rows of 2
    LinkStage(((0, 4), (1, 5), (2, 6), (3, 7))),
    LinkStage(((0, 2), (1, 3), (4, 6), (5, 7))),
    LinkStage(((0, 1), (2, 3), (4, 5), (6, 7))),
)
SLICES = (LinkStage(((0, 2, 4, 6), (1, 3, 5, 7))), LinkStage(((0, 1), (2, 3), (4, 5), (6, 7)), between_slices=True))


def summed(params, x_BD, gather=lambda w, axes, dtype: w):
    """A sum over rows, so that the sums of the devices are that of the batch."""
    h_BF = jnp.tanh((x_BD * params["norm"][None]) @ gather(params["w"], AXES["w"], "float32"))
    return jnp.sum(h_BF**3)


def spread_gradients(rules, mesh, reduce_dtype="float32", stages=None):
    """Gradients of `summed` taken on the devices of the mesh."""
    mesh = make_mesh(MeshConfig(**{"fsdp": 1} | mesh))
    batch_axes = make_batch_axes(mesh, RULES[rules], reduce_dtype)
    if stages:
        communication = dataclasses.replace(batch_axes.communication, stages=tuple(stages.items()))
        batch_axes = dataclasses.replace(batch_axes, communication=communication)

    def gradients(params, x_BD):
        loss, grads = jax.value_and_grad(summed)(params, x_BD, batch_axes.gather)
        grads = batch_axes.reduce_accumulated(batch_axes.reduce_microbatch(grads, AXES), AXES)
        return jax.lax.psum(loss, mesh.axis_names), grads

    specs = lambda table: {name: partition_spec(axes, table) for name, axes in AXES.items()}
    in_specs = (specs(RULES[rules].params), P(("data", "fsdp")))
    return jax.jit(batch_axes.shard_map(gradients, in_specs, (P(), specs(RULES[rules].moments))))


@functools.cache
def alone():
    return jax.tree.map(np.asarray, jax.value_and_grad(summed)(PARAMS, X_BD))


@pytest.mark.cases(4)
@pytest.mark.parametrize("rules", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_gradient_is_that_of_one_device(mesh, rules):
    loss, grads = spread_gradients(rules, mesh)(PARAMS, X_BD)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), (loss, grads), alone())


@pytest.mark.parametrize("rules", ["zero1", "zero3"])
@pytest.mark.parametrize(
    ("mesh", "stages"),
    [({"data": 2, "fsdp": 4}, STAGES), ({"fsdp": 8}, CUBE), ({"fsdp": 8}, SLICES)],
    ids=["2", "3", "slices"],
)
def test_stages_put_every_part_where_one_go_would(mesh, stages, rules):
    staged = spread_gradients(rules, mesh, stages={"data": (), "fsdp": stages})(PARAMS, X_BD)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), staged, alone())


@pytest.mark.parametrize(("tiled", "collectives"), [(False, 1), (True, 2)], ids=["switch", "torus"])
def test_what_lies_over_two_axes_goes_along_them_at_once_but_on_a_torus(tiled, collectives):
    mesh, rules = make_mesh(MeshConfig(fsdp=4, context=2)), RULES["zero3"]
    batch_axes = make_batch_axes(mesh, rules)
    communication = dataclasses.replace(batch_axes.communication, tiled=tiled)
    batch_axes = dataclasses.replace(batch_axes, communication=communication)

    def gradient(w_part):
        weighted = lambda part: jnp.sum(batch_axes.gather(part, AXES["w"], "float32") * PARAMS["w"])
        return batch_axes.gather(w_part, AXES["w"], "float32"), jax.grad(weighted)(w_part)

    place = partition_spec(AXES["w"], rules.params)
    spread = jax.jit(batch_axes.shard_map(gradient, (place,), (P(), place)))
    text = spread.lower(PARAMS["w"]).as_text()
    assert text.count("stablehlo.all_gather") == text.count("stablehlo.reduce_scatter") == collectives
    whole, grad = spread(PARAMS["w"])
    np.testing.assert_array_equal(whole, PARAMS["w"])
    np.testing.assert_allclose(grad, 8 * PARAMS["w"], rtol=1e-6)


def test_moments_are_cut_where_parameters_are_not():
    _, grads = spread_gradients("zero1", {"fsdp": 8})(PARAMS, X_BD)
    assert grads["w"].sharding.spec[0] == "fsdp" and grads["w"].addressable_shards[0].data.shape == (2, 8)


def test_sums_in_bfloat16_are_rounded_and_near():
    (_, grads), (_, exact) = spread_gradients("zero3", {"fsdp": 8}, "bfloat16")(PARAMS, X_BD), alone()
    assert grads["w"].dtype == jnp.float32
    error = np.abs(grads["w"] - exact["w"]).max() / np.abs(exact["w"]).max()
    assert 1e-5 < error < 3e-2  # 8 summands of 8 bits each


def test_a_weight_travels_in_the_dtype_that_is_asked_for():
    mesh = make_mesh(MeshConfig(fsdp=8))
    batch_axes = make_batch_axes(mesh, RULES["zero3"], "float32")
    f = batch_axes.shard_map(lambda w: batch_axes.gather(w, AXES["w"], "bfloat16"), (P("fsdp"),), P())
    whole = jax.jit(f)(PARAMS["w"])
    np.testing.assert_array_equal(whole, PARAMS["w"].astype(jnp.bfloat16))
    text = str(jax.make_jaxpr(f)(PARAMS["w"]))
    assert "all_gather" in text and f"name={GATHERED}" in text
    (line,) = [line for line in text.splitlines() if "all_gather[" in line]
    assert "bf16[16,8]" in line


def test_rows_are_numbered_over_the_devices():
    batch_axes = make_batch_axes(make_mesh(MeshConfig(data=2, fsdp=4)), RULES["zero3"])
    f = batch_axes.shard_map(lambda x_B: batch_axes.first_row(2) + 0 * x_B, (P(("data", "fsdp")),), P(("data", "fsdp")))
    np.testing.assert_array_equal(jax.jit(f)(np.zeros(16, np.int32)), np.repeat(np.arange(0, 16, 2), 2))


def test_one_device_does_nothing():
    batch_axes = make_batch_axes(make_mesh(MeshConfig(), jax.devices()[:1]), RULES["zero3"])
    w, f = PARAMS["w"], lambda x: x
    assert batch_axes.gather(w, AXES["w"], "bfloat16") is w and batch_axes.shard_map(f, P(), P()) is f
    assert (
        batch_axes.reduce_accumulated(PARAMS, AXES) is PARAMS and batch_axes.sum(w) is w and batch_axes.num_shards == 1
    )
