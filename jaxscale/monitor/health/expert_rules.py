"""Rules about mixtures of experts: routers that use few of them, experts that are never used, biases without bounds."""

import abc
import math
from typing import Any

from jaxscale import units
from jaxscale.monitor.health.evidence import MOST_OF_SCORES
from jaxscale.monitor.health.finding import RunFacts, Sign
from jaxscale.monitor.health.rule import Rule, View

# Without a token, and an expert is dead. One that has a token in every tenth step by chance goes so long without one
# three times in 100,000.
DEAD_STEPS = 100
PATIENCE = 200  # steps in which a router may find its balance, where it has one: healthy ones crowd at first
SCORES = 1.0  # what scores lie within, softmax or sigmoid
USED_PART = 0.25  # of what lies between the fewest effective experts, those of one token, and all
LEAST_ENTROPY = 0.05  # nats of a token's shares: one expert has 99% of them
# How far biases of a layer may lie apart, over the scores of a token. To be level with the others the most wanted
# expert comes down by one such range at most, and the least wanted up by one; half as much again, for tokens differ.
MOST_APART = 3.0


def patience_of(facts: RunFacts) -> float:
    """Steps that balance is given: with a bias those in which it takes any two experts past each other."""
    return max(PATIENCE, SCORES / (2 * facts.bias_rate)) if facts.bias_rate else PATIENCE


class Patient(Rule):
    """A rule whose bad records must also last: so many steps from the first of them."""

    begin, end = 2, 5

    def __init__(self) -> None:
        super().__init__()
        self.first: int | None = None  # the step of the first bad record in a row

    @abc.abstractmethod
    def wrong(self, view: View) -> tuple[Sign, float] | None:
        """(what the record is a sign of, steps that it must last)."""

    def look(self, view: View) -> Sign | None:
        if (judged := self.wrong(view)) is None:
            return None
        sign, patience = judged
        if not sign.bad:
            self.first = None
            return sign
        self.first = view.step if self.first is None else self.first
        if not self.spoken and view.step - self.first < patience:
            return None
        return sign._replace(numbers=sign.numbers | {"since": self.first})


class RouterCollapse(Patient):
    """A router that sends nearly everything to a few experts, or that gives one expert all of a token."""

    kind = "router_collapse"

    def wrong(self, view: View) -> tuple[Sign, float] | None:
        used, entropy = view.number("train/experts_effective"), view.number("train/router_entropy_lowest")
        experts, chosen = view.facts.experts, view.facts.chosen
        if used is None or entropy is None or not experts:
            return None
        least = chosen + USED_PART * (experts - chosen)
        told: dict[str, Any] = {"effective": used, "threshold": least, "entropy": entropy}
        parts = []
        if used < least:
            busiest = view.number("train/experts_busiest")
            beside = f" (the busiest has {busiest:.3g} times the mean)" if busiest is not None else ""
            parts.append(
                f"in some layer tokens are spread as unevenly as over {used:.3g} equal experts of {experts}{beside}: "
                f"fewer than {least:.3g}; {chosen}, those of one token, are the fewest"
            )
        if entropy < LEAST_ENTROPY:
            parts.append(
                f"in some layer the router's shares of a token have an entropy of {entropy:.2g} nats of at most "
                f"{math.log(experts):.3g}: below {LEAST_ENTROPY:g}, one expert has nearly all of it"
            )
        if parts:
            return Sign(True, "; ".join(parts), told), patience_of(view.facts)
        seen = f"tokens are spread as over {used:.3g} equal experts of {experts} at least, entropy {entropy:.3g} nats"
        return Sign(False, seen, told), 0.0


class DeadExperts(Patient):
    """Experts without a token, and that for long."""

    kind = "dead_experts"

    def wrong(self, view: View) -> tuple[Sign, float] | None:
        if (dead := view.number("train/experts_dead")) is None:
            return None
        told = {"dead": dead, "steps": DEAD_STEPS}
        if not dead:
            return Sign(False, f"every expert had a token in the last {DEAD_STEPS} steps", told), 0.0
        had = "has" if dead == 1 else "have"
        seen = f"{units.plural(int(dead), 'expert')} {had} had no token in {DEAD_STEPS} steps: memory without use"
        return Sign(True, f"{seen}; the report shows which", told), patience_of(view.facts) - DEAD_STEPS


class RouterBias(Patient):
    """Biases that lie farther apart than any scores need, or that move by more than scores do."""

    kind = "router_bias"

    def wrong(self, view: View) -> tuple[Sign, float] | None:
        apart, scores = view.number("train/router_bias_to_scores"), view.number("train/router_scores")
        if apart is None or not scores:
            return None
        moved = 2 * view.facts.bias_rate / scores
        told = {"apart": apart, "moved": moved, "scores": scores, "threshold": MOST_APART}
        parts, patience = [], PATIENCE
        if apart > MOST_APART:
            patience = 0
            parts.append(
                f"the biases of some layer lie {apart:.3g} times as far apart as the scores of a token: above "
                f"{MOST_APART:g}, they choose experts whatever the scores say"
            )
        if moved > MOST_OF_SCORES:
            parts.append(
                f"a step moves two experts apart by up to {moved:.0%} of what the scores of a token lie apart "
                f"({scores:.3g}): above {MOST_OF_SCORES:.0%}, loads swing from step to step"
            )
        if parts:
            return Sign(True, "; ".join(parts), told), patience
        seen = f"the biases of every layer lie at most {apart:.3g} times as far apart as the scores of a token"
        return Sign(False, seen, told), 0.0
