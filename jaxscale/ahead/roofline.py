"""The least time that a compiled step can take on a chip: from what it does, in which order, and what the chip can."""

import collections
import dataclasses
import math

from jaxscale.ahead.hlo import HloFacts
from jaxscale.ahead.timeline import Played, Timeline, link_seconds, play, work_seconds
from jaxscale.hardware import Chip
from jaxscale.planning.stages import SENT, Stages
from jaxscale.sharding.schedules import EQUAL_COSTS

IN_STAGE = {"expert", "context", "tensor"}  # axes whose devices are of one stage of a pipeline
NO_STAGES = Stages(size=1, layers=1, microbatches=1)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step on one device, resource by resource, and what follows from them."""

    compute_s: float  # matrix products at the chip's peak for their types
    hbm_s: float
    links_s: dict[str, float]  # 'ici:fsdp:x', 'dcn:data', ...: for each set of mesh axes and kind of link
    exposed_s: dict[str, float]  # of these, how long products stand still, by the order of the program
    blocking_s: dict[str, float]  # of those, what collectives take beside which nothing can run
    at_least_s: float  # products, all that is exposed, and the bubble; or the memory, where that takes longer
    overlapped_s: float  # everything hides behind the slowest resource, whatever the order
    serial_s: float  # nothing overlaps
    mfu_ceiling: float  # model FLOPs over what the chip could do in at_least_s
    unpriced: tuple[str, ...]  # what has no figure and is in none of the times
    played: tuple[Played, ...]  # what became of each collective; () where the program has no order
    bubble_s: float = 0.0  # in at_least_s: what a stage of a pipeline waits while it fills and empties
    bubble: str = ""  # with passes done twice, its part of the stages' time, with the formula; '' without a pipeline


def roofline(
    facts: HloFacts, chip: Chip, model_flops_per_device: float, stages: Stages = NO_STAGES, head: float = 0.0
) -> Roofline:
    """The bounds of a step. The truth lies above at_least_s, as far as kernels and links miss their peaks.

    stages: of its pipeline. A device's program has its own products alone, each as often as it runs them, and where
    stages differ as often as the last one does; in the other ticks it waits for stages that run theirs. head: the part
    of the model's products that are the output projection's, for which nobody waits in these.

    Assumed: products run at the peak of their type, and float32 ones at bfloat16's (XLA's default on TPU); memory and
    links run at their datasheet figure in one direction with no latency. Each stage of a collective has the links of
    its own dimension of the torus (links.group_lines). A program that is not scheduled is taken to hide everything.
    """
    unpriced: list[str] = []
    flops = facts.dot_flops_by_type or {"bf16": facts.dot_flops}
    compute = facts.kernel_flops / chip.peak_flops + work_seconds(flops, chip)
    if facts.silent_kernels:
        unpriced.append(f"FLOPs of {facts.silent_kernels} kernel runs that declare none")
    if facts.unknown_trips:
        unpriced.append(f"all but one trip of {facts.unknown_trips} loops")
    if facts.host_bytes:
        unpriced.append(f"{facts.host_bytes:.3g} bytes to and from the host's memory")
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
    order = play(facts.schedule, facts.collectives, chip) if facts.schedule else Timeline(overlapped, (), {}, {})
    waits = math.fsum(seconds for link, seconds in order.exposed.items() if is_in_stage(link))
    bubble = stages.waiting(EQUAL_COSTS) * (1 - stages.head_part(head)) * compute + stages.waiting(SENT) * waits
    at_least = max(order.seconds + bubble, overlapped)
    return Roofline(
        compute_s=compute,
        hbm_s=hbm,
        links_s=dict(links),
        exposed_s=dict(order.exposed),
        blocking_s=dict(order.blocking),
        at_least_s=at_least,
        overlapped_s=max(overlapped, compute + bubble),
        serial_s=compute + bubble + hbm + sum(links.values()),
        mfu_ceiling=model_flops_per_device / (chip.peak_flops * at_least) if at_least else 0.0,
        unpriced=tuple(dict.fromkeys(unpriced)),
        played=order.collectives,
        bubble_s=bubble,
        bubble=stages.formula if stages.on else "",
    )


def is_in_stage(link: str) -> bool:
    """True for a link such as 'ici:tensor:x', of what the devices of one stage say to each other."""
    axes = link.split(":")[1].split("+")
    return set(axes) <= IN_STAGE
