"""Comparison of optimizers at their best learning rates: tokens and seconds to a target loss."""

import math
import typing
from collections.abc import Mapping, Sequence

from jaxscale.core.optim.config import OptimConfig
from jaxscale.system.exits import BadInput
from jaxscale.tools.lab.batch import best_rates, ending, to_loss
from jaxscale.tools.lab.estimate import mean, mean_difference
from jaxscale.tools.lab.experiment import SMALL, Conclusion, Options, curve_plot, rate_plot
from jaxscale.tools.lab.rate import OPTIMIZER, RATE, bounds, middle_rate, over_rates
from jaxscale.tools.lab.trial import Base, Result, Trial, groups_of
from jaxscale.tools.reporting.page_tables import n
from jaxscale.tools.reporting.page_text import count, duration

FACTORS = (0.25, 0.5, 1, 2, 4)
PREDICTED = (
    ("arXiv:2502.16982 (Muon)", "about half of AdamW's FLOPs to the same loss, for large models"),
    ("arXiv:2509.02046", "no optimizer is more than 1.4 times as fast as a tuned AdamW at 0.1B, or 1.1 times at 1.2B"),
    ("arXiv:1910.05446", "the ranking depends on how well each optimizer is tuned"),
)
LIMITS = (
    *SMALL,
    "Optimizers are compared seed by seed, since runs with the same seed read the same batches. Noise is pooled over "
    "all optimizers.",
    "Only the learning rate was tuned. All optimizers use the config's momentum, decay and warmup.",
    "Times include the effect of other programs on this machine.",
)


def optimizer_trials(base: Base, options: Options) -> list[Trial]:
    """Returns trials of optimizers x rates x seeds. Raises BadInput for an unknown optimizer."""
    optim, found = base.cfg.optim, []
    known = typing.get_args(typing.get_type_hints(OptimConfig)["name"])
    for name in options.names or known:
        if name not in known:
            raise BadInput(f"--names has {name!r}, which is not an optimizer; use {', '.join(known)}")
        rates = options.rates or [middle_rate(optim, name) * factor for factor in FACTORS]
        found += over_rates(base, {OPTIMIZER: name}, rates, options.seeds_of(2))
    return found


def conclude(results: Sequence[Result]) -> Conclusion:
    """Returns the Conclusion of these results. The first optimizer is the reference."""
    by_name = groups_of(results, lambda r: r.at(OPTIMIZER))
    best = groups_of(best_rates(results, lambda r: r.at(OPTIMIZER)), lambda r: r.at(OPTIMIZER))
    lost = [f"With {name}, a run diverged at every learning rate." for name in by_name if name not in best]
    if not best:
        return Conclusion(lost, SMALL, PREDICTED, [], (), [])
    first = next(iter(best))
    target = mean([ending(r) for r in best[first]]).value
    reached = {name: {r.seed: to_loss(r, target) for r in runs} for name, runs in best.items()}
    losses = {name: {r.seed: r.loss for r in runs} for name, runs in best.items()}
    ends = {name: mean(list(of.values())) for name, of in losses.items()}
    logs = {name: {s: math.log(t) for s, t in of.items() if t} for name, of in reached.items() if all(of.values())}
    tokens = {name: mean([t for t in reached[name].values() if t]).value for name in logs}
    verdict = [
        "Held-out loss, best first: "
        + ", ".join(f"{name} {ends[name]}" for name in sorted(ends, key=lambda name: ends[name]))
        + ".",
        *(faster_text(name, first, losses, logs) for name in best if name != first),
        *lost,
        *bounds(by_name),
    ]
    rows = [
        [
            name, n(f"{runs[0].at(RATE):.3g}"), n(str(ends[name])),
            n(count(tokens[name]) if name in tokens else "not reached"),
            n(duration(tokens[name] / tokens_per_second(runs)) if name in tokens else "not reached"),
        ]
        for name, runs in best.items()
    ]  # fmt: skip
    at_best = {name: (list(by_name).index(name), runs) for name, runs in best.items()}
    drawings = [rate_plot(by_name.items()), curve_plot("Training loss at the best learning rate, smoothed", at_best)]
    head = (
        "optimizer",
        "best learning rate tried",
        "held-out loss",
        f"tokens to {first}'s final loss",
        "training time to it",
    )
    return Conclusion(verdict, LIMITS, PREDICTED, drawings, head, rows)


def tokens_per_second(runs: Sequence[Result]) -> float:
    """Returns the tokens per second of the steps, excluding all other time."""
    tokens = sum(r.history.latest("tokens_seen") or 0 for r in runs)
    return tokens / max(sum(r.seconds for r in runs), 1e-9)


def faster_text(
    name: str, first: str, losses: Mapping[str, Mapping[int, float]], logs: Mapping[str, Mapping[int, float]]
) -> str:
    """Returns a sentence that compares an optimizer with `first`. logs: log of the tokens to first's final loss."""
    off = mean_difference(losses, name, first)
    if off.low is None:
        significance = "one seed cannot show whether the difference exceeds noise"
    else:
        significance = "not significant" if off.has(0.0) else f"significantly {'lower' if off.value < 0 else 'higher'}"
    text = f"{name} minus {first} in held-out loss: {off} nats, {significance}"
    if first not in logs:
        return f"{text}; not every seed of {first} reached its mean final training loss, so tokens are not compared."
    if name not in logs:
        return f"{text}; not every seed of {name} reached {first}'s final training loss."
    part = mean_difference(logs, name, first).mapped(math.exp)
    return f"{text}; {name} needs {part} times the tokens to reach {first}'s final training loss."
