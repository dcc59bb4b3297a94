"""Scaling ladder: sizes trained at equal tokens per parameter, to test whether small runs predict larger ones."""

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
TIMES = (0.5, 1, 1.5, 2, 2.5)  # relative to the config's width and depth
FAR = 10.0  # times the largest rung's parameters: size of the reported prediction if no target was run
LAST = "the last rung"
NO_FLOOR = 0.05  # E below this fraction of the lowest loss counts as no floor
PREDICTED = (
    (
        "arXiv:2203.15556",
        "the loss falls to a floor E as powers of parameters and tokens, 0.34 and 0.28; arXiv:2404.10102 fits the same "
        "data by 0.35 and 0.37",
    ),
    ("arXiv:2001.08361", "no floor is seen: L(N) falls as N ** -0.076, L(D) as D ** -0.095"),
    ("arXiv:2303.08774", "a final loss was foretold well from runs of at most a ten-thousandth of its compute"),
)


class Tried(NamedTuple):
    """Prediction of a law for a size outside its data, and the measured loss."""

    point: Point  # parameters, tokens and measured mean loss; NaN if not trained
    said: Interval
    seen: Estimate | None
    times: float  # parameters, relative to the largest run behind the law
    flops_times: float


def rung(base: Base, times: float, seeds: Sequence[int]) -> list[Trial]:
    """Returns the trials of one size, one for each seed, with the config's ratio of tokens to parameters."""
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
    """Returns one run of the smallest size with at least `target` times `most` parameters, the largest rung's."""
    heads = base.cfg.model.num_heads
    times = max(options.sizes or TIMES)
    while True:
        times = (round(times * heads) + 1) / heads
        (trial,) = rung(base, times, [0])
        if trial.cfg.model.num_params >= options.target * most:
            return trial


def answer(base: Base, options: Options, run: Run) -> Conclusion:
    """Compares predictions from the rungs with measured losses."""
    results = run(ladder_trials(base, options))
    target: list[Result] = []
    if options.target:
        target = run([target_trial(base, options, max(int(r.at(SIZE)) for r in results))])
    return conclude(results, target)


def conclude(results: Sequence[Result], target: Sequence[Result] = ()) -> Conclusion:
    """Returns the Conclusion of these results. target: results of the much larger run, if there is one."""
    finished = [r for r in results if not r.diverged]
    sizes = dict(sorted(groups_of(finished, lambda r: int(r.at(SIZE))).items()))
    *smaller, last = sizes.values() if sizes else [[]]
    verdict, tried, laws = [], [], []
    for name, of, runs in (
        (LAST, [r for group in smaller for r in group], last),
        ("the target", finished, [r for r in target if not r.diverged]),
    ):
        if name != LAST and target and not runs:
            verdict.append("The target diverged: nothing can be compared with what all rungs foretell.")
            continue
        try:
            law = law_of(of)
            one = foretell(law, runs)
        except BadInput as error:
            few = f"{error}".partition(":")[0]  # the remaining text names flags of `jaxscale plan`
            verdict.append(f"Of {name} nothing is foretold: {few}; give more --sizes or --seeds.")
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
        "An interval of 90% that holds once or twice does not prove that it holds nine times in ten; it knows what "
        "runs scatter by and what the exponents leave open, and not the errors of another law.",
        "Depth goes with width in whole layers, so rungs of one or two are no large model made small.",
        "Rates go with the inverse of the width (Muon's with that of its root), under muP "
        "by its rules, and the batch is the same at all sizes: "
        "neither was tuned at each.",
        *([f"{len(lost)} of {len(results) + len(target)} runs diverged and are left out."] if lost else []),
    )
    rows = []
    for r in (*finished, *(r for r in target if not r.diverged)):
        point, model = point_of(r), r.trial.cfg.model
        sizes_text = (count(point.params), str(model.num_layers), str(model.embed_dim), count(point.tokens))
        rows.append([*map(n, (*sizes_text, f"{point.compute:.3g}", f"{point.loss:.4f}"))])
    head = ("parameters", "layers", "width", "tokens", "FLOPs", "held-out loss")
    return Conclusion(verdict, limits, PREDICTED, drawn(finished, target, tried, laws), head, rows)


def law_of(runs: Sequence[Result]) -> LossLaw:
    """Fits a loss law to these runs, with noise estimated from their seeds. Raises BadInput as fit() does."""
    repeated = [[math.log(r.loss) for r in group] for group in groups_of(runs, lambda r: int(r.at(SIZE))).values()]
    return fit([point_of(r) for r in runs], noise=estimate_noise(repeated))


