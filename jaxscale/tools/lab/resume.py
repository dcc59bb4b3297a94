"""Bitwise comparison of killed and resumed runs with an uninterrupted run."""

from collections.abc import Sequence

from jaxscale.program.budget import resolve_budget
from jaxscale.tools.lab.experiment import Conclusion, Options, drawing, line
from jaxscale.tools.lab.trial import Base, Result, Trial
from jaxscale.tools.reporting.page_tables import n
from jaxscale.tools.reporting.plots import Mark
from jaxscale.tools.reporting.status import BEGINS

CASE = "run"
WHOLE = "uninterrupted"
KILLS = (0.35, 0.8)  # fractions of the run
SAVES = 7  # checkpoints per run, chosen so that no checkpoint coincides with a kill
COMPARED = ("loss", "grad_norm", "validation/loss")
PREDICTED = (
    (
        "docs/checkpoints.md",
        "a checkpoint has the state, the data position and the config, so a resumed run is identical",
    ),
)


def resume_trials(base: Base, options: Options) -> list[Trial]:
    """Returns trials of one uninterrupted run, and one run per kill."""
    trial = base.with_settings({}, 0)
    steps = resolve_budget(trial.cfg, None).total_steps
    also = {"checkpoint.save_every_steps": max(2, steps // SAVES), "monitor.log_every_steps": 1}
    of = lambda name, **more: base.with_settings({}, 0, also, at={CASE: name}, **more)
    kills = [max(1, round(steps * part)) for part in KILLS]
    return [of(WHOLE), *(of(f"killed after step {step}", kill_at=step) for step in kills)]


def conclude(results: Sequence[Result]) -> Conclusion:
    """Returns the Conclusion of the experiment. The first result must be the uninterrupted run."""
    whole, *killed = results
    values = values_of(whole)
    verdict, rows, curves, marks = [], [], [line(WHOLE, zip(*whole.curve()))], []
    for place, result in enumerate(killed, 1):
        name, others, compared = result.at(CASE), values_of(result), len(values)
        diffs = sorted(at for at in {*values, *others} if values.get(at) != others.get(at))
        events = result.history.events
        again = next((event.get("step") for event in events if event.get("event") == "resumed"), None)
        restart = "restarted from the beginning" if again is None else f"resumed from the checkpoint of step {again}"
        if diffs:
            outcome = f"{len(diffs)} of {compared} values differ, the first at step {diffs[0][0]}."
        else:
            outcome = f"all {compared} values of {', '.join(COMPARED)} are bit-identical."
        if sum(event.get("event") in BEGINS for event in events) < 2:  # number of starts
            verdict.append(f"{name}: the run ended before it could be killed; increase train_tokens.")
        else:
            verdict.append(f"{name}, {restart}: {outcome}")
        rows.append([name, n("0" if again is None else str(again)), n(str(compared)), n(str(len(diffs)))])
        curves.append(line(name, zip(*result.curve()), place, "dash"))
        tokens = result.trial.cfg.tokens_per_step
        marks.append(Mark((result.trial.kill_at or 0) * tokens, name, "trouble"))
    drawings = [drawing("Training loss", curves, "tokens", unit="nats", marks=marks, note="Red lines: kills.")]
    limits = ("All runs used one machine and one version. Sums round differently on other or more devices.",)
    head = ("", "resumed from step", "values compared", "values that differ")
    return Conclusion(verdict, limits, PREDICTED, drawings, head, rows)


def values_of(result: Result) -> dict[tuple[int, str], float]:
    """Returns {(step, metric): value} of the compared metrics."""
    return {(row["step"], name): row[name] for row in result.history.rows for name in COMPARED if name in row}
