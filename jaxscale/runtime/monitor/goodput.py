"""Goodput: the wall time of a run by kind (steps, compilation, restore, data wait, saves, evaluation, lost steps).
Throughput: tokens per second, step time and model FLOPs utilisation (MFU) between two reports.

Each start of a run has a TimeLedger, which adds up the time in each phase of the watchdog. Time outside all phases is
`other`, so that the kinds sum to the wall time. The totals are in each record of metrics.jsonl and in the event that
ends a start. `measure_goodput` adds up the starts of a work folder; the time between starts is `idle`.
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

from jaxscale.runtime.monitor.records import tail_records
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

KINDS: tuple[str, ...] = ("step", "compile", "restore", "data", "save", "eval", "statistics", "lost", "idle", "other")
PREFIX = "goodput/"
# The host runs one step ahead of the devices, so a data wait is hidden if the host then still waits for the previous
# step. The second wait must be at least this fraction of the sum of both; a shorter wait is work of the host.
MIN_HIDDEN_FRACTION = 0.1


@dataclasses.dataclass
class Frame:
    """A phase in progress."""

    kind: str
    step: int | None
    seconds: float = 0.0  # without nested phases


@dataclasses.dataclass(eq=False, kw_only=True)
class TimeLedger:
    """Wall time of one start of a run, split by kind. Phases of other threads are ignored."""

    age_seconds: float = 0.0  # time since this process started, such as importing jax
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time

    def __post_init__(self):
        self.owner = threading.get_ident()
        self.began = self.marked = self.clock() - self.age_seconds
        self.began_at = self.wall_clock() - self.age_seconds  # seconds since 1970
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self.frames: list[Frame] = []
        self.data_wait: Frame | None = None  # the last data wait, until it is known whether it was hidden
        self.compiled_step: int | None = None
        self.newest = 0  # the last step begun by this process
        self.done_before = 0  # steps up to this one are repeated
        self.rewound = False
        self.has_start_facts = False

    def entered(self, name: str, step: int | None = None) -> None:
        """Enters a phase of this thread."""
        if threading.get_ident() != self.owner:
            return
        self.charge()
        if name == "data" and step is not None:
            if step <= self.newest:  # the run was rewound
                self.done_before, self.rewound = max(self.done_before, self.newest), True
            self.newest, self.data_wait = max(self.newest, step), None
        if name == "compile":  # the first step, and waiting for its results
            self.compiled_step = step if self.compiled_step is None else self.compiled_step
            name = "compile" if step == self.compiled_step and not self.rewound else "step"
        is_lost = name in ("step", "data") and step is not None and step <= self.done_before
        self.frames.append(Frame("lost" if is_lost else name, step))

    def left(self) -> None:
        """Leaves the innermost phase of this thread."""
        if threading.get_ident() != self.owner:
            return
        self.charge()
        frame = self.frames.pop()
        if frame.kind == "data":
            self.data_wait = frame
        elif self.charge_hidden_wait(frame, self.seconds):
            self.data_wait = None

    def charge_hidden_wait(self, frame: Frame, seconds: dict[str, float]) -> bool:
        """Charges the last data wait to the kind of `frame` if that phase hid the wait. Returns True in that case."""
        wait = self.data_wait
        if wait is None or wait.step is None or frame.kind not in ("step", "lost") or frame.step is None:
            return False
        hidden = frame.step < wait.step and frame.seconds >= MIN_HIDDEN_FRACTION * (wait.seconds + frame.seconds)
        if hidden:
            seconds["data"] -= wait.seconds
            seconds[frame.kind] += wait.seconds
        return hidden

    def charge(self) -> None:
        """Charges the time since the last call to the current phase."""
        now = self.clock()
        elapsed, self.marked = now - self.marked, now
        if self.frames:
            self.frames[-1].seconds += elapsed
        self.seconds[self.frames[-1].kind if self.frames else "other"] += elapsed

    def totals(self) -> dict[str, float]:
        """Returns the seconds of each kind so far. Their sum is the wall time of this process."""
        self.charge()
        seconds = dict(self.seconds)
        if self.frames:
            self.charge_hidden_wait(self.frames[-1], seconds)
        return seconds

    def metrics(self) -> dict[str, float]:
        """Returns {goodput/fraction, goodput/wall_seconds, goodput/KIND_seconds, ...} of this process."""
        seconds = self.totals()
        wall = sum(seconds.values())
        by_kind = {f"{PREFIX}{kind}_seconds": round(seconds[kind], 3) for kind in KINDS if kind != "idle"}
        fraction = round(seconds["step"] / wall, 4) if wall > 0 else 0.0
        return {f"{PREFIX}fraction": fraction, f"{PREFIX}wall_seconds": round(wall, 3)} | by_kind

    def facts(self) -> dict[str, float]:
        """Returns metrics() without the prefix, for an event."""
        return {name.removeprefix(PREFIX): value for name, value in self.metrics().items()}

    def start_facts(self, workdir: Any) -> dict[str, Any]:
        """Returns {process_began, left: last recorded ledger}. Call it before records of repeated steps are dropped."""
        facts: dict[str, Any] = {"process_began": iso_time(self.began_at)}
        if self.has_start_facts:  # a rewind within this process
            return facts
        self.has_start_facts = True
        tail = []
        with contextlib.suppress(OSError, BadInput):  # the file's reader reports it; here only done_before is unknown
            tail = tail_records(paths.as_path(workdir) / "metrics.jsonl")
        record = next((record for record in reversed(tail) if isinstance(record.get("step"), int)), {})
        self.done_before = max(self.done_before, record.get("step", 0))
        if left := parse_ledger(record):
            facts["left"] = left | {"step": record["step"]}
        return facts


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Wall time of a whole run by kind."""

    seconds: Mapping[str, float]  # by kind, in the order of KINDS
    starts: int
    rewinds: int

    @property
    def wall_seconds(self) -> float:
        """Time from the beginning of the first start to the end of the last."""
        return sum(self.seconds.values())

    @property
    def fraction(self) -> float | None:
        """Fraction of the time in productive steps; None before any time has passed."""
        return self.seconds["step"] / self.wall_seconds if self.wall_seconds > 0 else None


