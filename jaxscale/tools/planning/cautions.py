"""Cautions about a plan. Each function checks one property and returns a Caution, or None if no problem is found."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxscale import units
from jaxscale.core.axes.pipeline_schedules import ScheduleSize
from jaxscale.kernels.hardware import VOLTA, Chip
from jaxscale.tools.planning import cost, scaling
from jaxscale.tools.planning.schedule_times import bubble_formula

MAX_SECONDS = 118 * cost.DAY  # BLOOM, 176B parameters on 384 A100: arXiv:2211.02001, table 1
MAX_TOKENS = 36e12  # Qwen3 (arXiv:2505.09388, section 3.1)
MIN_POSITIONS = 1024  # per sequence and device, our choice: with fewer, matmuls end before keys and values arrive
MAX_EXPOSED = 0.2  # exposed communication as a fraction of a step, our choice
NEAR = 2.5  # published runs are compared if their sizes differ by at most this factor


class Caution(NamedTuple):
    """A problem with its reason, fix and source."""

    what: str
    why: str
    way_out: str
    source: str


def warmup_too_short(params: float, warmup_steps: int, warmup_tokens: float, b2: float) -> Caution | None:
    """Warns if the warmup is too short for Adam's second moment, or for a model of 1B or more parameters."""
    least = 2 / (1 - b2)
    if warmup_steps < least:
        return Caution(
            f"the warmup of {warmup_steps} steps is short",
            f"Adam's second moment with b2={b2:g} averages over about {least:.0f} steps: 2 / (1 - b2)",
            f"set optim.warmup_tokens='{math.ceil(least)} steps' or more",
            "arXiv:1910.04209",
        )
    published_less = warmup_tokens < scaling.WARMUP_TOKENS and warmup_steps < scaling.WARMUP_STEPS
    if params >= scaling.WARMUP_FROM_PARAMS and published_less:
        return Caution(
            f"the warmup of {warmup_steps} steps ({units.count(warmup_tokens)} tokens) is short for this size",
            f"published runs of 1B parameters and more warmed up over {units.count(scaling.WARMUP_TOKENS)} tokens "
            f"or {scaling.WARMUP_STEPS:,} steps",
            f"set optim.warmup_tokens='{scaling.WARMUP_STEPS} steps'",
            "arXiv:2005.14165, appendix B; arXiv:2307.09288, section 2.2",
        )
    return None


def rate_range(params: float, tokens: float, batch_tokens: float) -> tuple[cost.Range, list[str]]:
    """Returns (range of learning rates from published runs and formulas, one line of text per source)."""
    rates, lines = [], []
    for run in scaling.RUNS:
        if 1 / NEAR <= run.params / params <= NEAR:
            times = batch_tokens / run.batch_tokens
            linear, root = run.peak_lr * times, run.peak_lr * times**0.5
            rates += [run.peak_lr, linear, root]
            lines.append(
                f"{run.name}: {run.peak_lr:.2g} at {units.count(run.batch_tokens)} tokens; for this batch {root:.2g} "
                f"by the square-root rule, {linear:.2g} by the linear rule ({run.source})"
            )
    formulas = [
        (scaling.rate_by_flops(scaling.train_flops(params, tokens)), "0.3118 C^-0.125 (arXiv:2401.02954)"),
        (1.79 * params**-0.713 * tokens**0.307, "1.79 N^-0.713 D^0.307 (arXiv:2503.04715)"),
    ]
    if params <= 1.5e9:  # appendix D.6
        formulas.insert(1, (0.003239 - 0.0001395 * math.log(params), "0.003239 - 0.0001395 ln N (arXiv:2001.08361)"))
    lines += [f"{text}: {rate:.2g}" for rate, text in formulas]
    rates += [rate for rate, _ in formulas]
    return cost.Range(min(rates), max(rates)), lines


