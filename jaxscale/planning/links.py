"""What the fast links of a slice carry: the stages of a collective along the torus, and the seconds that they take."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.hardware import Chip
from jaxscale.sharding.torus import wraps

DIMENSIONS = "xyz"
CORE = "core"  # between the two devices of one chip, which need no link of the torus
SWITCH = "switch"
DCN = "dcn"


@dataclasses.dataclass(frozen=True)
class Stage:
    """The part of a collective that goes over the same links all the time, or the links that it would go over."""

    along: str  # a dimension of the torus, or 'xy' for links of both at once; CORE, SWITCH or DCN
    size: int  # devices that take part
    share: float  # of all fast links of a chip, or of its port to the data centre's network, that it keeps busy
    nbytes: float = 0.0  # sent by one device

    @property
    def queues(self) -> tuple[str, ...]:
        """What no two stages use at the same time."""
        return tuple(self.along) if set(self.along) <= set(DIMENSIONS) else (self.along,)

    def seconds(self, chip: Chip) -> float | None:
        """How long its links are busy; None where their bandwidth is not known."""
        bandwidth = chip.dcn_bandwidth if self.along == DCN else chip.ici_bandwidth
        return self.nbytes / (bandwidth * self.share) if bandwidth else None


@dataclasses.dataclass(frozen=True)
class Torus:
    """Where each device of a mesh is, in the mesh's order, and which dimensions are closed to rings."""

    places: tuple[tuple[int, ...], ...]  # on the torus; the core within its chip comes last
    sides: tuple[int, ...]
    rings: tuple[bool, ...]

    @property
    def num_links(self) -> int:
        """Of one chip, if all were there: two for each dimension."""
        return 2 * len(self.sides)


def make_torus(devices: Sequence[Any], chip: Chip) -> Torus | None:
    """The torus of a slice's devices (of each slice, if there are several); None where a switch joins them."""
    if chip.ici_dims == 0 or not hasattr(devices[0], "coords"):
        return None
    places = [(*device.coords[: chip.ici_dims], getattr(device, "core_on_chip", 0)) for device in devices]
    sides = tuple(max(column) + 1 for column in zip(*places))[:-1]
    return Torus(tuple(places), sides, tuple(side > 1 and wraps(chip.ici_dims, sides, side) for side in sides))


def group_lines(torus: Torus | None, members: Sequence[int]) -> tuple[Stage, ...]:
    """The links of one slice's members of a group: a stage without bytes for each dimension, the slowest-varying first.

    A ring has two links of a chip, a line one, for what passes an end of a line comes in by one link; groups that lie
    between each other's members divide them. Members that fill no box have one link.
    """
    members = list(dict.fromkeys(members))
    if len(members) < 2:
        return ()
    if torus is None:
        return (Stage(SWITCH, len(members), 1.0),)
    places = np.array([torus.places[member] for member in members])
    varying = [number for number in range(places.shape[1]) if len(set(places[:, number].tolist())) > 1]
    values = {number: sorted(set(places[:, number].tolist())) for number in varying}
    changes = {number: np.count_nonzero(np.diff(places[:, number])) for number in varying}
    if math.prod(map(len, values.values())) != len(members):
        along = "".join(DIMENSIONS[number] for number in varying if number < len(torus.sides))
        return (Stage(along, len(members), 1 / torus.num_links),)
    lines = []
    for number in sorted(varying, key=lambda number: changes[number]):
        if number == len(torus.sides):
            lines.append(Stage(CORE, len(values[number]), 1.0))
            continue
        links = line_links(values[number], torus.sides[number], torus.rings[number])
        lines.append(Stage(DIMENSIONS[number], len(values[number]), links / torus.num_links))
    return tuple(lines)


def line_links(values: Sequence[int], side: int, ring: bool) -> float:
    """Links of a chip that one group on a dimension of the torus can use, its members being at these places."""
    stride = math.gcd(*(later - earlier for earlier, later in itertools.pairwise(values)))
    return (2 if ring and len(values) * stride == side else 1) / stride


