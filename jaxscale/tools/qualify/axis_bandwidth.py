"""Measurements of collectives along each mesh axis, and of slow hosts (`jaxscale bench collectives`), and along each
dimension of the links, compared with the datasheet (`jaxscale qualify`)."""

import datetime
import math
import os
import socket
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import schema, units
from jaxscale.core.config import MESH_AXES, MeshConfig
from jaxscale.core.mesh import crossed_groups, device_groups, make_mesh
from jaxscale.kernels.collectives import link_stages, scatter_along
from jaxscale.kernels.hardware import Chip, Device, find_chip
from jaxscale.runtime.hosts.meshes import mesh_layout
from jaxscale.settings import config_file
from jaxscale.settings.command_line import Arguments
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.links import CORE, DIMENSIONS, Phase, group_lines, make_torus
from jaxscale.tools.qualify.products import product_seconds
from jaxscale.tools.qualify.result import NO_DATASHEET, Machine, Probe, Reading, reading_of
from jaxscale.tools.qualify.timing import Timed, timed

MIB = 2**20
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "permute")
LINK_KINDS, LINK_REPEATS = ("all-gather", "reduce-scatter", "all-reduce"), 10  # for `jaxscale qualify`
SLOW = 1.25  # ratio to the median above which a host is slow; smaller differences are normal
NAME_BYTES = 64  # longest hostname, which is gathered as a uint8 array
MEASURES = ("product", "copy", "permute")  # two local operations per process, and one exchange with neighbours


def read_mesh(arguments: Arguments) -> MeshConfig:
    """Returns the mesh of --config with overrides such as --config.mesh.fsdp=8. The default is all devices on fsdp."""
    if arguments.config:
        return config_file.load_config(arguments.config, arguments.overrides).mesh
    if other := [name for name in arguments.overrides if not name.startswith("mesh.")]:
        raise BadInput(f"--config.{other[0]} needs --config=FILE; without --config, pass only --config.mesh.AXIS=N")
    values = {name.removeprefix("mesh."): value for name, value in arguments.overrides.items()}
    return schema.from_dict(MeshConfig, values, "mesh")


def read_sizes(text: str) -> list[int]:
    """Returns sizes in bytes from a list in MiB such as '1,16'."""
    try:
        sizes = [round(float(part) * MIB) for part in text.split(",")]
    except (ValueError, OverflowError):  # OverflowError: inf
        sizes = []
    if not sizes or min(sizes) < 1024:
        raise BadInput(f"--megabytes={text} must be a list of sizes in MiB, such as 1,16,256")
    return sizes


def measure_collectives(cfg: MeshConfig, *, sizes: Sequence[int] | None, repeats: int) -> dict[str, Any]:
    """Returns the record for --json: times and bandwidths of the collectives, and times of each process.

    Each call is timed alone, until its result is ready. The reported time is the median of `repeats` calls on the
    slowest process. bytes_per_s counts the bytes that one device sends. For an array of S bytes over k devices, these
    are S (k - 1) / k for an all-gather or reduce-scatter, twice as much for an all-reduce, and S for a permute to the
    next device.
    """
    mesh = make_mesh(cfg)
    device = mesh.devices.flat[0]
    chip = find_chip(device.device_kind)
    rows = measure_axes(mesh, KINDS, sizes or default_sizes(device), repeats)
    processes = measure_processes(mesh, repeats)
    return {
        "mesh": mesh_layout(mesh),
        "devices": f"{mesh.size} x {device.device_kind}",
        "num_processes": jax.process_count(),
        "chip": None if chip is None else chip.name,
        "table_source": None if chip is None else chip.links_source,
        "repeats": repeats,
        "collectives": rows,
        "processes": processes,
        "slow": slow_ones(processes),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }


def default_sizes(device: Device) -> list[int]:
    """Returns the default array sizes in bytes, smaller on CPU."""
    return [MIB, 4 * MIB, 16 * MIB] if device.platform == "cpu" else [MIB, 16 * MIB, 256 * MIB]


