"""What a run begins with: what its shapes say, drawn by one program for all runs that differ in other settings."""

import typing

import jax
import numpy as np
import pytest
import tiny
from stacks import draw, on_mesh, ours

from jaxscale.core.optim.config import OptimConfig
from jaxscale.core.setup import make_init_params


def test_runs_that_differ_in_other_settings_draw_the_same_parameters_by_one_program():
    sharded = {"mesh.fsdp": 4, "mesh.tensor": 2}
    changes = ({}, {"optim.name": "sgd", "train.ema.decay": 0.9}, {"seed": 2})
    one, other, seeded = (tiny.program(sharded | changed, 8) for changed in changes)
    first = one.init()
    made = make_init_params.cache_info().misses
    second, third = other.init(), seeded.init()
    assert make_init_params.cache_info().misses == made
    tiny.assert_same_bits(tiny.host(second.params), tiny.host(first.params))
    tiny.assert_same_bits(tiny.host(second.ema), tiny.host(first.params))
    assert not np.array_equal(third.params["embedding"], first.params["embedding"])
    for program, state in ((one, first), (other, second)):
        placed = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state)
        assert placed == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), program.abstract_state)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", typing.get_args(typing.get_type_hints(OptimConfig)["name"]))
def test_an_optimizer_begins_with_zeros_whatever_the_parameters_are(name):
    optimizer, _ = ours(on_mesh({}), name=name)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(optimizer.init(draw(0))))