def rate_outside(
    params: float, tokens: float, batch_tokens: float, peak_lr: float, optimizer: str = "adamw"
) -> Caution | None:
    """Warns if the peak learning rate is outside the published range. optimizer: a key of scaling.TIMES_ADAMW."""
    span, lines = rate_range(params, tokens, batch_tokens)
    if (factors := scaling.TIMES_ADAMW[optimizer]) != (1.0, 1.0):
        low, high = factors
        lines.append(f"these rates are for AdamW; rates for {optimizer} are {low:.2g} to {high:.2g} times as large")
        span = cost.Range(span.low * low, span.high * high)
    if span.low <= peak_lr <= span.high:
        return None
    side = "below" if peak_lr < span.low else "above"
    return Caution(
        f"optim.peak_lr={peak_lr:g} is {side} the published range for this size and batch",
        f"{span.low:.2g} to {span.high:.2g}: " + "; ".join(lines),
        f"set optim.peak_lr to {span.low:.2g} or more" if side == "below" else f"set it to {span.high:.2g} or less",
        "square-root rule for Adam: arXiv:2205.10287; linear, for SGD: arXiv:1706.02677",
    )


def too_few_tokens(params: float, tokens: float, fewest: float = 10.0) -> Caution | None:
    """Warns about fewer than `fewest` tokens per parameter."""
    ratio = tokens / params
    if ratio >= fewest:
        return None
    best = scaling.lowest_alternative(scaling.train_flops(params, tokens))
    return Caution(
        f"{ratio:.2g} tokens per parameter are too few: the model is too large for its training tokens",
        f"for the same FLOPs, {units.count(best.params)} parameters on {units.count(best.tokens)} tokens "
        f"({units.digits(best.tokens / best.params)} per parameter) reach a lower loss",
        f"train on {units.count(scaling.lowest_tokens(params))} tokens, or use the smaller model",
        scaling.BESIROGLU_SOURCE if best.loss else "arXiv:2203.15556",
    )


def too_many_tokens(tokens: float) -> Caution | None:
    """Warns about more training tokens than in any published run."""
    if tokens <= MAX_TOKENS:
        return None
    return Caution(
        f"{units.count(tokens)} tokens are more than any published run was trained on",
        f"the published maximum is {units.count(MAX_TOKENS)}, including synthetic text; repeated data is nearly as "
        "good as new text only for about 4 epochs",
        f"set train_tokens={MAX_TOKENS:.3g} or less, and choose a model size for that many tokens",
        "arXiv:2505.09388, section 3.1; arXiv:2305.16264",
    )


def wall_too_long(wall: cost.Range, num_chips: float, flops: float | None) -> Caution | None:
    """Warns if the run is longer than MAX_SECONDS. flops: training FLOPs of a decoder, to propose a smaller size."""
    if wall.low <= MAX_SECONDS:
        return None
    share, longest = MAX_SECONDS / wall.high, f"{MAX_SECONDS / cost.DAY:.0f} days"
    failures = wall.low / cost.mean_seconds_between_failures(num_chips)
    fix = f"use about {cost.chips(math.ceil(num_chips / share))}"
    if flops is not None:
        best = scaling.lowest_alternative(share * flops)
        fix += (
            f", or train {units.count(best.params)} parameters on {units.count(best.tokens)} tokens, which "
            f"{cost.chips(num_chips)} can do in {longest}"
        )
    return Caution(
        f"the run takes at least {units.duration(wall.low)}",
        f"the longest known published run took {longest} (BLOOM, 176B parameters on 384 A100); "
        f"expect {units.digits(failures)} interruptions",
        fix,
        f"arXiv:2211.02001, table 1; {cost.FAILURES_SOURCE}",
    )


