"""A report card in Markdown about one or more runs, for a README or a terminal."""

from collections.abc import Sequence

from jaxscale import units
from jaxscale.runtime.monitor.history import History
from jaxscale.system.redact import block_in_markdown, in_markdown
from jaxscale.tools.reporting.evals import METRICS, eval_names, label_of, shown
from jaxscale.tools.reporting.page import with_unique_names
from jaxscale.tools.reporting.page_text import clock, money, plain
from jaxscale.tools.reporting.status import Status, status_of

SAMPLE_CHARACTERS = 400
NONE = "-"


def make_card(histories: Sequence[History], *, price: float | None = None, now: float) -> str:
    """Returns the card, with one column per run. price: dollars per chip-hour; None uses the list price."""
    histories = with_unique_names(histories)
    statuses = [status_of(history, now, price) for history in histories]
    heads = ["", *(history.name for history in histories)]
    facts = [[name, *cells] for name, cells in fact_rows(histories, statuses) if any(cell != NONE for cell in cells)]
    parts = [f"# {' and '.join(map(in_markdown, heads[1:]))}: report card", table(heads, facts)]
    if rows := measured_rows(histories):
        parts += ["## Evaluations", table(heads, rows), "Values with standard errors, on data not used in training."]
    if written := [history for history in histories if history.samples]:
        parts.append("## Samples")
        for history in written:
            sample = block_in_markdown(history.samples[-1].text[:SAMPLE_CHARACTERS])
            parts.append(f"### {in_markdown(history.name)}\n\n{sample}")
    total = sum(status.cost for status in statuses if status.cost is not None)
    wall = sum(status.wall_seconds or 0.0 for status in statuses)
    cost = f", {money(total)}" if any(status.cost is not None for status in statuses) else ""
    parts.append(f"Total: {units.duration(wall)} of training{cost}; {clock(now)}.")
    return "\n\n".join(parts) + "\n"


def fact_rows(histories: Sequence[History], statuses: Sequence[Status]) -> list[tuple[str, list[str]]]:
    """Returns one table row per fact (state, model, progress, cost), with its name and a cell per run."""
    each = list(zip(histories, statuses))
    known = lambda value, show: NONE if value is None else show(value)
    return [
        ("state", [status.state.sentence for _, status in each]),
        ("model", [model_words(history) for history, _ in each]),
        ("steps", [f"{status.step:,}" for _, status in each]),
        ("tokens", [known(status.tokens, units.count) for _, status in each]),
        ("loss", [known(status.loss, plain) for _, status in each]),
        ("validation loss", [known(status.validation_loss, plain) for _, status in each]),
        ("validation bits per byte", [known(h.latest("validation/bits_per_byte"), plain) for h, _ in each]),
        ("chips", [f"{units.count(s.chips)} {s.chip}" if s.chips and s.chip else NONE for _, s in each]),
        ("tokens/s", [known(status.tokens_per_second, units.count) for _, status in each]),
        ("MFU", [known(status.mfu, lambda value: f"{value:.1%}") for _, status in each]),
        ("time", [known(status.wall_seconds, units.duration) for _, status in each]),
        ("cost", [known(status.cost, money) for _, status in each]),
    ]


def model_words(history: History) -> str:
    """Returns text such as 'llama, 4 layers, width 256'."""
    model = history.part("config", "model")
    layers, width = model.get("num_layers"), model.get("embed_dim")
    return f"{model.get('name', '?')}, {layers} layers, width {width}" if layers and width else NONE


def measured_rows(histories: Sequence[History]) -> list[list[str]]:
    """Returns one table row per evaluator and metric. Cells have the newest value of each run."""
    rows = []
    for metric, names in eval_names(histories).items():
        for name in names if metric != "loss" else ():
            row = [f"{label_of(name)}: {METRICS[metric]}"]
            for history in histories:
                steps, values = history.evaluated(name)
                errors = dict(zip(*history.evaluated(f"{name}_stderr")))
                row.append(shown(values[-1], errors.get(steps[-1])) if steps else NONE)
            rows.append(row)
    return rows


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns."""
    cells = [[in_markdown(cell) for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
