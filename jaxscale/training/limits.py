"""Limits of a run, its budget and its deadline: whether it will overrun by its own speed, and a decay that is in time.

The first process measures and decides. Where there are several, what it decides is told on the board, a few steps
ahead, so that all do it after the same step.
"""

import dataclasses
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

from jaxscale import units
from jaxscale.hosts.agree import Board, next_key
from jaxscale.monitor.events import Note, ignore
from jaxscale.monitor.goodput import iso_time
from jaxscale.system.exits import Exit, Stop
from jaxscale.training.decisions import EarlyDecay
from jaxscale.training.stopping import STEPS_AHEAD

ENOUGH = 10  # steps of this start before its speed is believed
# What an early decay keeps back: twice what opening and compiling took, since the run is opened once more and its end
# validates and saves; and a part of the decay, for a speed that is not quite what it was. Both are our own choice.
OPENINGS, SPARE = 2.0, 0.05
LEAST = 2  # steps of a decay: one at the peak, one at the end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a run in time, resolved for this start by run/assembly.py."""

    ends_at: float  # seconds since 1970
    name: str  # 'limit.deadline=12h'
    total_steps: int
    start_step: int = 0
    warmup_steps: int = 0
    decay_steps: Callable[[int], int] | None = (
        None  # steps of the decay of a run of so many; None: none may begin early
    )
    decay_start: int | None = None  # the step that the planned decay begins with; None: there is none
    way_out: str = ""  # what else would end it in time
    note: Note = ignore
    say: Callable[[str], None] = print
    board: Board | None = None
    primary: bool = True
    clock: Callable[[], float] = time.time  # seconds since 1970

    def line(self, decay: EarlyDecay) -> str:
        """What is said as the decay begins, and whether there is time for all of it."""
        assert self.decay_steps is not None, "no decay begins early without it"
        steps, whole = decay.until - decay.step, self.decay_steps(decay.until)
        short = "" if steps >= whole else f"; there is no time for the {whole} of a whole decay"
        kept = f"; step {decay.step}, at the peak, is saved"
        return f"limit: the decay begins after step {decay.step}, over {steps} steps to step {decay.until}{short}{kept}"


class Forecast(NamedTuple):
    """When a run will end, by its own speed."""

    step_seconds: float
    ends_at: float  # seconds since 1970


class Limiter:
    """Watches the limits of one opening of a run. None of it touches a device."""

    def __init__(self, of: Limits):
        self.of = of
        self.done_at = array("d")  # when each step of this opening was done
        self.told = self.told_passed = False
        self.began = of.clock()
        self.key = next_key("decay") if of.board else ""  # of this opening: the board outlives it
        self.posted = False

    def after(self, step: int) -> EarlyDecay | None:
        """The decay that begins after `step` steps, or None: the same in every process, each asking after each step."""
        of = self.of
        decision = self.decide(step) if of.primary and not self.posted else None
        if of.board is None:
            return decision
        if decision is not None:
            self.posted = True
            of.board.post(self.key, f"{decision.step} {decision.until}")
        if (line := of.board.read(self.key)) is None:
            return None
        begin, until = map(int, line.split())
        if step > begin:
            raise Stop(Exit.PEER_LOST, f"all were to decay after step {begin}, and this one is at {step}; start again")
        return EarlyDecay(begin, until) if step == begin else None

    def decide(self, step: int) -> EarlyDecay | None:
        """The decay that must begin now to end in time, if it may; tells of an overrun that is to come, once."""
        of, now = self.of, self.of.clock()
        self.done_at.append(now)
        forecast = self.forecast(step)
        if forecast is None or step >= of.total_steps:
            return None
        if forecast.ends_at > of.ends_at:
            self.tell(step, now, forecast)
            return self.last_moment(step, now, forecast.step_seconds)
        return None

    @property
    def may_decay(self) -> bool:
        """Whether a decay can still begin early."""
        of, step = self.of, self.of.start_step + len(self.done_at)
        return of.decay_steps is not None and (of.decay_start is None or step < of.decay_start)

    def forecast(self, step: int) -> Forecast | None:
        """When the run will end by the speed of the last half of this opening, pauses for saves included.

        None before there were enough steps; the first is left out, since it compiles.
        """
        number = len(self.done_at) - 1
        if number < ENOUGH:
            return None
        middle = 1 + (number - 1) // 2
        pace = (self.done_at[-1] - self.done_at[middle - 1]) / (number - middle + 1)
        return Forecast(pace, self.done_at[-1] + (self.of.total_steps - step) * pace)

    def tell(self, step: int, now: float, forecast: Forecast) -> None:
        """Says once that the run will overrun, and once that it has."""
        of, passed = self.of, now > self.of.ends_at
        if (self.told_passed if passed else self.told) or (passed and self.told_passed):
            return
        self.told, self.told_passed = True, passed
        over = units.duration(forecast.ends_at - of.ends_at)
        facts = {"limit": of.name, "ends": iso_time(forecast.ends_at), "over_seconds": forecast.ends_at - of.ends_at}
        of.note("overrun", step, **facts, passed=passed, decays=self.may_decay)
        then = "; its decay will begin early, to end in time" if self.may_decay else f"; it goes on: {of.way_out}"
        has = f"{of.name} has passed, and " if passed else ""
        of.say(
            f"limit: {has}at {forecast.step_seconds:.3g} s a step this run ends {iso_time(forecast.ends_at)[:16]} UTC, "
            f"{over} after {of.name}{then}"
        )

    def last_moment(self, step: int, now: float, pace: float) -> EarlyDecay | None:
        """The decay, if with one step more at the peak it would not end in time any more."""
        of = self.of
        begin = step + (STEPS_AHEAD if of.board else 0)
        if of.decay_steps is None or not self.may_decay or begin < of.warmup_steps or begin >= of.total_steps:
            return None
        opening = self.done_at[0] - self.began
        left = of.ends_at - now - OPENINGS * opening
        reach = min(of.total_steps, step + int(left / (pace * (1 + SPARE))) if left > 0 else 0)
        if begin < reach - of.decay_steps(reach) or reach >= of.total_steps:
            return None
        return EarlyDecay(begin, min(of.total_steps, max(begin + LEAST, reach)))
