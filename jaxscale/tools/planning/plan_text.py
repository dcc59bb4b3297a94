"""Text output of a plan: groups of aligned lines, then all assumptions with their sources."""

import functools
import textwrap
from collections.abc import Callable

from jaxscale.tools.planning import cost, scaling
from jaxscale.tools.planning.cost import Range
from jaxscale.tools.planning.placeholder_devices import THIS_MACHINE
from jaxscale.tools.planning.propose import Proposal, warmup
from jaxscale.tools.planning.run_plan import RunPlan
from jaxscale.tools.planning.topology import PLANNED_ONLY
from jaxscale.units import INDENT, count, digits, dollars, duration, plural, size, table

WIDTH = 120
NOT_KNOWN = "n/a"
Rows = list[tuple[str, str, str]]


def plan_lines(plan: RunPlan) -> list[str]:
    machine = plan.machine
    number = f"{machine.num_devices} x {machine.chip}"
    if machine.num_chips != machine.num_devices:
        number = f"{machine.num_chips:g} x {machine.chip} ({machine.num_devices} devices)"
    hosts = plural(machine.num_hosts, "host")
    lines = [f"{plan.config} on {machine.topology}: {number} on {hosts}; mesh {machine.layout}"]
    lines += wrapped(f"expert: {machine.exchange}", INDENT, INDENT * 2) if machine.exchange else []
    for title, body in (
        ("model and tokens", table(model_rows(plan))),
        ("other sizes (loss in nats from a published fit, only to compare sizes)", size_lines(plan)),
        ("memory per device", memory_lines(plan)),
        ("time", table(time_rows(plan))),
        ("cost and energy", table(money_rows(plan))),
        ("checkpoints", table(checkpoint_rows(plan))),
        ("data", table(data_rows(plan))),
        ("cautions", caution_lines(plan)),
        ("assumptions", assumption_lines(plan)),
    ):
        lines += ["", title, *body]
    return [*lines, "", verdict_line(plan)]


def model_rows(plan: RunPlan) -> Rows:
    """Returns the table rows for parameters, FLOPs, tokens and batch."""
    work = plan.work
    ratio, sparse = work.tokens / work.params, work.active_params < work.params
    if sparse:
        per_active = digits(work.tokens / work.active_params)
        word = f"{per_active} per active parameter; published optima are only for dense models"
    elif work.optimal is None:
        word = "no published optimum for this kind of model"
    else:
        best = work.optimal.tokens / work.optimal.params
        word = f"{digits(best)} is compute-optimal" + (": over-trained, cheaper to serve" if ratio > 2 * best else "")
    active = f"{work.params:,}, all active: a dense model"
    if sparse:
        active = f"{work.params:,} total, {work.active_params:,} active per token (for FLOPs and MFU)"
    number = "6 N (active)" if sparse else "6 N"
    basis = "active parameters, " if sparse else "the model's formula, "
    formula = f"{basis}including attention; {number} = {scientific(work.flops_per_token_6n)}"
    rows = f"{work.rows:,} rows of {work.seq_len:,} tokens in {plural(work.num_microbatches, 'microbatch')}"
    by_length = ", summed over sequence lengths" if work.seq_len_ramp else ""
    batch, warmup_tokens = count(work.batch_tokens), count(work.warmup_tokens)
    begins = lambda stages: ", ".join(f"{first:,}" for first, _ in stages[1:4]) + ", ..." * (len(stages) > 4)
    ramps = []
    if stages := work.ramp:
        note = f"starts at {count(stages[0][1])} tokens, grows at batch {begins(stages)}"
        ramps.append(("batch ramp", plural(len(stages), "size"), f"{note}; memory and speed are for the largest"))
    if stages := work.seq_len_ramp:
        note = f"starts at {stages[0][1]:,}, grows at batch {begins(stages)}"
        note += "; memory and speed are for the longest"
        ramps.append(("sequence length", plural(len(stages), "length"), note))
    return [
        ("parameters", count(work.params), active),
        ("FLOPs per token", scientific(work.flops_per_token), formula),
        ("tokens", count(work.tokens), f"{work.total_steps:,} steps of {'up to ' * bool(work.ramp)}{batch} tokens"),
        ("tokens per parameter", digits(ratio), word),
        ("FLOPs of training", scientific(work.train_flops), f"FLOPs per token x tokens{by_length}"),
        ("batch", batch, f"{rows}; {plural(work.rows_per_pass, 'row')} per device and pass"),
        *ramps,
        ("warmup", f"{work.warmup_steps:,} steps", f"{warmup_tokens} tokens"),
    ]


