"""Devices that share the positions of a row have all of them together, each as many, and in a known order.

B batch  T position  N heads  H head dim
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.core.axes.context_axis import (
    NO_CONTEXT_AXIS,
    ContextAxis,
    make_context_axis,
    to_device_order,
    to_row_order,
)
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh

X_BT = np.arange(2 * 16).reshape(2, 16).astype(np.float32)


WHOLE = P()


def on_four(f, *arrays, zigzag=True, out_specs=WHOLE):
    """f(context, *arrays), each array whole on four devices."""
    mesh = make_mesh(MeshConfig(fsdp=1, context=4), jax.devices()[:4])
    context = make_context_axis(mesh, zigzag=zigzag)
    run = lambda *arrays: f(context, *arrays)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=out_specs, check_vma=False))(*arrays)


@pytest.mark.parametrize("zigzag", [True, False])
def test_own_positions_are_chunks_of_the_row_and_all_of_them_are_the_row_again(zigzag):
    f = lambda context, x_BT: (context.local(x_BT), context.all_gather(context.local({"x": x_BT})))
    own_BT, whole = on_four(f, X_BT, zigzag=zigzag, out_specs=(P(None, "context"), P()))
    np.testing.assert_array_equal(whole["x"], X_BT)
    order = [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9] if zigzag else list(range(16))
    np.testing.assert_array_equal(own_BT, X_BT[:, order])


def test_the_starts_of_chunks_are_where_own_positions_come_from():
    context = ContextAxis(size=4)
    assert context.chunk_starts(2).tolist() == [[0, 14], [2, 12], [4, 10], [6, 8]] and context.multiple == 8
    assert ContextAxis(size=4, zigzag=False).chunk_starts(4).tolist() == [[0], [4], [8], [12]]


def test_both_orders_are_each_others_inverse():
    context = ContextAxis(size=4)
    np.testing.assert_array_equal(to_row_order(context, to_device_order(context, jnp.asarray(X_BT))), X_BT)
    assert to_device_order(context, jnp.asarray(X_BT))[0, :4].tolist() == [0, 1, 14, 15]


def test_going_back_each_device_has_the_sum_of_what_all_make_of_its_positions():
    """Each scales the whole row by its own number."""

    def f(context, x_BT):
        own = 1.0 + jax.lax.axis_index("context")
        _, pull = jax.vjp(lambda x_BT: own * context.all_gather(x_BT), context.local(x_BT))
        return context.all_gather(pull(x_BT)[0])

    np.testing.assert_allclose(on_four(f, X_BT), 10 * X_BT)


def test_heads_and_positions_change_places_and_back():
    x_BTNH = np.random.default_rng(0).normal(size=(2, 16, 8, 2)).astype(np.float32)

    def f(context, x_BTNH):
        heads = context.shard_heads(context.local(x_BTNH))
        return heads, context.all_gather(context.shard_positions(heads))

    heads, back = on_four(f, x_BTNH, zigzag=False, out_specs=(P(None, None, "context"), P()))
    np.testing.assert_array_equal(heads, x_BTNH)
    np.testing.assert_array_equal(back, x_BTNH)


def test_one_device_leaves_everything_as_it_is():
    assert (
        NO_CONTEXT_AXIS.local(X_BT) is X_BT
        and NO_CONTEXT_AXIS.all_gather(X_BT) is X_BT
        and NO_CONTEXT_AXIS.multiple == 1
    )
