"""Expert load metrics of each step, and token counts accumulated over steps for experts.jsonl.

L layers of experts  E experts
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxscale.core.models.config import EXPERT_COUNTS, EXPERT_ROUNDS, EXPERTS_DROPPED, ROUTER_ENTROPY, ROUTER_SCORES
from jaxscale.core.models.moe_balance import ROUTER_BIAS
from jaxscale.runtime.monitor.health.expert_rules import DEAD_STEPS

MAX_RECORDS = 128  # per run, approximately; 20 MB for 61 layers with 256 experts, at ten bytes per count


class ExpertLoad:
    """Token counts of a run's experts since this process started."""

    def __init__(self, *, experts_per_token: int, first_layer: int = 0, every_steps: int = 0, total_steps: int = 0):
        """`first_layer` is the first MoE layer. `every_steps` is the minimum interval between records; 0: none."""
        self.experts_per_token, self.first_layer, self.every_steps = experts_per_token, first_layer, every_steps
        self.interval = every_steps and max(1, math.ceil(total_steps / MAX_RECORDS / every_steps)) * every_steps
        self.counts_LE: np.ndarray | None = None  # summed over the steps since the last record
        self.steps = 0  # number of steps in counts_LE
        self.idle_steps_LE: np.ndarray | None = None  # consecutive steps without a token
        self.steps_since_start = 0

    def record_due(self, step: int) -> bool:
        """Returns True every `interval` steps. Before the first of these, the interval doubles with each record."""
        if not self.interval:
            return False
        times, remainder = divmod(step, self.every_steps)
        return step % self.interval == 0 or step < self.interval and remainder == 0 and times & (times - 1) == 0

    def add_step(self, fetched: dict[str, Any]) -> dict[str, float]:
        """Adds a step's counts to the sums and returns its metrics. Removes the values it uses from `fetched`."""
        counts_LE = fetched.pop(EXPERT_COUNTS).astype(np.int64)
        self.counts_LE = counts_LE if self.counts_LE is None else self.counts_LE + counts_LE
        idle_steps_LE = np.where(counts_LE > 0, 0, 1 if self.idle_steps_LE is None else self.idle_steps_LE + 1)
        self.idle_steps_LE = idle_steps_LE
        self.steps, self.steps_since_start = self.steps + 1, self.steps_since_start + 1
        metrics = load_metrics(counts_LE) | router_metrics(fetched, counts_LE, self.experts_per_token)
        if self.steps_since_start >= DEAD_STEPS:  # undefined before
            metrics["experts_dead"] = int((idle_steps_LE >= DEAD_STEPS).sum())
        if EXPERT_ROUNDS in fetched:
            metrics |= round_metrics(fetched.pop(EXPERT_ROUNDS))
        if EXPERTS_DROPPED in fetched:
            metrics[EXPERTS_DROPPED] = int(fetched.pop(EXPERTS_DROPPED).sum())
        return metrics

    def record(self) -> Mapping[str, Any]:
        """Returns a record for experts.jsonl with the counts since the last record, and resets the counts."""
        assert self.counts_LE is not None, "a record is due after add_step()"
        counts = {"steps": self.steps, "first_layer": self.first_layer, "counts": self.counts_LE.tolist()}
        self.counts_LE, self.steps = np.zeros_like(self.counts_LE), 0
        return counts


def load_metrics(counts_LE: np.ndarray) -> dict[str, float]:
    """Returns load balance metrics: the ratio of maximum to mean expert load and the effective number of experts,
    exp(entropy), each for the worst layer, and the number of experts without tokens in all layers."""
    rows_L1 = np.maximum(counts_LE.sum(axis=1, keepdims=True), 1)
    share_LE = counts_LE / rows_L1
    entropy_L = -np.sum(share_LE * np.log(np.maximum(share_LE, np.finfo(float).tiny)), axis=1)
    return {
        "experts_busiest": float(share_LE.max() * share_LE.shape[1]),
        "experts_effective": float(np.exp(entropy_L).min()),
        "experts_idle": int((counts_LE == 0).sum()),
    }


def router_metrics(fetched: dict[str, Any], counts_LE: np.ndarray, experts_per_token: int) -> dict[str, float]:
    """Returns the mean and minimum over layers of the router entropy in nats per token. With router biases, also
    returns the minimum spread of scores, the maximum range of biases, and the maximum ratio of range to spread.
    Removes the values it uses from `fetched`."""
    # sums over tokens of text were divided by the number of target tokens
    per_token_L = np.maximum(fetched["real_tokens"], 1) * experts_per_token / np.maximum(counts_LE.sum(axis=1), 1)
    entropy_L, scores_L = (fetched.pop(name) * per_token_L for name in (ROUTER_ENTROPY, ROUTER_SCORES))
    metrics = {"router_entropy": float(entropy_L.mean()), "router_entropy_lowest": float(entropy_L.min())}
    if ROUTER_BIAS not in fetched:
        return metrics
    lowest_L, highest_L = fetched.pop(ROUTER_BIAS).T
    range_L = highest_L - lowest_L
    ratio_L = range_L / np.maximum(scores_L, np.finfo(np.float32).tiny)
    metrics |= {"router_scores": float(scores_L.min()), "router_bias": float(range_L.max())}
    return metrics | {"router_bias_to_scores": float(ratio_L.max())}


def round_metrics(exchanges_Q: np.ndarray) -> dict[str, float]:
    """Returns the maximum and mean number of all-to-all rounds per exchange, over devices and layers."""
    rounds = np.arange(len(exchanges_Q))
    mean = float((rounds * exchanges_Q).sum() / max(exchanges_Q.sum(), 1))
    return {"expert_rounds": int(rounds[exchanges_Q > 0].max(initial=0)), "expert_rounds_mean": mean}
