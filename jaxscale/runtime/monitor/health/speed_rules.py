"""Rules about time and memory, relative to the history of the run."""

import abc
import collections
from statistics import median
from typing import Any

from jaxscale import units
from jaxscale.runtime.monitor.health import evidence
from jaxscale.runtime.monitor.health.evidence import OTHER_PROGRAMS, RETURN, SLOW_DEVICE, WAIT
from jaxscale.runtime.monitor.health.rule import BlockMeans, Rule, RuleResult, View

STREAK = 5  # consecutive records
BLOCK = 20  # records per throughput median
MIN_RISE_BYTES = 2**30
OTHER_WORK, FULL = 0.2, 0.85  # fractions of CPU time: of other programs, and of all when the CPU is full
PARTS = 10  # number of parts of a window, which are compared for a rise of memory
IN_USE = (("device_bytes_in_use", "device_peak_bytes"), ("host_bytes_in_use", "host_peak_bytes"))  # peak as fallback


def is_cpu_contended(view: View) -> bool:
    """Returns True if the CPU was fully used and other programs used at least the fraction OTHER_WORK of it."""
    run, others = view.number("host_own_share"), view.number("host_other_share")
    return run is not None and others is not None and others >= OTHER_WORK and run + others >= FULL


class TimedRule(Rule):
    """A rule that reports bad records only after `speed_seconds` of training time, since a step may be short."""

    begin, end = STREAK, STREAK
    skip_if_contended = True  # a contended CPU explains a slow run

    step, lasted, size = 0, 0.0, 0

    def __init__(self) -> None:
        self.usual: collections.deque[float] = collections.deque(maxlen=50)  # seconds of healthy steps

    def usual_seconds(self) -> float | None:
        """Returns the median time of healthy steps, or None while there are too few."""
        return median(self.usual) if len(self.usual) >= 10 else None

    def clear_if_batches_grew(self, view: View) -> None:
        """Forgets the times of healthy steps if batches became larger since the last record."""
        before, self.size = self.size, sum(first <= (view.number("batch_index") or 0) for first in view.facts.grows_at)
        if self.size > before:
            self.usual.clear()

    @abc.abstractmethod
    def evaluate(self, view: View, seconds: float) -> RuleResult | None:
        """Returns the result for a record with `seconds` per step, or None if the rule cannot decide."""

    def check(self, view: View) -> RuleResult | None:
        seconds, steps = view.number("step_seconds"), view.step - self.step
        if "loss" in view.record:
            self.step = view.step
        if self.skip_if_contended and view.facts.on_cpu and is_cpu_contended(view):
            return None
        if not seconds or seconds < 0 or steps <= 0 or (result := self.evaluate(view, seconds)) is None:
            return None
        self.lasted = self.lasted + seconds * steps if result.bad else 0.0
        if result.bad and not self.active and self.in_row + 1 >= self.begin and self.lasted < view.cfg.speed_seconds:
            return None
        return result._replace(numbers=result.numbers | {"lasted_seconds": self.lasted}) if result.bad else result


class BusyMachine(TimedRule):
    """Detects that steps take longer while other programs use the CPU, which is not a fault of the run."""

    kind = "busy_machine"
    causes = (("other programs use the CPU of this machine", evidence.other_work),)
    advice = (
        "the run is not at fault: it returns to its usual speed when the other programs end",
        "find the programs with top or htop",
        "reserve CPU cores for the run",
    )
    sources = ("own threshold: a fifth of the CPU, while it is fully used",)
    skip_if_contended = False

    def evaluate(self, view: View, seconds: float) -> RuleResult | None:
        self.clear_if_batches_grew(view)
        usual, others = self.usual_seconds(), view.number("host_other_share")
        if not view.facts.on_cpu or others is None:
            return None
        busy = usual is not None and is_cpu_contended(view) and seconds * (1 - view.cfg.speed_drop) > usual
        if not busy:
            self.usual.append(seconds)
        if usual is None:
            return None
        numbers = {"step_seconds": seconds, "usual": usual, "others": others, "threshold": OTHER_WORK}
        if busy:
            seen = f"other programs used {others:.0%} of the machine's CPU"
            seen += f"; a step took {seconds / usual:.1f} times its usual {units.step_duration(usual)}"
            return RuleResult(True, seen, numbers)
        seen = f"other programs use {others:.0%} of the CPU, and a step takes {units.step_duration(seconds)}"
        return RuleResult(False, seen, numbers)


