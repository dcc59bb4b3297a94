"""Lower bound of a compiled step's time on a chip: from its work, its order, and the chip's peak rates."""

import collections
import dataclasses
import math

from jaxscale.core.axes.pipeline_schedules import COMMUNICATION_COSTS, EQUAL_COSTS, ScheduleSize
from jaxscale.kernels.hardware import Chip
from jaxscale.tools.preflight.hlo import HloFacts
from jaxscale.tools.preflight.timeline import CollectiveTime, Timeline, link_seconds, simulate, work_seconds

IN_STAGE = {"expert", "context", "tensor"}  # axes within a pipeline stage
NO_STAGES = ScheduleSize()


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step on one device by resource, and their combinations."""

    compute_s: float  # matmuls at the chip's peak for their types
    hbm_s: float
    links_s: dict[str, float]  # 'ici:fsdp:x', 'dcn:data', ...: for each set of mesh axes and kind of link
    exposed_s: dict[str, float]  # of these, exposed by the program's order
    blocking_s: dict[str, float]  # of those, of blocking collectives
    at_least_s: float  # matmuls, exposed collectives and the bubble; or memory, if longer
    overlapped_s: float  # full overlap with the slowest resource, in any order
    serial_s: float  # nothing overlaps
    mfu_ceiling: float  # model FLOPs over the chip's peak in at_least_s
    unpriced: tuple[str, ...]  # costs without a figure, in none of the times
    played: tuple[CollectiveTime, ...]  # time of each collective; () without a schedule
    bubble_s: float = 0.0  # in at_least_s: idle time of a pipeline stage in fill and drain
    bubble: str = ""  # fraction of the stages' time, with the formula; '' without a pipeline


def roofline(
    facts: HloFacts,
    chip: Chip,
    model_flops_per_device: float,
    schedule: ScheduleSize = NO_STAGES,
    head: float = 0.0,
    *,
    shards_head: bool = True,
) -> Roofline:
    """Returns the bounds of a step. Real time exceeds at_least_s by as much as kernels and links miss their peaks.

    schedule: of its pipeline. A device's program has only its stage's matmuls, each as often as it runs, and where
    stages differ as often as on the last one; in other ticks it is idle. head: the output projection's fraction of the
    model's matmuls, for which no stage is idle. shards_head: all stages share it, or the last one computes it alone.

    Assumes matmuls at the peak of their type, float32 at bfloat16's (XLA's default on TPU); memory and links at their
    datasheet figure in one direction without latency. Each phase of a collective uses the links of its torus
    dimension (links.group_lines). An unscheduled program is assumed to overlap everything.
    """
    unpriced: list[str] = []
    flops = facts.dot_flops_by_type or {"bf16": facts.dot_flops}
    compute = facts.kernel_flops / chip.peak_flops + work_seconds(flops, chip)
    if facts.silent_kernels:
        unpriced.append(f"FLOPs of {facts.silent_kernels} kernel runs that declare none")
    if facts.unknown_trips:
        unpriced.append(f"all but one trip of {facts.unknown_trips} loops")
    if facts.host_bytes:
        unpriced.append(f"{facts.host_bytes:.3g} bytes to and from host memory")
    links: dict[str, float] = collections.defaultdict(int)
    queues: dict[str, float] = collections.defaultdict(int)
    for collective in facts.collectives:
        for stage, (link, seconds) in zip(collective.stages, link_seconds(collective, chip)):
            if seconds is None:
                unpriced.append(f"{link}: no bandwidth is known for {chip.name}")
                continue
            links[link] += seconds * collective.times
            for queue in stage.queues:
                queues[queue] += seconds * collective.times
    hbm = facts.hbm_bytes / chip.hbm_bandwidth
    overlapped = max(compute, hbm, *queues.values())
    timeline = simulate(facts.schedule, facts.collectives, chip) if facts.schedule else Timeline(overlapped, (), {}, {})
    exposed_in_stage = math.fsum(seconds for link, seconds in timeline.exposed.items() if is_in_stage(link))
    stage_head = head * (1 if shards_head else schedule.num_stages)
    layers = (1 - head) * (1 + schedule.recomputed(EQUAL_COSTS))
    idle = schedule.idle_time(EQUAL_COSTS) * layers / (layers + stage_head) * compute
    bubble = idle + schedule.idle_time(COMMUNICATION_COSTS) * exposed_in_stage
    at_least = max(timeline.seconds + bubble, overlapped)
    return Roofline(
        compute_s=compute,
        hbm_s=hbm,
        links_s=dict(links),
        exposed_s=dict(timeline.exposed),
        blocking_s=dict(timeline.blocking),
        at_least_s=at_least,
        overlapped_s=max(overlapped, compute + bubble),
        serial_s=compute + bubble + hbm + sum(links.values()),
        mfu_ceiling=model_flops_per_device / (chip.peak_flops * at_least) if at_least else 0.0,
        unpriced=tuple(dict.fromkeys(unpriced)),
        played=timeline.collectives,
        bubble_s=bubble,
        bubble=schedule.formula if schedule.num_stages > 1 else "",
    )


def is_in_stage(link: str) -> bool:
    """True for a link such as 'ici:tensor:x', between devices of one pipeline stage."""
    axes = link.split(":")[1].split("+")
    return set(axes) <= IN_STAGE
