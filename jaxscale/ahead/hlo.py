"""What a compiled program does in one step, read from its text: products, memory traffic, collectives.

XLA's own counts (`cost_analysis()`) are not per step, since it counts the body of a loop once; here every instruction
is multiplied by the trips of the loops around it. All figures are of one device.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from jaxscale.ahead.hlo_costs import HBM, HOST, PALLAS, custom_target, instruction_traffic, kernel_flops, product_flops
from jaxscale.ahead.hlo_groups import Layout, Span, make_layout, span_groups
from jaxscale.ahead.hlo_schedule import Item, read_schedule
from jaxscale.ahead.hlo_text import Computation, Instruction, Module, Shape, parse_module
from jaxscale.ahead.hlo_trips import count_runs
from jaxscale.planning.links import DCN, Stage, Torus, ring_through, rotated, staged

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program. Bytes are of one device and one run; `times` are the runs of a step."""

    kind: str  # what moves: all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute
    axes: tuple[str, ...]  # mesh axes that its groups span, in mesh order
    crosses_slices: bool
    group_size: int
    result_bytes: int
    wire_bytes: float  # sent by one device, by the least that any algorithm needs (a ring's, for instance)
    times: int
    dcn_bytes: float = 0.0  # the part of wire_bytes that leaves the slice; the rest stays on its fast links
    dtype: str = ""
    stages: tuple[Stage, ...] = ()  # what it does on the links, one after the other
    name: str = ""  # of the instruction
    operation: str = ""  # of JAX's program, as XLA notes it
    computation: str = ""  # in whose schedule it stands: the entry, a loop's body, a branch


@dataclasses.dataclass(frozen=True)
class HloFacts:
    """One step of one device."""

    collectives: list[Collective]
    dot_flops: float  # of matrix products, 2 for each multiply-add; library kernels with known shapes included
    hbm_bytes: float  # an estimate: operands and results of what runs, without what a fusion keeps to itself
    unknown_trips: int  # loops whose trips could not be read and count as one
    host_bytes: float = 0.0  # to and from the host's memory
    dot_flops_by_type: dict[str, float] = dataclasses.field(default_factory=dict)
    kernel_flops: float = 0.0  # of Pallas kernels, beside dot_flops: as declared, or splash attention's from its shapes
    silent_kernels: int = 0  # runs of Pallas kernels of which nothing is known: their FLOPs are in no figure here
    schedule: tuple[Item, ...] = ()  # products and collectives in the order in which they run; () if it is not known


def read_hlo(
    text: str, mesh_shape: Mapping[str, int], slice_of: Sequence[int] | None = None, torus: Torus | None = None
) -> HloFacts:
    """The facts of a compiled program's text.

    Args: mesh_shape: the axes in the mesh's order. slice_of: for each device in the mesh's order, the island of fast
    links that it is in (topology.link_domains of mesh.devices.flat); None: one island. torus: where the devices are in
    theirs (links.make_torus of the same); None: a switch joins them.
    Raises BadInput for a text that is no program. One that is of another mesh is the caller's defect (ValueError).
    """
    module = parse_module(text)
    layout = make_layout(mesh_shape, slice_of, module.num_partitions, torus)
    runs, fused, unknown = count_runs(module)
    starts = asynchronous_starts(module)
    collectives: list[Collective] = []
    numbers: dict[tuple[str, str], int] = {}  # of the collectives, by computation and instruction
    flops: dict[str, float] = collections.defaultdict(int)
    moved: dict[int, float] = collections.defaultdict(int)
    pallas, silent = 0.0, 0
    for computation in module.computations.values():
        times = runs[computation.name]
        for instruction in computation.instructions.values() if times else ():
            inside = computation.name in fused
            if found := read_collective(instruction, computation, inside, layout, times, starts):
                numbers[computation.name, instruction.name] = len(collectives)
                collectives.append(found)
            if product := product_flops(instruction, computation):
                flops[product[0]] += product[1] * times
            if instruction.opcode == "custom-call" and custom_target(instruction).startswith(PALLAS):
                known = kernel_flops(instruction, computation)
                pallas += known * times
                silent += times * (known == 0)
            if not inside:
                for space, nbytes in instruction_traffic(module, computation, instruction).items():
                    moved[space] += nbytes * times
    schedule, places = read_schedule(module, numbers)
    return HloFacts(
        collectives=[dataclasses.replace(one, computation=places.get(n, "")) for n, one in enumerate(collectives)],
        dot_flops=math.fsum(flops.values()),
        hbm_bytes=moved[HBM],
        unknown_trips=unknown,
        host_bytes=moved[HOST],
        dot_flops_by_type=dict(flops),
        kernel_flops=pallas,
        silent_kernels=silent,
        schedule=schedule,
    )


def read_collective(
    instruction: Instruction,
    computation: Computation,
    is_fused: bool,
    layout: Layout,
    times: int,
    starts: Mapping[str, set[tuple[str, str]]],
) -> Collective | None:
    """The collective that an instruction starts, under any spelling; None for anything else."""
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
    span = span_groups(instruction, layout)
    result = math.fsum(shape.nbytes for shape in shapes)
    if kind == "all-reduce" and is_fused and only_sliced(instruction, computation):
        kind, result = "reduce-scatter", result / span.size  # XLA:TPU's fusion of the two moves no more than this
    return make_collective(kind, span, result, shapes, instruction, times)


