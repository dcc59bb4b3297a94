"""Whose work this machine's processors do between two reports: this process's, or that of others."""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

STAT = "/proc/stat"  # Linux: of each processor the ticks that went to user, nice, system, idle, iowait, irq, ...
LEAST_SECONDS = 0.2  # of all processors together: a tick is 0.01 s


class Spent(NamedTuple):
    """Seconds since the machine began, over the processors that this process may use."""

    own: float  # of this process, and of children that have ended
    busy: float  # of whatever runs, what other guests of the hardware took included
    all: float


class HostLoad:
    """Counts from one call of metrics() to the next."""

    def __init__(self, read: Callable[[], Spent | None] | None = None):
        """read: in place of the machine's own count."""
        self.read = read or read_spent
        self.last = self.read()

    def metrics(self) -> dict[str, float | None]:
        """{host_own_share, host_other_share}: parts of the processors' time that this process and all others took.

        None where the platform does not tell, or where the time is too short to say. Costs one read of /proc/stat.
        """
        now, last = self.read(), self.last
        if now is None or last is None or now.all - last.all < LEAST_SECONDS:
            return {"host_own_share": None, "host_other_share": None}
        self.last, every = now, now.all - last.all
        own = min(max(now.own - last.own, 0.0) / every, 1.0)
        busy = min(max(now.busy - last.busy, 0.0) / every, 1.0)
        return {"host_own_share": round(own, 4), "host_other_share": round(max(busy - own, 0.0), 4)}


def read_spent() -> Spent | None:
    """What Linux counts; None elsewhere."""
    try:
        with open(STAT, encoding="ascii") as file:
            text = file.read()
    except OSError:
        return None
    children = os.times()
    own = time.process_time() + children.children_user + children.children_system
    busy, every = processor_seconds(text, os.sched_getaffinity(0))
    return Spent(own, busy, every)


def processor_seconds(text: str, processors: set[int]) -> tuple[float, float]:
    """(seconds that some of the processors worked, all their seconds) out of the text of /proc/stat."""
    busy = every = 0
    for line in text.splitlines():
        name, *ticks = line.split()
        if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in processors:
            user, nice, system, idle, iowait, *rest = map(int, ticks)
            worked = user + nice + system + sum(rest[:3])  # irq, softirq, steal; guests are in user already
            busy, every = busy + worked, every + worked + idle + iowait
    tick = os.sysconf("SC_CLK_TCK")
    return busy / tick, every / tick
