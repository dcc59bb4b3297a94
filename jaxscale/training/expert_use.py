"""What a step says of its experts: numbers for each record of metrics, and counts of many steps for experts.jsonl.

L layers of experts  E experts
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxscale.models.experts_config import (
    EXPERT_COUNTS,
    EXPERT_ROUNDS,
    EXPERTS_DROPPED,
    ROUTER_ENTROPY,
    ROUTER_SCORES,
)
from jaxscale.monitor.health.expert_rules import DEAD_STEPS
from jaxscale.training.balance import ROUTER_BIAS

MOST_RECORDS = 128  # of a run, and few more: of 61 layers with 256 experts 20 MB, at ten bytes a count


class ExpertUse:
    """The counts of a run's experts since this start."""

    def __init__(self, *, chosen: int, first_layer: int = 0, every_steps: int = 0, total_steps: int = 0):
        """chosen: experts of a token. first_layer: the number of the first layer that has any. every_steps: the least
        distance of two records of all counts; 0: there are none."""
        self.chosen, self.first_layer, self.smallest = chosen, first_layer, every_steps
        self.every = every_steps and max(1, math.ceil(total_steps / MOST_RECORDS / every_steps)) * every_steps
        self.counts_LE: np.ndarray | None = None  # summed over the steps since the last record
        self.steps = 0  # of the sum
        self.quiet_LE: np.ndarray | None = None  # steps in a row without a token
        self.seen = 0  # steps since this start

    def due(self, step: int) -> bool:
        """Whether a record of all counts is due: every so many steps, and in the beginning at distances that double."""
        if not self.every:
            return False
        times, rest = divmod(step, self.smallest)
        return step % self.every == 0 or step < self.every and rest == 0 and times & (times - 1) == 0

    def take(self, fetched: dict[str, Any]) -> dict[str, float]:
        """The numbers of a step; what they are made of is added to the sums, and taken out of `fetched`."""
        counts_LE = fetched.pop(EXPERT_COUNTS).astype(np.int64)
        self.counts_LE = counts_LE if self.counts_LE is None else self.counts_LE + counts_LE
        quiet_LE = np.where(counts_LE > 0, 0, 1 if self.quiet_LE is None else self.quiet_LE + 1)
        self.quiet_LE = quiet_LE
        self.steps, self.seen = self.steps + 1, self.seen + 1
        numbers = spread_of(counts_LE) | router_numbers(fetched, counts_LE, self.chosen)
        if self.seen >= DEAD_STEPS:  # before, nobody knows
            numbers["experts_dead"] = int((quiet_LE >= DEAD_STEPS).sum())
        if EXPERT_ROUNDS in fetched:
            numbers |= rounds_of(fetched.pop(EXPERT_ROUNDS))
        if EXPERTS_DROPPED in fetched:
            numbers[EXPERTS_DROPPED] = int(fetched.pop(EXPERTS_DROPPED).sum())
        return numbers

    def record(self) -> Mapping[str, Any]:
        """The counts since the last record, for experts.jsonl; the sums begin anew."""
        assert self.counts_LE is not None, "a record is due after take()"
        counts = {"steps": self.steps, "first_layer": self.first_layer, "counts": self.counts_LE.tolist()}
        self.counts_LE, self.steps = np.zeros_like(self.counts_LE), 0
        return counts


def spread_of(counts_LE: np.ndarray) -> dict[str, float]:
    """How a step's tokens are spread, by the worst layer: the busiest expert over the mean, and how many equally busy
    experts would be as uneven; experts without a token, of all layers."""
    rows_L1 = np.maximum(counts_LE.sum(axis=1, keepdims=True), 1)
    share_LE = counts_LE / rows_L1
    entropy_L = -np.sum(share_LE * np.log(np.maximum(share_LE, np.finfo(float).tiny)), axis=1)
    return {
        "experts_busiest": float(share_LE.max() * share_LE.shape[1]),
        "experts_effective": float(np.exp(entropy_L).min()),
        "experts_idle": int((counts_LE == 0).sum()),
    }


def router_numbers(fetched: dict[str, Any], counts_LE: np.ndarray, chosen: int) -> dict[str, float]:
    """The entropy of a token's shares [nats], in the mean and in the lowest layer. Where there are biases: how far the
    scores of a token lie apart, in the layer with the least; how far the biases of a layer do, and how many times as
    far as the scores, in the worst. Taken out of `fetched`."""
    # Sums over the tokens that are text were divided by those that have a target.
    per_token_L = np.maximum(fetched["real_tokens"], 1) * chosen / np.maximum(counts_LE.sum(axis=1), 1)
    entropy_L, scores_L = (fetched.pop(name) * per_token_L for name in (ROUTER_ENTROPY, ROUTER_SCORES))
    numbers = {"router_entropy": float(entropy_L.mean()), "router_entropy_lowest": float(entropy_L.min())}
    if ROUTER_BIAS not in fetched:
        return numbers
    lowest_L, highest_L = fetched.pop(ROUTER_BIAS).T
    range_L = highest_L - lowest_L
    to_scores_L = range_L / np.maximum(scores_L, np.finfo(np.float32).tiny)
    numbers |= {"router_scores": float(scores_L.min()), "router_bias": float(range_L.max())}
    return numbers | {"router_bias_to_scores": float(to_scores_L.max())}


def rounds_of(exchanges_Q: np.ndarray) -> dict[str, float]:
    """The most rounds that an exchange of rows needed, on any device and in any layer, and how many in the mean."""
    rounds = np.arange(len(exchanges_Q))
    mean = float((rounds * exchanges_Q).sum() / max(exchanges_Q.sum(), 1))
    return {"expert_rounds": int(rounds[exchanges_Q > 0].max(initial=0)), "expert_rounds_mean": mean}
