"""Optimizers, each at its own best rate: tokens and seconds to one loss."""

import typing
from collections.abc import Sequence

from jaxscale.lab.batch import ending, to_loss
from jaxscale.lab.estimate import Estimate, mean, optimum
from jaxscale.lab.experiment import SMALL, Conclusion, Run, Wishes, curve_line, drawing, mean_line, over_seeds
from jaxscale.lab.rate import OPTIMIZER, RATE, SGD_TIMES, over_rates
from jaxscale.lab.trial import Base, Result, Trial, groups_of
from jaxscale.optim.config import OptimConfig
from jaxscale.reporting.tables import n
from jaxscale.reporting.text import count, duration
from jaxscale.system.exits import BadInput

FACTORS = (0.25, 0.5, 1, 2, 4)
# Where the rates of an optimizer are looked for, beside those of AdamW: Lion's updates are signs, and its paper advises
# 3 to 10 times less (arXiv:2302.06675, section 5); the others' updates have the size of Adam's, or are made so.
TIMES = {"sgd": SGD_TIMES, "lion": 0.2}
PREDICTED = (
    ("arXiv:2502.16982 (Muon)", "about half of AdamW's FLOPs to the same loss, of large models"),
    ("arXiv:2509.02046", "no optimizer is more than 1.4 times as fast as a tuned AdamW at 0.1B, 1.1 times at 1.2B"),
    ("arXiv:1910.05446", "a ranking turns with how well each is tuned"),
)


def names_of(wishes: Wishes) -> tuple[str, ...]:
    """The optimizers. Raises BadInput for one that is not known."""
    known = typing.get_args(typing.get_type_hints(OptimConfig)["name"])
    for name in wishes.names:
        if name not in known:
            raise BadInput(f"--names has {name!r}; optim.name may be {', '.join(known)}")
    return wishes.names or known


def optimizer_trials(base: Base, wishes: Wishes) -> list[Trial]:
    """Optimizers x rates x seeds."""
    own, found = base.cfg.optim, []
    for name in names_of(wishes):
        middle = own.peak_lr * TIMES.get(name, 1.0)
        rates = wishes.rates or [middle * factor for factor in FACTORS]
        found += over_rates(base, {OPTIMIZER: name}, rates, wishes.seeds_of(2))
    return found


def answer(base: Base, wishes: Wishes, run: Run) -> Conclusion:
    """Each optimizer at its own best rate."""
    return conclude(run(optimizer_trials(base, wishes)))


def conclude(results: Sequence[Result]) -> Conclusion:
    """The Conclusion of these results; the first optimizer is what the others are measured by."""
    best, edges, lines = {}, [], []
    for place, (name, runs) in enumerate(groups_of(results, lambda r: r.at(OPTIMIZER)).items()):
        lines += mean_line(name, runs, RATE, place)
        curves = list(over_seeds(runs, RATE).values())
        if not curves:
            continue
        found = optimum(curves)
        steady = [of for of in groups_of(runs, lambda r: float(r.at(RATE))).values() if not any(r.diverged for r in of)]
        best[name] = min(steady, key=lambda of: mean([r.loss for r in of]).value)
        if found.edge:
            edges.append(f"{name}'s best rate is only bounded by those tried: {found}; give --rates to look further.")
    first, *others = best
    target = mean([ending(r) for r in best[first]]).value
    reached = {name: mean_of([to_loss(r, target) for r in runs]) for name, runs in best.items()}
    losses = {name: mean([r.loss for r in runs]) for name, runs in best.items()}
    ranked = sorted(losses, key=lambda name: losses[name].value)
    verdict = [
        f"Held-out loss, best first: {', '.join(f'{name} {losses[name]}' for name in ranked)}.",
        *(faster_text(name, first, reached, losses) for name in others),
        *edges,
    ]
    rows = [
        [
            name, n(f"{runs[0].at(RATE):.3g}"), n(str(losses[name])),
            n(count(reached[name].value) if reached[name] else "never"),
            n(duration(reached[name].value / rate_of(runs)) if reached[name] else "never"),
        ]
        for name, runs in best.items()
    ]  # fmt: skip
    curves = [curve_line(name, runs[0], place) for place, (name, runs) in enumerate(best.items())]
    drawings = [
        drawing("Loss over the learning rate", lines, "learning rate", log_below=True, unit="nats, held out"),
        drawing("Training loss, each at its best rate", curves, "tokens", unit="nats", focused=True),
    ]
    head = ("optimizer", "best rate tried", "held-out loss", f"tokens to {first}'s end", "seconds of steps to it")
    return Conclusion(verdict, SMALL, PREDICTED, drawings, head, rows)


def mean_of(values: Sequence[float | None]) -> Estimate | None:
    """The mean, None where one run never got there."""
    return None if any(value is None for value in values) else mean(values)


def rate_of(runs: Sequence[Result]) -> float:
    """Tokens a second of steps alone."""
    tokens = sum(r.history.latest("tokens_seen") or 0 for r in runs)
    return tokens / max(sum(r.seconds for r in runs), 1e-9)


def faster_text(name: str, first: str, reached: dict[str, Estimate | None], losses: dict[str, Estimate]) -> str:
    """'muon needs 0.72 of the tokens that adamw needs for its last loss; its end is better beyond the seeds' noise.'"""
    one, other = losses[name], losses[first]
    if one.low is None:
        apart = "one seed does not tell whether their ends differ"
    elif one.high < other.low or one.low > other.high:
        apart = f"its end is {'better' if one.value < other.value else 'worse'} beyond what seeds differ by"
    else:
        apart = "seeds differ by as much as their ends"
    if reached[name] is None or reached[first] is None:
        return f"{name} never reached the loss that {first} ends with; {apart}."
    part = reached[name].value / reached[first].value
    return f"{name} needs {part:.2f} of the tokens that {first} needs for the loss it ends with; {apart}."
