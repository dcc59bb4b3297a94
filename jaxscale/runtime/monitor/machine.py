"""Memory of the host and the devices, processor time of this process and others, and telemetry of the devices.

`device/utilisation` is the fraction of time in which a device was active: one kernel on one of its units counts as
full use. It differs from MFU, which counts the model's FLOPs. Sources: for a GPU, nvidia-smi --help-query-gpu
(utilization.gpu: the fraction of the last sample period in which a kernel was executing); for a TPU,
https://cloud.google.com/tpu/docs/tpu-monitoring-library (duty_cycle_pct: the fraction of the last sample period in
which the accelerator was processing), which reports neither power nor temperature.
"""

import itertools
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.system.exits import first_line

STATM = "/proc/self/statm"  # Linux: pages; the second number is resident, the third file-backed
STAT = "/proc/stat"  # Linux: ticks of each processor in user, nice, system, idle, iowait, irq, ...
MIN_SECONDS = 0.2  # shortest interval, summed over processors; a tick is 0.01 s
TIMEOUT_SECONDS = 10.0  # nvidia-smi takes 0.1 to 2 s, and hangs with a stuck driver
MAX_FAILURES = 3  # consecutive failures after which polling stops
FIELDS = ("index", "uuid", "utilization.gpu", "power.draw", "temperature.gpu")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
Read = Callable[[], Mapping[str, float]]


