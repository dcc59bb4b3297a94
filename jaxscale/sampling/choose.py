"""The next token out of the logits. B batch  V vocab"""

import math

import jax
import jax.numpy as jnp

from jaxscale.sampling.config import Sampling


def filtered(logits_BV: jax.Array, seen_BV: jax.Array | None, sampling: Sampling) -> jax.Array:
    """Logits of the distribution that is drawn from, float32[B, V], -inf for a token that is not drawn.

    seen_BV: bool, tokens of the text so far; only for a repetition penalty. At temperature 0 they are not divided.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    if sampling.looks_back:
        penalty = sampling.repetition_penalty
        logits_BV = jnp.where(seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)
    if sampling.temperature == 0:
        return logits_BV
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        least_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if sampling.top_p < 1:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        share_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV  # of what is likelier
        least_B1 = jnp.min(jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if sampling.min_p > 0:
        least_B1 = jnp.max(logits_BV, axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return logits_BV


def choose(logits_BV: jax.Array, seen_BV: jax.Array | None, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """int32[B]: a token for each row, drawn with the row's own key, so that no row depends on what is beside it."""
    logits_BV = filtered(logits_BV, seen_BV, sampling)
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
