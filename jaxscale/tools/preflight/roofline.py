"""Lower bound of a compiled step's time, from its work, its execution order and the chip's peak rates.

The execution order of a scheduled program is simulated to find which collectives overlap matmuls and which block them.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxscale.core.axes.pipeline_schedules import COMMUNICATION_COSTS, EQUAL_COSTS, ScheduleSize
from jaxscale.kernels.hardware import Chip
from jaxscale.tools.planning.links import DCN
from jaxscale.tools.planning.schedule_times import bubble_formula, idle_time, recomputed_time
from jaxscale.tools.preflight.hlo import Collective, HloFacts
from jaxscale.tools.preflight.hlo_schedule import ScheduleItem

IN_STAGE = {"expert", "context", "tensor"}  # axes within a pipeline stage
EIGHT_BIT = ("s8", "u8", "s4", "u4")
NO_STAGES = ScheduleSize()


@dataclasses.dataclass
class CollectiveTime:
    """Time in seconds of one collective, summed over all its runs in a step."""

    runs: float = 0.0
    is_blocking: bool = True  # True if nothing can run between its start and its end
    link_s: float = 0.0  # sum of its phases
    cover_s: float = 0.0  # matmuls between its start and its end
    exposed_s: float = 0.0  # part that matmuls do not overlap


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Times in seconds of one step on one device, by resource and in total."""

    compute_s: float  # matmuls at the chip's peak for their types
    hbm_s: float
    links_s: dict[str, float]  # {link such as 'ici:fsdp:x' or 'dcn:data': seconds}
    exposed_s: dict[str, float]  # part of links_s that matmuls do not overlap in program order
    blocking_s: dict[str, float]  # part of exposed_s from blocking collectives
    at_least_s: float  # lower bound: matmuls, exposed collectives and the bubble, or memory if longer
    overlapped_s: float  # time if everything overlapped with the slowest resource
    serial_s: float  # time if nothing overlapped
    mfu_ceiling: float  # model FLOPs divided by the chip's peak FLOPs in at_least_s
    unpriced: tuple[str, ...]  # costs that the times exclude
    played: tuple[CollectiveTime, ...]  # time of each collective; () without a schedule
    bubble_s: float = 0.0  # part of at_least_s: idle time of a pipeline stage in fill and drain
    bubble: str = ""  # fraction of the stages' time with its formula; '' without a pipeline


def roofline(
    facts: HloFacts,
    chip: Chip,
    model_flops_per_device: float,
    schedule: ScheduleSize = NO_STAGES,
    head: float = 0.0,
    *,
    shards_head: bool = True,
) -> Roofline:
    """Returns lower bounds of the step time. Steps take longer, because kernels do not reach peak FLOP/s.

    A device's program contains only the matmuls of its pipeline stage (of the last stage if stages differ). schedule:
    pipeline schedule. head: the output projection's fraction of the model's matmuls, during which no stage is idle.
    shards_head: True if all stages share the output projection, False if the last stage computes it alone.

    Assumes matmuls at the peak of their type (float32 at the bfloat16 peak, as is the default on TPU), and memory and
    links at their datasheet bandwidth in one direction, without latency. Each phase of a collective uses the links of
    its torus dimension (links.group_lines). If the program has no schedule, everything is assumed to overlap.
    """
    unpriced: list[str] = []
    flops = facts.dot_flops_by_type or {"bf16": facts.dot_flops}
    compute = facts.kernel_flops / chip.peak_flops + work_seconds(flops, chip)
    if facts.silent_kernels:
        unpriced.append(f"FLOPs of {facts.silent_kernels} kernel runs without declared FLOPs")
    if facts.unknown_trips:
        unpriced.append(f"all but one iteration of {facts.unknown_trips} loops with unknown trip counts")
    if facts.host_bytes:
        unpriced.append(f"{facts.host_bytes:.3g} bytes to and from host memory")
    links: dict[str, float] = collections.defaultdict(int)
    queues: dict[str, float] = collections.defaultdict(int)
    for collective in facts.collectives:
        for stage, (link, seconds) in zip(collective.stages, link_seconds(collective, chip)):
            if seconds is None:
                unpriced.append(f"{link}: bandwidth of {chip.name} is unknown")
                continue
            links[link] += seconds * collective.times
            for queue in stage.queues:
                queues[queue] += seconds * collective.times
    hbm = facts.hbm_bytes / chip.hbm_bandwidth
    overlapped = max(compute, hbm, *queues.values())
    timeline = Timeline(facts.collectives, chip, facts.schedule)
    stage_head = head * (1 if shards_head else schedule.num_stages)
    bubble = bubble_seconds(schedule, stage_head, head, compute, timeline.exposed)
    at_least = max((timeline.seconds if facts.schedule else overlapped) + bubble, overlapped)
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
        played=tuple(timeline.collectives) if facts.schedule else (),
        bubble_s=bubble,
        bubble=bubble_formula(schedule) if schedule.num_stages > 1 else "",
    )


