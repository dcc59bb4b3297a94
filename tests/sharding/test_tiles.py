"""Arrays in shapes that a TPU scatters well, and the parts in their own shapes again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.sharding.batch_axes import make_batch_axes, scattered
from jaxscale.sharding.mesh import MeshConfig, make_mesh
from jaxscale.sharding.rules import RULES
from jaxscale.sharding.tiles import LANES, from_scatter, has_tiles, largest_prime_factor, to_scatter

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


@pytest.mark.parametrize(("shape", "scattered_shape"), SHAPES, ids=str)
def test_a_part_of_it_is_a_part_of_the_array(shape, scattered_shape):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    sent = to_scatter(x)
    assert sent.shape == scattered_shape
    np.testing.assert_array_equal(from_scatter(sent[4:8], shape[1:]), x[4:8])


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("shape", [(16, 151 * LANES), (16, 16, 24), (16, 16, 4, 24), (16, 24)], ids=str)
def test_devices_get_the_same_parts_of_the_same_sums(shape, dimension):
    mesh = make_mesh(MeshConfig(fsdp=8))
    travel = make_batch_axes(mesh, RULES["zero3"]).travel
    cut = ((dimension, ("fsdp",)),)
    out = P(*[None] * dimension, "fsdp")
    x = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)

    def sums(tiled):
        how = dataclasses.replace(travel, tiled=tiled)
        scatter = lambda x: scattered(x[0], cut, how)
        spread = jax.shard_map(scatter, mesh=mesh, in_specs=P("fsdp"), out_specs=out, check_vma=False)
        return jax.jit(spread)(x)

    np.testing.assert_array_equal(sums(tiled=True), sums(tiled=False))
    np.testing.assert_allclose(sums(tiled=True), x.sum(0), rtol=1e-5, atol=1e-5)


def test_a_cpu_has_no_tiles():
    assert not has_tiles(make_mesh(MeshConfig(fsdp=8)))


def test_a_largest_prime_factor():
    assert [largest_prime_factor(n) for n in (1, 2, 12, 97, 1002, 1024, 1187, 2049)] == [1, 2, 3, 97, 167, 2, 1187, 683]