def foretell(law: LossLaw, runs: Sequence[Result]) -> Tried:
    """Compares a law's prediction with runs not fitted; without runs, predicts FAR times its largest run."""
    most = max(law.points, key=lambda known: known.compute)
    if runs:
        point, seen = point_of(runs[0]), mean([r.loss for r in runs])
        times, flops_times = point.params / most.params, point.compute / most.compute
    else:
        point, seen = Point(FAR * most.params, FAR * most.tokens, math.nan), None
        times, flops_times = FAR, point.compute / (6 * most.params * most.tokens)
    return Tried(point, law.predict(point.params, point.tokens), seen, times, flops_times)


def in_words(name: str, one: Tried) -> str:
    """Describes a prediction and the measured loss, if any."""
    low, middle, high = one.said
    said = f"{middle:.4f} nats ({low:.4f} to {high:.4f})"
    of = (
        f"{count(one.point.params)} parameters and {count(one.point.tokens)} tokens, {one.times:.3g} times the "
        f"parameters and {one.flops_times:.3g} times the FLOPs of the largest run behind the law"
    )
    if one.seen is None:
        return f"All rungs foretell {said} for {of}; it was not trained (--target={FAR:g} does)."
    who = "The smaller rungs" if name == LAST else "All rungs"
    coverage = "inside the interval" if low <= one.seen.value <= high else "outside the interval"
    off = one.seen.value / middle - 1
    between = "" if one.seen.low is None else f" ({one.seen.low:.4f} to {one.seen.high:.4f})"
    return (
        f"{who} foretell {said} for {name}, of {of}; seen: {one.seen.value:.4f} nats{between}, {coverage}, "
        f"{percent(abs(off))} {'above' if off > 0 else 'below'} what was said."
    )


def law_text(law: LossLaw) -> str:
    """Describes the fitted law, the interval of its exponent, and whether it has a loss floor."""
    terms, intervals = law.terms, law.to_dict()["intervals"]
    name, scale, power = ("alpha", terms.A, terms.alpha) if terms.A else ("beta", terms.B, terms.beta)
    variable = "N" if terms.A else "D"
    text = f"The law of all rungs: L = {terms.E:.3g} + {scale:.3g} / {variable} ** {power:.2f}"
    if terms.A and terms.B:
        text += f" + {terms.B:.3g} / D ** {terms.beta:.2f}"
    text += f", with an exponent of {intervals[name][0]:.2f} to {intervals[name][1]:.2f}"
    if law.form == "params":
        text += " along these tokens a parameter"
    if terms.E < NO_FLOOR * min(point.loss for point in law.points):
        text += "; E is next to nothing: no floor shows yet, so far beyond these runs it falls too low"
    return f"{text}."


def kaplan_text(points: Sequence[Point]) -> str:
    """Describes power laws through the rungs without a loss floor, next to those of arXiv:2001.08361."""
    sizes, losses = [p.params for p in points], [p.loss for p in points]
    theirs = power(sizes, [kaplan_loss(p.params, p.tokens) for p in points]).exponent.value
    by_size, by_flops = power(sizes, losses).exponent, power([p.compute for p in points], losses).exponent
    return (
        f"Without a floor the loss goes along these rungs as N ** {by_size} and C ** {by_flops}, where "
        f"arXiv:2001.08361 has N ** {theirs:.3f} by its L(N, D) and C ** -{KAPLAN_FLOPS[1]:.3f} by its L(C)."
    )


def drawn(
    rungs: Sequence[Result], target: Sequence[Result], tried: Sequence[Tried], laws: Sequence[LossLaw]
) -> list[Drawing]:
    """Returns the plot of loss over parameters: measured losses, and predictions with their intervals."""
    seen = [point_of(r) for r in (*rungs, *(r for r in target if not r.diverged))]
    lines = [line("seen", [(p.params, p.loss) for p in seen], 0, "dots")]
    if laws:
        law, ends = laws[-1], seen + [one.point for one in tried]
        lines.append(line("law of all rungs", {p.params: law.terms.loss(p.params, p.tokens) for p in ends}, 0, "dash"))
    lines.append(line("foretold", [(one.point.params, one.said.middle) for one in tried], 1, "dots"))
    ends = lambda one: [(one.point.params, one.said.low), (one.point.params, one.said.high)]
    lines += [line("its interval", ends(one), 1) for one in tried]
    return [drawing("Loss over parameters", lines, "parameters", log_below=True, unit="nats, held out")]
