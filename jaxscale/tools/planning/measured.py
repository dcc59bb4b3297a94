"""Measurements of `jaxscale bench step --save` and `jaxscale qualify`, stored in the user's cache folder."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxscale.system.exits import BadInput
from jaxscale.system.paths import cache_dir, make_private, read_json, write_json

FORMAT = 2
QUALIFY = "jaxscale qualify"


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The compiler's memory and MFU results for a step, as saved by preflight."""

    peak_bytes: int
    mfu_ceiling: float
    date: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """Timing of a step on this machine."""

    spec: str  # the model: a spec for `jaxscale bench`, or the name of a config
    device_kind: str
    platform: str
    num_devices: int
    memory_bytes: int  # per device
    dtype: str
    pass_flops: float  # FLOPs of one microbatch by the model's formula
    step_seconds: float
    flops_per_second: float  # all devices together
    date: str
    versions: dict[str, str | None]
    by: str = "jaxscale bench step --save"
    save_bytes_per_second: float | None = None  # bandwidth of all hosts together, to the tested folder

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, is_text = getattr(self, field.name), field.type is str
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            if is_text and not isinstance(value, str) or field.type in (int, float) and not is_number:
                raise TypeError(f"{field.name}={value!r} is not {'text' if is_text else 'a number above 0'}")


def measured_file() -> pathlib.Path:
    """Returns the path of the measurements file."""
    return cache_dir() / "measured.json"


def read_measured() -> list[Measured]:
    """Returns all measurements, or [] if no file exists. Raises BadInput if the file is damaged."""
    file = measured_file()
    try:
        content = read_json(file)
        return [Measured(**one) for one in content["measured"]] if content["format"] == FORMAT else []
    except FileNotFoundError:
        return []
    except (TypeError, KeyError) as error:
        raise BadInput(f"{file} is not a valid measurements file ({error}); delete it and measure again") from None


def save_measured(measured: Measured) -> pathlib.Path:
    """Saves a measurement, replacing one of the same model, devices and dtype. Returns the file."""
    key = lambda one: (one.spec, one.device_kind, one.num_devices, one.dtype)
    others = [one for one in read_measured() if key(one) != key(measured)]
    file = measured_file()
    make_private(file.parent)
    write_json(file, {"format": FORMAT, "measured": [dataclasses.asdict(one) for one in [*others, measured]]})
    return file


def newest_machine(measurements: Sequence[Measured]) -> list[Measured]:
    """Returns the measurements with the device kind and number of devices of the newest measurement."""
    if not measurements:
        return []
    last = max(measurements, key=lambda one: one.date)
    return [one for one in measurements if (one.device_kind, one.num_devices) == (last.device_kind, last.num_devices)]


def measured_on_chip(measurements: Sequence[Measured], device_kind: str) -> list[Measured]:
    """Returns the measurements of `jaxscale qualify` on this kind of chip, for any number of chips."""
    return [one for one in measurements if one.by == QUALIFY and one.device_kind == device_kind]


def interpolate_rate(measurements: Sequence[Measured], dtype: str, pass_flops: float) -> tuple[float, list[Measured]]:
    """Returns (FLOP/s interpolated at pass_flops, measurements used). Prefers measurements in this dtype."""
    same_dtype = [one for one in measurements if one.dtype == dtype] or list(measurements)
    ordered = sorted(same_dtype, key=lambda one: one.pass_flops)
    below = [one for one in ordered if one.pass_flops <= pass_flops]
    above = [one for one in ordered if one.pass_flops > pass_flops]
    if not below or not above:
        nearest = below[-1] if below else above[0]
        return nearest.flops_per_second, [nearest]
    low, high = below[-1], above[0]
    weight = math.log(pass_flops / low.pass_flops) / math.log(high.pass_flops / low.pass_flops)
    rate = low.flops_per_second ** (1 - weight) * high.flops_per_second**weight
    return rate, [low, high]


def from_record(record: dict[str, Any], *, platform: str, num_devices: int, memory_bytes: int) -> Measured:
    """Returns the measurement in a record printed by `jaxscale bench step`."""
    flops = record["gflops"] * 1e9
    return Measured(
        spec=record["spec"],
        device_kind=record["devices"].partition(" x ")[2],
        platform=platform,
        num_devices=num_devices,
        memory_bytes=memory_bytes,
        dtype=record["dtype"],
        pass_flops=flops * record["step_s"] / record["num_microbatches"],
        step_seconds=record["step_s"],
        flops_per_second=flops,
        date=record["date"],
        versions=record["versions"],
    )
