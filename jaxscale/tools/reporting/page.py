"""The report page: header, sections and content security policy."""

import dataclasses
import importlib.resources
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale import schema
from jaxscale.runtime.monitor.history import History
from jaxscale.runtime.monitor.run_files import as_list
from jaxscale.tools.reporting.canvas import Canvas, step_axis, tokens_per_step
from jaxscale.tools.reporting.evals import eval_plots, eval_table
from jaxscale.tools.reporting.event_text import described
from jaxscale.tools.reporting.page_tables import (
    Cell,
    change_table,
    difference_table,
    incident_table,
    left_out,
    mono,
    n,
    run_name,
    table,
)
from jaxscale.tools.reporting.page_text import clock, count, duration, escape, json_block, money, percent, plain
from jaxscale.tools.reporting.sections import Section, plot_sections
from jaxscale.tools.reporting.status import Status, cost_fact, price_words, status_of

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
MOST_OPEN = 4  # with more runs, samples and incidents are folded
SERVED = "; connect-src 'self'"  # a page of --serve asks its server if there is a newer version


def make_page(
    histories: Sequence[History], *, price: float | None = None, now: float | None = None, version: str | None = None
) -> str:
    """Returns an HTML page on one or more runs. price: dollars per chip-hour. version: id of a served page."""
    now = time.time() if now is None else now
    histories = with_unique_names(histories)
    canvas = Canvas(histories, step_axis(histories))
    statuses = [status_of(history, now, price) for history in histories]
    sections = plot_sections(canvas)
    if not canvas.single:
        sections.insert(0, Section("settings", "Settings that differ", differences(histories)))
    sections.append(Section("samples", "Samples", per_run(histories, samples)))
    if canvas.single:
        sections.append(Section("settings", "Settings", settings(histories[0])))
    no_log = left_out("events.jsonl is missing or empty.")
    log = per_run(histories, lambda history: incident_table(history) or no_log)
    sections.append(Section("log", "Incident log", log))
    head = run_header(histories[0], statuses[0]) if canvas.single else runs_header(histories, statuses)
    title = ", ".join(history.name for history in histories)
    data = {"plots": canvas.data, "version": version}
    return whole_page(title, head, sections, footer(now, "jaxscale report"), data, problem_list(histories))


def make_evals_page(history: History, *, now: float | None = None) -> str:
    """Returns an HTML page with the evaluations of a run's checkpoints."""
    canvas = Canvas([history], step_axis([history]))
    sections = [Section("evals", "Evaluations", eval_plots(canvas)), Section("numbers", "Numbers", eval_table(history))]
    sections = [section for section in sections if section.html]
    head = f'<div class="top"><h1>{escape(history.name)}</h1></div><p class="sub">{escape(history.workdir)}</p>'
    made = footer(time.time() if now is None else now, "jaxscale evaluate")
    return whole_page(history.name, head, sections, made, {"plots": canvas.data}, problem_list([history]))


def whole_page(
    title: str, head: str, sections: Sequence[Section], end: str, data: Mapping[str, Any] | None, problem_list: str = ""
) -> str:
    """Returns an HTML page. data: data for page.js, or None for a page without scripts. problem_list: HTML."""
    links = "".join(f'<a href="#{section.id}">{escape(section.title)}</a>' for section in sections)
    body = "".join(f'<section><h2 id="{s.id}">{escape(s.title)}</h2>{s.html}</section>' for s in sections)
    policy = POLICY + (SERVED if data and data.get("version") else "")
    asset = lambda name: importlib.resources.files("jaxscale.tools.reporting").joinpath(name).read_text("utf-8")
    script = "" if data is None else (
        '<button id="reset" type="button" hidden>Show the whole run</button>'
        f'<script id="plot-data" type="application/json">{json_block(data)}</script>'
        f"<script>{asset('page.js')}</script>"
    )  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape(title)}</title><style>{asset('page.css')}</style></head><body>"
        f"<header>{head}<nav>{links}</nav>{problem_list}</header><main>{body}</main>"
        f"<footer>{escape(end)}</footer>{script}</body></html>\n"
    )


def with_unique_names(histories: Sequence[History]) -> list[History]:
    """Returns the runs. If folders have the same name, their runs are labelled with the full path."""
    names = [history.name for history in histories]
    return [
        dataclasses.replace(history, label=history.workdir) if names.count(history.name) > 1 else history
        for history in histories
    ]


def footer(now: float, by: str) -> str:
    """Returns the footer text: creation time, command and help about plots."""
    return (
        f"Created {clock(now)} by {by}. Drag across a plot to zoom in, double-click to zoom out; "
        "keyboard: arrows, + and -, Escape."
    )


def problem_list(histories: Sequence[History]) -> str:
    """Returns a list of missing or skipped data as HTML."""
    lines = [(history.name, problem) for history in histories for problem in history.problems]
    items = "".join(f"<li>{escape(f'{name}: {line}' if len(histories) > 1 else line)}</li>" for name, line in lines)
    return f'<ul class="told">{items}</ul>' if items else ""


