"""Measurement of the fraction of collective time that overlaps with matmuls, from a trace of a few steps.

The trace of JAX's profiler has the time of each instruction on each device. The HLO text of the program identifies
matmuls ("products") and collectives, and pairs the start and end of each asynchronous collective.
"""

import collections
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxscale.tools.preflight.hlo import KINDS
from jaxscale.tools.preflight.hlo_costs import kernel_flops, matmul_flops
from jaxscale.tools.preflight.hlo_text import Instruction, parse_module
from jaxscale.tools.preflight.hlo_trips import count_runs
from jaxscale.tools.qualify.result import Reading

OP = re.compile(r"%?([\w.\-]+)")  # an event's name may be the full text of the instruction
DEVICE = re.compile(r"/device:[^:]+:\d+")  # name of a device's plane; a chip's SparseCores have separate planes
MOST_NAMED = 3
Span = tuple[float, float]  # (begin, end) on one device [ns]


class TraceEvent(NamedTuple):
    """One execution of an instruction on a device."""

    device: str
    op: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Roles:
    """Names of a program's matmuls and collectives in its trace."""

    products: frozenset[str]
    collectives: frozenset[str]
    starts: Mapping[str, str]  # {end of an asynchronous collective: its start}


@dataclasses.dataclass(frozen=True)
class TraceOverlap:
    """Device time in seconds during the traced steps, summed over all devices of this process."""

    busy: float  # time in which any event ran
    collective: float  # time in which a collective ran or was in flight
    covered: float  # part of `collective` in which matmuls ran
    exposed: tuple[tuple[str, float], ...]  # (collective, time without matmuls), the longest first
    untold: tuple[str, ...]  # data that the trace lacks


def roles_of(text: str) -> Roles:
    """Returns the matmuls and collectives in the text of a compiled program, `compiled.as_text()`."""
    module = parse_module(text)
    runs, fused, _ = count_runs(module)
    does: dict[str, str] = {}  # {computation: 'product' or 'collective'}; 'product' if it contains both
    found: dict[str, set[str]] = {"product": set(), "collective": set()}
    starts = {}
    for name, computation in module.computations.items():  # callees precede their callers
        roles = [(one, instruction_role(one, computation, does)) for one in computation.instructions.values()]
        if inside := {role for _, role in roles if role}:
            does[name] = "product" if "product" in inside else "collective"
        for instruction, role in roles if runs[name] and name not in fused else ():
            if role:
                found[role].add(instruction.name)
            if role == "collective" and instruction.opcode.endswith("-done") and instruction.operands:
                starts[instruction.name] = instruction.operands[0]
    return Roles(frozenset(found["product"]), frozenset(found["collective"]), starts)


def instruction_role(instruction: Instruction, computation: Any, does: Mapping[str, str]) -> str:
    """Returns 'product', 'collective' or ''. Loops and branches have no role, but the instructions inside do."""
    opcode = instruction.opcode
    if opcode.removesuffix("-start").removesuffix("-done") in KINDS:
        return "collective"
    if matmul_flops(instruction, computation) or kernel_flops(instruction, computation) is not None:
        return "product"
    if opcode in ("fusion", "call") or opcode.startswith("async"):
        return next((does[name] for name in instruction.called if name in does), "")
    return ""


def read_overlap(events: Iterable[TraceEvent], roles: Roles) -> TraceOverlap:
    """Returns the overlap of matmuls and collectives. An asynchronous collective runs from its -start to its -done."""
    by_device: dict[str, list[TraceEvent]] = collections.defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    totals = dict.fromkeys(("busy", "collective", "covered"), 0.0)  # nanoseconds
    exposed: dict[str, float] = collections.defaultdict(float)
    unpaired: set[str] = set()
    for found in by_device.values():
        products = union((event.begin, event.end) for event in found if event.op in roles.products)
        spans = collective_spans(found, roles, unpaired)
        whole = union(span for _, span in spans)
        totals["busy"] += length(union((event.begin, event.end) for event in found))
        totals["collective"] += length(whole)
        totals["covered"] += length(common(whole, products))
        for op, span in spans:
            exposed[op] += (span[1] - span[0]) - length(common([span], products))
    text = f"{len(unpaired)} asynchronous collectives that start in a different computation"
    by_time = sorted(exposed.items(), key=lambda item: -item[1])[:MOST_NAMED]
    longest = tuple((op, nanoseconds / 1e9) for op, nanoseconds in by_time if nanoseconds > 0)
    seconds = {name: value / 1e9 for name, value in totals.items()}
    return TraceOverlap(**seconds, exposed=longest, untold=(text,) if unpaired else ())


