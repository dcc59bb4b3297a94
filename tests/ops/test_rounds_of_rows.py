"""Rows that are sent to their experts' devices and back, beside all experts on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale.models.experts import run_experts
from jaxscale.ops.activation import swiglu
from jaxscale.ops.exchange import exchanged, round_size
from jaxscale.ops.slots import in_slots, project_rows, weigh
from jaxscale.sharding.expert_axis import ExpertAxis

DEVICES, EXPERTS, ROWS, EMBED, WIDTH = 4, 8, 32, 8, 16  # rows of a device
COUNTS = {  # rows of each device for each expert: (counts, rounds that they need)
    "equal": ([[4] * 8] * 4, 1),
    "all to one": ([[0, 32, 0, 0, 0, 0, 0, 0]] * 4, 2),
    "each its own": ([[0] * (2 * d) + [32, 0] + [0] * (6 - 2 * d) for d in range(4)], 2),
    "any": ([[1, 9, 0, 3, 2, 7, 8, 2], [0, 0, 0, 0, 5, 5, 11, 11], [4] * 8, [30, 0, 0, 0, 0, 0, 0, 2]], 2),
}


@pytest.mark.parametrize(("counts", "rounds"), COUNTS.values(), ids=COUNTS)
def test_values_and_gradients_are_those_of_one_device_however_many_rounds(counts, rounds):
    axis, gated = ExpertAxis(DEVICES), functools.partial(weigh, swiglu)
    run = functools.partial(in_slots, functools.partial(run_experts, project_rows, gated))
    keys = iter(jax.random.split(jax.random.key(0), 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    weights = normal(EXPERTS, EMBED, WIDTH), normal(EXPERTS, EMBED, WIDTH), normal(EXPERTS, WIDTH, EMBED)
    x_RD, dy_RD = normal(DEVICES * ROWS, EMBED), normal(DEVICES * ROWS, EMBED)
    weight_R, counts_PE = jax.random.uniform(next(keys), (DEVICES * ROWS,)), jnp.asarray(counts, jnp.int32)
    own = P("expert")
    on_mesh = functools.partial(jax.shard_map, mesh=Mesh(jax.devices()[:DEVICES], "expert"), check_vma=False)

    def sent(weights, x_RD, weight_R):
        f = lambda weights, x_RD, weight_R, counts_1E: exchanged(axis, run, weights, x_RD, weight_R, counts_1E[0])[0]
        return on_mesh(f, in_specs=own, out_specs=own)(weights, x_RD, weight_R, counts_PE)

    def alone(weights, x_RD, weight_R):
        parts = zip(jnp.split(x_RD, DEVICES), jnp.split(weight_R, DEVICES), counts_PE)
        return jnp.concatenate([run(weights, *part) for part in parts])

    (got, pull), (right, pull_right) = jax.vjp(sent, weights, x_RD, weight_R), jax.vjp(alone, weights, x_RD, weight_R)
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-4)
    for one, other in zip(jax.tree.leaves(pull(dy_RD)), jax.tree.leaves(pull_right(dy_RD)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-3)
    told = lambda x_RD, weight_R, counts_1E: exchanged(axis, run, weights, x_RD, weight_R, counts_1E[0])[1][None]
    weights = jax.tree.map(lambda w: w[: EXPERTS // DEVICES], weights)
    needed = on_mesh(told, in_specs=own, out_specs=own)(x_RD, weight_R, counts_PE)
    assert (needed == -(-counts_PE.reshape(DEVICES, DEVICES, -1).sum(-1).max() // round_size(ROWS, DEVICES))).all()
    assert (needed >= rounds).all() and (rounds > 1) == bool((needed > 1).all())
