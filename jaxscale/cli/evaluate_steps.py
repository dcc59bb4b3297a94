"""What `jaxscale evaluate` shows of the steps that it measured, and keeps of them in the work folder."""

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.eval.named import GROUP
from jaxscale.inference import LoadedModel
from jaxscale.monitor.records import append
from jaxscale.reporting import make_evals_page
from jaxscale.reporting.history import read_history
from jaxscale.system import paths
from jaxscale.system.exits import put

COUNTS = ("documents", "items", "tokens", "bytes", "left_out")
Record = dict[str, Any]


def record_of(model: LoadedModel, metrics: Mapping[str, float]) -> Record:
    """A line of evals.jsonl: the step, what was measured when, and the metrics; of an average under evals_ema/."""
    group = f"{GROUP}_ema" if model.what == "ema" else GROUP
    named = {f"{group}{name.removeprefix(GROUP)}": value for name, value in metrics.items()}
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"step": model.step, "what": model.what, "time": time, **named}


def as_line(record: Record) -> str:
    """The record as JSON, null in place of what is not finite."""
    finite = lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps({name: finite(value) for name, value in record.items()}, allow_nan=False)


def save_record(workdir: Any, record: Record) -> None:
    """Adds the line to WORKDIR/evals.jsonl and draws WORKDIR/evals.html anew."""
    file = workdir / "evals.jsonl"
    append(file, f"{as_line(record)}\n".encode())
    paths.write_text_atomic(workdir / "evals.html", make_evals_page(read_history(workdir)))


def by_name(record: Record) -> dict[str, dict[str, float]]:
    """{evaluator: {metric: value}}, of an average as 'NAME (average)'."""
    found: dict[str, dict[str, float]] = {}
    for full, value in record.items():
        group, _, rest = full.partition("/")
        name, _, metric = rest.rpartition("/")
        if group in (GROUP, f"{GROUP}_ema") and name:
            found.setdefault(name if group == GROUP else f"{name} (average)", {})[metric] = value
    return found


def with_error(metrics: Mapping[str, float], metric: str) -> str:
    """'1.234 ± 0.012'."""
    error = metrics.get(f"{metric}_stderr")
    return f"{metrics[metric]:.4g}" + (f" ± {error:.2g}" if error is not None else "")


def measured(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that are no counts and no errors."""
    return [name for name in metrics if name not in COUNTS and not name.endswith("_stderr")]


def counted(number: int, what: str) -> str:
    """'1 document', '2 documents', '3 left out'."""
    return f"{number:,} {what.removesuffix('s') if number == 1 else what.replace('_', ' ')}"


def show_lines(record: Record) -> None:
    """Prints a line for each evaluator of one step."""
    for name, metrics in by_name(record).items():
        values = ", ".join(f"{metric} {with_error(metrics, metric)}" for metric in measured(metrics))
        counts = ", ".join(counted(metrics[count], count) for count in COUNTS if count in metrics)
        put(f"{name}: {values}" + (f"; {counts}" if counts else ""))


def show_table(records: Sequence[Record]) -> None:
    """Prints a row for each step, a column for each metric but the loss, whose exp stands beside it."""
    rows = [(str(record["step"]), by_name(record)) for record in records]
    columns = list(
        dict.fromkeys(
            (name, metric)
            for _, found in rows
            for name, metrics in found.items()
            for metric in measured(metrics)
            if metric != "loss"
        )
    )
    cells = [["step", *(f"{name}/{metric}" for name, metric in columns)]]
    for step, found in rows:
        values = [with_error(found[name], metric) if metric in found.get(name, {}) else "-" for name, metric in columns]
        cells.append([step, *values])
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        put("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())
