"""QK-clip (arXiv:2507.20534, 2.1): scales down query and key weights of heads with large attention scores.

After the update of a step, the scores of a head whose largest score exceeded the limit are multiplied by limit / max:
its query and key weights by the square root each. A key shared by several heads is not scaled, and their query weights
take the whole factor.

L layers  N query heads  K kv heads  D embed  H head dim  C latent  U head dim without RoPE
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.core.recorder import MAX_LOGITS, Intermediates

LOGIT_MAX, NUM_CLIPPED = "attention_logit_max", "qk_clipped"  # metrics: the largest score; heads above the limit


def make_qk_clip(limit: float | None, stacks: Mapping[str, int]) -> Callable[..., Any] | None:
    """Returns (parameters, intermediates) -> (parameters, metrics); None without a limit. stacks: from layer_stacks."""
    return None if limit is None else functools.partial(clip_heads, limit=limit, stacks=tuple(stacks))


def clip_heads(
    params: dict, intermediates: Sequence[Intermediates], *, limit: float, stacks: Sequence[str]
) -> tuple[dict, dict[str, jax.Array]]:
    """Returns (parameters with heads above the limit clipped, metrics). intermediates: of each stack, in order."""
    maxima = [stack.maxima[MAX_LOGITS] for stack in intermediates]
    for name, max_LN in zip(stacks, maxima, strict=True):
        factor_LN = jnp.where(max_LN > limit, limit / max_LN, 1.0)  # 1 for -inf, a head without text
        params = params | {name: clip_stack(params[name], factor_LN)}
    metrics = {
        LOGIT_MAX: jnp.max(jnp.stack([jnp.max(max_LN) for max_LN in maxima])),
        NUM_CLIPPED: sum(jnp.sum(max_LN > limit, dtype=jnp.int32) for max_LN in maxima),
    }
    return params, metrics


def clip_stack(blocks: dict, factor_LN: jax.Array) -> dict:
    """Returns the layers of a stack with the scores of each head multiplied by its factor."""
    if "attention" not in blocks:  # not stacked
        return {layer: clip_stack(block, factor_LN[int(layer)]) for layer, block in blocks.items()}
    return blocks | {"attention": clip_attention(blocks["attention"], factor_LN)}


def clip_attention(weights: dict, factor_N: jax.Array) -> dict:
    """Returns attention weights, of one layer or stacked, with the scores of each head multiplied by its factor."""
    root_N = jnp.sqrt(factor_N)
    if "wkv_up" in weights:
        return weights | clip_latent(weights, factor_N, root_N)
    multi_head = weights["wk"].shape[-2] == factor_N.shape[-1]
    factors = {"q": root_N, "k": root_N} if multi_head else {"q": factor_N}
    clipped = {}
    for name, scale_N in factors.items():
        clipped[f"w{name}"] = scale_weight(weights[f"w{name}"], scale_N[..., None, :, None])
        if f"bias_{name}" in weights:
            clipped[f"bias_{name}"] = scale_weight(weights[f"bias_{name}"], scale_N[..., None])
    return weights | clipped


def clip_latent(weights: dict, factor_N: jax.Array, root_N: jax.Array) -> dict:
    """Returns the scaled per-head weights of latent attention (MLA).

    Dimensions without RoPE are scaled by the root in queries and keys; the RoPE key is shared by all heads, so the RoPE
    dimensions of the queries take the whole factor.
    """
    name = "wq_up" if "wq_up" in weights else "wq"
    expand = lambda scale_N: scale_N[..., None, :, None]
    rope_dim = weights["wkv_down"].shape[-1] - weights["wkv_up"].shape[-3]  # R
    nope_dim = weights[name].shape[-1] - rope_dim  # U
    is_nope = lambda width: jnp.arange(width) < nope_dim
    return {
        name: scale_weight(
            weights[name], jnp.where(is_nope(weights[name].shape[-1]), expand(root_N), expand(factor_N))
        ),
        "wkv_up": scale_weight(weights["wkv_up"], jnp.where(is_nope(weights["wkv_up"].shape[-1]), expand(root_N), 1.0)),
    }


def scale_weight(weight: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns weight * factor in the dtype of the weight."""
    return (weight * factor).astype(weight.dtype)