def exposed_communication(products: float, exposed: float) -> Caution | None:
    """Warns about exposed communication above MAX_EXPOSED. products, exposed: seconds per step."""
    share = exposed / (products + exposed)
    if share <= MAX_EXPOSED:
        return None
    return Caution(
        f"{share:.0%} of each step is exposed communication, at peak FLOP/s",
        f"matmuls take {products:.3g} s, and {exposed:.3g} s of communication do not overlap with them; the "
        "communication time hardly grows with tokens per step",
        "give each device more tokens (a larger batch, or fewer chips), set train.reduce_dtype='bfloat16', or keep "
        "mesh.fsdp inside a host or slice and use mesh.data across them",
        f"our threshold: {MAX_EXPOSED:.0%}; bytes from the sharding, bandwidth from jaxscale/kernels/hardware.py",
    )


def unknown_bandwidth(domains: int, devices: int, chip: Chip) -> Caution | None:
    """Warns if the link bandwidth is unknown. domains, devices: numbers of hosts (or slices) and of devices."""
    inside, outside = devices > domains, domains > 1
    if (chip.ici_bandwidth or not inside) and (chip.dcn_bandwidth or not outside):
        return None
    where = "hosts" if chip.ici_bandwidth or not inside else "devices of a host"
    return Caution(
        f"the bandwidth between {where} of {chip.name} is unknown",
        "the step time excludes communication, so the time and cost above are lower bounds, far too low on slow links",
        "measure the MFU on such a machine and pass it as --mfu",
        chip.links_source or chip.source,
    )


def mfu_beyond_reach(mfu: float, step: float, products: float) -> Caution | None:
    """Warns if --mfu is impossible. step: seconds at this MFU. products: seconds of the matmuls at peak FLOP/s."""
    if step >= products:
        return None
    return Caution(
        f"--mfu={mfu:g} is higher than this step can reach",
        f"a step would take {step:.3g} s, but its matmuls with recomputation take {products:.3g} s at peak FLOP/s",
        f"pass --mfu={math.floor(100 * mfu * step / products) / 100:g} or less, or a model.remat that recomputes less",
        "model FLOPs over the chip's peak: arXiv:2204.02311, appendix B",
    )


def horizon_too_far(schedule_tokens: float, tokens: float, decay: str, limit: str) -> Caution | None:
    """Warns if the run ends before its learning rate schedule. limit: what ends the run, such as 'the budget'."""
    if decay in ("constant", "inverse_sqrt") or tokens >= schedule_tokens:
        return None
    over = schedule_tokens / tokens - 1
    return Caution(
        f"{limit} ends the run after {units.count(tokens)} tokens, but its {decay} schedule is for "
        f"{units.count(schedule_tokens)}",
        f"the learning rate would still be high at the end: the schedule is {over:.0%} too long, and more than 25% "
        "raises the loss",
        f"set train_tokens={tokens:.3g}, so that the decay ends with the run",
        "arXiv:2203.15556, appendix B",
    )


def batch_too_large(params: float, tokens: float, batch_tokens: float) -> Caution | None:
    """Warns if the batch is larger than the critical batch size at the expected final loss."""
    loss = scaling.fitted_loss(params, tokens)
    if loss is None or batch_tokens <= (critical := scaling.critical_batch(loss)):
        return None
    return Caution(
        f"a batch of {units.count(batch_tokens)} tokens is above the critical batch size",
        f"2.1e8 L^-4.8 = {units.count(critical)} tokens at the expected final loss of {loss:.2f} nats; larger batches "
        "save steps but need more tokens. A newer fit of the best batch size, 0.58 D^0.571, gives "
        f"{units.count(0.58 * tokens**0.571)}",
        f"set batch_tokens to about {units.count(critical)}, or start with a smaller batch (batch_ramp)",
        "arXiv:1812.06162; arXiv:2001.08361, figure 10; arXiv:2503.04715",
    )


