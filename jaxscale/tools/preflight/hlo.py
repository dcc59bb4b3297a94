"""Matmuls, memory traffic and collectives of one step, read from the text of a compiled program.

XLA's `cost_analysis()` counts the body of a loop once. Here each instruction is multiplied by the trip counts of the
enclosing loops. All values are for one device.
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
    """A collective of the program. Bytes are per device and run. `times` is the number of runs per step."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute
    axes: tuple[str, ...]  # mesh axes that the groups span, in mesh order
    crosses_slices: bool
    group_size: int
    result_bytes: int
    wire_bytes: float  # sent by one device; the minimum of all algorithms, reached by a ring
    times: int
    dcn_bytes: float = 0.0  # part of wire_bytes that leaves the slice
    dtype: str = ""
    stages: tuple[Phase, ...] = ()  # phases on the links, in order
    name: str = ""  # name of the instruction
    operation: str = ""  # op_name in the JAX program
    computation: str = ""  # computation whose schedule contains the collective (entry, loop body or branch)


@dataclasses.dataclass(frozen=True)
class HloFacts:
    """Work and communication of one step on one device."""

    collectives: tuple[Collective, ...]
    dot_flops: float  # matmul FLOPs, 2 per multiply-add, including library kernels with known shapes
    hbm_bytes: float  # estimated from operands and results, without values inside fusions
    unknown_trips: int  # number of loops with unknown trip counts, which are counted as one trip
    host_bytes: float = 0.0  # to and from host memory
    dot_flops_by_type: dict[str, float] = dataclasses.field(default_factory=dict)
    kernel_flops: float = 0.0  # FLOPs of Pallas kernels (not in dot_flops), declared or from splash attention's shapes
    silent_kernels: int = 0  # runs of Pallas kernels with unknown FLOPs, which are not counted
    schedule: tuple[ScheduleItem, ...] = ()  # matmuls and collectives in execution order; () if unknown


def read_hlo(
    text: str, mesh_shape: Mapping[str, int], slice_of: Sequence[int] | None = None, torus: Torus | None = None
) -> HloFacts:
    """Returns the facts in the text of a compiled program.

    mesh_shape: sizes of mesh axes, in mesh order. slice_of: domain of fast links per device in mesh order
    (topology.link_domains), or None for one domain. torus: the result of links.make_torus(), or None if a switch
    connects the devices. Raises BadInput if the text is not a program, and ValueError if the program is for a
    different mesh.
    """
    module = parse_module(text)
    layout = make_layout(mesh_shape, slice_of, module.num_partitions, torus)
    runs, fused, unknown = count_runs(module)
    starts = asynchronous_starts(module)
    collectives: list[Collective] = []
    numbers: dict[tuple[str, str], int] = {}  # {(computation, instruction): index of the collective}
    flops: dict[str, float] = collections.defaultdict(int)
    traffic: dict[int, float] = collections.defaultdict(int)
    kernels: list[tuple[float, int]] = []  # (FLOPs or 0 if unknown, runs) per Pallas kernel
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
    """Returns the collective that an instruction starts, or None for other instructions."""
    if instruction.opcode == "send":
        return cross_slice_transfer(instruction, layout, times)
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in KINDS:
        return None
    if "async_collective_fusion_config" in instruction.attributes:
        channel = instruction.attribute(r"channel_id=(\d+)") or ""
        if channel in starts and (computation.name, instruction.name) not in starts[channel]:
            return None  # counted only at its start
    kind = "all-to-all" if opcode == "ragged-all-to-all" else opcode
    shapes = result_shapes(instruction)
    span = read_span(instruction, layout)
    result = math.fsum(shape.nbytes for shape in shapes)
    if kind == "all-reduce" and is_fused and only_sliced(instruction, computation):
        kind, result = "reduce-scatter", result / span.size  # XLA:TPU fuses all-reduce and slice
    return make_collective(kind, span, result, shapes, instruction, times)


def make_collective(
    kind: str, span: GroupSpan, result: float, shapes: Sequence[ArrayShape], instruction: Instruction, times: int
) -> Collective:
    """Returns a collective with its bytes on each link."""
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
    """Returns the phases of a collective within a slice. sent: bytes that a device sends on ICI or NVLink.

    An instruction over several torus dimensions runs either as one ring (emitter 1DAllGather..., or core_count equal to
    the group size), or in several orders of the dimensions at once, each with a part of the bytes (StrategyND). If the
    text names neither, the latter is assumed (observed with libtpu 0.0.51).
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
    """Returns the bytes that one device sends (on fast links, between slices) with an optimal algorithm.

    A group of n = m x s devices in s slices has two stages, within and across slices. Together, they send as much as a
    single stage: R (n-1)/n bytes for an all-gather with a result of R bytes, and twice as much for an all-reduce.
    """
    if size <= 1:
        return 0.0, 0.0
    inside, members = max(1, size // slices), size
    if kind == "collective-permute":  # one message; the longest route determines the time
        return (0.0, result) if slices > 1 else (result, 0.0)
    if kind == "reduce-scatter":
        result *= members  # scattered array
    if kind == "all-to-all":
        return result * (inside - 1) / members, result * (members - inside) / members
    return ring_bytes(kind, result, inside), ring_bytes(kind, result, slices) / inside


def cross_slice_transfer(instruction: Instruction, layout: PartitionLayout, times: int) -> Collective | None:
    """Returns the part of a collective that XLA:TPU sends between slices, or None for other sends."""
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
    """Returns {channel: {(computation, name)}} for each start of an XLA:TPU asynchronous collective fusion.

    The program text repeats the collective in its start, its end, and every fusion that overlaps with it, possibly in a
    loop. Only the start determines the number of runs. Several collectives may use the same channel.
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
    """Returns the arrays in the result of a collective.

    The type of an asynchronous start is (operands, results, ...). For an all-reduce, the type has only the results, or
    ((operands), results) in XLA:GPU of jax 0.12.
    """
    results_alone = instruction.opcode == "all-reduce-start" and not instruction.type_text.startswith("((")
    if instruction.opcode.endswith("-start") and not results_alone:
        elements = instruction.elements
        return elements[1 if len(elements) > 1 else 0]
    return instruction.shapes


def only_sliced(instruction: Instruction, computation: Computation) -> bool:
    """Returns True if every use of the result is a slice."""
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
