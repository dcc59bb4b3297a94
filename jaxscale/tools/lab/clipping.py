"""The highest learning rate without divergence, with and without gradient clipping."""

from collections.abc import Sequence

from jaxscale.tools.lab.estimate import mean
from jaxscale.tools.lab.experiment import SMALL, Conclusion, Options, curves_of, drawing, rate_plot
from jaxscale.tools.lab.rate import RATE, over_rates
from jaxscale.tools.lab.trial import Base, Result, Trial, groups_of
from jaxscale.tools.reporting.page_tables import n

CLIP = "optim.clip_norm"
FACTORS = (0.5, 1, 2, 4, 16, 64, 256)  # learning rates relative to the config's
USUAL = 1.0  # clip_norm for configs without clipping
PREDICTED = (
    (
        "arXiv:1905.11881",
        "clipping allows learning rates that diverge without it, if curvature grows with the norm",
    ),
    ("arXiv:1412.6980", "the size of Adam's updates does not depend on the gradient scale: clipping has little effect"),
)


def clipping_trials(base: Base, options: Options) -> list[Trial]:
    """Returns trials of (with, without clipping) x rates x seeds."""
    optim, found = base.cfg.optim, []
    for clip in (optim.clip_norm or USUAL, 0.0):
        rates = options.rates or [optim.peak_lr * factor for factor in FACTORS]
        found += over_rates(base, {CLIP: clip}, rates, options.seeds_of(2))
    return found


def conclude(results: Sequence[Result]) -> Conclusion:
    """Returns the Conclusion of these results."""
    verdict, rows, norms, named, highest, best = [], [], [], {}, {}, {}
    for place, (clip, runs) in enumerate(groups_of(results, lambda r: float(r.at(CLIP))).items()):
        name = f"clipped at {clip:g}" if clip else "not clipped"
        by_rate = dict(sorted(groups_of(runs, lambda r: float(r.at(RATE))).items()))
        steady = [rate for rate, of in by_rate.items() if not any(r.diverged for r in of)]
        lost = [rate for rate in by_rate if rate not in steady]
        highest[name] = (max((r for r in steady if not lost or r < min(lost)), default=None), bool(lost))
        if steady:
            best[name] = min((mean([r.loss for r in by_rate[rate]]) for rate in steady), key=lambda end: end.value)
            norms += curves_of(f"{name}, learning rate {max(steady):.3g}", by_rate[max(steady)], place, "grad_norm")
        named[name] = runs
        rows += [
            [
                name, n(f"{rate:.3g}"), n(f"{sum(r.diverged for r in of)} of {len(of)}"),
                n(str(mean([r.loss for r in of])) if rate in steady else "n/a"),
                n(f"{max((max(r.curve('grad_norm')[1], default=0.0) for r in of), default=0.0):.3g}"),
            ]
            for rate, of in by_rate.items()
        ]  # fmt: skip
    for name, (rate, met) in highest.items():
        if rate is None:
            verdict.append(f"{name}: a run diverged even at the lowest learning rate.")
        else:
            bound = (
                "a run diverged at the next rate" if met else "the highest tried; pass higher --rates to find a limit"
            )
            verdict.append(f"{name}: no run diverged up to a learning rate of {rate:.3g} ({bound}).")
    if len(best) == 2:
        with_it, without = best.values()
        verdict.append(f"The lowest held-out loss is {with_it} nats with clipping and {without} nats without.")
    drawings = [
        rate_plot(named.items()),
        drawing("Gradient norm before clipping", norms, "tokens", log=True),
    ]
    head = ("", "learning rate", "diverged", "held-out loss", "largest gradient norm")
    return Conclusion(verdict, SMALL, PREDICTED, drawings, head, rows)
