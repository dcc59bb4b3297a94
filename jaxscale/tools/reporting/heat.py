"""A heat map as SVG: one row for each layer, one column for each step that has statistics, or for each expert."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.tools.reporting.axes import LEAST, Axis
from jaxscale.tools.reporting.page_text import escape, plain
from jaxscale.tools.reporting.plots import HEIGHT, WIDTH, Figure, left_label, short

LEVELS = 12  # colours h0 to h11 of the style
EMPTY = "empty"  # and one for 0
MOST_COLUMNS = 240
MAX_CATEGORY_COLUMNS = 512  # where columns are not steps: about two pixels each on a wide page


class HeatMap(NamedTuple):
    """Data of a heat map. rows: {name: values at the steps}, bottom first."""

    title: str
    unit: str
    steps: Sequence[int]
    rows: Mapping[str, Sequence[float | None]]
    scale: tuple[float, float] | None = None  # minimum color range
    across: str = ""  # name of a column that is not a step; then steps are 0, 1, 2, ...
    empty: str = ""  # label of 0, if it has a separate color
    note: str = ""


def draw_heat(heat: HeatMap, across: Axis, number: int) -> tuple[str, dict[str, Any]]:
    """(the figure as HTML, what the script needs of it).

    Colours are logarithmic between the lowest and the highest positive value. Of more steps than fit, each column has
    the value that is farthest from the row's median, so that one step's outlier is seen.
    """
    column_steps, cells = columns_of(heat.steps, heat.rows, MAX_CATEGORY_COLUMNS if heat.across else MOST_COLUMNS)
    positive = [value for row in cells.values() for value in row if value is not None and value > LEAST]
    reached = [*positive, *(heat.scale or ())]
    low, high = (min(reached), max(reached)) if reached else (1.0, 1.0)
    paths: dict[str, list[str]] = {}
    if heat.across:
        across = Axis(-0.5, len(heat.steps) - 0.5)
        edges = [WIDTH * max(across.place(step - 0.5), 0.0) for step in (*column_steps, len(heat.steps))]
    else:
        edges = edges_of(column_steps, across)
    height = HEIGHT / max(len(cells), 1)
    for place, row in enumerate(cells.values()):
        top = HEIGHT - (place + 1) * height
        colours = [colour_of(value, low, high, bool(heat.empty)) for value in row]
        for first, last, colour in runs_of_color(colours):
            left, right = edges[first], edges[last + 1]
            paths.setdefault(colour, []).append(
                f"M{short(left)} {short(top)}h{short(right - left)}v{short(height)}H{short(left)}z"
            )
    drawn = "".join(f'<path class="{colour}" d="{"".join(parts)}"/>' for colour, parts in sorted(paths.items()))
    names = list(cells)
    every = max(1, math.ceil(len(names) / 12))
    left = "".join(left_label(1 - (i + 0.5) / len(names), names[i]) for i in range(0, len(names), every))
    scale = "".join(f'<i class="h{level}"></i>' for level in range(LEVELS))
    scale = f'<span class="scale">{escape(plain(low))} {scale} {escape(plain(high))}</span>'
    empty = f'<span class="scale"><i class="{EMPTY}"></i> {escape(heat.empty)}</span>' if EMPTY in paths else ""
    legend = f'<span class="legend">{empty}{scale}</span>'
    unit = ", ".join(filter(None, (heat.unit, "colours logarithmic")))
    columns = units.plural(len(heat.steps), heat.across or "step")
    span = f"from {plain(min(positive))} to {plain(max(positive))}" if positive else "all 0"
    words = f"{heat.title}: {len(names)} rows, {columns}, {span}"
    figure = Figure("plot heat wide", heat.title, unit, legend, words, drawn, left, heat.note, heat.across or "steps")
    values = [[None if value is None else float(f"{value:.4g}") for value in row] for row in cells.values()]
    return figure.html(across, number), {
        "x": [across.low, across.high],
        "heat": {"x": column_steps, "names": names, "v": values},
    } | ({"own": heat.across} if heat.across else {})


def columns_of(
    steps: Sequence[int], rows: Mapping[str, Sequence[float | None]], most: int = MOST_COLUMNS
) -> tuple[list[int], dict[str, list[float | None]]]:
    """Returns (first step of each column, {row: column values}), at most `most` columns."""
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
    """Horizontal coordinates between the columns; a column reaches half of the way to its neighbours."""
    if not steps:
        return [0.0, 0.0]
    if len(steps) == 1:
        half = (across.high - across.low) * 0.01
        inner, outer = [], (steps[0] - half, steps[0] + half)
    else:
        inner = [(a + b) / 2 for a, b in zip(steps, steps[1:])]
        outer = (steps[0] - (inner[0] - steps[0]), steps[-1] + (steps[-1] - inner[-1]))
    return [WIDTH * min(max(across.place(step), 0.0), 1.0) for step in (outer[0], *inner, outer[1])]


def runs_of_color(colours: Sequence[str | None]) -> Iterator[tuple[int, int, str]]:
    """Yields (first column, last column, colour) of neighbours with one colour; None is skipped."""
    first, before = 0, None
    for place, colour in enumerate([*colours, None]):
        if colour != before:
            if before is not None:
                yield first, place - 1, before
            first, before = place, colour


def colour_of(value: float | None, low: float, high: float, is_empty: bool) -> str | None:
    """The class of a value's colour; None without a value. is_empty: 0 has a separate color."""
    if value is None:
        return None
    return EMPTY if is_empty and value == 0 else f"h{level_of(value, low, high)}"


def level_of(value: float, low: float, high: float) -> int:
    """The colour of a value, 0 to LEVELS - 1."""
    if value <= low or high <= low:
        return 0
    return min(int(LEVELS * math.log(value / low) / math.log(high / low)), LEVELS - 1)