def size_lines(plan: RunPlan) -> list[str]:
    """Returns lines that compare the planned size with the compute-optimal size and with smaller sizes."""
    work = plan.work
    if work.active_params < work.params:
        return [f"{INDENT}{NOT_KNOWN}: the published rule and fit cover only dense models"]
    if work.optimal is None:
        return [f"{INDENT}{NOT_KNOWN}: the published rule and fit cover only decoders that predict the next token"]
    this = scaling.Alternative(work.params, work.tokens, work.flops_per_token_6n * work.tokens, work.loss)
    best = work.optimal
    by = "no fit covers smaller models" if best.loss is None else "lowest loss for these FLOPs in the fit"
    named = [
        ("this plan", this, ""),
        ("compute-optimal", best, f"{by}: {digits(best.tokens / best.params)} per parameter"),
    ]
    for one in work.serving:
        paid = f"cheaper after {count(one.served_tokens)} served tokens" if one.served_tokens else ""
        named.append(("cheaper to serve", one, paid or "also cheaper to train"))
    kaplan = scaling.kaplan_alternative(this.flops)._replace(loss=None)  # loss of a different text and tokenizer
    named.append(("optimal by Kaplan", kaplan, "arXiv:2001.08361 (2020), for comparison"))
    rows = [("", "parameters", "tokens", "FLOPs (6ND)", "loss", "")]
    for name, one, note in named:
        loss = NOT_KNOWN if one.loss is None else f"{one.loss:.3f}"
        rows.append((name, count(one.params), count(one.tokens), scientific(one.flops), loss, note))
    return table(rows, right=(1, 2, 3, 4))


def memory_lines(plan: RunPlan) -> list[str]:
    """Returns lines with the memory of each kind and its formula, and with the usable memory."""
    device = plan.device
    rows = [(row.kind, size(row.num_bytes), row.source) for row in device.memory]
    share = f"{device.memory_bytes / device.usable_bytes:.0%} of {size(device.usable_bytes)}"
    rows.append(("total", size(device.memory_bytes), share))
    if device.kept is not None:
        rows.append(("by the compiler", size(device.kept.peak_bytes), f"jaxscale preflight, {device.kept.date}"))
    if device.host_bytes:
        rows.append(("in host memory", size(device.host_bytes), "additional, per device"))
    return [*table(rows, right=(1,)), *wrapped(f"{plan.machine.chip}: {device.usable_why}", INDENT, INDENT)]


def time_rows(plan: RunPlan) -> Rows:
    """Returns the table rows for step time, throughput and wall time."""
    time, speed = plan.time, plan.time.speed
    if speed.step_seconds is None or speed.tokens_per_second is None or time.wall_seconds is None:
        return [("step", NOT_KNOWN, speed.source)]
    mfu = span(speed.mfu, lambda share: f"{share:.1%}") if speed.mfu else NOT_KNOWN
    rate = "measured FLOP/s" if speed.measured else "(MFU x peak x devices)"
    rows = [
        ("step", span(speed.step_seconds, seconds), f"FLOPs of a step / {rate}"),
        ("MFU", mfu, "" if speed.mfu else "peak FLOP/s of this device unknown"),
        ("tokens/s", span(speed.tokens_per_second, count), "all devices"),
        ("wall time", span(time.wall_seconds, duration), f"steps / {time.goodput:.0%} goodput"),
    ]
    if speed.compute_seconds is not None:
        exposed = speed.exposed_seconds or 0.0
        sent = "no communication"
        if speed.link_seconds:
            sent = f"communication {seconds(speed.link_seconds)}, {seconds(exposed)} of it exposed"
        idle = f"pipeline idle {seconds(speed.idle_seconds)}, " if speed.bubble else ""
        least = f"matmuls {seconds(speed.compute_seconds)}, {idle}{sent}; includes recomputation"
        whole = speed.compute_seconds + speed.idle_seconds + exposed
        rows.append(("lower bound", seconds(whole), least))
        if speed.sent_bytes:
            most_first = sorted(speed.sent_bytes.items(), key=lambda one: -one[1])
            by_axis = ", ".join(f"{axis} {size(nbytes)}" for axis, nbytes in most_first)
            rows.append(("sent", size(sum(speed.sent_bytes.values())), f"per device and step: {by_axis}"))
        if speed.bubble:
            share, _, formula = speed.bubble.partition(" = ")
            rows.append(("bubble", share, f"{formula} of the stages' time"))
    if (limit := time.deadline_seconds) is not None:
        rows.append(("deadline", duration(limit), limit_check(time.wall_seconds, limit)))
    return rows


