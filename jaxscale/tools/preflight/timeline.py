"""Simulation of a step on one chip in program order: which collectives overlap matmuls, and which block them."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from jaxscale.kernels.hardware import Chip
from jaxscale.tools.planning.links import DCN
from jaxscale.tools.preflight.hlo import Collective
from jaxscale.tools.preflight.hlo_schedule import KERNEL, Item

EIGHT_BIT = {"s8": "int8_flops", "u8": "int8_flops", "s4": "int8_flops", "u4": "int8_flops"}


@dataclasses.dataclass
class CollectiveTime:
    """Time of one collective over all its runs in a step, in seconds."""

    runs: float = 0.0
    is_blocking: bool = True  # nothing can run between its start and its end
    link_s: float = 0.0  # its phases in order
    cover_s: float = 0.0  # matmuls between its start and its end
    exposed_s: float = 0.0  # not overlapped by matmuls


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    seconds: float  # matmuls and exposed collectives
    collectives: tuple[CollectiveTime, ...]  # by the collective's number
    exposed: Mapping[str, float]  # exposed seconds by link
    blocking: Mapping[str, float]  # of them, of blocking collectives


def simulate(items: Sequence[Item], collectives: Sequence[Collective], chip: Chip) -> Timeline:
    """Returns the lower bound of a scheduled program: matmuls at the chip's peak, links at theirs, memory omitted.

    Matmuls run sequentially. Concurrently each torus dimension (or switch, or network) serves one collective at a time,
    first come first served: two cannot hide behind the same work on the same links.
    """
    simulator = Simulator(collectives, chip)
    simulator.simulate(items, 1.0)
    end = max([simulator.now, *simulator.free.values()])
    return Timeline(end, tuple(simulator.times), dict(simulator.exposed), dict(simulator.blocking))


class Simulator:
    """The clock of one chip and its links."""

    def __init__(self, collectives: Sequence[Collective], chip: Chip) -> None:
        self.collectives, self.chip = collectives, chip
        self.now = self.work = 0.0
        self.free: dict[str, float] = {}  # time at which each link becomes free
        self.ends: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)  # (end, work before the start)
        self.times = [CollectiveTime() for _ in collectives]
        self.exposed: dict[str, float] = collections.defaultdict(int)
        self.blocking: dict[str, float] = collections.defaultdict(int)

    def simulate(self, items: Sequence[Item], weight: float) -> None:
        """Simulates items that run `weight` times in a step."""
        for item in items:
            if item.what == "work":
                seconds = work_seconds(item.flops, self.chip)
                self.now += seconds
                self.work += seconds
            elif item.what == "runs":
                self.repeat(item, weight)
            elif item.what == "done":
                self.end(item.collective, weight)
            else:
                self.start(item.collective, weight)
                if item.what == "blocking":
                    self.end(item.collective, weight, is_blocking=True)

    def repeat(self, item: Item, weight: float) -> None:
        """Simulates a loop, or a branch that is taken sometimes: the first run, and all others like the second."""
        first = min(1.0, item.times)
        self.once(item.items, weight * first, first)
        if item.times > 1:
            self.once(item.items, weight * (item.times - 1), item.times - 1)

    def once(self, items: Sequence[Item], weight: float, times: float) -> None:
        """Simulates items once, and advances the clock by `times` runs."""
        before = self.now
        self.simulate(items, weight)
        shift = (times - 1) * (self.now - before)
        self.now += shift
        self.free = {link: end + shift for link, end in self.free.items()}
        for number, pending in self.ends.items():
            self.ends[number] = [(end + shift, work) for end, work in pending]

    def start(self, number: int, weight: float) -> None:
        """Puts the phases of a collective on their links, in order."""
        end, time = self.now, self.times[number]
        for phase in self.collectives[number].stages:
            seconds = phase.seconds(self.chip) or 0.0
            end = max([end, *(self.free.get(queue, 0.0) for queue in phase.queues)]) + seconds
            for queue in phase.queues:
                self.free[queue] = end
            time.link_s += seconds * weight
        time.runs += weight
        self.ends[number].append((end, self.work))

    def end(self, number: int, weight: float, *, is_blocking: bool = False) -> None:
        """Waits for a collective."""
        if not self.ends[number]:
            return
        end, work = self.ends[number].pop(0)
        time, wait = self.times[number], max(0.0, end - self.now)
        time.is_blocking = is_blocking
        time.cover_s += (self.work - work) * weight
        time.exposed_s += wait * weight
        self.now += wait
        for link, seconds in link_fractions(self.collectives[number], self.chip).items():
            self.exposed[link] += seconds * wait * weight
            if is_blocking:
                self.blocking[link] += seconds * wait * weight


def link_fractions(collective: Collective, chip: Chip) -> dict[str, float]:
    """Returns the fraction of a collective's time on each link."""
    times: dict[str, float] = collections.defaultdict(int)
    for link, seconds in link_seconds(collective, chip):
        times[link] += seconds or 0.0
    total = sum(times.values())
    return {link: seconds / total for link, seconds in times.items()} if total else {}


def link_seconds(collective: Collective, chip: Chip) -> list[tuple[str, float | None]]:
    """Returns ('ici:fsdp:x', seconds of one run) of each phase; None if the bandwidth is unknown."""
    axes = "+".join(collective.axes) or "none"
    found = []
    for phase in collective.stages:
        along = f":{phase.along}" if chip.ici_dims and phase.along != DCN else ""
        found.append((f"{'dcn' if phase.along == DCN else 'ici'}:{axes}{along}", phase.seconds(chip)))
    return found


def work_seconds(flops: Mapping[str, float], chip: Chip) -> float:
    """Returns seconds of matmuls by operand type, each at its peak; kernels at bfloat16's."""
    return sum(amount / (chip.peak_flops if dtype == KERNEL else peak(chip, dtype)) for dtype, amount in flops.items())


def peak(chip: Chip, dtype: str) -> float:
    """Returns FLOP/s of this operand type; the bfloat16 peak if the table has no other."""
    faster = chip.fp8_flops if dtype.startswith("f8") else getattr(chip, EIGHT_BIT.get(dtype, ""), None)
    return max(faster or 0.0, chip.peak_flops)
