"""Plots and heat maps of a page, with a common step axis and the data for the page's script."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jaxscale.runtime.monitor.history import History, is_number, series_of
from jaxscale.tools.reporting.axes import Axis, smooth
from jaxscale.tools.reporting.event_text import marks
from jaxscale.tools.reporting.plots import HeatMap, Plot, PlotLine, color_of, draw, draw_heat

SMOOTHED_FROM = 80  # fewest points of a series that is smoothed
SMOOTHED_SHARE = 1 / 40  # fraction of the points in the averaging window


@dataclasses.dataclass
class Canvas:
    """Draws plots of one or more runs."""

    histories: Sequence[History]
    across: Axis
    data: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def single(self) -> bool:
        """True for a page of one run."""
        return len(self.histories) == 1

    def heat(self, heat: HeatMap) -> str:
        """Returns the HTML of a heat map."""
        html, data = draw_heat(heat, self.across, len(self.data))
        self.data.append(data)
        return html

    def plot(self, title: str, lines: Sequence[PlotLine], **settings: Any) -> str:
        """Returns the HTML of a plot, or '' if the plot has no points. settings: other fields of Plot."""
        usual = {"marks": marks(self.histories[0].events) if self.single else [], "named": not self.single}
        plot = Plot(title=title, lines=lines, **usual | settings)
        if not plot.drawn:
            return ""
        html, data = draw(plot, self.across, len(self.data))
        self.data.append(data)
        return html

    def metric(self, name: str, title: str, label: str = "", **settings: Any) -> str:
        """Returns a plot of one metric for all runs, with abandoned steps in grey, or '' if no run has the metric."""
        return self.plot(title, self.lines(name, label if self.single else ""), **settings)

    def lines(self, name: str, label: str = "", smoothed: bool = False) -> list[PlotLine]:
        """Returns the lines of one metric for all runs."""
        each = enumerate(self.histories)
        return [line for i, h in each for line in self.lines_of(h, i, name, label, smoothed=smoothed)]

    def lines_of(
        self, history: History, place: int, name: str, label: str = "", style: str = "line", smoothed: bool = False
    ) -> list[PlotLine]:
        """Returns the lines of one metric and run. Abandoned steps come first, so they are drawn below the others."""
        color = color_of(place)
        label = label or name.rpartition("/")[2].replace("_", " ") if self.single else history_label(history, label)
        lines = []
        for _, rows in itertools.groupby(history.abandoned, key=lambda row: row["rewind"]):  # one grey line per rewind
            steps, values = series_of(sorted(rows, key=lambda row: row["step"]), name)
            lines.append(PlotLine("abandoned", steps, values, "c7", "gone"))
        steps, values = history.series(name)
        if smoothed and len(values) >= SMOOTHED_FROM:
            lines.append(PlotLine(label, steps, values, color, "faint"))
            values = smooth(values, max(int(len(values) * SMOOTHED_SHARE / 2), 1), steep=True)
        return [*lines, PlotLine(label, steps, values, color, style)]


def plots(*drawn: str) -> str:
    """Returns the plots in a grid, or '' if there are none."""
    return f'<div class="plots">{"".join(drawn)}</div>' if any(drawn) else ""


def history_label(history: History, label: str) -> str:
    """Returns text such as 'run-a, validation'."""
    return f"{history.name}, {label}" if label else history.name


def step_axis(histories: Sequence[History]) -> Axis:
    """Returns the step axis of all plots, from 0 to the newest step."""
    last = [row["step"] for h in histories for row in (*h.rows[-1:], *h.abandoned, *h.evals[-1:])]
    return Axis(0.0, float(max([*last, 1])))


def tokens_per_step(history: History) -> float | None:
    """Returns the tokens per step from the config or the metrics, or None if unknown."""
    batch_tokens = history.part("budget").get("batch_tokens")
    if is_number(batch_tokens) and batch_tokens >= 1:
        return batch_tokens
    steps, tokens = history.series("tokens_seen")
    return tokens[-1] / steps[-1] if steps and steps[-1] else None
