"""Sampling without a cache: each new token reads the whole window again. Enough for a look at a run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.schema import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What the model writes at the end of a run, and on the way."""

    num_tokens: int = setting(0, "tokens to sample at the end of the run; 0: none", may_change=True)
    every_steps: int = setting(
        0, "steps between samples on the way, which go to samples.jsonl; 0: only at the end", may_change=True
    )
    ema: bool = setting(False, "true: with the average that train.ema keeps", may_change=True)
    prompt: str = setting("\n", "text to go on from", may_change=True)
    temperature: float = setting(0.8, "1: as the model says; towards 0: always the likeliest", may_change=True)
    top_k: int = setting(40, "sample among the k likeliest tokens; 0: among all", may_change=True)

    def __post_init__(self):
        if self.num_tokens < 0 or self.top_k < 0 or self.temperature <= 0:
            raise ValueError("num_tokens and top_k must be at least 0, temperature above 0")
        if self.every_steps < 0 or self.every_steps and not self.num_tokens:
            raise ValueError(f"every_steps={self.every_steps} must be at least 0, and is for num_tokens above 0")
        if not self.prompt:
            raise ValueError("prompt must not be empty: the first token needs one before it")


def make_sampler(
    next_logits: Callable[[Any, jax.Array, jax.Array], jax.Array], *, window: int, temperature: float, top_k: int
) -> Callable[[Any, np.ndarray, int, jax.Array], jax.Array]:
    """sample(params, tokens_BT, start, key) -> tokens_BT filled from column `start` on; before it stands the prompt.

    The model reads the newest `window` tokens, or all while there are fewer; the text may be longer.
    next_logits(params, tokens_BT, last): float32[B, V] after column `last`; columns behind it must not matter.
    """

    def sample(params: Any, tokens_BT: jax.Array, start: jax.Array, key: jax.Array) -> jax.Array:
        total = tokens_BT.shape[1]
        read = min(window, total)

        def put_next(place: jax.Array, tokens_BT: jax.Array) -> jax.Array:
            first = jnp.maximum(place - read, 0)
            window_BT = jax.lax.dynamic_slice_in_dim(tokens_BT, first, read, axis=1)
            logits_BV = next_logits(params, window_BT, place - 1 - first) / temperature
            if top_k:
                least_B1 = jax.lax.top_k(logits_BV, min(top_k, logits_BV.shape[-1]))[0][:, -1:]
                logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
            chosen_B = jax.random.categorical(jax.random.fold_in(key, place), logits_BV)
            return tokens_BT.at[:, place].set(chosen_B.astype(tokens_BT.dtype))

        return jax.lax.fori_loop(start, total, put_next, tokens_BT)

    return sample
