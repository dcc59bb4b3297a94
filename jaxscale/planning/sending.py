"""What the layout of a step sends over which links, and how much of it products hide: arithmetic, no compiler."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from jaxscale.build import Program
from jaxscale.hardware import Chip
from jaxscale.planning.links import (
    DCN,
    Stage,
    Torus,
    group_lines,
    make_torus,
    permute_line,
    ring_through,
    rotated,
    staged,
)
from jaxscale.planning.sent import Sent, sent_arrays
from jaxscale.planning.stages import PIPELINE, SENT, hop_bytes, stages_of
from jaxscale.planning.topology import Topology, link_domains
from jaxscale.sharding.compiler_options import SPARSE_CORE
from jaxscale.sharding.mesh import dcn_shape

KINDS = frozenset({"all-gather", "reduce-scatter"})
HOPPING = ("pipeline", "context")  # axes along which a device sends to the next
PERMUTE = frozenset({"collective-permute"})  # every compiler starts it, and waits for it later


@dataclasses.dataclass(frozen=True)
class Sending:
    """Seconds of one device and step."""

    links_s: dict[str, float]  # by link, 'ici:fsdp:x' or 'dcn:data'
    total_s: float  # one after the other
    blocking_s: float  # of those beside which nothing runs
    idle_s: float = 0.0  # while other stages of a pipeline send
    nbytes: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by mesh axis

    def exposed_s(self, compute_s: float) -> float:
        """How long products stand still: for what blocks, and for what takes longer than all of them."""
        return self.blocking_s + max(0.0, self.total_s - self.blocking_s - compute_s)


@dataclasses.dataclass(frozen=True)
class Links:
    """The links behind each axis of a mesh."""

    torus: Torus | None  # None: a switch joins the devices of a slice
    lines: Mapping[str, tuple[Stage, ...]]  # that join the devices along an axis within a slice
    hops: Mapping[str, tuple[Stage, ...]]  # from each device to the next along it, within a slice
    slices: Mapping[str, int]  # that an axis crosses


def plan_sending(program: Program, topology: Topology) -> Sending:
    """What a step sends, each stage with the links of its own dimension of the torus.

    Assumed of the compiler (hidden_kinds): which kinds run beside products, all but a part of experts' weights and
    gradients (experts.OPEN). The sum over data, once at a step's end, and those of activations over tensor, which the
    next product waits for, run beside none. What the layers of one stage of a pipeline wait for, the others wait for as
    long as for its products.
    """
    chip, found, hidden = topology.chip, mesh_links(program.mesh, topology.chip), hidden_kinds(program, topology)
    stretch = stages_of(program.cfg, program.mesh.shape).stretch(SENT)
    links: collections.defaultdict[str, float] = collections.defaultdict(float)
    nbytes: collections.defaultdict[str, float] = collections.defaultdict(float)
    blocking = idle = 0.0
    for sent in sent_arrays(program):
        if program.mesh.shape[sent.axis] == 1 or not sent.nbytes:
            continue
        for stage in stages_along(sent, found, program.compiler_options.offloads_torus):
            seconds = stage.seconds(chip) or 0.0
            nbytes[sent.axis] += stage.nbytes
            along = f":{stage.along}" if found.torus and stage.along != DCN else ""
            links[f"{'dcn' if stage.along == DCN else 'ici'}:{sent.axis}{along}"] += seconds
            stands = seconds * (sent.open if sent.hides and sent.kind in hidden else 1.0)
            blocking += stands
            idle += stands * (stretch - 1) * sent.in_stage
    return Sending(dict(links), sum(links.values()), blocking, idle, dict(nbytes))


def between_slices(program: Program, topology: Topology) -> tuple[str, int, dict[str, float]] | None:
    """(which of data and pipeline crosses between slices or hosts, how many, {each: seconds there, if it did}).

    None where neither does or more axes do, or no bandwidth is known. In the place of n copies n times as many stages
    each see the rows of all of them, at as many microbatches; in the place of stages each copy has so many more layers.
    """
    shape, chip = program.mesh.shape, topology.chip
    crossed = {axis: number for axis, number in mesh_links(program.mesh, chip).slices.items() if number > 1}
    axis, number = next(iter(crossed.items()), ("", 1))
    if not chip.dcn_bandwidth or len(crossed) != 1 or axis not in ("data", PIPELINE):
        return None
    stages, more = stages_of(program.cfg, shape), number if axis == "data" else 1
    summed = sum(sent.nbytes for sent in sent_arrays(program) if sent.axis == "data") * number // more
    copies = shape["data"] // more  # within a slice
    travels = 2 * dataclasses.replace(stages, size=stages.size * more).ticks * hop_bytes(program) * more
    sent = {"data": 2 * (number - 1) / number * summed / copies, PIPELINE: travels}
    return axis, number, {name: nbytes / chip.dcn_bandwidth for name, nbytes in sent.items()}


@functools.lru_cache(maxsize=64)
def mesh_links(mesh: Mesh, chip: Chip) -> Links:
    """The links of a mesh, which many estimates ask for."""
    devices, shape = list(mesh.devices.flat), dict(mesh.shape)
    groups, torus = link_domains(devices), make_torus(devices, chip)
    outer = dcn_shape(shape, "group", groups) if len(set(groups)) > 1 else dict.fromkeys(shape, 1)
    rows = {axis: axis_rows(mesh, axis) for axis in shape}
    inside = lambda row: [place for place in row if groups[place] == groups[row[0]]]
    pairs = lambda axis: [
        pair for row in rows[axis] for pair in itertools.pairwise(row) if groups[pair[0]] == groups[pair[1]]
    ]
    return Links(
        torus,
        {axis: group_lines(torus, inside(rows[axis][0])) for axis in shape},
        {axis: permute_line(torus, pairs(axis)) for axis in HOPPING if shape[axis] > 1},
        outer,
    )


def axis_rows(mesh: Mesh, axis: str) -> list[list[int]]:
    """Numbers of the devices along a mesh axis, a row for each place on the others."""
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    return np.moveaxis(places, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis]).tolist()


def stages_along(sent: Sent, links: Links, at_once: bool) -> list[Stage]:
    """The stages of what is sent along an axis: within a slice, and between slices where the axis crosses them.

    A message to the next device crosses whole where it crosses, and all wait for the slowest.
    """
    number = links.slices[sent.axis]
    if sent.kind == "collective-permute":
        stages = [dataclasses.replace(hop, nbytes=sent.nbytes) for hop in links.hops[sent.axis]]
        return [Stage(DCN, number, 1.0, sent.nbytes)] if number > 1 else stages
    lines = links.lines[sent.axis]
    stages = list(stages_over(sent, lines, links.torus, at_once))
    if number > 1:
        passes = 2 if sent.kind == "all-reduce" else 1
        inside = 1 if sent.kind == "all-to-all" else math.prod(line.size for line in lines)
        stages.append(Stage(DCN, number, 1.0, passes * sent.nbytes * (number - 1) / number / inside))
    return stages


def hidden_kinds(program: Program, topology: Topology) -> frozenset[str]:
    """The kinds of collectives that the compiler runs beside products, as its scheduled programs show it.

    XLA:TPU (libtpu 0.0.51): gathers on v5e; elsewhere those that the SparseCores are given. XLA:GPU: both, by its
    latency-hiding scheduler. Seen on programs of this project, 2026-11-23; nothing was timed.
    """
    if topology.platform == "gpu":
        return KINDS | PERMUTE
    if topology.devices[0].device_kind == "TPU v5 lite":
        return frozenset({"all-gather"}) | PERMUTE
    options = program.compiler_options.values
    return PERMUTE | {kind for kind in KINDS if options.get(SPARSE_CORE + kind.replace("-", "_"))}


def stages_over(sent: Sent, lines: Sequence[Stage], torus: Torus | None, at_once: bool) -> tuple[Stage, ...]:
    """The stages of collectives as the step makes them (sharding/torus.py), and XLA:TPU runs them (libtpu 0.0.51).

    at_once: gathers and scatters over several dimensions are one operation. Gathers then keep the links of all of them
    busy, scatters go round one ring through all; as do gathers over two dimensions that the TensorCores run.
    """
    if torus is None or len(lines) < 2:
        return staged(sent.kind, sent.nbytes, lines)
    if sent.kind == "reduce-scatter" and at_once or sent.kind == "all-gather" and len(lines) == 2 and not at_once:
        return staged(sent.kind, sent.nbytes, ring_through(lines, torus.num_links))
    if sent.kind == "all-gather" and at_once or sent.axis == "data":
        orders = [[*lines[first:], *lines[:first]] for first in range(len(lines))]
        return rotated([staged(sent.kind, sent.nbytes, order) for order in orders])
    return staged(sent.kind, sent.nbytes, lines)
