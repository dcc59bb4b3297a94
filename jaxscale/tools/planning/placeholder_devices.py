"""Placeholder devices of a machine to plan for, without its devices or their compiler.

They have the attributes that mesh and shardings read (coordinates, hosts, slices), so layouts equal those of training.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from jaxscale.kernels.hardware import CHIPS, Chip, find_chip
from jaxscale.kernels.host_memory import HOST
from jaxscale.tools.planning.measured import Measured
from jaxscale.tools.planning.topology import PLANNED, Topology, TopologyName, parse_topology

THIS_MACHINE = "here"


class MemoryKind(NamedTuple):
    """A memory space of a device, as JAX names it."""

    kind: str


class NoClient:
    """Client of placeholder devices: JAX asks which are local before it places arrays on a host."""

    def process_index(self) -> int:
        """Returns no process."""
        return -1


NO_CLIENT = NoClient()


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """A placeholder device for shardings. It runs nothing."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int = 0
    client: NoClient = NO_CLIENT

    def addressable_memories(self) -> list[MemoryKind]:
        """Returns device memory, and host memory where offloading is supported (TPU)."""
        return [MemoryKind("device"), *([MemoryKind(HOST)] if self.platform == "tpu" else [])]


def open_machine(text: str) -> Topology:
    """Returns the named machine with placeholder devices. Names are those of topology.PLANNED.

    Raises BadInput with the nearest valid name for an unknown chip or shape.
    """
    name = parse_topology(text, planned=True)
    kind = PLANNED[name.family].device_kind
    if name.platform == "tpu":
        return tpu_slices(name, kind)
    hosts, cards = name.shape
    devices = [PlannedDevice(i, "gpu", kind, i // cards, 0, (i,)) for i in range(hosts * cards)]
    return Topology(str(name), "gpu", CHIPS[kind], devices, 1, hosts)


def tpu_slices(name: TopologyName, kind: str) -> Topology:
    """Returns TPU slices, with chips in libtpu's order."""
    x_size, y_size, z_size = (*name.shape, 1, 1)[:3]
    cores = CHIPS[kind].devices_per_chip
    slice_devices = math.prod(name.shape) * cores
    slice_hosts = CHIPS[kind].num_hosts(slice_devices)
    per_host = -(-slice_devices // slice_hosts)
    devices: list[Any] = []
    for slice_index in range(name.num_slices):
        for index in range(slice_devices):
            chip, core = divmod(index, cores)
            coords = (chip % x_size, chip // x_size % y_size, chip // x_size // y_size)
            assert coords[2] < z_size
            host = slice_index * slice_hosts + index // per_host
            devices.append(PlannedDevice(len(devices), "tpu", kind, host, slice_index, coords, core))
    hosts = name.num_slices * slice_hosts
    return Topology(str(name), "tpu", CHIPS[kind], devices, name.num_slices, hosts)


def measured_machine(measured: Measured) -> Topology:
    """Returns the machine that `jaxscale bench step --save` ran on.

    A device that is not in the chip table gets the measured rate as its peak, so its MFU means nothing: check
    find_chip.
    """
    kind, number = measured.device_kind, measured.num_devices
    chip = find_chip(kind) or Chip(
        f"{kind} of this machine", measured.flops_per_second / number, measured.memory_bytes, 0.0, "measured here"
    )
    platform = measured.platform
    devices = [PlannedDevice(i, platform, kind, 0, 0, (i, 0, 0)) for i in range(number)]
    return Topology(THIS_MACHINE, platform, chip, devices, 1, 1)
