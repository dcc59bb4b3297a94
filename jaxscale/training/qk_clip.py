"""QK-clip: heads whose attention scores have grown too large get smaller query and key weights (arXiv:2507.20534, 2.1).

After a step's update, a head whose largest score of the step was `top` above the limit has its scores multiplied by
limit / top: half by its queries' weights and half by its keys', as far as these are its own. A key that several heads
share stays as it is, and their queries take it all.

L layers  N query heads  K key-value heads  D embed  H head dim  C latent  U of the head dim, not turned
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.ops.recorder import MAX_LOGITS, Intermediates

LARGEST, CLIPPED = "attention_logit_max", "qk_clipped"  # metrics: the largest score; heads above the limit


def make_qk_clip(limit: float | None, stacks: Mapping[str, int]) -> Callable[..., Any] | None:
    """(parameters, largest scores) -> (parameters, metrics); None without a limit. stacks: as layer_stacks has them."""
    return None if limit is None else functools.partial(clip_heads, limit=limit, stacks=tuple(stacks))


def clip_heads(
    params: dict, seen: Sequence[Intermediates], *, limit: float, stacks: Sequence[str]
) -> tuple[dict, dict[str, jax.Array]]:
    """(the parameters, with heads above the limit clipped; {metric: number}). seen: of each stack, in their order."""
    tops = [of.maxima[MAX_LOGITS] for of in seen]
    for name, top_LN in zip(stacks, tops, strict=True):
        factor_LN = jnp.where(top_LN > limit, limit / top_LN, 1.0)  # of -inf, a head without text: 1
        params = params | {name: clip_stack(params[name], factor_LN)}
    told = {
        LARGEST: jnp.max(jnp.stack([jnp.max(top_LN) for top_LN in tops])),
        CLIPPED: sum(jnp.sum(top_LN > limit, dtype=jnp.int32) for top_LN in tops),
    }
    return params, told


def clip_stack(blocks: dict, factor_LN: jax.Array) -> dict:
    """The layers of a stack, with the scores of each head multiplied by its factor."""
    if "attention" not in blocks:  # each by itself
        return {layer: clip_stack(block, factor_LN[int(layer)]) for layer, block in blocks.items()}
    return blocks | {"attention": clip_attention(blocks["attention"], factor_LN)}


def clip_attention(weights: dict, factor_N: jax.Array) -> dict:
    """The weights of a layer's attention, or of all layers, with the scores of each head multiplied by its factor."""
    root_N = jnp.sqrt(factor_N)
    if "wkv_up" in weights:
        return weights | clip_latent(weights, factor_N, root_N)
    own_keys = weights["wk"].shape[-2] == factor_N.shape[-1]
    by = {"q": root_N, "k": root_N} if own_keys else {"q": factor_N}
    found = {}
    for which, of_N in by.items():
        found[f"w{which}"] = times(weights[f"w{which}"], of_N[..., None, :, None])
        if f"bias_{which}" in weights:
            found[f"bias_{which}"] = times(weights[f"bias_{which}"], of_N[..., None])
    return weights | found


def clip_latent(weights: dict, factor_N: jax.Array, root_N: jax.Array) -> dict:
    """The weights of latent attention that are one head's: what is not turned of its queries and keys takes a root
    each; the turned key is shared, and the turned part of the queries takes it all."""
    name = "wq_up" if "wq_up" in weights else "wq"
    wide = lambda of_N: of_N[..., None, :, None]
    turned = weights["wkv_down"].shape[-1] - weights["wkv_up"].shape[-3]  # R
    plain = weights[name].shape[-1] - turned  # U
    part = lambda width: jnp.arange(width) < plain
    return {
        name: times(weights[name], jnp.where(part(weights[name].shape[-1]), wide(root_N), wide(factor_N))),
        "wkv_up": times(weights["wkv_up"], jnp.where(part(weights["wkv_up"].shape[-1]), wide(root_N), 1.0)),
    }


def times(weight: jax.Array, factor: jax.Array) -> jax.Array:
    """weight * factor, in the weight's dtype."""
    return (weight * factor).astype(weight.dtype)