def money_rows(plan: RunPlan) -> Rows:
    """Returns the table rows for chip-hours, dollars and energy."""
    money, chip = plan.money, plan.machine.chip
    if money.chip_hours is None:
        return [("chip-hours", NOT_KNOWN, "no step time")]
    rows = [("chip-hours", span(money.chip_hours, digits), f"{cost.chips(plan.machine.num_chips)} x wall time")]
    if money.price is None or money.dollars is None:
        rows.append(("dollars", NOT_KNOWN, f"no known price of {chip}; pass --price=DOLLARS per chip-hour"))
    else:
        price = f"{dollars(money.price.dollars_per_hour)} per chip-hour"
        rows.append(("dollars", span(money.dollars, dollars), price))
    if money.budget_dollars is not None and money.dollars is not None:
        rows.append(("budget", dollars(money.budget_dollars), limit_check(money.dollars, money.budget_dollars)))
    if money.megawatt_hours is None:
        return [*rows, ("energy", NOT_KNOWN, f"the power of {chip} is unknown")]
    power = f"{money.watts:g} W per chip x chips x wall time x PUE {money.pue:.2f}; excludes hosts"
    return [*rows, ("energy", span(money.megawatt_hours, energy), power)]


def checkpoint_rows(plan: RunPlan) -> Rows:
    """Returns the table rows for size, time, interval and storage of checkpoints."""
    saves, chips = plan.saves, cost.chips(plan.machine.num_chips)
    every = NOT_KNOWN if saves.save_interval_seconds is None else span(saves.save_interval_seconds, duration)
    kept = f"{plural(saves.kept_checkpoints, 'checkpoint')}, {dollars(saves.storage_dollars_per_month)} per month"
    return [
        ("one", size(saves.checkpoint_bytes), "parameters, moments and counters in float32, one copy"),
        ("save", duration(saves.save_seconds), "size / bandwidth; overlaps training"),
        ("every", every, f"optimal (Young and Daly): {duration(saves.best_interval_seconds)}"),
        ("interruptions", f"every {duration(saves.between_failures_seconds)}", f"{chips} at a published failure rate"),
        ("at the end", size(saves.kept_bytes), kept),
    ]


def data_rows(plan: RunPlan) -> Rows:
    """Returns the table rows for required data, read bandwidth and epochs."""
    data, tokens = plan.data, plan.work.tokens
    rows = [("needed", size(data.data_bytes), f"{count(tokens)} tokens x {data.data_bytes // tokens} B per token")]
    if data.data_bytes_per_second is not None and plan.time.speed.tokens_per_second is not None:
        rate = span(data.data_bytes_per_second, lambda number: digits(number / 1e6))
        rows.append(("read at", f"{rate} MB/s", f"{span(plan.time.speed.tokens_per_second, count)} tokens/s"))
    available = "unknown" if data.data_tokens is None else count(data.data_tokens)
    rows.append(("available", available, data.data_source.removeprefix("unknown: ")))
    if data.epochs is None:
        return [*rows, ("epochs", NOT_KNOWN, "")]
    return [*rows, ("epochs", digits(data.epochs), "tokens / available tokens")]


def caution_lines(plan: RunPlan) -> list[str]:
    """Returns lines with the reason, fix and source of each caution, or one line if there are no cautions."""
    if not plan.cautions:
        return [f"{INDENT}none: warmup, learning rate, batch, tokens, checkpoints and dtypes are in published ranges"]
    lines, indent = [], INDENT + "   "
    for number, one in enumerate(plan.cautions, 1):
        lines += wrapped(f"{number}. {one.what}", INDENT, indent)
        for text in (f"why: {one.why}", f"fix: {one.way_out}", f"source: {one.source}"):
            lines += wrapped(text, indent, indent + " " * (text.index(":") + 2))
    return lines


