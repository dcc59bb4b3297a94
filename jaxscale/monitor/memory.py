"""Memory as metrics, in bytes: of this process, and what the device says of itself."""

import os
import resource
import sys
from collections.abc import Mapping, Sequence

STATM = "/proc/self/statm"  # Linux: pages, of which the second number are resident and the third are of files


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
