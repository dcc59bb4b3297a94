"""A plan for people: short groups of aligned lines, every assumption named once at the end with its source."""

import textwrap
from collections.abc import Callable

from jaxscale import units
from jaxscale.planning import cost, scaling
from jaxscale.planning.cost import Range
from jaxscale.planning.machine import HERE, PLANNED_ONLY
from jaxscale.planning.plan import Plan
from jaxscale.planning.tables import INDENT, table

WIDTH = 120
NOT_KNOWN = "n/a"
Rows = list[tuple[str, str, str]]


def plan_lines(plan: Plan) -> list[str]:
    """The whole plan."""
    lines = [head_line(plan)]
    groups = [
        ("model and tokens", table(model_rows(plan))),
        ("other sizes (loss in nats by a published fit, to compare sizes with and for nothing else)", size_lines(plan)),
        ("memory of one device", memory_lines(plan)),
        ("time", table(time_rows(plan))),
        ("money and energy", table(money_rows(plan))),
        ("checkpoints", table(checkpoint_rows(plan))),
        ("data", table(data_rows(plan))),
        ("look at", caution_lines(plan)),
        ("assumed", assumption_lines(plan)),
    ]
    for title, body in groups:
        lines += ["", title, *body]
    return [*lines, "", verdict_line(plan)]


def head_line(plan: Plan) -> str:
    """'7b on v5p:4x4x8: 128 x TPU v5p on 32 hosts; mesh fsdp=128'."""
    number = f"{plan.num_devices} x {plan.chip}"
    if plan.num_chips != plan.num_devices:
        number = f"{plan.num_chips:g} x {plan.chip} ({plan.num_devices} devices)"
    return f"{plan.config} on {plan.topology}: {number} on {units.plural(plan.num_hosts, 'host')}; mesh {plan.layout}"


def model_rows(plan: Plan) -> Rows:
    """Parameters, operations, tokens, batch."""
    ratio = plan.tokens / plan.params
    if plan.optimal is None:
        word = "no optimum was published for this kind of model"
    elif ratio > 40:
        word = "more than the compute-optimal 20: over-trained, which serving likes"
    else:
        word = "about 20 is compute-optimal"
    rows_of = f"{plan.rows:,} rows of {plan.seq_len:,} tokens"
    passes = f"in {units.plural(plan.num_microbatches, 'microbatch')}"
    return [
        (
            "parameters",
            units.count(plan.params),
            f"{plan.params:,} in all and active: this kind of model has no experts",
        ),
        (
            "FLOPs per token",
            scientific(plan.flops_per_token),
            f"by the model's own formula, attention included; 6 N = {scientific(plan.flops_per_token_6n)}",
        ),
        ("tokens", units.count(plan.tokens), f"{plan.total_steps:,} steps of {units.count(plan.batch_tokens)} tokens"),
        ("tokens per parameter", units.digits(ratio), word),
        ("FLOPs of training", scientific(plan.train_flops), "FLOPs per token x tokens"),
        (
            "batch",
            units.count(plan.batch_tokens),
            f"{rows_of} {passes}; {units.plural(plan.rows_per_pass, 'row')} a device and pass",
        ),
        ("warmup", f"{plan.warmup_steps:,} steps", f"{units.count(plan.warmup_steps * plan.batch_tokens)} tokens"),
    ]


def size_lines(plan: Plan) -> list[str]:
    """This size, the compute-optimal one, and smaller ones of the same loss."""
    if plan.optimal is None:
        return [f"{INDENT}{NOT_KNOWN}: the rule and the fit are of decoders that predict the next token"]
    rows = [("", "parameters", "tokens", "FLOPs (6ND)", "loss", "")]
    this = scaling.Alternative(plan.params, plan.tokens, plan.flops_per_token_6n * plan.tokens, plan.loss)
    named = [("this plan", this, ""), ("compute-optimal", plan.optimal, "lowest loss for these FLOPs: 20 a parameter")]
    for one in plan.serving:
        paid = "cheaper to train too" if not one.served_tokens else f"pays off after {units.count(one.served_tokens)}"
        named.append(("cheaper to serve", one, paid + (" tokens served" if one.served_tokens else "")))
    for name, one, note in named:
        loss = NOT_KNOWN if one.loss is None else f"{one.loss:.3f}"
        numbers = (units.count(one.params), units.count(one.tokens), scientific(one.flops), loss)
        rows.append((name, *numbers, note))
    return table(rows, right=(1, 2, 3, 4))


