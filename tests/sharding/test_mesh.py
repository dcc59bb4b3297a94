"""The mesh always has six axes; slices and nodes are its outermost blocks; sizes that do not fit are refused."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from xla_flags import xla_flags

from jaxscale.core.config import MESH_AXES, MeshConfig
from jaxscale.core.mesh import arrange, make_mesh, mesh_shape
from jaxscale.runtime.hosts.meshes import mesh_layout, one_at_a_time
from jaxscale.tools.planning.placeholder_devices import open_machine
from jaxscale.tools.planning.topology import open_topology


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
        ({"tensor": 3}, "mesh={'fsdp': -1, 'tensor': 3} needs a multiple of 3 devices, but there are 8; use tensor=2"),
        ({"fsdp": 4}, "mesh={'fsdp': 4} needs 4 devices, but there are 8; set one axis to -1"),
        ({"fsdp": 1}, "mesh=all 1 needs 1 devices, but there are 8; set one axis to -1"),
        ({"fsdp": 4, "tensor": 4}, "needs 16 devices, but there are 8"),
        ({"tensor": 16}, "needs a multiple of 16 devices, but there are 8; use tensor=8"),
        (
            {"data": 3, "tensor": 5},
            "needs a multiple of 15 devices, but there are 8; use sizes among 1, 2, 4 or 8",
        ),
        ({"data": 2, "tensor": 5}, "needs a multiple of 10 devices, but there are 8; use tensor=4"),
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


@dataclasses.dataclass(frozen=True)
class Device:
    """What the arrangement asks of a device, for machines that are not here."""

    id: int
    platform: str
    slice_index: int
    process_index: int
    device_kind: str = "simulated"


def devices(num_groups, each, platform="cpu", numbered_by="slice_index"):
    numbers = {"slice_index": 0, "process_index": 0}
    return [
        Device(id=n, platform=platform, **numbers | {numbered_by: n // each}) for n in range(num_groups * each)
    ]  # fmt: skip


def blocks(sizes, found, by="slice_index"):
    """{axis: the groups met on the way along it from the first device}."""
    arranged = arrange(mesh_shape(MeshConfig(**sizes), len(found)), found)
    assert {device.id for device in arranged.flat} == {device.id for device in found}
    met = {}
    for place, axis in enumerate(MESH_AXES):
        line = np.moveaxis(arranged, place, 0).reshape(arranged.shape[place], -1)[:, 0]
        if len(line) > 1:
            met[axis] = [getattr(device, by) for device in line]
    return met


@pytest.mark.parametrize(
    ("sizes", "groups", "met"),
    [
        ({"data": 2}, 2, {"data": [0, 1], "fsdp": [0] * 4}),
        ({"data": 2, "tensor": 2}, 2, {"data": [0, 1], "fsdp": [0, 0], "tensor": [0, 0]}),
        ({"data": 4}, 2, {"data": [0, 0, 1, 1], "fsdp": [0, 0]}),
        ({}, 2, {"fsdp": [0] * 4 + [1] * 4}),
        ({"data": 2}, 4, {"data": [0, 2], "fsdp": [0, 0, 0, 0, 1, 1, 1, 1]}),
        ({"data": 3, "tensor": 4}, 3, {"data": [0, 1, 2], "tensor": [0] * 4}),
        ({"data": 6, "fsdp": -1}, 3, {"data": [0, 0, 1, 1, 2, 2], "fsdp": [0, 0]}),
    ],
    ids=str,
)
def test_slices_are_taken_by_the_outermost_axes_in_order(sizes, groups, met):
    assert blocks(sizes, devices(groups, 4)) == met


def test_the_order_in_which_devices_are_listed_does_not_tear_a_slice_apart():
    shuffled = list(np.random.default_rng(0).permutation(np.array(devices(2, 4), object)))
    assert blocks({"data": 2}, shuffled) == {"data": [0, 1], "fsdp": [0] * 4}


@pytest.mark.parametrize("numbered_by", ["slice_index", "process_index"])
def test_tensor_stays_inside_a_gpu_node_and_fsdp_crosses(numbered_by):
    found = devices(2, 4, "gpu", numbered_by)
    assert blocks({"tensor": 4}, found, numbered_by) == {"fsdp": [0, 1], "tensor": [0] * 4}
    with pytest.raises(ValueError) as error:
        blocks({"tensor": 8}, found)
    assert str(error.value) == (
        "mesh={'tensor': 8} must divide the 4 devices of a node, because only pipeline, data or fsdp may span several "
        "nodes; use tensor=4 and fsdp=-1 for the remaining devices"
    )


def test_an_axis_that_would_leave_a_slice_is_refused_with_the_nearest_that_stays():
    with pytest.raises(ValueError, match=r"\{'tensor': 4\} must divide the 6 devices of a slice.* use tensor=3"):
        blocks({"tensor": 4}, devices(2, 6))


def test_slices_of_unequal_size_are_refused():
    with pytest.raises(ValueError, match="the 2 slices must have equally many devices, not 2 or 4"):
        blocks({}, devices(2, 4)[:6])


def test_a_mesh_is_told_in_words():
    assert mesh_layout(make_mesh(MeshConfig(tensor=2))) == "fsdp=4, tensor=2"
    assert mesh_layout(make_mesh(MeshConfig(), jax.devices()[:1])) == "one device"


@pytest.fixture(scope="module")
def tpu():
    """tpu(name, num_slices=1) -> devices of a TPU that is not here."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    return lambda name, num_slices=1: open_topology(f"{num_slices}*{name}" if num_slices > 1 else name).devices


