"""What `jaxscale bench step --save` and `jaxscale qualify` measured here, kept in the user's cache folder."""

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
class Kept:
    """What the compiler said of a step, as preflight keeps it."""

    peak_bytes: int
    mfu_ceiling: float
    date: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step that was timed here."""

    spec: str  # the model: a spec of `jaxscale bench`, or a config's name
    device_kind: str
    platform: str
    num_devices: int
    memory_bytes: int  # of one device
    dtype: str
    pass_flops: float  # operations of one microbatch, by the model's own formula
    step_seconds: float
    flops_per_second: float  # over all devices
    date: str
    versions: dict[str, str | None]
    by: str = "jaxscale bench step --save"
    save_bytes_per_second: float | None = None  # of all hosts together, to the folder that was tried

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), field.type
            if kind is str and not isinstance(value, str):
                raise TypeError(f"{field.name}={value!r} is no text")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            if kind in (int, float) and not is_number:
                raise TypeError(f"{field.name}={value!r} is no number above 0")


def measured_file() -> pathlib.Path:
    """Where measurements are kept."""
    return cache_dir() / "measured.json"


def read_measured() -> list[Measured]:
    """All that were kept; [] if there are none. Raises BadInput for a file that is damaged, with the way out."""
    file = measured_file()
    try:
        content = read_json(file)
        return [Measured(**one) for one in content["measured"]] if content["format"] == FORMAT else []
    except FileNotFoundError:
        return []
    except (TypeError, KeyError) as error:
        raise BadInput(f"{file} is no file of measurements ({error}); delete it and measure again") from None


def keep_measured(found: Measured) -> pathlib.Path:
    """Writes a measurement beside the others; one of the same model, device and type is replaced. Returns the file."""
    same = lambda one: (one.spec, one.device_kind, one.num_devices, one.dtype)
    others = [one for one in read_measured() if same(one) != same(found)]
    file = measured_file()
    make_private(file.parent)
    write_json(file, {"format": FORMAT, "measured": [dataclasses.asdict(one) for one in [*others, found]]})
    return file


def newest_machine(kept: Sequence[Measured]) -> list[Measured]:
    """The measurements of the device kind and number that was measured last."""
    if not kept:
        return []
    last = max(kept, key=lambda one: one.date)
    return [one for one in kept if (one.device_kind, one.num_devices) == (last.device_kind, last.num_devices)]


def of_chip(kept: Sequence[Measured], device_kind: str) -> list[Measured]:
    """What `jaxscale qualify` measured on chips of this kind, however many they were."""
    return [one for one in kept if one.by == QUALIFY and one.device_kind == device_kind]


def rate_for(kept: Sequence[Measured], dtype: str, pass_flops: float) -> tuple[float, list[Measured]]:
    """(FLOP/s over all devices that a pass of this size can expect, the measurements that say so).

    Between two sizes the rate is interpolated on logarithmic axes; beyond the ends it is that of the end. Those of the
    same type count, or all where there are none.
    """
    of_type = [one for one in kept if one.dtype == dtype] or list(kept)
    ordered = sorted(of_type, key=lambda one: one.pass_flops)
    below = [one for one in ordered if one.pass_flops <= pass_flops]
    above = [one for one in ordered if one.pass_flops > pass_flops]
    if not below or not above:
        nearest = below[-1] if below else above[0]
        return nearest.flops_per_second, [nearest]
    low, high = below[-1], above[0]
    share = math.log(pass_flops / low.pass_flops) / math.log(high.pass_flops / low.pass_flops)
    rate = low.flops_per_second ** (1 - share) * high.flops_per_second**share
    return rate, [low, high]


def from_record(record: dict[str, Any], *, platform: str, num_devices: int, memory_bytes: int) -> Measured:
    """What is kept of the record that `jaxscale bench step` prints."""
    flops = record["gflops"] * 1e9
    step_flops = flops * record["step_s"]
    parts = record["num_microbatches"]
    return Measured(
        spec=record["spec"],
        device_kind=record["devices"].partition(" x ")[2],
        platform=platform,
        num_devices=num_devices,
        memory_bytes=memory_bytes,
        dtype=record["dtype"],
        pass_flops=step_flops / parts,
        step_seconds=record["step_s"],
        flops_per_second=flops,
        date=record["date"],
        versions=record["versions"],
    )
