"""Scaling ladder of sizes with equal tokens per parameter, to test if small runs predict larger runs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxscale.system.exits import BadInput
from jaxscale.tools.lab.estimate import Estimate, mean, power
from jaxscale.tools.lab.experiment import SMALL, Conclusion, Drawing, Options, Run, drawing, line
from jaxscale.tools.lab.isoflop import point_of
from jaxscale.tools.lab.sizes import larger, train_tokens_of
from jaxscale.tools.lab.trial import Base, Result, Trial, distinct, groups_of
from jaxscale.tools.planning.loss_law import Interval, LossLaw, Point, fit
from jaxscale.tools.planning.scaling import KAPLAN_FLOPS, kaplan_loss
from jaxscale.tools.planning.scaling_ladder import estimate_noise
from jaxscale.tools.reporting.page_tables import n
from jaxscale.tools.reporting.page_text import count, percent

SIZE = "parameters"
TIMES = (0.5, 1, 1.5, 2, 2.5)  # sizes relative to the config's width and depth
FAR = 10.0  # size of the prediction without a target, relative to the largest run's parameters
LAST = "the largest size"
NO_FLOOR = 0.05  # E below this fraction of the lowest loss counts as no floor
PREDICTED = (
    (
        "arXiv:2203.15556",
        "the loss falls to a floor E as powers of parameters (0.34) and tokens (0.28); arXiv:2404.10102 fits 0.35 and "
        "0.37 to the same data",
    ),
    ("arXiv:2001.08361", "no loss floor: L(N) falls as N ** -0.076, L(D) as D ** -0.095"),
    ("arXiv:2303.08774", "a final loss was predicted accurately from runs with at most 1/10,000 of its compute"),
)


class Tried(NamedTuple):
    """A loss law's prediction for a size to which it was not fitted, and the measured loss."""

    point: Point  # parameters, tokens and loss; the loss is NaN if not trained
    predicted: Interval
    measured: Estimate | None
    times: float  # parameters relative to the largest run fitted
    flops_times: float  # FLOPs relative to the largest run fitted


def rung(base: Base, times: float, seeds: Sequence[int]) -> list[Trial]:
    """Returns one trial per seed at one size of the ladder, with the config's ratio of tokens to parameters."""
    cfg, settings = base.cfg, larger(base.cfg, times)
    params = base.with_settings(settings).cfg.model.num_params
    steps = round(train_tokens_of(base) * params / cfg.model.num_params / cfg.tokens_per_step)
    settings["train_tokens"] = max(1, steps) * cfg.tokens_per_step
    return [base.with_settings(settings, seed, at={SIZE: params}) for seed in seeds]


def ladder_trials(base: Base, options: Options) -> list[Trial]:
    """Returns trials of sizes x seeds."""
    sizes = options.sizes or TIMES  # two may round to the same number of heads
    return distinct([trial for times in sizes for trial in rung(base, times, options.seeds_of(2))])


def target_trial(base: Base, options: Options, most: int) -> Trial:
    """Returns a trial of the smallest model with at least options.target * most parameters."""
    heads = base.cfg.model.num_heads
    times = max(options.sizes or TIMES)
    while True:
        times = (round(times * heads) + 1) / heads
        (trial,) = rung(base, times, [0])
        if trial.cfg.model.num_params >= options.target * most:
            return trial


def answer(base: Base, options: Options, run: Run) -> Conclusion:
    """Compares predictions from smaller runs with measured losses."""
    results = run(ladder_trials(base, options))
    target: list[Result] = []
    if options.target:
        target = run([target_trial(base, options, max(int(r.at(SIZE)) for r in results))])
    return conclude(results, target)


def conclude(results: Sequence[Result], target: Sequence[Result] = ()) -> Conclusion:
    """Returns the Conclusion of these results. target: results of the target run, if there is one."""
    finished = [r for r in results if not r.diverged]
    sizes = dict(sorted(groups_of(finished, lambda r: int(r.at(SIZE))).items()))
    *smaller, last = sizes.values() if sizes else [[]]
    verdict, tried, laws = [], [], []
    for name, of, runs in (
        (LAST, [r for group in smaller for r in group], last),
        ("the target", finished, [r for r in target if not r.diverged]),
    ):
        if name != LAST and target and not runs:
            verdict.append("The target run diverged, so the prediction from all sizes cannot be tested.")
            continue
        try:
            law = law_of(of)
            one = compare(law, runs)
        except BadInput as error:
            few = f"{error}".partition(";")[0]  # the remaining text names flags of `jaxscale plan`
            verdict.append(f"No prediction for {name}: {few}; give more --sizes or --seeds.")
            continue
        laws.append(law)
        tried.append(one)
        verdict.append(in_words(name, one))
    if laws:
        verdict.append(law_text(laws[-1]))
    if len(sizes) > 2:
        verdict.append(kaplan_text([point_of(r) for r in finished]))
    lost = [r for r in (*results, *target) if r.diverged]
    limits = (
        *SMALL[:1],
        "One or two losses inside a 90% interval do not verify its coverage. The interval covers the scatter of the "
        "runs and the uncertainty of the exponents, but not a wrong form of the law.",
        "Depth is scaled with width and rounded to whole layers, so models of one or two layers differ in shape.",
        "The learning rate is scaled by 1 / width (Muon: 1 / sqrt(width)), or by muP's rules if muP is on. The batch "
        "size is the same at all sizes. Neither was tuned at each size.",
        *([f"{len(lost)} of {len(results) + len(target)} runs diverged and were excluded."] if lost else []),
    )
    rows = []
    for r in (*finished, *(r for r in target if not r.diverged)):
        point, model = point_of(r), r.trial.cfg.model
        sizes_text = (count(point.params), str(model.num_layers), str(model.embed_dim), count(point.tokens))
        rows.append([*map(n, (*sizes_text, f"{point.compute:.3g}", f"{point.loss:.4f}"))])
    head = ("parameters", "layers", "width", "tokens", "FLOPs", "held-out loss")
    return Conclusion(verdict, limits, PREDICTED, drawn(finished, target, tried, laws), head, rows)


