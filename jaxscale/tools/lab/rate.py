"""The best learning rate by batch size and optimizer, which tests linear and square root scaling."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxscale.core.optim.config import OptimConfig
from jaxscale.tools.lab.estimate import Optimum, Power, optimum, power
from jaxscale.tools.lab.experiment import SMALL, Conclusion, Drawing, Options, Run, drawing, line, over_seeds, rate_plot
from jaxscale.tools.lab.trial import RATE, Base, Result, Trial, groups_of
from jaxscale.tools.reporting.page_tables import Cell, n
from jaxscale.tools.reporting.page_text import count, plain
from jaxscale.tools.reporting.plots import PlotLine, with_points

BATCH, OPTIMIZER = "batch_tokens", "optim.name"
TIMES = (1, 2, 4, 8)  # batch sizes relative to the config's
FACTORS = (0.25, 0.5, 1, 2, 4)  # learning rates relative to the square root rule
# Center of the learning rates to try, relative to AdamW's. The value for SGD is a guess, since its updates scale with
# the gradient. For Lion, its paper recommends rates 3 to 10 times smaller (arXiv:2302.06675, section 5). Muon's best
# rates were 2, 4, 4 and at least 8 times AdamW's (docs/lab.md). Updates of other optimizers have the size of Adam's.
BESIDE_ADAMW = {"sgd": 100.0, "lion": 0.2, "muon": 4.0}
FURTHER = 3  # most additional learning rates if the best is at an end of the range
STEP = 2.0  # ratio between successive additional learning rates
FALLING = ("cosine", "linear", "wsd")  # schedules that end at optim.min_lr
RULES = {"linear": 1.0, "square root": 0.5}
PREDICTED = (
    ("arXiv:1706.02677 (SGD)", "the learning rate scales with the batch size (exponent 1), up to large batches"),
    ("arXiv:2205.10287 (Adam)", "the learning rate scales with the square root of the batch size (exponent 0.5)"),
    (
        "arXiv:2405.14578 (Adam-likes)",
        "the best learning rate rises, then falls above the batch size where gradient noise equals the gradient",
    ),
)
LIMITS = (*SMALL, "The exponent's interval covers only the scatter of the best learning rates around the fit.")


def rate_trials(base: Base, options: Options) -> list[Trial]:
    """Returns trials of optimizers x batches x rates x seeds, all with the same number of tokens."""
    optim, usual = base.cfg.optim, base.cfg.tokens_per_step
    found = []
    for name in options.names or dict.fromkeys((optim.name, "sgd")):
        middle = middle_rate(optim, name)
        for batch in options.batches or [usual * times for times in TIMES]:
            rates = options.rates or [middle * (batch / usual) ** 0.5 * factor for factor in FACTORS]
            found += over_rates(base, {OPTIMIZER: name, BATCH: batch}, rates, options.seeds_of(2))
    return found


def middle_rate(optim: OptimConfig, name: str) -> float:
    """Returns the middle of the learning rates to try, derived from the config's optimizer and learning rate."""
    return optim.peak_lr * BESIDE_ADAMW.get(name, 1.0) / BESIDE_ADAMW.get(optim.name, 1.0)


def over_rates(
    base: Base,
    settings: Mapping[str, Any],
    rates: Iterable[float],
    seeds: Iterable[int],
    also: Mapping[str, Any] | None = None,
) -> list[Trial]:
    """Returns one trial per learning rate and seed. also: settings to apply, if `settings` are only labels."""
    optim = base.cfg.optim
    trials = []
    for rate in rates:
        labelled = {**settings, RATE: rate}
        made = {**(labelled if also is None else also), RATE: rate} | floor_of(optim, rate)
        trials += [base.with_settings(made, seed, at=labelled) for seed in seeds]
    return trials


def inside(results: Sequence[Result], options: Options, run: Run, key: Callable[[Result], Any]) -> Sequence[Result]:
    """Returns all results. Adds rates while a group's best rate is at an end of the range, unless --rates is set."""
    for _ in range(0 if options.rates else FURTHER):
        further = [trial for runs in groups_of(results, key).values() for trial in beyond(runs)]
        if not further:
            break
        results = [*results, *run(further)]
    return results


