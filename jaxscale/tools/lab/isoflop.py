"""Model size against tokens at equal FLOPs, with a comparison of the three approaches of arXiv:2203.15556."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxscale.tools.lab.estimate import mean, power
from jaxscale.tools.lab.experiment import SMALL, Conclusion, Options, drawing, line, mean_line
from jaxscale.tools.lab.sizes import train_tokens_of, wider
from jaxscale.tools.lab.trial import Base, Result, Trial, distinct, groups_of
from jaxscale.tools.planning.best_size import Curve, curve_of_run, smooth, three_approaches
from jaxscale.tools.planning.loss_law import Point
from jaxscale.tools.planning.scaling import KAPLAN_FLOPS, KAPLAN_TOKENS
from jaxscale.tools.reporting.page_tables import n
from jaxscale.tools.reporting.page_text import count, plain
from jaxscale.tools.reporting.plots import PlotLine

SIZE, BUDGET = "width", "FLOPs"
WIDTHS = (0.5, 1, 1.5, 2, 3)  # relative to the config's width
BUDGETS = (0.25, 0.5, 1.0, 2.0)  # relative to the FLOPs of the config's run
FARTHER = 10.0  # predictions are reported for this factor times the largest budget
PREDICTED = (
    ("arXiv:2203.15556", "the best size and its tokens both grow as C ** 0.50 (approach 1)"),
    ("arXiv:2404.10102", "a refit of the same data: the best size grows as C ** 0.51 (approach 3)"),
    ("arXiv:2001.08361", "the best size grows as C ** 0.73; later work attributes that to schedules and small models"),
)


def isoflop_trials(base: Base, options: Options) -> list[Trial]:
    """Returns trials of budgets x sizes x seeds. A run's number of tokens follows from budget and size."""
    tokens, found = train_tokens_of(base), []
    for part in BUDGETS:
        flops = part * tokens * base.cfg.flops_per_token
        for times in options.sizes or WIDTHS:
            settings = wider(base.cfg, times)
            sized = base.with_settings(settings).cfg
            steps = max(1, round(flops / sized.flops_per_token / sized.tokens_per_step))
            settings["train_tokens"] = steps * sized.tokens_per_step
            at = {SIZE: sized.model.embed_dim, BUDGET: flops}
            found += [base.with_settings(settings, seed, at=at) for seed in options.seeds_of(1)]
    return distinct(found)  # two sizes may round to the same number of heads


def point_of(result: Result) -> Point:
    """Returns the size and final loss of a run as a point for fitting loss laws."""
    cfg = result.trial.cfg
    tokens = result.history.latest("tokens_seen") or 0
    return Point(cfg.model.num_params, tokens, result.loss, result.folder, cfg.flops_per_token * tokens)


def smooth_line(curve: Curve, place: int) -> PlotLine:
    """Returns the smoothed loss curve over FLOPs as a line."""
    log_tokens, log_losses = smooth(curve)
    points = zip(np.exp(log_tokens) * curve.flops_per_token, np.exp(log_losses))
    return line(f"{count(curve.params)} parameters", points, place)


