"""Depth against width at equal FLOPs, to find the shapes with the lowest loss within noise."""

from collections.abc import Mapping, Sequence

from jaxscale.tools.lab.batch import best_rates
from jaxscale.tools.lab.estimate import Estimate, mean, mean_difference
from jaxscale.tools.lab.experiment import SMALL, Conclusion, Options, curve_plot, drawing, line, rate_plot
from jaxscale.tools.lab.rate import RATE, bounds, over_rates
from jaxscale.tools.lab.sizes import inner_flops, shaped
from jaxscale.tools.lab.trial import Base, Result, Trial, groups_of
from jaxscale.tools.reporting.page_tables import n
from jaxscale.tools.reporting.page_text import count, percent

LAYERS, WIDTH = "layers", "width"
TIMES = (0.5, 1, 2, 4, 8)  # numbers of layers relative to the config's
FACTORS = (0.5, 1, 2, 4)  # learning rates relative to the rate scaled to the width
PREDICTED = (
    (
        "arXiv:2001.08361, section 3.2",
        "shape hardly matters at a fixed size: 6 layers of width 4,288 are within 3% of 48 layers of width 1,600, "
        "although width / depth is 21 times as large",
    ),
    (
        "arXiv:2006.12467",
        "depth helps more than width up to about log(width) / log(3) layers; above that, both help equally",
    ),
    ("arXiv:2402.14905", "below a billion parameters, deeper and thinner models score higher than wide ones"),
)


def shape_trials(base: Base, options: Options) -> list[Trial]:
    """Returns one trial per shape, learning rate and seed. All trials have the same number of tokens."""
    cfg, found = base.cfg, []
    depths = dict.fromkeys(max(1, round(cfg.model.num_layers * times)) for times in options.sizes or TIMES)
    for layers in depths:
        settings = shaped(cfg, layers)
        labelled = {LAYERS: layers, WIDTH: settings["model.embed_dim"]}
        rates = options.rates or [settings[RATE] * factor for factor in FACTORS]
        found += over_rates(base, labelled, rates, options.seeds_of(3), also=settings)
    return found


def conclude(results: Sequence[Result]) -> Conclusion:
    """Returns the Conclusion of these results."""
    shapes = groups_of(results, lambda r: int(r.at(LAYERS)))
    best = groups_of(best_rates(results, lambda r: int(r.at(LAYERS))), lambda r: int(r.at(LAYERS)))
    losses = {layers: {r.seed: r.loss for r in runs} for layers, runs in best.items()}
    means = {layers: mean(list(of.values())) for layers, of in losses.items()}
    names = {
        layers: f"{layers} layer{'s' * (layers > 1)} of width {runs[0].at(WIDTH)}" for layers, runs in shapes.items()
    }
    verdict = in_words(names, losses, {layers: ratio_of(runs[0]) for layers, runs in best.items()})
    verdict += [f"{names[layers]}: a run diverged at every learning rate." for layers in shapes if layers not in best]
    verdict += bounds({names[layers]: runs for layers, runs in shapes.items()})
    flat = [r for runs in best.values() for r in runs]
    over_ratio = [line("each run", [(ratio_of(r), r.loss) for r in flat], 0, "dots")]
    over_ratio.append(line("mean", {ratio_of(runs[0]): means[at].value for at, runs in best.items()}, 0))
    drawings = [
        drawing("Loss over width / layers", over_ratio, "width / layers", log_below=True, unit="nats, held out"),
        rate_plot((names[layers], runs) for layers, runs in shapes.items()),
        curve_plot(
            "Training loss at the best learning rate, smoothed",
            {names[layers]: (place, runs) for place, (layers, runs) in enumerate(best.items())},
        ),
    ]
    rows = [[*map(n, row_of(runs[0], means[layers]))] for layers, runs in best.items()]
    head = (
        "layers", "width", "width / layers", "heads", "MLP", "parameters", "FLOPs per token in blocks",
        "best learning rate tried", "held-out loss",
    )  # fmt: skip
    limits = (
        *SMALL,
        "FLOPs are equal in the blocks only: a wide model has more parameters and FLOPs in its embeddings and head. A "
        "deep model has longer steps on most machines, which is not considered.",
    )
    return Conclusion(verdict, limits, PREDICTED, drawings, head, rows)


def ratio_of(result: Result) -> float:
    """Returns width divided by layers."""
    return float(result.at(WIDTH)) / float(result.at(LAYERS))


def row_of(result: Result, loss: Estimate) -> tuple[str, ...]:
    """Returns the table cells of a shape."""
    cfg, model = result.trial.cfg, result.trial.cfg.model
    return (
        str(model.num_layers), str(model.embed_dim), f"{ratio_of(result):.3g}",
        f"{model.num_heads} of {model.head_dim}", str(model.mlp_dim), count(model.num_params),
        f"{inner_flops(model, cfg.seq_len):.4g}", f"{result.at(RATE):.3g}", str(loss),
    )  # fmt: skip


def in_words(
    names: Mapping[int, str], losses: Mapping[int, Mapping[int, float]], ratios: Mapping[int, float]
) -> list[str]:
    """Returns sentences on the best shape, the shapes equal within noise, and the effect of shape on the loss."""
    if not losses:
        return []
    means = {layers: mean(list(of.values())) for layers, of in losses.items()}
    first, *others = sorted(losses, key=lambda layers: means[layers].value)
    lowest = f"{names[first]} (width / layers {ratios[first]:.3g}) has the lowest loss, {means[first]} nats"
    if not others:
        return [f"{lowest}; no other shape ran without divergence."]
    behind = {layers: mean_difference(losses, layers, first) for layers in others}
    part = lambda one: one.mapped(lambda value: 100 * value / means[first].value)
    higher = lambda layers: f"{names[layers]} (by {part(behind[layers])}%)"
    near = lambda one: one.low is not None and one.low <= 0
    close = [names[layers] for layers in others if near(behind[layers])]
    far = [higher(layers) for layers in others if not near(behind[layers])]
    if behind[others[0]].low is None:
        text = [f"{lowest}; higher: {', '.join(far)}; one seed cannot show whether the difference exceeds noise."]
    else:
        within = f"not significantly different: {', '.join(close)}" if close else "all others are significantly higher"
        text = [f"{lowest}; {within}.", *([f"Significantly higher: {', '.join(far)}."] if far else [])]
    most = behind[others[-1]].value / means[first].value
    spread = max(ratios.values()) / min(ratios.values())
    text.append(
        f"Over a factor of {spread:.3g} in width / layers, the loss differs by at most {percent(most)}; "
        "arXiv:2001.08361 reports 3% over a factor of 21."
    )
    return text