def assumption_lines(plan: RunPlan) -> list[str]:
    """Returns all assumptions with their sources."""
    fit, price = scaling.BESIROGLU, plan.money.price
    speed = plan.time.speed
    found = [
        f"{'step' if speed.measured else 'MFU'}: {speed.source}",
        f"goodput {plan.time.goodput:.0%}: {cost.GOODPUT_SOURCE}",
    ]
    if plan.work.routing:
        found.append(f"routing: {plan.work.routing}")
    if price is not None and plan.money.dollars is not None:
        found.append(f"price ({price.date}): {price.source}")
    if plan.work.optimal is not None:
        found += [
            f"loss fit: E + A / N^a + B / D^b with E {fit.E}, A {fit.A}, B {fit.B}, a {fit.alpha}, b {fit.beta}; for "
            f"{count(scaling.SMALLEST_FITTED)} or more parameters: {scaling.BESIROGLU_SOURCE}",
            "compute-optimal: the minimum of that fit at 6 N D FLOPs; for smaller models, D = 20 N: arXiv:2203.15556",
        ]
    found += [
        f"interruptions: {cost.FAILURES_SOURCE}",
        f"save: {plan.saves.save_source}",
        f"storage: {cost.STORAGE_SOURCE}",
    ]
    if plan.money.megawatt_hours is not None:
        found.append(f"PUE: {plan.money.pue_source}")
    if plan.device.kept is None:
        found.append(
            "memory: the state is exact; activations and padding are estimates. For the configs that were compared, "
            "the total was within 15% of the compiler's, but up to 44% above it for TPU programs of a few hundred MiB "
            "(docs/plan.md)"
        )
    return [line for text in found for line in wrapped(text, INDENT, INDENT + "  ")]


def verdict_line(plan: RunPlan) -> str:
    """Returns text such as 'estimated to fit; ...' or 'does not fit: ...', followed by a fix."""
    device, name = plan.device, plan.machine.topology
    if device.kept and device.fits:
        return f"fits, compiled by jaxscale preflight on {device.kept.date}"
    if device.fits:
        family = name.partition(":")[0]
        if family == THIS_MACHINE:
            return "estimated to fit; to test it here, run jaxscale rehearse"
        compiles = f"; to compile the step, run jaxscale preflight --topology={name}"
        return f"estimated to fit{'' if family in PLANNED_ONLY else compiles}"
    parts = device.fitting_microbatches
    if parts is not None and not device.kept:
        return f"does not fit by estimate; use --config.train.num_microbatches={parts}, which fits"
    if device.least_devices > plan.machine.num_devices:
        return (
            f"does not fit: parameters, moments and gradients alone need {device.least_devices:,} such devices; use "
            "more devices, or a smaller model"
        )
    return "does not fit: use more chips, mesh.fsdp=-1 with rules=zero3, model.remat=full, or a smaller model"


def limit_check(needed: Range, limit: float) -> str:
    """Returns text that states whether a limit is sufficient over a range of values."""
    if needed.high <= limit:
        return "sufficient over the whole range"
    if needed.low <= limit:
        return "sufficient only at the low end of the range"
    return f"not sufficient: at least {digits(needed.low / limit)} times as much is needed"


def wrapped(text: str, first: str, indent: str) -> list[str]:
    """Returns the text wrapped to lines of at most WIDTH characters."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def span(both: Range, show: Callable[[float], str]) -> str:
    """Returns text such as '12 to 15', or '12' if the low and the high value have the same text."""
    low, high = show(both.low), show(both.high)
    return low if low == high else f"{low} to {high}"


def scientific(number: float) -> str:
    """Returns text such as '4.33e10'."""
    mantissa, _, exponent = f"{number:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def amount(number: float, unit: str, thousandth: str) -> str:
    """Returns text such as '12.3 s' or '45 ms'."""
    return f"{digits(number)} {unit}" if number >= 1 else f"{number * 1e3:.3g} {thousandth}"


seconds = functools.partial(amount, unit="s", thousandth="ms")
energy = functools.partial(amount, unit="MWh", thousandth="kWh")


def proposal_lines(proposal: Proposal) -> list[str]:
    """Returns lines with the proposed values and the rule for each value."""
    model, params, tokens = proposal.model, proposal.params, proposal.tokens
    heads = f"{model['num_heads']} heads of {model['head_dim']}, mlp {model['mlp_dim']:,}"
    batch = "0.2920 C^0.3271 tokens (arXiv:2401.02954), at most the critical batch"
    rows = [
        ("optimal", count(proposal.rule.params), f"on {count(proposal.rule.tokens)} tokens"),
        ("parameters", count(params), f"{params:,}: nearest shape with whole heads"),
        ("tokens", count(tokens), f"{tokens / params:.3g} per parameter; {proposal.total_steps:,} steps"),
        ("FLOPs (6ND)", scientific(proposal.flops), ""),
        ("shape", f"{model['num_layers']} x {model['embed_dim']:,}", heads),
        ("batch", f"{proposal.rows} x {proposal.seq_len:,}", batch),
        ("learning rate", f"{proposal.peak_lr:.2g}", f"0.3118 C^-0.1250 (arXiv:2401.02954); warmup {warmup(proposal)}"),
    ]
    return ["proposed", *table(rows), *wrapped(proposal.reason, INDENT, INDENT)]
