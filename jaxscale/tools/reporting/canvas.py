"""The plots of a page: a common step axis, and the script data of each plot in page order."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxscale.runtime.monitor.history import History, Row, is_number, series_of
from jaxscale.tools.reporting.axes import Axis, smooth
from jaxscale.tools.reporting.event_text import marks
from jaxscale.tools.reporting.heat import HeatMap, draw_heat
from jaxscale.tools.reporting.plots import Line, Mark, Plot, color_of, draw

SMOOTHED_FROM = 80  # points; shorter series are not smoothed
SMOOTHED_SHARE = 1 / 40  # of the points, in one mean


@dataclasses.dataclass
class Canvas:
    """Draws plots of some runs."""

    histories: Sequence[History]
    across: Axis
    data: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def single(self) -> bool:
        """True for a page of one run."""
        return len(self.histories) == 1

    def add(self, plot: Plot | HeatMap) -> str:
        """The figure's HTML; '' for a plot without a point."""
        if isinstance(plot, HeatMap):
            html, data = draw_heat(plot, self.across, len(self.data))
        elif not plot.drawn:
            return ""
        else:
            plot = plot if self.single else dataclasses.replace(plot, named=True)
            html, data = draw(plot, self.across, len(self.data))
        self.data.append(data)
        return html

    def metric(self, name: str, title: str, label: str = "", **settings: Any) -> str:
        """A plot of one metric of all runs, abandoned steps in grey; '' if no run has it."""
        settings.setdefault("marks", self.marks())
        label = label if self.single else ""
        lines = [line for place, h in enumerate(self.histories) for line in self.lines_of(h, place, name, label)]
        return self.add(Plot(title=title, lines=lines, **settings))

    def lines_of(
        self, history: History, place: int, name: str, label: str = "", style: str = "line", smoothed: bool = False
    ) -> list[Line]:
        """The lines of one metric of one run: abandoned parts first, below the others."""
        color = color_of(place)
        label = label or name.rpartition("/")[2].replace("_", " ") if self.single else history_label(history, label)
        lines = abandoned_lines(history, name)
        steps, values = history.series(name)
        if smoothed and len(values) >= SMOOTHED_FROM:
            half = max(int(len(values) * SMOOTHED_SHARE / 2), 1)
            lines.append(Line(label, steps, values, color, "faint"))
            lines.append(Line(label, steps, smooth(values, half), color, style))
        else:
            lines.append(Line(label, steps, values, color, style))
        return lines

    def marks(self) -> list[Mark]:
        """Marks of events, for a page of one run only."""
        return marks(self.histories[0].events) if self.single else []


def plots(*drawn: str) -> str:
    """The plots side by side; '' without any."""
    return f'<div class="plots">{"".join(drawn)}</div>' if any(drawn) else ""


def history_label(history: History, label: str) -> str:
    """'run-a, validation'."""
    return f"{history.name}, {label}" if label else history.name


def abandoned_lines(history: History, name: str) -> list[Line]:
    """One grey line per rewind."""
    lines = []
    for _, group in itertools.groupby(history.abandoned, key=lambda row: row["rewind"]):
        steps, values = series_of(sorted_by_step(group), name)
        lines.append(Line("abandoned", steps, values, "c7", "gone"))
    return lines


def sorted_by_step(rows: Iterable[Row]) -> list[Row]:
    """Sorts rows by step."""
    return sorted(rows, key=lambda row: row["step"])


def step_axis(histories: Sequence[History]) -> Axis:
    """The axis of steps that all plots share: from 0 to the newest step."""
    last = [row["step"] for h in histories for row in (*h.rows[-1:], *h.abandoned, *h.evals[-1:])]
    return Axis(0.0, float(max([*last, 1])))


def tokens_per_step(history: History) -> float | None:
    """Tokens of one step, by the config or the metrics."""
    batch_tokens = history.part("budget").get("batch_tokens")
    if is_number(batch_tokens) and batch_tokens >= 1:
        return batch_tokens
    steps, tokens = history.series("tokens_seen")
    return tokens[-1] / steps[-1] if steps and steps[-1] else None


def group_by(names: Iterable[str], prefix: str, key: Callable[[str], str]) -> dict[str, list[str]]:
    """Groups metrics under a prefix by `key` of the remaining name."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(prefix):
            found.setdefault(key(name.removeprefix(prefix)), []).append(name)
    return found
