"""Sums of router metrics and balance losses over mixture-of-experts layers.

L layers  E experts  Q rounds of an all-to-all exchange
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.core.config import EXPERT_LOSSES
from jaxscale.core.models.config import EXPERT_COUNTS, EXPERT_ROUNDS, EXPERTS_DROPPED, ROUTER_ENTROPY, ROUTER_SCORES

F32 = jnp.float32


class MoEMetrics(NamedTuple):
    """Router metrics of one layer: sums over the tokens of a device that are not padding."""

    counts_E: jax.Array  # int32: tokens routed to each expert
    losses: dict[str, jax.Array]  # those of EXPERT_LOSSES, float32
    entropy: jax.Array  # float32, of the router's probabilities [nats]
    scores: jax.Array  # float32: the highest score of a token minus the lowest
    rounds_Q: jax.Array  # int32: number of exchanges that took 0, 1, ... rounds; empty if rows are not sent
    dropped: jax.Array | None = None  # int32: (token, expert) pairs beyond an expert's capacity; None without a limit


def moe_sums(metrics: MoEMetrics, aux_weights: Mapping[str, float]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (weighted auxiliary losses, named sums over tokens and counts) of the metrics of layers [L].

    Losses and exchanges are summed over the layers.
    """
    losses = {name: jnp.sum(metrics.losses[name]) for name in EXPERT_LOSSES if name in aux_weights}
    added = sum((aux_weights[name] * loss for name, loss in losses.items()), jnp.zeros((), F32))
    sums = {EXPERT_COUNTS: metrics.counts_E, ROUTER_ENTROPY: metrics.entropy, ROUTER_SCORES: metrics.scores}
    if metrics.rounds_Q.size:
        sums[EXPERT_ROUNDS] = jnp.sum(metrics.rounds_Q, axis=0)
    if metrics.dropped is not None:
        sums[EXPERTS_DROPPED] = metrics.dropped
    return added, losses | sums