@dataclasses.dataclass
class RecordedStart:
    """One process of a run, reconstructed from its events."""

    key: str | None
    began: float  # seconds since 1970
    lowest: int  # the records of this process have later steps
    is_new: bool  # the start began at step 0
    ledger: dict[str, float] = dataclasses.field(default_factory=dict)
    ended: float | None = None
    last_event: float = 0.0
    last_rewind: float = 0.0

    def may_include(self, record: Mapping[str, Any]) -> bool:
        """Returns True if the newest record may belong to this process rather than to an earlier one."""
        return self.is_new or record.get("step", 0) > self.lowest


def measure_goodput(
    records: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]], now: float | None = None
) -> Goodput:
    """Adds up the time of all starts, from the records of metrics.jsonl and the events of events.jsonl.

    A killed start ends with its last record. The time until the next start is idle, and so is the time from the last
    start until `now` (seconds since 1970), if given. A start that was killed before its first record has no ledger; its
    time until its last event counts as `other`.
    """
    starts, rewinds = parse_starts(events)
    if starts and not starts[-1].ledger:
        last = starts[-1]
        newer = (record for record in records if last.may_include(record))
        last.ledger = parse_ledger(next(iter(collections.deque(newer, maxlen=1)), {}))
    seconds, before = dict.fromkeys(KINDS, 0.0), math.inf
    for start, following in zip(starts, [*(start.began for start in starts[1:]), math.inf]):
        kinds = {kind: start.ledger.get(f"{kind}_seconds", 0.0) for kind in KINDS}
        if not start.ledger:
            ended = start.last_event if start.ended is None else start.ended
            kinds["other"] = max(0.0, min(ended, following) - start.began)  # the next start's events may precede it
        elif start.ended is None:  # records of rewound steps were moved out of metrics.jsonl
            kinds["lost"] += max(0.0, start.last_rewind - start.began - sum(kinds.values()))
        for kind, value in kinds.items():
            seconds[kind] += value
        seconds["idle"] += max(0.0, start.began - before)
        before = start.began + sum(kinds.values())
    if starts and now is not None:
        seconds["idle"] += max(0.0, now - max(before, starts[-1].ended or 0.0))
    return Goodput(seconds, len(starts), rewinds)


def parse_starts(events: Iterable[Mapping[str, Any]]) -> tuple[list[RecordedStart], int]:
    """Returns (starts in order, number of rewinds). Unknown events are skipped."""
    starts: list[RecordedStart] = []
    rewinds, rewound = 0, False
    for event in events:
        kind, when = event.get("event"), unix_time(event.get("time"))
        if kind == "rewind":
            rewinds, rewound = rewinds + 1, True
        if when is None:
            continue
        if kind not in ("started", "resumed", "stopped"):
            if starts:
                starts[-1].last_event = max(starts[-1].last_event, when)
                starts[-1].last_rewind = when if kind == "rewind" else starts[-1].last_rewind
            continue
        if kind == "stopped":
            if starts:
                starts[-1].ended, starts[-1].ledger = when, parse_ledger(event.get("goodput") or {})
            rewound = False
            continue
        key, step = event.get("process_began"), event.get("step") or 0
        same = starts and starts[-1].ended is None and (key == starts[-1].key if key else rewound)
        rewound = False
        if same:  # after a rewind a process opens its run again
            starts[-1].lowest = min(starts[-1].lowest, step)
            continue
        if starts and not starts[-1].ledger and starts[-1].may_include(left := event.get("left") or {}):
            starts[-1].ledger = parse_ledger(left)
        began = unix_time(key)
        starts.append(RecordedStart(key, when if began is None else began, step, kind == "started"))
    return starts, rewinds


