"""Keys and values of the tokens that were read, so that each new token reads one position and not the whole text.

They enter and leave the model beside its layers, by what the statistics of training use too (ops/recorder.py), so that
a model knows nothing of them. A slot holds the newest token whose position leaves this remainder when divided by the
number of slots: with a window, as many slots as it has positions are enough for any text.

Of latent attention (models/latent.py) no head has keys or values of its own in the cache: the latents are its values,
and what RoPE has turned its keys, of one head each.

B batch  T position of a prompt  R slot  N query heads  K kv heads  G query heads per kv head  H head dim  L layers
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.models.config import ModelConfig
from jaxscale.models.latent import Latents
from jaxscale.models.lora import joined_weight
from jaxscale.ops.attention.xla import HIDDEN
from jaxscale.ops.config import AttentionNeeds
from jaxscale.ops.recorder import Recorder
from jaxscale.sampling.absorbed import attend_absorbed


class Cache(NamedTuple):
    """Of all layers, in the compute dtype."""

    keys_LBRKH: jax.Array
    values_LBRKH: jax.Array


def cache_axes(cfg: ModelConfig) -> tuple[str, ...]:
    """The logical axes of both arrays. Latents are of all heads, and whole on each device that has some."""
    heads = "channels" if cfg.latent_width else "kv_heads"
    return ("layers", "act_batch", "act_seq", heads, "head_dim")


def one_head(latents: Latents) -> tuple[jax.Array, jax.Array]:
    """(keys, values) [B, T, 1, numbers] of what latent attention keeps."""
    return latents.key_BSR[:, :, None], latents.kv_BSC[:, :, None]


def num_slots(needs: AttentionNeeds, longest: int) -> int:
    """Slots of a cache for texts of at most `longest` tokens."""
    return longest if needs.window is None or needs.mixed else min(longest, needs.window)


def slot_positions(lengths_B: jax.Array, slots: int) -> jax.Array:
    """int32[B, R]: the position in each slot of a row that has read `length` tokens; negative: none yet."""
    last_B1, slot_1R = lengths_B[:, None] - 1, jnp.arange(slots)[None]
    return last_B1 - jnp.mod(last_B1 - slot_1R, slots)


class CacheRecorder(Recorder):
    """Records the keys and values of a whole prompt."""

    def __init__(self):
        self.layer: tuple | None = None
        self.stacks: list = []

    @property
    def whole(self) -> tuple:
        """([L, B, T, K, H], the same of values)"""
        return joined_stacks(self.stacks)

    def wrap_attention(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """`attend`, with its keys and values recorded."""

        def recorded(q_BTNH, k_BTKH, v_BTKH, segments, **how):
            self.layer = (k_BTKH, v_BTKH)
            return attend(q_BTNH, k_BTKH, v_BTKH, segments, **how)

        return recorded

    def wrap_latent(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """`attend`, with its latents recorded in the place of the keys and values that it makes of them."""

        def recorded(q_BTNH, latents: Latents, *rest, **how):
            out_BTNV = attend(q_BTNH, latents, *rest, **how)
            self.layer = one_head(latents)
            return out_BTNV

        return recorded

    def end_layer(self, x_BTD: jax.Array) -> tuple:
        """Returns the keys and values of the layer."""
        assert self.layer is not None, "a layer ends without attention"
        return self.layer

    def end_stack(self, seen: tuple) -> None:
        """Takes those of all layers of a stack."""
        self.stacks.append(seen)


def joined_stacks(stacks: list[tuple]) -> tuple:
    """One array of each kind, of the layers of all stacks."""
    return stacks[0] if len(stacks) == 1 else tuple(jnp.concatenate(parts) for parts in zip(*stacks, strict=True))


def filled(whole: tuple, lengths_B: jax.Array, slots: int) -> Cache:
    """The cache of prompts of these lengths, from what a CacheRecorder has of rows that are filled up on the right."""
    at_BR = slot_positions(lengths_B, slots)

    def take(x_LBTKH: jax.Array) -> jax.Array:
        T = x_LBTKH.shape[2]
        if slots >= T:  # slot and position are one; what lies behind a row's end is overwritten before it is seen
            return jnp.pad(x_LBTKH, ((0, 0), (0, 0), (0, slots - T), (0, 0), (0, 0)))
        place_1BR11 = jnp.maximum(at_BR, 0)[None, :, :, None, None]
        return jnp.take_along_axis(x_LBTKH, place_1BR11, axis=2)

    return Cache(*map(take, whole))


class CacheReader(Recorder):
    """Lets one new token of each row attend to those in the cache, and to itself."""

    def __init__(self, cache: Cache, lengths_B: jax.Array, needs: AttentionNeeds, stacks: Sequence[int]):
        """lengths_B: tokens that each row has in the cache; the new one comes at this position. stacks: layers of
        each."""
        self.cache, self.lengths_B, self.needs = cache, lengths_B, needs
        self.ends = np.cumsum(stacks).tolist()
        self.layer: Cache | None = None
        self.new: tuple | None = None
        self.stacks: list = []

    def layers(self) -> Cache:
        """The cache of the next stack."""
        begin, end = [0, *self.ends][len(self.stacks) :][:2]
        return self.cache if len(self.ends) == 1 else Cache(*(held[begin:end] for held in self.cache))

    def begin_layer(self, held: Cache) -> None:
        """Takes the layer's part of the cache."""
        self.layer = held

    def layer_cache(self) -> Cache:
        """Returns the layer's part of the cache."""
        assert self.layer is not None, "run_stack() calls begin_layer() before the layer"
        return self.layer

    def wrap_attention(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Attention to the cache in the place of `attend`. local: whether the layer has the window, where some have."""

        def attend_cached(q_B1NH, k_B1KH, v_B1KH, segments, *, local: bool | jax.Array | None = None):
            self.new = (k_B1KH, v_B1KH)
            cache = self.layer_cache()
            seen_BR = visible(self.lengths_B, cache[0].shape[1], self.needs.window, local)
            return attend_one(q_B1NH, k_B1KH, v_B1KH, *cache, seen_BR, self.needs.softcap)

        return attend_cached

    def wrap_latent(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Attention to the latents of the cache in the place of `attend`."""

        def attend_cached(q_B1NH, latents: Latents, w_CNE, segments, *, local: bool | jax.Array | None = None):
            self.new = one_head(latents)
            cache = self.layer_cache()
            old = Latents(kv_BSC=cache[1][:, :, 0], key_BSR=cache[0][:, :, 0])
            seen_BR = visible(self.lengths_B, cache[0].shape[1], self.needs.window, local)
            return attend_absorbed(q_B1NH, latents, old, joined_weight(w_CNE), seen_BR, self.needs.softcap)

        return attend_cached

    def end_layer(self, x_BTD: jax.Array) -> tuple:
        """Returns the new token's key and value."""
        assert self.new is not None, "a layer ends without attention"
        return self.new

    def end_stack(self, seen: tuple) -> None:
        """Takes those of all layers of a stack."""
        self.stacks.append(seen)

    def extended(self) -> Cache:
        """The cache with the new tokens in it."""
        rows_B = jnp.arange(self.lengths_B.shape[0])

        def put(held_LBRKH: jax.Array, new_LB1KH: jax.Array) -> jax.Array:
            slot_B = jnp.mod(self.lengths_B, held_LBRKH.shape[2])
            return held_LBRKH.at[:, rows_B, slot_B].set(new_LB1KH[:, :, 0])

        return Cache(*map(put, self.cache, joined_stacks(self.stacks)))


def visible(lengths_B: jax.Array, slots: int, window: int | None, local: bool | jax.Array | None) -> jax.Array:
    """bool[B, R]: whether the token at position `length` sees what is in a slot."""
    at_BR = slot_positions(lengths_B, slots)
    seen_BR = at_BR >= 0
    if window is None:
        return seen_BR
    near_BR = lengths_B[:, None] - at_BR < window
    return seen_BR & (near_BR if local is None else near_BR | jnp.logical_not(local))


def attend_one(q_B1NH, k_B1KH, v_B1KH, keys_BRKH, values_BRKH, seen_BR, softcap: float | None) -> jax.Array:
    """What ops.attention.xla computes of the last position of a row, [B, 1, N, H] in q.dtype."""
    B, _, N, H = q_B1NH.shape
    K = k_B1KH.shape[2]
    q_BKGH = q_B1NH.reshape(B, K, N // K, H)
    old_BKGR = jnp.einsum("BKGH,BRKH->BKGR", q_BKGH, keys_BRKH, preferred_element_type=jnp.float32)
    own_BKG1 = jnp.einsum("BKGH,BSKH->BKGS", q_BKGH, k_B1KH, preferred_element_type=jnp.float32)
    score = jnp.concatenate([old_BKGR, own_BKG1], axis=-1) * H**-0.5
    if softcap is not None:
        score = softcap * jnp.tanh(score / softcap)
    seen_BS = jnp.pad(seen_BR, ((0, 0), (0, 1)), constant_values=True)
    share = jax.nn.softmax(jnp.where(seen_BS[:, None, None], score, HIDDEN), axis=-1).astype(values_BRKH.dtype)
    old_BKGH = jnp.einsum("BKGR,BRKH->BKGH", share[..., :-1], values_BRKH, preferred_element_type=jnp.float32)
    own_BKGH = share[..., -1:].astype(jnp.float32) * v_B1KH.reshape(B, K, 1, H).astype(jnp.float32)
    return (old_BKGH + own_BKGH).astype(q_B1NH.dtype).reshape(B, 1, N, H)
