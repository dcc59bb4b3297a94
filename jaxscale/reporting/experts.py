"""The experts of a mixture: how evenly tokens are spread over them, by step, by layer and by expert."""

from jaxscale import units
from jaxscale.monitor.health.expert_rules import DEAD_STEPS
from jaxscale.reporting.canvas import Canvas, plots
from jaxscale.reporting.expert_counts import ExpertCounts
from jaxscale.reporting.heat import HeatMap
from jaxscale.reporting.history import History
from jaxscale.reporting.plots import Line, Plot, color_of
from jaxscale.reporting.tables import left_out
from jaxscale.reporting.text import escape

MOST_LAYERED = 4  # runs whose layers are shown on one page
HEAT_FROM = 4  # layers: fewer are lines
MOST_NAMED = 8  # experts without a token
# What colours reach over at least: an even spread is not to look like an uneven one.
FROM_EVEN, AROUND_EVEN = (1.0, 4.0), (0.25, 4.0)
NO_COUNTS = (
    "How often each expert was chosen is not recorded, or not yet: --config.monitor.statistics_every_steps=100 writes "
    "it from the next start on."
)
IN_STEPS = f"in {DEAD_STEPS} steps"
OVER_MEAN = "over the mean of the layer"
# (title, unit, metrics with their labels)
METRICS = (
    ("Busiest expert", f"{OVER_MEAN}, in the worst layer", (("experts_busiest", "busiest"),)),
    ("Effective number of experts", "in the most uneven layer", (("experts_effective", "experts"),)),
    ("Experts without a token", "in all layers", (("experts_idle", "in the step"), ("experts_dead", IN_STEPS))),
    ("Entropy of the router", "nats", (("router_entropy", "mean"), ("router_entropy_lowest", "lowest layer"))),
    ("Range of the biases", "over that of a token's scores", (("router_bias_to_scores", "worst layer"),)),
    ("Choices without room", "in all layers", (("experts_dropped", "left out by the limit"),)),
    ("Rounds of an exchange of rows", "", (("expert_rounds", "most"), ("expert_rounds_mean", "mean"))),
)


def experts_section(canvas: Canvas) -> str:
    """Numbers of each step, and of up to MOST_LAYERED runs layers and experts; '' for runs without experts."""
    of_steps = [numbers(canvas, *metric) for metric in METRICS]
    counted = [(history, history.experts) for history in canvas.histories if history.experts is not None]
    if not counted:
        return plots(*of_steps) + (left_out(NO_COUNTS) if any(of_steps) else "")
    if len(counted) > MOST_LAYERED:
        told = f"Layers and experts are on the page of each run alone: here are more than {MOST_LAYERED} runs with any."
        return plots(*of_steps) + left_out(told)
    tables = {history.name: [by_layer(canvas, found), canvas.add(by_expert(found))] for history, found in counted}
    if canvas.single:
        return plots(*of_steps, *tables[canvas.histories[0].name])
    return plots(*of_steps) + "".join(f"<h3>{escape(name)}</h3>{plots(*both)}" for name, both in tables.items())


def numbers(canvas: Canvas, title: str, unit: str, metrics: tuple[tuple[str, str], ...]) -> str:
    """One plot: of one run a line for each metric, of several the first of each; '' without any."""
    if not canvas.single:
        return canvas.metric(f"train/{metrics[0][0]}", title, unit=unit)
    history: History = canvas.histories[0]
    lines = [Line(label, *history.series(f"train/{name}"), color_of(i)) for i, (name, label) in enumerate(metrics)]
    return canvas.add(Plot(title=title, unit=unit, lines=lines, zero=True, marks=canvas.marks()))


def by_layer(canvas: Canvas, counts: ExpertCounts) -> str:
    """The busiest expert of each layer, over windows of steps."""
    steps = [window.step for window in counts.windows]
    rows = {f"layer {layer}": [w.busiest[i] for w in counts.windows] for i, layer in enumerate(counts.layers)}
    title = "Busiest expert by layer"
    if len(rows) >= HEAT_FROM:
        return canvas.add(HeatMap(title, OVER_MEAN, steps, rows, scale=FROM_EVEN))
    lines = []
    for place, (name, row) in enumerate(rows.items()):
        known = [(step, value) for step, value in zip(steps, row) if value is not None]
        lines.append(Line(name, [step for step, _ in known], [value for _, value in known], color_of(place)))
    return canvas.add(Plot(title=title, unit=OVER_MEAN, lines=lines, zero=True, marks=canvas.marks(), wide=True))


def by_expert(counts: ExpertCounts) -> HeatMap:
    """How busy each expert of each layer was in the newest window."""
    mean = lambda of_layer: sum(of_layer) / len(of_layer) or 1.0
    rows = {
        f"layer {layer}": [count / mean(of_layer) for count in of_layer]
        for layer, of_layer in zip(counts.layers, counts.counts, strict=True)
    }
    step, steps = counts.newest.step, counts.newest.steps
    return HeatMap(
        f"Tokens of each expert in steps {step - steps + 1:,} to {step:,}",
        OVER_MEAN,
        range(len(counts.counts[0])),
        rows,
        scale=AROUND_EVEN,
        across="expert",
        empty="no token",
        note=idle_words(counts),
    )


def idle_words(counts: ExpertCounts) -> str:
    """Which experts had no token: '' for none."""
    idle = [
        f"{expert} of layer {layer}"
        for layer, of_layer in zip(counts.layers, counts.counts, strict=True)
        for expert, count in enumerate(of_layer)
        if count == 0
    ]
    if not idle:
        return ""
    more = f" and {len(idle) - MOST_NAMED:,} more" if len(idle) > MOST_NAMED else ""
    return f"{units.plural(len(idle), 'expert')} had no token: {', '.join(idle[:MOST_NAMED])}{more}."