class Starvation(TimedRule):
    """Detects steps that wait for data."""

    kind = "starvation"
    causes = (
        ("reading or decoding is slower than the step", evidence.data_wait),
        ("the disk, the bucket or its cache is slow", evidence.no_evidence),
        OTHER_PROGRAMS,
    )
    advice = (
        "give the host more cores",
        "prepare token shards with jaxscale prepare",
        "put data.cache_dir on a local disk",
    )
    sources = ("own threshold", "throughput falls if host and device wait for each other: a common rule")

    def evaluate(self, view: View, seconds: float) -> RuleResult | None:
        if (waited := view.number("data_wait_seconds")) is None:
            return None
        part, limit = min(waited / seconds, 1.0), view.cfg.data_wait
        numbers = {"data_wait_seconds": waited, "step_seconds": seconds, "part": part, "threshold": limit}
        if part > limit:
            seen = f"{part:.0%} of a step's {units.step_duration(seconds)} is spent waiting for data, above {limit:.0%}"
            return RuleResult(True, seen, numbers)
        if self.active and part > limit / 2:
            return None
        return RuleResult(False, f"{part:.0%} of a step is spent waiting for data", numbers)


class SlowStep(TimedRule):
    """Detects steps that take much longer than the median of this run."""

    kind = "slow_step"
    causes = (WAIT, RETURN, SLOW_DEVICE, OTHER_PROGRAMS)
    advice = (
        "capture a profile of a few steps",
        "compare the hosts: one slow host delays all",
        "check the device's temperature and clock",
    )
    sources = ("slower than expected: a common rule; own threshold, relative to the run's own median",)

    def evaluate(self, view: View, seconds: float) -> RuleResult | None:
        self.clear_if_batches_grew(view)
        if "starvation" in view.active:  # more specific
            return None
        usual = self.usual_seconds()
        if usual is None or seconds < view.cfg.slow_ratio * usual:
            self.usual.append(seconds)
        if usual is None:
            return None
        numbers = {"step_seconds": seconds, "usual": usual, "threshold": view.cfg.slow_ratio}
        if seconds > view.cfg.slow_ratio * usual:
            seen = f"a step takes {units.step_duration(seconds)}, {seconds / usual:.1f} times this run's median"
            return RuleResult(True, f"{seen} of {units.step_duration(usual)}", numbers)
        if self.active and seconds > (1 + view.cfg.slow_ratio) / 2 * usual:
            return None
        return RuleResult(False, f"a step takes {units.step_duration(seconds)}, as usual", numbers)


class UtilisationDrop(TimedRule):
    """Detects a throughput that falls and stays low while no slow_step or starvation finding is open."""

    kind = "utilisation_drop"
    causes = (
        WAIT,
        ("a different sequence length, or a different stage of the data", evidence.stage),
        RETURN,
        OTHER_PROGRAMS,
        SLOW_DEVICE,
    )
    advice = ("capture a profile and compare it with an earlier one", "compare the hosts", "check the device's clock")
    sources = ("utilisation drops: a common rule; own threshold, relative to the run's own best blocks",)

    in_block, name = 0, ""

    def __init__(self) -> None:
        self.recent: collections.deque[float] = collections.deque(maxlen=BLOCK)
        self.best: list[float] = []  # the three highest medians of whole blocks

    def evaluate(self, view: View, seconds: float) -> RuleResult | None:
        name = "mfu" if view.number("mfu") is not None else "tokens_per_second"
        if (speed := view.number(name)) is None or view.active & {"slow_step", "starvation"}:
            return None
        if name != self.name:
            self.name, self.best, self.in_block = name, [], 0
            self.recent.clear()
        self.recent.append(speed)
        self.in_block += 1
        if len(self.recent) < BLOCK:
            return None
        now = median(self.recent)
        if self.in_block >= BLOCK:
            self.best, self.in_block = sorted([*self.best, now])[-3:], 0
        if len(self.best) < 2 or self.best[-2] <= 0:
            return None
        best = self.best[-2]  # one block may have been fast by chance
        numbers = {"name": name, "now": now, "was": best, "threshold": view.cfg.speed_drop}
        amount = (lambda x: f"{x:.1%}") if name == "mfu" else (lambda x: f"{units.count(x)} tokens/s")
        if now < best * (1 - view.cfg.speed_drop):
            what = "MFU" if name == "mfu" else "the throughput"
            seen = f"{what} is {amount(now)} over the last {BLOCK} records, {1 - now / best:.0%} below {amount(best)}"
            return RuleResult(True, seen, numbers)
        if self.active and now < best * (1 - view.cfg.speed_drop / 2):
            return None
        return RuleResult(False, f"the throughput is back at {amount(now)}", numbers)


