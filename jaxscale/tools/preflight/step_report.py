"""Report of a compiled step, as text tables and as plain data."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxscale import units
from jaxscale.tools.planning.memory import MemoryRow
from jaxscale.tools.preflight.compiled import Shortage
from jaxscale.tools.preflight.hlo import Collective, HloFacts
from jaxscale.tools.preflight.hlo_schedule import ScheduleItem
from jaxscale.tools.preflight.roofline import CollectiveTime, Roofline
from jaxscale.units import INDENT, table

LINKS = {"tpu": ("ICI", "DCN"), "gpu": ("NVLink", "network")}  # links within and between slices or hosts
SMALL = 1e-3  # fraction of all bytes below which collectives share one table row
WRAPPERS = re.compile(r"\b(?:jit|shard_map|while|body|eval_jaxpr|closed_call|checkpoint|cond)(?:\([^()]*\))?/")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Total of all collectives of one kind over the same mesh axes, for one device and step."""

    kind: str
    axes: tuple[str, ...]
    times: int
    fast_bytes: float  # sent on ICI or NVLink
    slow_bytes: float  # sent on DCN or a network between hosts


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """A collective of the program. Seconds and bytes are for one run."""

    kind: str
    operation: str  # name in the JAX program
    computation: str  # computation whose schedule contains the collective
    times: float
    axes: str
    stages: str  # torus dimensions in order such as 'z4 y2', or at once such as 'xy64'
    sent_bytes: float
    is_blocking: bool
    link_s: float
    cover_s: float  # matmuls between its start and its end
    exposed_s: float  # part of link_s that matmuls do not overlap


@dataclasses.dataclass(frozen=True)
class PreflightReport:
    """Result of preflight."""

    config: str
    topology: str
    platform: str
    chip: str
    num_devices: int
    num_hosts: int
    num_slices: int
    layout: str  # the mesh as text
    settings: dict[str, Any]  # settings that affect memory and speed
    memory: tuple[MemoryRow, ...]  # device memory by kind
    host_bytes: int  # host memory per device
    peak_bytes: int | None  # arguments, results and temporaries; None if unknown
    code_bytes: int  # in addition to the peak; 0 if unknown
    chip_bytes: int
    usable_bytes: int
    usable_why: str
    shortage: Shortage | None
    compiled_flops: float | None  # per device and step
    model_flops: float
    traffic: tuple[Traffic, ...]
    collectives: tuple[CollectiveRow, ...]  # in the order of the program
    roofline: Roofline | None
    notes: tuple[str, ...]  # assumptions and omissions
    lower_seconds: float
    compile_seconds: float
    versions: dict[str, str]
    date: str
    kept: bool
    pipeline: str = ""  # pipeline schedule as text

    @property
    def fits(self) -> bool:
        """True if the step was compiled, and its peak memory plus code fits in the usable memory."""
        return self.shortage is None and self.left_bytes is not None and self.left_bytes >= 0

    @property
    def left_bytes(self) -> int | None:
        """Free bytes per device. Negative if the step does not fit, and None if the peak is unknown."""
        return None if self.peak_bytes is None else self.usable_bytes - self.peak_bytes - self.code_bytes

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        found: dict[str, Any] = dataclasses.asdict(self) | {"fits": self.fits}
        if self.roofline is not None:
            del found["roofline"]["played"]  # already in `collectives`
        return found


def sum_traffic(collectives: Sequence[Collective]) -> tuple[Traffic, ...]:
    """Returns one entry per kind and axes, with the most bytes first."""
    rows: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for one in collectives:
        row = rows.setdefault((one.kind, one.axes), [0, 0.0, 0.0])
        row[0] += one.times
        row[1] += one.times * (one.wire_bytes - one.dcn_bytes)
        row[2] += one.times * one.dcn_bytes
    found = [Traffic(kind, axes, int(times), fast, slow) for (kind, axes), (times, fast, slow) in rows.items()]
    return tuple(sorted(found, key=lambda row: -(row.fast_bytes + row.slow_bytes)))


def report_lines(report: PreflightReport) -> list[str]:
    """Returns the report as lines of text."""
    machine = f"{report.num_devices} x {report.chip} on {units.plural(report.num_hosts, 'host')}"
    slices = f", {report.num_slices} slices" if report.num_slices > 1 else ""
    lines = [f"{report.config} on {report.topology}: {machine}{slices}; mesh {report.layout}"]
    lines.append(INDENT + " ".join(f"{name}={value}" for name, value in report.settings.items()))
    lines += [f"{INDENT}pipeline: {report.pipeline}"] if report.pipeline else []
    lines += ["", *memory_lines(report)]
    if report.compiled_flops is not None:
        lines += ["", *flops_lines(report), "", *traffic_lines(report)]
    if report.roofline is not None:
        lines += ["", *roofline_lines(report)]
    lines += [f"note: {note}" for note in report.notes]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    took = f"compiled in {report.compile_seconds:.1f} s (plus {report.lower_seconds:.1f} s of tracing): {versions}"
    return [*lines, "", f"cached result of {report.date}, " * report.kept + took, verdict_line(report)]


