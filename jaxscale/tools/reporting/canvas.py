"""The plots and heat maps of a page: a common step axis, and the script data of each in page order."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jaxscale.runtime.monitor.history import History, is_number, series_of
from jaxscale.tools.reporting.axes import Axis, smooth
from jaxscale.tools.reporting.event_text import marks
from jaxscale.tools.reporting.plots import HeatMap, Plot, PlotLine, color_of, draw, draw_heat

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

    def heat(self, heat: HeatMap) -> str:
        """The heat map's HTML."""
        html, data = draw_heat(heat, self.across, len(self.data))
        self.data.append(data)
        return html

    def plot(self, title: str, lines: Sequence[PlotLine], **settings: Any) -> str:
        """The plot's HTML, with marks of one run's events; '' without a point. settings: fields of Plot."""
        usual = {"marks": marks(self.histories[0].events) if self.single else [], "named": not self.single}
        plot = Plot(title=title, lines=lines, **usual | settings)
        if not plot.drawn:
            return ""
        html, data = draw(plot, self.across, len(self.data))
        self.data.append(data)
        return html

    def metric(self, name: str, title: str, label: str = "", **settings: Any) -> str:
        """A plot of one metric of all runs, abandoned steps in grey; '' if no run has it."""
        return self.plot(title, self.lines(name, label if self.single else ""), **settings)

    def lines(self, name: str, label: str = "", smoothed: bool = False) -> list[PlotLine]:
        """The lines of one metric of all runs."""
        each = enumerate(self.histories)
        return [line for i, h in each for line in self.lines_of(h, i, name, label, smoothed=smoothed)]

    def lines_of(
        self, history: History, place: int, name: str, label: str = "", style: str = "line", smoothed: bool = False
    ) -> list[PlotLine]:
        """The lines of one metric of one run: abandoned parts first, below the others."""
        color = color_of(place)
        label = label or name.rpartition("/")[2].replace("_", " ") if self.single else history_label(history, label)
        lines = []
        for _, rows in itertools.groupby(history.abandoned, key=lambda row: row["rewind"]):  # a grey line per rewind
            steps, values = series_of(sorted(rows, key=lambda row: row["step"]), name)
            lines.append(PlotLine("abandoned", steps, values, "c7", "gone"))
        steps, values = history.series(name)
        if smoothed and len(values) >= SMOOTHED_FROM:
            lines.append(PlotLine(label, steps, values, color, "faint"))
            values = smooth(values, max(int(len(values) * SMOOTHED_SHARE / 2), 1), steep=True)
        return [*lines, PlotLine(label, steps, values, color, style)]


def plots(*drawn: str) -> str:
    """The plots side by side; '' without any."""
    return f'<div class="plots">{"".join(drawn)}</div>' if any(drawn) else ""


def history_label(history: History, label: str) -> str:
    """'run-a, validation'."""
    return f"{history.name}, {label}" if label else history.name


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
