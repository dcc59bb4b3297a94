"""Telemetry of the devices: utilisation, power, temperature. A thread of its own polls them.

`device/utilisation` is the part of the time in which a device did anything at all, so that one kernel on one of its
units counts as full use. It says nothing of how much was computed, and is never MFU, which counts the model's FLOPs.

Sources: nvidia-smi --help-query-gpu (utilization.gpu: the part of the last sample period in which a kernel was
executing); for a TPU, https://cloud.google.com/tpu/docs/tpu-monitoring-library (duty_cycle_pct: the part of the last
sample period in which the accelerator was processing). A TPU tells neither power nor temperature there.
"""

import itertools
import math
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

EVERY_SECONDS = 30.0
ANSWER_SECONDS = 10.0  # nvidia-smi takes 0.1 to 2 s, and for ever where a driver is stuck
MOST_FAILURES = 3  # in a row, and nobody asks again in this start
FIELDS = ("index", "uuid", "utilization.gpu", "power.draw", "temperature.gpu")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")

Read = Callable[[], Mapping[str, float]]


class Telemetry:
    """The newest numbers of the devices of this machine; {} until there are any, and once they are old."""

    def __init__(self, read: Read | None, *, every_seconds: float = EVERY_SECONDS, say: Callable[[str], None] = print):
        """read: takes its time and may raise; None where the platform tells nothing."""
        self.read, self.every_seconds, self.say = read, every_seconds, say
        self.latest: dict[str, float] = {}
        self.over = threading.Event()

    def __enter__(self) -> "Telemetry":
        if self.read is not None:
            threading.Thread(target=self.work, args=(self.read,), name="telemetry", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()

    def work(self, read: Read) -> None:
        """Reads until the end, or until it has failed too often in a row, which is logged once."""
        failures = 0
        while not self.over.is_set():
            try:
                self.latest, failures = dict(read()), 0
            except Exception as error:  # a program or a library of the platform's: whatever it does ends no run
                self.latest, failures = {}, failures + 1
                if failures == MOST_FAILURES:
                    cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    return self.say(f"telemetry: the devices tell nothing any more ({cause}); training goes on without")
            self.over.wait(self.every_seconds)

    def metrics(self) -> dict[str, float]:
        """{device/utilisation, device/power_watts, device/temperature_c}, those that are known."""
        return self.latest


def reader_for(platform: str) -> Read | None:
    """What reads the devices of a platform that jax names 'gpu' or 'tpu'; None where there is nothing to ask."""
    if platform == "gpu":
        return read_nvidia if shutil.which(QUERY[0]) else None
    if platform == "tpu":
        return tpu_reader()
    return None


def read_nvidia() -> dict[str, float]:
    """The metrics of this machine's visible NVIDIA GPUs. Raises OSError, TimeoutExpired or ValueError."""
    done = subprocess.run(QUERY, capture_output=True, timeout=ANSWER_SECONDS, stdin=subprocess.DEVNULL)
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        said = (done.stderr.decode("utf-8", "replace") or text).strip().splitlines()
        raise ValueError(f"nvidia-smi left with {done.returncode}: {said[0][:200] if said else 'without a word'}")
    return combined(parse_nvidia(text, os.environ.get("CUDA_VISIBLE_DEVICES")))


def parse_nvidia(text: str, visible: str | None = None) -> list[dict[str, float]]:
    """One dict a GPU out of the answer to QUERY. What a GPU does not tell ('[N/A]') is left out.

    Args: visible: CUDA_VISIBLE_DEVICES, which nvidia-smi itself does not obey: numbers, or beginnings of UUIDs; what
    stands behind one that is no GPU here, such as -1, does not count.
    Raises ValueError for text that is no such table.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}  # by index and UUID
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS) or not cells[0].isdecimal():
            raise ValueError(f"nvidia-smi printed no table: {line[:80]!r}")
        percent, watts, celsius = map(number_of, cells[2:])
        told = {"utilisation": None if percent is None else percent / 100, "power_watts": watts}
        told |= {"temperature_c": celsius}
        found[cells[0], cells[1]] = {name: value for name, value in told.items() if value is not None}
    if visible is None:
        return list(found.values())
    named = lambda name: [key for key in found if name == key[0] or name and key[1].startswith(name)]
    keys = itertools.takewhile(bool, (named(name.strip()) for name in visible.split(",")))
    return [found[key[0]] for key in keys]


def number_of(cell: str) -> float | None:
    """The number in a cell; None for '[N/A]', '[Not Supported]', 'ERR!' and what else is none."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def combined(devices: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of all devices: the mean utilisation, the mean power of one, and the temperature of the hottest."""
    column = lambda name: [device[name] for device in devices if name in device]
    devices = list(devices)
    metrics = {}
    for name in ("utilisation", "power_watts"):
        if values := column(name):
            metrics[f"device/{name}"] = round(sum(values) / len(values), 4)
    if values := column("temperature_c"):
        metrics["device/temperature_c"] = max(values)
    return metrics


def tpu_reader() -> Read | None:
    """What reads this machine's TPUs through libtpu's own library; None where that is too old to have it."""
    try:
        from libtpu.sdk import tpumonitoring as monitoring
    except Exception:  # not installed, too old, or it cannot be loaded here: then there is nobody to ask
        return None
    return lambda: combined(parse_duty(monitoring.get_metric("duty_cycle_pct").data()))


def parse_duty(data: Iterable[Any]) -> list[dict[str, float]]:
    """One dict a chip out of the percentages that libtpu gives as texts, one a chip."""
    values = [number_of(str(value)) for value in data]
    return [{"utilisation": value / 100} for value in values if value is not None]
