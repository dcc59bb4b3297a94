"""Figures as HTML and SVG: lines, bands and marks over the steps of a run. A script is only needed for zoom.

The SVG drawing is stretched to the available width. Strokes and text have a constant size, since strokes do not scale
and labels are HTML elements next to the drawing.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.tools.reporting.axes import LEAST, Axis, axis_over, size_ticks, thin_columns
from jaxscale.tools.reporting.page_text import NUMBERS, escape, plain, tick_texts

WIDTH, HEIGHT = 1000, 400  # size of the drawing in SVG coordinates
COLUMNS = 700  # columns to which lines are thinned, about the pixels of a plot
END = 0.97  # fraction of the axis after which a centred label would leave a narrow page
STEEP_PART = 0.05  # first fraction of the steps, in which a loss falls by more than in all later steps
STEPS = "steps"
COLORS, DASHES = 8, 4  # CSS classes c0 to c7, and k1 to k3
STYLES = ("band", "faint", "dots", "gone", "limit", "dash", "line")  # the legend shows the last style of a name
POINTS_UP_TO = 40  # lines with fewer points are also drawn as dots
SCRIPT_COLUMNS = 1400  # columns to which the data for zooming are thinned
LEVELS = 12  # colors of heat maps, CSS classes h0 to h11
EMPTY = "empty"  # CSS class for 0
MOST_COLUMNS = 240  # columns of a heat map over steps
MAX_CATEGORY_COLUMNS = 512  # columns of other heat maps, about two pixels each on a wide page


class PlotLine(NamedTuple):
    """A series. style: line, faint, dash, dots, gone (grey, abandoned steps) or limit (thin). color: a CSS class."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    color: str = "c0"
    style: str = "line"


class PlotBand(NamedTuple):
    """A range of values over steps."""

    label: str
    steps: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    color: str = "c4"


class Mark(NamedTuple):
    """An event at a step. kind: trouble or change."""

    step: float
    text: str
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """Data of a plot. numbers: a key of page_text.NUMBERS."""

    title: str
    lines: Sequence[PlotLine]
    unit: str = ""
    numbers: str = "plain"
    log: bool = False
    zero: bool = False
    bands: Sequence[PlotBand] = ()
    marks: Sequence[Mark] = ()
    note: str = ""
    full_width: bool = False
    explained: bool = False  # True if the legend also explains grey lines and marks
    focused: bool = False  # True if the value axis ignores the steep start
    until: float | None = None  # last step of the axis, if later than on the rest of the page
    named: bool = False  # True if the legend also names a single line, as for one of several runs

    @property
    def drawn(self) -> list[PlotLine]:
        """The lines that have points. A line with a single point is drawn as a dot, so that it is visible."""
        lone = lambda line: len(line.steps) == 1 and line.style in ("line", "dash", "faint")
        return [line._replace(style="dots") if lone(line) else line for line in self.lines if line.steps]


class HeatMap(NamedTuple):
    """Data of a heat map. rows: {name: values at the steps}, from bottom to top."""

    title: str
    unit: str
    steps: Sequence[int]
    rows: Mapping[str, Sequence[float | None]]
    scale: tuple[float, float] | None = None  # smallest range of the color scale
    across: str = ""  # name of the columns if they are not steps; then steps are 0, 1, 2, ...
    empty: str = ""  # label for 0, if 0 has a separate color
    note: str = ""


def color_of(place: int) -> str:
    """Returns the CSS class for the color of a line. From the ninth line on, lines are dashed."""
    turn = place // COLORS % DASHES
    return f"c{place % COLORS}" + (f" k{turn}" if turn else "")


def with_points(lines: Sequence[PlotLine]) -> list[PlotLine]:
    """Returns the lines, and additional dots for lines with few points."""
    few = [line for line in lines if line.style != "gone" and len(line.steps) < POINTS_UP_TO]
    return [*lines, *(line._replace(style="dots") for line in few)]


