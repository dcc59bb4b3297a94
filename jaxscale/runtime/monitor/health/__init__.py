"""Health rules over the records of metrics.jsonl. Deterministic: no files, clocks or random numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.runtime.monitor.config import HealthConfig
from jaxscale.runtime.monitor.health.course_rules import OutOfForecast, Overfitting
from jaxscale.runtime.monitor.health.evidence import History, batch, suspect_batch
from jaxscale.runtime.monitor.health.expert_rules import DeadExperts, RouterBias, RouterCollapse
from jaxscale.runtime.monitor.health.explanations import EXPLANATIONS
from jaxscale.runtime.monitor.health.finding import Cause, Finding, RuleResult, RunFacts, facts_from_config
from jaxscale.runtime.monitor.health.gradient_rules import (
    Activations,
    AttentionLogits,
    Explosion,
    SkippedSteps,
    SourceJump,
    ZeroGradient,
)
from jaxscale.runtime.monitor.health.loss_rules import Divergence, FlatStart, NonFinite, Oscillation, Plateau, Spike
from jaxscale.runtime.monitor.health.rule import Losses, Rule, View
from jaxscale.runtime.monitor.health.speed_rules import BusyMachine, MemoryCreep, SlowStep, Starvation, UtilisationDrop

__all__ = ["Cause", "Finding", "Health", "RunFacts", "facts_from_config"]

# in order of evaluation: a rule may stay silent while an earlier one is active
ALL = (
    NonFinite, Spike, Divergence, FlatStart, Plateau, Oscillation, Explosion, ZeroGradient, SkippedSteps, Activations,
    AttentionLogits, BusyMachine, Starvation, SlowStep, UtilisationDrop, MemoryCreep, Overfitting, SourceJump,
    OutOfForecast, RouterCollapse, DeadExperts, RouterBias,
)  # fmt: skip


UNKNOWN = RunFacts()


class Health:
    """State of the health rules of one run; a function of the records so far.

    A resumed run that replays its metrics.jsonl reaches the same state as one that never stopped.
    """

    def __init__(self, cfg: HealthConfig | None = None, facts: RunFacts = UNKNOWN):
        self.cfg, self.facts = cfg or HealthConfig(), facts
        self.rules: list[Rule] = [rule() for rule in ALL if rule.kind not in self.cfg.off] if self.cfg.on else []
        self.losses, self.history = Losses(), History()
        self.active: frozenset[str] = frozenset()  # rules with an open finding

    def observe(self, record: Mapping[str, Any], events: Sequence[Mapping[str, Any]] = ()) -> list[Finding]:
        """Returns the findings that begin or end with this record.

        Args: record: a line of metrics.jsonl, null for non-finite values. events: of events.jsonl since the previous
        record; used as evidence only.
        """
        if not self.rules:
            return []
        self.history.add(record, events)
        loss = record.get("loss")
        if loss is not None:
            self.losses.add(loss)
        findings = []
        view = View(record, record["step"], self.cfg, self.facts, self.losses, self.active)
        for rule in self.rules:
            if changed := rule.update(view):
                self.active = (self.active | {rule.kind}) if rule.active else (self.active - {rule.kind})
                view = view._replace(active=self.active)
                findings.append(self.finding(rule, view.step, *changed))
        return findings

    def finding(self, rule: Rule, step: int, result: RuleResult, over: bool) -> Finding:
        """Returns the finding of a result, with its causes ordered by evidence."""
        numbers = {"since": rule.since, **result.numbers}
        explanation = EXPLANATIONS[rule.kind]
        if over:
            return Finding(rule.kind, step, result.seen, numbers, (), (), explanation.sources, over=True)
        blames_batch = any(evidence_of is batch for _, evidence_of in explanation.causes)
        if blames_batch and (found := suspect_batch(self.history, rule.since)):
            numbers["batch"] = found.number
        ranked = [(what, evidence_of(self.history, self.facts, rule.since)) for what, evidence_of in explanation.causes]
        ranked.sort(key=lambda cause: -cause[1].weight)  # stable: ties keep the order of EXPLANATIONS
        causes = tuple(Cause(what, evidence.text) for what, evidence in ranked)
        return Finding(rule.kind, step, result.seen, numbers, causes, explanation.advice, explanation.sources)
