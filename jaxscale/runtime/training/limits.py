"""Time limits of a run (budget, deadline): forecasts an overrun from its speed, and starts a decay that ends in time.

Process 0 measures and decides. With several processes, it posts the decision on the shared board a few steps ahead, so
that all processes act after the same step.
"""

import dataclasses
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

from jaxscale import units
from jaxscale.runtime.hosts.agree import Board, next_key
from jaxscale.runtime.monitor.events import Note, ignore
from jaxscale.runtime.monitor.goodput import iso_time
from jaxscale.runtime.training.decisions import EarlyDecay
from jaxscale.runtime.training.stopping import STEPS_AHEAD
from jaxscale.system.exits import Exit, Stop

MIN_FORECAST_STEPS = 10  # steps of this process before the first forecast
# Time reserved by an early decay: twice the startup time, because the run is reopened, and validates and saves at its
# end, plus a fraction of the decay for variations of speed. Chosen without a source.
RESERVED_STARTUPS, RESERVED_FRACTION = 2.0, 0.05
MIN_DECAY_STEPS = 2  # one step at the peak learning rate, one step at the end


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeLimit:
    """The earliest time limit of a run, computed at each start by runtime/run/limiting.py."""

    ends_at: float  # seconds since 1970
    name: str  # 'limit.deadline=12h'
    total_steps: int
    start_step: int = 0
    warmup_steps: int = 0
    decay_steps: Callable[[int], int] | None = None  # total steps -> steps of the decay; None: no early decay
    decay_start: int | None = None  # first step of the planned decay; None: no decay is planned
    advice: str = ""  # alternatives that end the run in time
    note: Note = ignore
    say: Callable[[str], None] = print
    board: Board | None = None
    primary: bool = True
    clock: Callable[[], float] = time.time  # seconds since 1970

    def line(self, decay: EarlyDecay) -> str:
        """Returns the log line for an early decay, including whether the decay is shortened."""
        assert self.decay_steps is not None, "no decay begins early without it"
        steps, whole = decay.until - decay.step, self.decay_steps(decay.until)
        short = "" if steps >= whole else f"; there is not enough time for the full decay of {whole} steps"
        saved = f"; step {decay.step}, at the peak learning rate, is saved"
        return (
            f"limit: the decay starts after step {decay.step}, over {steps} steps to step {decay.until}{short}{saved}"
        )


class EndForecast(NamedTuple):
    """Forecast of the end of a run."""

    step_seconds: float
    ends_at: float  # seconds since 1970


class LimitMonitor:
    """Monitors the time limit from one start of a run to its end. Uses no device."""

    def __init__(self, limit: TimeLimit):
        self.limit = limit
        self.done_at = array("d")  # times at which steps of this process were done
        self.reported = self.reported_passed = False
        self.began = limit.clock()
        self.key = next_key("decay") if limit.board else ""  # new at each start, because the board outlives a start
        self.posted = False

    def decay_after(self, step: int) -> EarlyDecay | None:
        """Returns the decay that begins after `step` steps, or None. The result is the same in every process.

        Every process must call it after each step.
        """
        limit = self.limit
        decision = self.decide(step) if limit.primary and not self.posted else None
        if limit.board is None:
            return decision
        if decision is not None:
            self.posted = True
            limit.board.post(self.key, f"{decision.step} {decision.until}")
        if (line := limit.board.read(self.key)) is None:
            return None
        begin, until = map(int, line.split())
        if step > begin:
            raise Stop(
                Exit.PEER_LOST,
                f"all processes must begin the decay after step {begin}, but this process is at step {step}; restart "
                "all processes",
            )
        return EarlyDecay(begin, until) if step == begin else None

    def decide(self, step: int) -> EarlyDecay | None:
        """Returns an early decay if it must begin now for the run to end in time. Reports an expected overrun once."""
        limit, now = self.limit, self.limit.clock()
        self.done_at.append(now)
        forecast = self.forecast(step)
        if forecast is None or step >= limit.total_steps:
            return None
        if forecast.ends_at > limit.ends_at:
            self.report_overrun(step, now, forecast)
            return self.latest_decay(step, now, forecast.step_seconds)
        return None

    @property
    def may_decay(self) -> bool:
        """True if a decay can still begin early."""
        limit, step = self.limit, self.limit.start_step + len(self.done_at)
        return limit.decay_steps is not None and (limit.decay_start is None or step < limit.decay_start)

    def forecast(self, step: int) -> EndForecast | None:
        """Forecasts the end of the run from the time of the last half of this process's steps, including saves.

        Excludes the first step, which compiles. Returns None for fewer than MIN_FORECAST_STEPS steps.
        """
        number = len(self.done_at) - 1
        if number < MIN_FORECAST_STEPS:
            return None
        middle = 1 + (number - 1) // 2
        step_seconds = (self.done_at[-1] - self.done_at[middle - 1]) / (number - middle + 1)
        return EndForecast(step_seconds, self.done_at[-1] + (self.limit.total_steps - step) * step_seconds)

    def report_overrun(self, step: int, now: float, forecast: EndForecast) -> None:
        """Reports once if the run is expected to exceed the limit, and again when it has."""
        limit, passed = self.limit, now > self.limit.ends_at
        if (self.reported_passed if passed else self.reported) or (passed and self.reported_passed):
            return
        self.reported, self.reported_passed = True, passed
        over_seconds = forecast.ends_at - limit.ends_at
        facts = {"limit": limit.name, "ends": iso_time(forecast.ends_at), "over_seconds": over_seconds}
        limit.note("overrun", step, **facts, passed=passed, decays=self.may_decay)
        then = "; the decay will start early, to end in time" if self.may_decay else f"; it continues: {limit.advice}"
        has = f"{limit.name} has passed; " if passed else ""
        limit.say(
            f"limit: {has}at {forecast.step_seconds:.3g} s per step this run ends {iso_time(forecast.ends_at)[:16]} "
            f"UTC, {units.duration(over_seconds)} after {limit.name}{then}"
        )

    def latest_decay(self, step: int, now: float, step_seconds: float) -> EarlyDecay | None:
        """Returns an early decay if another step at the peak learning rate would end the run too late."""
        limit = self.limit
        begin = step + (STEPS_AHEAD if limit.board else 0)
        if limit.decay_steps is None or not self.may_decay or begin < limit.warmup_steps or begin >= limit.total_steps:
            return None
        startup_seconds = self.done_at[0] - self.began
        seconds = limit.ends_at - now - RESERVED_STARTUPS * startup_seconds
        steps = int(seconds / (step_seconds * (1 + RESERVED_FRACTION)))
        last = min(limit.total_steps, step + steps) if seconds > 0 else 0
        if begin < last - limit.decay_steps(last) or last >= limit.total_steps:
            return None
        return EarlyDecay(begin, min(limit.total_steps, max(begin + MIN_DECAY_STEPS, last)))
