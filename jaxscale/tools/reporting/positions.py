"""Validation loss by position, which shows the use of long context."""

import re
from collections.abc import Sequence

from jaxscale.runtime.monitor.history import History
from jaxscale.tools.reporting.canvas import Canvas, plots
from jaxscale.tools.reporting.page_tables import n, table
from jaxscale.tools.reporting.page_text import plain
from jaxscale.tools.reporting.plots import Line, Plot, color_of, with_points

RANGE = re.compile(r"validation_by_position/(?P<first>\d{1,9})-(?P<last>\d{1,9})/loss")
MOST_RANGES = 8  # in the plot: the longest; the table has all


def ranges_of(histories: Sequence[History]) -> list[tuple[int, int]]:
    """[(fewest, most)] tokens that were read before what is predicted, of some run, from few to many."""
    names = dict.fromkeys(name for history in histories for name in history.names())
    found = {(int(match["first"]), int(match["last"])) for name in names if (match := RANGE.fullmatch(name))}
    return sorted(found)


def name_of(tokens: tuple[int, int]) -> str:
    """The metric of a range."""
    return "validation_by_position/{}-{}/loss".format(*tokens)


def words_of(tokens: tuple[int, int]) -> str:
    """'513 to 1,024', or '1'."""
    first, last = tokens
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def positions_section(canvas: Canvas) -> str:
    """A line for each of the longest ranges of one run, and a table of all ranges and runs; '' where none is known."""
    ranges = ranges_of(canvas.histories)
    if not ranges:
        return ""
    drawn = ""
    if canvas.single:
        history, shown = canvas.histories[0], ranges[-MOST_RANGES:]
        lines = [Line(words_of(one), *history.series(name_of(one)), color_of(i)) for i, one in enumerate(shown)]
        title, unit = "Validation loss after so many tokens of a document", "nats per token"
        drawn = canvas.add(Plot(title=title, unit=unit, lines=with_points(lines), marks=canvas.marks(), focused=True))
    return plots(drawn, f"<div>{positions_table(canvas.histories, ranges)}</div>")


def positions_table(histories: Sequence[History], ranges: Sequence[tuple[int, int]]) -> str:
    """A row for each range: of one run the first and the newest loss, of several the newest of each."""
    if len(histories) == 1:
        head, each = ["first", "newest"], [histories[0].series(name_of(one))[1] for one in ranges]
        cells = [(values[0], values[-1]) for values in each]
    else:
        head = [history.name for history in histories]
        cells = [tuple(history.latest(name_of(one)) for history in histories) for one in ranges]
    rows = [[words_of(one), *(n(plain(value)) for value in row)] for one, row in zip(ranges, cells, strict=True)]
    return table(["tokens read before", *head], rows)