def law_of(runs: Sequence[Result]) -> LossLaw:
    """Returns a loss law fitted to the runs, with noise estimated from seeds. Raises BadInput for too few runs."""
    repeated = [[math.log(r.loss) for r in group] for group in groups_of(runs, lambda r: int(r.at(SIZE))).values()]
    return fit([point_of(r) for r in runs], noise=estimate_noise(repeated))


def compare(law: LossLaw, runs: Sequence[Result]) -> Tried:
    """Returns a law's prediction for `runs`, to which it was not fitted, or without runs, for FAR times the largest."""
    most = max(law.points, key=lambda known: known.compute)
    if runs:
        point, measured = point_of(runs[0]), mean([r.loss for r in runs])
        times, flops_times = point.params / most.params, point.compute / most.compute
    else:
        point, measured = Point(FAR * most.params, FAR * most.tokens, math.nan), None
        times, flops_times = FAR, point.compute / (6 * most.params * most.tokens)
    return Tried(point, law.predict(point.params, point.tokens), measured, times, flops_times)


def in_words(name: str, one: Tried) -> str:
    """Returns a sentence about a prediction and the measured loss, if there is one."""
    low, middle, high = one.predicted
    forecast = f"{middle:.4f} nats ({low:.4f} to {high:.4f})"
    of = (
        f"{count(one.point.params)} parameters and {count(one.point.tokens)} tokens, {one.times:.3g} times the "
        f"parameters and {one.flops_times:.3g} times the FLOPs of the largest run fitted"
    )
    if one.measured is None:
        return f"Prediction from all sizes: {forecast} for {of}. It was not trained; --target={FAR:g} trains it."
    fitted = "the smaller sizes" if name == LAST else "all sizes"
    coverage = "inside the interval" if low <= one.measured.value <= high else "outside the interval"
    off = one.measured.value / middle - 1
    between = "" if one.measured.low is None else f" ({one.measured.low:.4f} to {one.measured.high:.4f})"
    return (
        f"Prediction from {fitted}: {forecast} for {name} ({of}). Measured: {one.measured.value:.4f} nats{between}, "
        f"{coverage}, {percent(abs(off))} {'above' if off > 0 else 'below'} the prediction."
    )


def law_text(law: LossLaw) -> str:
    """Returns a sentence about the fitted law, the interval of its exponent, and its loss floor."""
    terms, intervals = law.terms, law.to_dict()["intervals"]
    name, scale, power = ("alpha", terms.A, terms.alpha) if terms.A else ("beta", terms.B, terms.beta)
    variable = "N" if terms.A else "D"
    text = f"Law fitted to all sizes: L = {terms.E:.3g} + {scale:.3g} / {variable} ** {power:.2f}"
    if terms.A and terms.B:
        text += f" + {terms.B:.3g} / D ** {terms.beta:.2f}"
    text += f", 90% interval of the exponent {intervals[name][0]:.2f} to {intervals[name][1]:.2f}"
    if law.form == "params":
        text += ", at this ratio of tokens to parameters"
    if terms.E < NO_FLOOR * min(point.loss for point in law.points):
        text += "; E is near 0 (these runs show no loss floor), so predictions far beyond them are too low"
    return f"{text}."


def kaplan_text(points: Sequence[Point]) -> str:
    """Returns a sentence comparing power laws without a loss floor with arXiv:2001.08361."""
    sizes, losses = [p.params for p in points], [p.loss for p in points]
    theirs = power(sizes, [kaplan_loss(p.params, p.tokens) for p in points]).exponent.value
    by_size, by_flops = power(sizes, losses).exponent, power([p.compute for p in points], losses).exponent
    return (
        f"Fitted without a loss floor, the loss scales as N ** {by_size} and C ** {by_flops}; arXiv:2001.08361 has "
        f"N ** {theirs:.3f} from its L(N, D) and C ** -{KAPLAN_FLOPS[1]:.3f} from its L(C)."
    )


def drawn(
    rungs: Sequence[Result], target: Sequence[Result], tried: Sequence[Tried], laws: Sequence[LossLaw]
) -> list[Drawing]:
    """Returns the plot of loss over parameters, with measured losses, and predictions and their intervals."""
    ends = [point_of(r) for r in (*rungs, *(r for r in target if not r.diverged))]
    lines = [line("measured", [(p.params, p.loss) for p in ends], 0, "dots")]
    if laws:
        law, shown = laws[-1], ends + [one.point for one in tried]
        lines.append(line("fitted law", {p.params: law.terms.loss(p.params, p.tokens) for p in shown}, 0, "dash"))
    lines.append(line("predicted", [(one.point.params, one.predicted.middle) for one in tried], 1, "dots"))
    interval = lambda one: [(one.point.params, one.predicted.low), (one.point.params, one.predicted.high)]
    lines += [line("90% interval", interval(one), 1) for one in tried]
    return [drawing("Loss over parameters", lines, "parameters", log_below=True, unit="nats, held out")]
