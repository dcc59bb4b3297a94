"""What `jaxscale evaluate` shows of the steps that it measured, and keeps of them in the work folder."""

from collections.abc import Mapping, Sequence

from jaxscale.api.measuring import Record, by_name
from jaxscale.planning.tables import table
from jaxscale.system.exits import put

COUNTS = ("documents", "items", "tokens", "bytes", "left_out")


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
    put(*table(cells, indent=""))
