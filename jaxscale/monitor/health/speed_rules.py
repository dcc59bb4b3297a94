"""Rules about time and memory: the run's own past is what they are measured against."""

import abc
import collections
from statistics import median
from typing import Any

from jaxscale import units
from jaxscale.monitor.health.finding import Sign
from jaxscale.monitor.health.robust import Blocks
from jaxscale.monitor.health.rule import Rule, View

STREAK = 5  # records in a row
BLOCK = 20  # records of one throughput
LEAST_BYTES = 2**30
OTHER_WORK, FULL = 0.2, 0.85  # parts of the processors: what others take, and when there is nothing left over
PARTS = 10  # of a window in which memory rises
IN_USE = (("device_bytes_in_use", "device_peak_bytes"), ("host_bytes_in_use", "host_peak_bytes"))  # else the peak


def crowded(view: View) -> bool:
    """True if the processors were full, and other programs had a good part of them."""
    own, others = view.number("host_own_share"), view.number("host_other_share")
    return own is not None and others is not None and others >= OTHER_WORK and own + others >= FULL


class Timed(Rule):
    """A rule whose bad records must also last: `speed_seconds` of the run's own time, since a step may be short."""

    begin, end = STREAK, STREAK
    of_the_run = True  # it says that the run is slow, which a busy machine's processors cannot be a sign of

    def __init__(self) -> None:
        super().__init__()
        self.step, self.lasted, self.size = 0, 0.0, 0

    def grown(self, view: View) -> bool:
        """Whether batches have become larger since the last record: what was usual is so no more."""
        before, self.size = self.size, sum(first <= (view.number("batch_index") or 0) for first in view.facts.grows_at)
        return self.size > before

    @abc.abstractmethod
    def wrong(self, view: View, seconds: float) -> Sign | None:
        """What the record, whose steps took so many seconds each, is a sign of."""

    def look(self, view: View) -> Sign | None:
        seconds, steps = view.number("step_seconds"), view.step - self.step
        if "loss" in view.record:
            self.step = view.step
        if self.of_the_run and view.facts.on_cpu and crowded(view):
            return None
        if not seconds or seconds < 0 or steps <= 0 or (sign := self.wrong(view, seconds)) is None:
            return None
        self.lasted = self.lasted + seconds * steps if sign.bad else 0.0
        if sign.bad and not self.spoken and self.in_row + 1 >= self.begin and self.lasted < view.cfg.speed_seconds:
            return None
        return sign._replace(numbers=sign.numbers | {"lasted_seconds": self.lasted}) if sign.bad else sign


class BusyMachine(Timed):
    """Other programs that take a good part of the processors, while steps take longer: no fault of the run."""

    kind = "busy_machine"
    of_the_run = False

    def __init__(self) -> None:
        super().__init__()
        self.usual: collections.deque[float] = collections.deque(maxlen=50)

    def wrong(self, view: View, seconds: float) -> Sign | None:
        if self.grown(view):
            self.usual.clear()
        usual, others = median(self.usual) if len(self.usual) >= 10 else None, view.number("host_other_share")
        if not view.facts.on_cpu or others is None:
            return None
        busy = usual is not None and crowded(view) and seconds * (1 - view.cfg.speed_drop) > usual
        if not busy:  # which may have been on a machine that others used somewhat
            self.usual.append(seconds)
        if usual is None:
            return None
        told = {"step_seconds": seconds, "usual": usual, "others": others, "threshold": OTHER_WORK}
        if busy:
            seen = f"the machine was busy with other work, which took {others:.0%} of its processors"
            return Sign(True, f"{seen}; a step took {seconds / usual:.1f} times its usual {of_seconds(usual)}", told)
        return Sign(False, f"other work takes {others:.0%} of the processors, and a step {of_seconds(seconds)}", told)


def of_seconds(seconds: float) -> str:
    """'2.1s', '35ms'."""
    return units.duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g}ms"


class Starvation(Timed):
    """Steps that wait for data."""

    kind = "starvation"

    def wrong(self, view: View, seconds: float) -> Sign | None:
        if (waited := view.number("data_wait_seconds")) is None:
            return None
        part = min(waited / seconds, 1.0)
        told = {"data_wait_seconds": waited, "step_seconds": seconds, "part": part, "threshold": view.cfg.data_wait}
        if part > view.cfg.data_wait:
            seen = (
                f"{part:.0%} of a step's {of_seconds(seconds)} is spent waiting for data, above "
                f"{view.cfg.data_wait:.0%}"
            )
            return Sign(True, seen, told)
        if self.spoken and part > view.cfg.data_wait / 2:
            return None
        return Sign(False, f"{part:.0%} of a step is spent waiting for data", told)


