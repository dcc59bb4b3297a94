"""Mixtures that were made sick on purpose are told, each by its rule, and healthy ones are not: of recorded runs."""

import math

import pytest
import recorded_mixtures
from recorded_mixtures import HEALTHY, MIXTURES, SICK
from recorded_runs import replay

from jaxscale.runtime.monitor.config import HealthConfig
from jaxscale.runtime.monitor.health import Health, RunFacts, facts_from_config
from jaxscale.runtime.monitor.health.expert_rules import DeadExperts, RouterBias, RouterCollapse, balance_steps

KINDS = {rule.kind for rule in (RouterCollapse, DeadExperts, RouterBias)}
TOLD = {  # what must be told of a sick run, and after how many steps at the latest
    "one expert is never chosen": {"dead_experts": 210, "router_bias": 10},
    "two experts have all tokens": {"router_collapse": 210, "dead_experts": 210, "router_bias": 10},
    "a router of nothing but large weights": {"router_collapse": 210},
    "a bias that moves by 1": {"router_bias": 10},
    "a bias that moves by a twentieth": {"router_bias": 210},
}
NOT_TOLD = {"one expert is never chosen": "router_collapse", "a bias that moves by a twentieth": "dead_experts"}


@pytest.fixture(scope="module")
def recorded():
    return recorded_mixtures.recorded()


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("every", [1, 2])
def test_a_healthy_mixture_raises_no_alarm_about_its_experts(recorded, name, every):
    records, facts = recorded[name]
    assert records[-1]["step"] == MIXTURES[name].steps and facts.experts and facts.balanced_by
    found = replay([record for record in records if record["step"] % (5 * every) == 0], facts=facts)
    assert KINDS.isdisjoint(finding.kind for finding in found)


@pytest.mark.parametrize("name", SICK)
def test_a_sick_mixture_is_told_by_its_rule_with_numbers_causes_and_advice(recorded, name):
    records, facts = recorded[name]
    found = {finding.kind: finding for finding in replay(records, facts=facts)[::-1] if not finding.over}
    for kind, latest in TOLD[name].items():
        assert found[kind].step <= latest and found[kind].advice and found[kind].causes[0].evidence
    assert NOT_TOLD.get(name) not in found
    if "a bias" in name:
        assert found["router_bias"].causes[0].what == "the bias changes too fast"
    if "dead_experts" in TOLD[name]:
        assert found["dead_experts"].causes[0].what == "the load of the experts is not balanced"
        assert found["dead_experts"].numbers["dead"] == (1 if "one" in name else 6)
    silent = replay(records, cfg=HealthConfig(off=tuple(KINDS)), facts=facts)
    assert KINDS.isdisjoint(finding.kind for finding in silent)


def test_the_thresholds_lie_between_the_healthy_and_the_sick(recorded):
    """What docs/health.md says of how far."""
    after = lambda name, column: [
        record[f"train/{column}"] for record in recorded[name][0] if record["step"] > balance_steps(recorded[name][1])
    ]
    used = [min(after(name, "experts_effective")) / recorded[name][1].experts for name in HEALTHY]
    assert min(used) > 0.7
    assert max(after("two experts have all tokens", "experts_effective")) < 2.01
    apart = [max(after(name, "router_bias_to_scores")) for name in HEALTHY if name.startswith("bias")]
    assert 1 < max(apart) < 1.75
    assert all(record["train/experts_dead"] == 0 for name in HEALTHY for record in recorded[name][0]
               if "train/experts_dead" in record)  # fmt: skip


def record(step, **numbers):
    whole = {"experts_effective": 7.5, "router_entropy_lowest": 1.4, "experts_busiest": 1.4, "experts_dead": 0}
    return {"step": step, "loss": 3.0} | {f"train/{name}": value for name, value in (whole | numbers).items()}


def begun_and_over(records, facts):
    found = replay(records, facts=facts)
    return [(finding.kind, finding.step, finding.over) for finding in found if finding.kind in KINDS]


def test_a_collapse_is_told_once_it_has_lasted_and_once_more_when_it_is_over():
    facts = RunFacts(experts=8, chosen=2)
    crowded = lambda step: record(step, experts_effective=2.5 if 100 <= step < 400 else 7.0)
    assert begun_and_over(map(crowded, range(10, 600, 10)), facts) == [
        ("router_collapse", 310, False), ("router_collapse", 440, True),
    ]  # fmt: skip
    short = lambda step: record(step, experts_effective=2.5 if 100 <= step < 290 else 7.0)
    assert begun_and_over(map(short, range(10, 600, 10)), facts) == []
    assert begun_and_over(map(crowded, range(10, 600, 10)), RunFacts()) == []  # how many there are is not known


def test_a_slow_bias_is_given_the_steps_in_which_it_reaches_everywhere():
    assert balance_steps(RunFacts(bias_rate=1e-3)) == 500 and balance_steps(RunFacts(bias_rate=1.0)) == 200
    records = [record(step, experts_effective=2.5, experts_dead=3) for step in range(10, 800, 10)]
    told = begun_and_over(records, RunFacts(experts=8, chosen=2, bias_rate=1e-3, balanced_by=("bias",)))
    assert told == [("dead_experts", 420, False), ("router_collapse", 520, False)]


def test_a_router_that_is_sure_of_every_token_is_a_collapse_however_evenly_they_are_spread():
    records = [record(step, router_entropy_lowest=0.01) for step in range(10, 300, 10)]
    (found,) = [f for f in replay(records, facts=RunFacts(experts=8, chosen=2)) if f.kind == "router_collapse"]
    assert "probabilities is 0.01 of at most 2.08 nats" in found.seen and "effective number" not in found.seen


def test_steps_before_dead_experts_can_be_known_count_neither_way():
    """As after a start: the count begins anew."""
    unknown = [{name: value for name, value in record(step).items() if name != "train/experts_dead"}
               for step in range(510, 610, 10)]  # fmt: skip
    records = [*(record(step, experts_dead=2) for step in range(10, 510, 10)), *unknown,
               *(record(step, experts_dead=2) for step in range(610, 800, 10))]  # fmt: skip
    assert begun_and_over(records, RunFacts(experts=8, chosen=2)) == [("dead_experts", 120, False)]


def test_facts_of_a_config_tell_what_balances_experts():
    experts = {"number": 16, "chosen": 4, "bias": True, "bias_rate": 0.01}
    settings = {"model": {"experts": experts}, "train": {"aux_losses": {"z_loss": 1e-4, "row_balance_loss": 1e-3}}}
    facts = facts_from_config({"config": settings})
    assert (facts.experts, facts.chosen, facts.bias_rate) == (16, 4, 0.01)
    assert facts.balanced_by == ("bias", "row_balance_loss")
    assert facts_from_config({"config": settings | {"lora": {"rank": 8}}}).balanced_by == ("row_balance_loss",)
    assert facts_from_config({"config": {"model": {"experts": None}}}) == RunFacts()
    assert math.isclose(balance_steps(facts), 200) and Health(facts=facts).observe(record(1)) == []
