"""One frame of `jaxscale watch`: pure functions from the history of a run to lines of text."""

import datetime
import math
import statistics
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.kernels.hardware import find_chip
from jaxscale.runtime.monitor.console import format_number
from jaxscale.runtime.monitor.goodput import measure_goodput, unix_time
from jaxscale.runtime.monitor.history import History, is_finite
from jaxscale.runtime.monitor.json_lines import as_dict
from jaxscale.system.redact import shown
from jaxscale.tools.reporting.event_text import incidents
from jaxscale.tools.reporting.status import status_of

LEAST_WIDTH, LEAST_HEIGHT = 80, 24
LABEL = 12  # columns
BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = "_.-~=+*#"
EXPERTS = {  # metrics of a mixture of experts
    "experts_busiest": "busiest {:.3g} times the mean".format,
    "experts_effective": "effective {:.3g}".format,
    "experts_dead": "dead {:.0f}".format,
    "expert_rounds": "rounds {:.0f}".format,
}
STATES = {"running": "green", "finished": "green", "silent": "red", "failed": "red"}  # other states are yellow


class Line(NamedTuple):
    """Text and the name of its colour, '' for the default."""

    text: str
    colour: str = ""


def frame(run: History, now: float, width: int, height: int, *, unicode: bool = True) -> list[Line]:
    """Returns at most `height` lines of at most `width` columns. now: seconds since 1970."""
    training = [row for row in run.rows if "loss" in row]
    status = status_of(run, now)
    eta = status.left_seconds if status.state.name in ("running", "starting") else None
    room = max(8, width - LABEL - 42)
    lines = [
        Line(
            both_ends(f"jaxscale watch  {run.workdir}", status.state.words, width),
            STATES.get(status.state.name, "yellow"),
        ),
        Line(run_line(run.config)),
        Line(bar(status.step, status.total_steps or 0, eta, width, unicode=unicode)),
        Line(""),
        *curves(training, run.rows, room, unicode=unicode),
        *machine(training),
        *goodput_lines(run, now if status.state.name == "silent" else None, width),
        Line(""),
    ]
    left = height - len(lines) - len(run.problems)
    lines += event_lines(run.events, max(left, 1), now)
    lines += [Line(problem, "red") for problem in run.problems]
    return [Line(cut(shown(line.text).replace("\n", " "), width), line.colour) for line in lines[:height]]


def run_line(config: Mapping[str, Any]) -> str:
    """Returns text such as 'llama (12 layers), 8 x TPU v5p'."""
    devices, model = as_dict(config.get("devices")), as_dict(as_dict(config.get("config")).get("model"))
    if not devices:
        return "no config.json yet"
    sizes = ", ".join(f"{model[name]} {words}" for name, words in SIZES.items() if model.get(name))
    chip = find_chip(str(devices.get("kind") or "?"))
    kind = chip.name if chip else devices.get("kind", "?")
    return f"{model.get('name', '?')} ({sizes}), {devices.get('number', '?')} x {kind}"


SIZES = {"num_layers": "layers", "embed_dim": "wide"}


def bar(step: int, total: float, eta: float | None, width: int, *, unicode: bool) -> str:
    """Returns text such as ' 51% ██████····  step 10,200 of 20,000  eta 3h12m'."""
    done = min(max(step / total, 0.0), 1.0) if total else 0.0
    label = f"step {step:,} of {total:,}" if total else f"step {step:,}"
    label += "" if eta is None else f"  eta {units.duration(eta)}"
    columns = max(10, width - len(label) - 8)
    full, empty = ("█", "·") if unicode else ("#", ".")
    filled = int(done * columns)
    return f"{done:4.0%} {full * filled}{empty * (columns - filled)}  {label}"


def curves(training: Sequence[Mapping], records: Sequence[Mapping], room: int, *, unicode: bool) -> list[Line]:
    """Returns lines of loss, validation, gradient norm, learning rate and throughput: last value, curve, range."""
    last = training[-1] if training else {}
    lines = [curve("loss", [r.get("loss") for r in training], room, unicode=unicode, alarm=last.get("loss") is None)]
    validation = [record for record in records if "validation/loss" in record]
    where = f"at step {validation[-1].get('step')}" if validation else ""
    lines.append(curve("validation", [r["validation/loss"] for r in validation], room, unicode=unicode, note=where))
    lines.append(curve("grad norm", [r.get("grad_norm") for r in training], room, unicode=unicode))
    rate = lambda value: f"{value:.2e}"
    lines.append(
        curve("learn. rate", [r.get("learning_rate") for r in training], room, unicode=unicode, format_value=rate)
    )
    lines.append(
        curve(
            "tokens/s", [r.get("tokens_per_second") for r in training], room, unicode=unicode, format_value=units.count
        )
    )
    if skipped := last.get("skipped_total"):
        lines.append(Line(f"{'refused':<{LABEL}}{int(skipped)} steps of this run", "yellow"))
    return lines if training or validation else [Line("no metrics yet")]


def curve(
    label: str,
    values: Sequence[Any],
    room: int,
    *,
    unicode: bool,
    format_value: Any = format_number,
    note: str = "",
    alarm=False,
) -> Line:
    """Returns text such as 'loss        2.314      ▇▆▅▄▃▂▁  2.31 to 4.16'."""
    numbers = [value for value in values if is_finite(value)]
    if not numbers:
        return Line(f"{label:<{LABEL}}n/a")
    newest = next((value for value in reversed(values) if is_finite(value)), None)
    shown_value = "not finite" if alarm and values[-1] is None else format_value(newest)
    note = note or f"{format_value(min(numbers))} to {format_value(max(numbers))}"
    line = f"{label:<{LABEL}}{shown_value:<11} {sparkline(values, room, unicode=unicode):<{room}}  {note}"
    return Line(line, "red" if shown_value == "not finite" else "")


