"""Result of a qualification: the readings of each probe with references and limits, and the verdict."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.config import RunConfig
from jaxscale.kernels.hardware import H100, Chip, Device
from jaxscale.runtime.hosts.agree import WAIT_SECONDS
from jaxscale.runtime.hosts.watchdog import Watchdog
from jaxscale.tools.planning.published_mfu import published_mfu

NO_DATASHEET = "no datasheet for this machine, so results are not compared"
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
Rate = tuple[float, float, float]  # (median, low, high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floors:
    """Limits for a machine to be qualified.

    The floors for products (matmuls), bandwidth and links were chosen, not measured. If a chip is below one of them, a
    fault or a different chip model is more likely than slow code.
    """

    products: float = 0.6  # fraction of the datasheet's FLOP/s
    bandwidth: float = 0.6  # fraction of the datasheet's memory bytes/s
    links: float = 0.4  # fraction of the datasheet's link bytes/s along one axis, at the largest size
    mfu: float | None = None  # fraction of the datasheet's FLOP/s in the training step; None means no floor
    memory_within: float = 0.05  # largest relative difference of the peak memory from the compiler's
    slow: float = 1.25  # largest ratio to the median of all devices; smaller differences are normal


def usual_mfu_floor(chip: Chip | None) -> float | None:
    """Returns the lowest published MFU of H100 for chips of the same architecture, otherwise None."""
    same = chip is not None and chip.architecture == H100.architecture
    return published_mfu(H100)[0].low if same else None


def phase_limits(seconds: float) -> Any:
    """Returns watchdog settings with the same timeout for all phases: the probes and checkpoint saves."""
    phases = ("products", "devices", "links", "kernels", "step", "storage", "save")
    return dataclasses.make_dataclass("Limits", [f"{phase}_seconds" for phase in phases])(*[seconds] * len(phases))


UNWATCHED = Watchdog(None, phase_limits(0.0))


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine to qualify, its floors and the settings of the probes."""

    devices: tuple[Device, ...]  # devices of all processes
    chip: Chip | None  # datasheet; None for CPU and for unknown devices
    floors: Floors
    folder: Any  # folder for the result, the same on all processes
    save_folder: Any  # folder for the checkpoints of the storage probe
    seconds: float  # time limit of all probes together
    user_model: tuple[str, RunConfig] | None = None  # (name, config) to time instead of the built-in models
    phase: Callable[..., Any] = UNWATCHED.phase  # the watchdog's context manager for a named phase

    @property
    def platform(self) -> str:
        """JAX platform, 'cpu', 'gpu' or 'tpu'."""
        return self.devices[0].platform

    @property
    def wait_seconds(self) -> float:
        """Time in seconds to wait for the slowest process in a probe."""
        return max(WAIT_SECONDS, self.seconds)

    @property
    def on_cpu(self) -> bool:
        """True on CPU, where probes are small and no datasheet exists."""
        return self.platform == "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """A measured value with its spread, reference and limits."""

    name: str
    value: float
    unit: str  # FLOP/s, bytes/s, tokens/s, s, bytes, share (of 1), times
    low: float | None = None  # spread; low, high, against, least and most are in `unit`
    high: float | None = None
    against: float | None = None  # reference value
    source: str = ""  # source of the reference value
    least: float | None = None  # lower limit
    most: float | None = None  # upper limit

    @property
    def share(self) -> float | None:
        """The value divided by the reference value, or None without a reference."""
        return self.value / self.against if self.against else None

    @property
    def passed(self) -> bool | None:
        """True if the value is within its limits, False if it is not or is NaN, None without limits."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """Readings of one kind of measurement. problem: the reason that readings are missing or invalid."""

    name: str
    figures: tuple[Reading, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    left_out: bool = False  # True if out of time or not requested
    seconds: float = 0.0
    traceback: str = ""  # traceback of the exception that ended the probe
    elsewhere: tuple[str, ...] = ()  # one line per reading of another process outside its limits

    @property
    def outside(self) -> tuple[str, ...]:
        """One line for each reading of this process outside its limits, such as 'NAME: 412 TFLOP/s, 41.7% of ...'."""
        found = []
        for one in self.figures:
            if one.passed is False:
                share = f", {one.share:.1%} of {amount(one.against, one.unit)}" if one.against else ""
                found.append(f"{one.name}: {amount(one.value, one.unit)}{share}; required: {limits(one)}")
        return tuple(found)

    @property
    def failures(self) -> tuple[str, ...]:
        """All failures of the probe, one line each."""
        return tuple(filter(None, (*self.outside, *self.elsewhere, self.problem)))

    @property
    def state(self) -> str:
        """'passed', 'below' (outside a limit), 'failed' (has a problem), 'measured' (no limits) or 'left out'."""
        if self.left_out:
            return "left out"
        if self.problem:
            return "failed"
        if self.outside or self.elsewhere:
            return "below"
        return "passed" if any(one.passed for one in self.figures) else "measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qualification:
    """The result of all probes, in the format of qualify.json."""

    devices: str
    hosts: tuple[str, ...]  # unique hostnames
    num_processes: int
    chip: str | None
    datasheet: str  # source of the datasheet, or '' without one
    floors: Floors
    probes: tuple[Probe, ...]
    seconds: float
    date: str
    versions: dict[str, str | None]
    unfinished: tuple[str, ...] = ()  # pending probes

    @property
    def failures(self) -> tuple[str, ...]:
        """All failures, one line each, prefixed with the name of the probe."""
        return tuple(f"{probe.name}: {line}" for probe in self.probes for line in probe.failures)

    @property
    def passed(self) -> bool:
        """True if all readings are within their limits and no probe failed."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON data. NaN and infinity become strings, because JSON does not support them."""
        found = dataclasses.asdict(self) | {"passed": self.passed, "failures": self.failures}
        for plain, probe in zip(found["probes"], self.probes):
            plain["state"] = probe.state
            for row, figure in zip(plain["figures"], probe.figures):
                row["share"], row["passed"] = figure.share, figure.passed
                row.update({key: str(x) for key, x in row.items() if isinstance(x, float) and not math.isfinite(x)})
        return found


