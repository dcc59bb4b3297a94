"""Names of machines that are not here: what they stand for, and what is said of those that do not exist."""

import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from no_packages import no_distribution

from jaxscale.kernels.hardware import CHIPS
from jaxscale.tools.planning import topology
from jaxscale.tools.planning.topology import (
    CARDS,
    FAMILIES,
    legal_shapes,
    link_domains,
    open_topology,
    parse_topology,
    target_config,
)

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: jaxscale[tpu]")
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs jax's CUDA plugin: jaxscale[cuda12]"
)


@pytest.mark.parametrize(
    ("text", "canonical", "chips"),
    [
        ("v5p:4x4x8", "v5p:4x4x8", 128),
        ("v5p-256", "v5p:4x4x8", 128),  # TensorCores, two to a chip
        ("v5p-32", "v5p:2x2x4", 16),
        ("v5p-12288", "v5p:16x16x24", 6144),
        ("v4-8", "v4:2x2x1", 4),
        ("v5litepod-256", "v5e:16x16", 256),  # chips
        ("v5e-16", "v5e:4x4", 16),
        ("V6E-64 ", "v6e:8x8", 64),
        ("v6e-1", "v6e:1x1", 1),
        ("tpu7x-128", "tpu7x:4x4x4", 64),
        ("2*v6e:16x16", "2*v6e:16x16", 512),
        ("h100:32x8", "h100:32x8", 256),
        ("h100:8", "h100:1x8", 8),
        ("a100:32x8", "a100-80gb:32x8", 256),
        ("a100-40gb:2x4", "a100-40gb:2x4", 8),
    ],
)
def test_a_name_of_the_cloud_becomes_a_shape(text, canonical, chips):
    name = parse_topology(text)
    assert (str(name), name.num_slices * math.prod(name.shape)) == (canonical, chips)
    assert parse_topology(str(name)) == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v5q:4x4", "did you mean 'v5"),
        ("h10:8", "did you mean 'h100'?"),
        ("v5p", "write v5p:2x2x4, v5p:4x4x8"),
        ("v5p-250", "no v5p slice has 250 TensorCores; the nearest is v5p-256 (v5p:4x4x8)"),
        ("v5p-7", "the nearest is v5p-8"),
        ("v5p-99999", "the nearest is v5p-12288"),
        ("v6e-512", "no v6e slice has 512 chips; the nearest is v6e-256 (v6e:16x16)"),
        ("v5e-4x4", "write v5e:4x4"),
        ("v5p:3x3x3", "the nearest is v5p:2x4x4 (32 chips)"),
        ("v5p:8x8", "the nearest is v5p:4x4x4 (64 chips)"),
        ("v5e:32x32", "the nearest is v5e:16x16"),
        ("v5e:0x4", "the nearest is v5e:1x1"),
        ("0*v5e:4x4", "write v5e:4x4"),
        ("h100:3x16", "write h100:6x8"),
        ("h100:0", "write h100:1x1"),
        ("h100-64", "write h100:8x8"),
        ("2*h100:4x8", "write h100:8x8"),
        ("99999999*v5e:2x2", "a job can have at most 65,536 chips; write 16384*v5e:2x2"),
        ("h100-999999", "write h100:4096x8"),
        ("2*h100:4096x8", "write h100:4096x8"),
        ("v5p-" + 400 * "9", "write v5p:4x4x8, v5p-256, 2*v6e:16x16 or h100:32x8"),
        ("16 chips please", "write v5p:4x4x8, v5p-256, 2*v6e:16x16 or h100:32x8"),
    ],
)
def test_what_does_not_exist_is_told_in_one_line_with_the_nearest(text, said):
    with pytest.raises(ValueError) as error:
        parse_topology(text)
    assert said in str(error.value) and "\n" not in str(error.value)
    if "nearest is" in said or "write" in said and "," not in said:
        parse_topology(said.split("nearest is ")[-1].split("write ")[-1].split(" ")[0])  # what is offered does work


