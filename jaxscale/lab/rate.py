"""The best learning rate of each batch, for an Adam-like optimizer and for SGD: linear, a square root, or neither."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxscale.lab.estimate import Optimum, Power, optimum, power
from jaxscale.lab.experiment import SMALL, Conclusion, Drawing, Options, Run, drawing, line, mean_line, over_seeds
from jaxscale.lab.trial import Base, Result, Trial, groups_of
from jaxscale.optim.config import OptimConfig
from jaxscale.reporting.plots import Line, with_points
from jaxscale.reporting.tables import Cell, n
from jaxscale.reporting.text import count, plain

RATE, BATCH, OPTIMIZER = "optim.peak_lr", "batch_tokens", "optim.name"
TIMES = (1, 2, 4, 8)  # the config's batch
FACTORS = (0.25, 0.5, 1, 2, 4)  # of the rate that the square root rule gives for a batch
# Times AdamW's rates: where those of others are looked for; a best rate at the end of what was tried is called a bound.
# SGD: a guess, for its updates have the size of the gradient and not of the rate. Lion: its paper advises 3 to 10 times
# less (arXiv:2302.06675, section 5). Muon: 2, 4, 4 and 8 or more times (a bound) in docs/lab.md. Others'
# updates have the size of Adam's.
BESIDE_ADAMW = {"sgd": 100.0, "lion": 0.2, "muon": 4.0}
FURTHER = 3  # rates more, at most, where a best one is the last that was tried
STEP = 2.0  # between two of them
FALLING = ("cosine", "linear", "wsd")  # schedules that end at optim.min_lr
RULES = {"linear": 1.0, "square root": 0.5}
PREDICTED = (
    ("arXiv:1706.02677 (SGD)", "the rate goes with the batch: an exponent of 1, until batches are large"),
    ("arXiv:2205.10287 (Adam)", "the rate goes with the square root of the batch: an exponent of 0.5"),
    (
        "arXiv:2405.14578 (Adam-likes)",
        "the best rate rises, then falls again beyond the batch where the noise is as large as the gradient",
    ),
)

LIMITS = (*SMALL, "The exponent's interval is of the scatter of the best rates about a line: of these batches alone.")


def rate_trials(base: Base, options: Options) -> list[Trial]:
    """Optimizers x batches x rates x seeds, each for the same tokens."""
    own, usual = base.cfg.optim, base.cfg.tokens_per_step
    found = []
    for name in options.names or dict.fromkeys((own.name, "sgd")):
        middle = middle_rate(own, name)
        for batch in options.batches or [usual * times for times in TIMES]:
            rates = options.rates or [middle * (batch / usual) ** 0.5 * factor for factor in FACTORS]
            found += over_rates(base, {OPTIMIZER: name, BATCH: batch}, rates, options.seeds_of(2))
    return found


def middle_rate(own: OptimConfig, name: str) -> float:
    """Where the rates of an optimizer are looked for, by the config's rate for its own."""
    return own.peak_lr * BESIDE_ADAMW.get(name, 1.0) / BESIDE_ADAMW.get(own.name, 1.0)


def over_rates(
    base: Base,
    settings: Mapping[str, Any],
    rates: Iterable[float],
    seeds: Iterable[int],
    also: Mapping[str, Any] | None = None,
) -> list[Trial]:
    """A trial of each rate and seed. also: what else is set, where `settings` is what the label says of it."""
    own = base.cfg.optim
    trials = []
    for rate in rates:
        told = {**settings, RATE: rate}
        made = {**(told if also is None else also), RATE: rate} | floor_of(own, rate)
        trials += [base.with_settings(made, seed, at=told) for seed in seeds]
    return trials


def inside(results: Sequence[Result], options: Options, run: Run, key: Callable[[Result], Any]) -> Sequence[Result]:
    """These results, and those of further rates where the best of a group by `key` was the last tried.

    Rates that a person chose are not added to.
    """
    for _ in range(0 if options.rates else FURTHER):
        further = [trial for runs in groups_of(results, key).values() for trial in beyond(runs)]
        if not further:
            break
        results = [*results, *run(further)]
    return results


def beyond(runs: Sequence[Result]) -> list[Trial]:
    """A trial of each seed at a rate beyond those of the runs, where their best rate is the last; else none."""
    rates = sorted({float(r.at(RATE)) for r in runs})
    curves = list(over_seeds(runs, RATE).values())
    edge = optimum(curves).edge if curves else "lowest"
    if not edge or edge == "highest" and any(r.diverged for r in runs if float(r.at(RATE)) == rates[-1]):
        return []
    rate = rates[-1] * STEP if edge == "highest" else rates[0] / STEP
    return [at_rate(trial, rate) for trial in {r.seed: r.trial for r in runs}.values()]


