"""Rules about mixtures of experts: router collapse, dead experts, router bias."""

import math
from typing import Any

from jaxscale import units
from jaxscale.runtime.monitor.health import evidence
from jaxscale.runtime.monitor.health.evidence import MAX_BIAS_STEP, RATE, WARMUP
from jaxscale.runtime.monitor.health.rule import Rule, RuleResult, RunFacts, View

# Steps without a token after which an expert counts as dead. An expert that is chosen in one step of ten reaches it
# by chance 3 times in 100,000.
DEAD_STEPS = 100
PATIENCE = 200  # steps that a router has to become balanced: healthy ones are uneven at first
SCORE_RANGE = 1.0  # of softmax and sigmoid
MIN_USED_FRACTION = 0.25  # of the way from the fewest effective experts (those of one token) to all
MIN_ENTROPY = 0.05  # nats of a token's router probabilities: one expert has 99%
# Largest range of a layer's biases relative to a token's scores. Balance needs at most one range down for the most
# chosen expert and one up for the least chosen; plus half, since tokens differ.
MAX_BIAS_RANGE = 3.0


def balance_steps(facts: RunFacts) -> float:
    """Returns the steps allowed to reach balance: enough for a bias to reorder any two experts."""
    return max(PATIENCE, SCORE_RANGE / (2 * facts.bias_rate)) if facts.bias_rate else PATIENCE


class RouterCollapse(Rule):
    """The router uses few experts, or gives one expert nearly all of a token."""

    kind = "router_collapse"
    causes = (
        ("nothing keeps the experts equally busy", evidence.balance),
        RATE,
        WARMUP,
        ("the bias moves so far in a step that loads swing", evidence.bias_rate),
        ("the router's weights are so large that scores are all or nothing", evidence.no_evidence),
    )
    advice = (
        "see in the report which layers and experts it is",
        "balance it: model.experts.bias=true in a new run, or balance_loss=0.01 in train.aux_losses",
        "router_z_loss=0.001 in train.aux_losses keeps the router's logits small",
        "lower optim.peak_lr 2 times or lengthen the warmup",
    )
    sources = (
        "routers left alone send ever more tokens to few experts: arXiv:1701.06538, section 4",
        "own threshold: a quarter of the way from the fewest experts to all, for longer than balance takes",
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
                f"in some layer tokens are spread as unevenly as over {used:.3g} equal experts of {experts}{load}: "
                f"fewer than {least:.3g}; {chosen}, those of one token, are the fewest"
            )
        if entropy < MIN_ENTROPY:
            parts.append(
                f"in some layer the router's shares of a token have an entropy of {entropy:.2g} nats of at most "
                f"{math.log(experts):.3g}: below {MIN_ENTROPY:g}, one expert has nearly all of it"
            )
        if parts:
            return RuleResult(True, "; ".join(parts), numbers, patience=balance_steps(view.facts))
        seen = f"tokens are spread as over {used:.3g} equal experts of {experts} at least, entropy {entropy:.3g} nats"
        return RuleResult(False, seen, numbers)


class DeadExperts(Rule):
    """Some experts received no token for a long time."""

    kind = "dead_experts"
    causes = (
        ("nothing keeps the experts equally busy", evidence.balance),
        ("the batch is small for this number of experts", evidence.no_evidence),
        ("the router began far from balance, and its bias has not come far enough yet", evidence.bias_rate),
        RATE,
    )
    advice = (
        "see in the report which they are: a layer alone points at its router, some everywhere at the balance",
        "balance it: model.experts.bias=true in a new run, or balance_loss=0.01 in train.aux_losses",
        "an expert without tokens learns nothing: fewer experts would do the same",
    )
    sources = ("own threshold: 100 steps without a token, for longer than balance takes",)

    def check(self, view: View) -> RuleResult | None:
        if (dead := view.number("train/experts_dead")) is None:
            return None
        numbers = {"dead": dead, "steps": DEAD_STEPS}
        if not dead:
            return RuleResult(False, f"every expert had a token in the last {DEAD_STEPS} steps", numbers)
        has = "has" if dead == 1 else "have"
        seen = f"{units.plural(int(dead), 'expert')} {has} had no token in {DEAD_STEPS} steps: memory without use"
        patience = balance_steps(view.facts) - DEAD_STEPS
        return RuleResult(True, f"{seen}; the report shows which", numbers, patience=patience)


class RouterBias(Rule):
    """The range of the biases, or their change in a step, is too large for the scores."""

    kind = "router_bias"
    causes = (
        ("the bias moves too fast", evidence.bias_rate),
        ("some expert is not wanted whatever its bias is", evidence.no_evidence),
        RATE,
    )
    advice = (
        "lower model.experts.bias_rate: 0.001 is usual, for scores by sigmoid",
        "if it grows at a usual rate: add balance_loss or row_balance_loss to train.aux_losses, so that scores "
        "themselves come closer",
    )
    sources = (
        "a rate of 0.001: arXiv:2408.15664; arXiv:2412.19437",
        "own threshold: three times the range of a token's scores, and a tenth of it in one step",
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
                f"the biases of some layer lie {bias_range:.3g} times as far apart as the scores of a token: above "
                f"{MAX_BIAS_RANGE:g}, they choose experts whatever the scores say"
            )
        if moved > MAX_BIAS_STEP:
            parts.append(
                f"a step moves two experts apart by up to {moved:.0%} of what the scores of a token lie apart "
                f"({scores:.3g}): above {MAX_BIAS_STEP:.0%}, loads swing from step to step"
            )
        if parts:
            return RuleResult(True, "; ".join(parts), numbers, patience=patience)
        seen = f"the biases of every layer are at most {bias_range:.3g} times as far apart as the scores of a token"
        return RuleResult(False, seen, numbers)
