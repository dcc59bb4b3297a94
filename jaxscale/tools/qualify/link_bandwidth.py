"""Measures collectives over the links between devices, along each dimension, and compares them with the datasheet."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxscale.core.config import MESH_AXES, MeshConfig
from jaxscale.core.mesh import device_groups, make_mesh
from jaxscale.tools.planning.links import CORE, DIMENSIONS, Phase, group_lines, make_torus
from jaxscale.tools.qualify.axis_bandwidth import default_sizes, measure_axes
from jaxscale.tools.qualify.result import NO_DATASHEET, Figure, Machine, Probe, held
from jaxscale.units import size as size_words

KINDS = ("all-gather", "reduce-scatter", "all-reduce")
REPEATS = 10


def measure_links(machine: Machine, sizes: Sequence[int] | None = None) -> Probe:
    """Measures bytes/s out of one device for each collective and size, over all devices and along each dimension.

    Only the largest size has a floor, a share of the datasheet's bandwidth; if there are several dimensions, the floor
    applies along each dimension and not to all devices together. Times are those of the slowest process.
    """
    if len(machine.devices) == 1:
        return Probe(name="links", notes=("one device has nothing to exchange",))
    sizes = sizes or default_sizes(machine.devices[0])
    figures: list[Figure] = []
    for mesh in (found := meshes(machine.devices)):
        rows = measure_axes(mesh, KINDS, sizes, REPEATS)
        largest = max(row["bytes"] for row in rows)
        figures += [figure_of(row, mesh, machine, judged=mesh is found[-1] and row["bytes"] == largest) for row in rows]
    return Probe(name="links", figures=tuple(figures), notes=() if machine.chip else (NO_DATASHEET,))


def meshes(devices: Sequence[Any]) -> list[Mesh]:
    """Returns a mesh with all devices along one axis, as in training; and one with an axis per dimension, if several.

    Dimensions are those of a TPU slice's torus, the cores of a chip, and the slices or nodes that the data-center
    network connects.
    """
    whole = make_mesh(MeshConfig(fsdp=-1), devices)
    _, _, group_of = device_groups(devices)
    placed = sorted(zip(group_of, devices), key=lambda pair: (pair[0], place_of(pair[1]), pair[1].id))
    inside = extents([device for group, device in placed if group == placed[0][0]])
    shape = (len(set(group_of)), *inside)
    if sum(size > 1 for size in shape) < 2 or math.prod(shape) != len(devices):  # one dimension, or not a full box
        return [whole]
    shape += (1,) * (len(MESH_AXES) - len(shape))  # the first dimension may cross slices or nodes
    box = np.array([device for _, device in placed], dtype=object).reshape(shape)
    return [whole, Mesh(box, MESH_AXES)]


def place_of(device: Any) -> tuple[int, ...]:
    """Returns a TPU's torus coordinates and its core on the chip; () for other devices."""
    return (*device.coords, getattr(device, "core_on_chip", 0)) if device.platform == "tpu" else ()


def extents(devices: Sequence[Any]) -> tuple[int, ...]:
    """Returns the size of each dimension of the torus and of the cores on a chip; (number of devices,) elsewhere."""
    return tuple(len(set(column)) for column in zip(*map(place_of, devices))) or (len(devices),)


def figure_of(row: dict[str, Any], mesh: Mesh, machine: Machine, *, judged: bool) -> Figure:
    """Returns the figure of a row of measure_axes, compared with the datasheet for the links that it can use."""
    axis, chip = row["axis"], machine.chip
    low, high = row["seconds_range"]
    sent = row["bytes_per_s"] * row["seconds"]
    rate = (row["bytes_per_s"], sent / high, sent / low)
    lines = lines_of(mesh, axis, machine)
    along = ", ".join(line.along for line in lines if line.along in DIMENSIONS)
    where = f"{row['devices']} devices {row['link']}" + (f", along {along} of the torus" if along else "")
    name = f"{row['collective']}, {size_words(row['bytes'])}, {where}"
    table = row["table_bytes_per_s"]
    if table and row["link"].startswith("within"):  # no single figure for several dimensions or a chip's cores
        table = table * lines[0].share if len(lines) == 1 and lines[0].along != CORE else None
    floor = machine.floors.links if judged else None
    return held(rate, name, "bytes/s", table, floor, chip.links_source if chip else "")


def lines_of(mesh: Mesh, axis: str, machine: Machine) -> tuple[Phase, ...]:
    """Returns the links of a group along the axis, one phase for each dimension; () without a datasheet."""
    if machine.chip is None:
        return ()
    place = mesh.axis_names.index(axis)
    order = np.moveaxis(np.arange(mesh.size).reshape(mesh.devices.shape), place, 0)
    members = order.reshape(len(order), -1)[:, 0]
    return group_lines(make_torus(list(mesh.devices.flat), machine.chip), members.tolist())
