"""Depth against width at equal FLOPs: the shapes with the lowest loss, and those within noise of it."""

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
TIMES = (0.5, 1, 2, 4, 8)  # relative to the config's layers
FACTORS = (0.5, 1, 2, 4)  # relative to the rate scaled to the width
PREDICTED = (
    (
        "arXiv:2001.08361, section 3.2",
        "shape hardly matters at a fixed size: 6 layers of 4,288 end within 3% of 48 layers of 1,600, a ratio of width "
        "to depth 21 times as large",
    ),
    (
        "arXiv:2006.12467",
        "depth pays up to about log(width) / log(3) layers; beyond that, deeper and wider are worth the same",
    ),
    ("arXiv:2402.14905", "below a billion parameters, deeper and thinner models score higher than wide ones"),
)


def shape_trials(base: Base, options: Options) -> list[Trial]:
    """Returns trials of shapes x rates x seeds, all for the same tokens."""
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
    names = {layers: f"{layers} layer{'s' * (layers > 1)} of {runs[0].at(WIDTH)}" for layers, runs in shapes.items()}
    verdict = in_words(names, losses, {layers: ratio_of(runs[0]) for layers, runs in best.items()})
    verdict += [f"{names[layers]}: a run was lost at every rate." for layers in shapes if layers not in best]
    verdict += bounds({names[layers]: runs for layers, runs in shapes.items()})
    flat = [r for runs in best.values() for r in runs]
    over_ratio = [line("each run", [(ratio_of(r), r.loss) for r in flat], 0, "dots")]
    over_ratio.append(line("mean", {ratio_of(runs[0]): means[at].value for at, runs in best.items()}, 0))
    drawings = [
        drawing("Loss over width / layers", over_ratio, "width / layers", log_below=True, unit="nats, held out"),
        rate_plot((names[layers], runs) for layers, runs in shapes.items()),
        curve_plot(
            "Training loss, each at its best rate, smoothed",
            {names[layers]: (place, runs) for place, (layers, runs) in enumerate(best.items())},
        ),
    ]
    rows = [[*map(n, row_of(runs[0], means[layers]))] for layers, runs in best.items()]
    head = (
        "layers", "width", "width / layers", "heads", "MLP", "parameters", "FLOPs a token in blocks", "best rate tried",
        "held-out loss",
    )  # fmt: skip
    limits = (
        *SMALL,
        "A wide model has more parameters in its embeddings and head, and takes more FLOPs there; a deep one has "
        "longer steps on most machines, which is not weighed.",
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
    """Describes the best shape, the shapes within noise of it, and the overall effect of shape on the loss."""
    if not losses:
        return []
    means = {layers: mean(list(of.values())) for layers, of in losses.items()}
    first, *others = sorted(losses, key=lambda layers: means[layers].value)
    lowest = f"{names[first]} (width / layers {ratios[first]:.3g}) ends lowest, at {means[first]} nats"
    if not others:
        return [f"{lowest}; no other shape held."]
    behind = {layers: mean_difference(losses, layers, first) for layers in others}
    part = lambda one: one.mapped(lambda value: 100 * value / means[first].value)
    higher = lambda layers: f"{names[layers]} (by {part(behind[layers])}%)"
    near = lambda one: one.low is not None and one.low <= 0
    close = [names[layers] for layers in others if near(behind[layers])]
    far = [higher(layers) for layers in others if not near(behind[layers])]
    if behind[others[0]].low is None:
        text = [f"{lowest}; higher: {', '.join(far)}; one seed does not tell whether that is more than noise."]
    else:
        within = f"not told from it: {', '.join(close)}" if close else "no other is within the noise of it"
        text = [f"{lowest}; {within}.", *([f"Higher beyond the noise: {', '.join(far)}."] if far else [])]
    most = behind[others[-1]].value / means[first].value
    spread = max(ratios.values()) / min(ratios.values())
    text.append(
        f"Over a factor of {spread:.3g} in width / layers the loss differs by {percent(most)} at most, where "
        "arXiv:2001.08361 has 3% over a factor of 21."
    )
    return text
