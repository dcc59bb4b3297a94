"""Arrays in shapes that a TPU scatters well, and the parts in their own shapes again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.core.axes.batch_axes import make_batch_axes
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.shardings import RULES
from jaxscale.kernels.collectives import LANES, has_equal_groups, on_tpu, pad_for_scatter, reduce_scatter, unpad
from jaxscale.tools.planning.placeholder_devices import open_machine

SHAPES = [  # and what is scattered
    ((16, 151_936), (16, 1200 * LANES)),  # Qwen: 1,187 tiles, a prime
    ((16, 262_208), (16, 2064 * LANES)),  # Gemma 3: 2,048 tiles and a half, 3 x 683
    ((16, 128_256), (16, 1008 * LANES)),  # Llama 3: 2 x 3 x 167 tiles
    ((16, 50_257), (16, 50_257)),  # GPT-2: 3 x 131 tiles
    ((16, 32_768), (16, 32_768)),
    ((16, 4, 256), (16, 1024)),  # Gemma 3's keys: 4 heads are half a tile
    ((16, 8, 128), (16, 8, 128)),
    ((16, 12, 64), (16, 12, 64)),  # GPT-2's: more than a tile
    ((16, 7, 151 * LANES), (16, 1072 * LANES)),  # flattened, it is 7 x 151 tiles
    ((16,), (16,)),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("shape", "scattered_shape"), SHAPES, ids=str)
def test_a_part_of_it_is_a_part_of_the_array(shape, scattered_shape):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    sent = pad_for_scatter(x)
    assert sent.shape == scattered_shape
    np.testing.assert_array_equal(unpad(sent[4:8], shape[1:]), x[4:8])


@pytest.mark.cases(3)
@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("shape", [(16, 151 * LANES), (16, 16, 24), (16, 16, 4, 24), (16, 24)], ids=str)
def test_devices_get_the_same_parts_of_the_same_sums(shape, dimension):
    mesh = make_mesh(MeshConfig(fsdp=8))
    communication = make_batch_axes(mesh, RULES["zero3"]).communication
    cut = ((dimension, ("fsdp",)),)
    out = P(*[None] * dimension, "fsdp")
    x = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)

    def sums(tiled):
        how = dataclasses.replace(communication, tiled=tiled)
        scatter = lambda x: reduce_scatter(x[0], cut, how)
        spread = jax.shard_map(scatter, mesh=mesh, in_specs=P("fsdp"), out_specs=out, check_vma=False)
        return jax.jit(spread)(x)

    np.testing.assert_array_equal(sums(tiled=True), sums(tiled=False))
    np.testing.assert_allclose(sums(tiled=True), x.sum(0), rtol=1e-5, atol=1e-5)


def test_only_a_tpu_has_tiles():
    cpus = make_mesh(MeshConfig(fsdp=8))
    assert not on_tpu(cpus) and not make_batch_axes(cpus, RULES["zero3"]).communication.tiled
    for name, tiled in (("v5e:2x4", True), ("h100:1x8", False)):
        mesh = make_mesh(MeshConfig(fsdp=8), open_machine(name).devices)
        assert on_tpu(mesh) == make_batch_axes(mesh, RULES["zero3"]).communication.tiled == tiled


def test_tiles_in_groups_of_a_middling_size():
    whole = [614, 802, 1004, 1186, 1187, 2049, 167, 334, 482]  # summed whole on lines of 2, 4 or 8 chips
    fine = [1, 8, 86, 112, 150, 250, 393, 404, 784, 1001, 1023, 1188, 2000, 2050]  # few, or scattered on lines of 2
    assert not any(map(has_equal_groups, whole)) and all(map(has_equal_groups, fine))
    assert all(has_equal_groups(16 * n) for n in range(1, 400))


@pytest.mark.parametrize("axes", [("experts", "expert_embed", "mlp"), ("experts", "mlp", "expert_embed")], ids=str)
def test_stacks_of_experts_are_the_same_whichever_way_they_come_together(axes):
    batch_axes = make_batch_axes(make_mesh(MeshConfig(fsdp=4, expert=2)), RULES["zero3"])
    spec = P(*map(batch_axes.rules.params.get, axes))
    w, weight = np.random.default_rng(0).normal(size=(2, 4, 16, 24)).astype(np.float32)

    def both(tiled):
        one = dataclasses.replace(batch_axes, communication=dataclasses.replace(batch_axes.communication, tiled=tiled))

        def local(w, weight):
            whole, pull = jax.vjp(lambda w: one.gather(w, axes, "float32"), w)
            return whole, *pull(weight)

        return jax.jit(one.shard_map(local, (spec, P()), (P(), spec)))(w, weight)

    for whole, grad in (both(tiled=True), both(tiled=False)):
        np.testing.assert_array_equal(whole, w)
        np.testing.assert_array_equal(grad, 8 * weight)
