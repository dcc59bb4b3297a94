"""What layers of experts say beside their results: how often each expert was chosen, and losses that balance them.

L layers  E experts  Q rounds of an exchange of rows
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.models.config import EXPERT_LOSSES
from jaxscale.models.experts_config import (
    EXPERT_COUNTS,
    EXPERT_ROUNDS,
    EXPERTS_DROPPED,
    ROUTER_ENTROPY,
    ROUTER_SCORES,
)

F32 = jnp.float32


class Told(NamedTuple):
    """What a layer of experts says of a device's tokens, besides their results: sums over those that are text."""

    counts_E: jax.Array  # int32: how often each expert was chosen
    losses: dict[str, jax.Array]  # those of EXPERT_LOSSES, float32
    entropy: jax.Array  # float32, of the router's shares [nats]
    scores: jax.Array  # float32: how far the highest score of a token is above the lowest
    rounds_Q: jax.Array  # int32: how many exchanges needed so many rounds; [0] where rows stay
    dropped: jax.Array | None = None  # int32: choices of experts that had no room; None where there is no limit


def expert_parts(told: Told, aux_weights: Mapping[str, float]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(what is added to what is minimised, named sums over the tokens and counts) of layers [L] of experts.

    The losses are summed over the layers, and so are the exchanges.
    """
    losses = {name: jnp.sum(told.losses[name]) for name in EXPERT_LOSSES if name in aux_weights}
    added = sum((aux_weights[name] * loss for name, loss in losses.items()), jnp.zeros((), F32))
    sums = {EXPERT_COUNTS: told.counts_E, ROUTER_ENTROPY: told.entropy, ROUTER_SCORES: told.scores}
    if told.rounds_Q.size:
        sums[EXPERT_ROUNDS] = jnp.sum(told.rounds_Q, axis=0)
    if told.dropped is not None:
        sums[EXPERTS_DROPPED] = told.dropped
    return added, losses | sums