def ring_through(lines: Sequence[Stage], chip_links: int) -> tuple[Stage, ...]:
    """One ring through all members, over the links of several dimensions: two of each chip, run both ways."""
    return (Stage(joined(lines), math.prod(line.size for line in lines), 2 / chip_links),)


def joined(lines: Sequence[Stage]) -> str:
    """'xy' for lines along x and y; cores of one chip are left out beside dimensions of the torus."""
    along = {line.along for line in lines}
    return "".join(sorted(along & set(DIMENSIONS))) or min(along)


def staged(kind: str, nbytes: float, lines: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages of a collective over these lines, one after the other, each with its bytes.

    Args: nbytes: the whole array: what is gathered to, scattered from, summed or exchanged. lines: the slowest-varying
    first, in which order sums are scattered; gathers go the other way.
    """
    if kind == "collective-permute":
        return tuple(dataclasses.replace(line, nbytes=nbytes) for line in lines)
    if kind == "all-to-all":
        return (exchange(nbytes, lines),) if lines else ()
    scattered, rest = [], nbytes
    for line in lines:
        scattered.append(dataclasses.replace(line, nbytes=rest * (line.size - 1) / line.size))
        rest /= line.size
    gathered = scattered[::-1]
    found = {"reduce-scatter": scattered, "all-gather": gathered, "all-reduce": scattered + gathered}[kind]
    return tuple(found)


def exchange(nbytes: float, lines: Sequence[Stage]) -> Stage:
    """An all-to-all, which runs over all its lines at once: what passes the middle of the longest decides.

    A line of n sends n/2 * n/2 messages of nbytes/n over its middle link, a ring half as much over each of two.
    """
    size = math.prod(line.size for line in lines)
    sent = nbytes * (size - 1) / size
    slowest = 0.0  # bytes over all links of a chip that would take as long
    for line in lines:
        hops = 1.0 if line.along in (SWITCH, CORE) else max(1.0, line.size / 4 * line.size / (line.size - 1))
        slowest = max(slowest, nbytes * (line.size - 1) / line.size * hops / line.share)
    return Stage(joined(lines), size, sent / slowest, sent)


def rotated(stages: Sequence[Sequence[Stage]]) -> tuple[Stage, ...]:
    """Orders of the same lines that run beside each other, each with an equal part of the bytes, as one stage."""
    steps = zip(*stages)
    slowest = sum(max(stage.nbytes / stage.share for stage in step) for step in steps) / len(stages)
    sent = math.fsum(stage.nbytes for stage in stages[0])
    size = math.prod({stage.along: stage.size for stage in stages[0]}.values())
    return (Stage(joined(stages[0]), size, sent / slowest, sent),) if sent else ()


def permute_line(torus: Torus | None, pairs: Sequence[tuple[int, int]]) -> tuple[Stage, ...]:
    """The links of a permute: its busiest link carries several messages where they have more than one step to go."""
    pairs = [(source, target) for source, target in pairs if source != target]
    if not pairs:
        return ()
    if torus is None:
        return (Stage(SWITCH, 2, 1.0),)
    loads: dict[tuple[int, ...], int] = {}
    along = set()
    for source, target in pairs:
        for number, link in steps(torus, torus.places[source], torus.places[target]):
            along.add(DIMENSIONS[number])
            loads[link] = loads.get(link, 0) + 1
    if not loads:
        return (Stage(CORE, 2, 1.0),)
    return (Stage("".join(sorted(along)), 2, 1 / torus.num_links / max(loads.values())),)


def steps(torus: Torus, here: Sequence[int], there: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """(dimension, link) for each step of a message, by the shorter way, one dimension after the other."""
    found = []
    place = list(here[:-1])
    for number, side in enumerate(torus.sides):
        distance = there[number] - place[number]
        if torus.rings[number] and abs(distance) > side / 2:
            distance -= math.copysign(side, distance)
        way = 1 if distance > 0 else -1
        for _ in range(abs(int(distance))):
            found.append((number, (*place, number, way)))
            place[number] = (place[number] + way) % side
    return found
