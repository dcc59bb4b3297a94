"""The diagnosis in words: rules over the records of metrics.jsonl. No files, no clocks, no chance: plain numbers in."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.monitor.config import HealthConfig
from jaxscale.monitor.health.course_rules import OutOfForecast, Overfitting
from jaxscale.monitor.health.evidence import Past, batch, suspect
from jaxscale.monitor.health.expert_rules import DeadExperts, RouterBias, RouterCollapse
from jaxscale.monitor.health.finding import Cause, Finding, RunFacts, Sign, facts_of
from jaxscale.monitor.health.gradient_rules import (
    Activations,
    AttentionLogits,
    Explosion,
    SkippedSteps,
    SourceJump,
    ZeroGradient,
)
from jaxscale.monitor.health.loss_rules import Divergence, FlatStart, NonFinite, Oscillation, Plateau, Spike
from jaxscale.monitor.health.rule import Losses, Rule, View
from jaxscale.monitor.health.speed_rules import BusyMachine, MemoryCreep, SlowStep, Starvation, UtilisationDrop
from jaxscale.monitor.health.words import WORDS

__all__ = ["Cause", "Finding", "Health", "RunFacts", "facts_of"]

UNKNOWN = RunFacts()
# in the order in which they are asked: a later one may keep silent about what an earlier one has said
ALL = (
    NonFinite, Spike, Divergence, FlatStart, Plateau, Oscillation, Explosion, ZeroGradient, SkippedSteps, Activations,
    AttentionLogits, BusyMachine, Starvation, SlowStep, UtilisationDrop, MemoryCreep, Overfitting, SourceJump,
    OutOfForecast, RouterCollapse, DeadExperts, RouterBias,
)  # fmt: skip


class Health:
    """The state of the diagnosis of one run: what it says depends on the records so far and nothing else.

    So a run that goes on, and has read its own metrics.jsonl again, is where one is that never stopped.
    """

    def __init__(self, cfg: HealthConfig | None = None, facts: RunFacts = UNKNOWN):
        self.cfg, self.facts = cfg or HealthConfig(), facts
        self.rules: list[Rule] = [rule() for rule in ALL if rule.kind not in self.cfg.off] if self.cfg.on else []
        self.losses, self.past = Losses(), Past()
        self.active: frozenset[str] = frozenset()  # rules that have spoken and are not over

    def observe(self, record: Mapping[str, Any], events: Sequence[Mapping[str, Any]] = ()) -> list[Finding]:
        """What begins or is over with this record.

        Args: record: a line of metrics.jsonl, with null for what is not finite. events: of events.jsonl, since the
        record before; they are evidence alone.
        """
        if not self.rules:
            return []
        self.past.add(record, events)
        loss = record.get("loss")
        if loss is not None:
            self.losses.add(loss)
        findings = []
        view = View(record, record["step"], self.cfg, self.facts, self.losses, self.active)
        for rule in self.rules:
            if changed := rule.change(view):
                self.active = (self.active | {rule.kind}) if rule.spoken else (self.active - {rule.kind})
                view = view._replace(active=self.active)
                findings.append(self.finding(rule, view.step, *changed))
        return findings

    def finding(self, rule: Rule, step: int, sign: Sign, over: bool) -> Finding:
        """The finding that a sign is told as."""
        numbers = {"since": rule.since, **sign.numbers}
        words = WORDS[rule.kind]
        if over:
            return Finding(rule.kind, step, sign.seen, numbers, (), (), words.sources, over=True)
        if any(ask is batch for _, ask in words.causes) and (found := suspect(self.past, rule.since)):
            numbers["batch"] = found.number
        weighed = [(what, ask(self.past, self.facts, rule.since)) for what, ask in words.causes]
        weighed.sort(key=lambda cause: -cause[1].weight)  # stable: the words' own order where the run is silent
        causes = tuple(Cause(what, evidence.text) for what, evidence in weighed)
        return Finding(rule.kind, step, sign.seen, numbers, causes, words.advice, words.sources)
