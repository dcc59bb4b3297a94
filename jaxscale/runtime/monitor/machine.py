"""Memory of the host and the devices in bytes, and the processor time of this process and others."""

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

STATM = "/proc/self/statm"  # Linux: pages; the second number is resident, the third file-backed
STAT = "/proc/stat"  # Linux: ticks of each processor in user, nice, system, idle, iowait, irq, ...
MIN_SECONDS = 0.2  # of all processors together: a tick is 0.01 s


def host_peak_bytes() -> int:
    """Returns the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes


def host_bytes_in_use() -> int | None:
    """Returns the resident memory of this process without file-backed pages; None if the platform does not report it.

    Token shards are memory-mapped and stay resident until memory is needed, so the total resident size rises through
    the first epoch of a healthy run.
    """
    try:
        with open(STATM, encoding="ascii") as file:
            _, resident, file_backed, *_ = map(int, file.read().split())
    except OSError:
        return None
    return (resident - file_backed) * os.sysconf("SC_PAGE_SIZE")


def memory_metrics(device_stats: Sequence[Mapping[str, int] | None] = ()) -> dict[str, int | float | None]:
    """Returns host_bytes_in_use, host_peak_bytes, device_bytes_in_use, device_peak_bytes and device_bytes_limit.

    Device values are those of the device with the most; None if the platform does not report them.


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


class CpuSeconds(NamedTuple):
    """Seconds since boot, summed over the processors that this process may use."""

    process: float  # this process and its terminated children
    busy: float  # all programs, including steal time of a virtual machine
    total: float


class HostLoad:
    """Processor shares between two calls of metrics()."""

    def __init__(self, read: Callable[[], CpuSeconds | None] | None = None):
        """read: replaces read_cpu_seconds."""
        self.read = read or read_cpu_seconds
        self.last = self.read()

    def metrics(self) -> dict[str, float | None]:
        """Returns {host_own_share, host_other_share}: fractions of processor time of this process and of all others.

        None if the platform does not report them or the interval is too short. Costs one read of /proc/stat.
        """
        now, last = self.read(), self.last
        if now is None or last is None or now.total - last.total < MIN_SECONDS:
            return {"host_own_share": None, "host_other_share": None}
        self.last, total = now, now.total - last.total
        process = min(max(now.process - last.process, 0.0) / total, 1.0)
        busy = min(max(now.busy - last.busy, 0.0) / total, 1.0)
        return {"host_own_share": round(process, 4), "host_other_share": round(max(busy - process, 0.0), 4)}


def read_cpu_seconds() -> CpuSeconds | None:
    """Reads the counters of Linux; None elsewhere."""
    try:
        with open(STAT, encoding="ascii") as file:
            text = file.read()
    except OSError:
        return None
    children = os.times()
    process = time.process_time() + children.children_user + children.children_system
    busy, total = processor_seconds(text, os.sched_getaffinity(0))
    return CpuSeconds(process, busy, total)


def processor_seconds(text: str, processors: set[int]) -> tuple[float, float]:
    """Returns (busy seconds, total seconds) of some processors from the text of /proc/stat."""
    busy = total = 0
    for line in text.splitlines():
        name, *ticks = line.split()
        if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in processors:
            user, nice, system, idle, iowait, *others = map(int, ticks)
            worked = user + nice + system + sum(others[:3])  # irq, softirq, steal; guest time is part of user
            busy, total = busy + worked, total + worked + idle + iowait
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    return busy / ticks_per_second, total / ticks_per_second