def memory_lines(report: PreflightReport) -> list[str]:
    """Returns lines with the memory of one device by kind, and with the usable memory."""
    rows = [(row.kind, units.size(row.num_bytes), row.source) for row in report.memory]
    if report.peak_bytes is not None:
        share = report.peak_bytes / report.usable_bytes
        rows.append(("peak", units.size(report.peak_bytes), f"{share:.0%} of {units.size(report.usable_bytes)}"))
    if report.code_bytes:
        rows.append(("code", units.size(report.code_bytes), "compiled, in addition to the peak"))
    lines = ["memory per device", *table(rows, right=(1,))]
    lines.append(f"{INDENT}{report.chip} has {units.size(report.chip_bytes)}: {report.usable_why}")
    if report.host_bytes:
        lines.append(f"{INDENT}plus {units.size(report.host_bytes)} per device in host memory")
    if report.shortage is not None:
        lines.append(f"{INDENT}compiler: {report.shortage.said}")
        if report.shortage.largest:
            lines.append(f"{INDENT}largest arrays")
            largest = [(units.size(size), shape) for size, shape in report.shortage.largest[:5]]
            lines += [INDENT + line for line in table(largest, right=(0,))]
    return lines


def flops_lines(report: PreflightReport) -> list[str]:
    """Returns lines that compare the FLOPs of the compiled program with the model formula."""
    assert report.compiled_flops is not None, "the report has facts"
    excess = report.compiled_flops / report.model_flops - 1
    rows = [
        ("compiled", f"{report.compiled_flops / 1e12:,.4g} TFLOP", "matmuls x loop trip counts"),
        ("model's formula", f"{report.model_flops / 1e12:,.4g} TFLOP", f"difference: {excess:+.1%}"),
    ]
    return ["FLOPs per device and step", *table(rows, right=(1,))]


def traffic_lines(report: PreflightReport) -> list[str]:
    """Returns lines with the bytes sent by kind and axes."""
    if not report.traffic:
        return ["no communication"]
    fast, slow = LINKS.get(report.platform, ("fast", "slow"))
    rows: list[tuple[str, ...]] = [("kind", "mesh axes", "times", f"{fast} MB", f"{slow} MB")]
    for row in report.traffic:
        sizes = (f"{row.fast_bytes / 1e6:,.1f}", f"{row.slow_bytes / 1e6:,.1f}")
        rows.append((row.kind, ",".join(row.axes) or "none", f"{row.times:,}", *sizes))
    sums = [sum(getattr(row, name) for row in report.traffic) / 1e6 for name in ("fast_bytes", "slow_bytes")]
    rows.append(("all", "", f"{sum(row.times for row in report.traffic):,}", *(f"{number:,.1f}" for number in sums)))
    return ["sent per device and step", *table(rows, right=(2, 3, 4))]


def roofline_lines(report: PreflightReport) -> list[str]:
    """Returns lines with the lower bound of a step's time by part."""
    roofline = report.roofline
    assert roofline is not None, "the report has a roofline"
    times = [("matmuls", roofline.compute_s, ""), ("device memory", roofline.hbm_s, "")]
    for name, seconds in roofline.links_s.items():
        exposed = roofline.exposed_s.get(name, 0.0)
        times.append((f"link {name}", seconds, f"{milliseconds(exposed)} of it exposed" if exposed else ""))
    if roofline.bubble:
        times.append(("bubble", roofline.bubble_s, f"{roofline.bubble} of the stages' time"))
    times += [
        ("lower bound, in program order", roofline.at_least_s, "matmuls and exposed communication"),
        ("full overlap (maximum)", roofline.overlapped_s, "if the program order allowed it"),
        ("no overlap (the sum)", roofline.serial_s, ""),
    ]
    rows = [(name, milliseconds(seconds), note) for name, seconds, note in times]
    lines = ["roofline: lower bound of the step time at the chip's peak rates, not measured", *table(rows, right=(1,))]
    if report.collectives:
        between, covered, hidden = overlap(report.collectives)
        lines.append(
            f"{INDENT}{between:.1%} of the bytes are sent asynchronously, {covered:.1%} during matmuls that take at "
            f"least as long; {hidden:.1%} of the link time overlaps with matmuls"
        )
    lines.append(f"{INDENT}MFU is at most {roofline.mfu_ceiling:.1%}")
    return lines


