"""Health rules over the records of metrics.jsonl. Deterministic: no files, clocks or random numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.runtime.monitor.config import HealthConfig
from jaxscale.runtime.monitor.health import expert_rules, gradient_rules, loss_rules, speed_rules
from jaxscale.runtime.monitor.health.evidence import RecentRecords, batch, suspect_batch
from jaxscale.runtime.monitor.health.rule import (
    Cause,
    Finding,
    Losses,
    Rule,
    RuleResult,
    RunFacts,
    View,
    facts_from_config,
)

__all__ = ["Cause", "Finding", "Health", "RunFacts", "facts_from_config"]

# in order of evaluation: a rule may report nothing while an earlier rule is active
ALL = (
    loss_rules.NonFinite, loss_rules.Spike, loss_rules.Divergence, loss_rules.FlatStart, loss_rules.Plateau,
    loss_rules.Oscillation, gradient_rules.Explosion, gradient_rules.ZeroGradient, gradient_rules.SkippedSteps,
    gradient_rules.Activations, gradient_rules.AttentionLogits, speed_rules.BusyMachine, speed_rules.Starvation,
    speed_rules.SlowStep, speed_rules.UtilisationDrop, speed_rules.MemoryCreep, loss_rules.Overfitting,
    gradient_rules.SourceJump, loss_rules.OutOfForecast, expert_rules.RouterCollapse, expert_rules.DeadExperts,
    expert_rules.RouterBias,
)  # fmt: skip


class Health:
    """State of the health rules of a run. It depends only on the records so far, so a resumed run can restore it."""

    def __init__(self, cfg: HealthConfig | None = None, facts: RunFacts | None = None):
        self.cfg, self.facts = cfg or HealthConfig(), facts or RunFacts()
        self.rules: list[Rule] = [rule() for rule in ALL if rule.kind not in self.cfg.off] if self.cfg.on else []
        self.losses, self.recent = Losses(), RecentRecords()
        self.active: frozenset[str] = frozenset()  # rules with an open finding

    def observe(self, record: Mapping[str, Any], events: Sequence[Mapping[str, Any]] = ()) -> list[Finding]:
        """Returns the findings that this record opens or closes. `events` since the last record are evidence."""
        if not self.rules:
            return []
        self.recent.add(record, events)
        if (loss := record.get("loss")) is not None:
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
        if over:
            return Finding(rule.kind, step, result.seen, numbers, (), (), rule.sources, over=True)
        if any(of is batch for _, of in rule.causes) and (found := suspect_batch(self.recent, rule.since)):
            numbers["batch"] = found[0]
        ranked = [(what, evidence_of(self.recent, self.facts, rule.since)) for what, evidence_of in rule.causes]
        ranked.sort(key=lambda cause: -cause[1].weight)  # stable: ties keep the order of the rule's causes
        causes = tuple(Cause(what, evidence.text) for what, evidence in ranked)
        return Finding(rule.kind, step, result.seen, numbers, causes, rule.advice, rule.sources)
