"""The best learning rate by width, with and without muP, to test if a rate tuned on a small model transfers.

Includes the coordinate check of arXiv:2203.03466, appendix D.1, which tests if activations after the first steps have
the same size at every width.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxscale.runtime.monitor.history import is_finite
from jaxscale.tools.lab.estimate import mean, power
from jaxscale.tools.lab.experiment import SMALL, Conclusion, Options, Run, drawing, line, rate_plot
from jaxscale.tools.lab.rate import best_rate, inside, over_rates
from jaxscale.tools.lab.sizes import wider
from jaxscale.tools.lab.trial import Base, Result, Trial, distinct, groups_of
from jaxscale.tools.reporting.page_tables import n
from jaxscale.tools.reporting.plots import PlotLine, with_points

FORM, WIDTH = "parametrisation", "width"
STANDARD, MUP = "standard", "muP"
NAMES = {STANDARD: "without muP", MUP: "with muP"}
TIMES = (1, 2, 4)  # widths relative to the config's
FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)  # learning rates relative to the config's
STEPS = 3  # updates before the coordinate check, without warmup; more updates would obscure the scaling
KINDS = {"activation": "the residual stream", "attention": "the attention output", "mlp": "the MLP output"}
SHORT = {"activation": "stream", "attention": "attention", "mlp": "MLP"}  # names in a legend
PREDICTED = (
    (
        "arXiv:2203.03466",
        "with muP, the best learning rate and the change of activations per step do not depend on the width; without "
        "it, the best learning rate of Adam falls about as 1 / width, and the changes grow about as the width",
    ),
    (
        "arXiv:2407.05872",
        "without muP, learning rates per kind of matrix can also transfer across widths, if each is scaled correctly",
    ),
)


def width_trials(base: Base, options: Options) -> list[Trial]:
    """Returns one trial per parametrisation, width, rate and seed. Raises BadInput for an unsupported model."""
    rates = options.rates or [base.cfg.optim.peak_lr * factor for factor in FACTORS]
    return [
        trial
        for labelled, sizes in shapes_of(base, options)
        for trial in over_rates(base, labelled, rates, options.seeds_of(2), also=sizes)
    ]


def coordinate_trials(base: Base, options: Options) -> list[Trial]:
    """Returns one trial of a few steps per parametrisation, width and seed, which logs activation statistics."""
    short = {
        "train_tokens": f"{STEPS + 1} steps", "optim.warmup_tokens": 0, "monitor.statistics_every_steps": 1,
        "checkpoint.save_every_steps": 0, "sample.num_tokens": 0,
    }  # fmt: skip
    return [
        base.with_settings(sizes | short, seed, at=labelled | {"steps": STEPS})
        for labelled, sizes in shapes_of(base, options)
        for seed in options.seeds_of(2)
    ]


def shapes_of(base: Base, options: Options) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields (settings to label, settings to change) for each parametrisation and width."""
    for form in (STANDARD, MUP):
        for times in options.sizes or TIMES:
            sizes = {name: value for name, value in wider(base.cfg, times).items() if name.startswith("model.")}
            if form == MUP:
                sizes["model.mup.base_dim"] = base.cfg.model.embed_dim
            yield {FORM: form, WIDTH: sizes["model.embed_dim"]}, sizes


def answer(base: Base, options: Options, run: Run) -> Conclusion:
    """Measures how the best learning rate and the activations scale with width, with and without muP."""
    by_width = lambda r: (r.at(FORM), r.at(WIDTH))
    trials = distinct(width_trials(base, options))  # two sizes may round to the same number of heads
    results = run([*trials, *distinct(coordinate_trials(base, options))])
    return conclude(inside(results[: len(trials)], options, run, by_width), results[len(trials) :])


