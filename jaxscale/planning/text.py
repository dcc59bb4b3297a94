"""A plan for people: short groups of aligned lines, every assumption named once at the end with its source."""

import textwrap
from collections.abc import Callable

from jaxscale import units
from jaxscale.planning import cost, scaling
from jaxscale.planning.cost import Range
from jaxscale.planning.machine import HERE, PLANNED_ONLY
from jaxscale.planning.plan import RunPlan
from jaxscale.planning.propose import Proposal, warmup
from jaxscale.planning.tables import INDENT, table

WIDTH = 120
NOT_KNOWN = "n/a"
Rows = list[tuple[str, str, str]]


def plan_lines(plan: RunPlan) -> list[str]:
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


def head_line(plan: RunPlan) -> str:
    """'7b on v5p:4x4x8: 128 x TPU v5p on 32 hosts; mesh fsdp=128'."""
    machine = plan.machine
    number = f"{machine.num_devices} x {machine.chip}"
    if machine.num_chips != machine.num_devices:
        number = f"{machine.num_chips:g} x {machine.chip} ({machine.num_devices} devices)"
    hosts = units.plural(machine.num_hosts, "host")
    return f"{plan.config} on {machine.topology}: {number} on {hosts}; mesh {machine.layout}"


def model_rows(plan: RunPlan) -> Rows:
    """Parameters, operations, tokens, batch."""
    work = plan.work
    ratio = work.tokens / work.params
    if work.optimal is None:
        word = "no optimum was published for this kind of model"
    elif ratio > 40:
        word = "more than the compute-optimal 20: over-trained, which serving likes"
    else:
        word = "about 20 is compute-optimal"
    rows_of = f"{work.rows:,} rows of {work.seq_len:,} tokens"
    passes = f"in {units.plural(work.num_microbatches, 'microbatch')}"
    return [
        (
            "parameters",
            units.count(work.params),
            f"{work.params:,} in all and active: this kind of model has no experts",
        ),
        (
            "FLOPs per token",
            scientific(work.flops_per_token),
            f"by the model's own formula, attention included; 6 N = {scientific(work.flops_per_token_6n)}",
        ),
        (
            "tokens",
            units.count(work.tokens),
            f"{work.total_steps:,} steps of {units.count(work.batch_tokens)} tokens",
        ),
        ("tokens per parameter", units.digits(ratio), word),
        ("FLOPs of training", scientific(work.train_flops), "FLOPs per token x tokens"),
        (
            "batch",
            units.count(work.batch_tokens),
            f"{rows_of} {passes}; {units.plural(work.rows_per_pass, 'row')} a device and pass",
        ),
        (
            "warmup",
            f"{work.warmup_steps:,} steps",
            f"{units.count(work.warmup_steps * work.batch_tokens)} tokens",
        ),
    ]


def size_lines(plan: RunPlan) -> list[str]:
    """This size, the compute-optimal one, and smaller ones of the same loss."""
    work = plan.work
    if work.optimal is None:
        return [f"{INDENT}{NOT_KNOWN}: the rule and the fit are of decoders that predict the next token"]
    rows = [("", "parameters", "tokens", "FLOPs (6ND)", "loss", "")]
    this = scaling.Alternative(work.params, work.tokens, work.flops_per_token_6n * work.tokens, work.loss)
    named = [
        ("this plan", this, ""),
        ("compute-optimal", work.optimal, "lowest loss for these FLOPs: 20 a parameter"),
    ]
    for one in work.serving:
        paid = "cheaper to train too" if not one.served_tokens else f"pays off after {units.count(one.served_tokens)}"
        named.append(("cheaper to serve", one, paid + (" tokens served" if one.served_tokens else "")))
    for name, one, note in named:
        loss = NOT_KNOWN if one.loss is None else f"{one.loss:.3f}"
        numbers = (units.count(one.params), units.count(one.tokens), scientific(one.flops), loss)
        rows.append((name, *numbers, note))
    return table(rows, right=(1, 2, 3, 4))


def memory_lines(plan: RunPlan) -> list[str]:
    """Memory by kind with its formula, and what is there."""
    device = plan.device
    rows = [(row.kind, units.size(row.num_bytes), row.source) for row in device.memory]
    share = f"{device.memory_bytes / device.usable_bytes:.0%} of {units.size(device.usable_bytes)}"
    rows.append(("together", units.size(device.memory_bytes), share))
    if device.kept is not None:
        rows.append(("by the compiler", units.size(device.kept.peak_bytes), f"jaxscale preflight, {device.kept.date}"))
    if device.host_bytes:
        rows.append(("in the host's memory", units.size(device.host_bytes), "for each device, beside these"))
    return [*table(rows, right=(1,)), *wrapped(f"{plan.machine.chip}: {device.usable_why}", INDENT, INDENT)]


