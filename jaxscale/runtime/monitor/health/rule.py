"""The base class of health rules, and the state that they share."""

import abc
import collections
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from jaxscale.runtime.monitor.config import HealthConfig
from jaxscale.runtime.monitor.health.finding import RuleResult, RunFacts
from jaxscale.runtime.monitor.health.robust import Baseline, Comparison

SMOOTH = 10  # records in a smoothed loss
REJECT_SIGMAS = 5.0  # values further above the baseline are not added to it
REJECT_RATIO = 1.03
NEW_LEVEL = 12  # consecutive rejected records become the new baseline


class View(NamedTuple):
    """A record, and the shared state of the records before it."""

    record: Mapping[str, Any]
    step: int
    cfg: HealthConfig
    facts: RunFacts
    losses: "Losses"
    active: frozenset[str]  # rules with an open finding

    def number(self, name: str) -> float | None:
        """Returns the record's finite number of this name, or None."""
        value = self.record.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def not_finite(self, name: str) -> bool:
        """Returns True if the record lists this name as non-finite."""
        return name in self.record.get("nonfinite", ())


class Losses:
    """Training losses so far: a baseline without spikes, and a smoothed loss."""

    def __init__(self) -> None:
        self.baseline = Baseline()
        self.compared: Comparison | None = None  # the last loss with the baseline before it
        self.rejected: list[float] = []  # in a row
        self.new_level = False  # the last record reset the baseline
        self.recent: collections.deque[float] = collections.deque(maxlen=SMOOTH)
        self.smoothed: float | None = None
        self.records = 0  # that had a loss

    def add(self, loss: float) -> None:
        """Adds the loss of a record."""
        self.records += 1
        self.recent.append(loss)
        self.smoothed = median(self.recent) if len(self.recent) == SMOOTH else None
        self.compared, self.new_level = self.baseline.compare(loss), False
        if self.compared and self.compared.sigmas > REJECT_SIGMAS and self.compared.ratio > REJECT_RATIO:
            self.rejected.append(loss)
            if len(self.rejected) >= NEW_LEVEL:
                self.baseline.reset(self.rejected)
                self.rejected, self.new_level = [], True
            return
        self.rejected = []
        self.baseline.add(loss)


class Rule(abc.ABC):
    """A check of each record: `begin` bad records in a row open a finding, `end` good ones in a row close it.

    Records for which `check` returns None count neither way. Each finding doubles the good records needed to close
    the next, up to 16 times: recurring problems are reported less often.
    """

    kind: str
    begin, end = 2, 5

    def __init__(self) -> None:
        self.active = False
        self.in_row = 0  # bad records while inactive, good ones while active
        self.since = 0  # the step of the first bad record
        self.findings = 0

    @abc.abstractmethod
    def check(self, view: View) -> RuleResult | None:
        """Returns the result for a record, None if the rule cannot decide."""

    def update(self, view: View) -> tuple[RuleResult, bool] | None:
        """Returns (result, is over) if this record opens or closes a finding, else None."""
        result = self.check(view)
        if result is None:
            return None
        if result.bad == self.active:  # no change
            self.in_row = 0
            return None
        if result.bad and self.in_row == 0:
            self.since = view.step
        self.in_row += 1
        needed = self.end * 2 ** min(self.findings - 1, 4) if self.active else self.begin
        if self.in_row < needed and not result.sure:
            return None
        self.active, self.in_row = result.bad, 0
        self.findings += result.bad
        return result, not result.bad


def finite_numbers(view: View, prefix: str) -> dict[str, float]:
    """Returns the record's finite numbers under a prefix, by the remainder of their name."""
    found = {}
    for name in view.record:
        if name.startswith(prefix) and (number := view.number(name)) is not None:
            found[name[len(prefix) :]] = number
    return found
