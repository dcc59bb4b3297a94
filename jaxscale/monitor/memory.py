"""Memory as metrics, in bytes: the peak of this process, and what the device says of itself."""

import resource
import sys
from collections.abc import Mapping, Sequence


def host_peak_bytes() -> int:
    """The largest resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes


def memory_metrics(device_stats: Sequence[Mapping[str, int] | None] = ()) -> dict[str, int | float | None]:
    """{host_peak_bytes, device_peak_bytes, device_bytes_limit} of the fullest local device; None where it does not say.

    Args: device_stats: `device.memory_stats()` of each local device; None on CPU.
    """
    known = [stats for stats in device_stats if stats]
    fullest = max(known, key=lambda stats: stats.get("peak_bytes_in_use", 0), default={})
    return {
        "host_peak_bytes": host_peak_bytes(),
        "device_peak_bytes": fullest.get("peak_bytes_in_use"),
        "device_bytes_limit": fullest.get("bytes_limit"),
    }
