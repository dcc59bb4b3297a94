"""Placeholder devices for planning without the real devices or their compiler.

Placeholders have the attributes that meshes and shardings read (coordinates, hosts, slices), so device layouts are the
same as in training.
"""

import dataclasses
import math
import types
from typing import Any

from jaxscale.kernels.hardware import CHIPS, Chip, find_chip
from jaxscale.kernels.host_memory import HOST
from jaxscale.tools.planning.measured import Measured
from jaxscale.tools.planning.topology import PLANNED, Topology, parse_topology

THIS_MACHINE = "here"


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """A placeholder device for shardings, which cannot run programs."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int = 0
    # JAX checks which devices are local before it places arrays on a host; -1 makes all placeholders remote
    client = types.SimpleNamespace(process_index=lambda: -1)

    def addressable_memories(self) -> list[Any]:
        """Returns device memory, and host memory where offloading is supported (TPU)."""
        return [types.SimpleNamespace(kind=kind) for kind in ("device", HOST)[: 1 + (self.platform == "tpu")]]


def open_machine(text: str) -> Topology:
    """Returns the topology for a name such as 'v5p:4x4x8'. Raises BadInput with the nearest valid name."""
    name = parse_topology(text, planned=True)
    kind = PLANNED[name.family].device_kind
    devices: list[Any] = []
    if name.platform == "gpu":
        hosts, cards = name.shape
        devices += [PlannedDevice(i, "gpu", kind, i // cards, 0, (i,)) for i in range(hosts * cards)]
        return Topology(str(name), "gpu", CHIPS[kind], devices, 1, hosts)
    x_size, y_size, *_ = (*name.shape, 1)
    cores = CHIPS[kind].devices_per_chip
    slice_devices = math.prod(name.shape) * cores
    slice_hosts = CHIPS[kind].num_hosts(slice_devices)
    per_host = -(-slice_devices // slice_hosts)
    for slice_index in range(name.num_slices):  # chips are in libtpu's order
        for index in range(slice_devices):
            chip, core = divmod(index, cores)
            coords = (chip % x_size, chip // x_size % y_size, chip // x_size // y_size)
            host = slice_index * slice_hosts + index // per_host
            devices.append(PlannedDevice(len(devices), "tpu", kind, host, slice_index, coords, core))
    hosts = name.num_slices * slice_hosts
    return Topology(str(name), "tpu", CHIPS[kind], devices, name.num_slices, hosts)


def measured_machine(measured: Measured) -> Topology:
    """Returns the topology of a measurement. For an unknown chip, the peak is the measured FLOP/s."""
    kind, number, platform = measured.device_kind, measured.num_devices, measured.platform
    rate, name = measured.flops_per_second / number, f"{kind} of this machine"
    chip = find_chip(kind) or Chip(name, rate, measured.memory_bytes, 0.0, "measured here")
    devices = [PlannedDevice(i, platform, kind, 0, 0, (i, 0, 0)) for i in range(number)]
    return Topology(THIS_MACHINE, platform, chip, devices, 1, 1)
