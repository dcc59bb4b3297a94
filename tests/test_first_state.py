"""What a run begins with: what its shapes say, drawn by one program for all runs that differ in other settings."""

import jax
import tiny

from jaxscale.first_state import drawn_params


def test_runs_that_differ_in_other_settings_draw_the_same_parameters_by_one_program():
    sharded = {"mesh.fsdp": 4, "mesh.tensor": 2}
    one, other = tiny.program(sharded, 8), tiny.program(sharded | {"optim.name": "sgd", "train.ema.decay": 0.9}, 8)
    first = one.init()
    made = drawn_params.cache_info().misses
    second = other.init()
    assert drawn_params.cache_info().misses == made
    tiny.assert_same_bits(tiny.host(second.params), tiny.host(first.params))
    tiny.assert_same_bits(tiny.host(second.ema), tiny.host(first.params))
    for program, state in ((one, first), (other, second)):
        placed = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state)
        assert placed == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), program.abstract_state)
