"""Stand-in devices for a machine to plan for, so that neither its devices nor their compiler are needed.

They have what mesh and shardings read of a device (coordinates, hosts, slices), so that layouts are those of training.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from jaxscale.hardware import CHIPS, Chip, find_chip
from jaxscale.planning.measured import Measured
from jaxscale.planning.topology import PLANNED, Topology, TopologyName, parse_topology
from jaxscale.sharding.offload import HOST

HERE = "here"


class MemoryKind(NamedTuple):
    """A memory that a device reaches, as JAX names it."""

    kind: str


class NoClient:
    """The client of devices that are not here: JAX asks which of them are this process's before it places on a host."""

    def process_index(self) -> int:
        """The number of no process."""
        return -1


NO_CLIENT = NoClient()


@dataclasses.dataclass(frozen=True)
class StandIn:
    """Stands for a device: what layouts are made from, and nothing that runs."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int = 0
    client: NoClient = NO_CLIENT

    def addressable_memories(self) -> list[MemoryKind]:
        """The device's own memory, and the host's where offloading was compiled for (TPU)."""
        return [MemoryKind("device"), *([MemoryKind(HOST)] if self.platform == "tpu" else [])]


def open_machine(text: str) -> Topology:
    """The machine that a name stands for, with stand-ins as its devices. Names are those of topology.PLANNED.

    Raises BadInput, in one line with the nearest that works, for an unknown chip or a shape that is not made.
    """
    name = parse_topology(text, planned=True)
    kind = PLANNED[name.family].device_kind
    if name.platform == "tpu":
        return slices(name, kind)
    hosts, cards = name.shape
    devices = [StandIn(i, "gpu", kind, i // cards, 0, (i,)) for i in range(hosts * cards)]
    return Topology(str(name), "gpu", CHIPS[kind], devices, 1, hosts)


def slices(name: TopologyName, kind: str) -> Topology:
    """TPU slices, their chips in the order in which libtpu lists them."""
    x_size, y_size, z_size = (*name.shape, 1, 1)[:3]
    cores = CHIPS[kind].devices_per_chip
    of_slice = math.prod(name.shape) * cores
    hosts_of_slice = CHIPS[kind].num_hosts(of_slice)
    per_host = -(-of_slice // hosts_of_slice)
    devices: list[Any] = []
    for number in range(name.num_slices):
        for place in range(of_slice):
            chip, core = divmod(place, cores)
            coords = (chip % x_size, chip // x_size % y_size, chip // x_size // y_size)
            assert coords[2] < z_size
            host = number * hosts_of_slice + place // per_host
            devices.append(StandIn(len(devices), "tpu", kind, host, number, coords, core))
    hosts = name.num_slices * hosts_of_slice
    return Topology(str(name), "tpu", CHIPS[kind], devices, name.num_slices, hosts)


def measured_machine(measured: Measured) -> Topology:
    """The machine that `jaxscale bench step --save` ran on. A device without a row in the table gets one of unknowns.

    Its peak is then what was reached, so that a share of it is no MFU: who shows one must ask find_chip first.
    """
    kind, number = measured.device_kind, measured.num_devices
    chip = find_chip(kind) or Chip(
        f"{kind} of this machine", measured.flops_per_second / number, measured.memory_bytes, 0.0, "measured here"
    )
    platform = measured.platform
    devices = [StandIn(i, platform, kind, 0, 0, (i, 0, 0)) for i in range(number)]
    return Topology(HERE, platform, chip, devices, 1, 1)
