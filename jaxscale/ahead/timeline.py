"""A step on one chip, played in the order of its program: what hides behind products, and what holds them up."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from jaxscale.ahead.hlo import Collective
from jaxscale.ahead.hlo_schedule import KERNEL, Item
from jaxscale.hardware import Chip
from jaxscale.planning.links import DCN

EIGHT_BIT = {"s8": "int8_flops", "u8": "int8_flops", "s4": "int8_flops", "u4": "int8_flops"}


@dataclasses.dataclass
class Played:
    """What became of one collective, over all its runs in a step. Times in seconds."""

    runs: float = 0.0
    is_blocking: bool = True  # nothing can run between its start and its end
    link_s: float = 0.0  # its stages, one after the other
    cover_s: float = 0.0  # products between its start and its end
    exposed_s: float = 0.0  # for which products stand still until it ends


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step, played."""

    seconds: float  # products, and what they wait for
    collectives: tuple[Played, ...]  # by the collective's number
    exposed: Mapping[str, float]  # seconds for which products stand still, by link
    blocking: Mapping[str, float]  # the part of them that is of blocking collectives


def play(items: Sequence[Item], collectives: Sequence[Collective], chip: Chip) -> Timeline:
    """The least time of a scheduled program: products at the chip's peak, links at theirs, memory left out.

    A chip does products one after the other. Beside them each dimension of its torus (or its switch, or its network)
    serves one collective at a time, first come first served: two cannot hide behind the same work on the same links.
    """
    player = Player(collectives, chip)
    player.play(items, 1.0)
    end = max([player.now, *player.free.values()])
    return Timeline(end, tuple(player.played), dict(player.exposed), dict(player.blocking))


class Player:
    """The clock of one chip and of its links."""

    def __init__(self, collectives: Sequence[Collective], chip: Chip) -> None:
        self.collectives, self.chip = collectives, chip
        self.now = self.work = 0.0
        self.free: dict[str, float] = {}  # when each link has done what was asked of it
        self.ends: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)  # (end, work before the start)
        self.played = [Played() for _ in collectives]
        self.exposed: dict[str, float] = collections.defaultdict(int)
        self.blocking: dict[str, float] = collections.defaultdict(int)

    def play(self, items: Sequence[Item], weight: float) -> None:
        """Plays items that run `weight` times in a step."""
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
        """A loop, or a branch that is taken sometimes: the first run by itself, all others as the second."""
        first = min(1.0, item.times)
        self.once(item.items, weight * first, first)
        if item.times > 1:
            self.once(item.items, weight * (item.times - 1), item.times - 1)

    def once(self, items: Sequence[Item], weight: float, times: float) -> None:
        """Plays items once, and lets the time of so many runs pass."""
        before = self.now
        self.play(items, weight)
        shift = (times - 1) * (self.now - before)
        self.now += shift
        self.free = {link: end + shift for link, end in self.free.items()}
        for number, pending in self.ends.items():
            self.ends[number] = [(end + shift, work) for end, work in pending]

    def start(self, number: int, weight: float) -> None:
        """Puts the stages of a collective on their links, each after the one before."""
        end, played = self.now, self.played[number]
        for stage in self.collectives[number].stages:
            seconds = stage.seconds(self.chip) or 0.0
            end = max([end, *(self.free.get(queue, 0.0) for queue in stage.queues)]) + seconds
            for queue in stage.queues:
                self.free[queue] = end
            played.link_s += seconds * weight
        played.runs += weight
        self.ends[number].append((end, self.work))

    def end(self, number: int, weight: float, *, is_blocking: bool = False) -> None:
        """Waits for a collective."""
        if not self.ends[number]:
            return
        end, work = self.ends[number].pop(0)
        played, waited = self.played[number], max(0.0, end - self.now)
        played.is_blocking = is_blocking
        played.cover_s += (self.work - work) * weight
        played.exposed_s += waited * weight
        self.now += waited
        for link, seconds in shares(self.collectives[number], self.chip).items():
            self.exposed[link] += seconds * waited * weight
            if is_blocking:
                self.blocking[link] += seconds * waited * weight


def shares(collective: Collective, chip: Chip) -> dict[str, float]:
    """The part of a collective's time on each link."""
    times: dict[str, float] = collections.defaultdict(int)
    for link, seconds in link_seconds(collective, chip):
        times[link] += seconds or 0.0
    total = sum(times.values())
    return {link: seconds / total for link, seconds in times.items()} if total else {}


def link_seconds(collective: Collective, chip: Chip) -> list[tuple[str, float | None]]:
    """('ici:fsdp:x', seconds of one run) for each stage; None where the bandwidth is not known."""
    axes = "+".join(collective.axes) or "none"
    found = []
    for stage in collective.stages:
        along = f":{stage.along}" if chip.ici_dims and stage.along != DCN else ""
        found.append((f"{'dcn' if stage.along == DCN else 'ici'}:{axes}{along}", stage.seconds(chip)))
    return found


def work_seconds(flops: Mapping[str, float], chip: Chip) -> float:
    """Seconds of products by operand type, each at the peak of its type; kernels at bfloat16's."""
    return sum(amount / (chip.peak_flops if dtype == KERNEL else peak(chip, dtype)) for dtype, amount in flops.items())


def peak(chip: Chip, dtype: str) -> float:
    """FLOP/s of products of this operand type; the bfloat16 peak where the table has no other."""
    faster = chip.fp8_flops if dtype.startswith("f8") else getattr(chip, EIGHT_BIT.get(dtype, ""), None)
    return max(faster or 0.0, chip.peak_flops)
