"""Arrays lie where the tables say, and a state is born there.

B batch  T position
"""

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.shardings import (
    FSDP_TENSOR,
    RULES,
    TENSOR,
    axis_size,
    batch_sharding,
    check_divides,
    partition_spec,
    tree_shardings,
)
from jaxscale.runtime.hosts.meshes import local_rows, put_rows


def test_logical_axes_become_a_spec():
    assert partition_spec(("embed", "heads", "head_dim"), FSDP_TENSOR) == PartitionSpec(
        ("fsdp", "expert", "context"), "tensor", None
    )
    assert partition_spec(("act_batch", "act_seq"), TENSOR) == PartitionSpec(("data", "fsdp", "expert"), None)
    assert partition_spec((), TENSOR) == PartitionSpec()


def test_an_axis_without_a_rule_is_named():
    with pytest.raises(ValueError, match=r"no sharding rule for \['emebd'\] in \('emebd', 'mlp'\); the table has"):
        partition_spec(("emebd", "mlp"), TENSOR)


@pytest.mark.parametrize("axes", [("heads", "mlp"), ("embed", "act_batch"), ("vocab", "vocab")])
def test_a_mesh_axis_cannot_be_used_twice(axes):
    with pytest.raises(ValueError, match=r"mesh axes \['(tensor|expert', 'fsdp)'\] appear twice in"):
        partition_spec(axes, FSDP_TENSOR)


def test_axis_size_is_the_product_of_its_mesh_axes():
    shape = {"data": 2, "fsdp": 3, "expert": 7, "tensor": 5, "context": 1}
    assert [axis_size(axis, FSDP_TENSOR, shape) for axis in ("act_batch", "experts", "mlp", "norm")] == [42, 7, 5, 1]


def test_every_table_has_the_same_axes():
    assert {frozenset(table) for rules in RULES.values() for table in (rules.params, rules.grads, rules.moments)} == {
        frozenset(TENSOR)
    }


def test_lengths_that_a_mesh_does_not_divide_are_all_told_at_once():
    shapes = {"wq": jax.ShapeDtypeStruct((6, 4), "float32"), "up": jax.ShapeDtypeStruct((6, 9), "float32")}
    axes = {"wq": ("embed", "heads"), "up": ("embed", "mlp")}
    told = check_divides(shapes, axes, FSDP_TENSOR, {"fsdp": 2, "expert": 1, "context": 2, "tensor": 2})
    assert sorted(told) == [
        "embed=6 is not a multiple of the 4 devices along mesh fsdp x context",
        "mlp=9 is not a multiple of the 2 devices along mesh tensor",
    ]
    assert not check_divides(shapes, axes, FSDP_TENSOR, {"fsdp": 2, "expert": 1, "context": 1, "tensor": 1})


# The state of a run on eight devices. wq: [L=2, D=16, N=4, H=8] with the mesh fsdp=4, tensor=2.

PLACES = {  # shapes that one device holds of a parameter, and of its moments
    "zero1": ((2, 16, 2, 8), (2, 4, 2, 8)),
    "zero2": ((2, 16, 2, 8), (2, 4, 2, 8)),
    "zero3": ((2, 4, 2, 8), (2, 4, 2, 8)),
}


@pytest.fixture(scope="module", params=PLACES)
def stage_and_state(request):
    program = tiny.program({"mesh.tensor": 2, "rules": request.param}, 8)
    return request.param, program, program.init()


def pieces(array):
    """Shapes of what each device holds."""
    return {shard.data.shape for shard in array.addressable_shards}


@pytest.mark.cases(1)
def test_a_state_is_born_sharded(stage_and_state):
    stage, _, state = stage_and_state
    params, moments = PLACES[stage]
    adam = state.opt_state[1]
    assert len(state.params["blocks"]["attention"]["wq"].addressable_shards) == 8
    assert pieces(state.params["blocks"]["attention"]["wq"]) == {params}
    assert pieces(adam.mu["blocks"]["attention"]["wq"]) == {moments}
    assert pieces(adam.nu["blocks"]["attention"]["wq"]) == {moments}
    assert pieces(state.params["blocks"]["mlp_norm"]) == {(2, 16)}  # too small to be worth cutting
    assert pieces(state.step) == {()}


def test_the_first_state_does_not_depend_on_the_mesh(stage_and_state):
    one = tiny.program().init()
    tiny.assert_same_bits(tiny.host(one), tiny.host(stage_and_state[2]))


def test_what_is_planned_is_what_is_made(stage_and_state):
    _, program, state = stage_and_state
    for planned, made in zip(jax.tree.leaves(program.abstract_state), jax.tree.leaves(state), strict=True):
        assert (planned.shape, planned.dtype) == (made.shape, made.dtype)
        assert made.sharding.is_equivalent_to(planned.sharding, made.ndim)


def test_gradients_lie_where_their_table_says():
    mesh = make_mesh(MeshConfig(tensor=2))
    axes = {"wq": ("embed", "heads", "head_dim")}
    found = {stage: tree_shardings(mesh, axes, rules.grads)["wq"].spec for stage, rules in RULES.items()}
    cut = PartitionSpec("fsdp", "tensor", None)
    assert found == {"zero1": PartitionSpec(None, "tensor", None), "zero2": cut, "zero3": cut}


# Rows of a batch.


def test_rows_become_the_same_array_however_they_are_handed_over():
    mesh = make_mesh(MeshConfig(tensor=2))
    sharding = batch_sharding(mesh, TENSOR)
    rows_BT = np.arange(8 * 6, dtype=np.int32).reshape(8, 6)
    whole = put_rows({"x": rows_BT}, list(range(8)), 8, sharding)["x"]
    order = [3, 1, 0, 2, 7, 5, 6, 4]
    # More rows than the array has: the path of a process that reads its own rows only, in an order of its own.
    partial = put_rows({"x": rows_BT[order + [0]]}, order + [0], 8, sharding)["x"]
    for made in (whole, partial):
        np.testing.assert_array_equal(made, jax.device_put(rows_BT, sharding))
        assert made.sharding == sharding and pieces(made) == {(2, 6)}


def test_a_process_reads_the_rows_of_its_devices():
    mesh = make_mesh(MeshConfig(tensor=2))
    assert local_rows(batch_sharding(mesh, TENSOR), (8, 6)) == list(range(8))
