"""Router metrics, auxiliary losses and load balancing of mixtures of experts. Balancing without auxiliary losses
(arXiv:2408.15664) updates router biases by token counts instead of gradients.

L layers  E experts  Q rounds of an all-to-all exchange
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.core.config import EXPERT_LOSSES
from jaxscale.core.models.config import EXPERT_COUNTS, EXPERT_ROUNDS, EXPERTS_DROPPED, ROUTER_ENTROPY, ROUTER_SCORES

ROUTER_BIAS, ROUTER_LOAD = "router_bias", "router_load"
F32 = jnp.float32


class MoEMetrics(NamedTuple):
    """Router metrics of one layer, as sums over the non-padding tokens of a device."""

    counts_E: jax.Array  # int32: tokens routed to each expert
    losses: dict[str, jax.Array]  # float32: EXPERT_LOSSES by name
    entropy: jax.Array  # float32: entropy of the router's probabilities in nats
    scores: jax.Array  # float32: highest score of a token minus its lowest
    rounds_Q: jax.Array  # int32: number of exchanges that took 0, 1, ... rounds; empty if rows are not sent
    dropped: jax.Array | None = None  # int32: (token, expert) pairs beyond an expert's capacity; None without a limit


def moe_sums(metrics: MoEMetrics, aux_weights: Mapping[str, float]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (weighted sum of auxiliary losses, named sums and counts) from metrics with a leading layer axis.

    Losses and counts of all-to-all rounds are summed over the layers.
    """
    losses = {name: jnp.sum(metrics.losses[name]) for name in EXPERT_LOSSES if name in aux_weights}
    added = sum((aux_weights[name] * loss for name, loss in losses.items()), jnp.zeros((), F32))
    sums = {EXPERT_COUNTS: metrics.counts_E, ROUTER_ENTROPY: metrics.entropy, ROUTER_SCORES: metrics.scores}
    if metrics.rounds_Q.size:
        sums[EXPERT_ROUNDS] = jnp.sum(metrics.rounds_Q, axis=0)
    if metrics.dropped is not None:
        sums[EXPERTS_DROPPED] = metrics.dropped
    return added, losses | sums


def is_balance_param(name: str) -> bool:
    """Returns True for the dotted name of a parameter that update_balance() sets."""
    return name.rpartition(".")[2] in (ROUTER_BIAS, ROUTER_LOAD)


def update_balance(params: dict, means: dict[str, Any], rate: float) -> dict:
    """Returns the parameters with this step's router load, and with updated router biases if the model has them.

    The sign of a bias update depends only on integer counts, so it does not depend on the mesh or on microbatches.
    """
    counts_LE = means[EXPERT_COUNTS]
    rows_L1 = jnp.sum(counts_LE, axis=1, keepdims=True)
    direction_LE = jnp.sign(rows_L1 - counts_LE.shape[1] * counts_LE)  # positive for fewer tokens than the mean
    updates = {ROUTER_LOAD: counts_LE / jnp.maximum(rows_L1, 1)}
    if ROUTER_BIAS in moe_params(params["blocks"]):
        updates[ROUTER_BIAS] = rate * direction_LE
    return params | {"blocks": apply_router_updates(params["blocks"], updates)}


def bias_range(params: dict) -> dict[str, jax.Array]:
    """Returns {ROUTER_BIAS: float32[L, 2]} with the minimum and maximum of each layer, or {} if biases are not used."""
    blocks = params["blocks"]
    if ROUTER_BIAS not in moe_params(blocks):
        return {}
    if "mlp" in blocks:
        bias_LE = blocks["mlp"][ROUTER_BIAS]
    else:
        bias_LE = jnp.stack([blocks[str(layer)]["mlp"][ROUTER_BIAS] for layer in range(len(blocks))])
    return {ROUTER_BIAS: jnp.stack([jnp.min(bias_LE, axis=1), jnp.max(bias_LE, axis=1)], axis=1)}


def moe_params(blocks: dict) -> dict:
    """Returns the MoE parameters of all layers if layers are stacked, else of the first layer."""
    return blocks["mlp"] if "mlp" in blocks else blocks["0"]["mlp"]


def apply_router_updates(blocks: dict, updates: dict[str, Any]) -> dict:
    """Replaces the load of each layer, and adds updates to the biases."""
    if "mlp" not in blocks:  # not stacked
        layer_updates = lambda layer: {name: values_LE[int(layer)] for name, values_LE in updates.items()}
        return {layer: apply_router_updates(block, layer_updates(layer)) for layer, block in blocks.items()}
    bias = {name: blocks["mlp"][name] + updates[name] for name in updates if name == ROUTER_BIAS}
    return blocks | {"mlp": blocks["mlp"] | {ROUTER_LOAD: updates[ROUTER_LOAD]} | bias}