def memory_lines(plan: Plan) -> list[str]:
    """Memory by kind with its formula, and what is there."""
    rows = [(row.kind, units.size(row.num_bytes), row.source) for row in plan.memory]
    share = f"{plan.memory_bytes / plan.usable_bytes:.0%} of {units.size(plan.usable_bytes)}"
    rows.append(("together", units.size(plan.memory_bytes), share))
    if plan.kept is not None:
        rows.append(("by the compiler", units.size(plan.kept.peak_bytes), f"jaxscale preflight, {plan.kept.date}"))
    if plan.host_bytes:
        rows.append(("in the host's memory", units.size(plan.host_bytes), "for each device, beside these"))
    return [*table(rows, right=(1,)), *wrapped(f"{plan.chip}: {plan.usable_why}", INDENT, INDENT)]


def time_rows(plan: Plan) -> Rows:
    """Step, throughput, wall time."""
    found = plan.speed
    if found.step_seconds is None:
        return [("step", NOT_KNOWN, found.source)]
    mfu = span(found.mfu, lambda share: f"{share:.1%}") if found.mfu else NOT_KNOWN
    rows = [
        ("step", span(found.step_seconds, seconds), "FLOPs of a step / (MFU x peak x devices)"),
        ("MFU", mfu, "" if found.mfu else "this device has no peak in the table"),
        ("tokens/s", span(found.tokens_per_second, units.count), "of all devices"),
        ("wall time", span(plan.wall_seconds, units.duration), f"steps / {plan.goodput:.0%} goodput"),
    ]
    if found.compute_seconds is not None:
        sent = f"sending {seconds(found.link_seconds)}" if found.link_seconds else "nothing is sent"
        least = f"products {seconds(found.compute_seconds)}, {sent}; recomputation included"
        rows.append(("least of a step", seconds(max(found.compute_seconds, found.link_seconds)), least))
    if plan.deadline_seconds is not None:
        rows.append(
            ("deadline", units.duration(plan.deadline_seconds), reached(plan.wall_seconds, plan.deadline_seconds))
        )
    return rows


def money_rows(plan: Plan) -> Rows:
    """Chip-hours, dollars, energy."""
    if plan.chip_hours is None:
        return [("chip-hours", NOT_KNOWN, "without a step time")]
    rows = [
        (
            "chip-hours",
            span(plan.chip_hours, units.digits),
            f"{cost.chips(plan.num_chips)} x wall time",
        )
    ]
    if plan.price is None:
        rows.append(("dollars", NOT_KNOWN, f"no price of {plan.chip} is known: give --price=DOLLARS a chip and hour"))
    else:
        rows.append(
            (
                "dollars",
                span(plan.dollars, units.dollars),
                f"{units.dollars(plan.price.dollars_per_hour)} a chip and hour",
            )
        )
    if plan.budget_dollars is not None and plan.dollars is not None:
        rows.append(("budget", units.dollars(plan.budget_dollars), reached(plan.dollars, plan.budget_dollars)))
    if plan.megawatt_hours is None:
        rows.append(("energy", NOT_KNOWN, f"no figure for the power of {plan.chip} was found"))
    else:
        text = f"{plan.watts:g} W a chip x chips x wall time x PUE {plan.pue:.2f}; hosts left out"
        rows.append(("energy", span(plan.megawatt_hours, energy), text))
    return rows


def checkpoint_rows(plan: Plan) -> Rows:
    """Size, time, interval, what stays."""
    every = NOT_KNOWN if plan.save_interval_seconds is None else span(plan.save_interval_seconds, units.duration)
    many = units.plural(plan.kept_checkpoints, "checkpoint")
    return [
        ("one", units.size(plan.checkpoint_bytes), "parameters, moments and counters in float32, each once"),
        ("save", units.duration(plan.save_seconds), "size / bandwidth; training goes on meanwhile"),
        ("every", every, f"best by Young and Daly: {units.duration(plan.best_interval_seconds)}"),
        (
            "interruptions",
            f"every {units.duration(plan.between_failures_seconds)}",
            f"{cost.chips(plan.num_chips)} at a public rate",
        ),
        (
            "kept at the end",
            units.size(plan.kept_bytes),
            f"{many}, {units.dollars(plan.storage_dollars_per_month)} a month",
        ),
    ]


