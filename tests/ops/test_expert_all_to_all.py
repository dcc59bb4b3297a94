"""Rows that are sent to their experts' devices and back, beside all experts on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale.core.axes.expert_axis import ExpertAxis
from jaxscale.core.models.moe import run_experts
from jaxscale.kernels.activation import swiglu
from jaxscale.kernels.matmul.expert_all_to_all import all_to_all_experts, round_capacity
from jaxscale.kernels.matmul.slots import ON_CPU, project_expert, run_in_slots, weighted_activation_f32

DEVICES, EXPERTS, ROWS, EMBED, WIDTH = 4, 8, 32, 8, 16  # rows of a device
COUNTS = {  # rows of each device for each expert: (counts, rounds that they need)
    "equal": ([[4] * 8] * 4, 1),
    "all to one": ([[0, 32, 0, 0, 0, 0, 0, 0]] * 4, 2),
    "each its own": ([[0] * (2 * d) + [32, 0] + [0] * (6 - 2 * d) for d in range(4)], 2),
    "any": ([[1, 9, 0, 3, 2, 7, 8, 2], [0, 0, 0, 0, 5, 5, 11, 11], [4] * 8, [30, 0, 0, 0, 0, 0, 0, 2]], 2),
}


@functools.cache
def both_ways():
    """f(weights, x_RD, weight_R, counts_PE, dy_RD) -> (values and gradients sent, those of one device, rounds)."""
    axis, gated = ExpertAxis(DEVICES), functools.partial(weighted_activation_f32, swiglu)
    run = functools.partial(run_in_slots, ON_CPU, functools.partial(run_experts, project_expert, gated))
    on_mesh = functools.partial(jax.shard_map, mesh=Mesh(jax.devices()[:DEVICES], "expert"), check_vma=False)

    def one_device(weights, x_RD, weight_R, counts_1E):
        y_RD, needed = all_to_all_experts(axis, run, weights, x_RD, weight_R, counts_1E[0])
        return y_RD, needed[None]

    sent = on_mesh(one_device, in_specs=P("expert"), out_specs=P("expert"))

    def alone(weights, x_RD, weight_R, counts_PE):
        parts = zip(jnp.split(x_RD, DEVICES), jnp.split(weight_R, DEVICES), counts_PE)
        return jnp.concatenate([run(weights, *part) for part in parts])

    @jax.jit
    def both(weights, x_RD, weight_R, counts_PE, dy_RD):
        given = weights, x_RD, weight_R
        got, pull, needed = jax.vjp(lambda *given: sent(*given, counts_PE), *given, has_aux=True)
        right, pull_right = jax.vjp(lambda *given: alone(*given, counts_PE), *given)
        return (got, pull(dy_RD)), (right, pull_right(dy_RD)), needed

    return both


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "rounds"), COUNTS.values(), ids=COUNTS)
def test_values_and_gradients_are_those_of_one_device_however_many_rounds(counts, rounds):
    keys = iter(jax.random.split(jax.random.key(0), 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    weights = normal(EXPERTS, EMBED, WIDTH), normal(EXPERTS, EMBED, WIDTH), normal(EXPERTS, WIDTH, EMBED)
    x_RD, dy_RD = normal(DEVICES * ROWS, EMBED), normal(DEVICES * ROWS, EMBED)
    weight_R, counts_PE = jax.random.uniform(next(keys), (DEVICES * ROWS,)), jnp.asarray(counts, jnp.int32)
    (got, grads), (right, grads_right), needed = both_ways()(weights, x_RD, weight_R, counts_PE, dy_RD)
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-4)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-3)
    assert (needed == -(-counts_PE.reshape(DEVICES, DEVICES, -1).sum(-1).max() // round_capacity(ROWS, DEVICES))).all()
    assert (needed >= rounds).all() and (rounds > 1) == bool((needed > 1).all())
