"""Tables of the report page: time by activity, settings and their changes, and incidents."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxscale import schema, units
from jaxscale.runtime.monitor.goodput import measure_goodput
from jaxscale.runtime.monitor.history import History, is_number
from jaxscale.runtime.monitor.run_files import as_list
from jaxscale.tools.reporting.event_text import described, incidents
from jaxscale.tools.reporting.page_text import escape, percent
from jaxscale.tools.reporting.plots import color_of, key

MOST_CHANGES = 200
MOST_COLUMNS = 6  # with more runs, each run is a row
MISSING = object()
KIND_WORDS = {
    "step": "training steps", "compile": "compiling", "restore": "restoring", "data": "waiting for data",
    "save": "saving", "eval": "validation and samples", "statistics": "layer statistics",
    "lost": "repeated steps", "idle": "between starts", "other": "other: imports, checks, opening data",
}  # fmt: skip


class Cell(NamedTuple):
    """HTML of a table cell. Its class is n (number), t (muted), w (wide) or mono."""

    html: str
    kind: str = ""


def table(head: Sequence[str | Cell], rows: Iterable[Sequence[str | Cell]], row_kinds: Sequence[str] = ()) -> str:
    """Returns a scrollable table as HTML. Escapes text, but not a Cell, which is HTML."""
    css_class = lambda kind: f' class="{kind}"' if kind else ""
    as_cells = lambda row: [cell if isinstance(cell, Cell) else Cell(escape(cell)) for cell in row]
    body = list(map(as_cells, rows))
    if not body:
        return ""
    lines = [
        f"<tr{css_class(kind)}>" + "".join(f"<td{css_class(cell.kind)}>{cell.html}</td>" for cell in row) + "</tr>"
        for row, kind in itertools.zip_longest(body, row_kinds)
    ]
    number = ["n" if cell.kind == "n" else "" for cell in body[0]]
    titles = "".join(f"<th{css_class(kind)}>{title.html}</th>" for title, kind in zip(as_cells(head), number))
    return f'<div class="table"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def n(text: str) -> Cell:
    """Returns a cell for a number."""
    return Cell(escape(text), "n")


def integer_text(value: Any) -> str:
    """Returns text such as '2,830'."""
    return f"{value:,}" if is_number(value) else described(value)


def mono(value: Any) -> Cell:
    """Returns a cell for the name or value of a setting."""
    is_plain = isinstance(value, str) or value in ({}, [], None)
    return Cell(escape(value if is_plain else described(value)), "mono")


def left_out(text: str) -> str:
    """Returns a paragraph that explains missing data as HTML."""
    return f'<p class="left">{escape(text)}</p>'


def run_name(history: History, place: int) -> Cell:
    """Returns a cell with the name and color of a run."""
    return Cell(f"{key('line', color_of(place))}{escape(history.name)}")


def goodput_table(histories: Sequence[History]) -> str:
    """Returns a table of the wall time by activity. For several runs, the table has one row of fractions per run."""
    ledgers = [(place, measure_goodput(history.rows, history.events)) for place, history in enumerate(histories)]
    known = [(place, found) for place, found in ledgers if found.fraction is not None]
    if len(histories) > 1:
        kinds = [kind for kind in KIND_WORDS if any(found.seconds[kind] > 0 for _, found in known)]
        rows = []
        for place, found in known:
            shares = [n(percent(found.seconds[kind] / found.wall_seconds)) for kind in kinds]
            rows.append((run_name(histories[place], place), *shares, n(units.duration(found.wall_seconds))))
        words = [KIND_WORDS[kind].partition(":")[0] for kind in kinds]
        return table(("run", *words, "wall time"), rows)
    rows = []
    for _, found in known:
        parts = [(KIND_WORDS[kind], value) for kind, value in found.seconds.items() if value > 0]
        for words, value in (*parts, ("wall time", found.wall_seconds)):
            rows.append((words, n(units.duration(value)), n(percent(value / found.wall_seconds))))
    return table(("activity", "time", "share"), rows)


def supervised_table(histories: Sequence[History]) -> str:
    """Returns tables of the starts by the supervisor."""
    parts = []
    for place, history in enumerate(histories):
        ends = [record for record in history.supervised if record.get("event") == "end"]
        rows = [
            (
                n(described(end.get("number"))), Cell(escape(str(end.get("time", ""))[:19].replace("T", " ")), "t"),
                n(units.duration(end["seconds"]) if is_number(end.get("seconds")) else "n/a"),
                n(integer_text(end.get("steps_won"))), n(integer_text(end.get("steps_lost"))),
                Cell(escape(end.get("meaning") or ""), "w"),
            )
            for end in ends[-50:]
        ]  # fmt: skip
        leaves = [record for record in history.supervised if record.get("event") in ("leave", "gave_up")]
        last = leaves[-1] if leaves else {}
        summary = [str(last.get("why") or "")]
        if is_number(last.get("goodput")):
            summary.append(f"goodput {percent(last['goodput'])} of {units.duration(last.get('wall_seconds') or 0.0)}")
        if rows:
            name = f", {run_name(history, place).html}" if len(histories) > 1 else ""
            words = f"<p>{escape('; '.join(filter(None, summary)))}</p>" if last else ""
            head = ("start", "ended (UTC)", "duration", "new steps", "lost steps", "result")
            parts.append(f"<h3>Starts by the supervisor{name}</h3>{words}{table(head, rows)}")
    return "".join(parts)


def incident_table(history: History) -> str:
    """Returns the incident log as a table, newest last."""
    found, older = incidents(history.events)
    rows = [(Cell(escape(i.when), "t"), n(i.step), Cell(escape(i.what), "w")) for i in found]
    note = left_out(f"{older:,} older lines are in events.jsonl.") if older else ""
    return note + table(("time", "step", "what"), rows, ["trouble" if i.is_trouble else "" for i in found])


def change_table(history: History) -> str:
    """Returns a table of settings that changed during the run, and the effect of each change."""
    written = history.config.get("changed", history.config.get("allowed_changes"))  # old name until 2026-11-22
    changes = [change for change in as_list(written) if isinstance(change, dict)]
    rows = []
    for change in changes[-MOST_CHANGES:]:
        rates, effect = as_list(change.get("learning_rate")), "changes the results" if change.get("alters") else ""
        if len(rates) == 2 and all(map(is_number, rates)):
            effect = f"learning rate changed from {rates[0]:.4g} to {rates[1]:.4g}"
        values = (mono(change.get(name)) for name in ("name", "old", "new"))
        rows.append((n(integer_text(change.get("step"))), *values, Cell(effect, "w")))
    return table(("from step", "setting", "before", "after", "effect"), rows)


def difference_table(histories: Sequence[History]) -> str:
    """Returns a table of settings, machines and versions that differ. Runs are columns, or rows if there are many."""
    known = [(run_name(history, place), made_with(history)) for place, history in enumerate(histories)]
    known = [(name, facts) for name, facts in known if facts]  # the header reports a missing config.json
    names = list(dict.fromkeys(name for _, facts in known for name in facts))
    differing = [name for name in names if len({repr(facts.get(name, MISSING)) for _, facts in known}) > 1]
    if not differing:
        return left_out("Settings, machines and versions are the same.")
    cell = lambda facts, name: mono(facts[name]) if name in facts else Cell("–", "t")
    if len(known) > MOST_COLUMNS:
        return table(("run", *differing), [(run, *(cell(facts, name) for name in differing)) for run, facts in known])
    rows = [(mono(name), *(cell(facts, name) for _, facts in known)) for name in differing]
    return table(("setting", *(run for run, _ in known)), rows)


def made_with(history: History) -> dict[str, Any]:
    """Returns {name: value} for settings, devices, git commit and versions, or {} if config.json is missing."""
    config, devices, settings = history.config, history.part("devices"), history.part("config")
    found = schema.flatten(settings) if settings else {}
    if devices.get("kind"):
        found["devices"] = f"{devices.get('number', '?')} x {devices['kind']}"
    if config.get("git_commit"):
        found["git commit"] = config["git_commit"]
    return found | {f"version of {name}": version for name, version in history.part("versions").items() if version}