def make_collective(
    kind: str, span: Span, result: float, shapes: Sequence[Shape], instruction: Instruction, times: int
) -> Collective:
    """A collective with the bytes that it puts on wires."""
    ici, dcn = wire_bytes(kind, result, span.size, span.slices)
    stages = link_stages(kind, ici, span, instruction)
    if dcn:
        stages += (Stage(DCN, span.slices, 1.0, dcn),)
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


def link_stages(kind: str, sent: float, span: Span, instruction: Instruction) -> tuple[Stage, ...]:
    """The stages of a collective of which a device sends so many bytes on the links of its slice.

    Over several dimensions of the torus in one instruction XLA:TPU runs one ring through all of them (emitters
    1DAllGather..., rings of so many cores) or divides the bytes over several orders of the dimensions (StrategyND with
    its colors), which is taken for all that say nothing (seen with libtpu 0.0.51).
    """
    lines = span.lines
    members = math.prod(line.size for line in lines)
    if not sent or members < 2:
        return ()
    whole = (
        sent if kind == "collective-permute" else sent * members / (members - 1) / (2 if kind == "all-reduce" else 1)
    )
    if len(lines) > 1 and kind not in ("collective-permute", "all-to-all"):
        cores = re.search(r'"core_count":"(\d+)"', instruction.attributes)
        if '"emitter":"1DAllGather' in instruction.attributes or cores and int(cores[1]) == members:
            lines = ring_through(lines, span.chip_links)
        else:
            orders = [[*lines[first:], *lines[:first]] for first in range(len(lines))]
            return rotated([staged(kind, whole, order) for order in orders])
    return staged(kind, whole, lines)


def wire_bytes(kind: str, result: float, size: int, slices: int) -> tuple[float, float]:
    """Bytes that one device sends (on fast links, between slices), by the least that any algorithm needs.

    A group of n = m x s devices in s slices works in two stages, inside slices and across them; the stages add up to
    what one stage over n devices sends: R (n-1)/n to gather a result R, twice that to all-reduce it.
    """
    if size <= 1:
        return 0.0, 0.0
    inside, members = max(1, size // slices), size
    if kind == "collective-permute":  # one message; the device that sends it furthest decides
        return (0.0, result) if slices > 1 else (result, 0.0)
    if kind == "reduce-scatter":
        result *= members  # what is scattered
    if kind == "all-to-all":
        return result * (inside - 1) / members, result * (members - inside) / members
    passes = 2 if kind == "all-reduce" else 1
    return passes * result * (inside - 1) / inside, passes * result * (slices - 1) / (slices * inside)


def cross_slice_transfer(instruction: Instruction, layout: Layout, times: int) -> Collective | None:
    """The part of a collective that XLA:TPU hands to the host to run between slices; None for any other send."""
    if instruction.attribute(r'_xla_host_transfer_handler_name="(xla_megascale_runtime)"') is None:
        return None
    kind = (instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"') or "").lower().replace("_", "-")
    target = instruction.attribute(r'_xla_megascale_target="\{([^}]*)\}') or ""
    slices = len(re.findall(r"\d+", target)) or len(set(layout.slice_of))
    kind = kind if kind in KINDS else "collective-permute"
    shapes = instruction.elements[0]
    sent = math.fsum(shape.nbytes for shape in shapes)
    result = {"all-gather": sent * slices, "reduce-scatter": sent / slices}.get(kind, sent)
    return make_collective(kind, Span(layout.slice_axes, slices, slices), result, shapes, instruction, times)


def asynchronous_starts(module: Module) -> dict[str, set[tuple[str, str]]]:
    """For each channel of XLA:TPU's asynchronous collective fusions, those that start there, by computation and name: a
    channel may be shared by many.

    One such collective is printed in its start, in every fusion that it overlaps with, perhaps inside a loop, and in
    its end. Only the start says how often it runs.
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


def result_shapes(instruction: Instruction) -> tuple[Shape, ...]:
    """The arrays that a collective makes. An asynchronous one prints (operands, results, ...) as its type, but for an
    all-reduce: XLA:GPU of jax 0.12 prints ((operands), results), all else the results alone."""
    results_alone = instruction.opcode == "all-reduce-start" and not instruction.type_text.startswith("((")
    if instruction.opcode.endswith("-start") and not results_alone:
        elements = instruction.elements
        return elements[1 if len(elements) > 1 else 0]
    return instruction.shapes


def only_sliced(instruction: Instruction, computation: Computation) -> bool:
    """True if every use of a result takes a slice of it."""
    waiting, sliced = [instruction], False
    while waiting:
        current = waiting.pop()
        for user in computation.users[current.name]:
            if user.opcode in ("get-tuple-element", "bitcast"):
                waiting.append(user)
            elif user.opcode == "dynamic-slice" and user.operands[0] == current.name:
                sliced = True
            else:
                return False
    return sliced
