"""What keeps experts equally busy without a gradient: numbers among the parameters that a step moves by its counts.

L layers  E experts
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.models.experts_config import EXPERT_COUNTS

ROUTER_BIAS, ROUTER_LOAD = "router_bias", "router_load"


def is_balance(name: str) -> bool:
    """True for the dotted name of a parameter that rebalanced() moves."""
    return name.rpartition(".")[2] in (ROUTER_BIAS, ROUTER_LOAD)


def rebalanced(params: dict, means: dict[str, Any], rate: float) -> dict:
    """The parameters after a step in which experts were chosen so often (arXiv:2408.15664).

    Integers decide: the same on every mesh, whatever the microbatches.
    """
    counts_LE = means[EXPERT_COUNTS]
    rows_L1 = jnp.sum(counts_LE, axis=1, keepdims=True)
    fewer_LE = jnp.sign(rows_L1 - counts_LE.shape[1] * counts_LE)  # than the mean
    moved = {ROUTER_LOAD: counts_LE / jnp.maximum(rows_L1, 1)}
    if ROUTER_BIAS in mlp_of(params["blocks"]):
        moved[ROUTER_BIAS] = rate * fewer_LE
    return params | {"blocks": with_moved(params["blocks"], moved)}


def bias_ends(params: dict) -> dict[str, jax.Array]:
    """{ROUTER_BIAS: float32[L, 2], the lowest and the highest of each layer}; {} where there are none."""
    blocks = params["blocks"]
    if ROUTER_BIAS not in mlp_of(blocks):
        return {}
    if "mlp" in blocks:
        bias_LE = blocks["mlp"][ROUTER_BIAS]
    else:
        bias_LE = jnp.stack([blocks[str(layer)]["mlp"][ROUTER_BIAS] for layer in range(len(blocks))])
    return {ROUTER_BIAS: jnp.stack([jnp.min(bias_LE, axis=1), jnp.max(bias_LE, axis=1)], axis=1)}


def mlp_of(blocks: dict) -> dict:
    """The parameters of experts, of all layers or of the first where each is by itself."""
    return blocks["mlp"] if "mlp" in blocks else blocks["0"]["mlp"]


def with_moved(blocks: dict, moved: dict[str, Any]) -> dict:
    """The layers with their load put in, and their biases moved."""
    if "mlp" not in blocks:  # each by itself
        own = lambda layer: {name: values_LE[int(layer)] for name, values_LE in moved.items()}
        return {layer: with_moved(block, own(layer)) for layer, block in blocks.items()}
    bias = {name: blocks["mlp"][name] + moved[name] for name in moved if name == ROUTER_BIAS}
    return blocks | {"mlp": blocks["mlp"] | {ROUTER_LOAD: moved[ROUTER_LOAD]} | bias}
