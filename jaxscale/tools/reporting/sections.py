"""Sections of the report page with their plots."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxscale import units
from jaxscale.runtime.monitor.health.expert_rules import DEAD_STEPS
from jaxscale.runtime.monitor.health.speed_rules import OTHER_WORK
from jaxscale.runtime.monitor.history import History, is_number
from jaxscale.runtime.monitor.run_files import ExpertCounts
from jaxscale.tools.reporting.canvas import Canvas, history_label, plots, tokens_per_step
from jaxscale.tools.reporting.evals import evals_section
from jaxscale.tools.reporting.page_tables import goodput_table, left_out, n, supervised_table, table
from jaxscale.tools.reporting.page_text import escape, plain
from jaxscale.tools.reporting.plots import HeatMap, PlotBand, PlotLine, color_of, with_points
from jaxscale.tools.reporting.sources import data_table, is_of_source

POSITIONS = re.compile(r"validation_by_position/(\d{1,9})-(\d{1,9})/loss")
MOST_RANGES = 8  # longest ranges of positions in the plot; the table has all ranges
IN_USE = ("faint", "line")  # line style for several runs, and for one run
MOST_LINES = 12  # lines in one plot
STATISTICS = (
    ("activation_rms", "Activations", "root mean square"),
    ("attention_rms", "Attention output", "root mean square"),
    ("mlp_rms", "MLP output", "root mean square"),
    ("attention_logit_max", "Largest attention logit", ""),
    ("attention_logit_bound", "Upper bound of attention logits", "max|q| max|k|"),
    ("grad_norm", "Gradient norm by group", ""),
    ("zero_grad", "Parameters with zero gradient", ""),
    ("update_ratio", "Update-to-weight ratio by group", ""),
    ("update_norm", "Update norm by group", ""),
    ("weight_norm", "Weight norm by group", ""),
)
MOST_LAYERED = 4  # with more runs, a page shows no layers or experts
HEAT_FROM = 4  # fewest layers for a heat map instead of lines
MOST_NAMED = 8  # experts without tokens that are listed
# Smallest color ranges, so that an even load does not look uneven.
FROM_EVEN, AROUND_EVEN = (1.0, 4.0), (0.25, 4.0)
NO_COUNTS = (
    "No expert counts were recorded yet. Set --config.monitor.statistics_every_steps=100 to record them from the next "
    "start."
)
IN_STEPS = f"in {DEAD_STEPS} steps"
OVER_MEAN = "relative to the layer mean"
# (title, unit, ((metric, label), ...))
EXPERT_METRICS = (
    ("Busiest expert", f"{OVER_MEAN}, in the worst layer", (("experts_busiest", "busiest"),)),
    ("Effective number of experts", "in the most uneven layer", (("experts_effective", "experts"),)),
    ("Experts without tokens", "in all layers", (("experts_idle", "in the step"), ("experts_dead", IN_STEPS))),
    ("Router entropy", "nats", (("router_entropy", "mean"), ("router_entropy_lowest", "lowest layer"))),
    ("Router bias range", "relative to the range of a token's scores", (("router_bias_to_scores", "worst layer"),)),
    ("Dropped expert choices", "in all layers", (("experts_dropped", "above capacity"),)),
    ("All-to-all rounds", "", (("expert_rounds", "most"), ("expert_rounds_mean", "mean"))),
)


class Section(NamedTuple):
    """A section of the page."""

    id: str
    title: str
    html: str


def plot_sections(canvas: Canvas) -> list[Section]:
    """Returns the sections with content, in page order."""
    makers: tuple[tuple[str, str, Callable[[Canvas], str]], ...] = (
        ("loss", "Loss", loss),
        ("sources", "By source", sources),
        ("positions", "By position", positions_section),
        ("evals", "Evaluations", evals_section),
        ("optimizer", "Gradients and learning rate", optimizer),
        ("speed", "Throughput", speed),
        ("memory", "Memory and devices", memory),
        ("goodput", "Goodput", goodput),
        ("layers", "Layers", layers),
        ("experts", "Experts", experts_section),
        ("data", "Data", lambda canvas: data_table(canvas.histories)),
    )
    made = [Section(id, title, make(canvas)) for id, title, make in makers]
    return [section for section in made if section.html]


def loss(canvas: Canvas) -> str:
    """Returns training loss, validation loss and forecast, in one plot for one run or in two for several runs."""
    train, validation, bands = [], [], []
    for place, history in enumerate(canvas.histories):
        name = "train" if canvas.single else ""
        train += canvas.lines_of(history, place, "loss", name, smoothed=True)
        other, name, style = (place + 1, "validation", "dash") if canvas.single else (place, "", "line")
        validation += with_points(canvas.lines_of(history, other, "validation/loss", name, style))
        bands += forecast_of(history, canvas.single)
    smoothed = any(line.style == "faint" for line in train)
    notes = ["Bold: moving average over 1/40 of the values; faint: all values."] if smoothed else []
    note = " ".join(filter(None, [*notes, not_finite(canvas, "loss")]))
    abandoned_first = lambda lines: sorted(lines, key=lambda line: line.style != "gone")  # to draw them below
    until = max((band.steps[-1] for band in bands), default=None)
    shared = dict(unit="nats per token", bands=bands, full_width=True, focused=True, until=until)
    plot = functools.partial(canvas.plot, **shared)
    if canvas.single:
        drawn = [plot("Loss", abandoned_first([*train, *validation]), note=note, explained=True)]
    else:
        drawn = [
            plot("Training loss", abandoned_first(train), note=note, explained=True),
            plot("Validation loss", abandoned_first(validation)),
        ]
    return plots(*drawn) or left_out("No loss was logged yet.")


def not_finite(canvas: Canvas, name: str) -> str:
    """Returns a note on the number of non-finite values that the plot omits, or '' if there are none."""
    count = sum(name in row.get("nonfinite", ()) for h in canvas.histories for row in h.rows)
    return f"{units.plural(count, 'non-finite value')} not shown." if count else ""


def forecast_of(history: History, single: bool) -> list[PlotBand]:
    """Returns the forecast as a band over steps. If the page has several runs, its label names the run."""
    each = tokens_per_step(history)
    if history.forecast is None or not each:
        return []
    steps = [tokens / each for tokens in history.forecast["tokens"]]
    label = "forecast" if single else history_label(history, "forecast")
    return [PlotBand(label, steps, history.forecast["low"], history.forecast["high"])]


def sources(canvas: Canvas) -> str:
    """Returns plots of held-out bits per byte and training loss by source."""
    names = list(dict.fromkeys(name for h in canvas.histories for name in h.names()))
    bits = [n for n in names if n.startswith("validation/") and n.endswith("bits_per_byte")]
    train = [n for n in names if n.startswith("train/") and n.endswith("/loss") and n.count("/") >= 2]
    return plots(
        by_name(canvas, "Held-out bits per byte", "bits per byte", bits, "validation/"),
        by_name(canvas, "Training loss by source", "nats per token", train, "train/"),
    )


def by_name(canvas: Canvas, title: str, unit: str, names: list[str], prefix: str) -> str:
    """Returns one plot with a line per metric. For several runs, returns one plot per metric."""
    label = lambda name: name.removeprefix(prefix).rpartition("/")[0] or "all"
    plot = functools.partial(canvas.plot, unit=unit, focused=True)
    if not canvas.single:
        each = (plot(f"{title}: {label(name)}", with_points(canvas.lines(name))) for name in names[:MOST_LINES])
        return "".join(each)
    history = canvas.histories[0]
    known = sorted(
        {name.split("/")[1] for name in history.names() if is_of_source(name)}
    )  # colors as in the other plot
    color = lambda source: color_of(known.index(source)) if source in known else "all"
    lines = [PlotLine(label(name), *history.series(name), color(label(name))) for name in names[:MOST_LINES]]
    more = len(names) - MOST_LINES
    note = f"{more} more are in metrics.jsonl." if more > 0 else ""
    return plot(title, with_points(lines), note=note)


def position_metrics(histories: Sequence[History]) -> dict[str, str]:
    """Returns {range of context lengths, such as '513 to 1,024': metric} in increasing order."""
    names = dict.fromkeys(name for history in histories for name in history.names())
    found = sorted((int(match[1]), int(match[2]), name) for name in names if (match := POSITIONS.fullmatch(name)))
    return {f"{first:,}" if first == last else f"{first:,} to {last:,}": name for first, last, name in found}


def positions_section(canvas: Canvas) -> str:
    """Returns the losses by context length: a plot if there is one run, and a table; '' without data."""
    metrics = position_metrics(canvas.histories)
    if not metrics:
        return ""
    drawn = ""
    if canvas.single:
        history, shown = canvas.histories[0], list(metrics.items())[-MOST_RANGES:]
        lines = [PlotLine(words, *history.series(name), color_of(i)) for i, (words, name) in enumerate(shown)]
        title = "Validation loss by position in a document"
        drawn = canvas.plot(title, with_points(lines), unit="nats per token", focused=True)
    return plots(drawn, f"<div>{positions_table(canvas.histories, metrics)}</div>")


def positions_table(histories: Sequence[History], metrics: Mapping[str, str]) -> str:
    """Returns a table with one row per context length: first and newest loss of a run, or newest losses of all runs."""
    is_single, rows = len(histories) == 1, []
    for words, name in metrics.items():
        values = histories[0].series(name)[1] if is_single else [history.latest(name) for history in histories]
        rows.append([words, *(n(plain(value)) for value in (values[:1] + values[-1:] if is_single else values))])
    head = ["first", "newest"] if is_single else [history.name for history in histories]
    return table(["context tokens", *head], rows)


def optimizer(canvas: Canvas) -> str:
    """Returns plots of the gradient norm (dots are skipped steps), learning rate and loss scale."""
    lines = []
    for place, history in enumerate(canvas.histories):
        lines += canvas.lines_of(history, place, "grad_norm", "gradient norm" if canvas.single else "")
        skipped = [row for row in history.rows if row.get("skipped") and is_number(row.get("grad_norm"))]
        label = "skipped" if canvas.single else f"{history.name}, skipped"
        steps, norms = ([row[name] for row in skipped] for name in ("step", "grad_norm"))
        lines.append(PlotLine(label, steps, norms, "trouble", "dots"))
    note = not_finite(canvas, "grad_norm")
    scale_varies = any(len(set(history.series("train/loss_scale")[1])) > 1 for history in canvas.histories)
    return plots(
        canvas.plot("Gradient norm", lines, unit="before clipping", log=True, note=note),
        canvas.metric("learning_rate", "Learning rate", zero=True),
        canvas.metric("train/loss_scale", "Loss scale", log=True) if scale_varies else "",
    )


def speed(canvas: Canvas) -> str:
    """Returns plots of tokens/s, MFU, step time and data wait, and of the CPU use of other programs if it is high."""
    rate = canvas.lines("tokens_per_second", smoothed=True)
    mfu = canvas.metric("mfu", "MFU", "MFU", unit="of the chips' peak", numbers="percent", zero=True)
    drawn = [
        canvas.plot("Throughput", rate, unit="tokens/s", numbers="count", zero=True),
        mfu,
        canvas.metric("step_seconds", "Step time", numbers="seconds", zero=True),
        canvas.metric("data_wait_seconds", "Data wait", unit="of each step", numbers="seconds", zero=True),
    ]
    shares = [share for history in canvas.histories for share in history.series("host_other_share")[1]]
    if any(share >= OTHER_WORK for share in shares):
        settings = dict(unit="of the first host's CPUs", numbers="percent", zero=True)
        drawn.append(canvas.metric("host_other_share", "Other programs", "share", **settings))
    html = plots(*drawn)
    if html and not mfu:
        html += left_out("MFU is not shown: the peak FLOP/s of these devices is unknown (see kernels/hardware.py).")
    return html


def memory(canvas: Canvas) -> str:
    """Returns plots of device memory, host memory and other device metrics."""
    names = list(dict.fromkeys(name for h in canvas.histories for name in h.names()))
    lines = []
    for place, history in enumerate(canvas.histories):
        lines += canvas.lines_of(history, place, "device_peak_bytes", "peak")
        lines += canvas.lines_of(history, place + canvas.single, "device_bytes_in_use", "in use", IN_USE[canvas.single])
        lines += canvas.lines_of(history, place, "device_bytes_limit", "limit", "limit")
    is_known = any(line.steps for line in lines if line.style == "line")
    sizes = dict(numbers="size", zero=True)
    device = canvas.plot("Device memory", lines, unit="fullest device", marks=(), **sizes) if is_known else ""
    host = canvas.metric("host_peak_bytes", "Host memory", "peak", unit="first process, peak", **sizes)
    title = lambda name: name.removeprefix("device/").replace("_", " ").capitalize()
    others = [canvas.metric(name, title(name), zero=True) for name in names if name.startswith("device/")]
    drawn = plots(device, host, *others)
    if drawn and not device:
        drawn += left_out("Device memory is not shown: this platform does not report it.")
    return drawn


def goodput(canvas: Canvas) -> str:
    """Returns a plot of goodput, a table of time by activity, and a table of the starts by jaxscale supervise."""
    drawn = canvas.metric("goodput/fraction", "Goodput", unit="of each start", numbers="percent", zero=True)
    times, starts = goodput_table(canvas.histories), supervised_table(canvas.histories)
    if not (drawn or times or starts):
        return left_out("No goodput was recorded, and `jaxscale supervise` wrote no ledger.")
    table_cell = f"<div>{times}</div>" if canvas.single and times else ""  # one run's table is narrow
    return plots(drawn, table_cell) + ("" if table_cell else times) + starts


def layers(canvas: Canvas) -> str:
    """Returns plots of statistics by layer and group."""
    if len(canvas.histories) > MOST_LAYERED:
        return left_out(f"Layer statistics are shown for up to {MOST_LAYERED} runs. Make a page of fewer runs.")
    drawn = ""
    for history in canvas.histories:
        groups: dict[str, list[str]] = {}
        for name in history.names():
            if name.startswith("stats/"):
                groups.setdefault(name.split("/")[1], []).append(name)
        known = {name: (title, unit) for name, title, unit in STATISTICS}
        made = []
        for group, names in sorted(groups.items(), key=lambda item: [*known, item[0]].index(item[0])):
            title, unit = known.get(group, (group.replace("_", " ").capitalize(), ""))
            made.append(statistic(canvas, history, title, unit, f"stats/{group}/", names))
        heading = "" if canvas.single or not any(made) else f"<h3>{escape(history.name)}</h3>"
        drawn += heading + plots(*made)
    return drawn or left_out(
        "No layer statistics were recorded. Set --config.monitor.statistics_every_steps=100 to record them from the "
        "next start."
    )


def statistic(canvas: Canvas, history: History, title: str, unit: str, prefix: str, names: list[str]) -> str:
    """Returns one statistic of all layers or groups: as lines, or if there are many, as a heat map."""
    label = lambda name: f"layer {int(end)}" if (end := name.removeprefix(prefix)).isdecimal() else end  # such as '03'
    names = sorted(names, key=lambda name: (not label(name).startswith("layer "), label(name).rjust(12), label(name)))
    if len(names) >= HEAT_FROM:
        rows = [row for row in history.rows if any(name in row for name in names)]
        values = {label(name): [row.get(name) for row in rows] for name in names}
        return canvas.heat(HeatMap(title, unit, [row["step"] for row in rows], values))
    lines = [PlotLine(label(name), *history.series(name), color_of(i)) for i, name in enumerate(names)]
    return canvas.plot(title, lines, unit=unit, log=True)


def experts_section(canvas: Canvas) -> str:
    """Returns plots of expert metrics, or '' without experts. For few runs, also plots loads by layer and expert."""
    step_plots = [expert_plot(canvas, *metric) for metric in EXPERT_METRICS]
    counted = [(history, history.experts) for history in canvas.histories if history.experts is not None]
    if not counted:
        return plots(*step_plots) + (left_out(NO_COUNTS) if any(step_plots) else "")
    if len(counted) > MOST_LAYERED:
        note = f"Expert counts are shown for up to {MOST_LAYERED} runs with experts. Make a page of fewer runs."
        return plots(*step_plots) + left_out(note)
    tables = {history.name: [by_layer(canvas, found), canvas.heat(by_expert(found))] for history, found in counted}
    if canvas.single:
        return plots(*step_plots, *tables[canvas.histories[0].name])
    return plots(*step_plots) + "".join(f"<h3>{escape(name)}</h3>{plots(*both)}" for name, both in tables.items())


def expert_plot(canvas: Canvas, title: str, unit: str, metrics: tuple[tuple[str, str], ...]) -> str:
    """Returns a plot with one line per metric. For several runs, plots only the first metric of each run."""
    if not canvas.single:
        return canvas.metric(f"train/{metrics[0][0]}", title, unit=unit)
    history: History = canvas.histories[0]
    lines = [PlotLine(label, *history.series(f"train/{name}"), color_of(i)) for i, (name, label) in enumerate(metrics)]
    return canvas.plot(title, lines, unit=unit, zero=True)


def by_layer(canvas: Canvas, counts: ExpertCounts) -> str:
    """Returns a plot of the load of the busiest expert in each layer, over windows of steps."""
    steps = [window.step for window in counts.windows]
    rows = {f"layer {layer}": [w.busiest[i] for w in counts.windows] for i, layer in enumerate(counts.layers)}
    title = "Busiest expert by layer"
    if len(rows) >= HEAT_FROM:
        return canvas.heat(HeatMap(title, OVER_MEAN, steps, rows, scale=FROM_EVEN))
    lines = []
    for place, (name, row) in enumerate(rows.items()):
        known = [(step, value) for step, value in zip(steps, row) if value is not None]
        lines.append(PlotLine(name, [step for step, _ in known], [value for _, value in known], color_of(place)))
    return canvas.plot(title, lines, unit=OVER_MEAN, zero=True, full_width=True)


def by_expert(counts: ExpertCounts) -> HeatMap:
    """Returns a heat map of the load of each expert and layer in the newest window of steps."""
    mean = lambda layer_counts: sum(layer_counts) / len(layer_counts) or 1.0
    rows = {
        f"layer {layer}": [count / mean(layer_counts) for count in layer_counts]
        for layer, layer_counts in zip(counts.layers, counts.counts, strict=True)
    }
    step, steps = counts.newest.step, counts.newest.steps
    title = f"Tokens per expert in steps {step - steps + 1:,} to {step:,}"
    idle = [
        f"{expert} of layer {layer}"
        for layer, layer_counts in zip(counts.layers, counts.counts, strict=True)
        for expert, count in enumerate(layer_counts)
        if count == 0
    ]
    more = f" and {len(idle) - MOST_NAMED:,} more" if len(idle) > MOST_NAMED else ""
    note = f"{units.plural(len(idle), 'expert')} without tokens: {', '.join(idle[:MOST_NAMED])}{more}." if idle else ""
    experts = range(len(counts.counts[0]))
    return HeatMap(title, OVER_MEAN, experts, rows, AROUND_EVEN, across="expert", empty="no token", note=note)