def measure_axes(mesh: Mesh, kinds: Sequence[str], sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Returns one row per axis (of several devices), kind and size. See measure_collectives() for the values."""
    rows = []
    chip, (kind, groups) = find_chip(mesh.devices.flat[0].device_kind), crossed_groups(mesh)
    for axis in [axis for axis in MESH_AXES if mesh.shape[axis] > 1]:
        for what in kinds:
            for size in sizes:
                size = max(1, size // (4 * mesh.size)) * 4 * mesh.size  # whole float32 values on every device
                local_time = time_collective(mesh, axis, what, size, repeats)
                median, low, high = gathered(np.array(local_time)).max(axis=0).tolist()
                rows.append(
                    {
                        "axis": axis,
                        "devices": mesh.shape[axis],
                        "collective": what,
                        "bytes": size,
                        "seconds": median,
                        "seconds_range": [low, high],
                        "bytes_per_s": wire_bytes(what, size, mesh.shape[axis]) / median,
                        "table_bytes_per_s": link_figure(chip, crosses=groups[axis] > 1),
                        "link": f"between {kind}s" if groups[axis] > 1 else f"within one {kind}",
                    }
                )
    return rows


def make_collective(mesh: Mesh, axis: str, what: str) -> Callable[[jax.Array], jax.Array]:
    """Returns a jitted collective over the axis. Its input is [devices, numbers], with one row per device."""
    size = mesh.shape[axis]

    def collective(x_1n: jax.Array) -> jax.Array:
        if what == "all-gather":
            return jax.lax.all_gather(x_1n, axis, axis=1, tiled=True)
        if what == "reduce-scatter":
            return scatter_along(x_1n, axis, 1, link_stages(mesh, axis))  # the same implementation as in training
        if what == "all-reduce":
            return jax.lax.psum(x_1n, axis)
        return jax.lax.ppermute(x_1n, axis, [(n, (n + 1) % size) for n in range(size)])

    row = P(MESH_AXES, None)
    return jax.jit(jax.shard_map(collective, mesh=mesh, in_specs=row, out_specs=row, check_vma=False))


def time_collective(mesh: Mesh, axis: str, what: str, size: int, repeats: int) -> Timed:
    """Returns the time that one collective over arrays of `size` bytes takes in this process."""
    f = make_collective(mesh, axis, what)
    numbers = local_numbers(what, size, mesh.shape[axis])
    place = NamedSharding(mesh, P(MESH_AXES, None))
    x = jax.jit(lambda: jnp.ones((mesh.size, numbers), jnp.float32), out_shardings=place)()
    return timed(lambda: f(x), repeats)


def local_numbers(what: str, size: int, devices: int) -> int:
    """Returns the number of float32 inputs per device for an array of `size` bytes (the larger of input and output)."""
    return size // 4 // (devices if what == "all-gather" else 1)


def wire_bytes(what: str, size: int, devices: int) -> float:
    """Returns the bytes that one device sends for an array of `size` bytes with an optimal ring algorithm."""
    return size * {"all-reduce": 2 * (devices - 1) / devices, "permute": 1.0}.get(what, (devices - 1) / devices)


def link_figure(chip: Chip | None, *, crosses: bool) -> float | None:
    """Returns the datasheet bytes/s of one device: over its fast links, or between slices or nodes."""
    return chip and (chip.dcn_bandwidth if crosses else chip.ici_bandwidth)


def measure_processes(mesh: Mesh, repeats: int) -> list[dict[str, Any]]:
    """Returns the host of each process, and its times for a matmul, a host-to-device copy and a permute.

    The matmul and copy times are those of the slowest local device, and identify a slow host. The permute time does
    not, because all processes wait for the slowest process.
    """
    axis = max(MESH_AXES, key=lambda axis: mesh.shape[axis])
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    rows = np.ones((16 * MIB // 4,), np.float32)
    product = [product_seconds(device, repeats) for device in local]
    copy = [timed(lambda device=device: jax.device_put(rows, device), repeats).median for device in local]
    permute = time_collective(mesh, axis, "permute", MIB, repeats).median if mesh.size > 1 else 0.0
    name = socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    names = gathered(np.frombuffer(name, np.uint8))
    times = gathered(np.array([max(product), max(copy), permute]))
    return [
        {"process": n, "host": bytes(names[n]).rstrip(b"\0").decode(errors="replace")}
        | {f"{measure}_s": float(seconds) for measure, seconds in zip(MEASURES, times[n])}
        for n in range(jax.process_count())
    ]


def gathered(value: np.ndarray | float) -> np.ndarray:
    """Returns the values of all processes, [processes, ...]. Sends bytes, because JAX would convert to float32."""
    value = np.array(value, ndmin=1)
    rows = multihost_utils.process_allgather(value.view(np.uint8))
    return np.asarray(rows).reshape(jax.process_count(), -1).view(value.dtype)


def slow_ones(processes: Sequence[dict[str, Any]]) -> list[str]:
    """Returns one line for each process that takes more than SLOW times the (lower) median time."""
    found = []
    for measure in MEASURES:
        usual = statistics.median_low(process[f"{measure}_s"] for process in processes)
        for process in processes:
            if process[f"{measure}_s"] > SLOW * usual:
                times = process[f"{measure}_s"] / usual
                found.append(f"{process['host']} (process {process['process']}): {measure} takes {times:.2f} times")
    return found


def collective_lines(record: dict[str, Any]) -> list[str]:
    """Returns the record as lines of text."""
    lines = [
        f"{record['devices']}, {record['num_processes']} process(es), mesh {record['mesh']}; median of "
        f"{record['repeats']} calls; GB/s counts what one device sends"
    ]
    if not record["collectives"]:
        lines.append("  one device, so no collectives")
    for row in record["collectives"]:
        table = row["table_bytes_per_s"]
        comparison = f"of {table / 1e9:g} GB/s in the chip table" if table else "no value in the chip table"
        lines.append(
            f"  {row['axis']:8} x {row['devices']:<5} {row['collective']:15} {units.size(row['bytes']):>9}  "
            f"{row['seconds'] * 1e3:9.3f} ms  {row['bytes_per_s'] / 1e9:9.3f} GB/s {row['link']}; {comparison}"
        )
    if record["table_source"]:
        lines.append(f"  the chip table's value is for all links of a device together: {record['table_source']}")
    for process in record["processes"]:
        lines.append(
            f"  process {process['process']} on {process['host']}: slowest device "
            f"{process['product_s'] * 1e3:.3f} ms per matmul, {process['copy_s'] * 1e3:.3f} ms for 16 MiB from the "
            f"host; permute of 1 MiB {process['permute_s'] * 1e3:.3f} ms"
        )
    if record["num_processes"] > 1:
        lines += [f"  slow: {line} the median" for line in record["slow"]] or ["  no host is slow"]
    return lines


def measure_links(machine: Machine, sizes: Sequence[int] | None = None) -> Probe:
    """Measures bytes/s of one device for each collective and size, over all devices and over each dimension.

    Only the largest size has a floor, a fraction of the datasheet bandwidth. If there are several dimensions, only the
    values over a single dimension have a floor. Times are for the slowest process.
    """
    if len(machine.devices) == 1:
        return Probe(name="links", notes=("one device, so no collectives",))
    sizes = sizes or default_sizes(machine.devices[0])
    figures: list[Reading] = []
    for mesh in (found := meshes(machine.devices)):
        rows = measure_axes(mesh, LINK_KINDS, sizes, LINK_REPEATS)
        largest = max(row["bytes"] for row in rows)
        figures += [figure_of(row, mesh, machine, judged=mesh is found[-1] and row["bytes"] == largest) for row in rows]
    return Probe(name="links", figures=tuple(figures), notes=() if machine.chip else (NO_DATASHEET,))


def meshes(devices: Sequence[Any]) -> list[Mesh]:
    """Returns a mesh with all devices on one axis, and if links have several dimensions, a mesh with these axes."""
    whole = make_mesh(MeshConfig(fsdp=-1), devices)
    _, _, group_of = device_groups(devices)
    # place of a TPU: coordinates on the torus, then core on the chip
    core = lambda device: getattr(device, "core_on_chip", 0)
    place_of = lambda device: (*device.coords, core(device)) if device.platform == "tpu" else ()
    placed = sorted(zip(group_of, devices), key=lambda pair: (pair[0], place_of(pair[1]), pair[1].id))
    first = [device for group, device in placed if group == placed[0][0]]
    inside = tuple(len(set(column)) for column in zip(*map(place_of, first))) or (len(first),)
    shape = (len(set(group_of)), *inside)
    if sum(size > 1 for size in shape) < 2 or math.prod(shape) != len(devices):  # one dimension, or not a full box
        return [whole]
    shape += (1,) * (len(MESH_AXES) - len(shape))  # the first dimension may cross slices or nodes
    box = np.array([device for _, device in placed], dtype=object).reshape(shape)
    return [whole, Mesh(box, MESH_AXES)]


def figure_of(row: dict[str, Any], mesh: Mesh, machine: Machine, *, judged: bool) -> Reading:
    """Returns the Reading for a row of measure_axes(), compared with the datasheet bandwidth of the links used."""
    axis, chip = row["axis"], machine.chip
    low, high = row["seconds_range"]
    sent = row["bytes_per_s"] * row["seconds"]
    rate = (row["bytes_per_s"], sent / high, sent / low)
    lines: tuple[Phase, ...] = ()  # links of a group along the axis, one phase per dimension
    if chip is not None:
        order = np.moveaxis(np.arange(mesh.size).reshape(mesh.devices.shape), mesh.axis_names.index(axis), 0)
        members = order.reshape(len(order), -1)[:, 0].tolist()
        lines = group_lines(make_torus(list(mesh.devices.flat), chip), members)
    along = ", ".join(line.along for line in lines if line.along in DIMENSIONS)
    where = f"{row['devices']} devices {row['link']}" + (f", along {along} of the torus" if along else "")
    name = f"{row['collective']}, {units.size(row['bytes'])}, {where}"
    table = row["table_bytes_per_s"]
    if table and row["link"].startswith("within"):  # unknown for several dimensions or a chip's cores
        table = table * lines[0].share if len(lines) == 1 and lines[0].along != CORE else None
    floor = machine.floors.links if judged else None
    return reading_of(rate, name, "bytes/s", table, floor, chip.links_source if chip else "")