def beyond(runs: Sequence[Result]) -> list[Trial]:
    """Returns one trial per seed at the next learning rate, if the best one is at an end without diverged runs."""
    rates = sorted({float(r.at(RATE)) for r in runs})
    curves = list(over_seeds(runs, RATE).values())
    edge = optimum(curves).edge if curves else "lowest"
    if not edge or edge == "highest" and any(r.diverged for r in runs if float(r.at(RATE)) == rates[-1]):
        return []
    rate = rates[-1] * STEP if edge == "highest" else rates[0] / STEP
    settings = {RATE: rate} | floor_of(runs[0].trial.base.cfg.optim, rate)
    return [
        trial.base.with_settings(settings, trial.seed, also=trial.overrides, at={**trial.at, RATE: rate})
        for trial in {r.seed: r.trial for r in runs}.values()
    ]


def best_rate(runs: Sequence[Result]) -> tuple[Optimum | None, list[Cell]]:
    """Returns the best learning rate, or None, and table cells: the rate, its loss, and the rates that diverged."""
    lost = sorted({float(r.at(RATE)) for r in runs if r.diverged})
    curves = list(over_seeds(runs, RATE).values())
    best = optimum(curves) if curves else None
    texts = (str(best), str(best.y)) if best else ("none", "n/a")
    return best, [n(text) for text in (*texts, ", ".join(map(plain, lost)) or "none")]


def bounds(groups: Mapping[str, Sequence[Result]]) -> list[str]:
    """Returns a sentence that lists the groups whose best learning rate is at an end of the range, or []."""
    best = {name: best_rate(runs)[0] for name, runs in groups.items() if len({r.at(RATE) for r in runs}) > 1}
    return bounded({name: found for name, found in best.items() if found})


def bounded(best: Mapping[str, Optimum]) -> list[str]:
    """Returns the sentence of bounds() for the best learning rates."""
    at_edge = [f"{name}, {found}" for name, found in best.items() if found.edge]
    return (
        [f"The best learning rate is at the edge of the sweep (a bound) for: {'; '.join(at_edge)}."] if at_edge else []
    )


def floor_of(optim: OptimConfig, rate: float) -> dict[str, float]:
    """Returns the setting of the final learning rate, with the config's ratio to the peak, or {} if there is none."""
    if optim.decay not in FALLING:
        return {}
    return {"optim.min_lr": rate * optim.min_lr / optim.peak_lr if optim.peak_lr else 0.0}


def conclude(results: Sequence[Result]) -> Conclusion:
    """Returns the Conclusion of these results."""
    verdict: list[str] = []
    drawings: list[Drawing] = []
    rows: list[list[str | Cell]] = []
    best_lines: list[PlotLine] = []
    for place, (name, name_runs) in enumerate(groups_of(results, lambda r: r.at(OPTIMIZER)).items()):
        batches = dict(sorted(groups_of(name_runs, lambda r: int(r.at(BATCH))).items()))
        found = {batch: best_rate(runs) for batch, runs in batches.items()}
        best = {batch: optimum for batch, (optimum, _) in found.items() if optimum}
        rows += [[name, n(count(batch)), *cells] for batch, (_, cells) in found.items()]
        labelled = [(f"{count(batch)} tokens per step", runs) for batch, runs in batches.items()]
        drawings.append(rate_plot(labelled, f"{name}: loss over the learning rate", unit="nats"))
        best_lines += with_points([line(name, {batch: o.x.value for batch, o in best.items()}, place)])
        verdict.append(f"With {name}, {in_words(best)}")
    drawings.append(drawing("Best learning rate", best_lines, "tokens per step", log_below=True, log=True))
    head = ("optimizer", "tokens per step", "best learning rate", "loss", "learning rates that diverged")
    return Conclusion(verdict, LIMITS, PREDICTED, drawings, head, rows)


def in_words(best: dict[int, Optimum]) -> str:
    """Returns text such as 'the best learning rate scales as batch size to the power 0.45: ...'."""
    bracketed = {batch: found for batch, found in best.items() if not found.edge}
    edges = "".join(f" {text}" for text in bounded({f"{count(batch)} tokens": o for batch, o in best.items()}))
    if len(bracketed) < 3:
        found = f"the best learning rate is inside the sweep for {len(bracketed)} batch sizes"
        return f"{found}, but a fit needs 3; try more batch sizes.{edges}"
    law: Power = power(list(bracketed), [found.x.value for found in bracketed.values()])
    fits = [name for name, exponent in RULES.items() if law.exponent.has(exponent)]
    misses = [name for name in RULES if name not in fits]
    rule = f"{' and '.join(fits) or 'neither rule'} fit{'s' if len(fits) < 2 else ''} within the interval"
    exclusion = f", {' and '.join(misses)} do{'es' if len(misses) == 1 else ''} not" if misses and fits else ""
    return f"the best learning rate scales as batch size to the power {law.exponent}: {rule}{exclusion}.{edges}"
