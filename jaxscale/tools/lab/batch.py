"""Tokens to a target loss by batch size, and the critical batch from these tokens and from gradient noise."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale import units
from jaxscale.tools.lab.estimate import Critical, Estimate, Undetermined, critical_batch, mean, noise_scale, tokens_to
from jaxscale.tools.lab.experiment import SMALL, Conclusion, Drawing, Options, Run, curves_of, drawing, line, rate_plot
from jaxscale.tools.lab.rate import BATCH, FACTORS, RATE, bounds, floor_of, inside, over_rates
from jaxscale.tools.lab.trial import Base, Result, Trial, groups_of
from jaxscale.tools.planning.scaling import critical_batch as published_batch
from jaxscale.tools.reporting.page_tables import n
from jaxscale.tools.reporting.page_text import count
from jaxscale.tools.reporting.plots import PlotLine, with_points

TIMES = (1, 2, 4, 8, 16)  # batch sizes relative to the config's
NOISE_TIMES = (1, 8)  # batch sizes, relative to the config's, whose gradient norms are compared
NOISE_STEPS = 48  # gradients per batch; the width of the interval falls with the square root of this number
MARGIN = 1.02  # ratio of the target loss to the highest final loss, so that every batch reaches the target
PREDICTED = (
    (
        "arXiv:1812.06162",
        "tokens to a loss grow as 1 + batch / critical batch; the critical batch is about the gradient noise scale",
    ),
    ("arXiv:2001.08361, eq. 1.4", "the critical batch depends only on the loss: 2e8 tokens * loss ** -4.76"),
    ("arXiv:2410.21676", "the critical batch grows with the training tokens and hardly depends on model size"),
)
LIMITS = (
    *SMALL,
    "Every batch size reached the target loss: the largest batch at the end of its run, smaller batches soon after "
    "warmup. The critical batch grows as the loss falls.",
)


def batch_trials(base: Base, options: Options) -> list[Trial]:
    """Returns trials of batches x rates x seeds with equal numbers of tokens. Rates scale with sqrt(batch size)."""
    optim, usual = base.cfg.optim, base.cfg.tokens_per_step
    found = []
    for batch in options.batches or tuple(usual * times for times in TIMES):
        root = (batch / usual) ** 0.5
        rates = options.rates or [optim.peak_lr * root * factor for factor in FACTORS[1:4]]
        found += over_rates(base, {BATCH: batch}, rates, options.seeds_of(2))
    return found


def noise_trials(base: Base, best: Result) -> list[Trial]:
    """Returns short trials that log gradient norms. They start from a finished run's weights, at learning rate 0."""
    still = floor_of(base.cfg.optim, 0.0) | {
        "optim.warmup_tokens": 0, "init.from_path": best.folder, "checkpoint.save_every_steps": 0,
        "monitor.log_every_steps": 1,
    }  # fmt: skip
    return [
        base.with_settings({BATCH: batch, RATE: 0.0}, 0, still | {"train_tokens": f"{NOISE_STEPS} steps"})
        for batch in (base.cfg.tokens_per_step * times for times in NOISE_TIMES)
    ]


def answer(base: Base, options: Options, run: Run) -> Conclusion:
    """Compares tokens and steps to a target loss across batch sizes. Estimates the critical batch size in two ways."""
    results = inside(run(batch_trials(base, options)), options, run, tokens_per_step)
    if not (best := best_rates(results, tokens_per_step)):
        return Conclusion(["A run diverged at every batch size and learning rate."], LIMITS, PREDICTED, [], (), [])
    return conclude(results, run(noise_trials(base, min(best, key=tokens_per_step))))


def tokens_per_step(result: Result) -> int:
    """Returns the tokens per step."""
    return int(result.at(BATCH))


def best_rates(results: Sequence[Result], key: Callable[[Result], Any]) -> list[Result]:
    """Returns each group's runs at its best learning rate: the lowest mean loss without diverged runs."""
    found = []
    for group in groups_of(results, key).values():
        by_rate = groups_of(group, lambda r: float(r.at(RATE))).values()
        steady = [runs for runs in by_rate if not any(r.diverged for r in runs)]
        found += min(steady, key=lambda runs: mean([r.loss for r in runs]).value, default=[])
    return found


