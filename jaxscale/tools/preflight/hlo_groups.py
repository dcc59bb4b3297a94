"""Replica groups of collectives, and the mesh axes and slices that the groups span."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from jaxscale.tools.planning.links import Phase, Torus, group_lines, permute_links
from jaxscale.tools.preflight.hlo_text import Instruction

MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\((.*?)\))?\s*\{([^}]*)\}")
IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
LISTED_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
PAIRS = r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}"


@dataclasses.dataclass(frozen=True)
class PartitionLayout:
    """Mesh that a program was compiled for: axis sizes (outermost first), slices and torus."""

    mesh_shape: Mapping[str, int]
    slice_of: tuple[int, ...]
    positions: tuple[int, ...]  # mesh positions of the program's partitions, of one slice if compiled per slice
    torus: Torus | None  # None if a switch connects the devices of a slice

    @property
    def slice_axes(self) -> tuple[str, ...]:
        """Mesh axes that cross slices."""
        slices = np.array(self.slice_of).reshape(tuple(self.mesh_shape.values()))
        return tuple(
            name for number, name in enumerate(self.mesh_shape) if np.any(slices != slices.take([0], axis=number))
        )


@dataclasses.dataclass(frozen=True)
class GroupSpan:
    """Mesh axes, slices and links that the groups of a collective span."""

    axes: tuple[str, ...]  # mesh axes along which members of a group differ
    size: int  # devices in a group
    slices: int  # slices in a group
    lines: tuple[Phase, ...] = ()  # links between members within a slice
    chip_links: int = 1  # torus links per chip


def make_layout(
    mesh_shape: Mapping[str, int], slice_of: Sequence[int] | None, num_partitions: int | None, torus: Torus | None
) -> PartitionLayout:
    """Returns the layout. Raises ValueError if the program, mesh and slices are inconsistent."""
    size = math.prod(mesh_shape.values())
    slices = tuple(slice_of) if slice_of is not None else (0,) * size
    if len(slices) != size:
        raise ValueError(f"slice_of has {len(slices)} devices, but the mesh {dict(mesh_shape)} has {size}")
    # For several slices, XLA:TPU compiles the program of one slice, with device numbers within this slice.
    first = tuple(position for position in range(size) if slices[position] == slices[0])
    partitions = num_partitions or 1
    if partitions not in (1, size, len(first)):
        raise ValueError(f"the program has {partitions} partitions, but the mesh {dict(mesh_shape)} has {size} devices")
    return PartitionLayout(mesh_shape, slices, first if partitions == len(first) else tuple(range(size)), torus)


def read_span(instruction: Instruction, layout: PartitionLayout) -> GroupSpan:
    """Returns the span of a collective's replica groups or source-target pairs."""
    is_permute = instruction.opcode.startswith("collective-permute")
    if is_permute:
        groups = np.array(ints(instruction.attribute(PAIRS) or ""), int).reshape(-1, 2)  # (source, target)
    else:
        groups = parse_groups(instruction.attributes, len(layout.positions))
    if groups.size == 0:
        return GroupSpan((), 1, 1)
    if groups.max() >= len(layout.positions):
        raise ValueError(f"a collective refers to device {groups.max()}, but the mesh is {dict(layout.mesh_shape)}")
    positions = np.array(layout.positions)[groups]
    slices = np.array(layout.slice_of)[positions]
    coordinates = np.unravel_index(positions, tuple(layout.mesh_shape.values()))
    sizes = {
        name: length
        for (name, length), coordinate in zip(layout.mesh_shape.items(), coordinates)
        if np.any(coordinate != coordinate[:, :1])
    }
    same_slice = [row for row, ids in zip(positions.tolist(), slices.tolist()) if len(set(ids)) == 1]
    if is_permute:
        lines = permute_links(layout.torus, same_slice)
    else:
        lines = group_lines(layout.torus, positions[0][slices[0] == slices[0][0]].tolist())
    chip_links = layout.torus.num_links if layout.torus else 1
    size = math.prod(sizes.values()) if is_permute else groups.shape[1]
    return GroupSpan(tuple(sizes), size, max(len(set(row)) for row in slices.tolist()), lines, chip_links)


def parse_groups(attributes: str, num_devices: int) -> np.ndarray:
    """Returns replica groups as int[groups, size]. Raises ValueError unless the text is in an XLA format."""
    if match := MESH_GROUPS.search(attributes):
        return mesh_groups(*match.groups())
    if match := IOTA_GROUPS.search(attributes):
        return iota(match[2], match[3]).reshape(ints(match[1]))
    if match := LISTED_GROUPS.search(attributes):
        rows = [ints(row) for row in re.findall(r"\{([\d,]*)\}", match[1])]
        if not rows:
            return np.arange(num_devices).reshape(1, -1)  # an empty list means all devices
        longest = max(map(len, rows))  # shorter groups repeat their last member, which sends nothing
        return np.array([row + (row[-1],) * (longest - len(row)) for row in rows])
    raise ValueError(f"unknown replica groups: {attributes[:120]}")


def mesh_groups(axes: str, device_ids: str | None, used: str) -> np.ndarray:
    """Returns the groups over the axes `used`, such as `'b':(2)2` for part of an axis. axes: such as `'a'=2,'b'=4`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    used_axes = {name: (pre, size) for name, pre, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", used)}
    factors: list[tuple[int, bool]] = []  # (size, is used) of the part before, in and after the used part of an axis
    for name, length in sizes.items():
        pre, size = map(int, used_axes[name]) if name in used_axes and used_axes[name][1] else (1, length)
        factors += [(pre, False), (size, name in used_axes), (length // (pre * size), False)]
    ids = np.arange(math.prod(sizes.values()))
    if device_ids:  # an iota such as `[4,2]T(1,0)`, or a list
        match = re.fullmatch(r"(?:\[[\d,]+\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\)?)?", device_ids.strip())
        ids = iota(*match.groups()) if match else np.array(ints(device_ids))
    order = sorted(range(len(factors)), key=lambda n: factors[n][1])
    members = math.prod(size for size, is_used in factors if is_used)
    return ids.reshape([size for size, _ in factors]).transpose(order).reshape(-1, members)


def iota(dims: str, permutation: str | None) -> np.ndarray:
    """Returns 0, 1, 2, ..., reshaped to `dims` and transposed."""
    shape = ints(dims)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(ints(permutation)) if permutation else numbers


def ints(text: str) -> tuple[int, ...]:
    """Returns the numbers in text such as `1,2,3`."""
    return tuple(int(number) for number in re.findall(r"\d+", text))
