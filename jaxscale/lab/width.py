"""The best rate over widths, under muP and without: whether what is tuned small holds when large."""

from collections.abc import Sequence

from jaxscale.lab.estimate import power
from jaxscale.lab.experiment import SMALL, Conclusion, Run, Wishes, drawing, line, mean_line
from jaxscale.lab.rate import RATE, best_rate, inside, over_rates
from jaxscale.lab.sizes import wider
from jaxscale.lab.trial import Base, Result, Trial, groups_of
from jaxscale.reporting.tables import n

FORM, WIDTH = "parametrisation", "width"
STANDARD, MUP = "standard", "muP"
NAMES = {STANDARD: "without muP", MUP: "with muP"}
TIMES = (1, 2, 4)  # the config's width
FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)  # of the config's rate
PREDICTED = (
    (
        "arXiv:2203.03466",
        "under muP the best rate is the same at every width; without it falls, for Adam, about as 1 / width",
    ),
    ("arXiv:2407.05872", "without muP too, a rate for each kind of matrix can hold over widths, if it is scaled right"),
)


def width_trials(base: Base, wishes: Wishes) -> list[Trial]:
    """Parametrisations x widths x rates x seeds. Raises BadInput for a model that has no muP."""
    own, found = base.cfg.optim, []
    for form in (STANDARD, MUP):
        for times in TIMES:
            sizes = {name: value for name, value in wider(base.cfg, times).items() if name.startswith("model.")}
            if form == MUP:
                sizes["model.mup.base_dim"] = base.cfg.model.embed_dim
            rates = wishes.rates or [own.peak_lr * factor for factor in FACTORS]
            told = {FORM: form, WIDTH: sizes["model.embed_dim"]}
            found += over_rates(base, told, rates, wishes.seeds_of(2), also=sizes)
    return found


def answer(base: Base, wishes: Wishes, run: Run) -> Conclusion:
    """How the best rate moves with the width, with muP and without."""
    of_width = lambda r: (r.at(FORM), r.at(WIDTH))
    return conclude(inside(width_trials(base, wishes), wishes, run, of_width))


def conclude(results: Sequence[Result]) -> Conclusion:
    """The Conclusion of these results."""
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
        bests.append(line(form, {width: found.x.value for width, found in best.items()}, place))
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
    limits = (
        *SMALL,
        "Three widths, at most 4 times the first: an exponent's interval, of the scatter about a line, is wide with so "
        "few. docs/explanation/mup.md has activations over 16 times.",
    )
    return Conclusion(
        verdict, limits, PREDICTED, drawings, ("", "width", "best rate", "loss there", "diverged at"), rows
    )