def time_rows(plan: RunPlan) -> Rows:
    """Step, throughput, wall time."""
    found = plan.time.speed
    if found.step_seconds is None:
        return [("step", NOT_KNOWN, found.source)]
    mfu = span(found.mfu, lambda share: f"{share:.1%}") if found.mfu else NOT_KNOWN
    rows = [
        ("step", span(found.step_seconds, seconds), "FLOPs of a step / (MFU x peak x devices)"),
        ("MFU", mfu, "" if found.mfu else "this device has no peak in the table"),
        ("tokens/s", span(found.tokens_per_second, units.count), "of all devices"),
        ("wall time", span(plan.time.wall_seconds, units.duration), f"steps / {plan.time.goodput:.0%} goodput"),
    ]
    if found.compute_seconds is not None:
        sent = f"sending {seconds(found.link_seconds)}" if found.link_seconds else "nothing is sent"
        least = f"products {seconds(found.compute_seconds)}, {sent}; recomputation included"
        rows.append(("least of a step", seconds(max(found.compute_seconds, found.link_seconds)), least))
    if plan.time.deadline_seconds is not None:
        rows.append(
            (
                "deadline",
                units.duration(plan.time.deadline_seconds),
                reached(plan.time.wall_seconds, plan.time.deadline_seconds),
            )
        )
    return rows


def money_rows(plan: RunPlan) -> Rows:
    """Chip-hours, dollars, energy."""
    money = plan.money
    if money.chip_hours is None:
        return [("chip-hours", NOT_KNOWN, "without a step time")]
    rows = [
        (
            "chip-hours",
            span(money.chip_hours, units.digits),
            f"{cost.chips(plan.machine.num_chips)} x wall time",
        )
    ]
    if money.price is None:
        rows.append(
            ("dollars", NOT_KNOWN, f"no price of {plan.machine.chip} is known: give --price=DOLLARS a chip and hour")
        )
    else:
        rows.append(
            (
                "dollars",
                span(money.dollars, units.dollars),
                f"{units.dollars(money.price.dollars_per_hour)} a chip and hour",
            )
        )
    if money.budget_dollars is not None and money.dollars is not None:
        rows.append(("budget", units.dollars(money.budget_dollars), reached(money.dollars, money.budget_dollars)))
    if money.megawatt_hours is None:
        rows.append(("energy", NOT_KNOWN, f"no figure for the power of {plan.machine.chip} was found"))
    else:
        text = f"{money.watts:g} W a chip x chips x wall time x PUE {money.pue:.2f}; hosts left out"
        rows.append(("energy", span(money.megawatt_hours, energy), text))
    return rows


def checkpoint_rows(plan: RunPlan) -> Rows:
    """Size, time, interval, what stays."""
    saves = plan.saves
    every = NOT_KNOWN if saves.save_interval_seconds is None else span(saves.save_interval_seconds, units.duration)
    many = units.plural(saves.kept_checkpoints, "checkpoint")
    return [
        ("one", units.size(saves.checkpoint_bytes), "parameters, moments and counters in float32, each once"),
        ("save", units.duration(saves.save_seconds), "size / bandwidth; training goes on meanwhile"),
        ("every", every, f"best by Young and Daly: {units.duration(saves.best_interval_seconds)}"),
        (
            "interruptions",
            f"every {units.duration(saves.between_failures_seconds)}",
            f"{cost.chips(plan.machine.num_chips)} at a public rate",
        ),
        (
            "kept at the end",
            units.size(saves.kept_bytes),
            f"{many}, {units.dollars(saves.storage_dollars_per_month)} a month",
        ),
    ]


def data_rows(plan: RunPlan) -> Rows:
    """Tokens that are needed, how fast, and how often those that exist are read."""
    data = plan.data
    wide = data.data_bytes // plan.work.tokens
    rows = [("needed", units.size(data.data_bytes), f"{units.count(plan.work.tokens)} tokens x {wide} B an id")]
    if data.data_bytes_per_second is not None:
        rate = span(data.data_bytes_per_second, lambda number: units.digits(number / 1e6))
        rows.append(("read at", f"{rate} MB/s", f"{span(plan.time.speed.tokens_per_second, units.count)} tokens/s"))
    there = "unknown" if data.data_tokens is None else units.count(data.data_tokens)
    rows.append(("there are", there, data.data_source.removeprefix("unknown: ")))
    known = data.epochs is not None
    rows.append(("epochs", units.digits(data.epochs) if known else NOT_KNOWN, "tokens / those that are there" * known))
    return rows