def limits(figure: Reading) -> str:
    """Returns the limits as text such as 'at least 593 TFLOP/s', or '' if there are none."""
    both = (("at least", figure.least), ("at most", figure.most))
    return " and ".join(f"{words} {amount(limit, figure.unit)}" for words, limit in both if limit is not None)


def amount(value: float, unit: str) -> str:
    """Returns a value with its unit as text, such as '612 TFLOP/s', '4.2 ms', '41.3%' or '1.25 times'."""
    if unit == "share":
        digits = ".1%" if abs(value) >= 0.1 else ".2%" if abs(value) >= 1e-4 or not value else ".2g"
        return f"{value:{digits}}"
    if unit == "times":
        return f"{value:.2f} times"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
    if unit == "tokens/s":
        return f"{value:,.0f} tokens/s"
    scale, prefix = next(((scale, prefix) for scale, prefix in PREFIXES if abs(value) >= scale), (1.0, ""))
    number = f"{value / scale:.4g}" if value / scale < 1000 else f"{value / scale:.0f}"
    return f"{number} {prefix}{unit.replace('bytes', 'B')}"


def reading_of(rate: Rate, name: str, unit: str, datasheet: float | None, floor: float | None, source: str) -> Reading:
    """Returns the Reading of a rate, compared with the datasheet if it lists one. floor: fraction of the datasheet."""
    median, low, high = rate
    found = Reading(name=name, value=median, unit=unit, low=low, high=high)
    if not datasheet:
        return found
    return dataclasses.replace(found, against=datasheet, source=source, least=floor and floor * datasheet)


def first_words(error: BaseException, most: int = 240) -> str:
    """Returns an error's type and first line, such as 'XlaRuntimeError: RESOURCE_EXHAUSTED: ...'."""
    lines: Sequence[str] = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:most]}"