def host_peak_bytes() -> int:
    """Returns the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes


def host_bytes_in_use() -> int | None:
    """Returns the resident memory, except file-backed pages such as memory-mapped data; None if unknown."""
    try:
        with open(STATM, encoding="ascii") as file:
            _, resident, file_backed, *_ = map(int, file.read().split())
    except OSError:
        return None
    return (resident - file_backed) * os.sysconf("SC_PAGE_SIZE")


def memory_metrics(device_stats: Sequence[Mapping[str, int] | None] = ()) -> dict[str, int | float | None]:
    """Returns memory metrics of the host and the fullest device. `device_stats` has one memory_stats() per device."""
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
    """Fractions of CPU time used between two calls of metrics()."""

    def __init__(self, read: Callable[[], CpuSeconds | None] | None = None):
        """`read` returns the counters; default: read_cpu_seconds."""
        self.read = read or read_cpu_seconds
        self.last = self.read()

    def metrics(self) -> dict[str, float | None]:
        """Returns {host_own_share, host_other_share}, fractions of CPU time or None if unknown."""
        now, last = self.read(), self.last
        if now is None or last is None or now.total - last.total < MIN_SECONDS:
            return {"host_own_share": None, "host_other_share": None}
        self.last, total = now, now.total - last.total
        process = min(max(now.process - last.process, 0.0) / total, 1.0)
        busy = min(max(now.busy - last.busy, 0.0) / total, 1.0)
        return {"host_own_share": round(process, 4), "host_other_share": round(max(busy - process, 0.0), 4)}


def read_cpu_seconds() -> CpuSeconds | None:
    """Reads the CPU time counters of Linux; returns None on other systems."""
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
    """Returns (busy seconds, total seconds) of the given processors, parsed from the text of /proc/stat."""
    busy = total = 0
    for line in text.splitlines():
        name, *ticks = line.split()
        if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in processors:
            user, nice, system, idle, iowait, *others = map(int, ticks)
            worked = user + nice + system + sum(others[:3])  # irq, softirq, steal; guest time is part of user
            busy, total = busy + worked, total + worked + idle + iowait
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    return busy / ticks_per_second, total / ticks_per_second


class Telemetry:
    """Polls this machine's devices in a thread. `latest` is {} before the first read and after a failure."""

    def __init__(self, read: Read | None, *, every_seconds: float, say: Callable[[str], None]):
        """`read` returns the metrics; it may block or raise. None: the platform has no telemetry."""
        self.read, self.every_seconds, self.say = read, every_seconds, say
        self.latest: dict[str, float] = {}
        self.stopped = threading.Event()

    def __enter__(self) -> "Telemetry":
        if self.read is not None:
            threading.Thread(target=self.work, args=(self.read,), name="telemetry", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopped.set()

    def work(self, read: Read) -> None:
        """Polls until the run ends. After MAX_FAILURES consecutive failed reads, logs the error and stops."""
        failures = 0
        while not self.stopped.is_set():
            try:
                self.latest, failures = dict(read()), 0
            except Exception as error:  # telemetry must not end a run
                self.latest, failures = {}, failures + 1
                if failures == MAX_FAILURES:
                    return self.say(f"telemetry is disabled ({first_line(error)}); training continues without it")
            self.stopped.wait(self.every_seconds)


def make_reader(platform: str) -> Read | None:
    """Returns the telemetry reader of a JAX platform ('gpu' or 'tpu'), or None if it has none."""
    if platform == "gpu":
        return read_nvidia if shutil.which(QUERY[0]) else None
    if platform != "tpu":
        return None
    try:
        from libtpu.sdk import tpumonitoring as monitoring
    except Exception:  # not installed, too old, or it cannot be loaded
        return None
    return lambda: combine_devices(parse_duty(monitoring.get_metric("duty_cycle_pct").data()))


def read_nvidia() -> dict[str, float]:
    """Returns the metrics of this machine's visible NVIDIA GPUs. Raises OSError, TimeoutExpired or ValueError."""
    done = subprocess.run(QUERY, capture_output=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL)
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        lines = (done.stderr.decode("utf-8", "replace") or text).strip().splitlines()
        raise ValueError(f"nvidia-smi exited with {done.returncode}: {lines[0][:200] if lines else 'no output'}")
    return combine_devices(parse_nvidia(text, os.environ.get("CUDA_VISIBLE_DEVICES")))


def parse_nvidia(text: str, visible: str | None = None) -> list[dict[str, float]]:
    """Returns one dict per GPU from the output of QUERY, without unsupported values ('[N/A]').

    `visible` is CUDA_VISIBLE_DEVICES, which nvidia-smi ignores: a list of indices or UUID prefixes. As in CUDA, the
    list ends before the first entry that is not a GPU of this machine, such as -1.
    Raises ValueError for unexpected output.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}  # by index and UUID
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS) or not cells[0].isdecimal():
            raise ValueError(f"unexpected output of nvidia-smi: {line[:80]!r}")
        percent, watts, celsius = map(parse_number, cells[2:])
        utilisation = None if percent is None else percent / 100
        values = {"utilisation": utilisation, "power_watts": watts, "temperature_c": celsius}
        found[cells[0], cells[1]] = {name: value for name, value in values.items() if value is not None}
    if visible is None:
        return list(found.values())
    matching = lambda name: [key for key in found if name == key[0] or name and key[1].startswith(name)]
    keys = itertools.takewhile(bool, (matching(name.strip()) for name in visible.split(",")))
    return [found[key[0]] for key in keys]


def parse_number(cell: str) -> float | None:
    """Parses a finite number; returns None for other text, such as '[N/A]', '[Not Supported]' or 'ERR!'."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def combine_devices(devices: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean utilisation, the mean power and the highest temperature of the devices."""
    devices, metrics = list(devices), {}
    for name in ("utilisation", "power_watts", "temperature_c"):
        if values := [device[name] for device in devices if name in device]:
            mean = round(statistics.fmean(values), 4)
            metrics[f"device/{name}"] = max(values) if name == "temperature_c" else mean
    return metrics


def parse_duty(data: Iterable[Any]) -> list[dict[str, float]]:
    """Returns one dict per chip from libtpu's duty cycles, which are percentages."""
    values = [parse_number(str(value)) for value in data]
    return [{"utilisation": value / 100} for value in values if value is not None]
