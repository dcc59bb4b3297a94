"""Where the wall time of a run went: compiling, restoring, waiting for data, saving, looking, steps, lost steps.

A start keeps a TimeLedger, which the watchdog's phases are charged to as they begin and end; what no phase covers is
`other`, so that the kinds sum to the wall time. Its numbers are in each record of metrics.jsonl and in the event that
ends a start; `goodput_of` adds up the starts of a work folder, and what lies between them is `idle`.
"""

import collections
import contextlib
import dataclasses
import datetime
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxscale.monitor.records import tail_records
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

KINDS: tuple[str, ...] = ("step", "compile", "restore", "data", "save", "eval", "statistics", "lost", "idle", "other")
PREFIX = "goodput/"
# The host runs one step ahead of the devices: a wait for data costs nothing if it then still waits for the step before.
# It does where that takes at least this part of both waits; below it is the host's own work of fetching and writing.
HIDDEN_FROM = 0.1


@dataclasses.dataclass
class Frame:
    """A phase that has begun."""

    kind: str
    step: int | None
    seconds: float = 0.0  # of its own, without the phases in it


class TimeLedger:
    """The seconds of one start by kind, which sum to its wall time. Phases of other threads block no step: left out."""

    def __init__(
        self,
        *,
        age_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        """age_seconds: how long this start has been going on already, as with importing jax."""
        self.clock, self.owner = clock, threading.get_ident()
        self.began = self.marked = clock() - age_seconds
        self.began_at = wall_clock() - age_seconds  # seconds since 1970
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self.frames: list[Frame] = []
        self.held: Frame | None = None  # the last wait for data, until it is known whether it was hidden
        self.compiled_step: int | None = None
        self.newest = 0  # the last step that was begun in this start
        self.done_before = 0  # steps up to this one were done before, and are done again
        self.went_back = False
        self.taken_up = False

    def entered(self, name: str, step: int | None = None) -> None:
        """A phase of this thread begins."""
        if threading.get_ident() != self.owner:
            return
        self.charge()
        if name == "data" and step is not None:
            if step <= self.newest:  # the run went back
                self.done_before, self.went_back = max(self.done_before, self.newest), True
            self.newest, self.held = max(self.newest, step), None
        self.frames.append(Frame(self.kind_of(name, step), step))

    def left(self) -> None:
        """The innermost phase of this thread is over."""
        if threading.get_ident() != self.owner:
            return
        self.charge()
        frame = self.frames.pop()
        if frame.kind == "data":
            self.held = frame
        elif self.held is not None and self.hides(frame):
            self.seconds["data"] -= self.held.seconds
            self.seconds[frame.kind] += self.held.seconds
            self.held = None

    def kind_of(self, name: str, step: int | None) -> str:
        """What a phase is charged to. Only the first step of a start compiles, and its numbers are waited for too."""
        if name == "compile":
            self.compiled_step = step if self.compiled_step is None else self.compiled_step
            if step == self.compiled_step and not self.went_back:
                return "compile"
            name = "step"
        return "lost" if name in ("step", "data") and step is not None and step <= self.done_before else name

    def hides(self, frame: Frame) -> bool:
        """True if the wait for data was no loss, for in this frame the host still waits for the step before."""
        if self.held is None or self.held.step is None or frame.kind not in ("step", "lost") or frame.step is None:
            return False
        waited = self.held.seconds
        return frame.step < self.held.step and frame.seconds >= HIDDEN_FROM * (waited + frame.seconds)

    def charge(self) -> None:
        """Charges the time since the last look to the phase that this thread was in."""
        now = self.clock()
        elapsed, self.marked = now - self.marked, now
        if self.frames:
            self.frames[-1].seconds += elapsed
        self.seconds[self.frames[-1].kind if self.frames else "other"] += elapsed

    def totals(self) -> dict[str, float]:
        """Seconds by kind up to now. Their sum is the wall time of this start."""
        self.charge()
        seconds = dict(self.seconds)
        if self.held is not None and self.frames and self.hides(self.frames[-1]):
            seconds["data"] -= self.held.seconds
            seconds[self.frames[-1].kind] += self.held.seconds
        return seconds

    def metrics(self) -> dict[str, float]:
        """{goodput/fraction, goodput/wall_seconds, goodput/KIND_seconds ...} since this start began, for a record."""
        seconds = self.totals()
        wall = sum(seconds.values())
        by_kind = {f"{PREFIX}{kind}_seconds": round(seconds[kind], 3) for kind in KINDS if kind != "idle"}
        fraction = round(seconds["step"] / wall, 4) if wall > 0 else 0.0
        return {f"{PREFIX}fraction": fraction, f"{PREFIX}wall_seconds": round(wall, 3)} | by_kind

    def facts(self) -> dict[str, float]:
        """The same for an event: {wall_seconds, KIND_seconds ...}."""
        return {name.removeprefix(PREFIX): value for name, value in self.metrics().items()}

    def take_up(self, workdir: Any) -> dict[str, Any]:
        """What the event that begins this start says: when its process began, and how far the start before it came.

        To be asked before the records that are run again are dropped: steps up to the last of them count as lost.
        """
        facts: dict[str, Any] = {"process_began": iso_time(self.began_at)}
        if self.taken_up:  # this process goes back to an older step
            return facts
        self.taken_up = True
        tail = []
        with contextlib.suppress(OSError, BadInput):  # the file's own reader tells of it; here only a number is missing
            tail = tail_records(paths.as_path(workdir) / "metrics.jsonl")
        record = next((record for record in reversed(tail) if isinstance(record.get("step"), int)), {})
        self.done_before = max(self.done_before, record.get("step", 0))
        if left := ledger_of(record):
            facts["left"] = left | {"step": record["step"]}
        return facts


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Where the time of a whole run went."""

    seconds: Mapping[str, float]  # by kind, in the order of KINDS
    starts: int
    rewinds: int

    @property
    def wall_seconds(self) -> float:
        """From the beginning of the first start to the end of the last."""
        return sum(self.seconds.values())

    @property
    def fraction(self) -> float | None:
        """The part that steps took which count, None before there is any time."""
        return self.seconds["step"] / self.wall_seconds if self.wall_seconds > 0 else None


@dataclasses.dataclass
class Start:
    """One process of a run, from its events."""

    key: str | None
    began: float  # seconds since 1970
    lowest: int  # its records are of later steps
    is_new: bool  # it began with step 0
    ledger: dict[str, float] = dataclasses.field(default_factory=dict)
    ended: float | None = None
    heard: float = 0.0  # when its newest event was noted
    went_back: float = 0.0  # when it last left steps behind

    def wrote(self, record: Mapping[str, Any]) -> bool:
        """True if the newest record may be of this start: one that left none leaves those of the starts before."""
        return self.is_new or record.get("step", 0) > self.lowest


def goodput_of(
    records: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]], now: float | None = None
) -> Goodput:
    """Where the time went over all starts, from the records of metrics.jsonl and the events of events.jsonl.

    A start that was killed ends with its last record, and what follows is idle. So it is for the last start if `now`
    (seconds since 1970) is given; without, the time ends with its last record. Starts without a ledger, as one that was
    killed before its first record, are `other` up to their last event.
    """
    starts, rewinds = starts_of(events)
    if starts and not starts[-1].ledger:
        last = starts[-1]
        newer = (record for record in records if last.wrote(record))
        last.ledger = ledger_of(next(iter(collections.deque(newer, maxlen=1)), {}))
    seconds, before = dict.fromkeys(KINDS, 0.0), None
    for number, start in enumerate(starts):
        kinds = {kind: start.ledger.get(f"{kind}_seconds", 0.0) for kind in KINDS}
        if not start.ledger:
            following = starts[number + 1].began if number + 1 < len(starts) else math.inf
            ended = start.heard if start.ended is None else start.ended
            kinds["other"] = max(0.0, min(ended, following) - start.began)  # the next one may note before it begins
        elif start.ended is None:  # the records of steps that it went back from are no longer among the others
            kinds["lost"] += max(0.0, start.went_back - start.began - sum(kinds.values()))
        ended = start.began + sum(kinds.values())
        for kind, value in kinds.items():
            seconds[kind] += value
        if before is not None:
            seconds["idle"] += max(0.0, start.began - before)
        before = ended
        if number == len(starts) - 1 and now is not None:
            seconds["idle"] += max(0.0, now - (ended if start.ended is None else max(start.ended, ended)))
    return Goodput(seconds, len(starts), rewinds)


def starts_of(events: Iterable[Mapping[str, Any]]) -> tuple[list[Start], int]:
    """(the starts in order, how often the run went back). Events that are not understood are left out."""
    starts: list[Start] = []
    rewinds, went_back = 0, False
    for event in events:
        kind, when = event.get("event"), unix_time(event.get("time"))
        if kind == "rewind":
            rewinds, went_back = rewinds + 1, True
        if when is None:
            continue
        if kind not in ("started", "resumed", "stopped"):
            if starts:
                starts[-1].heard = max(starts[-1].heard, when)
                starts[-1].went_back = when if kind == "rewind" else starts[-1].went_back
            continue
        if kind == "stopped":
            if starts:
                starts[-1].ended, starts[-1].ledger = when, ledger_of(event.get("goodput") or {})
            went_back = False
            continue
        key, step = event.get("process_began"), event.get("step") or 0
        same = starts and starts[-1].ended is None and (key == starts[-1].key if key else went_back)
        went_back = False
        if same:  # a process that went back opens its run again
            starts[-1].lowest = min(starts[-1].lowest, step)
            continue
        if starts and not starts[-1].ledger and starts[-1].wrote(left := event.get("left") or {}):
            starts[-1].ledger = ledger_of(left)
        began = unix_time(key)
        starts.append(Start(key, when if began is None else began, step, kind == "started"))
    return starts, rewinds


def ledger_of(record: Mapping[str, Any]) -> dict[str, float]:
    """{step_seconds: ..., lost_seconds: ...} out of a record or an event, with or without the prefix; {} without."""
    names = [f"{kind}_seconds" for kind in KINDS]
    prefix = PREFIX if f"{PREFIX}wall_seconds" in record else ""
    if not prefix and "wall_seconds" not in record:
        return {}
    found = {name: record.get(f"{prefix}{name}") for name in [*names, "wall_seconds"]}
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as the events have them."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def unix_time(text: Any) -> float | None:
    """Seconds since 1970 of an ISO 8601 time, None for what is none, or lies in a year that no zone can write."""
    try:
        when = datetime.datetime.fromisoformat(text)
        return when.timestamp() if 1 < when.year < 9999 else None
    except (TypeError, ValueError, OverflowError):  # the last: a year that the clock does not reach
        return None


def own_age_seconds() -> float:
    """How long this process has run, where it is a program of ours; 0.0 in a notebook, and where nobody tells.

    Read from /proc (proc(5)): a program that starts itself again, as for huge pages, keeps its first beginning.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if not (spec and spec.name.partition(".")[0] == "jaxscale") and os.path.basename(sys.argv[0]) != "jaxscale":
        return 0.0
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat, open("/proc/uptime", encoding="utf-8") as uptime:
            ticks = float(stat.read().rpartition(")")[2].split()[19])
            age = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return age if 0 <= age < 1e9 else 0.0  # in some containers the two count from different beginnings