def save_interval(interval: float, save_seconds: float, num_chips: float, wall_seconds: float) -> Caution | None:
    """Warns if the checkpoint interval loses at least 1% more of the run time than the best interval."""
    mtbf = cost.mean_seconds_between_failures(num_chips)
    best = min(cost.best_save_interval(save_seconds, mtbf), wall_seconds)  # every run saves at its end
    interval = min(interval, wall_seconds)
    lost_fraction, min_lost = (cost.lost_share(seconds, save_seconds, mtbf) for seconds in (interval, best))
    if lost_fraction - min_lost < 0.01:
        return None
    word = "infrequent" if interval > best else "frequent"
    return Caution(
        f"a checkpoint every {units.duration(interval)} is too {word} for {cost.chips(num_chips)}",
        f"with an interruption every {units.duration(mtbf)}, up to {lost_fraction:.1%} of the time is lost (counting "
        f"saves, which overlap training, in full), and {min_lost:.1%} with a checkpoint every {units.duration(best)}: "
        f"sqrt(2 x {units.duration(save_seconds)} x MTBF)",
        "set checkpoint.save_every_steps=0, which saves only at the end"
        if best == wall_seconds
        else f"set checkpoint.save_every_steps to save every {units.duration(best)}",
        f"Young 1974, Daly 2006; {cost.FAILURES_SOURCE}",
    )


def tensor_over_slow_links(tensor: int, domain_size: int, chip: Chip) -> Caution | None:
    """Warns if tensor parallelism uses slow links. domain_size: number of devices in a host or slice."""
    if tensor == 1 or (tensor <= domain_size and chip.ici_bandwidth):
        return None
    reason = f"a host or slice has {domain_size} devices" if chip.ici_bandwidth else f"{chip.name} has no fast links"
    return Caution(
        f"mesh.tensor={tensor} uses slow links: {reason}",
        "every block all-reduces activations over this axis four times per pass, without overlap",
        f"set mesh.tensor={domain_size if chip.ici_bandwidth else 1} or less, and use fsdp for the other devices",
        "arXiv:2104.04473, takeaway 1",
    )