def verdict_line(report: PreflightReport) -> str:
    """Returns text such as 'go: ...' or 'no-go: ...' with the reason."""
    if report.fits and report.left_bytes is not None:
        return f"go: {units.size(report.left_bytes)} free per device"
    if report.shortage is not None and report.shortage.space != "hbm":
        return f"no-go: the on-chip memory {report.shortage.space} is too small"
    if report.left_bytes is None:
        return "no-go: the compiler reported too little memory"
    return f"no-go: {units.size(-report.left_bytes)} missing per device"


def summary_rows(reports: Sequence[tuple[str, PreflightReport]]) -> list[str]:
    """Returns a table with one row per candidate of a search."""
    rows: list[tuple[str, ...]] = [("settings", "peak", "at least", "sum", "MFU at most", "compiled in", "")]
    for label, report in reports:
        line = report.roofline
        times = (milliseconds(line.at_least_s), milliseconds(line.serial_s)) if line else ("", "")
        mfu = f"{line.mfu_ceiling:.1%}" if line else ""
        peak = units.size(report.peak_bytes) if report.peak_bytes is not None else "too large"
        took = "cached" if report.kept else f"{report.compile_seconds:.0f} s"
        rows.append((label, peak, *times, mfu, took, "fits" if report.fits else "does not fit"))
    return table(rows, right=(1, 2, 3, 4, 5))


def milliseconds(seconds: float) -> str:
    """Returns text such as '12.3 ms'."""
    return f"{seconds * 1e3:,.4g} ms"


def collective_rows(facts: HloFacts, times: Sequence[CollectiveTime]) -> tuple[CollectiveRow, ...]:
    """Returns one row per collective in program order, or () if the program has no schedule."""
    rows = []
    for number in dict.fromkeys(start_order(facts.schedule)):
        one, found = facts.collectives[number], times[number]
        runs = found.runs or 1.0
        rows.append(
            CollectiveRow(
                kind=one.kind,
                operation=WRAPPERS.sub("", one.operation).rpartition("/")[0] or one.name,  # 'jvp()/gather_weights'
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


def start_order(items: Sequence[ScheduleItem]) -> Iterator[int]:
    """Yields the indices of collectives in the order of their starts."""
    for item in items:
        if item.what in ("start", "blocking"):
            yield item.collective
        yield from start_order(item.items)


def overlap(rows: Sequence[CollectiveRow]) -> tuple[float, float, float]:
    """Returns fractions: bytes sent asynchronously, bytes that matmuls overlap, link time that matmuls overlap."""
    sent, busy = (sum(getattr(row, name) * row.times for row in rows) or 1.0 for name in ("sent_bytes", "link_s"))
    between = sum(row.sent_bytes * row.times for row in rows if not row.is_blocking) / sent
    covered = sum(row.sent_bytes * row.times for row in rows if row.exposed_s <= 0.05 * row.link_s) / sent
    return between, covered, max(0.0, 1 - sum(row.exposed_s * row.times for row in rows) / busy)


def collective_lines(rows: Sequence[CollectiveRow]) -> list[str]:
    """Returns the table of collectives. `times` includes the trips of enclosing loops."""
    sent = sum(row.sent_bytes * row.times for row in rows)
    large = [row for row in rows if row.sent_bytes * row.times >= SMALL * sent]
    found: list[tuple[str, ...]] = [
        ("", "kind", "operation", "times", "axes", "links", "MB sent", "link ms", "cover ms", "exposed ms")
    ]
    for row in large:
        milliseconds = tuple(f"{seconds * 1e3:.3f}" for seconds in (row.link_s, row.cover_s, row.exposed_s))
        state, size = "blocking" if row.is_blocking else "async", f"{row.sent_bytes / 1e6:.1f}"
        found.append((state, row.kind, row.operation, f"{row.times:g}", row.axes, row.stages, size, *milliseconds))
    lines = ["collectives in program order, each row for one run", *table(found, right=(3, 6, 7, 8, 9))]
    if small := [row for row in rows if row.sent_bytes * row.times < SMALL * sent]:
        exposed = sum(row.exposed_s * row.times for row in small)
        lines.append(f"  and {len(small)} with less than {SMALL:.1%} of the bytes each, {exposed * 1e3:.3f} ms exposed")
    return lines
