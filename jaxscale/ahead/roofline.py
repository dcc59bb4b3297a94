"""The least time that a compiled step can take on a chip, from what it does and what the chip can do."""

import collections
import dataclasses
from collections.abc import Mapping

from jaxscale.ahead.hlo import Collective, HloFacts
from jaxscale.hardware import Chip

EIGHT_BIT = {"s8": "int8_flops", "u8": "int8_flops", "s4": "int8_flops", "u4": "int8_flops"}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step on one device, resource by resource, and what follows from them."""

    compute_s: float  # matrix products at the chip's peak for their types
    hbm_s: float
    links_s: dict[str, float]  # 'ici:fsdp', 'dcn:data', ...: one for each set of mesh axes and kind of link
    overlapped_s: float  # everything hides behind the slowest resource
    serial_s: float  # nothing overlaps
    mfu_ceiling: float  # model FLOPs over what the chip could do in overlapped_s
    unpriced: tuple[str, ...]  # what has no figure and is in none of the times


def roofline(
    facts: HloFacts,
    chip: Chip,
    num_slices: int,
    model_flops_per_device: float,
    link_shares: Mapping[str, float] | None = None,
) -> Roofline:
    """The bounds of a step. The truth lies between overlapped_s and serial_s, or above where kernels miss their peaks.

    Assumed: products run at the peak of their type, and float32 ones at bfloat16's (XLA's default on TPU); memory and
    links run at their datasheet figure in one direction with no latency. In overlapped_s products, memory, ICI and
    DCN all run at the same time, and so do collectives of mesh axes that use different links of a chip: the ICI is
    busy for as long as its busiest axis, and no less than all its bytes over all its links.

    Args: link_shares: for each mesh axis, the part of a chip's ICI links that a collective along it can use
    (topology.link_shares); None: all of them, as a collective over every dimension of the torus can.
    """
    unpriced: list[str] = []
    compute = facts.kernel_flops / chip.peak_flops
    for dtype, flops in facts.dot_flops_by_type.items() or {"bf16": facts.dot_flops}.items():
        compute += flops / peak(chip, dtype)
    if facts.silent_kernels:
        unpriced.append(f"FLOPs of {facts.silent_kernels} kernel runs that declare none")
    if facts.unknown_trips:
        unpriced.append(f"all but one trip of {facts.unknown_trips} loops")
    if facts.host_bytes:
        unpriced.append(f"{facts.host_bytes:.3g} bytes to and from the host's memory")
    links: collections.defaultdict[str, float] = collections.defaultdict(float)
    whole = collections.Counter()  # seconds of each kind of link if every collective used all links of a chip
    for collective in facts.collectives:
        for link, (seconds, share) in link_times(collective, chip, num_slices, link_shares).items():
            if seconds is None:
                unpriced.append(f"{link}: no bandwidth is known for {chip.name}")
            else:
                links[link] += seconds
                whole[link.split(":")[0]] += seconds * share
    hbm = facts.hbm_bytes / chip.hbm_bandwidth
    overlapped = max(compute, hbm, *links.values(), *whole.values())
    return Roofline(
        compute_s=compute,
        hbm_s=hbm,
        links_s=dict(links),
        overlapped_s=overlapped,
        serial_s=compute + hbm + sum(links.values()),
        mfu_ceiling=model_flops_per_device / (chip.peak_flops * overlapped) if overlapped else 0.0,
        unpriced=tuple(dict.fromkeys(unpriced)),
    )


def peak(chip: Chip, dtype: str) -> float:
    """FLOP/s of products of this operand type; the bfloat16 peak where the table has no other."""
    faster = chip.fp8_flops if dtype.startswith("f8") else getattr(chip, EIGHT_BIT.get(dtype, ""), None)
    return max(faster or 0.0, chip.peak_flops)


def link_times(
    collective: Collective, chip: Chip, num_slices: int, link_shares: Mapping[str, float] | None
) -> dict[str, tuple[float | None, float]]:
    """(seconds of a step that a collective keeps links busy, its part of them) by link; None without a figure."""
    axes = "+".join(collective.axes) or "none"
    inside, across = collective.wire_bytes - collective.dcn_bytes, collective.dcn_bytes
    share = 1.0
    if link_shares is not None:
        share = min(1.0, sum(link_shares[axis] for axis in collective.axes)) or 1.0
    bandwidths = {"ici": chip.ici_bandwidth and chip.ici_bandwidth * share, "dcn": chip.dcn_bandwidth}
    times: dict[str, tuple[float | None, float]] = {}
    for link, nbytes in (("ici", inside), ("dcn", across if num_slices > 1 or chip.ici_dims == 0 else 0.0)):
        if nbytes:
            bandwidth = bandwidths[link]
            seconds = nbytes * collective.times / bandwidth if bandwidth else None
            times[f"{link}:{axes}"] = seconds, share if link == "ici" else 1.0
    return times