class MemoryCreep(Rule):
    """Detects memory use that rises steadily over the last 100 records, or over the last half of a start."""

    kind = "memory_creep"
    begin, end = 1, 1  # counted in windows
    causes = (
        ("references keep arrays or compiled functions alive", evidence.no_evidence),
        ("the data reader does not release memory", evidence.data_wait),
        RETURN,
    )
    advice = (
        "host memory: restart from a checkpoint before it is full, and check whether it rises again",
        "device memory: look for shapes that change between steps, which cause recompilation",
    )
    sources = ("memory should not rise in a steady run: a common rule; own threshold",)
    window, settle = 100, 20  # records of the short window; records skipped after a start

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[float, float]]] = {}
        self.whole: dict[str, BlockMeans] = {}  # since the start: shows a slow leak
        self.left_out = 0

    def check(self, view: View) -> RuleResult | None:
        if "loss" not in view.record:
            return None
        if view.number("step_seconds") is None:  # a new process
            self.seen, self.whole, self.left_out = {}, {}, 0
        self.left_out += 1
        if self.left_out <= self.settle:
            return None
        for names in IN_USE:
            for name in names:
                if (bytes_in_use := view.number(name)) is not None:
                    self.seen.setdefault(name, []).append((view.step, bytes_in_use))
                    self.whole.setdefault(name, BlockMeans()).add(view.step, bytes_in_use)
                    break
        full = [name for name, points in self.seen.items() if len(points) >= self.window]
        if not full:
            return None
        windows = [(name, self.seen[name]) for name in full]
        for name in full:
            late = self.whole[name].done[len(self.whole[name].done) // 2 :]
            windows.append((name, late[len(late) % PARTS :]))
        results = [check_memory(name, points, view) for name, points in windows if len(points) >= 3 * PARTS]
        self.seen = {name: points[self.window // 2 :] if name in full else points for name, points in self.seen.items()}
        return next((result for result in results if result.bad), results[0])


def check_memory(name: str, points: list[tuple[float, float]], view: View) -> RuleResult:
    """Returns the result for the (step, bytes) points of one memory metric."""
    part = len(points) // PARTS
    lows = [min(value for _, value in points[i * part : (i + 1) * part]) for i in range(PARTS)]
    rises = sum(after > before for before, after in zip(lows, lows[1:]))
    rise, (first, _), (last, now) = lows[-1] - lows[0], points[0], points[-1]
    numbers: dict[str, Any] = {"name": name, "rise_bytes": rise, "bytes": now, "first_step": first}
    if rises < PARTS - 2 or rise < max(view.cfg.memory_rise * lows[0], MIN_RISE_BYTES):
        return RuleResult(False, f"{name} is steady at {units.size(now)}", numbers)
    limit, end = None if name.startswith("host") else view.number("device_bytes_limit"), ""
    if limit and limit > now:
        steps = (last - first) * (1 - 1 / PARTS)  # between the first and the last part
        numbers["full_at_step"] = round(last + (limit - now) / rise * steps)
        end = f"; at this rate, the limit of {units.size(limit)} is reached at step {numbers['full_at_step']}"
    seen = f"{name} has risen by {units.size(rise)} from step {first:.0f} to {last:.0f}"
    return RuleResult(True, f"{seen}, in {rises} of {PARTS - 1} intervals{end}", numbers)
