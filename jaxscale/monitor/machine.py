"""What the operating system and the devices say of memory, in bytes, and whose work this machine's processors do."""

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

STATM = "/proc/self/statm"  # Linux: pages, of which the second number are resident and the third are of files
STAT = "/proc/stat"  # Linux: of each processor the ticks that went to user, nice, system, idle, iowait, irq, ...
LEAST_SECONDS = 0.2  # of all processors together: a tick is 0.01 s


def host_peak_bytes() -> int:
    """The largest resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes


def host_bytes_in_use() -> int | None:
    """Bytes of memory that this process holds now and nobody can take back; None where the platform does not tell.

    Pages of files are left out: token shards are mapped, and what was read of them stays resident until the memory is
    wanted, so that the resident size, and its peak, rise through the first epoch without anything being wrong.
    """
    try:
        with open(STATM, encoding="ascii") as file:
            _, resident, of_files, *_ = map(int, file.read().split())
    except OSError:
        return None
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


def memory_metrics(device_stats: Sequence[Mapping[str, int] | None] = ()) -> dict[str, int | float | None]:
    """{host_bytes_in_use, host_peak_bytes, device_bytes_in_use, device_peak_bytes, device_bytes_limit}, of the device
    with the highest peak and the most in use; None where a platform does not say.

    Args: device_stats: `device.memory_stats()` of each local device; None on CPU.
    """
    known = [stats for stats in device_stats if stats]
    fullest = max(known, key=lambda stats: stats.get("peak_bytes_in_use", 0), default={})
    in_use = [stats["bytes_in_use"] for stats in known if "bytes_in_use" in stats]
    return {
        "host_bytes_in_use": host_bytes_in_use(),
        "host_peak_bytes": host_peak_bytes(),
        "device_bytes_in_use": max(in_use, default=None),
        "device_peak_bytes": fullest.get("peak_bytes_in_use"),
        "device_bytes_limit": fullest.get("bytes_limit"),
    }


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
