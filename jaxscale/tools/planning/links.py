"""Phases of a collective along the torus of a slice, and the seconds that each phase occupies links."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.kernels.collectives import ring_bytes, wraps
from jaxscale.kernels.hardware import Chip

DIMENSIONS = "xyz"
CORE = "core"  # between the two devices of one chip, without a torus link
SWITCH = "switch"
DCN = "dcn"


@dataclasses.dataclass(frozen=True)
class Phase:
    """The part of a collective that uses one set of links. With nbytes=0, it only describes the links."""

    along: str  # CORE, SWITCH, DCN, a torus dimension, or 'xy' for links of x and y at once
    size: int  # number of participating devices
    share: float  # fraction used of the chip's ICI or NVLink bandwidth, or of its DCN bandwidth
    nbytes: float = 0.0  # bytes sent by one device

    @property
    def queues(self) -> tuple[str, ...]:
        """Names of the links in use. Only one phase at a time can use a link."""
        return tuple(self.along) if set(self.along) <= set(DIMENSIONS) else (self.along,)

    def seconds(self, chip: Chip) -> float | None:
        """Returns the time that this phase uses its links, or None if the bandwidth is unknown."""
        bandwidth = chip.dcn_bandwidth if self.along == DCN else chip.ici_bandwidth
        return self.nbytes / (bandwidth * self.share) if bandwidth else None


@dataclasses.dataclass(frozen=True)
class Torus:
    """Torus coordinates of the devices of a mesh, in mesh order."""

    coords: tuple[tuple[int, ...], ...]  # per device: one coordinate per dimension, then the core within the chip
    sides: tuple[int, ...]
    rings: tuple[bool, ...]  # per dimension: True if its links wrap around

    @property
    def num_links(self) -> int:
        """Number of links per chip, two per dimension."""
        return 2 * len(self.sides)


def make_torus(devices: Sequence[Any], chip: Chip) -> Torus | None:
    """Returns the torus within each slice, or None if a switch connects the devices."""
    if chip.ici_dims == 0 or not hasattr(devices[0], "coords"):
        return None
    coords = [(*device.coords[: chip.ici_dims], getattr(device, "core_on_chip", 0)) for device in devices]
    sides = tuple(max(column) + 1 for column in zip(*coords))[:-1]
    return Torus(tuple(coords), sides, tuple(side > 1 and wraps(chip.ici_dims, sides, side) for side in sides))


def group_lines(torus: Torus | None, members: Sequence[int]) -> tuple[Phase, ...]:
    """Returns the links between devices of one slice: one Phase with nbytes=0 per torus dimension.

    The slowest-varying dimension is first. A ring uses two links per chip, and a line uses one. Interleaved groups
    share these links. A group that does not fill a box uses one link.
    """
    members = list(dict.fromkeys(members))
    if len(members) < 2:
        return ()
    if torus is None:
        return (Phase(SWITCH, len(members), 1.0),)
    coords = np.array([torus.coords[member] for member in members])
    varying = [number for number in range(coords.shape[1]) if len(set(coords[:, number].tolist())) > 1]
    values = {number: sorted(set(coords[:, number].tolist())) for number in varying}
    changes = {number: np.count_nonzero(np.diff(coords[:, number])) for number in varying}
    if math.prod(map(len, values.values())) != len(members):
        along = "".join(DIMENSIONS[number] for number in varying if number < len(torus.sides))
        return (Phase(along, len(members), 1 / torus.num_links),)
    lines = []
    for number in sorted(varying, key=lambda number: changes[number]):
        if number == len(torus.sides):
            lines.append(Phase(CORE, len(values[number]), 1.0))
            continue
        stride = math.gcd(*(later - earlier for earlier, later in itertools.pairwise(values[number])))
        is_ring = torus.rings[number] and len(values[number]) * stride == torus.sides[number]
        links = (2 if is_ring else 1) / stride
        lines.append(Phase(DIMENSIONS[number], len(values[number]), links / torus.num_links))
    return tuple(lines)


def ring_over(lines: Sequence[Phase], chip_links: int) -> tuple[Phase, ...]:
    """Returns one ring through all devices of a group, which uses two links per chip."""
    return (Phase(joined_dims(lines), math.prod(line.size for line in lines), 2 / chip_links),)


def joined_dims(lines: Sequence[Phase]) -> str:
    """Returns the dimensions of the lines, such as 'xy'. Omits CORE if there are torus dimensions."""
    along = {line.along for line in lines}
    return "".join(sorted(along & set(DIMENSIONS))) or min(along)


def collective_phases(kind: str, nbytes: float, lines: Sequence[Phase]) -> tuple[Phase, ...]:
    """Returns a collective's phases in order. nbytes: size of the whole array. lines: result of group_lines()."""
    if kind == "collective-permute":
        return tuple(dataclasses.replace(line, nbytes=nbytes) for line in lines)
    if kind == "all-to-all":  # uses all lines at once, limited by the bisection of the longest line
        size = math.prod(line.size for line in lines)
        sent, slowest = ring_bytes("all-to-all", nbytes, size), 0.0  # slowest: equivalent bytes over all links
        for line in lines:
            # a line of n sends n/2 * n/2 messages of nbytes/n over its middle link; a ring splits them over two links
            hops = 1.0 if line.along in (SWITCH, CORE) else max(1.0, line.size / 4 * line.size / (line.size - 1))
            slowest = max(slowest, ring_bytes("all-to-all", nbytes, line.size) * hops / line.share)
        return (Phase(joined_dims(lines), size, sent / slowest, sent),) if lines else ()
    scattered, remaining = [], nbytes
    for line in lines:
        scattered.append(dataclasses.replace(line, nbytes=ring_bytes("reduce-scatter", remaining, line.size)))
        remaining /= line.size
    gathered = scattered[::-1]
    phases = {"reduce-scatter": scattered, "all-gather": gathered, "all-reduce": scattered + gathered}[kind]
    return tuple(phases)