def conclude(results: Sequence[Result], still: Sequence[Result]) -> Conclusion:
    """Returns the Conclusion. still: results of noise_trials(), with the smaller batch first."""
    best, tried = best_rates(results, tokens_per_step), dict(sorted(groups_of(results, tokens_per_step).items()))
    by_batch = dict(sorted(groups_of(best, tokens_per_step).items()))
    target = max(ending(r) for r in best) * MARGIN
    reached = {
        b: mean(found) for b, runs in by_batch.items() if (found := [t for r in runs if (t := to_loss(r, target))])
    }
    amounts = ", ".join(f"{count(tokens.value)} at {count(batch)} tokens per step" for batch, tokens in reached.items())
    verdict = [f"Tokens to a training loss of {target:.3f}: {amounts}."]
    law: Critical | None = None
    try:
        law = critical_batch(list(reached), [tokens.value for tokens in reached.values()])
        verdict.append(f"The critical batch size from these curves is {tokens_text(law.batch)}.")
    except Undetermined as error:
        verdict.append(f"These curves do not determine a critical batch size: {error}.")
    verdict.append(noise_text(still))
    loss = mean([r.loss for r in best]).value
    verdict.append(
        f"arXiv:2001.08361 gives a critical batch size of {count(published_batch(loss))} tokens at {loss:.2f} nats per "
        "token. That law was fitted to BPE tokens; losses of other tokenizers are not comparable."
    )
    verdict += bounds({f"{count(batch)} tokens": runs for batch, runs in tried.items()})
    rows = []
    for b, runs in by_batch.items():
        to_target = ("never", "", "")  # tokens, steps and FLOPs
        if tokens := reached.get(b):
            flops = tokens.value * runs[0].trial.cfg.flops_per_token
            to_target = (count(tokens.value), f"{tokens.value / b:,.0f}", f"{flops:.3g}")
        ends = str(mean([r.loss for r in runs]))
        rows.append([*map(n, (count(b), f"{runs[0].at(RATE):.3g}", ends, *to_target))])
    head = ("tokens per step", "best learning rate tried", "held-out loss", "tokens to target loss", "steps", "FLOPs")
    return Conclusion(verdict, LIMITS, PREDICTED, drawn(tried, by_batch, reached, law), head, rows)


def drawn(
    tried: Mapping[int, Sequence[Result]],
    by_batch: Mapping[int, Sequence[Result]],
    reached: Mapping[int, Estimate],
    law: Critical | None,
) -> list[Drawing]:
    """Returns the plots. tried: all runs by batch size. by_batch: runs at the best learning rate by batch size."""
    fits: list[PlotLine] = with_points([line("measured", {b: t.value for b, t in reached.items()}, 0)])
    if law:
        fits.append(line("1 + batch / critical batch", {b: law(b) for b in by_batch}, 1, "dash"))
    places = {batch: place for place, batch in enumerate(tried)}
    name = lambda batch: f"{count(batch)} tokens per step"
    curves = lambda by: [
        one
        for batch, runs in by_batch.items()
        for one in curves_of(name(batch), runs, places[batch], by=by(batch), smoothed=True)
    ]
    a_token = next(iter(by_batch.values()))[0].trial.cfg.flops_per_token
    note = f"A token takes {a_token:.3g} FLOPs at every batch size, so curves over FLOPs look the same."
    return [
        drawing("Tokens to the target loss", fits, "tokens per step", log_below=True, numbers="count"),
        rate_plot((name(batch), runs) for batch, runs in tried.items()),
        drawing("Training loss over tokens, smoothed", curves(lambda _: 1), "tokens", unit="nats", note=note),
        drawing(
            "Training loss over steps, smoothed", curves(lambda batch: batch), "optimizer steps",
            log_below=True, unit="nats",
        ),
    ]  # fmt: skip


def ending(result: Result) -> float:
    """Returns the mean training loss over the last twentieth of a run."""
    _, losses = result.curve()
    last = losses[-max(1, len(losses) // 20) :]
    return sum(last) / len(last)


def to_loss(result: Result, target: float) -> float | None:
    """Returns the number of tokens to the target loss. Smooths the loss over the same fraction of every run."""
    tokens, losses = result.curve()
    return tokens_to(target, tokens, losses, half=max(1, len(losses) // 40))


def tokens_text(batch: Estimate) -> str:
    """Returns a batch size and its interval as text, such as '12.3K tokens (9K to 16K)'."""
    between = f" ({count(batch.low)} to {count(batch.high)})" if batch.low is not None else ""
    return f"{count(batch.value)} tokens{between}"


def noise_text(still: Sequence[Result]) -> str:
    """Returns a sentence about the gradient noise scale."""
    norms = [[row["grad_norm"] for row in r.history.rows if row.get("grad_norm")] for r in still]
    try:
        small, large = (float(r.at(BATCH)) for r in still)
        scale = noise_scale(small, large, *norms)
    except Undetermined as error:
        return f"The gradient noise scale at the end of training could not be estimated: {error}."
    steps = units.count(len(norms[0]))
    measured = f"at the end of training, from {steps} gradients at each of two batch sizes"
    return f"The gradient noise scale is {tokens_text(scale)} ({measured}; the loss there is lower than in the curves)."
