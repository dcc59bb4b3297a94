"""The mesh always has six axes; sizes that do not fit the machine are refused in one line."""

import jax
import pytest
from jax.sharding import AxisType

from jaxscale.sharding.mesh import MeshConfig, make_mesh, mesh_shape
from jaxscale.sharding.rules import MESH_AXES


@pytest.mark.parametrize(
    ("sizes", "num_devices", "expected"),
    [
        ({}, 8, {"fsdp": 8}),
        ({}, 1, {}),
        ({"tensor": 2}, 8, {"fsdp": 4, "tensor": 2}),
        ({"data": -1, "fsdp": 2}, 8, {"data": 4, "fsdp": 2}),
        ({"fsdp": 1, "data": 8}, 8, {"data": 8}),
        ({"data": 2, "tensor": 4}, 8, {"data": 2, "tensor": 4}),
        ({"tensor": 2}, 6, {"fsdp": 3, "tensor": 2}),
    ],
)
def test_one_free_axis_takes_the_devices_that_are_left(sizes, num_devices, expected):
    assert mesh_shape(MeshConfig(**sizes), num_devices) == dict.fromkeys(MESH_AXES, 1) | expected


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"tensor": 3}, "mesh={'fsdp': -1, 'tensor': 3} needs a multiple of 3 devices, and there are 8"),
        ({"fsdp": 4}, "mesh={'fsdp': 4} multiplies to 4 devices, and there are 8; make one axis -1"),
        ({"fsdp": 1}, "mesh=all 1 multiplies to 1 devices, and there are 8; make one axis -1"),
        ({"fsdp": 4, "tensor": 4}, "multiplies to 16 devices, and there are 8"),
        ({"tensor": 16}, "needs a multiple of 16 devices, and there are 8"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_devices_are_refused(sizes, told):
    with pytest.raises(ValueError) as error:
        mesh_shape(MeshConfig(**sizes), 8)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"data": -1}, "only one axis may be -1"),
        ({"data": -2}, "data=-2 must be a positive number"),
        ({"tensor": 0}, "tensor=0 must be a positive number"),
        ({"pipeline": 2}, "pipeline=2 is not built yet"),
        ({"expert": -1, "fsdp": 1}, "expert=-1 is not built yet"),
    ],
)
def test_sizes_that_no_machine_has_are_refused_at_once(sizes, told):
    with pytest.raises(ValueError, match=told):
        MeshConfig(**sizes)


def test_the_mesh_has_all_axes_slowest_link_first_and_their_types_are_given():
    mesh = make_mesh(MeshConfig(tensor=2))
    assert mesh.axis_names == MESH_AXES
    assert mesh.axis_types == (AxisType.Auto,) * 6
    assert mesh.shape["fsdp"] == 4 and mesh.size == 8


def test_the_mesh_may_be_of_some_devices_only():
    mesh = make_mesh(MeshConfig(), jax.devices()[2:4])
    assert {device.id for device in mesh.devices.flat} == {2, 3}
