"""The experts of a mixture: how evenly tokens are spread over them, by step, by layer and by expert."""

from jaxscale import units
from jaxscale.runtime.monitor.expert_counts import ExpertCounts
from jaxscale.runtime.monitor.health.expert_rules import DEAD_STEPS
from jaxscale.runtime.monitor.history import History
from jaxscale.tools.reporting.canvas import Canvas, plots
from jaxscale.tools.reporting.heat import HeatMap
from jaxscale.tools.reporting.page_tables import left_out
from jaxscale.tools.reporting.page_text import escape
from jaxscale.tools.reporting.plots import Line, Plot, color_of

MOST_LAYERED = 4  # runs whose layers are shown on one page
HEAT_FROM = 4  # layers: fewer are lines
MOST_NAMED = 8  # experts without a token
# Minimum color ranges, so that an even load does not look uneven.
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
    step_plots = [numbers(canvas, *metric) for metric in METRICS]
    counted = [(history, history.experts) for history in canvas.histories if history.experts is not None]
    if not counted:
        return plots(*step_plots) + (left_out(NO_COUNTS) if any(step_plots) else "")
    if len(counted) > MOST_LAYERED:
        note = f"Layers and experts are on the page of each run alone: here are more than {MOST_LAYERED} runs with any."
        return plots(*step_plots) + left_out(note)
    tables = {history.name: [by_layer(canvas, found), canvas.add(by_expert(found))] for history, found in counted}
    if canvas.single:
        return plots(*step_plots, *tables[canvas.histories[0].name])
    return plots(*step_plots) + "".join(f"<h3>{escape(name)}</h3>{plots(*both)}" for name, both in tables.items())


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
    return canvas.add(Plot(title=title, unit=OVER_MEAN, lines=lines, zero=True, marks=canvas.marks(), full_width=True))


def by_expert(counts: ExpertCounts) -> HeatMap:
    """Load of each expert of each layer in the newest window."""
    mean = lambda layer_counts: sum(layer_counts) / len(layer_counts) or 1.0
    rows = {
        f"layer {layer}": [count / mean(layer_counts) for count in layer_counts]
        for layer, layer_counts in zip(counts.layers, counts.counts, strict=True)
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
        note=idle_experts_note(counts),
    )


def idle_experts_note(counts: ExpertCounts) -> str:
    """Names of experts without tokens; '' if there are none."""
    idle = [
        f"{expert} of layer {layer}"
        for layer, layer_counts in zip(counts.layers, counts.counts, strict=True)
        for expert, count in enumerate(layer_counts)
        if count == 0
    ]
    if not idle:
        return ""
    more = f" and {len(idle) - MOST_NAMED:,} more" if len(idle) > MOST_NAMED else ""
    return f"{units.plural(len(idle), 'expert')} had no token: {', '.join(idle[:MOST_NAMED])}{more}."
