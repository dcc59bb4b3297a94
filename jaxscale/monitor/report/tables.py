"""The tables of the page: what was seen, where the time went, settings and their changes, the log of incidents."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.monitor.goodput import goodput_of
from jaxscale.monitor.history import History, is_number
from jaxscale.monitor.report.status import as_dict, as_list
from jaxscale.monitor.report.text import escape, percent, plain
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


def data_table(histories: Sequence[History]) -> str:
    """The sources with their planned shares, tokens by those shares, epochs' caps, and how well they are learnt."""
    parts = []
    for place, history in enumerate(histories):
        heading = f"<h3>{run_name(history, place).html}</h3>" if len(histories) > 1 else ""
        parts.append(heading + data_words(history) + source_table(history))
    return "".join(parts)


def data_words(history: History) -> str:
    """What was read, in a sentence or two."""
    config = as_dict(history.config.get("config"))
    data = as_dict(config.get("data"))
    told = []
    if data:
        told.append(
            f"{data.get('name') or 'data'}" + (f", files {described(data['files'])}" if data.get("files") else "")
        )
        told.append(f"packing {data.get('packing')}")
        objective = as_dict(data.get("objective"))
        told.append(f"objective {objective.get('name')}") if objective.get("name") else None
        if data.get("tokenizer"):
            told.append(f"tokenizer {data['tokenizer']}")
    if is_number(config.get("seq_len")):
        told.append(f"rows of {config['seq_len']:,} tokens")
    tokens = history.latest("tokens_seen")
    if tokens is not None:
        told.append(f"{units.count(tokens)} tokens seen ({tokens:,.0f})")
    real, every = sum_of(history, "train/real_tokens"), as_dict(history.config.get("budget")).get("batch_tokens")
    if real and is_number(every) and every:
        told.append(f"{percent(real[0] / (real[1] * every))} of them real, the rest padding (of the steps reported)")
    if gated := history.latest("gated_rows_total"):
        told.append(f"{gated:,.0f} rows gated since the last start")
    skips = data.get("skip_batches")
    if skips:
        told.append(f"left out by data.skip_batches: {described(skips)}")
    return f"<p>{escape('; '.join(told))}.</p>" if told else ""


def sum_of(history: History, name: str) -> tuple[float, int] | None:
    """(sum, number) of a metric's values; None without any."""
    values = history.series(name)[1]
    return (sum(values), len(values)) if values else None


def source_table(history: History) -> str:
    """A row for each source."""
    data = as_dict(as_dict(history.config.get("config")).get("data"))
    stages = stages_of(data.get("mixture"))
    caps = as_dict(data.get("max_epochs"))
    met = [name.split("/")[1] for name in history.names() if is_of_source(name)]
    sources = list(dict.fromkeys([*(name for _, weights in stages for name in weights), *met]))
    if not sources:
        return ""
    tokens = history.latest("tokens_seen")
    rows = []
    for name in sources:
        shares = [weights.get(name, 0.0) / (sum(weights.values()) or 1.0) for _, weights in stages]
        planned = ", then ".join(map(percent, dict.fromkeys(shares))) if stages else "n/a"
        seen = (
            units.count(tokens * shares[0]) if tokens is not None and len(stages) == 1 and name not in caps else "n/a"
        )
        cap = plain(caps[name]) if is_number(caps.get(name)) else "none"
        rows.append((
            name, n(planned), n(seen), n(cap),
            n(plain(history.latest(f"train/{name}/loss"))),
            n(plain(history.latest(f"validation/{name}/bits_per_byte"))),
        ))  # fmt: skip
    head = (
        "source",
        "planned share",
        "tokens by that share",
        "most epochs",
        "last training loss",
        "held-out bits/byte",
    )
    return table(head, rows)


def is_of_source(name: str) -> bool:
    """True for 'train/web/loss' and 'validation/web/bits_per_byte'."""
    room, _, rest = name.partition("/")
    return room in ("train", "validation") and rest.count("/") == 1


def stages_of(mixture: Any) -> list[tuple[str, dict[str, float]]]:
    """[(where it begins, weights)] of data.mixture: one stage, or several by the place where each begins."""
    if not isinstance(mixture, dict) or not mixture:
        return []
    if all(map(is_number, mixture.values())):
        return [("", dict(mixture))]
    return [
        (str(at), {name: w for name, w in weights.items() if is_number(w)})
        for at, weights in mixture.items()
        if isinstance(weights, dict)
    ]


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