def draw(plot: Plot, across: Axis, number: int, below: str = STEPS) -> tuple[str, dict[str, Any]]:
    """Returns (figure as HTML, data for the script). number: index of the figure on the page.
    below: name of the horizontal axis if it is not steps; such a plot cannot be zoomed."""
    across = across._replace(high=max(across.high, plot.until or 0.0))
    seen = [value for line in plot.drawn if line.style != "gone" for value in values_for_axis(plot, line, across)]
    late = lambda values: values[len(values) // 20 :]
    seen += [value for band in plot.bands for value in (*late(band.low), *late(band.high))]
    up = axis_over(seen, log=plot.log, zero=plot.zero)
    lines = [f'<path class="band {band.color}" d="{band_path(band, across, up)}"/>' for band in plot.bands]
    lines += [f'<path class="{line.style} {line.color}" d="{line_path(line, across, up)}"/>' for line in plot.drawn]
    marks = "".join(
        f'<path class="mark {mark.kind}" d="M{x_of(mark.step, across)} 0V{HEIGHT}">'
        f"<title>{escape(mark.text)}</title></path>"
        for mark in plot.marks
    )
    notes = [plot.note] if plot.note else []
    ticks = size_ticks(up.low, up.high) if plot.numbers == "size" and not up.log else up.ticks()
    once = {(line.label, line.color): line for line in reversed(plot.drawn) if line.style != "gone"}
    beyond = [value for line in once.values() for value in line.values if value > up.high]
    if beyond:
        amount = f"{len(beyond):,} points are" if len(beyond) > 1 else "One point is"
        notes.append(f"{amount} above the axis; the largest is {NUMBERS[plot.numbers](max(beyond))}.")
    if plot.log and (hidden := sum(value <= 0 for value in seen)):
        notes.append(f"{hidden} points are 0 or less and cannot be shown on a logarithmic axis.")
    grid = "".join(f"M0 {y_of(at, up)}H{WIDTH}" for at in ticks)
    drawn = f'<path class="grid" d="{grid}"/>{marks}{"".join(lines)}'
    left = "".join(left_label(1 - up.place(at), text) for at, text in zip(ticks, tick_texts(ticks, plot.numbers)))
    kind = "plot wide" if plot.full_width else "plot"
    unit = ", ".join(filter(None, (plot.unit, "logarithmic" if plot.log else "")))
    parts = FigureParts(kind, plot.title, unit, legend(plot), summary(plot, below), drawn, left, " ".join(notes), below)
    return parts.html(across, number), script_data(plot, across, up)


class FigureParts(NamedTuple):
    """HTML and SVG parts of a figure, line plot or heat map."""

    kind: str  # CSS classes
    title: str
    unit: str
    legend: str  # HTML
    words: str  # text for screen readers
    drawn: str  # SVG
    left: str  # HTML of the labels at the left
    note: str = ""
    below: str = STEPS  # name of the horizontal axis

    def html(self, across: Axis, number: int) -> str:
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return (
            f'<figure class="{self.kind}" data-number="{number}"><figcaption>'
            f'<b>{escape(self.title)}</b> <span class="unit">{escape(self.unit)}</span>{self.legend}</figcaption>'
            f'<div class="area" tabindex="0" role="img" aria-label="{escape(self.words)}">'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{self.drawn}</svg>'
            f"{self.left}{x_labels(across, self.below)}</div>{note}</figure>"
        )


def left_label(top: float, text: str) -> str:
    """Returns a label to the left of the drawing. top: relative position, 0 at the top and 1 at the bottom."""
    return f'<span class="ty" style="top:{100 * top:.2f}%">{escape(text)}</span>'


def values_for_axis(plot: Plot, line: PlotLine, across: Axis) -> Sequence[float]:
    """Returns the values of a line that the value axis must cover."""
    if not plot.focused or line.steps[-1] < STEEP_PART * across.high * 3:
        return line.values
    return [value for step, value in zip(line.steps, line.values) if step >= STEEP_PART * across.high]


def x_of(step: float, across: Axis) -> str:
    """Returns the horizontal coordinate of a step as text."""
    return short(WIDTH * across.place(step))


def y_of(value: float, up: Axis) -> str:
    """Returns the vertical coordinate of a value as text. The top is 0."""
    return short(HEIGHT * (1 - up.place(value)))


def short(number: float) -> str:
    """Returns text with at most one decimal, such as '12.3' or '12'."""
    return f"{number:.1f}".removesuffix(".0")


def line_path(line: PlotLine, across: Axis, up: Axis) -> str:
    """Returns the SVG path of a line or of dots. Dots are strokes of length 0 with round ends."""
    points = thin_columns(line.steps, line.values, COLUMNS)
    if line.style == "dots" or len(points) == 1:
        return "".join(f"M{x_of(x, across)} {y_of(y, up)}h0" for x, y in points)
    return "M" + "L".join(f"{x_of(x, across)} {y_of(y, up)}" for x, y in points)


def band_path(band: PlotBand, across: Axis, up: Axis) -> str:
    """Returns the SVG path of a band's outline."""
    upper = [f"{x_of(x, across)} {y_of(y, up)}" for x, y in zip(band.steps, band.high)]
    lower = [f"{x_of(x, across)} {y_of(y, up)}" for x, y in zip(band.steps, band.low)]
    return "M" + "L".join([*upper, *reversed(lower)]) + "Z"


def x_labels(across: Axis, name: str) -> str:
    """Returns the name and tick labels of the horizontal axis. The last label is left of its tick."""
    ticks = [at for at in across.ticks(5) if at == int(at) or name != STEPS]
    texts = [f"{at:,.0f}" for at in ticks] if name == STEPS else tick_texts(ticks, "plain")
    return f'<span class="xn">{escape(name)}</span>' + "".join(
        f'<span class="tx{" end" if place > END else ""}" style="left:{100 * place:.2f}%">{escape(text)}</span>'
        for text, place in zip(texts, map(across.place, ticks))
    )


def legend(plot: Plot) -> str:
    """Returns the legend, or '' for a single line. With plot.explained, includes abandoned steps and marks."""
    styles: dict[tuple[str, str], list[str]] = {}
    for line in sorted(plot.drawn, key=lambda line: line.style == "gone"):  # abandoned lines are last
        if line.style != "gone" or plot.explained:
            styles.setdefault((line.label, "" if line.style == "gone" else line.color), []).append(line.style)
    for band in plot.bands:
        styles.setdefault((band.label, band.color), []).append("band")
    # dots or a band with the same name and color as a line have no separate entry
    kinds = [(max(found, key=STYLES.index), color, label) for (label, color), found in styles.items()]
    if len(kinds) < 2 and not plot.named:
        kinds = []
    marked = {mark.kind for mark in plot.marks} if plot.explained else ()
    kinds += [("mark", kind, word) for kind, word in (("trouble", "trouble"), ("change", "restart")) if kind in marked]
    items = "".join(f"<span>{key(style, color)}{escape(label)}</span>" for style, color, label in kinds)
    return f'<span class="legend">{items}</span>' if items else ""


def key(style: str, color: str) -> str:
    """Returns the legend symbol of a style and color."""
    shape = {"band": "M0 1H20V9H0Z", "mark": "M10 -2V12", "dots": "M10 5h0"}.get(style, "M0 5H20")
    return f'<svg class="key" viewBox="0 0 20 10"><path class="{f"{style} {color}".strip()}" d="{shape}"/></svg>'


def summary(plot: Plot, below: str = STEPS) -> str:
    """Returns a description of the plot for screen readers."""
    write = NUMBERS[plot.numbers]
    at = lambda x: f"step {x:,.0f}" if below == STEPS else f"{below} {NUMBERS['plain'](x)}"
    parts = [
        f"{line.label}: {write(line.values[0])} at {at(line.steps[0])}, "
        f"{write(line.values[-1])} at {at(line.steps[-1])}, "
        f"lowest {write(min(line.values))}, highest {write(max(line.values))}"
        for line in plot.drawn
        if line.style in ("line", "dots", "dash")
    ]
    return f"{plot.title}. " + "; ".join(parts[:12])


def script_data(plot: Plot, across: Axis, up: Axis) -> dict[str, Any]:
    """Returns the data of a plot for the script. Lines are in the order of the SVG paths."""
    rounded = lambda value: float(f"{value:.5g}")  # halves the size of the JSON
    thinned = [(line, thin_columns(line.steps, line.values, SCRIPT_COLUMNS)) for line in plot.drawn]
    return {
        "x": [across.low, across.high],
        "y": [rounded(up.low), rounded(up.high)],
        "log": plot.log,
        "zero": plot.zero,
        "numbers": plot.numbers,
        "bands": [
            {"n": b.label, "x": list(b.steps), "l": list(map(rounded, b.low)), "h": list(map(rounded, b.high))}
            for b in plot.bands
        ],
        "lines": [
            {"n": line.label, "s": line.style, "c": line.color, "x": [x for x, _ in points]}
            | {"y": [rounded(y) for _, y in points]}
            for line, points in thinned
        ],
        "marks": [{"x": mark.step, "t": mark.text} for mark in plot.marks],
    }


def draw_heat(heat: HeatMap, across: Axis, number: int) -> tuple[str, dict[str, Any]]:
    """Returns (figure as HTML, data for the script).

    Colors are logarithmic, from the lowest to the highest positive value. If a column contains several steps, it shows
    the value that differs most from the row's median, so that outliers in single steps are visible.
    """
    column_steps, cells = columns_of(heat.steps, heat.rows, MAX_CATEGORY_COLUMNS if heat.across else MOST_COLUMNS)
    positive = [value for row in cells.values() for value in row if value is not None and value > LEAST]
    reached = [*positive, *(heat.scale or ())]
    scale = (min(reached), max(reached)) if reached else (1.0, 1.0)
    if heat.across:
        across = Axis(-0.5, len(heat.steps) - 0.5)
        edges = [WIDTH * max(across.place(step - 0.5), 0.0) for step in (*column_steps, len(heat.steps))]
    else:
        edges = edges_of(column_steps, across)
    paths = color_paths(list(cells.values()), edges, scale, bool(heat.empty))
    drawn = "".join(f'<path class="{color}" d="{"".join(parts)}"/>' for color, parts in sorted(paths.items()))
    names = list(cells)
    every = max(1, math.ceil(len(names) / 12))
    left = "".join(left_label(1 - (i + 0.5) / len(names), names[i]) for i in range(0, len(names), every))
    levels = "".join(f'<i class="h{level}"></i>' for level in range(LEVELS))
    low, high = (escape(plain(end)) for end in scale)
    empty = f'<span class="scale"><i class="{EMPTY}"></i> {escape(heat.empty)}</span>' if EMPTY in paths else ""
    legend = f'<span class="legend">{empty}<span class="scale">{low} {levels} {high}</span></span>'
    unit = ", ".join(filter(None, (heat.unit, "colors: logarithmic")))
    span = f"from {plain(min(positive))} to {plain(max(positive))}" if positive else "all 0"
    words = f"{heat.title}: {len(names)} rows, {units.plural(len(heat.steps), heat.across or 'step')}, {span}"
    parts = FigureParts("plot heat wide", heat.title, unit, legend, words, drawn, left, heat.note, heat.across or STEPS)
    values = [[None if value is None else float(f"{value:.4g}") for value in row] for row in cells.values()]
    data = {"x": [across.low, across.high], "heat": {"x": column_steps, "names": names, "v": values}}
    return parts.html(across, number), data | ({"own": heat.across} if heat.across else {})


def columns_of(
    steps: Sequence[int], rows: Mapping[str, Sequence[float | None]], most: int = MOST_COLUMNS
) -> tuple[list[int], dict[str, list[float | None]]]:
    """Returns (first step of each column, {row: values of the columns}). There are at most `most` columns."""
    stride = max(1, math.ceil(len(steps) / most))
    starts = range(0, len(steps), stride)
    cells: dict[str, list[float | None]] = {}
    for name, row in rows.items():
        known = sorted(value for value in row if value is not None)
        middle = known[len(known) // 2] if known else 0.0
        column = lambda start, row=row, middle=middle: max(
            (value for value in row[start : start + stride] if value is not None),
            key=lambda value: abs(value - middle),
            default=None,
        )
        cells[name] = [column(start) for start in starts]
    return [steps[start] for start in starts], cells


def edges_of(steps: Sequence[int], across: Axis) -> list[float]:
    """Returns the horizontal coordinates between columns, midway between the steps."""
    if not steps:
        return [0.0, 0.0]
    if len(steps) == 1:
        half = (across.high - across.low) * 0.01
        inner, outer = [], (steps[0] - half, steps[0] + half)
    else:
        inner = [(a + b) / 2 for a, b in zip(steps, steps[1:])]
        outer = (steps[0] - (inner[0] - steps[0]), steps[-1] + (steps[-1] - inner[-1]))
    return [WIDTH * min(max(across.place(step), 0.0), 1.0) for step in (outer[0], *inner, outer[1])]


def color_paths(
    rows: Sequence[Sequence[float | None]], edges: Sequence[float], scale: tuple[float, float], has_empty: bool
) -> dict[str, list[str]]:
    """Returns {color: rectangles}, merging neighbours of equal color in a row. has_empty: 0 has its own color."""
    low, high = scale

    def color_of(value: float | None) -> str | None:
        if value is None:
            return None
        if has_empty and value == 0:
            return EMPTY
        if value <= low or high <= low:
            return "h0"
        return f"h{min(int(LEVELS * math.log(value / low) / math.log(high / low)), LEVELS - 1)}"

    paths: dict[str, list[str]] = {}
    height = HEIGHT / max(len(rows), 1)
    for place, row in enumerate(rows):
        top, column = short(HEIGHT - (place + 1) * height), 0
        for color, group in itertools.groupby(map(color_of, row)):
            left, column = edges[column], column + len(list(group))
            if color is not None:
                rectangle = f"M{short(left)} {top}h{short(edges[column] - left)}v{short(height)}H{short(left)}z"
                paths.setdefault(color, []).append(rectangle)
    return paths
