"""The least time that a compiled step can take on a chip: from what it does, in which order, and what the chip can."""

import collections
import dataclasses

from jaxscale.ahead.hlo import HloFacts
from jaxscale.ahead.timeline import Played, Timeline, link_seconds, play, work_seconds
from jaxscale.hardware import Chip


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step on one device, resource by resource, and what follows from them."""

    compute_s: float  # matrix products at the chip's peak for their types
    hbm_s: float
    links_s: dict[str, float]  # 'ici:fsdp:x', 'dcn:data', ...: for each set of mesh axes and kind of link
    exposed_s: dict[str, float]  # of these, how long products stand still, by the order of the program
    blocking_s: dict[str, float]  # of those, what collectives take beside which nothing can run
    at_least_s: float  # products, and all that is exposed; or the memory, where that takes longer
    overlapped_s: float  # everything hides behind the slowest resource, whatever the order
    serial_s: float  # nothing overlaps
    mfu_ceiling: float  # model FLOPs over what the chip could do in at_least_s
    unpriced: tuple[str, ...]  # what has no figure and is in none of the times
    played: tuple[Played, ...]  # what became of each collective; () where the program has no order


def roofline(facts: HloFacts, chip: Chip, model_flops_per_device: float) -> Roofline:
    """The bounds of a step. The truth lies above at_least_s, as far as kernels and links miss their peaks.

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
    links: collections.Counter[str] = collections.Counter()
    queues: collections.Counter[str] = collections.Counter()
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
    at_least = max(order.seconds, overlapped)
    return Roofline(
        compute_s=compute,
        hbm_s=hbm,
        links_s=dict(links),
        exposed_s=dict(order.exposed),
        blocking_s=dict(order.blocking),
        at_least_s=at_least,
        overlapped_s=overlapped,
        serial_s=compute + hbm + links.total(),
        mfu_ceiling=model_flops_per_device / (chip.peak_flops * at_least) if at_least else 0.0,
        unpriced=tuple(dict.fromkeys(unpriced)),
        played=order.collectives,
    )
