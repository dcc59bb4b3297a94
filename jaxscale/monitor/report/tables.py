"""The tables of the page: what was seen, where the time went, settings and their changes, the log of incidents."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.monitor.goodput import goodput_of
from jaxscale.monitor.history import History, is_number
from jaxscale.monitor.json_lines import as_dict, as_list
from jaxscale.monitor.report.text import escape, percent
from jaxscale.monitor.report.words import described, incidents

MOST_CHANGES = 200
KIND_WORDS = {
    "step": "training steps that count", "compile": "compiling", "restore": "restoring", "data": "waiting for data",
    "save": "saving", "eval": "validation and samples", "statistics": "statistics of the layers",
    "lost": "steps that were run again", "idle": "between starts", "other": "all else: imports, checks, opening data",
}  # fmt: skip


class Cell(NamedTuple):
    """HTML of a cell, and its class: n (number), t (quiet), w (wide), mono."""

    html: str
    kind: str = ""


def table(head: Sequence[str], rows: Iterable[Sequence[str | Cell]], row_kinds: Sequence[str] = ()) -> str:
    """A table in a box of its own, which scrolls where it is too wide. Text is escaped, a Cell is HTML already."""
    lines = []
    kinds = None
    for number, row in enumerate(rows):
        cells = [cell if isinstance(cell, Cell) else Cell(escape(cell)) for cell in row]
        kinds = kinds or [cell.kind for cell in cells]
        of_row = f' class="{row_kinds[number]}"' if row_kinds and row_kinds[number] else ""
        lines.append(f"<tr{of_row}>" + "".join(f"<td{of(cell.kind)}>{cell.html}</td>" for cell in cells) + "</tr>")
    if not lines:
        return ""
    number = lambda place: of("n") if kinds[place] == "n" else ""
    titles = "".join(f"<th{number(place)}>{escape(title)}</th>" for place, title in enumerate(head))
    return f'<div class="table"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def of(kind: str) -> str:
    """' class="n"', or ''."""
    return f' class="{kind}"' if kind else ""


def n(text: str) -> Cell:
    """A number."""
    return Cell(escape(text), "n")


def mono(value: Any) -> Cell:
    """A setting's value."""
    return Cell(
        escape(value if isinstance(value, str) else described(value) if value not in ({}, [], None) else value), "mono"
    )


def run_name(history: History, place: int) -> Cell:
    """The run with its colour."""
    return Cell(f'<i class="swatch c{place % 8}"></i>{escape(history.name)}')


def goodput_tables(histories: Sequence[History]) -> str:
    """Seconds by kind over all starts; they sum to the wall time, from the first start to the last sign of the run."""
    parts = []
    for place, history in enumerate(histories):
        found = goodput_of(history.rows, history.events)
        if found.fraction is None:
            continue
        wall = found.wall_seconds
        rows = [
            (KIND_WORDS[kind], n(units.duration(value)), n(percent(value / wall)))
            for kind, value in found.seconds.items()
            if value > 0
        ]
        rows.append(("wall time", n(units.duration(wall)), n(percent(1.0))))
        heading = f"<h3>{run_name(history, place).html}</h3>" if len(histories) > 1 else ""
        parts.append(heading + table(("where the time went", "time", "share"), rows))
    return "".join(parts)


def supervised_table(histories: Sequence[History]) -> str:
    """The starts that a supervisor made."""
    parts = []
    for place, history in enumerate(histories):
        ends = [record for record in history.supervised if record.get("event") == "end"]
        rows = [
            (
                n(described(end.get("number"))), Cell(escape(str(end.get("time", ""))[:19].replace("T", " ")), "t"),
                n(units.duration(end["seconds"]) if is_number(end.get("seconds")) else "n/a"),
                n(described(end.get("steps_won"))), n(described(end.get("steps_lost"))),
                Cell(escape(end.get("meaning") or ""), "w"),
            )
            for end in ends[-50:]
        ]  # fmt: skip
        leaves = [
            record
            for record in history.supervised
            if record.get("event") in ("leave", "give_up") or "goodput" in record
        ]
        last = leaves[-1] if leaves else {}
        told = f"<p>{escape(leave_text(last))}</p>" if last else ""
        if rows:
            name = f", {run_name(history, place).html}" if len(histories) > 1 else ""
            heading = f"<h3>Starts by the supervisor{name}</h3>"
            parts.append(
                heading + told + table(("start", "ended (UTC)", "ran", "steps won", "run in vain", "end"), rows)
            )
    return "".join(parts)


def leave_text(last: Mapping[str, Any]) -> str:
    """How the supervisor's work came out."""
    parts = [str(last.get("why") or "")]
    if is_number(last.get("goodput")):
        parts.append(f"goodput {percent(last['goodput'])} of {units.duration(last.get('wall_seconds') or 0.0)}")
    return "; ".join(part for part in parts if part)


def incident_table(history: History) -> str:
    """The log, newest last."""
    found, older = incidents(history.events)
    rows = [(Cell(escape(i.when), "t"), n(i.step), Cell(escape(i.what), "w")) for i in found]
    note = f'<p class="left">{older:,} older lines are in events.jsonl.</p>' if older else ""
    return note + table(("time", "step", "what"), rows, ["trouble" if i.is_trouble else "" for i in found])


def change_table(history: History) -> str:
    """Settings that were changed on the way."""
    changes = [change for change in as_list(history.config.get("allowed_changes")) if isinstance(change, dict)]
    rows = [
        (n(described(c.get("step"))), mono(c.get("name")), mono(c.get("old")), mono(c.get("new")))
        for c in changes[-MOST_CHANGES:]
    ]
    return table(("from step", "setting", "before", "after"), rows)


def settings_table(config: Mapping[str, Any]) -> str:
    """Every setting."""
    return table(("setting", "value"), [(mono(name), mono(value)) for name, value in flat(config).items()])


def difference_table(histories: Sequence[History]) -> str:
    """The settings in which the runs differ."""
    flats = [flat(as_dict(history.config.get("config"))) for history in histories]
    names = list(dict.fromkeys(name for values in flats for name in values))
    missing = object()
    rows = [
        (mono(name), *(mono(values[name]) if name in values else Cell("–", "t") for values in flats))
        for name in names
        if any(values.get(name, missing) != flats[0].get(name, missing) for values in flats[1:])
    ]
    if not rows:
        return '<p class="left">The settings are the same.</p>'
    return table(("setting", *(history.name for history in histories)), rows)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted name: value} of nested settings."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
