"""User-defined sweeps over settings, values and seeds."""

import itertools
from collections.abc import Sequence

from jaxscale.system.exits import BadInput
from jaxscale.tools.lab.estimate import Estimate, mean, optimum
from jaxscale.tools.lab.experiment import SMALL, Conclusion, Options, curve_plot, drawing, mean_line, over_seeds
from jaxscale.tools.lab.trial import Base, Result, Trial, groups_of
from jaxscale.tools.reporting.page_tables import n
from jaxscale.tools.reporting.page_text import percent


def vary_trials(base: Base, options: Options) -> list[Trial]:
    """Returns one trial per combination of values and seed. Raises BadInput if no setting is varied."""
    if not options.vary:
        raise BadInput("lab vary needs --vary=NAME=VALUE,VALUE, such as --vary=optim.peak_lr=1e-3,2e-3")
    names = [name for name, _ in options.vary]
    if "seed" in names:
        raise BadInput("--vary=seed is not supported; set the number of seeds with --seeds=N")
    grid = itertools.product(*(values for _, values in options.vary))
    trials = [base.with_settings(dict(zip(names, at)), seed) for at in grid for seed in options.seeds_of(3)]
    first: dict[str, str] = {}
    for trial in trials:
        label = label_of(trial)
        if (other := first.setdefault(trial.digest, label)) != label:
            raise BadInput(f"--vary: {other} and {label} give the same config; pass each value only once")
    return trials


def conclude(results: Sequence[Result]) -> Conclusion:
    """Returns the Conclusion of these results."""
    groups = groups_of(results, lambda r: label_of(r.trial))
    steady = {name: mean([r.loss for r in runs]) for name, runs in groups.items() if not any(r.diverged for r in runs)}
    lost = [name for name in groups if name not in steady]
    rows = []
    for name, runs in sorted(groups.items(), key=lambda item: steady[item[0]].value if item[0] in steady else 1e9):
        diverged = sum(r.diverged for r in runs)
        rows.append([name, n(str(steady.get(name, "n/a"))), n(f"{diverged} of {len(runs)}")])
    verdict = [winner(steady)] if steady else ["A run diverged at every setting."]
    if lost:
        verdict.append(f"Runs diverged at {'; '.join(lost)}.")
    placed = {name: (place, runs) for place, (name, runs) in enumerate(groups.items())}
    drawings = [curve_plot("Training loss, smoothed", placed)]
    names = list(results[0].trial.at)
    if len(names) == 1 and all(is_positive(r.at(names[0])) for r in results):
        lines = mean_line("runs and their mean", results, lambda r: r.at(names[0]), 0)
        drawings.insert(0, drawing("Held-out loss", lines, names[0], log_below=True, unit="nats"))
        curves = list(over_seeds(results, names[0]).values())
        if curves and len({r.at(names[0]) for r in results}) > 1:
            best = optimum(curves)
            how = "at the edge of the values tried" if best.edge else "from a parabola through the lowest points"
            verdict.append(f"Best {names[0]}, {how}: {best}.")
    return Conclusion(verdict, SMALL, (), drawings, ("setting", "held-out loss", "diverged"), rows)


def label_of(trial: Trial) -> str:
    """Returns the varied settings as text, such as 'optim.peak_lr=1e-3, model.num_layers=2'."""
    return ", ".join(f"{name}={value}" for name, value in trial.at.items())


def is_positive(text: str) -> bool:
    """Returns True if the text is a number above 0."""
    try:
        return float(text) > 0
    except ValueError:
        return False


def winner(steady: dict[str, Estimate]) -> str:
    """Returns a sentence with the setting of lowest loss, and the settings that are equal within noise."""
    best, *others = sorted(steady, key=lambda name: steady[name].value)
    lowest = f"{best} has the lowest loss, {steady[best]} nats"
    if not others:
        return f"{lowest}; no other setting ran without divergence."
    if (high := steady[best].high) is None:
        gap = steady[others[0]].value / steady[best].value - 1
        return f"{lowest}, {percent(gap)} below {others[0]}; one seed cannot show whether the difference exceeds noise."
    close = [name for name in others if (low := steady[name].low) is not None and low <= high]
    verdict = f"its interval overlaps {'; '.join(close)}" if close else "all others are significantly higher"
    return f"{lowest}; {verdict}."
