"""On a TPU slice the copy of a state for saving goes to the host's memory and needs none of the device's."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.runtime.checkpoint.fingerprint import array_formats, copy_program
from jaxscale.tools.planning.topology import open_topology

ARRAYS, WIDTH = 12, 8192


@pytest.mark.aot
def test_a_snapshot_streams_to_the_host():
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install jaxscale[tpu]")
    devices = open_topology("v5e:2x2").devices
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    place = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    state = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=place)] * ARRAYS
    memory = copy_program(array_formats(state)).memory_analysis()
    state_bytes = ARRAYS * WIDTH * WIDTH * 4 // 4  # of one chip
    assert memory.host_output_size_in_bytes == pytest.approx(state_bytes, rel=0.01)
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 0.01 * state_bytes
