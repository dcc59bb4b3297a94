"""The result of a qualification: figures and what they are compared with, by probe, and the verdict."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.config import RunConfig
from jaxscale.hardware import H100, Chip, Device
from jaxscale.hosts.agree import WAIT_SECONDS
from jaxscale.hosts.watchdog import Watchdog
from jaxscale.planning.published_mfu import published_mfu

NO_DATASHEET = "no datasheet for this machine: its figures are compared with nothing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floors:
    """Limits that a machine must meet to be qualified.

    But for MFU, memory and slow devices they were chosen, not measured: so far below its datasheet a chip is ill, or
    is not the one that was ordered, rather than badly programmed.
    """

    products: float = 0.6  # of the datasheet's FLOP/s
    bandwidth: float = 0.6  # of the datasheet's bytes/s of memory
    links: float = 0.4  # of the datasheet's bytes/s of the links along one axis, at the largest size
    mfu: float | None = None  # of the datasheet's FLOP/s, by the training step; None: no floor
    memory_within: float = 0.05  # of the compiler's own figure, either way: what preflight says would not hold here
    slow: float = 1.25  # times the median of all devices: below that, chips of one kind differ without being ill


def usual_mfu_floor(chip: Chip | None) -> float | None:
    """The least published MFU of H100, for chips of its architecture; None for others.

    Elsewhere none is published for models as small as the one that is timed, or none at all.
    """
    same = chip is not None and chip.architecture == H100.architecture
    return published_mfu(H100)[0].low if same else None


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds of each probe after which it counts as a hang: phases of the watchdog."""

    products_seconds: float
    devices_seconds: float
    links_seconds: float
    kernels_seconds: float
    step_seconds: float
    storage_seconds: float
    save_seconds: float  # of the thread that saves

    @classmethod
    def all(cls, seconds: float) -> "Limits":
        """The same for each."""
        return cls(*[seconds] * len(dataclasses.fields(cls)))


UNWATCHED = Watchdog(None, Limits.all(0.0))


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine, and how it is qualified."""

    devices: tuple[Device, ...]  # of all processes
    chip: Chip | None  # the datasheet; None for a device that the table does not have, and for a CPU
    floors: Floors
    folder: Any  # where the result is written, on all processes
    save_folder: Any  # where saves are tried
    seconds: float  # for all probes together
    own_model: tuple[str, RunConfig] | None = None  # whose step is timed, in place of the 1B class
    phase: Callable[..., Any] = UNWATCHED.phase  # the watchdog's, for the thread that saves

    @property
    def platform(self) -> str:
        """'cpu', 'gpu' or 'tpu'."""
        return self.devices[0].platform

    @property
    def wait_seconds(self) -> float:
        """For the slowest process in a probe."""
        return max(WAIT_SECONDS, self.seconds)

    @property
    def on_cpu(self) -> bool:
        """True where work is small, for nothing is held against a datasheet."""
        return self.platform == "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A number that was measured."""

    name: str
    value: float
    unit: str  # FLOP/s, bytes/s, tokens/s, s, bytes, share (of 1), times
    low: float | None = None  # the spread of what was timed, in the same unit, as the next four
    high: float | None = None
    against: float | None = None  # what it is compared with
    source: str = ""  # of that
    least: float | None = None  # the floor
    most: float | None = None

    @property
    def share(self) -> float | None:
        """The value as a share of what it is compared with; None without that."""
        return self.value / self.against if self.against else None

    @property
    def passed(self) -> bool | None:
        """True if the value is within its limits, False also for NaN; None without limits."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """The figures of one kind of measurement. `problem`: why there are none, or not all, in words."""

    name: str
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    left_out: bool = False  # for lack of time, or because it was not asked for
    seconds: float = 0.0
    traceback: str = ""  # of what ended it
    elsewhere: tuple[str, ...] = ()  # what is outside its limits in other processes, a line each

    @property
    def outside(self) -> tuple[str, ...]:
        """The figures of this process that are outside their limits, a line each."""
        return tuple(f"{one.name}: {limit_words(one)}" for one in self.figures if one.passed is False)

    @property
    def failures(self) -> tuple[str, ...]:
        """All reasons for which the machine is not qualified, a line each."""
        return tuple(filter(None, (*self.outside, *self.elsewhere, self.problem)))

    @property
    def state(self) -> str:
        """'passed', 'below' (a floor), 'failed' (it could not measure), 'left out', or 'measured': without a floor."""
        if self.left_out:
            return "left out"
        if self.problem:
            return "failed"
        if self.outside or self.elsewhere:
            return "below"
        return "passed" if any(one.passed for one in self.figures) else "measured"


ProbeFunction = Callable[[Machine], Probe]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qualification:
    """All that was found, as qualify.json has it."""

    devices: str
    hosts: tuple[str, ...]  # by name, each once
    num_processes: int
    chip: str | None
    datasheet: str  # its source, or that there is none
    floors: Floors
    probes: tuple[Probe, ...]
    seconds: float
    date: str
    versions: dict[str, str | None]
    unfinished: tuple[str, ...] = ()  # probes that are still to come

    @property
    def failures(self) -> tuple[str, ...]:
        """All reasons for which the machine is not qualified, a line each, after the name of its probe."""
        return tuple(f"{probe.name}: {line}" for probe in self.probes for line in probe.failures)

    @property
    def passed(self) -> bool:
        """True if nothing that was looked at is below a floor, and nothing failed."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. A number that is not finite becomes text: JSON has no NaN."""
        found = dataclasses.asdict(self) | {"passed": self.passed, "failures": self.failures}
        for plain, probe in zip(found["probes"], self.probes):
            plain["state"] = probe.state
            for row, figure in zip(plain["figures"], probe.figures):
                row["share"], row["passed"] = figure.share, figure.passed
                row.update({key: str(x) for key, x in row.items() if isinstance(x, float) and not math.isfinite(x)})
        return found


