"""One figure as HTML and SVG: lines, bands and marks over the steps of a run. It needs no script; that adds the zoom.

The drawing is stretched to the available width, while strokes and text keep their size: strokes do not scale, and
labels are HTML next to the drawing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxscale.tools.reporting.axes import Axis, axis_over, size_ticks, thin_columns
from jaxscale.tools.reporting.page_text import NUMBERS, escape, tick_texts

WIDTH, HEIGHT = 1000, 400  # of the drawing's own coordinates
COLUMNS = 700  # about the pixels of a plot: what is drawn
END = 0.97  # of the axis: a number centred behind it would reach out of a narrow page
STEEP_PART = 0.05  # of the steps: where a loss falls by more than in all the rest
STEPS = "steps"
COLORS, DASHES = 8, 4  # c0 to c7 of the style, and k1 to k3 of it
STYLES = ("band", "faint", "dots", "gone", "limit", "dash", "line")  # of one name, the last stands in the legend
POINTS_UP_TO = 40  # points of a line that are also shown as such
SCRIPT_COLUMNS = 1400  # points for the script's zoom


class Line(NamedTuple):
    """A series. style: line, faint, dash, dots (points), gone (abandoned: grey), limit (thin). color: of page.css."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    color: str = "c0"
    style: str = "line"


class Band(NamedTuple):
    """A range of values."""

    label: str
    steps: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    color: str = "c4"


