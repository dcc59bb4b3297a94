"""Matmuls, memory traffic and collectives of one step, read from a compiled program's text.

XLA's `cost_analysis()` counts the body of a loop once; here every instruction is multiplied by the trips of the loops
around it. All figures are for one device.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from jaxscale.kernels.collectives import ring_bytes
from jaxscale.tools.planning.links import DCN, Phase, Torus, collective_phases, concurrent_phases, ring_over
from jaxscale.tools.preflight.hlo_costs import HBM, HOST, custom_target, instruction_traffic, kernel_flops, matmul_flops
from jaxscale.tools.preflight.hlo_groups import GroupSpan, PartitionLayout, make_layout, read_span
from jaxscale.tools.preflight.hlo_schedule import ScheduleItem, ScheduleReader
from jaxscale.tools.preflight.hlo_text import ArrayShape, Computation, Instruction, Module, parse_module
from jaxscale.tools.preflight.hlo_trips import count_runs

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program. Bytes are for one device and one run; `times` are the runs of a step."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute
    axes: tuple[str, ...]  # mesh axes that its groups span, in mesh order
    crosses_slices: bool
    group_size: int
    result_bytes: int
    wire_bytes: float  # sent by one device, the minimum of any algorithm (a ring's, for instance)
    times: int
    dcn_bytes: float = 0.0  # part of wire_bytes that leaves the slice
    dtype: str = ""
    stages: tuple[Phase, ...] = ()  # on the links, in order
    name: str = ""  # of the instruction
    operation: str = ""  # of JAX's program (op_name)
    computation: str = ""  # whose schedule contains it: the entry, a loop's body, a branch


@dataclasses.dataclass(frozen=True)
class HloFacts:
    """One step of one device."""

    collectives: tuple[Collective, ...]
    dot_flops: float  # of matmuls, 2 per multiply-add; library kernels with known shapes included
    hbm_bytes: float  # an estimate: operands and results, without the inside of fusions
    unknown_trips: int  # loops with unreadable trip counts, counted as one
    host_bytes: float = 0.0  # to and from host memory
    dot_flops_by_type: dict[str, float] = dataclasses.field(default_factory=dict)
    kernel_flops: float = 0.0  # of Pallas kernels, not in dot_flops: as declared, or splash attention's from its shapes
    silent_kernels: int = 0  # runs of Pallas kernels with unknown FLOPs, in no figure here
    schedule: tuple[ScheduleItem, ...] = ()  # matmuls and collectives in execution order; () if unknown


def read_hlo(
    text: str, mesh_shape: Mapping[str, int], slice_of: Sequence[int] | None = None, torus: Torus | None = None
) -> HloFacts:
    """Returns the facts of a compiled program's text.

    Args: mesh_shape: the axes in the mesh's order. slice_of: for each device in the mesh's order, its domain of fast
    links (topology.link_domains of mesh.devices.flat); None: one domain. torus: links.make_torus of the same devices;
    None: a switch joins them. Raises BadInput for a text that is not a program, and ValueError (the caller's defect)
    for one of another mesh.
    """
    module = parse_module(text)
    layout = make_layout(mesh_shape, slice_of, module.num_partitions, torus)
    runs, fused, unknown = count_runs(module)
    starts = asynchronous_starts(module)
    collectives: list[Collective] = []
    numbers: dict[tuple[str, str], int] = {}  # of collectives, by computation and instruction
    flops: dict[str, float] = collections.defaultdict(int)
    traffic: dict[int, float] = collections.defaultdict(int)
    kernels: list[tuple[float, int]] = []  # FLOPs (0 if unknown) and runs of Pallas kernels
    for computation in module.computations.values():
        times = runs[computation.name]
        for instruction in computation.instructions.values() if times else ():
            if found := read_collective(instruction, computation, computation.name in fused, layout, times, starts):
                numbers[computation.name, instruction.name] = len(collectives)
                collectives.append(found)
            if matmul := matmul_flops(instruction, computation):
                flops[matmul[0]] += matmul[1] * times
            if (known := kernel_flops(instruction, computation)) is not None:
                kernels.append((known, times))
            if computation.name not in fused:
                for space, nbytes in instruction_traffic(module, computation, instruction).items():
                    traffic[space] += nbytes * times
    reader = ScheduleReader(module, numbers)
    schedule = reader.items(module.entry) if module.is_scheduled else ()
    return HloFacts(
        collectives=tuple(
            dataclasses.replace(one, computation=reader.computations.get(n, "")) for n, one in enumerate(collectives)
        ),
        dot_flops=math.fsum(flops.values()),
        hbm_bytes=traffic[HBM],
        unknown_trips=unknown,
        host_bytes=traffic[HOST],
        dot_flops_by_type=dict(flops),
        kernel_flops=sum(known * times for known, times in kernels),
        silent_kernels=sum(times for known, times in kernels if not known),
        schedule=schedule,
    )


def read_collective(
    instruction: Instruction,
    computation: Computation,
    is_fused: bool,
    layout: PartitionLayout,
    times: int,
    starts: Mapping[str, set[tuple[str, str]]],
) -> Collective | None:
    """Returns the collective that an instruction starts, under any spelling; None for anything else."""
    if instruction.opcode == "send":
        return cross_slice_transfer(instruction, layout, times)
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in KINDS:
        return None
    if "async_collective_fusion_config" in instruction.attributes:
        channel = instruction.attribute(r"channel_id=(\d+)") or ""
        if channel in starts and (computation.name, instruction.name) not in starts[channel]:
            return None  # counted where it starts
    kind = "all-to-all" if opcode == "ragged-all-to-all" else opcode
    shapes = result_shapes(instruction)
    span = read_span(instruction, layout)
    result = math.fsum(shape.nbytes for shape in shapes)
    if kind == "all-reduce" and is_fused and only_sliced(instruction, computation):
        kind, result = "reduce-scatter", result / span.size  # XLA:TPU fuses the two and moves no more than this
    return make_collective(kind, span, result, shapes, instruction, times)


def make_collective(
    kind: str, span: GroupSpan, result: float, shapes: Sequence[ArrayShape], instruction: Instruction, times: int
) -> Collective:
    """Returns a collective with its bytes on the links."""
    ici, dcn = wire_bytes(kind, result, span.size, span.slices)
    stages = link_stages(kind, ici, span, instruction)
    if dcn:
        stages += (Phase(DCN, span.slices, 1.0, dcn),)
    return Collective(
        kind=kind,
        axes=span.axes,
        crosses_slices=span.slices > 1,
        group_size=span.size,
        result_bytes=int(result),
        wire_bytes=ici + dcn,
        times=times,
        dcn_bytes=dcn,
        dtype=shapes[0].dtype if shapes else "",
        stages=stages,
        name=instruction.name,
        operation=instruction.attribute(r'op_name="([^"]*)"') or "",
    )


def link_stages(kind: str, sent: float, span: GroupSpan, instruction: Instruction) -> tuple[Phase, ...]:
    """Returns the phases of a collective of which a device sends `sent` bytes on the links of its slice.

    Over several torus dimensions in one instruction XLA:TPU runs one ring through all of them (emitters 1DAllGather...,
    rings of as many cores), or divides the bytes over several orders of the dimensions (StrategyND with its colors),
    which is assumed where the text names neither (seen with libtpu 0.0.51).
    """
    lines = span.lines
    members = math.prod(line.size for line in lines)
    if not sent or members < 2:
        return ()
    nbytes = sent / ring_bytes(kind, 1.0, members)
    if len(lines) > 1 and kind not in ("collective-permute", "all-to-all"):
        cores = re.search(r'"core_count":"(\d+)"', instruction.attributes)
        if not ('"emitter":"1DAllGather' in instruction.attributes or cores and int(cores[1]) == members):
            return concurrent_phases(kind, nbytes, lines)
        lines = ring_over(lines, span.chip_links)
    return collective_phases(kind, nbytes, lines)


def wire_bytes(kind: str, result: float, size: int, slices: int) -> tuple[float, float]:
    """Returns bytes that one device sends (on fast links, between slices), the minimum of any algorithm.

    A group of n = m x s devices in s slices works in two stages, within slices and across them; they add up to one
    stage over n devices: R (n-1)/n to gather a result R, twice that to all-reduce it.
    """
    if size <= 1:
        return 0.0, 0.0
    inside, members = max(1, size // slices), size
    if kind == "collective-permute":  # one message; the longest route decides
        return (0.0, result) if slices > 1 else (result, 0.0)
    if kind == "reduce-scatter":
        result *= members  # scattered array
    if kind == "all-to-all":
        return result * (inside - 1) / members, result * (members - inside) / members
    return ring_bytes(kind, result, inside), ring_bytes(kind, result, slices) / inside


def cross_slice_transfer(instruction: Instruction, layout: PartitionLayout, times: int) -> Collective | None:
    """Returns the cross-slice part of a collective, a send that XLA:TPU gives to the host, or None."""
    if instruction.attribute(r'_xla_host_transfer_handler_name="(xla_megascale_runtime)"') is None:
        return None
    kind = (instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"') or "").lower().replace("_", "-")
    target = instruction.attribute(r'_xla_megascale_target="\{([^}]*)\}') or ""
    slices = len(re.findall(r"\d+", target)) or len(set(layout.slice_of))
    kind = kind if kind in KINDS else "collective-permute"
    shapes = instruction.elements[0]
    sent_bytes = math.fsum(shape.nbytes for shape in shapes)
    result = {"all-gather": sent_bytes * slices, "reduce-scatter": sent_bytes / slices}.get(kind, sent_bytes)
    return make_collective(kind, GroupSpan(layout.slice_axes, slices, slices), result, shapes, instruction, times)


def asynchronous_starts(module: Module) -> dict[str, set[tuple[str, str]]]:
    """Returns {channel: (computation, name) of XLA:TPU's asynchronous collective fusions that start there}.

    Such a collective is printed in its start, in every fusion that it overlaps with, perhaps inside a loop, and in its
    end. Only the start gives its number of runs. Several may share a channel.
    """
    found: dict[str, set[tuple[str, str]]] = {}
    for computation in module.computations.values():
        for start in computation.instructions.values():
            if start.opcode != "custom-call" or custom_target(start) != "AsyncCollectiveStart":
                continue
            for operand in filter(None, map(computation.instructions.get, start.operands)):
                if operand.opcode in KINDS and (channel := operand.attribute(r"channel_id=(\d+)")):
                    found.setdefault(channel, set()).add((computation.name, operand.name))
    return found


def result_shapes(instruction: Instruction) -> tuple[ArrayShape, ...]:
    """Returns the result arrays of a collective.

    An asynchronous one has the type (operands, results, ...), except an all-reduce: ((operands), results) in XLA:GPU of
    jax 0.12, otherwise the results only.
    """
    results_alone = instruction.opcode == "all-reduce-start" and not instruction.type_text.startswith("((")
    if instruction.opcode.endswith("-start") and not results_alone:
        elements = instruction.elements
        return elements[1 if len(elements) > 1 else 0]
    return instruction.shapes


def only_sliced(instruction: Instruction, computation: Computation) -> bool:
    """True if every use of a result takes a slice of it."""
    pending, sliced = [instruction], False
    while pending:
        current = pending.pop()
        for user in computation.users[current.name]:
            if user.opcode in ("get-tuple-element", "bitcast"):
                pending.append(user)
            elif user.opcode == "dynamic-slice" and user.operands[0] == current.name:
                sliced = True
            else:
                return False
    return sliced
