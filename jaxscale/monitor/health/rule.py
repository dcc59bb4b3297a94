"""What a rule is: it looks at one record, and an episode decides when to speak."""

import abc
import collections
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from jaxscale.monitor.config import HealthConfig
from jaxscale.monitor.health.finding import RunFacts, Sign
from jaxscale.monitor.health.robust import Baseline, Judged

SMOOTH = 10  # records in a smoothed loss
REFUSED_SIGMAS = 5.0  # above its baseline, and a value does not enter it
REFUSED_RATIO = 1.03
NEW_LEVEL = 12  # records in a row that are refused, and theirs is the new level


class View(NamedTuple):
    """A record, and what the rules share about those before it."""

    record: Mapping[str, Any]
    step: int
    cfg: HealthConfig
    facts: RunFacts
    losses: "Losses"
    active: frozenset[str]  # rules that have spoken and are not over

    def number(self, name: str) -> float | None:
        """The record's finite number of that name, or None."""
        value = self.record.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def not_finite(self, name: str) -> bool:
        """True if the record says that this number was not finite."""
        return name in self.record.get("nonfinite", ())


class Losses:
    """The training losses so far: one baseline that spikes never enter, and a smoothed loss."""

    def __init__(self) -> None:
        self.baseline = Baseline()
        self.judged: Judged | None = None  # the last record's, beside those before it
        self.refused: list[float] = []  # in a row
        self.new_level = False  # the last record made its own level the usual one
        self.recent: collections.deque[float] = collections.deque(maxlen=SMOOTH)
        self.smoothed: float | None = None
        self.records = 0  # that had a loss

    def add(self, loss: float) -> None:
        """Takes in the loss of a record."""
        self.records += 1
        self.recent.append(loss)
        self.smoothed = median(self.recent) if len(self.recent) == SMOOTH else None
        self.judged, self.new_level = self.baseline.judge(loss), False
        if self.judged and self.judged.sigmas > REFUSED_SIGMAS and self.judged.ratio > REFUSED_RATIO:
            self.refused.append(loss)
            if len(self.refused) >= NEW_LEVEL:
                self.baseline.restart(self.refused)
                self.refused, self.new_level = [], True
            return
        self.refused = []
        self.baseline.add(loss)


class Rule(abc.ABC):
    """Looks at records. `begin` bad ones in a row and it speaks; `end` good ones in a row and it is over.

    Records that it cannot judge, of which `look` returns None, count neither way. Each time it has spoken, twice as
    many good ones are needed, up to 16 times: what comes and goes is told less and less often.
    """

    kind: str
    begin, end = 2, 5

    def __init__(self) -> None:
        self.spoken = False
        self.in_row = 0  # bad records before it has spoken, good ones after
        self.since = 0  # the step of the first bad one
        self.episodes = 0

    @abc.abstractmethod
    def look(self, view: View) -> Sign | None:
        """What the record is a sign of."""

    def change(self, view: View) -> tuple[Sign, bool] | None:
        """(the sign, whether it is over) if this record begins or ends an episode, else None."""
        sign = self.look(view)
        if sign is None:
            return None
        if sign.bad == self.spoken:  # nothing new
            self.in_row = 0
            return None
        if sign.bad and self.in_row == 0:
            self.since = view.step
        self.in_row += 1
        needed = self.end * 2 ** min(self.episodes - 1, 4) if self.spoken else self.begin
        if self.in_row < needed and not sign.sure:
            return None
        self.spoken, self.in_row = sign.bad, 0
        self.episodes += sign.bad
        return sign, not sign.bad


def named(view: View, prefix: str) -> dict[str, float]:
    """{rest of the name: number} of the record's finite numbers under a prefix."""
    found = {}
    for name in view.record:
        if name.startswith(prefix) and (number := view.number(name)) is not None:
            found[name[len(prefix) :]] = number
    return found