class SlowStep(Timed):
    """Steps that take much longer than this run's median."""

    kind = "slow_step"

    def __init__(self) -> None:
        super().__init__()
        self.usual: collections.deque[float] = collections.deque(maxlen=50)

    def wrong(self, view: View, seconds: float) -> Sign | None:
        if self.grown(view):
            self.usual.clear()
        if "starvation" in view.active:  # which says why
            return None
        usual = median(self.usual) if len(self.usual) >= 10 else None
        if usual is None or seconds < view.cfg.slow_ratio * usual:
            self.usual.append(seconds)
        if usual is None:
            return None
        told = {"step_seconds": seconds, "usual": usual, "threshold": view.cfg.slow_ratio}
        if seconds > view.cfg.slow_ratio * usual:
            seen = f"a step takes {of_seconds(seconds)}, {seconds / usual:.1f} times this run's median"
            return Sign(True, f"{seen} of {of_seconds(usual)}", told)
        if self.spoken and seconds > (1 + view.cfg.slow_ratio) / 2 * usual:
            return None
        return Sign(False, f"a step takes {of_seconds(seconds)}, as usual", told)


class UtilisationDrop(Timed):
    """A throughput that falls and stays, while no slow step or wait for data says so already."""

    kind = "utilisation_drop"

    def __init__(self) -> None:
        super().__init__()
        self.recent: collections.deque[float] = collections.deque(maxlen=BLOCK)
        self.best: list[float] = []  # the three highest medians of whole blocks
        self.in_block, self.name = 0, ""

    def wrong(self, view: View, seconds: float) -> Sign | None:
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
        told = {"name": name, "now": now, "was": best, "threshold": view.cfg.speed_drop}
        amount = (lambda x: f"{x:.1%}") if name == "mfu" else (lambda x: f"{units.count(x)} tokens/s")
        if now < best * (1 - view.cfg.speed_drop):
            what = "MFU" if name == "mfu" else "the throughput"
            seen = f"{what} is {amount(now)} over the last {BLOCK} records and was {amount(best)}"
            return Sign(True, f"{seen}: {1 - now / best:.0%} less", told)
        if self.spoken and now < best * (1 - view.cfg.speed_drop / 2):
            return None
        return Sign(False, f"the throughput is back at {amount(now)}", told)


class MemoryCreep(Rule):
    """Memory in use that rises in nearly every tenth of the last 100 records, or of the last half since a start."""

    kind = "memory_creep"
    begin, end = 1, 1  # of windows
    window, settle = 100, 20  # records: of the short window, and after a start that are left out

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[tuple[float, float]]] = {}
        self.whole: dict[str, Blocks] = {}  # a slow leak shows over a long time alone
        self.left_out = 0

    def look(self, view: View) -> Sign | None:
        if "loss" not in view.record:
            return None
        if view.number("step_seconds") is None:  # a start: another process, whose memory is its own
            self.seen, self.whole, self.left_out = {}, {}, 0
        self.left_out += 1
        if self.left_out <= self.settle:
            return None
        for names in IN_USE:
            for name in names:
                if (bytes_in_use := view.number(name)) is not None:
                    self.seen.setdefault(name, []).append((view.step, bytes_in_use))
                    self.whole.setdefault(name, Blocks()).add(view.step, bytes_in_use)
                    break
        full = [name for name, points in self.seen.items() if len(points) >= self.window]
        if not full:
            return None
        windows = [(name, self.seen[name]) for name in full]
        for name in full:
            late = self.whole[name].done[len(self.whole[name].done) // 2 :]
            windows.append((name, late[len(late) % PARTS :]))
        signs = [judge_memory(name, points, view) for name, points in windows if len(points) >= 3 * PARTS]
        self.seen = {name: points[self.window // 2 :] if name in full else points for name, points in self.seen.items()}
        return next((sign for sign in signs if sign.bad), signs[0])


def judge_memory(name: str, points: list[tuple[float, float]], view: View) -> Sign:
    """What (step, bytes) of one kind of memory are a sign of."""
    part = len(points) // PARTS
    lows = [min(value for _, value in points[i * part : (i + 1) * part]) for i in range(PARTS)]
    rises = sum(after > before for before, after in zip(lows, lows[1:]))
    rise, (first, _), (last, now) = lows[-1] - lows[0], points[0], points[-1]
    told: dict[str, Any] = {"name": name, "rise_bytes": rise, "bytes": now, "first_step": first}
    if rises < PARTS - 2 or rise < max(view.cfg.memory_rise * lows[0], LEAST_BYTES):
        return Sign(False, f"{name} is steady at {units.size(now)}", told)
    limit, end = None if name.startswith("host") else view.number("device_bytes_limit"), ""
    if limit and limit > now:
        steps = (last - first) * (1 - 1 / PARTS)  # between the parts that the rise lies between
        told["full_at_step"] = round(last + (limit - now) / rise * steps)
        end = f"; at this rate {units.size(limit)} are full at step {told['full_at_step']}"
    seen = f"{name} has risen by {units.size(rise)} from step {first:.0f} to {last:.0f}"
    return Sign(True, f"{seen}, in {rises} of {PARTS - 1} parts{end}", told)
