"""What bench collectives runs, prints and refuses. Nothing here asserts a speed."""

import contextlib
import io
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from processes import free_ports

from jaxscale.cli import bench
from jaxscale.core.config import MESH_AXES, MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.kernels.hardware import CHIPS
from jaxscale.tools.qualify import products
from jaxscale.tools.qualify.axis_bandwidth import (
    KINDS,
    MEASURES,
    collective_lines,
    gathered,
    link_figure,
    local_numbers,
    make_collective,
    measure_collectives,
    read_sizes,
    slow_ones,
    wire_bytes,
)


@pytest.fixture(scope="module")
def record():
    """What the command measured over data=2 x fsdp=4, made once for this file."""
    argv = ["collectives", "--json", "--repeats=1", "--config.mesh.data=2", "--config.mesh.fsdp=4", "--megabytes=0.01"]
    with contextlib.redirect_stdout(io.StringIO()) as told, pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "CPU_WIDTH", 64)  # a product's size is no part of what is tested here
        assert bench.main(argv) == 0
    return json.loads(told.getvalue())


@pytest.mark.soak
def test_every_kind_is_measured_along_every_axis_that_has_devices():
    record = measure_collectives(MeshConfig(tensor=2), sizes=[2**16], repeats=1)
    found = [(row["axis"], row["devices"], row["collective"]) for row in record["collectives"]]
    assert found == [(axis, size, kind) for axis, size in (("fsdp", 4), ("tensor", 2)) for kind in KINDS]
    assert record["mesh"] == "fsdp=4, tensor=2" and record["devices"] == "8 x cpu"
    for row in record["collectives"]:
        sent = wire_bytes(row["collective"], 2**16, row["devices"])
        assert row["bytes"] == 2**16 and row["bytes_per_s"] == pytest.approx(sent / row["seconds"])