def collective_spans(events: Sequence[TraceEvent], roles: Roles, unpaired: set[str]) -> list[tuple[str, Span]]:
    """Returns (name, span) for each run of a collective. Adds each -done without a -start to `unpaired`."""
    runs: dict[str, list[Span]] = collections.defaultdict(list)
    for event in sorted(events, key=lambda event: event.begin):
        if event.op in roles.collectives:
            runs[event.op].append((event.begin, event.end))
    found = []
    for done, start in roles.starts.items():
        if done in runs and start in runs and len(runs[done]) == len(runs[start]):
            found += [(start, (begin, end)) for (begin, _), (_, end) in zip(runs.pop(start), runs.pop(done))]
        elif done in runs:
            unpaired.add(done)
    return found + [(op, span) for op, spans in runs.items() for span in spans]


def union(spans: Iterable[Span]) -> list[Span]:
    """Returns the merged spans, sorted, without spans that overlap or touch."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def common(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Returns the intersection of two lists of spans. The lists must be results of `union`."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(spans: Iterable[Span]) -> float:
    """Returns the total length of the spans."""
    return sum(end - begin for begin, end in spans)


def trace(run: Callable[[], Any]) -> list[TraceEvent]:
    """Profiles run(), which must wait for its result. Returns the instructions that this process's devices ran."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="jaxscale-trace-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        return [event for file in files for event in read_events(jax.profiler.ProfileData.from_file(str(file)))]


def read_events(data: Any) -> list[TraceEvent]:
    """Returns the instructions in a profile. Each accelerator has its own plane, and all CPU devices share one."""
    found = []
    for plane in data.planes:
        place = DEVICE.match(plane.name)
        for line in plane.lines if place or plane.name == "/host:CPU" else ():
            for event in line.events:
                facts = dict(event.stats)
                written = OP.match(event.name) if place else None
                op = facts.get("hlo_op") or (written and written[1])
                if op:
                    device = place[0] if place else f"cpu {facts.get('device_ordinal', 0)}"
                    found.append(TraceEvent(device, str(op), event.start_ns, event.start_ns + event.duration_ns))
    return found


def overlap_figures(text: str, run: Callable[[], Any]) -> tuple[list[Reading], list[str]]:
    """Returns (readings, notes) on the overlap in a program. run: runs the program a few times and waits."""
    roles = roles_of(text)
    if not roles.collectives:
        return [], ["overlap: the step has no collectives to hide"]
    known = roles.products | roles.collectives
    events = trace(run)
    ours = [event for event in events if event.op in known]
    if not ours:
        return [], ["overlap: not measured, the trace has no instructions of the step (CUDA graphs hide them)"]
    found = read_overlap(ours, roles)
    notes = [f"overlap: excludes {line}" for line in found.untold]
    if missing := sorted(known - {event.op for event in events}):
        notes.append(
            f"overlap: {len(missing)} matmuls and collectives of the step are not in the trace: {missing[0]}, ..."
        )
    if found.exposed:
        longest = ", ".join(f"{op} {seconds * 1e3:,.3g} ms" for op, seconds in found.exposed)
        notes.append(f"overlap: longest exposed collectives, over traced steps and all devices: {longest}")
    covered = found.covered / found.collective if found.collective else 0.0
    figures = [
        Reading(name="overlap: collective share of busy time", value=found.collective / found.busy, unit="share"),
        Reading(name="overlap: collective time that overlaps matmuls", value=covered, unit="share"),
    ]
    return figures, notes
