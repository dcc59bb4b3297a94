"""A line of devices falls into runs along the dimensions of the torus."""

import itertools
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxscale.sharding.torus import link_stages, stage_sizes


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


def fake_mesh(shape, names, platform="tpu"):
    """A mesh of things with coordinates, as the devices of a TPU slice have them, and those of GPUs not at hand."""
    devices = np.empty(shape, object)
    for place in np.ndindex(*shape):
        devices[place] = types.SimpleNamespace(coords=place, core_on_chip=0, platform=platform)
    return types.SimpleNamespace(axis_names=names, devices=devices.reshape(shape[0] * shape[1], shape[2]))


def test_groups_hold_the_positions_that_share_a_link():
    mesh = fake_mesh((2, 3, 4), ("fsdp", "tensor"))
    across, along = link_stages(mesh, "fsdp")
    assert across == ((0, 3), (1, 4), (2, 5)) and along == ((0, 1, 2), (3, 4, 5))
    assert link_stages(mesh, "tensor") == ()  # one link: nothing to do in stages


def test_gpus_leave_the_way_to_nccl():
    assert link_stages(fake_mesh((2, 3, 4), ("fsdp", "tensor"), "gpu"), "fsdp") == ()


def test_devices_without_coordinates_have_no_stages():
    assert link_stages(Mesh(np.array(jax.devices()), ("fsdp",)), "fsdp") == ()
