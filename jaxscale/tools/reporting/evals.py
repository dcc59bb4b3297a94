"""Evaluation results over checkpoints: plots and a table."""

import re
from collections.abc import Sequence

from jaxscale.runtime.monitor.history import History
from jaxscale.tools.reporting.canvas import Canvas, plots
from jaxscale.tools.reporting.page_tables import n, table
from jaxscale.tools.reporting.page_text import plain
from jaxscale.tools.reporting.plots import Band, Line, Plot, color_of, with_points

SHOWN = re.compile(r"evals(?:_ema)?/(?P<name>.+)/(?P<metric>[a-z_]+)")
METRICS = {  # in page order; other metrics are errors and counts
    "bits_per_byte": "bits per byte",
    "acc": "accuracy",
    "acc_norm": "accuracy, likelihood per character",
    "acc_bytes": "accuracy, likelihood per byte",
    "perplexity": "perplexity",
    "loss": "nats per token",
}
FALLING = ("bits_per_byte", "perplexity", "loss")  # steep at first, like a training loss


def eval_names(histories: Sequence[History]) -> dict[str, list[str]]:
    """{metric: the full names that end in it}, in the order of METRICS."""
    names = list(dict.fromkeys(name for history in histories for name in history.eval_names()))
    found: dict[str, list[str]] = {metric: [] for metric in METRICS}
    for name in names:
        match = SHOWN.fullmatch(name)
        if match and match["metric"] in found:
            found[match["metric"]].append(name)
    return {metric: sorted(names) for metric, names in found.items() if names}


def label_of(name: str) -> str:
    """'wiki' of 'evals/wiki/acc', 'wiki, average' of 'evals_ema/wiki/acc'."""
    return parts_of(name)["name"] + (", average" if name.startswith("evals_ema/") else "")


def parts_of(name: str) -> re.Match[str]:
    """The groups `name` and `metric` of one of eval_names()."""
    match = SHOWN.fullmatch(name)
    assert match is not None, f"{name} is not of an evaluator"
    return match


def eval_plots(canvas: Canvas) -> str:
    """A plot for each metric: of one run with a line for each evaluator, of several one for each evaluator."""
    drawn = []
    for metric, names in eval_names(canvas.histories).items():
        if canvas.single:
            drawn.append(metric_plot(canvas, metric, names))
        else:
            drawn += [compared_plot(canvas, metric, name) for name in names]
    return plots(*drawn)


def metric_plot(canvas: Canvas, metric: str, names: Sequence[str]) -> str:
    """One metric of one run."""
    history = canvas.histories[0]
    lines = with_points([Line(label_of(name), *history.evaluated(name), color_of(i)) for i, name in enumerate(names)])
    bands = [band for name in names[:1] if len(names) == 1 and (band := error_band(history, name))]
    title = f"Evaluations: {METRICS[metric]}"
    return canvas.add(
        Plot(
            title=title,
            lines=lines,
            bands=bands,
            marks=canvas.marks(),
            log=metric == "perplexity",
            focused=metric in FALLING,
            named=True,
        )
    )


def compared_plot(canvas: Canvas, metric: str, name: str) -> str:
    """One metric of one evaluator, of several runs."""
    lines = with_points([Line(h.name, *h.evaluated(name), color_of(i)) for i, h in enumerate(canvas.histories)])
    title, focused = f"{label_of(name)}: {METRICS[metric]}", metric in FALLING
    return canvas.add(Plot(title=title, lines=lines, log=metric == "perplexity", focused=focused))


def error_band(history: History, name: str) -> Band | None:
    """One standard error to both sides, where every measurement has one."""
    steps, values = history.evaluated(name)
    error_steps, errors = history.evaluated(f"{name}_stderr")
    if not steps or error_steps != steps:
        return None
    low = [value - error for value, error in zip(values, errors)]
    return Band("one standard error", steps, low, [value + error for value, error in zip(values, errors)])


def eval_table(history: History, most_rows: int = 50) -> str:
    """The newest measurements, each with its standard error."""
    names = [name for names in eval_names([history]).values() for name in names if not name.endswith("/loss")]
    columns = {name: dict(zip(*history.evaluated(name))) for name in names}
    errors = {name: dict(zip(*history.evaluated(f"{name}_stderr"))) for name in names}
    steps = sorted({step for column in columns.values() for step in column})[-most_rows:]
    head = ["step", *(f"{label_of(name)} {name.rpartition('/')[2]}" for name in names)]
    rows = [[n(f"{at:,}"), *(n(shown(columns[name].get(at), errors[name].get(at))) for name in names)] for at in steps]
    return table(head, rows) if rows else ""


def shown(value: float | None, error: float | None) -> str:
    """'0.512 ± 0.014'."""
    if value is None:
        return ""
    return plain(value) + (f" ± {plain(error)}" if error is not None else "")


def evals_section(canvas: Canvas) -> str:
    """The plots, and for one run the table; '' where nothing was measured."""
    drawn = eval_plots(canvas)
    if drawn and canvas.single:
        drawn += f"<details><summary>Numbers</summary>{eval_table(canvas.histories[0])}</details>"
    return drawn