def bubble_too_large(schedule: ScheduleSize, num_layers: int) -> Caution | None:
    """Warns if there are fewer than two microbatches per pipeline stage."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    if stages == 1 or schedule.chunk_runs >= 2 * stages:
        return None
    target = 4 * stages
    chunks = min(num_layers // stages, -(-target // microbatches))
    fix = f"set train.num_microbatches={target} or more, if the batch has enough rows"
    if chunks > schedule.num_chunks and microbatches % stages == 0:
        fix += f", or pipeline.chunks={chunks}"
    state = "idle or recompute for" if schedule.num_deferred else "idle for"
    if schedule.name == "1f1b":
        alternative = dataclasses.replace(schedule, name="zero_bubble")
        fix += f", or pipeline.schedule={alternative.name} for a bubble of {alternative.bubble:.1%}"
    return Caution(
        f"the stages of mesh.pipeline={stages} {state} {schedule.bubble:.0%} of the time",
        f"{microbatches} microbatches x {schedule.num_chunks} chunks are fewer than two per stage: the bubble is "
        f"{bubble_formula(schedule)}",
        fix,
        "arXiv:1811.06965 (four or more microbatches per stage); arXiv:2104.04473, section 2.2",
    )


def wrong_axis_across_slices(crossing: str, number: int, seconds: Mapping[str, float]) -> Caution | None:
    """Warns if data crosses slices although pipeline would send less, or vice versa. seconds: {axis: seconds}."""
    (other,) = set(seconds) - {crossing}
    if seconds[crossing] <= 2 * seconds[other]:
        return None
    sent = {
        "data": "the gradients of the whole model, once per step, without overlap",
        "pipeline": "the residual stream of every microbatch and its gradient",
    }
    return Caution(
        f"mesh.{crossing} crosses {number} slices or hosts over slow links, and mesh.{other} would send less",
        f"{crossing} sends {sent[crossing]}: {seconds[crossing]:.3g} s per step; {other} would send {sent[other]}: "
        f"{seconds[other]:.3g} s",
        f"multiply mesh.{other} by {number}, and divide mesh.{crossing} by the same number",
        "our threshold: a factor of 2; bytes from the sharding, bandwidth from jaxscale/kernels/hardware.py",
    )


def too_few_positions(context: int, seq_len: int, least: int = MIN_POSITIONS) -> Caution | None:
    """Warns about context parallelism with too few positions per device."""
    if context == 1 or seq_len // context >= least:
        return None
    fewer = max(1, 2 ** int(math.log2(max(1, seq_len // least))))
    return Caution(
        f"mesh.context={context} leaves {seq_len // context:,} positions per device of a sequence of {seq_len:,}",
        "matmuls shrink with the positions per device, but remote keys and values do not, so devices wait for them",
        f"set mesh.context={fewer}, and use fsdp or tensor for the other devices",
        f"our threshold: {least:,} positions",
    )


def dtype_mismatch(dtype: str, chip: Chip) -> Caution | None:
    """Warns if the compute dtype is slow on the chip, or is float16 although the chip supports bfloat16."""
    if dtype == "float16" and chip.bfloat16:
        return Caution(
            f"model.compute_dtype='float16' on {chip.name}, which has bfloat16 at the same speed",
            "float16 overflows above 65,504 and needs loss scaling; bfloat16 has float32's range and does not",
            "set model.compute_dtype='bfloat16'",
            "arXiv:1905.12322; cloud.google.com/tpu/docs/bfloat16",
        )
    if dtype == "bfloat16" and not chip.bfloat16:
        return Caution(
            f"model.compute_dtype='bfloat16' on {chip.name}, which has no matrix units for bfloat16",
            "the chip's peak is for float16; bfloat16 is converted or computed much more slowly",
            "set model.compute_dtype='auto', which selects "
            + ("float16 with a dynamic loss scale" if has_matrix_units(chip) else "float32"),
            chip.source,
        )
    if dtype == "float32" and chip.fp32_flops is not None and has_matrix_units(chip):
        shorter = "bfloat16" if chip.bfloat16 else "float16"
        float32 = f"and at most {chip.fp32_flops / 1e12:.3g} in float32"
        slower = "and at most half of that as TF32" if chip.bfloat16 else float32
        return Caution(
            f"model.compute_dtype='float32' on {chip.name}",
            f"its matrix units reach {chip.peak_flops / 1e12:.0f} TFLOP/s in {shorter}, {slower}; activations take "
            "twice as much memory",
            f"set model.compute_dtype='{shorter}'",
            f"{chip.source}; jax.lax.Precision",
        )
    return None


def has_matrix_units(chip: Chip) -> bool:
    """Returns False for NVIDIA GPUs before Volta, which have no matrix units."""
    return chip.compute_capability is None or chip.compute_capability >= VOLTA


def pass_too_short(pass_seconds: float, least: float = 0.001) -> Caution | None:
    """Warns if a pass (forward and backward of one microbatch) is too short for the published MFU range."""
    if pass_seconds >= least:
        return None
    return Caution(
        f"the matmuls of one pass take only {1e3 * pass_seconds:.2g} ms per device at peak FLOP/s",
        "the MFU range is from large models and excludes launch overhead and waits, which may take longer than these "
        "matmuls, so the time and cost above are lower bounds",
        "pass --mfu, or measure the step on such a machine: jaxscale bench step --save, then --topology=here",
        f"our threshold: {1e3 * least:g} ms; no published run has shorter passes",
    )


def too_many_epochs(epochs: float, most: float = 4.0) -> Caution | None:
    """Warns if training repeats the data for more than `most` epochs."""
    if epochs <= most:
        return None
    return Caution(
        f"training would repeat the data for {units.digits(epochs)} epochs",
        f"up to about {most:g} epochs, repeated tokens are worth nearly as much as new tokens; after that, less",
        "add data, or shorten the run",
        "arXiv:2305.16264",
    )