def conclude(results: Sequence[Result], looked_at: Sequence[Result]) -> Conclusion:
    """Returns the Conclusion of these results. looked_at: results of coordinate_trials()."""
    verdict, drawings, rows, bests, ends = [], [], [], [], {}
    for place, (form, runs) in enumerate(groups_of(results, lambda r: r.at(FORM)).items()):
        widths = dict(sorted(groups_of(runs, lambda r: int(r.at(WIDTH))).items()))
        found = {width: best_rate(width_runs) for width, width_runs in widths.items()}
        best = {width: optimum for width, (optimum, _) in found.items() if optimum}
        rows += [[form, n(str(width)), *cells] for width, (_, cells) in found.items()]
        labelled = [(f"width {width}", width_runs) for width, width_runs in widths.items()]
        drawings.append(rate_plot(labelled, f"{form}: loss over the learning rate", unit="nats"))
        ends[form] = {width: found.y for width, found in best.items()}
        bests += with_points([line(form, {width: found.x.value for width, found in best.items()}, place)])
        bracketed = {width: found.x.value for width, found in best.items() if not found.edge}
        if len(bracketed) < 3:
            inner = f"the best learning rate is inside the sweep for {len(bracketed)} of {len(best)} widths"
            verdict.append(f"{NAMES[form]}, {inner}, but a fit needs 3; pass more --rates.")
            continue
        law = power(list(bracketed), list(bracketed.values()))
        transfers = "consistent with no change" if law.exponent.has(0.0) else "so it does not transfer across widths"
        scaling = f"the best learning rate scales as width to the power {law.exponent}"
        verdict.append(f"{NAMES[form]}, {scaling}, {transfers}.")
    if shared := set.intersection(*map(set, ends.values())):
        ends_text = " and ".join(f"{of[max(shared)]} nats {NAMES[form]}" for form, of in ends.items())
        verdict.append(f"At width {max(shared)}, the loss at the best learning rate is {ends_text}.")
    drawings.append(drawing("Best learning rate", bests, "width", log_below=True, log=True))
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
        "With three widths, the intervals of the exponents (scatter around the fit) are wide. docs/explanation/mup.md "
        "measures activation changes over a factor of 16 in width.",
    )
    head = ("", "width", "best learning rate", "loss", "diverged at")
    return Conclusion(verdict, limits, PREDICTED, drawings, head, rows)


def check(form: str, runs: Sequence[Result]) -> tuple[str, list[PlotLine]]:
    """Returns (sentence, plot lines) that describe how activations scale with width in one parametrisation."""
    finite = [r for r in runs if all(math.isfinite(size_of(r, kind)) for kind in KINDS)]
    lost = len(runs) - len(finite)
    left_out = f" {lost} of {len(runs)} runs have no finite activation statistics and were excluded." if lost else ""
    powers, lines = [], []
    for place, (kind, name) in enumerate(KINDS.items()):
        sizes = {
            width: mean([size_of(r, kind) for r in width_runs]).value
            for width, width_runs in sorted(groups_of(finite, lambda r: int(r.at(WIDTH))).items())
        }
        lines += with_points([line(f"{SHORT[kind]}, {form}", sizes, place, "line" if form == MUP else "dash")])
        if len(sizes) > 1:
            powers.append(f"{name} to the power {power(list(sizes), list(sizes.values())).exponent}")
    summary = f"{', '.join(powers)}." if powers else "fewer than two widths have finite statistics."
    begin = f"{NAMES[form]}, after {STEPS} steps at the config's learning rate, activations scale with the width"
    return f"{begin}: {summary}{left_out}", lines


def size_of(run: Result, kind: str) -> float:
    """Returns the RMS of activations after STEPS steps, averaged over layers, or NaN if any value is not finite."""
    kind_values = lambda row: [value for name, value in row.items() if name.startswith(f"stats/{kind}_rms/")]
    last = [value for row in run.history.rows if row["step"] > STEPS for value in kind_values(row)]
    return mean(last).value if last and all(map(is_finite, last)) else math.nan