def conclude(results: Sequence[Result]) -> Conclusion:
    """Returns the Conclusion of these results."""
    finished = [(r, point_of(r)) for r in results if not r.diverged]
    if not finished:
        return Conclusion(["All runs diverged."], SMALL, PREDICTED, [], (), [])
    points, budgets = [point for _, point in finished], sorted({float(r.at(BUDGET)) for r, _ in finished})
    by_budget = {flops: [r for r, _ in finished if float(r.at(BUDGET)) == flops] for flops in budgets}
    curves = [curve_of_run(p.params, r.trial.cfg.flops_per_token, *r.curve()) for r, p in finished]
    description = f"{FARTHER:g} times the largest budget tried"
    ways = three_approaches(
        points, curves, FARTHER * budgets[-1], description=description, budgets=budgets, within=0.25
    )
    bests = [(way.name, {o.flops: o.params for o in way.law.optima}) for way in ways if way.law is not None]
    places = {params: place for place, params in enumerate(sorted({curve.params for curve in curves}))}
    drawings = [
        drawing(
            "Training loss over FLOPs, smoothed", [smooth_line(curve, places[curve.params]) for curve in curves],
            "FLOPs", log_below=True, unit="nats",
        ),
        drawing(
            "Loss over model size at equal FLOPs",
            [one for place, (flops, runs) in enumerate(by_budget.items())
             for one in mean_line(f"{flops:.2g} FLOPs", runs, params_of, place)],
            "parameters", log_below=True, unit="nats, held out",
        ),
        drawing(
            "Best model size", [line(name, best, place, "dots") for place, (name, best) in enumerate(bests)],
            "FLOPs", log_below=True, log=True, numbers="count",
        ),
    ]  # fmt: skip
    texts = lambda p: (count(p.params), count(p.tokens), plain(p.tokens / p.params), f"{p.loss:.4f}")
    rows = [list(map(n, (f"{float(r.at(BUDGET)):.3g}", *texts(p)))) for r, p in finished]
    lost = len(results) - len(finished)
    limits = (
        *SMALL,
        "The learning rate is scaled by 1 / width (Muon: 1 / sqrt(width)), or by muP's rules if muP is on. It was "
        "tuned at one size only.",
    )
    if lost:
        limits = (*limits, f"{lost} of {len(results)} runs diverged and were excluded.")
    head = ("FLOPs", "parameters", "tokens", "tokens per parameter", "held-out loss")
    verdict = [lowest_text(by_budget), *(way.text for way in ways), *kaplan_texts(by_budget, points)]
    return Conclusion(verdict, limits, PREDICTED, drawings, head, rows)


def params_of(result: Result) -> int:
    """Returns the parameters of a run's model."""
    return result.trial.cfg.model.num_params


def kaplan_texts(by_budget: Mapping[float, Sequence[Result]], points: Sequence[Point]) -> list[str]:
    """Returns a sentence that compares fits without a loss floor with arXiv:2001.08361, or [] with too few points."""
    lowest = {flops: min(r.loss for r in runs) for flops, runs in by_budget.items()}
    largest = max(p.params for p in points)
    largest_runs = [(p.tokens, p.loss) for p in points if p.params == largest]
    if len(lowest) < 3 or len({tokens for tokens, _ in largest_runs}) < 3:
        return []
    by_flops, by_tokens = power(list(lowest), list(lowest.values())).exponent, power(*zip(*largest_runs)).exponent
    return [
        f"Fitted without a loss floor, the lowest losses scale as C ** {by_flops}, and those of {count(largest)} "
        f"parameters as D ** {by_tokens}; arXiv:2001.08361 has C ** -{KAPLAN_FLOPS[1]:.3f} and D ** "
        f"-{KAPLAN_TOKENS[1]:.3f}."
    ]


def lowest_text(by_budget: Mapping[float, Sequence[Result]]) -> str:
    """Returns a sentence with the best size at each budget. Marks best sizes that are the smallest or largest tried."""
    parts = []
    for flops, runs in by_budget.items():
        losses = {size: mean([r.loss for r in of]) for size, of in groups_of(runs, params_of).items()}
        best = min(losses, key=lambda size: losses[size].value)
        end = "" if min(losses) < best < max(losses) else ", the smallest" if best == min(losses) else ", the largest"
        parts.append(f"{count(best)} parameters at {flops:.2g} FLOPs ({losses[best]} nats){end}")
    inside = any(part.endswith(")") for part in parts)
    beyond = (
        "" if inside else " All are at the edge of the sweep, so best sizes below are unreliable; try more --sizes."
    )
    return f"Lowest loss among the sizes tried: {'; '.join(parts)}.{beyond}"