def data_rows(plan: Plan) -> Rows:
    """Tokens that are needed, how fast, and how often those that exist are read."""
    wide = plan.data_bytes // plan.tokens
    rows = [("needed", units.size(plan.data_bytes), f"{units.count(plan.tokens)} tokens x {wide} B an id")]
    if plan.data_bytes_per_second is not None:
        rate = span(plan.data_bytes_per_second, lambda number: units.digits(number / 1e6))
        rows.append(("read at", f"{rate} MB/s", f"{span(plan.speed.tokens_per_second, units.count)} tokens/s"))
    there = "unknown" if plan.data_tokens is None else units.count(plan.data_tokens)
    rows.append(("there are", there, plan.data_source.removeprefix("unknown: ")))
    known = plan.epochs is not None
    rows.append(("epochs", units.digits(plan.epochs) if known else NOT_KNOWN, "tokens / those that are there" * known))
    return rows


def caution_lines(plan: Plan) -> list[str]:
    """What is unwise, why, and what to do; or that nothing was found."""
    if not plan.cautions:
        return [f"{INDENT}nothing: warmup, rate, batch, tokens, checkpoints and types are within what was published"]
    lines = []
    for number, one in enumerate(plan.cautions, 1):
        lines += wrapped(f"{number}. {one.what}", INDENT, INDENT + "   ")
        for text in (f"why: {one.why}", f"do: {one.way_out}", f"source: {one.source}"):
            lines += wrapped(text, INDENT + "   ", INDENT + "   " + " " * (text.index(":") + 2))
    return lines


def assumption_lines(plan: Plan) -> list[str]:
    """Every figure that came from outside, with its source."""
    fit = scaling.BESIROGLU
    found = [
        f"MFU: {plan.speed.source}",
        f"goodput {plan.goodput:.0%}: {cost.GOODPUT_SOURCE}",
        f"interruptions: {cost.FAILURES_SOURCE}",
        f"save: {plan.save_source}",
        f"storage: {cost.STORAGE_SOURCE}",
    ]
    if plan.optimal is not None:
        found[2:2] = [
            f"loss fit: E + A / N^a + B / D^b with E {fit.E}, A {fit.A}, B {fit.B}, a {fit.alpha}, b {fit.beta}; from "
            f"{units.count(scaling.SMALLEST_FITTED)} parameters on: {fit.source}",
            "compute-optimal: 20 tokens a parameter, N = (C / 6 / 20)^0.5: arXiv:2203.15556",
        ]
    if plan.price is not None and plan.dollars is not None:
        found.insert(2, f"price ({plan.price.date}): {plan.price.source}")
    if plan.megawatt_hours is not None:
        found.append(f"PUE: {plan.pue_source}")
    if plan.kept is None:
        found.append(
            "memory: the state exactly; activations and padding are an estimate: the whole was within 15% of the "
            "compiler's for the shipped configs that were compared, and up to 44% above it for TPU programs of a few "
            "hundred MiB (docs/plan.md)"
        )
    return [line for text in found for line in wrapped(text, INDENT, INDENT + "  ")]


def verdict_line(plan: Plan) -> str:
    """'fits by the estimate: ...' or what to change."""
    if plan.kept and plan.fits:
        return f"fits, as compiled by jaxscale preflight on {plan.kept.date}"
    if plan.fits:
        family = plan.topology.partition(":")[0]
        if family == HERE:
            return "fits by the estimate; jaxscale rehearse tries it here"
        knows = "" if family in PLANNED_ONLY else f"; jaxscale preflight --topology={plan.topology} compiles the step"
        return f"fits by the estimate{knows}"
    parts = plan.fitting_microbatches
    if parts is not None and not plan.kept:
        return f"does not fit by the estimate; with --config.train.num_microbatches={parts} it would"
    return "does not fit: use more chips, mesh.fsdp=-1 with rules=zero3, model.remat=full, or a smaller model"


def reached(needed: Range, there: float) -> str:
    """Whether what is there is enough at both ends."""
    if needed.high <= there:
        return "enough at both ends"
    return (
        "enough only at the better end"
        if needed.low <= there
        else f"not enough: {units.digits(needed.low / there)} times as much"
    )


def wrapped(text: str, first: str, rest: str) -> list[str]:
    """The text in lines of at most WIDTH."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def span(both: Range, show: Callable[[float], str]) -> str:
    """'12 to 15', or '12' where both ends look the same."""
    low, high = show(both.low), show(both.high)
    return low if low == high else f"{low} to {high}"


def scientific(number: float) -> str:
    """'4.33e10'."""
    mantissa, _, exponent = f"{number:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def seconds(number: float) -> str:
    """'12.3 s', '45 ms'."""
    return f"{units.digits(number)} s" if number >= 1 else f"{number * 1e3:.3g} ms"


def energy(megawatt_hours: float) -> str:
    """'12.3 MWh', '450 kWh'."""
    return f"{units.digits(megawatt_hours)} MWh" if megawatt_hours >= 1 else f"{megawatt_hours * 1e3:.3g} kWh"