def caution_lines(plan: RunPlan) -> list[str]:
    """What is unwise, why, and what to do; or that nothing was found."""
    if not plan.cautions:
        return [f"{INDENT}nothing: warmup, rate, batch, tokens, checkpoints and types are within what was published"]
    lines = []
    for number, one in enumerate(plan.cautions, 1):
        lines += wrapped(f"{number}. {one.what}", INDENT, INDENT + "   ")
        for text in (f"why: {one.why}", f"do: {one.way_out}", f"source: {one.source}"):
            lines += wrapped(text, INDENT + "   ", INDENT + "   " + " " * (text.index(":") + 2))
    return lines


def assumption_lines(plan: RunPlan) -> list[str]:
    """Every figure that came from outside, with its source."""
    fit = scaling.BESIROGLU
    found = [
        f"MFU: {plan.time.speed.source}",
        f"goodput {plan.time.goodput:.0%}: {cost.GOODPUT_SOURCE}",
        f"interruptions: {cost.FAILURES_SOURCE}",
        f"save: {plan.saves.save_source}",
        f"storage: {cost.STORAGE_SOURCE}",
    ]
    if plan.work.optimal is not None:
        found[2:2] = [
            f"loss fit: E + A / N^a + B / D^b with E {fit.E}, A {fit.A}, B {fit.B}, a {fit.alpha}, b {fit.beta}; from "
            f"{units.count(scaling.SMALLEST_FITTED)} parameters on: {fit.source}",
            "compute-optimal: 20 tokens a parameter, N = (C / 6 / 20)^0.5: arXiv:2203.15556",
        ]
    if plan.money.price is not None and plan.money.dollars is not None:
        found.insert(2, f"price ({plan.money.price.date}): {plan.money.price.source}")
    if plan.money.megawatt_hours is not None:
        found.append(f"PUE: {plan.money.pue_source}")
    if plan.device.kept is None:
        found.append(
            "memory: the state exactly; activations and padding are an estimate: the whole was within 15% of the "
            "compiler's for the shipped configs that were compared, and up to 44% above it for TPU programs of a few "
            "hundred MiB (docs/plan.md)"
        )
    return [line for text in found for line in wrapped(text, INDENT, INDENT + "  ")]


def verdict_line(plan: RunPlan) -> str:
    """'fits by the estimate: ...' or what to change."""
    if plan.device.kept and plan.device.fits:
        return f"fits, as compiled by jaxscale preflight on {plan.device.kept.date}"
    if plan.device.fits:
        family = plan.machine.topology.partition(":")[0]
        if family == HERE:
            return "fits by the estimate; jaxscale rehearse tries it here"
        knows = (
            ""
            if family in PLANNED_ONLY
            else f"; jaxscale preflight --topology={plan.machine.topology} compiles the step"
        )
        return f"fits by the estimate{knows}"
    parts = plan.device.fitting_microbatches
    if parts is not None and not plan.device.kept:
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


def proposal_lines(proposal: Proposal) -> list[str]:
    """What is proposed, and by which rules."""
    model = proposal.model
    heads = f"{model['num_heads']} heads of {model['head_dim']}, mlp {model['mlp_dim']:,}"
    steps = proposal.tokens // (proposal.rows * proposal.seq_len)
    rows = [
        ("by the rule", units.count(proposal.rule.params), f"on {units.count(proposal.rule.tokens)} tokens"),
        ("parameters", units.count(proposal.params), f"{proposal.params:,}: the nearest shape of whole heads"),
        (
            "tokens",
            units.count(proposal.tokens),
            f"{proposal.tokens / proposal.params:.3g} a parameter; {steps:,} steps",
        ),
        ("FLOPs (6ND)", scientific(proposal.flops), ""),
        ("shape", f"{model['num_layers']} x {model['embed_dim']:,}", heads),
        (
            "batch",
            f"{proposal.rows} x {proposal.seq_len:,}",
            "0.2920 C^0.3271 tokens (arXiv:2401.02954), at most the critical batch",
        ),
        ("peak rate", f"{proposal.peak_lr:.2g}", f"0.3118 C^-0.1250 (arXiv:2401.02954); warmup {warmup(proposal)}"),
    ]
    return ["proposed", *table(rows), *wrapped(proposal.why, INDENT, INDENT)]
