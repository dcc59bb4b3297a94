"""bytes_sent() equals the bytes of the traced collectives: batch, tensor, context (gather, ulysses) and expert axes."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.core.axes.batch_axes import make_batch_axes
from jaxscale.core.axes.context_axis import AttentionBytes, make_context_axis
from jaxscale.core.axes.expert_axis import ExpertAxis
from jaxscale.core.axes.tensor_axis import make_tensor_axis
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.shardings import RULES
from jaxscale.kernels.collectives import ring_bytes
from jaxscale.kernels.matmul.expert_all_to_all import all_to_all_experts, round_capacity

KINDS = {
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "psum": "all-reduce", "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}  # fmt: skip


def planned_bytes(sent, mesh):
    """Bytes that one device sends in these collectives."""
    return sum(ring_bytes(one.kind, one.nbytes, mesh.shape[one.axis]) for one in sent)


def traced_bytes(f, mesh, *args):
    """Bytes that one device sends in f and its gradient by all arguments, each loop run once."""
    local = lambda *args: jax.value_and_grad(lambda args: jnp.sum(f(*args) ** 2))(args)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return sent_bytes(jax.make_jaxpr(mapped)(*args).jaxpr, mesh)


def sent_bytes(jaxpr, mesh):
    total = 0.0
    for eqn in jaxpr.eqns:
        if (name := eqn.primitive.name.removesuffix("_invariant")) in KINDS:
            names = eqn.params.get("axes", eqn.params.get("axis_name"))
            size = math.prod(mesh.shape[axis] for axis in ((names,) if isinstance(names, str) else names))
            arrays = eqn.outvars if name == "all_gather" else eqn.invars
            nbytes = sum(one.aval.size * one.aval.dtype.itemsize for one in arrays)
            total += ring_bytes(KINDS[name], nbytes, size)
        inner = [
            getattr(one, "jaxpr", one) for one in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns"))
        ]
        total += sum(sent_bytes(one, mesh) for one in inner if hasattr(one, "eqns"))
    return total


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 2, "expert": 2, "context": 2}, {"data": 2, "fsdp": 4}])
def test_weights_are_gathered_and_their_gradients_scattered(sizes):
    mesh = make_mesh(MeshConfig(**{"fsdp": 1} | sizes))
    axes, whole = make_batch_axes(mesh, RULES["zero3"]), 4 * 16 * 8
    partition = axes.partition(("embed", "mlp"), axes.rules.params)
    local = jnp.ones((16 // axes.num_parts(partition), 8))
    sent = [one for kind in ("all-gather", "reduce-scatter") for one in axes.bytes_sent(kind, whole, partition)]
    assert {one.axis for one in sent} == set(sizes) - {"data"}
    gathered = traced_bytes(lambda w: axes.gather(w, ("embed", "mlp"), "float32"), mesh, local)
    assert planned_bytes(sent, mesh) == pytest.approx(gathered)


def test_positions_are_gathered_and_scattered_over_tensor():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    axis = make_tensor_axis(mesh)
    found = traced_bytes(lambda x_BTD: axis.reduce_scatter(axis.all_gather(x_BTD)), mesh, jnp.ones((2, 4, 8)))
    assert planned_bytes(2 * axis.bytes_sent(4 * 2 * 16 * 8), mesh) == pytest.approx(found)  # forward and backward


def test_keys_are_gathered_or_heads_exchanged_over_context():
    mesh = make_mesh(MeshConfig(fsdp=2, context=4))
    q_BtNH, k_BtKH = jnp.ones((2, 8, 8, 4)), jnp.ones((2, 8, 4, 4))
    local = AttentionBytes(2 * k_BtKH.nbytes, q_BtNH.nbytes, float32_ratio=1.0, forward_passes=1, ring_passes=1)
    axis = make_context_axis(mesh)
    gathered = traced_bytes(lambda k, v: sum(axis.all_gather((k, v))), mesh, k_BtKH, k_BtKH)
    assert planned_bytes(axis.bytes_sent("gather", local), mesh) == pytest.approx(gathered)
    axis = make_context_axis(mesh, zigzag=False)

    def ulysses(q, k, v):
        q, k, v = (axis.shard_heads(x) for x in (q, k, v))
        return axis.shard_positions(q * jnp.repeat(k + v, 2, 2))

    assert planned_bytes(axis.bytes_sent("ulysses", local), mesh) == pytest.approx(
        traced_bytes(ulysses, mesh, q_BtNH, k_BtKH, k_BtKH)
    )


def test_rows_go_to_their_experts_and_back():
    mesh, devices, num_rows, D = make_mesh(MeshConfig(fsdp=2, expert=4)), 4, 64, 8
    axis, counts_E = ExpertAxis(devices), jnp.full(8, num_rows // 8, jnp.int32)
    run = lambda w, x_SD, weight_S, counts_e: x_SD * w * weight_S[:, None]
    send = lambda w, x_RD, weight_R: all_to_all_experts(axis, run, w, x_RD, weight_R, counts_E)[0]
    found = traced_bytes(send, mesh, jnp.ones(()), jnp.ones((num_rows, D)), jnp.ones(num_rows))
    planned = planned_bytes(axis.bytes_sent(devices * round_capacity(num_rows, devices), 4 * D), mesh)
    counts = 2 * ring_bytes("all-to-all", counts_E.nbytes, devices)  # forward and backward
    assert planned + counts == pytest.approx(found)
