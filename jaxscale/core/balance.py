"""Auxiliary-loss-free load balancing (arXiv:2408.15664): router biases updated from token counts, without gradients.

L layers  E experts
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.core.models.config import EXPERT_COUNTS

ROUTER_BIAS, ROUTER_LOAD = "router_bias", "router_load"


def is_balance_param(name: str) -> bool:
    """True for the dotted name of a parameter that update_balance() sets."""
    return name.rpartition(".")[2] in (ROUTER_BIAS, ROUTER_LOAD)


def update_balance(params: dict, means: dict[str, Any], rate: float) -> dict:
    """Returns the parameters with ROUTER_LOAD of this step and, if there are any, updated router biases.

    The direction depends on integer counts only, so it is the same on every mesh and for any microbatches.
    """
    counts_LE = means[EXPERT_COUNTS]
    rows_L1 = jnp.sum(counts_LE, axis=1, keepdims=True)
    direction_LE = jnp.sign(rows_L1 - counts_LE.shape[1] * counts_LE)  # positive for fewer tokens than the mean
    updates = {ROUTER_LOAD: counts_LE / jnp.maximum(rows_L1, 1)}
    if ROUTER_BIAS in moe_params(params["blocks"]):
        updates[ROUTER_BIAS] = rate * direction_LE
    return params | {"blocks": apply_router_updates(params["blocks"], updates)}


def bias_range(params: dict) -> dict[str, jax.Array]:
    """Returns {ROUTER_BIAS: float32[L, 2], the minimum and maximum of each layer}; {} without router biases."""
    blocks = params["blocks"]
    if ROUTER_BIAS not in moe_params(blocks):
        return {}
    if "mlp" in blocks:
        bias_LE = blocks["mlp"][ROUTER_BIAS]
    else:
        bias_LE = jnp.stack([blocks[str(layer)]["mlp"][ROUTER_BIAS] for layer in range(len(blocks))])
    return {ROUTER_BIAS: jnp.stack([jnp.min(bias_LE, axis=1), jnp.max(bias_LE, axis=1)], axis=1)}


def moe_params(blocks: dict) -> dict:
    """Returns the MoE parameters of all layers if they are stacked, else of the first layer."""
    return blocks["mlp"] if "mlp" in blocks else blocks["0"]["mlp"]


def apply_router_updates(blocks: dict, updates: dict[str, Any]) -> dict:
    """Replaces the load of each layer and adds to its biases."""
    if "mlp" not in blocks:  # not stacked
        layer_updates = lambda layer: {name: values_LE[int(layer)] for name, values_LE in updates.items()}
        return {layer: apply_router_updates(block, layer_updates(layer)) for layer, block in blocks.items()}
    bias = {name: blocks["mlp"][name] + updates[name] for name in updates if name == ROUTER_BIAS}
    return blocks | {"mlp": blocks["mlp"] | {ROUTER_LOAD: updates[ROUTER_LOAD]} | bias}
