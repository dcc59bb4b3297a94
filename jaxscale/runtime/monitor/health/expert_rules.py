"""Rules about mixtures of experts: router collapse, dead experts, router bias."""

import math
from typing import Any

from jaxscale import units
from jaxscale.runtime.monitor.health import evidence
from jaxscale.runtime.monitor.health.evidence import MAX_BIAS_STEP, RATE, WARMUP
from jaxscale.runtime.monitor.health.rule import Rule, RuleResult, RunFacts, View

# Steps without a token after which an expert counts as dead. An expert that is chosen in one of ten steps has no token
# in 100 steps with probability 3e-5.
DEAD_STEPS = 100
PATIENCE = 200  # steps within which a router must become balanced: healthy routers are unbalanced at first
SCORE_RANGE = 1.0  # range of softmax and sigmoid scores
MIN_USED_FRACTION = 0.25  # threshold between the experts per token (0) and all experts (1)
MIN_ENTROPY = 0.05  # nats, of the router probabilities of a token: one expert has 99%
# Largest range of a layer's biases, in ranges of a token's scores. Balance needs at most one range down for the most
# chosen expert and one range up for the least chosen, plus half of these two since tokens differ.
MAX_BIAS_RANGE = 3.0


def balance_steps(facts: RunFacts) -> float:
    """Returns the number of steps in which a router must become balanced: enough for biases to reorder experts."""
    return max(PATIENCE, SCORE_RANGE / (2 * facts.bias_rate)) if facts.bias_rate else PATIENCE


class RouterCollapse(Rule):
    """Detects a router that uses few experts, or gives one expert nearly all the probability."""

    kind = "router_collapse"
    causes = (
        ("the load of the experts is not balanced", evidence.balance),
        RATE,
        WARMUP,
        ("the bias changes too fast per step, so loads oscillate", evidence.bias_rate),
        ("the router's weights are so large that scores saturate", evidence.no_evidence),
    )
    advice = (
        "see the layers and experts in the report",
        "balance the load: model.experts.bias=true in a new run, or balance_loss=0.01 in train.aux_losses",
        "router_z_loss=0.001 in train.aux_losses keeps the router's logits small",
        "halve optim.peak_lr or lengthen the warmup",
    )
    sources = (
        "without balancing, routers send ever more tokens to a few experts: arXiv:1701.06538, section 4",
        "own threshold: a quarter of the way from the fewest effective experts to all, for longer than balancing takes",
    )

    def check(self, view: View) -> RuleResult | None:
        used, entropy = view.number("train/experts_effective"), view.number("train/router_entropy_lowest")
        experts, chosen = view.facts.experts, view.facts.chosen
        if used is None or entropy is None or not experts:
            return None
        least = chosen + MIN_USED_FRACTION * (experts - chosen)
        numbers: dict[str, Any] = {"effective": used, "threshold": least, "entropy": entropy}
        parts = []
        if used < least:
            busiest = view.number("train/experts_busiest")
            load = f" (the busiest has {busiest:.3g} times the mean)" if busiest is not None else ""
            parts.append(
                f"in some layer the effective number of experts is {used:.3g} of {experts}{load}: below {least:.3g}; "
                f"the minimum is {chosen}, the experts per token"
            )
        if entropy < MIN_ENTROPY:
            parts.append(
                f"in some layer the entropy of the router probabilities is {entropy:.2g} of at most "
                f"{math.log(experts):.3g} nats: below {MIN_ENTROPY:g}, one expert has nearly all the probability"
            )
        if parts:
            return RuleResult(True, "; ".join(parts), numbers, patience=balance_steps(view.facts))
        seen = f"the effective number of experts is at least {used:.3g} of {experts}, the entropy {entropy:.3g} nats"
        return RuleResult(False, seen, numbers)


class DeadExperts(Rule):
    """Detects experts that have received no token for a long time."""

    kind = "dead_experts"
    causes = (
        ("the load of the experts is not balanced", evidence.balance),
        ("the batch is small for this number of experts", evidence.no_evidence),
        ("the router started far from balance, and its bias has not changed enough yet", evidence.bias_rate),
        RATE,
    )
    advice = (
        "see the experts in the report: in a single layer they point to its router, in all layers to the balancing",
        "balance the load: model.experts.bias=true in a new run, or balance_loss=0.01 in train.aux_losses",
        "an expert without tokens learns nothing; use fewer experts",
    )
    sources = ("own threshold: 100 steps without a token, for longer than balancing takes",)

    def check(self, view: View) -> RuleResult | None:
        if (dead := view.number("train/experts_dead")) is None:
            return None
        numbers = {"dead": dead, "steps": DEAD_STEPS}
        if not dead:
            return RuleResult(False, f"every expert received a token in the last {DEAD_STEPS} steps", numbers)
        has = "has" if dead == 1 else "have"
        seen = f"{units.plural(int(dead), 'expert')} {has} received no token in {DEAD_STEPS} steps"
        patience = balance_steps(view.facts) - DEAD_STEPS
        return RuleResult(True, f"{seen}; the report shows which", numbers, patience=patience)


class RouterBias(Rule):
    """Detects router biases whose range or change per step is too large for the scores."""

    kind = "router_bias"
    causes = (
        ("the bias changes too fast", evidence.bias_rate),
        ("some expert is never chosen, whatever its bias", evidence.no_evidence),
        RATE,
    )
    advice = (
        "lower model.experts.bias_rate: 0.001 is usual for sigmoid scores",
        "if the range grows at a usual bias_rate: add balance_loss or row_balance_loss to train.aux_losses, so that "
        "the scores become more similar",
    )
    sources = (
        "a bias rate of 0.001: arXiv:2408.15664; arXiv:2412.19437",
        "own threshold: three times the range of a token's scores, and a tenth of it per step",
    )

    def check(self, view: View) -> RuleResult | None:
        bias_range, scores = view.number("train/router_bias_to_scores"), view.number("train/router_scores")
        if bias_range is None or not scores:
            return None
        moved = 2 * view.facts.bias_rate / scores
        numbers = {"apart": bias_range, "moved": moved, "scores": scores, "threshold": MAX_BIAS_RANGE}
        parts, patience = [], PATIENCE
        if bias_range > MAX_BIAS_RANGE:
            patience = 0
            parts.append(
                f"in some layer the range of the biases is {bias_range:.3g} times that of a token's scores: above "
                f"{MAX_BIAS_RANGE:g}, biases alone determine the experts"
            )
        if moved > MAX_BIAS_STEP:
            parts.append(
                f"a step changes the difference of two biases by up to {moved:.0%} of the range of a token's scores "
                f"({scores:.3g}): above {MAX_BIAS_STEP:.0%}, loads oscillate from step to step"
            )
        if parts:
            return RuleResult(True, "; ".join(parts), numbers, patience=patience)
        seen = f"in every layer the range of the biases is at most {bias_range:.3g} times that of a token's scores"
        return RuleResult(False, seen, numbers)
