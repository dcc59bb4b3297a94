"""Table of a compiled step's collectives: bytes per link, and how much of them matmuls overlap."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxscale.tools.preflight.hlo import HloFacts
from jaxscale.tools.preflight.hlo_schedule import Item
from jaxscale.tools.preflight.timeline import CollectiveTime
from jaxscale.units import table

SMALL = 1e-3  # of all bytes: smaller collectives share one row
WRAPPERS = re.compile(r"\b(?:jit|shard_map|while|body|eval_jaxpr|closed_call|checkpoint|cond)(?:\([^()]*\))?/")


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """One collective of the program. Seconds and bytes are of one run."""

    kind: str
    operation: str  # of JAX's program
    computation: str  # whose schedule contains it
    times: float
    axes: str
    stages: str  # 'z4 y2': torus dimensions in order, 'xy64': both at once
    sent_bytes: float
    is_blocking: bool
    link_s: float
    cover_s: float  # matmuls between its start and its end
    exposed_s: float  # not overlapped by matmuls


def collective_rows(facts: HloFacts, times: Sequence[CollectiveTime]) -> tuple[CollectiveRow, ...]:
    """Returns the rows in program order; () without a schedule."""
    rows = []
    for number in dict.fromkeys(start_order(facts.schedule)):
        one, found = facts.collectives[number], times[number]
        runs = found.runs or 1.0
        rows.append(
            CollectiveRow(
                kind=one.kind,
                operation=short_operation(one.operation) or one.name,
                computation=one.computation,
                times=found.runs,
                axes="+".join(one.axes),
                stages=" ".join(f"{stage.along}{stage.size}" for stage in one.stages),
                sent_bytes=one.wire_bytes,
                is_blocking=found.is_blocking,
                link_s=found.link_s / runs,
                cover_s=found.cover_s / runs,
                exposed_s=found.exposed_s / runs,
            )
        )
    return tuple(rows)


def start_order(items: Sequence[Item]) -> Iterator[int]:
    """Yields numbers of collectives as they start."""
    for item in items:
        if item.what in ("start", "blocking"):
            yield item.collective
        yield from start_order(item.items)


def short_operation(name: str) -> str:
    """Returns 'jvp()/gather_weights' for 'jit(train_step)/shard_map/jvp()/while/body/gather_weights/all_gather'."""
    name, _, _ = WRAPPERS.sub("", name).rpartition("/")
    return name


class Overlap(NamedTuple):
    """Fractions of a step's communication."""

    between: float  # of the bytes, sent asynchronously
    covered: float  # of the bytes, overlapped by matmuls that take as long
    hidden: float  # of the time on links, overlapped by matmuls


def overlap(rows: Sequence[CollectiveRow]) -> Overlap:
    """Returns the fractions of these collectives."""
    sent = sum(row.sent_bytes * row.times for row in rows) or 1.0
    between = sum(row.sent_bytes * row.times for row in rows if not row.is_blocking) / sent
    covered = sum(row.sent_bytes * row.times for row in rows if row.exposed_s <= 0.05 * row.link_s) / sent
    busy = sum(row.link_s * row.times for row in rows) or 1.0
    return Overlap(between, covered, max(0.0, 1 - sum(row.exposed_s * row.times for row in rows) / busy))


def overlap_line(rows: Sequence[CollectiveRow]) -> str:
    """Returns '98.1% of the bytes are sent asynchronously, ... 51.2% of the time on links is hidden'."""
    between, covered, hidden = overlap(rows)
    return (
        f"{between:.1%} of the bytes are sent asynchronously, {covered:.1%} during matmuls that take as long; "
        f"{hidden:.1%} of the time on links is hidden"
    )


def collective_lines(rows: Sequence[CollectiveRow]) -> list[str]:
    """Returns the table. Loop bodies have their number of runs."""
    sent = sum(row.sent_bytes * row.times for row in rows)
    large = [row for row in rows if row.sent_bytes * row.times >= SMALL * sent]
    found: list[tuple[str, ...]] = [
        ("", "kind", "operation", "times", "axes", "links", "MB sent", "link ms", "cover ms", "exposed ms")
    ]
    for row in large:
        milliseconds = tuple(f"{seconds * 1e3:.3f}" for seconds in (row.link_s, row.cover_s, row.exposed_s))
        state, size = "blocking" if row.is_blocking else "async", f"{row.sent_bytes / 1e6:.1f}"
        found.append((state, row.kind, row.operation, f"{row.times:g}", row.axes, row.stages, size, *milliseconds))
    lines = ["collectives in program order, each of one run", *table(found, right=(3, 6, 7, 8, 9))]
    if small := [row for row in rows if row.sent_bytes * row.times < SMALL * sent]:
        exposed = sum(row.exposed_s * row.times for row in small)
        lines.append(f"  and {len(small)} of less than {SMALL:.1%} of the bytes each, {exposed * 1e3:.3f} ms exposed")
    return lines
