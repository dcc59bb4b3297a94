"""Options and conclusions of experiments, and helpers for their plots."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.tools.lab.trial import RATE, Base, Result, Trial
from jaxscale.tools.reporting.axes import Axis, axis_over, smooth
from jaxscale.tools.reporting.page_tables import Cell
from jaxscale.tools.reporting.plots import COLORS, Plot, PlotBand, PlotLine, color_of

SMOOTHED = 40  # a moving average spans 1 / SMOOTHED of a curve on each side
# A run has diverged if its loss exceeds this factor times log(vocabulary), the loss of a uniform guess. The factor is
# chosen above 1 because an untrained model and its first steps have losses near the guess.
LOST = 1.5
BANDS = "Lines are means over seeds; bands span the lowest to the highest."
SMALL = (
    "The results are for this model, data and training length, and the best settings depend on all three. Repeat the "
    "experiment at two sizes before you use them for a large run.",
    "Intervals are 90% (Student's t) and cover only the variation between seeds.",
)
Run = Callable[[Sequence[Trial]], list[Result]]  # runs trials that have not ended, and returns all results


class Options(NamedTuple):
    """Options of an experiment. An empty value selects the experiment's default."""

    seeds: int = 0
    rates: tuple[float, ...] = ()  # learning rates
    batches: tuple[int, ...] = ()  # tokens per step
    sizes: tuple[float, ...] = ()  # relative to the config's width or layers
    target: float = 0.0  # parameters relative to the largest run of a ladder
    names: tuple[str, ...] = ()  # optimizers or precisions
    vary: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (setting, values)

    def seeds_of(self, default: int) -> range:
        """Returns the seeds, as offsets from the config's seed."""
        return range(self.seeds or default)


class Drawing(NamedTuple):
    """A plot and its horizontal axis."""

    plot: Plot
    across: Axis
    below: str


class Conclusion(NamedTuple):
    """Contents of an experiment's page, in order."""

    verdict: Sequence[str]  # sentences with the results and uncertainties
    limits: Sequence[str]  # limitations of the results
    predicted: Sequence[tuple[str, str]]  # (source, prediction)
    drawings: Sequence[Drawing]
    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]


class Experiment(NamedTuple):
    """An experiment: a question, and the function that answers it with runs."""

    what: str  # line in --help
    question: str  # title of the page
    answer: Callable[[Base, Options, Run], Conclusion]


def drawing(
    title: str, drawn: Sequence[PlotLine | PlotBand], below: str, *, log_below: bool = False, **more: Any
) -> Drawing:
    """Returns a plot and its axis. log_below: use a logarithmic axis. more: other fields of Plot."""
    lines = [one for one in drawn if isinstance(one, PlotLine)]
    bands = [one for one in drawn if isinstance(one, PlotBand)]
    across = axis_over([x for line in lines for x in line.steps], log=log_below)
    if bands:
        more["note"] = " ".join([BANDS, more.get("note", "")]).strip()
    return Drawing(Plot(title=title, lines=lines, bands=bands, named=True, **more), across, below)


def line(
    label: str, points: Mapping[Any, float] | Iterable[tuple[float, float]], place: int = 0, style: str = "line"
) -> PlotLine:
    """Returns a line through the points in order of x. points: {x: y} or (x, y) pairs. place: color index."""
    ordered = sorted(points.items() if isinstance(points, Mapping) else points)
    return PlotLine(label, [x for x, _ in ordered], [y for _, y in ordered], color_of(place), style)


def over_seeds(results: Sequence[Result], name: str) -> dict[int, dict[float, float]]:
    """Returns {seed: {value of the setting `name`: loss}} for the runs that did not diverge."""
    found: dict[int, dict[float, float]] = {}
    for result in results:
        if not result.diverged:
            found.setdefault(result.seed, {})[float(result.at(name))] = result.loss
    return found


def mean_line(label: str, results: Sequence[Result], x_of: Callable[[Result], Any], place: int) -> list[PlotLine]:
    """Returns lines of loss over x: one with a dot per run, and one with the mean at each x without diverged runs."""
    points = [(float(x_of(r)), r.loss) for r in results if not r.diverged]
    whole = {x: [y for at, y in points if at == x] for x, _ in points}
    lost = {float(x_of(r)) for r in results if r.diverged}
    means = {x: sum(ys) / len(ys) for x, ys in whole.items() if x not in lost}
    return [line(label, points, place, "dots"), line(label, means, place)]


def rate_plot(
    groups: Iterable[tuple[str, Sequence[Result]]], title: str = "Loss over the learning rate",
    unit: str = "nats, held out",
) -> Drawing:  # fmt: skip
    """Returns the plot of loss over the learning rate. groups: (label, runs), drawn with mean_line()."""
    rate_of = lambda r: r.at(RATE)
    lines = [one for place, (name, runs) in enumerate(groups) for one in mean_line(name, runs, rate_of, place)]
    return drawing(title, lines, "learning rate", log_below=True, unit=unit)


def curve_plot(title: str, groups: Mapping[str, tuple[int, Sequence[Result]]]) -> Drawing:
    """Returns the plot of smoothed training losses over tokens. groups: {label: (color index, runs)}."""
    lines = [one for name, (place, runs) in groups.items() for one in curves_of(name, runs, place, smoothed=True)]
    return drawing(title, lines, "tokens", unit="nats", focused=True)


def curves_of(
    label: str, results: Sequence[Result], place: int, metric: str = "loss", by: float = 1.0, smoothed: bool = False
) -> list[PlotLine | PlotBand]:
    """Returns a metric's mean and range over seeds, by tokens / `by`. If all diverged, returns the start of one run."""
    lines = []
    for result in [r for r in results if not r.diverged] or [until_lost(r) for r in results[:1]]:
        tokens, values = result.curve(metric)
        if smoothed:
            values = smooth(values, max(1, len(values) // SMOOTHED))
        lines.append(PlotLine(label, [t / by for t in tokens], values, color_of(place % COLORS)))
    return banded(lines)


def until_lost(result: Result) -> Result:
    """Truncates the result where the loss far exceeds that of a uniform guess. Later losses would compress the plot."""
    rows, most = result.history.rows, LOST * math.log(result.trial.cfg.model.vocab_size)
    selected = itertools.takewhile(lambda row: row.get("loss") is None or row["loss"] <= most, rows)
    return result._replace(history=dataclasses.replace(result.history, rows=tuple(selected)))


def banded(lines: Sequence[PlotLine]) -> list[PlotLine | PlotBand]:
    """Returns the mean of the lines at their common x values, and a band from the lowest to the highest line."""
    if len(lines) < 2:
        return list(lines)
    tables = [dict(zip(line.steps, line.values)) for line in lines]
    shared = sorted(set.intersection(*map(set, tables)))
    columns = [[table[x] for table in tables] for x in shared]
    label, color = lines[0].label, lines[0].color
    means = [sum(column) / len(column) for column in columns]
    return [
        PlotBand(label, shared, list(map(min, columns)), list(map(max, columns)), color),
        lines[0]._replace(steps=shared, values=means),
    ]