def bubble_seconds(
    schedule: ScheduleSize, stage_head: float, head: float, compute: float, exposed: Mapping[str, float]
) -> float:
    """Returns a stage's idle time. stage_head, head: output projection's fraction of the stage's and all matmuls."""
    axes_of = lambda link: set(link.split(":")[1].split("+"))
    exposed_in_stage = math.fsum(seconds for link, seconds in exposed.items() if axes_of(link) <= IN_STAGE)
    layers = (1 - head) * (1 + recomputed_time(schedule, EQUAL_COSTS))
    idle = idle_time(schedule, EQUAL_COSTS) * layers / (layers + stage_head) * compute
    return idle + idle_time(schedule, COMMUNICATION_COSTS) * exposed_in_stage


class Timeline:
    """Simulation of one step on one chip and its links.

    Matmuls run sequentially at peak FLOP/s, without memory time. Meanwhile, each torus dimension, switch or network
    runs one collective at a time, so two collectives on the same links cannot overlap the same matmul.
    """

    def __init__(self, started: Sequence[Collective], chip: Chip, items: Sequence[ScheduleItem]) -> None:
        self.started, self.chip = started, chip
        self.now = self.work = 0.0
        self.free: dict[str, float] = {}  # time at which each link becomes free
        self.ends: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)  # (end, work before the start)
        self.collectives = [CollectiveTime() for _ in started]
        self.exposed: dict[str, float] = collections.defaultdict(int)  # {link: exposed seconds}
        self.blocking: dict[str, float] = collections.defaultdict(int)  # the same, of blocking collectives
        self.run(items)

    @property
    def seconds(self) -> float:
        """Time of matmuls and exposed collectives."""
        return max([self.now, *self.free.values()])

    def run(self, items: Sequence[ScheduleItem], weight: float = 1.0) -> None:
        """Simulates items that run `weight` times in a step."""
        for item in items:
            if item.what == "work":
                seconds = work_seconds(item.flops, self.chip)
                self.now += seconds
                self.work += seconds
            elif item.what == "runs":
                first = min(1.0, item.times)  # the first iteration of a loop, or a branch that only some runs take
                self.once(item.items, weight * first, first)
                if item.times > 1:  # all later iterations are like the second
                    self.once(item.items, weight * (item.times - 1), item.times - 1)
            elif item.what == "done":
                self.end(item.collective, weight)
            else:
                self.start(item.collective, weight)
                if item.what == "blocking":
                    self.end(item.collective, weight, is_blocking=True)

    def once(self, items: Sequence[ScheduleItem], weight: float, times: float) -> None:
        """Simulates items once and advances the clock by `times` runs."""
        before = self.now
        self.run(items, weight)
        shift = (times - 1) * (self.now - before)
        self.now += shift
        self.free = {link: end + shift for link, end in self.free.items()}
        for number, pending in self.ends.items():
            self.ends[number] = [(end + shift, work) for end, work in pending]

    def start(self, number: int, weight: float) -> None:
        """Schedules the phases of a collective on their links, in order."""
        end, time = self.now, self.collectives[number]
        for phase in self.started[number].stages:
            seconds = phase.seconds(self.chip) or 0.0
            end = max([end, *(self.free.get(queue, 0.0) for queue in phase.queues)]) + seconds
            for queue in phase.queues:
                self.free[queue] = end
            time.link_s += seconds * weight
        time.runs += weight
        self.ends[number].append((end, self.work))

    def end(self, number: int, weight: float, *, is_blocking: bool = False) -> None:
        """Advances the clock to the end of a collective."""
        if not self.ends[number]:
            return
        end, work = self.ends[number].pop(0)
        time, wait = self.collectives[number], max(0.0, end - self.now)
        time.is_blocking = is_blocking
        time.cover_s += (self.work - work) * weight
        time.exposed_s += wait * weight
        self.now += wait
        phases = [(link, seconds) for link, seconds in link_seconds(self.started[number], self.chip) if seconds]
        total = sum(seconds for _, seconds in phases)
        for link, seconds in phases:
            self.exposed[link] += seconds / total * wait * weight
            if is_blocking:
                self.blocking[link] += seconds / total * wait * weight


def link_seconds(collective: Collective, chip: Chip) -> list[tuple[str, float | None]]:
    """Returns (link such as 'ici:fsdp:x', seconds per run or None if unknown) for each phase."""
    axes = "+".join(collective.axes) or "none"
    found = []
    for phase in collective.stages:
        along = f":{phase.along}" if chip.ici_dims and phase.along != DCN else ""
        found.append((f"{'dcn' if phase.along == DCN else 'ici'}:{axes}{along}", phase.seconds(chip)))
    return found


def work_seconds(flops: Mapping[str, float], chip: Chip) -> float:
    """Returns the time of matmuls at the peak of their operand type. The default is the bfloat16 peak."""
    faster = lambda dtype: chip.fp8_flops if dtype.startswith("f8") else chip.int8_flops if dtype in EIGHT_BIT else None
    return sum(amount / max(faster(dtype) or 0.0, chip.peak_flops) for dtype, amount in flops.items())
