"""A machine that is planned for: stand-ins for its devices, so that neither they nor their compiler need be here.

They carry what mesh and shardings ask of a device (places, hosts, slices), so that layouts are those of training.
"""

import dataclasses
import math
import re
from typing import Any, NamedTuple

from jaxscale.hardware import CHIPS, Chip, find_chip
from jaxscale.planning.measured import Measured
from jaxscale.planning.topology import CARDS_PER_HOST, FAMILIES, MAX_HOSTS, Topology, TopologyName, parse_topology
from jaxscale.sharding.offload import HOST
from jaxscale.system.exits import BadInput

# Cards that can be planned for, and that the compiler ahead has no description of.
PLANNED_ONLY = {
    "b200": "NVIDIA B200",
    "v100": "Tesla V100-SXM2-16GB",
    "t4": "Tesla T4",
    "l4": "NVIDIA L4",
}
HERE = "here"


class MemoryKind(NamedTuple):
    """A memory that a device reaches, as JAX names it."""

    kind: str


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
    client: None = None

    def addressable_memories(self) -> list[MemoryKind]:
        """The device's own memory, and the host's where offloading was compiled for (TPU)."""
        return [MemoryKind("device"), *([MemoryKind(HOST)] if self.platform == "tpu" else [])]


def open_machine(text: str) -> Topology:
    """The machine that a name stands for, with stand-ins as its devices. Names are preflight's, and b200, v100, t4, l4.

    Raises BadInput, in one line with the nearest that works, for an unknown chip or a shape that is not made.
    """
    if found := re.fullmatch(rf"({'|'.join(PLANNED_ONLY)})(?::(\d+)(?:x(\d+))?)?", text.strip().lower()):
        return cards(f"{found[1]}:", PLANNED_ONLY[found[1]], *card_counts(text, found))
    try:
        name = parse_topology(text)
    except BadInput as error:
        more = f"; plan also knows {', '.join(PLANNED_ONLY)}" if "no chip is called" in str(error) else ""
        raise BadInput(f"{error}{more}") from None
    kind = FAMILIES[name.family].device_kind
    if name.platform == "gpu":
        return cards(f"{name.family}:", kind, *name.shape)
    return slices(name, kind)


def card_counts(text: str, found: re.Match) -> tuple[int, int]:
    """(hosts, cards of each) of a name such as b200:4x8. Raises BadInput where they cannot be."""
    if not found[2]:
        raise BadInput(f"topology {text!r}: how many? write {found[1]}:1x8, {found[1]}:8x8")
    hosts, of_host = (int(found[2]), int(found[3])) if found[3] else (1, int(found[2]))
    if not (1 <= hosts <= MAX_HOSTS and 1 <= of_host <= CARDS_PER_HOST):
        raise BadInput(
            f"topology {text!r}: a host holds 1 to {CARDS_PER_HOST} cards, and {MAX_HOSTS} hosts are the most; write "
            f"{found[1]}:8x8"
        )
    return hosts, of_host


def cards(prefix: str, kind: str, hosts: int, of_host: int) -> Topology:
    """Hosts of GPUs."""
    devices = [StandIn(i, "gpu", kind, i // of_host, 0, (i,)) for i in range(hosts * of_host)]
    return Topology(f"{prefix}{hosts}x{of_host}", "gpu", CHIPS[kind], devices, 1, hosts)


def slices(name: TopologyName, kind: str) -> Topology:
    """TPU slices, their chips in the order in which libtpu lists them."""
    x_size, y_size, z_size = (*name.shape, 1, 1)[:3]
    per_host, cores = CHIPS[kind].devices_per_host, CHIPS[kind].devices_per_chip
    of_slice = math.prod(name.shape) * cores
    hosts_of_slice = -(-of_slice // per_host)
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
