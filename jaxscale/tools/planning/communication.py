"""Communication time of a step per link, and the part that matmuls overlap. Computed without a compiler."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from jaxscale.build import Program
from jaxscale.core.axes.pipeline_schedules import COMMUNICATION_COSTS
from jaxscale.core.mesh import dcn_shape
from jaxscale.kernels.collectives import ring_bytes
from jaxscale.kernels.compiler_options import SPARSE_CORE
from jaxscale.kernels.hardware import Chip
from jaxscale.program.memory import hop_bytes
from jaxscale.tools.planning.collectives import PlannedCollective, step_collectives
from jaxscale.tools.planning.links import (
    DCN,
    Phase,
    Torus,
    collective_phases,
    concurrent_phases,
    group_lines,
    make_torus,
    permute_links,
    ring_over,
)
from jaxscale.tools.planning.topology import Topology, link_domains

KINDS = frozenset({"all-gather", "reduce-scatter"})
PERMUTE_AXES = ("pipeline", "context")  # axes with collective-permutes to the next device
PERMUTE = frozenset({"collective-permute"})  # asynchronous in every compiler


@dataclasses.dataclass(frozen=True)
class CommunicationTime:
    """Communication time of one device and step, in seconds."""

    links_s: dict[str, float]  # {link: seconds}, with keys such as 'ici:fsdp:x' or 'dcn:data'
    total_s: float  # sum over links, which are assumed not to overlap
    blocking_s: float  # collectives that no matmul overlaps
    idle_s: float = 0.0  # waiting for collectives of other pipeline stages
    nbytes: Mapping[str, float] = dataclasses.field(default_factory=dict)  # {mesh axis: bytes sent}

    def exposed_s(self, compute_s: float) -> float:
        """Returns the communication time that does not overlap with `compute_s` seconds of matmuls."""
        return self.blocking_s + max(0.0, self.total_s - self.blocking_s - compute_s)


@dataclasses.dataclass(frozen=True)
class Links:
    """The links that each mesh axis uses."""

    torus: Torus | None  # None if a switch connects the devices of a slice
    lines: Mapping[str, tuple[Phase, ...]]  # {axis: links within a slice}
    hops: Mapping[str, tuple[Phase, ...]]  # {axis: links from each device to the next, within a slice}
    slices: Mapping[str, int]  # {axis: number of slices that it crosses}


def communication_time(program: Program, topology: Topology) -> CommunicationTime:
    """Returns the communication time of a step.

    Kinds in overlapped_kinds() are assumed to overlap with matmuls, except for a fraction (collectives.EXPOSED) of the
    expert weights and gradients. The gradient all-reduce at the end of a step is exposed, as are the activations over
    the tensor axis, which the next matmul needs. Exposed collectives inside the layers of a pipeline stage delay the
    other stages too.
    """
    chip, links = topology.chip, mesh_links(program.mesh, topology.chip)
    overlapped = overlapped_kinds(program, topology)
    slowdown = program.plan.schedule_size.slowdown(COMMUNICATION_COSTS)
    link_seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
    nbytes: collections.defaultdict[str, float] = collections.defaultdict(float)
    blocking = idle = 0.0
    for collective in step_collectives(program):
        if program.mesh.shape[collective.axis] == 1 or not collective.nbytes:
            continue
        for phase in axis_phases(collective, links, program.plan.compiler_options.offloads_torus):
            seconds = phase.seconds(chip) or 0.0
            nbytes[collective.axis] += phase.nbytes
            along = f":{phase.along}" if links.torus and phase.along != DCN else ""
            link_seconds[f"{'dcn' if phase.along == DCN else 'ici'}:{collective.axis}{along}"] += seconds
            exposed = seconds * (collective.exposed if collective.overlaps and collective.kind in overlapped else 1.0)
            blocking += exposed
            idle += exposed * (slowdown - 1) * collective.in_stage
    return CommunicationTime(dict(link_seconds), sum(link_seconds.values()), blocking, idle, dict(nbytes))


def slice_crossing(program: Program, topology: Topology) -> tuple[str, int, dict[str, float]] | None:
    """Returns (axis that crosses slices or hosts, number of slices or hosts, {axis: seconds if this axis crosses}).

    Returns None unless only one axis crosses, this axis is data or pipeline, and the bandwidth is known. For n slices,
    data parallelism is compared with n times as many stages, which process the rows of all replicas in the same
    number of microbatches. Pipeline parallelism is compared with n replicas with n times as many layers per stage.
    """
    shape, chip = program.mesh.shape, topology.chip
    crossings = {axis: number for axis, number in mesh_links(program.mesh, chip).slices.items() if number > 1}
    axis, number = next(iter(crossings.items()), ("", 1))
    if not chip.dcn_bandwidth or len(crossings) != 1 or axis not in ("data", "pipeline"):
        return None
    schedule, factor = program.plan.schedule_size, number if axis == "data" else 1
    gradient_bytes = sum(one.nbytes for one in step_collectives(program) if one.axis == "data") * number // factor
    copies = shape["data"] // factor  # within a slice
    schedule = dataclasses.replace(schedule, num_stages=schedule.num_stages * factor)
    activation_bytes = 2 * schedule.num_ticks * hop_bytes(program) * factor
    sent_bytes = {"data": ring_bytes("all-reduce", gradient_bytes, number) / copies, "pipeline": activation_bytes}
    return axis, number, {name: nbytes / chip.dcn_bandwidth for name, nbytes in sent_bytes.items()}


@functools.lru_cache(maxsize=64)
def mesh_links(mesh: Mesh, chip: Chip) -> Links:
    """Returns the links that each mesh axis uses. Cached, because many estimates use the same mesh."""
    devices, shape = list(mesh.devices.flat), dict(mesh.shape)
    groups, torus = link_domains(devices), make_torus(devices, chip)
    slices = dcn_shape(shape, "group", groups) if len(set(groups)) > 1 else dict.fromkeys(shape, 1)
    indices = np.arange(mesh.size).reshape(mesh.devices.shape)
    rows = {axis: np.moveaxis(indices, i, -1).reshape(-1, shape[axis]).tolist() for i, axis in enumerate(shape)}
    same_slice = lambda row: [index for index in row if groups[index] == groups[row[0]]]
    pairs = lambda axis: [
        pair for row in rows[axis] for pair in itertools.pairwise(row) if groups[pair[0]] == groups[pair[1]]
    ]
    return Links(
        torus,
        {axis: group_lines(torus, same_slice(rows[axis][0])) for axis in shape},
        {axis: permute_links(torus, pairs(axis)) for axis in PERMUTE_AXES if shape[axis] > 1},
        slices,
    )


def axis_phases(collective: PlannedCollective, links: Links, fused: bool) -> list[Phase]:
    """Returns the phases of a collective: within a slice, then across slices if the axis crosses slices.

    A collective-permute across slices takes as long as its slowest message.
    """
    number = links.slices[collective.axis]
    if collective.kind == "collective-permute":
        crossed = [Phase(DCN, number, 1.0)] if number > 1 else links.hops[collective.axis]
        return [dataclasses.replace(hop, nbytes=collective.nbytes) for hop in crossed]
    lines = links.lines[collective.axis]
    phases = list(torus_phases(collective, lines, links.torus, fused))
    if number > 1:
        slice_size = 1 if collective.kind == "all-to-all" else math.prod(line.size for line in lines)
        phases.append(Phase(DCN, number, 1.0, ring_bytes(collective.kind, collective.nbytes, number) / slice_size))
    return phases


def overlapped_kinds(program: Program, topology: Topology) -> frozenset[str]:
    """Returns the kinds of collectives that the compiler overlaps with matmuls.

    XLA:TPU (libtpu 0.0.51) overlaps all-gathers on v5e, and on other chips the collectives that run on SparseCores.
    XLA:GPU overlaps all-gathers and reduce-scatters. All compilers overlap collective-permutes. Observed in compiled
    schedules of jaxscale programs, 2026-11-23; not timed.
    """
    if topology.platform == "gpu":
        return KINDS | PERMUTE
    if topology.devices[0].device_kind == "TPU v5 lite":
        return frozenset({"all-gather"}) | PERMUTE
    options = program.plan.compiler_options.values
    return PERMUTE | {kind for kind in KINDS if options.get(SPARSE_CORE + kind.replace("-", "_"))}


def torus_phases(
    collective: PlannedCollective, lines: Sequence[Phase], torus: Torus | None, fused: bool
) -> tuple[Phase, ...]:
    """Returns the phases of a collective from kernels/collectives.py, as compiled by XLA:TPU (libtpu 0.0.51).

    fused: True if a gather or scatter over several torus dimensions is one operation. A fused gather uses the links of
    all dimensions. A fused scatter uses one ring through all dimensions, as does an unfused gather over two dimensions.
    """
    if torus is None or len(lines) < 2:
        return collective_phases(collective.kind, collective.nbytes, lines)
    kind, nbytes = collective.kind, collective.nbytes
    if kind == "reduce-scatter" and fused or kind == "all-gather" and len(lines) == 2 and not fused:
        return collective_phases(kind, nbytes, ring_over(lines, torus.num_links))
    if kind == "all-gather" and fused or collective.axis == "data":
        return concurrent_phases(kind, nbytes, lines)
    return collective_phases(kind, nbytes, lines)
