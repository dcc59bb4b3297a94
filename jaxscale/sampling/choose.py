"""The next token out of the logits. B batch  V vocab"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. What is listed first is done first; a token as likely as the last one kept is kept too."""

    repetition_penalty: float = setting(
        1.0, "above 1: tokens of the text so far become less likely (arXiv:1909.05858); 1: as the model says"
    )
    temperature: float = setting(0.8, "1: as the model says; 0: always the likeliest")
    top_k: int = setting(0, "draw among the k likeliest tokens; 0: among all")
    top_p: float = setting(
        1.0, "draw among the likeliest tokens that together have this probability (arXiv:1904.09751); 1: among all"
    )
    min_p: float = setting(
        0.0, "draw among tokens that have this part of the likeliest one's probability (arXiv:2407.01082); 0: all"
    )

    def __post_init__(self):
        for name, holds, rule in (
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1: no penalty)"),
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "0 or more and below 1"),
        ):
            value = getattr(self, name)
            if not holds or not math.isfinite(value):
                raise BadInput(f"{name}={value} must be {rule}")

    @property
    def looks_back(self) -> bool:
        """Whether it matters which tokens the text has."""
        return self.repetition_penalty != 1.0


GREEDY = Sampling(temperature=0.0)


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