@pytest.mark.aot
@pytest.mark.parametrize(
    ("name", "slices", "sizes", "told"),
    [
        ("v6e:4x4", 2, {"data": 2, "tensor": 4}, "data=2 (over 2 slices), fsdp=4, tensor=4"),
        ("v6e:4x4", 2, {"tensor": 8}, "fsdp=4 (over 2 slices), tensor=8"),
        ("v6e:4x4", 4, {"data": 2}, "data=2 (over 2 slices), fsdp=32 (over 2 slices)"),
        ("v5p:4x4x8", 1, {"tensor": 2}, "fsdp=64, tensor=2"),
    ],
)
def test_real_tpu_slices_are_arranged_with_the_slow_network_outside(tpu, name, slices, sizes, told):
    mesh = make_mesh(MeshConfig(**sizes), tpu(name, slices))
    assert mesh_layout(mesh) == told
    inside = mesh.devices.reshape(-1, mesh.shape["tensor"])  # a line along tensor never leaves its slice
    assert slices == 1 or all(len({device.slice_index for device in line}) == 1 for line in inside)


@pytest.mark.aot
def test_a_tensor_axis_of_a_torus_lies_on_neighbours(tpu):
    mesh = make_mesh(MeshConfig(tensor=4), tpu("v5p:4x4x8"))
    for line in mesh.devices.reshape(-1, 4)[:8]:
        moves = np.ptp(np.array([device.coords for device in line]), axis=0)
        assert np.count_nonzero(moves) == 1  # along one physical axis, whose ends are joined


@pytest.mark.aot
@pytest.mark.parametrize(
    ("sizes", "crossing"), [({"data": 2}, {"ALL_REDUCE"}), ({}, {"ALL_GATHER", "ALL_REDUCE"})], ids=["data", "fsdp"]
)
def test_between_slices_data_costs_a_reduction_and_fsdp_the_gathers_too(tpu, sizes, crossing):
    """What crosses is named in the compiled program, as sends of the multi-slice runtime."""
    mesh = make_mesh(MeshConfig(**sizes), tpu("v6e:2x4", 2))
    place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    weights, rows = place("fsdp", None), place(("data", "fsdp"), None)

    def gradient(w_DF, x_BD):
        return jax.grad(lambda w_DF: jnp.sum(jnp.square(x_BD @ w_DF)))(w_DF)

    compiled = (
        jax.jit(gradient, in_shardings=(weights, rows), out_shardings=weights)
        .lower(jax.ShapeDtypeStruct((512, 1024), jnp.float32), jax.ShapeDtypeStruct((256, 512), jnp.float32))
        .compile()
    )
    found = re.findall(r'_xla_megascale_transfer_type="([A-Z_]+)"', compiled.as_text())
    assert set(found) == crossing


IN_FLIGHT = """
import sys
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxscale.core.mesh import make_mesh
from jaxscale.runtime.hosts.meshes import one_at_a_time
from jaxscale.core.config import MeshConfig

def program(w_LDD, x_DD):
    gather = lambda w_DD: lax.all_gather(w_DD, "fsdp", tiled=True)
    layer = lambda x_DD, w_DD: (jnp.tanh(x_DD @ gather(w_DD) @ gather(2 * w_DD)), None)
    return lax.psum(jnp.sum(lax.scan(layer, x_DD, w_LDD)[0] @ gather(w_LDD[0])), "fsdp")

mesh = make_mesh(MeshConfig())
specs = P(None, "fsdp"), P("fsdp")
f = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
f = one_at_a_time(f, mesh) if sys.argv[1] == "alone" else f
shapes = (4, 64, 64), (64, 64)
place = lambda shape, spec: jax.device_put(jnp.full(shape, 0.01), jax.NamedSharding(mesh, spec))
w_LDD, x_DD = map(place, shapes, specs)
print(len({float(y) for y in [f(w_LDD, x_DD * (1 + i % 2)) for i in range(60)]}))
"""


def test_independent_programs_run_one_at_a_time_on_simulated_devices():
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    f = jax.jit(lambda x: x + 1)
    assert one_at_a_time(f, mesh)(jnp.ones(8)).is_ready()
    for one in (make_mesh(MeshConfig(), jax.devices()[:1]), make_mesh(MeshConfig(), open_machine("v5e:2x2").devices)):
        assert one_at_a_time(f, one) is f


def test_sixty_calls_with_collectives_do_not_wait_for_each_other():
    command = [sys.executable, "-c", IN_FLIGHT, "alone"]
    environment = os.environ | {"XLA_FLAGS": xla_flags(8)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr[-2000:]