class Mark(NamedTuple):
    """Something that happened at a step. kind: trouble, change."""

    step: float
    text: str
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """Data of a plot. numbers: a key of text.NUMBERS."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    numbers: str = "plain"
    log: bool = False
    zero: bool = False
    bands: Sequence[Band] = ()
    marks: Sequence[Mark] = ()
    note: str = ""
    full_width: bool = False
    explained: bool = False  # its legend also explains grey lines and marks
    focused: bool = False  # the steep beginning does not decide on the axis of values
    until: float | None = None  # the last step of its axis, where that is not the page's
    named: bool = False  # its legend also names a line that is alone, as one of several runs must be

    @property
    def drawn(self) -> list[Line]:
        """The lines that have a point; a point that is alone would not be seen as a line."""
        lone = lambda line: len(line.steps) == 1 and line.style in ("line", "dash", "faint")
        return [line._replace(style="dots") if lone(line) else line for line in self.lines if line.steps]


def color_of(place: int) -> str:
    """The colour of a line among others, and beyond the eighth a pattern of dashes too."""
    turn = place // COLORS % DASHES
    return f"c{place % COLORS}" + (f" k{turn}" if turn else "")


def with_points(lines: Sequence[Line]) -> list[Line]:
    """The lines, and the points of those that have few."""
    few = [line for line in lines if line.style != "gone" and len(line.steps) < POINTS_UP_TO]
    return [*lines, *(line._replace(style="dots") for line in few)]


def draw(plot: Plot, across: Axis, number: int, below: str = STEPS) -> tuple[str, dict[str, Any]]:
    """(the figure as HTML, what the script needs of it). number: by which the script finds the one for the other.
    below: the name of the axis below, where that is not of steps; such a plot has no zoom."""
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
    once = {(line.label, line.color): line for line in reversed(plot.drawn) if line.style != "gone"}  # not its mean too
    beyond = [value for line in once.values() for value in line.values if value > up.high]
    if beyond:
        amount = f"{len(beyond):,} points lie" if len(beyond) > 1 else "One point lies"
        notes.append(f"{amount} above the axis; the largest is {NUMBERS[plot.numbers](max(beyond))}.")
    if plot.log and (hidden := sum(value <= 0 for value in seen)):
        notes.append(f"{hidden} points are 0 or less, which a logarithmic axis does not have.")
    drawn = f'<path class="grid" d="{grid_path(plot, up)}"/>{marks}{"".join(lines)}'
    kind, words, left = "plot wide" if plot.full_width else "plot", summary(plot, below), left_labels(plot, up)
    unit = ", ".join(filter(None, (plot.unit, "logarithmic" if plot.log else "")))
    figure = Figure(kind, plot.title, unit, legend(plot), words, drawn, left, " ".join(notes), below)
    return figure.html(across, number), script_data(plot, across, up)


class Figure(NamedTuple):
    """HTML and SVG parts of a figure, line plot or heat map."""

    kind: str  # classes of the style
    title: str
    unit: str
    legend: str  # HTML
    words: str  # for screen readers
    drawn: str  # SVG
    left: str  # HTML of the labels next to it
    note: str = ""
    below: str = STEPS  # the name of the axis below

    def html(self, across: Axis, number: int) -> str:
        """The figure."""
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return (
            f'<figure class="{self.kind}" data-number="{number}"><figcaption>'
            f'<b>{escape(self.title)}</b> <span class="unit">{escape(self.unit)}</span>{self.legend}</figcaption>'
            f'<div class="area" tabindex="0" role="img" aria-label="{escape(self.words)}">'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{self.drawn}</svg>'
            f"{self.left}{x_labels(across, self.below)}</div>{note}</figure>"
        )


def left_label(top: float, text: str) -> str:
    """Returns a label next to the drawing. top: 0 at its upper end, 1 at the lower."""
    return f'<span class="ty" style="top:{100 * top:.2f}%">{escape(text)}</span>'


def values_for_axis(plot: Plot, line: Line, across: Axis) -> Sequence[float]:
    """Returns the values of a line that the axis must cover."""
    if not plot.focused or line.steps[-1] < STEEP_PART * across.high * 3:
        return line.values
    return [value for step, value in zip(line.steps, line.values) if step >= STEEP_PART * across.high]


def x_of(step: float, across: Axis) -> str:
    """The horizontal coordinate, as short as it can be written."""
    return short(WIDTH * across.place(step))


def y_of(value: float, up: Axis) -> str:
    """The vertical coordinate; 0 is at the top."""
    return short(HEIGHT * (1 - up.place(value)))


def short(number: float) -> str:
    """'12.3', '12'."""
    return f"{number:.1f}".removesuffix(".0")


def line_path(line: Line, across: Axis, up: Axis) -> str:
    """The path of a line, or of dots: strokes of no length with round ends."""
    points = thin_columns(line.steps, line.values, COLUMNS)
    if line.style == "dots" or len(points) == 1:
        return "".join(f"M{x_of(x, across)} {y_of(y, up)}h0" for x, y in points)
    return "M" + "L".join(f"{x_of(x, across)} {y_of(y, up)}" for x, y in points)


def band_path(band: Band, across: Axis, up: Axis) -> str:
    """The outline of a band."""
    upper = [f"{x_of(x, across)} {y_of(y, up)}" for x, y in zip(band.steps, band.high)]
    lower = [f"{x_of(x, across)} {y_of(y, up)}" for x, y in zip(band.steps, band.low)]
    return "M" + "L".join([*upper, *reversed(lower)]) + "Z"


def ticks_of(plot: Plot, up: Axis) -> list[float]:
    """Returns the tick values next to the plot."""
    return size_ticks(up.low, up.high) if plot.numbers == "size" and not up.log else up.ticks()


def grid_path(plot: Plot, up: Axis) -> str:
    """Horizontal lines at the ticks."""
    return "".join(f"M0 {y_of(at, up)}H{WIDTH}" for at in ticks_of(plot, up))


def left_labels(plot: Plot, up: Axis) -> str:
    """Returns the tick labels of the value axis."""
    ticks = ticks_of(plot, up)
    return "".join(left_label(1 - up.place(at), text) for at, text in zip(ticks, tick_texts(ticks, plot.numbers)))


def x_labels(across: Axis, name: str) -> str:
    """Returns the tick labels below the axis, and its name; the last label is left of its tick."""
    ticks = [at for at in across.ticks(5) if at == int(at) or name != STEPS]
    texts = [f"{at:,.0f}" for at in ticks] if name == STEPS else tick_texts(ticks, "plain")
    return f'<span class="xn">{escape(name)}</span>' + "".join(
        f'<span class="tx{" end" if place > END else ""}" style="left:{100 * place:.2f}%">{escape(text)}</span>'
        for text, place in zip(texts, map(across.place, ticks))
    )


def legend(plot: Plot) -> str:
    """Returns the legend, if there is more than one kind of line; with grey lines and marks if `explained`."""
    styles: dict[tuple[str, str], list[str]] = {}
    for line in sorted(plot.drawn, key=lambda line: line.style == "gone"):  # what counts comes first
        if line.style != "gone" or plot.explained:
            styles.setdefault((line.label, "" if line.style == "gone" else line.color), []).append(line.style)
    for band in plot.bands:
        styles.setdefault((band.label, band.color), []).append("band")
    # points and a band of a line with the same name and color are not separate kinds
    kinds = [(max(found, key=STYLES.index), color, label) for (label, color), found in styles.items()]
    if len(kinds) < 2 and not plot.named:
        kinds = []
    marked = {mark.kind for mark in plot.marks} if plot.explained else ()
    kinds += [("mark", kind, word) for kind, word in (("trouble", "trouble"), ("change", "restart")) if kind in marked]
    items = "".join(f"<span>{key(style, color)}{escape(label)}</span>" for style, color, label in kinds)
    return f'<span class="legend">{items}</span>' if items else ""


def key(style: str, color: str) -> str:
    """A piece of such a line."""
    shape = {"band": "M0 1H20V9H0Z", "mark": "M10 -2V12", "dots": "M10 5h0"}.get(style, "M0 5H20")
    return f'<svg class="key" viewBox="0 0 20 10"><path class="{f"{style} {color}".strip()}" d="{shape}"/></svg>'


def summary(plot: Plot, below: str = STEPS) -> str:
    """Describes the plot for screen readers."""
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
    """The plot's points for the script, in the order in which its paths stand."""
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
        "lines": [{"n": line.label, "s": line.style, "c": line.color} | points_data(line) for line in plot.drawn],
        "marks": [{"x": mark.step, "t": mark.text} for mark in plot.marks],
    }


def points_data(line: Line) -> dict[str, list[float]]:
    """{x, y}, thinned to what a closer look needs."""
    points = thin_columns(line.steps, line.values, SCRIPT_COLUMNS)
    return {"x": [x for x, _ in points], "y": [rounded(y) for _, y in points]}


def rounded(value: float) -> float:
    """Five significant digits: half of what JSON would write."""
    return float(f"{value:.5g}")