def limit_words(figure: Figure) -> str:
    """'412 TFLOP/s, 41.6% of 989 TFLOP/s, and at least 593 TFLOP/s are wanted'."""
    text = amount(figure.value, figure.unit)
    if figure.against and figure.share is not None:
        text += f", {figure.share:.1%} of {amount(figure.against, figure.unit)}"
    return f"{text}; wanted {wanted}" if (wanted := limits(figure)) else text


def limits(figure: Figure) -> str:
    """'at least 593 TFLOP/s'; '' without a limit."""
    lower = [f"at least {amount(figure.least, figure.unit)}"] if figure.least is not None else []
    upper = [f"at most {amount(figure.most, figure.unit)}"] if figure.most is not None else []
    return " and ".join(lower + upper)


PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(value: float, unit: str) -> str:
    """'612 TFLOP/s', '3.1 GB/s', '4.2 ms', '41.3%', '1.25 times', '0.0031'."""
    if unit == "share":
        return (
            f"{value:.1%}"
            if abs(value) >= 0.1
            else f"{value:.2%}"
            if abs(value) >= 1e-4 or not value
            else f"{value:.2g}"
        )
    if unit == "times":
        return f"{value:.2f} times"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
    if unit == "tokens/s":
        return f"{value:,.0f} tokens/s"
    scale, prefix = next(((scale, prefix) for scale, prefix in PREFIXES if abs(value) >= scale), (1.0, ""))
    number = f"{value / scale:.4g}" if value / scale < 1000 else f"{value / scale:.0f}"
    return f"{number} {prefix}{unit.replace('bytes', 'B')}"


Rate = tuple[float, float, float]  # the median, and the spread


def held(rate: Rate, name: str, unit: str, datasheet: float | None, floor: float | None, source: str) -> Figure:
    """A Figure of a rate, compared with the datasheet if there is one; `floor` is a share of that."""
    median, low, high = rate
    found = Figure(name=name, value=median, unit=unit, low=low, high=high)
    if not datasheet:
        return found
    return dataclasses.replace(found, against=datasheet, source=source, least=floor and floor * datasheet)


def first_words(error: BaseException, most: int = 240) -> str:
    """'XlaRuntimeError: RESOURCE_EXHAUSTED: ...', the first line of an error."""
    lines: Sequence[str] = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:most]}"
