"""The best rate over widths, under muP and without: whether what is tuned small holds when large; and the coordinate
check of arXiv:2203.03466, appendix D.1: whether the first steps make activations as large at every width."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxscale.lab.estimate import mean, power
from jaxscale.lab.experiment import SMALL, Conclusion, Options, Run, drawing, line, mean_line
from jaxscale.lab.rate import RATE, best_rate, inside, over_rates
from jaxscale.lab.sizes import wider
from jaxscale.lab.trial import Base, Result, Trial, distinct, groups_of, is_number
from jaxscale.reporting.plots import Line, with_points
from jaxscale.reporting.tables import n

FORM, WIDTH = "parametrisation", "width"
STANDARD, MUP = "standard", "muP"
NAMES = {STANDARD: "without muP", MUP: "with muP"}
TIMES = (1, 2, 4)  # the config's width
FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)  # of the config's rate
STEPS = 3  # updates before the coordinate check: without a warmup, decaying as the config has it; later ones blur it
KINDS = {"activation": "the residual stream", "attention": "what attention adds", "mlp": "what the MLP adds"}
SHORT = {"activation": "stream", "attention": "attention", "mlp": "MLP"}  # for a legend
PREDICTED = (
    (
        "arXiv:2203.03466",
        "under muP the best rate is the same at every width, and so is what a step changes in activations; without, "
        "the rate falls, for Adam, about as 1 / width, and changes grow about as the width",
    ),
    ("arXiv:2407.05872", "without muP too, a rate for each kind of matrix can hold over widths, if it is scaled right"),
)


def width_trials(base: Base, options: Options) -> list[Trial]:
    """Parametrisations x widths x rates x seeds. Raises BadInput for a model that has no muP."""
    rates = options.rates or [base.cfg.optim.peak_lr * factor for factor in FACTORS]
    return [
        trial
        for told, sizes in shapes_of(base, options)
        for trial in over_rates(base, told, rates, options.seeds_of(2), also=sizes)
    ]


def coordinate_trials(base: Base, options: Options) -> list[Trial]:
    """Parametrisations x widths x seeds, each of a few steps that are all looked at."""
    short = {
        "train_tokens": f"{STEPS + 1} steps", "optim.warmup_tokens": 0, "monitor.statistics_every_steps": 1,
        "checkpoint.save_every_steps": 0, "sample.num_tokens": 0,
    }  # fmt: skip
    return [
        base.with_settings(sizes | short, seed, at=told | {"steps": STEPS})
        for told, sizes in shapes_of(base, options)
        for seed in options.seeds_of(2)
    ]


def shapes_of(base: Base, options: Options) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """(what a label says, the settings) of each parametrisation and width."""
    for form in (STANDARD, MUP):
        for times in options.sizes or TIMES:
            sizes = {name: value for name, value in wider(base.cfg, times).items() if name.startswith("model.")}
            if form == MUP:
                sizes["model.mup.base_dim"] = base.cfg.model.embed_dim
            yield {FORM: form, WIDTH: sizes["model.embed_dim"]}, sizes


def answer(base: Base, options: Options, run: Run) -> Conclusion:
    """How the best rate moves with the width, with muP and without, and how activations do."""
    of_width = lambda r: (r.at(FORM), r.at(WIDTH))
    trials = distinct(width_trials(base, options))  # two sizes may come to the same number of heads
    results = run([*trials, *distinct(coordinate_trials(base, options))])
    return conclude(inside(results[: len(trials)], options, run, of_width), results[len(trials) :])


def conclude(results: Sequence[Result], looked_at: Sequence[Result]) -> Conclusion:
    """The Conclusion of these results. looked_at: of coordinate_trials."""
    verdict, drawings, rows, bests, ends = [], [], [], [], {}
    for place, (form, runs) in enumerate(groups_of(results, lambda r: r.at(FORM)).items()):
        best, lines = {}, []
        for number, (width, of_width) in enumerate(sorted(groups_of(runs, lambda r: int(r.at(WIDTH))).items())):
            lines += mean_line(f"width {width}", of_width, RATE, number)
            found, cells = best_rate(of_width)
            if found:
                best[width] = found
            rows.append([form, n(str(width)), *cells])
        drawings.append(
            drawing(f"{form}: loss over the learning rate", lines, "learning rate", log_below=True, unit="nats")
        )
        ends[form] = {width: found.y for width, found in best.items()}
        bests += with_points([line(form, {width: found.x.value for width, found in best.items()}, place)])
        told = {width: found.x.value for width, found in best.items() if not found.edge}
        if len(told) < 3:
            inner = f"{len(told)} of {len(best)} widths have their best rate inside those tried"
            verdict.append(f"{NAMES[form]} {inner}; give --rates.")
            continue
        law = power(list(told), list(told.values()))
        holds = "which holds no change" if law.exponent.has(0.0) else "so a rate tuned small does not hold"
        verdict.append(f"{NAMES[form]} the best rate goes with the width to the power {law.exponent}, {holds}.")
    if shared := set.intersection(*map(set, ends.values())):
        told = " and ".join(f"{of[max(shared)]} nats {NAMES[form]}" for form, of in ends.items())
        verdict.append(f"At a width of {max(shared)} the best rate ends at {told}.")
    drawings.append(drawing("Best rate of each width", bests, "width", log_below=True, log=True))
    checks = [(form, check(form, of)) for form, of in groups_of(looked_at, lambda r: r.at(FORM)).items()]
    verdict += [text for _, (text, _) in checks]
    drawings.append(
        drawing(
            f"Activations after {STEPS} steps", [one for _, (_, lines) in checks for one in lines], "width",
            log_below=True, log=True, unit="root mean square",
        )
    )  # fmt: skip
    limits = (
        *SMALL,
        "An exponent's interval, of the scatter about a line, is wide with three widths. docs/explanation/mup.md has "
        "changes of activations over 16 times the width.",
    )
    return Conclusion(
        verdict, limits, PREDICTED, drawings, ("", "width", "best rate", "loss there", "diverged at"), rows
    )


def check(form: str, runs: Sequence[Result]) -> tuple[str, list[Line]]:
    """(a sentence on how activations go with the width, the lines of a plot of it), of one parametrisation."""
    held = [r for r in runs if all(math.isfinite(size_of(r, kind)) for kind in KINDS)]
    lost = len(runs) - len(held)
    left_out = f" {lost} of {len(runs)} runs have none that are finite and are left out." if lost else ""
    powers, lines = [], []
    for place, (kind, name) in enumerate(KINDS.items()):
        sizes = {
            width: mean([size_of(r, kind) for r in of_width]).value
            for width, of_width in sorted(groups_of(held, lambda r: int(r.at(WIDTH))).items())
        }
        lines += with_points([line(f"{SHORT[kind]}, {form}", sizes, place, "line" if form == MUP else "dash")])
        if len(sizes) > 1:
            powers.append(f"{name} to the power {power(list(sizes), list(sizes.values())).exponent}")
    told = f"{', '.join(powers)}." if powers else "fewer than two widths tell nothing."
    begin = f"{NAMES[form]}, after {STEPS} steps, at the config's schedule from its rate, activations go with the width"
    return f"{begin}: {told}{left_out}", lines


def size_of(run: Result, kind: str) -> float:
    """The root mean square of activations after STEPS steps, a mean over layers; NaN where a run has none."""
    of_kind = lambda row: [value for name, value in row.items() if name.startswith(f"stats/{kind}_rms/")]
    last = [value for row in run.history.rows if row["step"] > STEPS for value in of_kind(row)]
    return mean(last).value if last and all(map(is_number, last)) else math.nan
