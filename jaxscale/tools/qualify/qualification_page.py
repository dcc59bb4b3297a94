"""HTML page and text output of a qualification."""

from collections.abc import Iterator

from jaxscale.tools.qualify.result import NO_DATASHEET, Floors, Probe, Qualification, Reading, amount, limits
from jaxscale.tools.reporting.page import whole_page
from jaxscale.tools.reporting.page_tables import Cell, n, table
from jaxscale.tools.reporting.page_text import escape
from jaxscale.tools.reporting.sections import Section
from jaxscale.units import duration, plural
from jaxscale.units import table as text_table

TITLES = {
    "products": "Matmuls and memory",
    "devices": "Devices compared",
    "links": "Links",
    "kernels": "Kernels compared with float32",
    "step": "A training step",
    "storage": "Checkpoint save and restore",
}
SHOWN = {"passed": "finished", "below": "failed", "failed": "failed", "left out": "stopped", "measured": "running"}
HEAD = ("", "measured", "from", "to", "compared with", "share", "", "limit", "")
DRAWN = 120  # width in pixels of a bar of 100%


def make_page(result: Qualification) -> str:
    """Returns the HTML page: the verdict, one table per probe, the floors and the versions."""
    word, kind = verdict(result)
    facts = [
        ("devices", result.devices, result.chip or "no datasheet"),
        ("hosts", str(len(result.hosts)), ", ".join(result.hosts[:4])),
        ("processes", str(result.num_processes), ""),
        *headlines(result),
        ("duration", duration(result.seconds), result.date[:16].replace("T", " ") + " UTC"),
    ]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in facts
    )
    lines = "".join(f"<li>{escape(line)}</li>" for line in result.failures)
    failure_list = f'<ul class="told">{lines}</ul>' if lines else ""
    head = (
        f'<div class="top"><h1>{escape(result.devices)}</h1><span class="state {kind}">{escape(word)}</span></div>'
        f'<p class="sub">{escape(result.datasheet or NO_DATASHEET)}</p><dl class="facts">{items}</dl>{failure_list}'
    )
    sections = [Section(probe.name, TITLES[probe.name], probe_html(probe)) for probe in result.probes]
    versions = [(name, version) for name, version in result.versions.items() if version]
    floors = table(("flag", "floor", ""), floor_rows(result.floors)) + table(("package", "version"), versions)
    sections.append(Section("floors", "Floors and versions", floors))
    end = f"Created {result.date} by jaxscale qualify. Values: medians; from and to are the slowest and fastest call."
    return whole_page(f"{result.devices}: {word}", head, sections, end, {"plots": []})


def verdict(result: Qualification) -> tuple[str, str]:
    """Returns (verdict as text, CSS class)."""
    if result.unfinished:
        return f"in progress, pending: {', '.join(result.unfinished)}", "running"
    if not result.passed:
        return f"NOT QUALIFIED: {plural(len(result.failures), 'finding')}", "failed"
    missing = [probe.name for probe in result.probes if probe.left_out]
    return ("QUALIFIED" + (f", except {', '.join(missing)} (skipped)" if missing else "")), "finished"


def headlines(result: Qualification) -> Iterator[tuple[str, str, str]]:
    """Yields (name, value, comparison with the datasheet) for the main values at the top of the page."""
    for probe in result.probes:
        for figure in probe.figures:
            if figure.name in ("step throughput", "MFU", "overlap: collective time that overlaps matmuls") or (
                probe.name == "products" and figure is probe.figures[0]
            ):
                more = f"{figure.share:.1%} of the datasheet" if figure.share is not None else ""
                yield figure.name.removeprefix("overlap: "), amount(figure.value, figure.unit), more


def probe_html(probe: Probe) -> str:
    """Returns the state, readings and notes of a probe as HTML. Omits empty columns."""
    state = f'<p><span class="state {SHOWN[probe.state]}">{escape(probe.state)}</span></p>'
    rows = [figure_row(figure) for figure in probe.figures]
    filled = [any(row[place].html for row in rows) for place in range(len(HEAD))]
    keep = lambda cells: [cell for cell, wanted in zip(cells, filled) if wanted]
    kinds = ["trouble" if figure.passed is False else "" for figure in probe.figures]
    notes = "".join(f'<p class="left">{escape(line)}</p>' for line in lines_below(probe))
    return state + table(keep(HEAD), map(keep, rows), kinds) + notes


def lines_below(probe: Probe) -> list[str]:
    """Returns the lines below a probe's readings: failures in this process, failures in others, and notes."""
    return [*filter(None, (probe.problem, *probe.elsewhere)), *probe.notes]


def figure_row(figure: Reading) -> list[Cell]:
    """Returns the table cells of a reading in the order of HEAD."""
    number = lambda value: n("" if value is None else amount(value, figure.unit))
    quiet = lambda text: Cell(escape(text), "t")
    share = figure.share
    bar = ""
    if share is not None:
        filled = f'<i style="width:{100 * min(share, 1):.1f}%"></i>'
        bar = f'<div class="bar" style="width:{DRAWN}px;margin:8px 0 0">{filled}</div>'
    mark = {True: "passed", False: "not passed", None: ""}[figure.passed]
    values = (figure.value, figure.low, figure.high, figure.against)
    part = n("" if share is None else f"{share:.1%}")
    return [Cell(escape(figure.name), "w"), *map(number, values), part, Cell(bar), quiet(limits(figure)), quiet(mark)]


def floor_rows(floors: Floors) -> list[tuple[str, str, str]]:
    """Returns (flag, floor, description) for each floor."""
    mfu = "none" if floors.mfu is None else f"{floors.mfu:.0%}"
    links_help = "of the datasheet's link bandwidth, largest size, along one dimension"
    return [
        ("--products_floor", f"{floors.products:.0%}", "of the datasheet's FLOP/s, for each dtype"),
        ("--bandwidth_floor", f"{floors.bandwidth:.0%}", "of the datasheet's memory bandwidth"),
        ("--links_floor", f"{floors.links:.0%}", links_help),
        ("--mfu_floor", mfu, "of the datasheet's FLOP/s, in the training step"),
        ("--memory_within", f"{floors.memory_within:.0%}", "difference of the step's peak memory from the compiler's"),
        ("--slow", f"{floors.slow:g}", "times the median device"),
    ]


def summary_lines(result: Qualification) -> list[str]:
    """Returns lines of text with the readings and notes of each probe, the floors and the verdict."""
    where = f"{plural(result.num_processes, 'process')} on {plural(len(result.hosts), 'host')}"
    lines = [f"{result.devices}, {where}; {result.datasheet or NO_DATASHEET}"]
    for probe in result.probes:
        lines += ["", f"{probe.name}: {probe.state}, {duration(probe.seconds)}"]
        rows = [
            (
                figure.name, amount(figure.value, figure.unit),
                f"{figure.share:.1%} of {amount(figure.against, figure.unit)}" if figure.against else "",
                limits(figure), "NOT PASSED" if figure.passed is False else "",
            )
            for figure in probe.figures
        ]  # fmt: skip
        lines += text_table(rows, right=(1,)) if rows else []
        lines += [f"  {line}" for line in lines_below(probe)]
    floors = ", ".join(f"{flag}={floor}" for flag, floor, _ in floor_rows(result.floors))
    return [*lines, "", f"floors: {floors}", verdict(result)[0]]
