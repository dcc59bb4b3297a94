"""How fast a step may be: a share of the peak that was published, bounded by what the layout must compute and send."""

import dataclasses

from jaxscale.build import Program
from jaxscale.hardware import Chip, find_chip
from jaxscale.models.config import ModelConfig
from jaxscale.planning.cost import Range
from jaxscale.planning.estimate import estimate, link_seconds
from jaxscale.planning.measured import Measured, rate_for
from jaxscale.planning.topology import Topology

PALM = "46.2%: PaLM 540B, 6,144 TPU v4 (arXiv:2204.02311)"
LLAMA3 = "38% to 43%: Llama 3 405B, 8,192 and 16,384 H100 (arXiv:2407.21783)"
# What large runs reached. Which chip they ran on is nearer to the truth than how large they were.
PUBLISHED = {"tpu": (Range(0.38, 0.462), f"{LLAMA3}; {PALM}"), "gpu": (Range(0.38, 0.43), LLAMA3)}


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a step may take."""

    step_seconds: Range | None  # None where neither a peak nor a measurement is known
    mfu: Range | None  # None where the chip has no peak
    source: str
    tokens_per_second: Range | None
    compute_seconds: float | None  # least time of the products, recomputation included, at the chip's peak
    link_seconds: float | None  # least time of the bytes that the layout must send, one link after another


def speed(
    program: Program, topology: Topology, wished_mfu: float | None, ceiling: float | None, measured: list[Measured]
) -> Speed:
    """The speed of a program. ceiling: the MFU that a compiled step can reach at most, where that is known.

    measured: of this very machine, where it is the one that is planned for.
    """
    cfg = program.cfg
    step_flops = cfg.flops_per_token * cfg.tokens_per_step
    if measured:
        return measured_speed(program, topology, measured, step_flops)
    chip, number = topology.chip, len(topology.devices)
    guess = estimate(program, topology)
    links = link_seconds(program, topology)
    peak = chip.peak_flops * number
    if wished_mfu is not None:
        mfu, source = Range(wished_mfu, wished_mfu), "as given by --mfu"
    else:
        mfu, source = PUBLISHED[topology.platform]
        most = step_flops / peak / max(guess.compute_s, guess.link_s)
        why = "by the chip's peak and links for this layout"
        if ceiling is not None and ceiling < most:
            most, why = ceiling, "by the compiled step of jaxscale preflight"
        share, in_type = share_of_peak(chip, topology.platform, cfg.model)
        if share < most:
            most, why = share, in_type
        if most < mfu.high:
            mfu = Range(min(mfu.low, most * mfu.low / mfu.high), most)
            source += f"; at most {most:.1%} {why}"
    seconds = mfu.under(step_flops / peak)
    return Speed(seconds, mfu, source, seconds.under(cfg.tokens_per_step), guess.compute_s, links)


def share_of_peak(chip: Chip, platform: str, model: ModelConfig) -> tuple[float, str]:
    """(part of the chip's peak that products of the model's type can reach, why).

    Source: jax.lax.Precision says what float32 becomes; TF32's peak is half of bfloat16's (NVIDIA A100: 156 of 312).
    """
    if model.compute_dtype != "float32" or platform == "cpu":
        return 1.0, ""
    highest = model.matmul_precision == "highest"
    if platform == "tpu":
        return (1 / 6, "in float32 as six passes of bfloat16") if highest else (1.0, "")
    if chip.bfloat16 and not highest:
        return 0.5, "in float32 as TF32"
    return (chip.fp32_flops / chip.peak_flops, "in float32 without matrix units") if chip.fp32_flops else (1.0, "")


def measured_speed(program: Program, topology: Topology, measured: list[Measured], step_flops: float) -> Speed:
    """The speed by what was timed here, give or take 15%: other programs on the machine move it that much."""
    cfg = program.cfg
    parts = cfg.train.num_microbatches
    rate, used = rate_for(measured, cfg.model.compute_dtype, step_flops / parts)
    seconds = Range(0.85, 1.15).times(step_flops / rate)
    chip = find_chip(used[0].device_kind)
    mfu = seconds.under(step_flops / (chip.peak_flops * len(topology.devices))) if chip else None
    names = " and ".join(f"{one.spec} ({one.flops_per_second / 1e9:,.0f} GFLOP/s, {one.date})" for one in used)
    source = f"measured here by jaxscale bench step --save: {names}, give or take 15%"
    return Speed(seconds, mfu, source, seconds.under(cfg.tokens_per_step), None, None)
