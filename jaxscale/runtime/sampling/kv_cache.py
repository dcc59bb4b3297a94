"""Key-value cache, with which each new token costs one position instead of the whole text.

The model records its keys and values through core/recorder.py, as for training statistics, and has no code for caches.
The slot of a position is the position modulo the number of slots, so a new token overwrites the oldest. With an
attention window, a cache with as many slots as the window has positions is enough for any text.

Latent attention (core/models/latent_attention.py) caches no keys and values of heads. It caches the latents as values
and the part of the key with RoPE as keys, each with one head.

B batch  T position of a prompt  R slot  N query heads  K kv heads  G query heads per kv head  H head dim  L layers
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.core.axes.tensor_axis import TensorAxis
from jaxscale.core.models.latent_attention import Latents
from jaxscale.core.models.lora import merged_weight
from jaxscale.core.recorder import Recorder
from jaxscale.kernels.attention.xla import MASK_VALUE
from jaxscale.kernels.config import AttentionNeeds

F32 = jnp.float32


class Cache(NamedTuple):
    """Keys and values of all layers, in the compute dtype."""

    keys_LBRKH: jax.Array
    values_LBRKH: jax.Array


def one_head(latents: Latents) -> tuple[jax.Array, jax.Array]:
    """Returns (keys, values) [B, T, 1, features] to cache for latent attention."""
    return latents.key_BSR[:, :, None], latents.kv_BSC[:, :, None]


def num_slots(needs: AttentionNeeds, longest: int) -> int:
    """Returns the number of cache slots per row for texts of at most `longest` tokens."""
    return longest if needs.window is None or needs.window_layers else min(longest, needs.window)


def slot_positions(lengths_B: jax.Array, slots: int) -> jax.Array:
    """Returns int32[B, R], the position in each slot after lengths_B tokens; negative if the slot is empty."""
    last_B1, slot_1R = lengths_B[:, None] - 1, jnp.arange(slots)[None]
    return last_B1 - jnp.mod(last_B1 - slot_1R, slots)


class KeyValueRecorder(Recorder):
    """Collects the (keys, values) of each layer."""

    def __init__(self):
        self.new: tuple | None = None  # (keys, values) of the current layer
        self.stacks: list[tuple] = []

    @property
    def whole(self) -> tuple:
        """The (keys, values) of all layers, both [L, B, T, K, H]."""
        if len(self.stacks) == 1:
            return self.stacks[0]
        return tuple(jnp.concatenate(parts) for parts in zip(*self.stacks, strict=True))

    def end_layer(self, x_BTD: jax.Array) -> tuple:
        """Returns the keys and values of the layer."""
        assert self.new is not None, "a layer ends without attention"
        return self.new

    def end_stack(self, seen: tuple) -> None:
        """Adds the layers of a stack."""
        self.stacks.append(seen)


class CacheRecorder(KeyValueRecorder):
    """Records the keys and values of a whole prompt."""

    def wrap_attention(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Wraps `attend` to record its keys and values."""

        def recorded(q_BTNH, k_BTKH, v_BTKH, segments, **kwargs):
            self.new = (k_BTKH, v_BTKH)
            return attend(q_BTNH, k_BTKH, v_BTKH, segments, **kwargs)

        return recorded

    def wrap_latent(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Wraps `attend` to record its latents instead of keys and values."""

        def recorded(q_BTNH, latents: Latents, *args, **kwargs):
            out_BTNV = attend(q_BTNH, latents, *args, **kwargs)
            self.new = one_head(latents)
            return out_BTNV

        return recorded


def fill_cache(whole: tuple, lengths_B: jax.Array, slots: int) -> Cache:
    """Returns the cache of right-padded prompts of these lengths, from CacheRecorder.whole."""
    position_BR = slot_positions(lengths_B, slots)

    def gather(x_LBTKH: jax.Array) -> jax.Array:
        T = x_LBTKH.shape[2]
        if slots >= T:  # slots equal positions, and padding is overwritten before it is visible
            return jnp.pad(x_LBTKH, ((0, 0), (0, 0), (0, slots - T), (0, 0), (0, 0)))
        index_1BR11 = jnp.maximum(position_BR, 0)[None, :, :, None, None]
        return jnp.take_along_axis(x_LBTKH, index_1BR11, axis=2)

    return Cache(*map(gather, whole))


class CacheReader(KeyValueRecorder):
    """Recorder with attention that reads the cache. The new token of each row attends to the cache and itself."""

    def __init__(self, cache: Cache, lengths_B: jax.Array, needs: AttentionNeeds, stacks: Sequence[int]):
        """`lengths_B` is the number of cached tokens per row; `stacks` is the number of layers per stack."""
        super().__init__()
        self.cache, self.lengths_B, self.needs = cache, lengths_B, needs
        self.ends = np.cumsum(stacks).tolist()
        self.layer: Cache | None = None

    def layer_inputs(self) -> Cache:
        """Returns the cache of the next stack."""
        begin, end = [0, *self.ends][len(self.stacks) :][:2]
        return self.cache if len(self.ends) == 1 else Cache(*(stacked[begin:end] for stacked in self.cache))

    def begin_layer(self, cache: Cache) -> None:
        """Sets the cache of the current layer."""
        self.layer = cache

    def visible(self, local: bool | jax.Array | None) -> tuple[Cache, jax.Array]:
        """Returns (cache of the current layer, bool[B, R] mask of the slots that the new token attends to)."""
        assert self.layer is not None, "run_stack() calls begin_layer() before the layer"
        position_BR = slot_positions(self.lengths_B, self.layer[0].shape[1])
        seen_BR = position_BR >= 0
        if self.needs.window is not None:
            near_BR = self.lengths_B[:, None] - position_BR < self.needs.window
            seen_BR &= near_BR if local is None else near_BR | jnp.logical_not(local)
        return self.layer, seen_BR

    def wrap_attention(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Replaces `attend` with attention to the cache. `local` is True in layers with the attention window."""

        def attend_cached(q_B1NH, k_B1KH, v_B1KH, segments, *, local: bool | jax.Array | None = None):
            self.new = (k_B1KH, v_B1KH)
            cache, seen_BR = self.visible(local)
            return attend_one(q_B1NH, k_B1KH, v_B1KH, *cache, seen_BR, self.needs.softcap)

        return attend_cached

    def wrap_latent(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Replaces `attend` by attention to the cached latents."""

        def attend_cached(q_B1NH, latents: Latents, w_CNE, segments, *, local: bool | jax.Array | None = None):
            self.new = one_head(latents)
            cache, seen_BR = self.visible(local)
            cached = Latents(kv_BSC=cache[1][:, :, 0], key_BSR=cache[0][:, :, 0])
            return attend_absorbed(q_B1NH, latents, cached, merged_weight(w_CNE), seen_BR, self.needs.softcap)

        return attend_cached

    def extended(self) -> Cache:
        """Returns the cache with the new tokens added."""
        rows_B = jnp.arange(self.lengths_B.shape[0])

        def put(cached_LBRKH: jax.Array, new_LB1KH: jax.Array) -> jax.Array:
            slot_B = jnp.mod(self.lengths_B, cached_LBRKH.shape[2])
            return cached_LBRKH.at[:, rows_B, slot_B].set(new_LB1KH[:, :, 0])

        return Cache(*map(put, self.cache, self.whole))


def attend_one(q_B1NH, k_B1KH, v_B1KH, keys_BRKH, values_BRKH, seen_BR, softcap: float | None) -> jax.Array:
    """Returns attention of one new token per row, [B, 1, N, H] in q.dtype, computed as in kernels.attention.xla."""
    B, _, N, H = q_B1NH.shape
    K = k_B1KH.shape[2]
    q_BKGH = q_B1NH.reshape(B, K, N // K, H)
    cached_BKGR = jnp.einsum("BKGH,BRKH->BKGR", q_BKGH, keys_BRKH, preferred_element_type=jnp.float32)
    new_BKG1 = jnp.einsum("BKGH,BSKH->BKGS", q_BKGH, k_B1KH, preferred_element_type=jnp.float32)
    score = jnp.concatenate([cached_BKGR, new_BKG1], axis=-1) * H**-0.5
    if softcap is not None:
        score = softcap * jnp.tanh(score / softcap)
    seen_BS = jnp.pad(seen_BR, ((0, 0), (0, 1)), constant_values=True)
    probs = jax.nn.softmax(jnp.where(seen_BS[:, None, None], score, MASK_VALUE), axis=-1).astype(values_BRKH.dtype)
    cached_BKGH = jnp.einsum("BKGR,BRKH->BKGH", probs[..., :-1], values_BRKH, preferred_element_type=jnp.float32)
    new_BKGH = probs[..., -1:].astype(jnp.float32) * v_B1KH.reshape(B, K, 1, H).astype(jnp.float32)
    return (cached_BKGH + new_BKGH).astype(q_B1NH.dtype).reshape(B, 1, N, H)


class ReplicatedTensorAxis(TensorAxis):
    """A tensor axis without sequence parallelism, for single positions. The residual stream is replicated."""

    def all_gather(self, x_BTD: jax.Array) -> jax.Array:
        """Returns x_BTD unchanged."""
        return x_BTD

    def reduce_scatter(self, x_BTD: jax.Array) -> jax.Array:
        """Sums over the devices. Not differentiable."""
        return self.sum(x_BTD)

    def local(self, x_BT: jax.Array) -> jax.Array:
        """Returns x_BT unchanged."""
        return x_BT

    def run_in_halves(self, f: Callable[..., Any], *inputs: Any) -> Any:
        """Returns f(*inputs)."""
        return f(*inputs)


def attend_absorbed(
    q_B1NH: jax.Array, new: Latents, cached: Latents, w_CNE: jax.Array, seen_BR: jax.Array, softcap: float | None
) -> jax.Array:
    """Returns attention to the new token and to the cached latents where seen_BR is True, [B, 1, N, V] in q.dtype.

    Does not compute keys and values. A score is q . (W c) = (W^T q) . c, so the key weights multiply the query, and the
    value weights multiply the mean of the latents (arXiv:2405.04434, section 2.1.2). For S cached tokens this takes N C
    (U + V) + N S (2 C + r) multiplications instead of S N C (U + V) + N S (U + r + V). That is fewer from the second
    token on, and 120 times fewer for long texts with the sizes of DeepSeek-V3.
    `w_CNE` contains the weights of the keys (without RoPE) and values of each head.

    C rank of latents  U head dim without RoPE  r head dim with RoPE  V value dim
    """
    dtype, H, U = q_B1NH.dtype, q_B1NH.shape[-1], q_B1NH.shape[-1] - new.key_BSR.shape[-1]
    product = lambda spec, *arrays: jnp.einsum(spec, *arrays, preferred_element_type=F32)
    w_CNU, w_CNV = jnp.split(w_CNE.astype(dtype), [U], axis=-1)
    q_BNU, q_BNr = jnp.split(q_B1NH[:, 0], [U], axis=-1)
    q_BNC = product("BNU,CNU->BNC", q_BNU, w_CNU).astype(dtype)
    score = lambda c: product("BNC,BSC->BNS", q_BNC, c.kv_BSC) + product("BNr,BSr->BNS", q_BNr, c.key_BSR)
    score_BNS = jnp.concatenate([score(cached), score(new)], axis=-1) * H**-0.5
    if softcap is not None:
        score_BNS = softcap * jnp.tanh(score_BNS / softcap)
    seen_B1S = jnp.pad(seen_BR, ((0, 0), (0, 1)), constant_values=True)[:, None]
    probs_BNS = jax.nn.softmax(jnp.where(seen_B1S, score_BNS, MASK_VALUE), axis=-1).astype(dtype)
    mean_BNC = product("BNS,BSC->BNC", probs_BNS[..., :-1], cached.kv_BSC)
    mean_BNC += probs_BNS[..., -1:].astype(F32) * new.kv_BSC.astype(F32)
    return product("BNC,CNV->BNV", mean_BNC.astype(dtype), w_CNV).astype(dtype)[:, None]