@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_the_collectives_do_what_their_names_say(axis):
    mesh = make_mesh(MeshConfig(tensor=2))
    rows = np.arange(8 * 8, dtype=np.float32).reshape(8, 8)  # a row for each device, in the mesh's order
    x = jax.device_put(jnp.asarray(rows), NamedSharding(mesh, PartitionSpec(MESH_AXES, None)))
    size, grid = mesh.shape[axis], np.arange(8).reshape(4, 2)
    groups = grid.T if axis == "fsdp" else grid  # the devices that differ in this axis only
    for kind in KINDS:
        result = np.asarray(make_collective(mesh, axis, kind)(x))
        for group in groups:
            whole = rows[group]
            expected = {
                "all-gather": np.tile(whole.reshape(1, -1), (size, 1)),
                "reduce-scatter": whole.sum(0).reshape(size, -1),
                "all-reduce": np.tile(whole.sum(0), (size, 1)),
                "permute": np.roll(whole, 1, axis=0),
            }[kind]
            np.testing.assert_array_equal(result[group], expected, err_msg=f"{kind} {group}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_that_of_the_whole_array_of_a_device(kind):
    mesh, place = make_mesh(MeshConfig()), PartitionSpec(MESH_AXES, None)
    own = jax.ShapeDtypeStruct((8, local_numbers(kind, 2**16, 8)), jnp.float32, sharding=NamedSharding(mesh, place))
    result = jax.eval_shape(make_collective(mesh, "fsdp", kind), own)
    assert max(own.shape[1], result.shape[1]) * 4 == 2**16


def test_bytes_on_the_wire_are_those_of_a_ring():
    assert [wire_bytes(kind, 800, 4) for kind in KINDS] == [600, 600, 1200, 800]


def test_an_axis_between_slices_is_held_against_the_slow_network():
    chip = CHIPS["TPU v5"]
    assert link_figure(chip, crosses=False) == chip.ici_bandwidth > link_figure(chip, crosses=True) > 0
    assert link_figure(None, crosses=True) is None


def test_times_are_gathered_without_a_loss_of_digits():
    np.testing.assert_array_equal(gathered(np.array([1 / 3, 1e-9])), [[1 / 3, 1e-9]])
    np.testing.assert_array_equal(gathered(1 / 3), [[1 / 3]])


@pytest.mark.soak
def test_two_processes_measure_together_and_the_first_tells(tmp_path):
    port = free_ports()
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    flags = ["collectives", "--json", "--megabytes=0.1", "--repeats=2", f"--coordinator=localhost:{port}"]
    running = []
    for number in (0, 1):
        command = [sys.executable, "-m", "jaxscale.cli", "bench", *flags, "--num_processes=2", f"--process_id={number}"]
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    first, second = [process.communicate(timeout=200)[0] for process in running]
    found = json.loads([line for line in first.splitlines() if line.startswith("{")][-1])
    assert [process.returncode for process in running] == [0, 0] and "{" not in second
    assert found["num_processes"] == 2 and found["devices"] == "4 x cpu" and len(found["collectives"]) == 4
    assert [process["process"] for process in found["processes"]] == [0, 1]
    assert all(0 < process[f"{measure}_s"] < 100 for process in found["processes"] for measure in MEASURES)


def processes(**slow):
    usual = {"product_s": 1.0, "copy_s": 2.0, "permute_s": 3.0}
    return [{"process": n, "host": f"host-{n}"} | usual | (slow if n == 2 else {}) for n in range(4)]


@pytest.mark.parametrize("measure", ["product", "copy", "permute"])
def test_a_slow_host_is_named_with_what_is_slow(measure):
    (line,) = slow_ones(processes(**{f"{measure}_s": 9.0}))
    usual = {"product": 1, "copy": 2, "permute": 3}[measure]
    assert line == f"host-2 (process 2): {measure} takes {9 / usual:.2f} times"
    assert slow_ones(processes(product_s=1.2, copy_s=2.4)) == []
    assert len(slow_ones(processes(product_s=2.0)[1:3])) == 1  # of two


@pytest.mark.slow
def test_people_are_told_the_figure_of_the_table_and_who_is_slow(record):
    row = record["collectives"][0] | {"table_bytes_per_s": 6e11, "seconds": 0.001, "bytes_per_s": 3e11}
    found = {"collectives": [row], "num_processes": 4, "slow": ["host-2 (process 2): copy takes 4.50 times"]}
    text = "\n".join(collective_lines(record | found))
    assert "1.000 ms    300.000 GB/s within one slice; of 600 GB/s in the chip table" in text
    assert "slow: host-2 (process 2): copy takes 4.50 times the median" in text
    assert "no host is slow" in "\n".join(collective_lines(record | {"num_processes": 2, "slow": []}))


@pytest.mark.slow
def test_one_device_has_nothing_to_exchange(record):
    assert {row["axis"] for row in record["collectives"]} == {"data", "fsdp"} and record["processes"][0]["host"]
    assert "one device, so no collectives" in "\n".join(collective_lines(record | {"collectives": []}))


@pytest.mark.parametrize("text", ["", "big", "1,", "0", "-1", "0.0001"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="must be a list of sizes in MiB"):
        read_sizes(text)


def test_sizes_are_mebibytes():
    assert read_sizes("1,0.5") == [2**20, 2**19]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--config.seed=3"], "--config.seed needs --config=FILE"),
        (["--config.mesh.tensr=2"], "mesh.tensr is not a setting of MeshConfig; did you mean 'tensor'?"),
        (["--config.mesh.tensor=3"], "needs a multiple of 3 devices, but there are 8; use tensor=2"),
        (["--repeats=0"], "--repeats=0 must be a whole number, 1 or more"),
        (["--steps=3"], "--steps=3 is not a flag of this command"),
    ],
)
def test_bad_input_is_one_clear_line(argv, told):
    with pytest.raises(ValueError) as error:
        bench.main(["collectives", *argv])
    assert told in str(error.value) and "\n" not in str(error.value)
