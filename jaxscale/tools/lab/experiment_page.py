"""The HTML page of an experiment, with results, published predictions, plots, numbers and limitations."""

import time
from collections.abc import Sequence

from jaxscale.schema import flatten, to_dict
from jaxscale.tools.lab.experiment import Conclusion, Experiment
from jaxscale.tools.lab.trial import Base, Result
from jaxscale.tools.reporting.canvas import plots
from jaxscale.tools.reporting.page import footer, whole_page
from jaxscale.tools.reporting.page_tables import Cell, table
from jaxscale.tools.reporting.page_text import count, duration, escape
from jaxscale.tools.reporting.plots import draw
from jaxscale.tools.reporting.sections import Section


def lab_page(name: str, experiment: Experiment, base: Base, results: Sequence[Result], found: Conclusion) -> str:
    """Returns the HTML page of an experiment."""
    shown = [one for one in found.drawings if one.plot.drawn]
    figures = [draw(one.plot, one.across, number, one.below)[0] for number, one in enumerate(shown)]
    sections = [
        Section("verdict", "Results", sentences(found.verdict)),
        Section("predicted", "Published predictions", table(("source", "prediction"), found.predicted)),
        Section("plots", "Plots", plots(*figures)),
        Section("numbers", "Numbers", table(found.head, found.rows)),
        Section("limits", "Limitations", sentences(found.limits)),
        Section("runs", "Runs", runs_table(results)),
    ]
    head = (
        f'<div class="top"><h1>{escape(experiment.question)}</h1></div>'
        f'<p class="sub">{escape(summary(base, results))}</p>'
    )
    end = footer(time.time(), f"jaxscale lab {name}").partition(" Drag")[0]
    return whole_page(experiment.question, head, [s for s in sections if s.html], end, None)


def sentences(lines: Sequence[str]) -> str:
    """Returns an HTML list of the sentences."""
    return f"<ul>{''.join(f'<li>{escape(capital(line))}</li>' for line in lines)}</ul>" if lines else ""


def capital(text: str) -> str:
    """Returns the text with a capital first letter, unless the first word is the name of a setting."""
    return text if "." in text.partition(" ")[0].rstrip(".:") else text[:1].upper() + text[1:]


def summary(base: Base, results: Sequence[Result]) -> str:
    """Returns a line about the model, the runs, the devices and the versions."""
    cfg, version = base.cfg, next((r.history.part("versions") for r in results), {})
    devices = next((r.history.part("devices") for r in results), {})
    tokens = sum(r.history.latest("tokens_seen") or 0 for r in results)
    parts = [
        f"{base.file}: {count(cfg.model.num_params)} parameters, sequence length {cfg.seq_len}",
        f"{len(results)} runs, {count(tokens)} tokens, {duration(sum(r.seconds for r in results))} of training",
        f"{devices.get('number', '')} x {devices.get('kind', '')}".strip(" x"),
        ", ".join(f"{name} {version[name]}" for name in ("jax", "python") if version.get(name)),
    ]
    return " · ".join(part for part in parts if part)


def runs_table(results: Sequence[Result]) -> str:
    """Returns tables of all runs with their folders, and of the base config."""
    end = lambda r: "diverged" if r.diverged else f"{r.loss:.4f}"
    rows = [[r.trial.label, end(r), Cell(escape(r.folder), "mono")] for r in results]
    changed = {name: value for r in results[:1] for name, value in flatten(to_dict(r.trial.base.cfg)).items()}
    runs = table(("run", "held-out loss", "folder"), rows)
    return f"<details><summary>{len(rows)} runs with final loss and folder</summary>{runs}</details>" + (
        f"<details><summary>Base config, {len(changed)} settings</summary>"
        f"{table(('setting', 'value'), [(name, str(value)) for name, value in sorted(changed.items())])}</details>"
        if changed
        else ""
    )