def test_every_family_is_a_row_of_the_chip_table():
    for name, family in FAMILIES.items():
        chip = CHIPS[family.device_kind]
        assert chip.ici_dims == family.dims and chip.ici_bandwidth, name
        if family.dims:
            shapes = legal_shapes(name)
            assert max(map(np.prod, shapes)) <= family.max_chips and len(set(shapes)) == len(shapes)
        else:
            assert f"device_memory_size: {chip.hbm_bytes}\n" in target_config(family.device_kind)
    assert set(CARDS) == {family.device_kind for family in FAMILIES.values() if not family.dims}


def test_without_the_compiler_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.metadata.distribution", no_distribution)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ValueError, match=r"^v5p:4x4x8 .* pip install 'jaxscale\[tpu\]'$"):
        open_topology("v5p-256")
    with pytest.raises(ValueError, match=r"^h100:1x8 .* pip install 'jaxscale\[cuda12\]'$"):
        open_topology("h100:8")


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize(
    ("text", "devices", "hosts", "slices"),
    [
        ("v5p-256", 128, 32, 1),
        ("v4:2x2x2", 8, 2, 1),  # one device a chip
        ("v5e:1x1", 1, 1, 1),
        ("v5e-8", 8, 1, 1),  # one VM of 8 chips
        ("v5e:4x4", 16, 4, 1),  # VMs of 4 chips
        ("2*v6e:2x4", 16, 2, 2),
        ("tpu7x:2x2x1", 8, 1, 1),
        ("tpu7x:4x4x4", 128, 16, 1),  # two devices a chip
        ("2*v6e:4x4", 32, 8, 2),
        ("v5p:16x16x24", 6144, 1536, 1),
    ],
)
def test_a_tpu_is_opened_where_there_is_none(text, devices, hosts, slices, capfd):
    opened = open_topology(text)
    assert (len(opened.devices), opened.num_hosts, opened.num_slices) == (devices, hosts, slices)
    assert opened.chip is CHIPS[opened.devices[0].device_kind] and opened.platform == "tpu"
    assert sorted(set(link_domains(opened.devices))) == list(range(slices))
    assert capfd.readouterr() == ("", "")


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize(
    ("name", "shape"), [("v5p:4x4x4", "TORUS"), ("v5p:2x2x4", "MESH"), ("v6e:4x4", "MESH"), ("v6e:16x16", "TORUS")]
)
def test_the_compiler_is_told_which_slices_are_closed_to_rings(name, shape):
    devices = open_topology(name).devices
    sides = np.array([device.coords for device in devices]).max(axis=0) + 1
    mesh = Mesh(np.array(sorted(devices, key=lambda device: device.coords)).reshape(sides), ("x", "y", "z"))
    gather = jax.shard_map(
        lambda x: jax.lax.all_gather(x, "y", tiled=True), mesh=mesh, in_specs=P("y"), out_specs=P(), check_vma=False
    )
    options = {"xla_tpu_enable_sparse_core_collective_offload_all_gather": True}  # such programs name their rings
    x = jax.ShapeDtypeStruct((2**14, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("y")))
    text = jax.jit(gather, compiler_options=options).lower(x).compile().as_text()
    assert set(re.findall(r"ICI_RING_DIM_[XYZ]_(\w+)", text)) == {shape}


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.dims])
def test_libtpu_knows_every_small_shape_that_is_called_legal(family):
    for shape in [shape for shape in legal_shapes(family) if np.prod(shape) <= 512]:
        name = topology.TopologyName(family, shape)
        cores = 2 if family == "tpu7x" else 1
        assert len(open_topology(str(name)).devices) == name.num_slices * math.prod(name.shape) * cores


@pytest.mark.aot
@needs_cuda
@pytest.mark.parametrize(("text", "hosts"), [("h100:4x8", 4), ("h200:8", 1), ("a100:2x8", 2), ("a100-40gb:2x4", 2)])
def test_gpu_hosts_are_opened_where_there_are_none(text, hosts):
    opened = open_topology(text)
    assert (opened.platform, opened.num_hosts, opened.num_slices) == ("gpu", hosts, 1)
    assert len(set(link_domains(opened.devices))) == hosts