def concurrent_phases(kind: str, nbytes: float, lines: Sequence[Phase]) -> tuple[Phase, ...]:
    """Returns one phase that runs all rotations of the lines at once. Each sends an equal part of the bytes."""
    orders = [collective_phases(kind, nbytes, [*lines[first:], *lines[:first]]) for first in range(len(lines))]
    steps = zip(*orders)
    slowest = sum(max(phase.nbytes / phase.share for phase in step) for step in steps) / len(orders)
    sent = math.fsum(phase.nbytes for phase in orders[0])
    size = math.prod({phase.along: phase.size for phase in orders[0]}.values())
    return (Phase(joined_dims(orders[0]), size, sent / slowest, sent),) if sent else ()


def permute_links(torus: Torus | None, pairs: Sequence[tuple[int, int]]) -> tuple[Phase, ...]:
    """Returns the links of a collective-permute. The link with the most messages limits the bandwidth."""
    pairs = [(source, target) for source, target in pairs if source != target]
    if not pairs:
        return ()
    if torus is None:
        return (Phase(SWITCH, 2, 1.0),)
    loads: dict[tuple[int, ...], int] = {}
    along = set()
    for source, target in pairs:
        for number, link in route_steps(torus, torus.coords[source], torus.coords[target]):
            along.add(DIMENSIONS[number])
            loads[link] = loads.get(link, 0) + 1
    if not loads:
        return (Phase(CORE, 2, 1.0),)
    return (Phase("".join(sorted(along)), 2, 1 / torus.num_links / max(loads.values())),)


def route_steps(torus: Torus, source: Sequence[int], target: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (dimension, link) for each hop of a message on its shortest route."""
    route = []
    coords = list(source[:-1])
    for number, side in enumerate(torus.sides):
        distance = target[number] - coords[number]
        if torus.rings[number] and abs(distance) > side / 2:
            distance -= math.copysign(side, distance)
        direction = 1 if distance > 0 else -1
        for _ in range(abs(int(distance))):
            route.append((number, (*coords, number, direction)))
            coords[number] = (coords[number] + direction) % side
    return route
