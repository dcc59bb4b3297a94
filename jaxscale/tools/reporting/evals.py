"""Evaluation results over checkpoints: plots and a table."""

import functools
import re
from collections.abc import Sequence

from jaxscale.runtime.monitor.history import History
from jaxscale.tools.reporting.canvas import Canvas, plots
from jaxscale.tools.reporting.page_tables import n, table
from jaxscale.tools.reporting.page_text import plain
from jaxscale.tools.reporting.plots import PlotBand, PlotLine, color_of, with_points

SHOWN = re.compile(r"evals(?:_ema)?/.+/([a-z_]+)")  # the group is the metric of an evaluator
METRICS = {  # in page order; the metrics not listed are errors and counts
    "bits_per_byte": "bits per byte",
    "acc": "accuracy",
    "acc_norm": "accuracy, normalized by characters",
    "acc_bytes": "accuracy, normalized by bytes",
    "perplexity": "perplexity",
    "loss": "nats per token",
}
FALLING = ("bits_per_byte", "perplexity", "loss")  # fall steeply at the start, like a training loss


def eval_names(histories: Sequence[History]) -> dict[str, list[str]]:
    """Returns {metric: its full names, one per evaluator}, in the order of METRICS."""
    names = list(dict.fromkeys(name for history in histories for name in history.eval_names()))
    found: dict[str, list[str]] = {metric: [] for metric in METRICS}
    for name in names:
        match = SHOWN.fullmatch(name)
        if match and match[1] in found:
            found[match[1]].append(name)
    return {metric: sorted(names) for metric, names in found.items() if names}


def label_of(name: str) -> str:
    """Returns 'wiki' for 'evals/wiki/acc', and 'wiki, average' for 'evals_ema/wiki/acc'."""
    kind, _, path = name.partition("/")
    return path.rpartition("/")[0] + (", average" if kind == "evals_ema" else "")


def eval_plots(canvas: Canvas) -> str:
    """Returns one plot per metric with a line per evaluator. For several runs, each evaluator has its own plot."""
    drawn, histories = [], canvas.histories
    for metric, names in eval_names(histories).items():
        plot = functools.partial(canvas.plot, log=metric == "perplexity", focused=metric in FALLING)
        if canvas.single:
            one = histories[0]
            lines = [PlotLine(label_of(name), *one.evaluated(name), color_of(i)) for i, name in enumerate(names)]
            bands = [band for name in names[:1] if len(names) == 1 and (band := error_band(one, name))]
            drawn.append(plot(f"Evaluations: {METRICS[metric]}", with_points(lines), bands=bands, named=True))
            continue
        for name in names:
            lines = [PlotLine(h.name, *h.evaluated(name), color_of(i)) for i, h in enumerate(histories)]
            drawn.append(plot(f"{label_of(name)}: {METRICS[metric]}", with_points(lines)))
    return plots(*drawn)


def error_band(history: History, name: str) -> PlotBand | None:
    """Returns the band of plus and minus one standard error, or None if a value has no standard error."""
    steps, values = history.evaluated(name)
    error_steps, errors = history.evaluated(f"{name}_stderr")
    if not steps or error_steps != steps:
        return None
    low = [value - error for value, error in zip(values, errors)]
    return PlotBand("one standard error", steps, low, [value + error for value, error in zip(values, errors)])


def eval_table(history: History, most_rows: int = 50) -> str:
    """Returns a table of the newest measurements with their standard errors."""
    names = [name for names in eval_names([history]).values() for name in names if not name.endswith("/loss")]
    columns = {name: dict(zip(*history.evaluated(name))) for name in names}
    errors = {name: dict(zip(*history.evaluated(f"{name}_stderr"))) for name in names}
    steps = sorted({step for column in columns.values() for step in column})[-most_rows:]
    head = ["step", *(f"{label_of(name)} {name.rpartition('/')[2]}" for name in names)]
    rows = [[n(f"{at:,}"), *(n(shown(columns[name].get(at), errors[name].get(at))) for name in names)] for at in steps]
    return table(head, rows) if rows else ""


def shown(value: float | None, error: float | None) -> str:
    """Returns text such as '0.512 ± 0.014'."""
    if value is None:
        return ""
    return plain(value) + (f" ± {plain(error)}" if error is not None else "")


def evals_section(canvas: Canvas) -> str:
    """Returns the plots (and for a single run, the table) of evaluations, or '' if there are none."""
    drawn = eval_plots(canvas)
    if drawn and canvas.single:
        drawn += f"<details><summary>Numbers</summary>{eval_table(canvas.histories[0])}</details>"
    return drawn
