"""The plots of the page, section by section."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from jaxscale import units
from jaxscale.runtime.monitor.health.speed_rules import OTHER_WORK
from jaxscale.runtime.monitor.history import History, is_number
from jaxscale.tools.reporting.canvas import Canvas, group_by, history_label, plots, tokens_per_step
from jaxscale.tools.reporting.evals import evals_section
from jaxscale.tools.reporting.expert_figures import HEAT_FROM, MOST_LAYERED, experts_section
from jaxscale.tools.reporting.heat import HeatMap
from jaxscale.tools.reporting.page_tables import goodput_table, left_out, supervised_table
from jaxscale.tools.reporting.page_text import escape
from jaxscale.tools.reporting.plots import Band, Line, Plot, color_of, with_points
from jaxscale.tools.reporting.positions import positions_section
from jaxscale.tools.reporting.sources import data_table, is_of_source

IN_USE = ("faint", "line")  # of several runs, of one, which has a colour for it
MOST_LINES = 12  # in one plot of a page of one run
STATISTICS = (
    ("activation_rms", "Activations", "root mean square"),
    ("attention_rms", "What attention adds", "root mean square"),
    ("mlp_rms", "What the MLP adds", "root mean square"),
    ("attention_logit_max", "Largest attention logit", ""),
    ("attention_logit_bound", "Bound of the largest attention logit", "max|q| max|k|"),
    ("grad_norm", "Gradient norm by group", ""),
    ("zero_grad", "Parameters whose gradient is exactly zero", ""),
    ("update_ratio", "Update-to-weight ratio by group", ""),
    ("update_norm", "Norm of the update by group", ""),
    ("weight_norm", "Norm of the weights by group", ""),
)


class Section(NamedTuple):
    """A part of the page."""

    id: str
    title: str
    html: str


def plot_sections(canvas: Canvas) -> list[Section]:
    """The sections that have something to show, in order."""
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
    """Train and validation loss, with the forecast where there is one; of several runs each has a plot."""
    train, validation, bands = [], [], []
    for place, history in enumerate(canvas.histories):
        name = "train" if canvas.single else ""
        train += canvas.lines_of(history, place, "loss", name, smoothed=True)
        other, name, style = (place + 1, "validation", "dash") if canvas.single else (place, "", "line")
        validation += with_points(canvas.lines_of(history, other, "validation/loss", name, style))
        bands += forecast_of(history, canvas.single)
    smoothed = any(line.style == "faint" for line in train)
    notes = ["Bold: the mean over a fortieth of the reports; faint: every one."] if smoothed else []
    note = " ".join([*notes, *not_finite(canvas, "loss")])
    until = max((band.steps[-1] for band in bands), default=None)
    plot = functools.partial(
        Plot, unit="nats per token", bands=bands, marks=canvas.marks(), full_width=True, focused=True, until=until
    )
    if canvas.single:
        drawn = [plot(title="Loss", lines=abandoned_first([*train, *validation]), note=note, explained=True)]
    else:
        drawn = [
            plot(title="Training loss", lines=abandoned_first(train), note=note, explained=True),
            plot(title="Validation loss", lines=abandoned_first(validation)),
        ]
    return plots(*map(canvas.add, drawn)) or left_out("No loss has been reported yet.")


def not_finite(canvas: Canvas, name: str) -> list[str]:
    """Notes about reports without a point, because their value was not finite."""
    count = sum(name in row.get("nonfinite", ()) for h in canvas.histories for row in h.rows)
    return [f"{units.plural(count, 'report')} had a value that is not finite, and no point here."] if count else []


def abandoned_first(lines: list[Line]) -> list[Line]:
    """Sorts abandoned lines first, so that they are drawn below the others."""
    return sorted(lines, key=lambda line: line.style != "gone")


def forecast_of(history: History, single: bool) -> list[Band]:
    """The forecast as a band over steps; only the one of a page of one run needs no name."""
    each = tokens_per_step(history)
    if history.forecast is None or not each:
        return []
    steps = [tokens / each for tokens in history.forecast["tokens"]]
    label = "forecast" if single else history_label(history, "forecast")
    return [Band(label, steps, history.forecast["low"], history.forecast["high"])]


def sources(canvas: Canvas) -> str:
    """Held-out bits per byte and training loss of each source."""
    names = list(dict.fromkeys(name for h in canvas.histories for name in h.names()))
    bits = [n for n in names if n.startswith("validation/") and n.endswith("bits_per_byte")]
    train = [n for n in names if n.startswith("train/") and n.endswith("/loss") and n.count("/") >= 2]
    return plots(
        by_name(canvas, "Held-out bits per byte", "bits per byte", bits, "validation/"),
        by_name(canvas, "Training loss by source", "nats per token", train, "train/"),
    )


def by_name(canvas: Canvas, title: str, unit: str, names: list[str], prefix: str) -> str:
    """One plot with a line for each metric; for several runs one plot for each metric."""
    label = lambda name: name.removeprefix(prefix).rpartition("/")[0] or "all"
    if not canvas.single:
        return "".join(
            canvas.add(
                Plot(
                    title=f"{title}: {label(name)}",
                    unit=unit,
                    lines=with_points(
                        [line for i, h in enumerate(canvas.histories) for line in canvas.lines_of(h, i, name)]
                    ),
                    focused=True,
                )
            )
            for name in names[:MOST_LINES]
        )
    history = canvas.histories[0]
    lines = []
    known = sorted({name.split("/")[1] for name in history.names() if is_of_source(name)})  # as in the other plot
    for name in names[:MOST_LINES]:
        color = color_of(known.index(label(name))) if label(name) in known else "all"
        lines.append(Line(label(name), *history.series(name), color))
    more = len(names) - MOST_LINES
    note = f"{more} more are in metrics.jsonl." if more > 0 else ""
    lines = with_points(lines)
    return canvas.add(Plot(title=title, unit=unit, lines=lines, marks=canvas.marks(), note=note, focused=True))


def optimizer(canvas: Canvas) -> str:
    """Gradient norm, with skipped steps as dots, and learning rate."""
    lines = []
    for place, history in enumerate(canvas.histories):
        lines += canvas.lines_of(history, place, "grad_norm", "gradient norm" if canvas.single else "")
        skipped = [row for row in history.rows if row.get("skipped") and is_number(row.get("grad_norm"))]
        label = "not applied" if canvas.single else f"{history.name}, not applied"
        lines.append(Line(label, [r["step"] for r in skipped], [r["grad_norm"] for r in skipped], "trouble", "dots"))
    note = " ".join(not_finite(canvas, "grad_norm"))
    return plots(
        canvas.add(
            Plot(title="Gradient norm", unit="before clipping", lines=lines, log=True, marks=canvas.marks(), note=note)
        ),
        canvas.metric("learning_rate", "Learning rate", zero=True),
        canvas.metric("train/loss_scale", "Loss scale", log=True) if varies(canvas, "train/loss_scale") else "",
    )


def varies(canvas: Canvas, name: str) -> bool:
    """True if the metric takes more than one value."""
    return any(len(set(history.series(name)[1])) > 1 for history in canvas.histories)


def speed(canvas: Canvas) -> str:
    """Tokens per second, MFU, the time of a step and of waiting for data."""
    rate = [
        line
        for place, history in enumerate(canvas.histories)
        for line in canvas.lines_of(history, place, "tokens_per_second", smoothed=True)
    ]
    mfu = canvas.metric("mfu", "MFU", "MFU", unit="of the chips' peak", numbers="percent", zero=True)
    drawn = plots(
        canvas.add(
            Plot(title="Throughput", unit="tokens/s", lines=rate, numbers="count", zero=True, marks=canvas.marks())
        ),
        mfu,
        canvas.metric("step_seconds", "Time of a step", numbers="seconds", zero=True),
        canvas.metric("data_wait_seconds", "Wait for data", unit="of each step", numbers="seconds", zero=True),
        other_work(canvas),
    )
    if drawn and not mfu:
        drawn += left_out(
            "MFU is not shown: the peak of these devices is not known (kernels/hardware.py has the chips)."
        )
    return drawn


def other_work(canvas: Canvas) -> str:
    """CPU share of other programs on the first host, if it was ever large."""
    shares = [share for history in canvas.histories for share in history.series("host_other_share")[1]]
    if not any(share >= OTHER_WORK for share in shares):
        return ""
    unit = "of the first host's processors"
    return canvas.metric("host_other_share", "Other programs", "share", unit=unit, numbers="percent", zero=True)


def memory(canvas: Canvas) -> str:
    """Peaks of device and host memory, and what the devices say of themselves."""
    names = list(dict.fromkeys(name for h in canvas.histories for name in h.names()))
    lines = []
    for place, history in enumerate(canvas.histories):
        lines += canvas.lines_of(history, place, "device_peak_bytes", "peak")
        lines += canvas.lines_of(history, place + canvas.single, "device_bytes_in_use", "in use", IN_USE[canvas.single])
        lines += canvas.lines_of(history, place, "device_bytes_limit", "limit", "limit")
    device = canvas.add(
        Plot(title="Device memory", unit="fullest device", lines=lines, numbers="size", zero=True)
        if any(line.steps for line in lines if line.style == "line")
        else Plot(title="", lines=())
    )
    host = canvas.metric(
        "host_peak_bytes", "Host memory", "peak", unit="first process, peak", numbers="size", zero=True
    )
    others = [
        canvas.metric(name, name.removeprefix("device/").replace("_", " ").capitalize(), zero=True)
        for name in names
        if name.startswith("device/")
    ]
    drawn = plots(device, host, *others)
    if drawn and not device:
        drawn += left_out("Device memory is not shown: this platform does not report it.")
    return drawn


def goodput(canvas: Canvas) -> str:
    """Goodput and the time by kind."""
    drawn = canvas.metric("goodput/fraction", "Goodput", unit="of each start", numbers="percent", zero=True)
    times, starts = goodput_table(canvas.histories), supervised_table(canvas.histories)
    if not (drawn or times or starts):
        return left_out("No goodput was recorded, and there is no ledger of `jaxscale supervise`.")
    table_cell = f"<div>{times}</div>" if canvas.single and times else ""  # one run's table is narrow
    return plots(drawn, table_cell) + ("" if table_cell else times) + starts


def layers(canvas: Canvas) -> str:
    """Statistics of layers and groups: a heat map where there are many, else lines."""
    drawn = ""
    for history in canvas.histories if len(canvas.histories) <= MOST_LAYERED else ():
        groups = group_by(history.names(), "stats/", lambda suffix: suffix.partition("/")[0])
        known = {name: (title, unit) for name, title, unit in STATISTICS}
        made = []
        for group, names in sorted(groups.items(), key=lambda item: [*known, item[0]].index(item[0])):
            title, unit = known.get(group, (group.replace("_", " ").capitalize(), ""))
            made.append(statistic(canvas, history, title, unit, f"stats/{group}/", names))
        heading = "" if canvas.single or not any(made) else f"<h3>{escape(history.name)}</h3>"
        drawn += heading + plots(*made)
    if len(canvas.histories) > MOST_LAYERED:
        return left_out(f"The layers are on the page of each run alone: here are more than {MOST_LAYERED} runs.")
    return drawn or left_out(
        "Statistics of the layers were not recorded: --config.monitor.statistics_every_steps=100 writes them from the "
        "next start on."
    )


def statistic(canvas: Canvas, history: History, title: str, unit: str, prefix: str, names: list[str]) -> str:
    """One statistic of all layers or groups."""
    label = lambda name: layer_label(name.removeprefix(prefix))
    names = sorted(names, key=lambda name: (not label(name).startswith("layer "), label(name).rjust(12), label(name)))
    if len(names) >= HEAT_FROM:
        rows = [row for row in history.rows if any(name in row for name in names)]
        values = {label(name): [row.get(name) for row in rows] for name in names}
        return canvas.add(HeatMap(title, unit, [row["step"] for row in rows], values))
    lines = [Line(label(name), *history.series(name), color_of(i)) for i, name in enumerate(names)]
    return canvas.add(Plot(title=title, unit=unit, lines=lines, log=True, marks=canvas.marks()))


def layer_label(name: str) -> str:
    """Returns 'layer 3' for '03', else the name."""
    return f"layer {int(name)}" if name.isdecimal() else name
