"""The share of the collectives' time in which products run: a trace of a few steps, read with its program.

jax's profiler says when each instruction ran on each device; the program's text says which of them are products, which
collectives, and which two are the start and the end of one.
"""

import collections
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxscale.ahead.hlo import KINDS, PALLAS
from jaxscale.ahead.hlo_costs import custom_target, matmul_flops
from jaxscale.ahead.hlo_text import Instruction, Module, parse_module
from jaxscale.ahead.hlo_trips import count_runs
from jaxscale.qualify.result import Figure

OP = re.compile(r"%?([\w.\-]+)")  # an event may bear the instruction's whole text
DEVICE = re.compile(r"/device:[^:]+:\d+")  # of a plane; a chip's SparseCores have planes of their own
MOST_NAMED = 3
Span = tuple[float, float]  # of a device's time [ns]


class Event(NamedTuple):
    """An instruction's run on a device."""

    device: str
    op: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Roles:
    """The roles of a program's instructions in its trace, by name."""

    products: frozenset[str]
    collectives: frozenset[str]
    starts: Mapping[str, str]  # the end of an asynchronous collective: its start


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Device time of the traced steps, all devices of this process together [s]."""

    busy: float  # something ran
    collective: float  # a collective ran, or was under way
    covered: float  # and products ran meanwhile
    exposed: tuple[tuple[str, float], ...]  # the collectives that nothing covered, the longest first
    untold: tuple[str, ...]  # what the trace does not tell


def roles_of(text: str) -> Roles:
    """The roles of a compiled program's instructions (`compiled.as_text()`)."""
    module = parse_module(text)
    does = functions_of(module)
    runs, fused, _ = count_runs(module)
    products, collectives, starts = set(), set(), {}
    for computation in [one for name, one in module.computations.items() if runs[name] and name not in fused]:
        for instruction in computation.instructions.values():
            found = own_role(instruction, computation, does)
            if found == "product":
                products.add(instruction.name)
            elif found == "collective":
                collectives.add(instruction.name)
                if instruction.opcode.endswith("-done") and instruction.operands:
                    starts[instruction.name] = instruction.operands[0]
    return Roles(frozenset(products), frozenset(collectives), starts)


def functions_of(module: Module) -> dict[str, str]:
    """{computation: 'product' or 'collective'} of those that hold one; the product counts, for it hides the other."""
    found: dict[str, str] = {}
    for computation in module.computations.values():  # what is called stands before who calls it
        inside = {own_role(instruction, computation, found) for instruction in computation.instructions.values()}
        for role in ("collective", "product"):
            if role in inside:
                found[computation.name] = role
    return found


def own_role(instruction: Instruction, computation: Any, does: Mapping[str, str]) -> str:
    """'product', 'collective' or ''. A loop or a branch is neither: its own instructions are in the trace."""
    opcode = instruction.opcode
    if opcode.removesuffix("-start").removesuffix("-done") in KINDS:
        return "collective"
    if (
        matmul_flops(instruction, computation)
        or opcode == "custom-call"
        and custom_target(instruction).startswith(PALLAS)
    ):
        return "product"
    if opcode in ("fusion", "call") or opcode.startswith("async"):
        return next((does[name] for name in instruction.called if name in does), "")
    return ""


def read_overlap(events: Iterable[Event], roles: Roles) -> Overlap:
    """The overlap of the events. Asynchronous collectives last from their start to the end of their -done."""
    by_device: dict[str, list[Event]] = collections.defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    totals: dict[str, float] = collections.defaultdict(float)  # nanoseconds
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
    untold = (
        [f"{len(unpaired)} asynchronous collectives whose start is in another part of the program"] if unpaired else []
    )
    seconds = {name: value / 1e9 for name, value in totals.items()}
    by_time = sorted(exposed.items(), key=lambda item: -item[1])[:MOST_NAMED]
    longest = tuple((op, nanoseconds / 1e9) for op, nanoseconds in by_time if nanoseconds > 0)
    zero = dict.fromkeys(("busy", "collective", "covered"), 0.0)
    return Overlap(**zero | seconds, exposed=longest, untold=tuple(untold))


def collective_spans(events: Sequence[Event], roles: Roles, unpaired: set[str]) -> list[tuple[str, Span]]:
    """(name, time) of each run of a collective; of an asynchronous one from its start to its end."""
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
    """The same time as spans that do not touch, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def common(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """The time that is in both; each as `union` returns it."""
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
    """The sum of their lengths."""
    return sum(end - begin for begin, end in spans)


def trace(run: Callable[[], Any]) -> list[Event]:
    """The instructions that each device of this process ran during run(), which waits for its result."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="jaxscale-trace-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        return [event for file in files for event in read_events(jax.profiler.ProfileData.from_file(str(file)))]


def read_events(data: Any) -> list[Event]:
    """The instructions in a profile. Devices have planes of their own; those of a CPU are numbered in its events."""
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
                    found.append(Event(device, str(op), event.start_ns, event.start_ns + event.duration_ns))
    return found


def overlap_figures(text: str, run: Callable[[], Any]) -> tuple[list[Figure], list[str]]:
    """(figures, notes) of a program's text and of run(), which runs it a few times and waits."""
    roles = roles_of(text)
    if not roles.collectives:
        return [], ["overlap: the step has no collectives to hide"]
    known = roles.products | roles.collectives
    events = trace(run)
    ours = [event for event in events if event.op in known]
    if not ours:
        return [], ["overlap: cannot be told, for the trace names no instruction of the step (CUDA graphs hide them)"]
    found = read_overlap(ours, roles)
    notes = [f"overlap: cannot be told of {line}" for line in found.untold]
    if missing := sorted(known - {event.op for event in events}):
        notes.append(
            f"overlap: {len(missing)} products and collectives of the step are not in the trace: {missing[0]}, ..."
        )
    if found.exposed:
        longest = ", ".join(f"{op} {seconds * 1e3:,.3g} ms" for op, seconds in found.exposed)
        notes.append(f"overlap: the longest that nothing covered, over the traced steps and all devices: {longest}")
    covered = found.covered / found.collective if found.collective else 0.0
    figures = [
        Figure(name="overlap: collectives, of the time of both", value=found.collective / found.busy, unit="share"),
        Figure(name="overlap: collective time in which products run", value=covered, unit="share"),
    ]
    return figures, notes