def sparkline(values: Sequence[Any], room: int, *, unicode: bool = True) -> str:
    """Returns block characters for the means of `room` equal parts of the values; spaces for parts without numbers."""
    blocks = BLOCKS if unicode else PLAIN_BLOCKS
    columns = min(room, len(values))
    edges = [round(column * len(values) / columns) for column in range(columns + 1)] if columns else []
    parts = [[value for value in values[a:b] if is_finite(value)] for a, b in zip(edges, edges[1:])]
    means = [statistics.fmean(part) if part else None for part in parts]
    known = [mean for mean in means if mean is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    top = len(blocks) - 1
    level = lambda mean: 0 if not (span > 0 and math.isfinite(span)) else min(top, int((mean - low) / span * (top + 1)))
    return "".join(" " if mean is None else blocks[level(mean)] for mean in means)


def machine(training: Sequence[Mapping]) -> list[Line]:
    """Returns lines of step time, MFU, wait for data, experts, memory and device metrics."""
    last = training[-1] if training else {}
    if not last:
        return []
    seconds, wait, mfu = (newest_of(training, name) for name in ("step_seconds", "data_wait_seconds", "mfu"))
    parts = [f"{seconds:.3g} s" if seconds else "n/a", f"MFU {mfu:.1%}" if mfu else "MFU n/a"]
    if seconds and wait is not None:
        parts.append(f"waits for data {wait / seconds:.1%}")
    lines = [Line(f"{'step':<{LABEL}}{'  '.join(parts)}")]
    lines += numbers_line("experts", last, "train/", EXPERTS)
    used, limit, host = (last.get(f"{name}") for name in ("device_peak_bytes", "device_bytes_limit", "host_peak_bytes"))
    memory = [f"host {units.size(host)}"] if host else []
    if used:
        memory.append(f"device {units.size(used)}" + (f" of {units.size(limit)} ({used / limit:.0%})" if limit else ""))
    lines.append(Line(f"{'peak memory':<{LABEL}}{'  '.join(memory) or 'n/a'}"))
    formats = {
        "utilisation": lambda v: f"busy {v:.0%}",
        "power_watts": lambda v: f"{v:.0f} W",
        "temperature_c": "{:.0f} C".format,
    }
    return lines + numbers_line("device", last, "device/", formats)


def numbers_line(label: str, last: Mapping, prefix: str, formats: Mapping[str, Callable[[float], str]]) -> list[Line]:
    """Returns one line with the finite numbers of a record, [] without any."""
    parts = [
        format_value(last[prefix + name])
        for name, format_value in formats.items()
        if is_finite(last.get(prefix + name))
    ]
    return [Line(f"{label:<{LABEL}}{'  '.join(parts)}")] if parts else []


def goodput_lines(run: History, now: float | None, width: int) -> list[Line]:
    """Returns text such as 'goodput     91.2% of 3d04h  compile 2%  save 1%', over all starts."""
    goodput = measure_goodput(run.rows, run.events, now)
    if goodput.fraction is None:
        return []
    wall = goodput.wall_seconds
    overheads = [
        f"{kind} {seconds / wall:.1%}"
        for kind, seconds in sorted(goodput.seconds.items(), key=lambda item: -item[1])
        if kind != "step" and seconds / wall >= 0.001
    ]
    starts = f", {goodput.starts} starts" if goodput.starts > 1 else ""
    starts += f", {units.plural(goodput.rewinds, 'rewind')}" if goodput.rewinds else ""
    first = f"{'goodput':<{LABEL}}{goodput.fraction:.1%} of {units.duration(wall)}{starts}"
    while overheads and LABEL + len("  ".join(overheads)) > width:
        overheads.pop()  # the smallest
    return [Line(first), Line(" " * LABEL + "  ".join(overheads))]


def event_lines(events: Sequence[Mapping[str, Any]], most: int, now: float) -> list[Line]:
    """Returns lines such as '12:01:33  step 200: checkpoint saved, 1.2s' of the newest events, dated for other days."""
    found, today = [], datetime.datetime.fromtimestamp(now).date()
    for event in events[-most:]:
        when = unix_time(event.get("time"))
        local = None if when is None else datetime.datetime.fromtimestamp(when)
        form = "%H:%M:%S" if local is None or local.date() == today else "%Y-%m-%d %H:%M"
        clock = "??:??:??" if local is None else local.strftime(form)
        (incident,), _ = incidents([event])
        step = f"step {incident.step}: " if incident.step else ""
        found.append(Line(f"{clock}  {step}{incident.what}", "red" if incident.is_trouble else ""))
    return found


def newest_of(records: Sequence[Mapping], name: str) -> Any:
    """Returns the newest number of this name among the last five records, or None."""
    return next((r[name] for r in reversed(records[-5:]) if is_finite(r.get(name))), None)


def both_ends(left: str, right: str, width: int) -> str:
    """Returns a line with a text at each end; the left one is cut if they do not fit."""
    room = max(0, width - columns_of(right) - 2)
    left = cut(shown(left), room)
    return left + " " * (width - columns_of(left) - columns_of(right)) + right


def cut(text: str, width: int) -> str:
    """Returns the text, cut to `width` columns."""
    used = 0
    for number, character in enumerate(text):
        used += columns_of(character)
        if used > width:
            return text[:number]
    return text


def columns_of(text: str) -> int:
    """Returns the terminal columns of a text: two for wide characters, none for combining ones."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