def at_rate(trial: Trial, rate: float) -> Trial:
    """The trial with another rate."""
    settings = {RATE: rate} | floor_of(trial.base.cfg.optim, rate)
    return trial.base.with_settings(settings, trial.seed, also=trial.overrides, at={**trial.at, RATE: rate})


def best_rate(runs: Sequence[Result]) -> tuple[Optimum | None, list[Cell]]:
    """(the best rate of runs that differ in rate and seed, cells: it, its loss, the rates at which some diverged)."""
    lost = sorted({float(r.at(RATE)) for r in runs if r.diverged})
    curves = list(over_seeds(runs, RATE).values())
    best = optimum(curves) if curves else None
    texts = (str(best), str(best.y)) if best else ("none", "n/a")
    return best, [n(text) for text in (*texts, ", ".join(map(plain, lost)) or "none")]


def bounds(groups: Mapping[str, Sequence[Result]]) -> list[str]:
    """A sentence on the groups, by their names, whose best rate lies at the end of those tried; none without one."""
    best = {name: best_rate(runs)[0] for name, runs in groups.items() if len({r.at(RATE) for r in runs}) > 1}
    return bounded({name: found for name, found in best.items() if found})


def bounded(best: Mapping[str, Optimum]) -> list[str]:
    """As bounds(), of the best rates themselves."""
    at_edge = [f"of {name} {found}" for name, found in best.items() if found.edge]
    return [f"Only bounded by the rates tried: the best rate {', '.join(at_edge)}."] if at_edge else []


def floor_of(optim: OptimConfig, rate: float) -> dict[str, float]:
    """The last rate of a schedule that has one, the same part of its peak as in the config."""
    if optim.decay not in FALLING:
        return {}
    return {"optim.min_lr": rate * optim.min_lr / optim.peak_lr if optim.peak_lr else 0.0}


def answer(base: Base, options: Options, run: Run) -> Conclusion:
    """The exponent of the best rate over the batch, for each optimizer."""
    of_batch = lambda r: (r.at(OPTIMIZER), r.at(BATCH))
    return conclude(inside(run(rate_trials(base, options)), options, run, of_batch))


def conclude(results: Sequence[Result]) -> Conclusion:
    """The Conclusion of these results."""
    verdict: list[str] = []
    drawings: list[Drawing] = []
    rows: list[list[str | Cell]] = []
    best_lines: list[Line] = []
    for place, (name, of_name) in enumerate(groups_of(results, lambda r: r.at(OPTIMIZER)).items()):
        best: dict[int, Optimum] = {}
        lines: list[Line] = []
        for number, (batch, of_batch) in enumerate(sorted(groups_of(of_name, lambda r: int(r.at(BATCH))).items())):
            lines += mean_line(f"{count(batch)} tokens a step", of_batch, RATE, number)
            found, cells = best_rate(of_batch)
            if found:
                best[batch] = found
            rows.append([name, n(count(batch)), *cells])
        drawings.append(
            drawing(f"{name}: loss over the learning rate", lines, "learning rate", log_below=True, unit="nats")
        )
        best_lines += with_points([line(name, {batch: o.x.value for batch, o in best.items()}, place)])
        verdict.append(f"With {name} {in_words(best)}")
    drawings.append(drawing("Best rate of each batch", best_lines, "tokens a step", log_below=True, log=True))
    head = ("optimizer", "tokens a step", "best rate", "loss there", "rates that diverged")
    return Conclusion(verdict, LIMITS, PREDICTED, drawings, head, rows)


def in_words(best: dict[int, Optimum]) -> str:
    """'the best rate goes with the batch to the power 0.45 (0.3 to 0.6): a square root fits, linear does not.'"""
    told = {batch: found for batch, found in best.items() if not found.edge}
    edges = "".join(f" {text}" for text in bounded({f"{count(batch)} tokens": o for batch, o in best.items()}))
    if len(told) < 3:
        return f"too few batches have their best rate inside the rates tried, {len(told)} of 3: try more.{edges}"
    law: Power = power(list(told), [found.x.value for found in told.values()])
    fits = [name for name, exponent in RULES.items() if law.exponent.has(exponent)]
    misses = [name for name in RULES if name not in fits]
    rule = f"{' and '.join(fits) or 'neither rule'} fit{'s' if len(fits) < 2 else ''} within the interval"
    rest = f", {' and '.join(misses)} do{'es' if len(misses) == 1 else ''} not" if misses and fits else ""
    return f"the best rate goes with the batch to the power {law.exponent}: {rule}{rest}.{edges}"