def parse_ledger(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns {step_seconds, ...} from a metrics record (names begin with PREFIX) or an event; {} if missing."""
    prefix = PREFIX if f"{PREFIX}wall_seconds" in record else ""
    if f"{prefix}wall_seconds" not in record:
        return {}
    found = {f"{kind}_seconds": record.get(f"{prefix}{kind}_seconds") for kind in (*KINDS, "wall")}
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}


def iso_time(seconds: float) -> str:
    """Formats seconds since 1970 as in events.jsonl."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def unix_time(text: Any) -> float | None:
    """Parses an ISO 8601 time as seconds since 1970; returns None if it is invalid or its year is out of range."""
    try:
        when = datetime.datetime.fromisoformat(text)
        return when.timestamp() if 1 < when.year < 9999 else None
    except (TypeError, ValueError, OverflowError):
        return None


def process_age_seconds() -> float:
    """Returns the age of this process, including the time before a re-exec (proc(5)); 0.0 in a notebook."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if not (spec and spec.name.partition(".")[0] == "jaxscale") and os.path.basename(sys.argv[0]) != "jaxscale":
        return 0.0
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat, open("/proc/uptime", encoding="utf-8") as uptime:
            ticks = float(stat.read().rpartition(")")[2].split()[19])
            age = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return age if 0 <= age < 1e9 else 0.0  # in some containers the two clocks have different origins


@dataclasses.dataclass(eq=False)
class Throughput:
    """Counts tokens, steps and data-wait seconds since the last report, without the first step, which compiles."""

    flops_per_token: float | None  # forward and backward, without recomputation (arXiv:2204.02311, appendix B)
    peak_flops: float | None  # FLOPs per second of one chip
    num_chips: int = 1  # on all hosts
    clock: Callable[[], float] = time.monotonic
    is_excluded: Callable[[], bool] = lambda: False  # True if the finished step does not count, such as in a profile
    flops_by_row_tokens: Mapping[int, float] = dataclasses.field(default_factory=dict)  # per token, by sequence length

    def __post_init__(self):
        self.compiled = False  # a step has finished
        self.start()

    def start(self) -> None:
        """Begins a new interval."""
        self.began, self.tokens, self.steps, self.data_wait_seconds = self.clock(), 0, 0, 0.0
        self.excluded_seconds, self.flops = 0.0, 0.0
        self.step_began, self.excluded_in_step = self.began, 0.0

    def add(
        self, tokens: int, data_wait_seconds: float = 0.0, *, excluded: bool = False, row_tokens: int | None = None
    ) -> None:
        """Counts a step of `tokens` (global batch), in sequences of `row_tokens` tokens, unless it is excluded."""
        if not self.compiled:
            self.compiled = True
            self.start()
            return
        if excluded or self.is_excluded():
            self.excluded_seconds += self.clock() - self.step_began - self.excluded_in_step
            self.step_began, self.excluded_in_step = self.clock(), 0.0
            return
        self.step_began, self.excluded_in_step = self.clock(), 0.0
        self.tokens, self.steps = self.tokens + tokens, self.steps + 1
        flops_per_token = self.flops_per_token or 0.0
        if row_tokens is not None:
            flops_per_token = self.flops_by_row_tokens.get(row_tokens, flops_per_token)
        self.flops += tokens * flops_per_token
        self.data_wait_seconds += data_wait_seconds

    def exclude(self, seconds: float) -> None:
        """Removes seconds from the interval, such as those of an evaluation."""
        self.excluded_seconds += seconds
        self.excluded_in_step += seconds

    def report(self) -> dict[str, float | None]:
        """Returns the metrics of the interval (None if unknown), and begins a new interval."""
        seconds = self.clock() - self.began - self.excluded_seconds
        counted = self.steps > 0 and seconds > 0
        report = {
            "tokens_per_second": self.tokens / seconds if counted else None,
            "step_seconds": seconds / self.steps if counted else None,
            "data_wait_seconds": self.data_wait_seconds / self.steps if counted else None,
            "mfu": None,
        }
        if counted and self.flops_per_token and self.peak_flops:
            report["mfu"] = self.flops / seconds / (self.peak_flops * self.num_chips)
        self.start()
        return report