def run_header(history: History, status: Status) -> str:
    """Returns the header of a single run as HTML, with its name, state and main metrics."""
    chips = f"{plain(status.chips)} x {status.chip}" if status.chips else ""
    parts = [str(history.part("config", "model").get("name") or ""), chips, history.workdir]
    done = status.step / status.total_steps if status.total_steps else None
    bar = f'<div class="bar"><i style="width:{100 * min(done, 1):.2f}%"></i></div>' if done is not None else ""
    words, speed, bits = status.state.sentence, status.tokens_per_second, history.latest("validation/bits_per_byte")
    starts = "in one start" if status.starts == 1 else f"in {status.starts} starts"
    facts = [
        ("step", f"{status.step:,}", f"of {status.total_steps:,} ({percent(done)})" if done is not None else ""),
        ("loss", plain(status.loss), "nats per token, latest"),
        ("validation loss", plain(status.validation_loss), f"{plain(bits)} bits per byte" if bits is not None else ""),
        ("tokens", count(status.tokens), f"{count(speed)} per second recently" if speed is not None else ""),
        ("time", duration(status.wall_seconds), starts if status.starts else "sum of step times"),
    ]
    if status.state.name != "finished":
        facts.append(("remaining", duration(status.left_seconds), "at the recent speed"))
    if status.mfu is not None:
        facts.append(("MFU", percent(status.mfu), "recent"))
    facts.append(cost_fact(status))
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in facts
        if value != "n/a" or name in ("step", "loss")
    )
    return (
        f'<div class="top"><h1>{escape(history.name)}</h1>'
        f'<span class="state {status.state.name}">{escape(status.state.name)}</span></div>'
        f'<p class="sub">{escape(" · ".join(part for part in parts if part))}</p>'
        f'<p class="sub">{escape(words[:1].upper() + words[1:] + ("" if words.endswith(".") else "."))}</p>{bar}'
        f'<dl class="facts">{items}</dl>{fine_print([status])}'
    )


def fine_print(statuses: Sequence[Status]) -> str:
    """Returns the prices that the costs are based on as HTML."""
    return f'<p class="fine">{escape(words)}</p>' if (words := price_words(statuses)) else ""


def runs_header(histories: Sequence[History], statuses: Sequence[Status]) -> str:
    """Returns the header of several runs as HTML, with one table row per run."""
    has_cost = any(status.cost is not None for status in statuses)
    rows = []
    for place, (history, s) in enumerate(zip(histories, statuses)):
        cells = [
            run_name(history, place),
            Cell(f'<span class="state {s.state.name}">{escape(s.state.name)}</span>'),
            n(f"{s.step:,}"), n(f"{s.total_steps:,}" if s.total_steps else "n/a"), n(plain(s.loss)),
            n(plain(s.validation_loss)), n(count(s.tokens)), n(count(s.tokens_per_second)), n(percent(s.mfu)),
            n(duration(s.wall_seconds)), n("" if s.state.name == "finished" else duration(s.left_seconds)),
        ]  # fmt: skip
        rows.append([*cells, *([n(money(s.cost)), n(money(s.cost_to_end))] if has_cost else [])])
    head = ["run", "state", "step", "of", "loss", "validation", "tokens", "tokens/s", "MFU", "time", "remaining"]
    head += ["cost", "cost at the end"] if has_cost else []
    return f'<div class="top"><h1>{len(histories)} runs</h1></div>{table(head, rows)}{fine_print(statuses)}'


def differences(histories: Sequence[History]) -> str:
    """Returns a table of the settings that differ between runs."""
    each = {tokens for history in histories if (tokens := tokens_per_step(history))}
    note = "The runs differ in tokens per step (batch_tokens), but the plots are over steps."
    return difference_table(histories) + (left_out(note) if len(each) > 1 else "")


def per_run(histories: Sequence[History], make) -> str:
    """Returns the HTML of make() for each run. Several runs have headings, and many runs are collapsed."""
    if len(histories) == 1:
        return make(histories[0])
    named = [(run_name(history, place).html, make(history)) for place, history in enumerate(histories)]
    if len(histories) > MOST_OPEN:
        return "".join(f"<details><summary>{name}</summary>{part}</details>" for name, part in named)
    return "".join(f"<h3>{name}</h3>{part}" for name, part in named)


def samples(history: History) -> str:
    """Returns the generated texts as HTML, newest first."""
    title = lambda sample: f"step {sample.step:,}" if sample.step is not None else "at the end of the run"
    found = [f"<h3>{escape(title(s))}</h3><pre>{escape(s.text)}</pre>" for s in reversed(history.samples)]
    if not found:
        return left_out(
            "No samples yet. One is written at the end of the run (sample.num_tokens), and every sample.every_steps "
            "steps if that is set."
        )
    older = f"<details><summary>{len(found) - 3} older</summary>{''.join(found[3:])}</details>"
    return "".join(found[:3]) + (older if len(found) > 3 else "")


def settings(history: History) -> str:
    """Returns versions, ancestry, changed settings and all settings as HTML."""
    config = history.config
    versions = {name: version for name, version in history.part("versions").items() if version}
    facts = [("git commit", config.get("git_commit")), ("versions", described(versions))]
    for ancestor in as_list(config.get("ancestry")):
        if isinstance(ancestor, dict):
            made = f", upcycled to experts ({ancestor['upcycled']})" if ancestor.get("upcycled") else ""
            what = "branch of" if ancestor.get("what") == "run" else "weights from"
            facts.append((what, f"{ancestor.get('path')}, step {ancestor.get('step')}{made}"))
    peak = history.part("peak")
    if peak.get("name"):
        facts.append(("MFU relative to", f"{peak.get('name')}: {peak.get('source')}"))
    if history.part("config").get("model", {}).get("experts"):
        facts.append(("FLOPs and MFU", "count the active parameters; memory counts all"))
    parts = [table(("environment", ""), [(name, Cell(escape(value), "mono")) for name, value in facts if value])]
    changes = change_table(history)
    unchanged = left_out("No setting changed during the run.")
    parts.append(f"<h3>Settings changed during the run</h3>{changes}" if changes else unchanged)
    if every := history.part("config"):
        rows = [(mono(name), mono(value)) for name, value in schema.flatten(every).items()]
        all_settings = table(("setting", "value"), rows)
        parts.append(f"<details><summary>All settings</summary>{all_settings}</details>")
    return "".join(parts)
