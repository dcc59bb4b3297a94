"""A line of devices falls into runs along the dimensions of the torus."""

import itertools
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxscale.kernels.collectives import link_stages, most_links_outermost, stage_sizes


@pytest.mark.parametrize(
    ("points", "sizes"),
    [
        (list(itertools.product(range(2), range(2), range(4))), (2, 2, 4)),
        (list(itertools.product([0], range(8), range(8))), (8, 8)),
        ([(0, y) for y in range(4)], (4,)),
        ([(0, 0)], ()),
        ([(0, 0), (0, 1), (1, 1), (1, 0)], (2, 2)),  # a ring: its rows are straight, and so is the way between them
        ([(0, 0), (1, 1), (2, 3), (3, 7)], (4,)),  # no order at all
    ],
)
def test_runs_are_along_one_coordinate(points, sizes):
    assert stage_sizes(points) == sizes


def slices(num_slices, shape, kind="TPU v5", platform="tpu"):
    """Things with coordinates, as the devices of TPU slices and GPUs that are not at hand have: [slice, x, y, ...]."""
    devices = np.empty((num_slices, *shape), object)
    for number, *place in np.ndindex(devices.shape):
        devices[number, *place] = types.SimpleNamespace(
            coords=tuple(place), core_on_chip=0, slice_index=number, device_kind=kind, platform=platform
        )
    return devices


def fake_mesh(shape, names, platform="tpu"):
    """A mesh whose first axis runs along all but the last dimension of a slice."""
    return types.SimpleNamespace(axis_names=names, devices=slices(1, shape, platform=platform).reshape(-1, shape[-1]))


def test_groups_hold_the_positions_that_share_a_link():
    mesh = fake_mesh((2, 3, 4), ("fsdp", "tensor"))
    across, along = link_stages(mesh, "fsdp")
    assert across.groups == ((0, 3), (1, 4), (2, 5)) and along.groups == ((0, 1, 2), (3, 4, 5))
    assert link_stages(mesh, "tensor") == ()  # one link: nothing to do in stages


def test_gpus_leave_the_way_to_nccl():
    assert link_stages(fake_mesh((2, 3, 4), ("fsdp", "tensor"), "gpu"), "fsdp") == ()


def test_devices_without_coordinates_have_no_stages():
    assert link_stages(Mesh(np.array(jax.devices()), ("fsdp",)), "fsdp") == ()


@pytest.mark.parametrize(
    ("kind", "num_slices", "shape", "order"),
    [
        ("TPU v5", 1, (2, 2, 4), "x y z"),  # under a cube there are no rings
        ("TPU v5", 1, (8, 8, 8), "x y z"),  # rings alike
        ("TPU v5 lite", 1, (8, 16, 1), "y x"),
        ("TPU v6 lite", 2, (16, 16, 1), "x y slice"),
    ],
)
def test_along_an_axis_the_most_links_vary_slowest_and_slices_fastest(kind, num_slices, shape, order):
    devices = slices(num_slices, shape, kind)
    line = most_links_outermost(devices.reshape(-1))
    place = {"slice": 0, "x": 1, "y": 2, "z": 3}
    varying = [place[name] for name in order.split()]
    still = [number for number in range(devices.ndim) if number not in varying]  # of size 1
    assert [id(one) for one in line] == [id(one) for one in devices.transpose(*varying, *still).ravel()]


def test_other_axes_stay_as_they_are():
    devices = slices(1, (2, 2, 4)).reshape(4, 4)
    arranged = most_links_outermost(devices)
    assert sorted(map(id, arranged.ravel())) == sorted(map(id, devices.ravel()))
    assert np.array_equal(arranged, devices)  # x and y are alike, and z is an axis of its own


def test_what_takes_a_torus_at_once_still_takes_the_way_between_slices_alone():
    mesh = types.SimpleNamespace(axis_names=("fsdp",), devices=most_links_outermost(slices(2, (2, 2)).reshape(-1)))
    inside, between = link_stages(mesh, "fsdp", torus_at_once=True)
    assert inside.groups == ((0, 2, 4, 6), (1, 3, 5, 7)) and not inside.between_slices
    assert between.groups == ((0, 1), (2, 3), (4, 5), (6, 7)) and between.between_slices
    assert link_stages(fake_mesh((2, 3, 4), ("fsdp", "tensor")), "fsdp", torus_at_once=True) == ()
