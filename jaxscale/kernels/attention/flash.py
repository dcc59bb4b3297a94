"""FlashAttention (arXiv:2205.14135) in plain JAX: exact causal attention on any platform, with memory linear in T.

Forward and backward passes scan over the visible pairs of blocks. Scores exist for one pair at a time, and the program
does not grow with T. Queries and keys have explicit positions, so a device may have some of the queries of a sequence
and attend to its keys in any order.

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim
R = T * G: the queries of a key-value head; r and s are the queries and the keys of one block
The head dim of values and outputs, FlashAttention.value_dim, may differ from H.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.kernels.attention import blockwise
from jaxscale.kernels.attention.blockwise import F32, einsum_f32, group_heads, scale_and_cap, ungroup_heads
from jaxscale.kernels.attention.context_parallel import BLOCK, PositionedAttend, QueryPositions, chunk_block_size
from jaxscale.kernels.attention.xla import MASK_VALUE, MaskSpec
from jaxscale.kernels.config import ATTENTION_OUT
from jaxscale.kernels.gradient import custom_vjp

# Longer sequences on CPUs use this module, because the blocks of blockwise.py grow beyond this length. At 4096 it was
# not slower, and a step needed 25 MiB instead of 617 (4 heads of 64, 2 busy cores, 2026-11-21).
BLOCKWISE_MAX_LEN = 1024


class BlockMask(NamedTuple):
    """Pairs of blocks to compute, and the segment ids and positions that determine their masks."""

    pairs_P2: jax.Array  # visible (query block, key block); the diagonal block is the last pair of a query block
    query_segments_BT: jax.Array
    key_segments_BS: jax.Array
    query_positions_T: jax.Array
    key_positions_S: jax.Array


def make_attend(*, softcap: float | None = None, window: int | None = None, block: int = BLOCK):
    """Returns attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH, equivalent to xla.make_attend()."""
    masked_attend = make_masked_attend(softcap=softcap, window=window, block=block)

    def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        T = q_BTNH.shape[1]
        pad = lambda x: jnp.pad(x, [(0, 0), (0, -T % block)] + [(0, 0)] * (x.ndim - 2))
        ids_BT = pad(segment_ids_BT)
        length = ids_BT.shape[1]
        positions_T = jnp.arange(length, dtype=jnp.int32)
        pairs_P2 = jnp.asarray(visible_pairs(length, block, window))
        block_mask = BlockMask(pairs_P2, ids_BT, ids_BT, positions_T, positions_T)
        return masked_attend(pad(q_BTNH), pad(k_BSKH), pad(v_BSKH), block_mask)[:, :T]

    return attend


def make_blockwise(*, softcap: float | None, window: int | None, platform: str):
    """Returns the attention of blockwise.py for short sequences on CPUs, else the attention of this module."""
    flash_attend = make_attend(softcap=softcap, window=window)
    if platform != "cpu":
        return flash_attend
    block_attend = blockwise.make_attend(softcap=softcap, window=window)
    return lambda q_BTNH, *args: (block_attend if q_BTNH.shape[1] <= BLOCKWISE_MAX_LEN else flash_attend)(q_BTNH, *args)


def make_positioned_attend(*, softcap: float | None, window: int | None) -> PositionedAttend:
    """Returns FlashAttention for queries at given positions."""

    def positioned_attend(q_BTNH, k_BSKH, v_BSKH, spec: MaskSpec, positions: QueryPositions):
        block = chunk_block_size(positions.chunk)
        pairs_CP2 = positioned_block_pairs(positions.starts_Cc, positions.chunk, block, window)
        pairs_P2 = jnp.asarray(pairs_CP2)[positions.device]
        positions_S, positions_T = jnp.arange(k_BSKH.shape[1], dtype=jnp.int32), positions.positions_T
        assert spec.key_segment_ids_BS is not None  # keys of other devices need segment ids
        block_mask = BlockMask(pairs_P2, spec.segment_ids_BT, spec.key_segment_ids_BS, positions_T, positions_S)
        return make_masked_attend(softcap=softcap, window=window, block=block)(q_BTNH, k_BSKH, v_BSKH, block_mask)

    return positioned_attend


def make_masked_attend(*, softcap: float | None, window: int | None, block: int):
    """Returns attend(q_BTNH, k_BSKH, v_BSKH, block_mask) -> out_BTNH. Lengths must be multiples of `block`."""

    def make_flash(q_BKTGH, v_BKSH) -> FlashAttention:
        return FlashAttention(q_BKTGH.shape[3], v_BKSH.shape[3], block, softcap, window)

    @custom_vjp
    def attend(q_BTNH, k_BSKH, v_BSKH, block_mask):
        return forward(q_BTNH, k_BSKH, v_BSKH, block_mask)[0]

    def forward(q_BTNH, k_BSKH, v_BSKH, block_mask):
        q_BKTGH, k_BKSH, v_BKSH = group_heads(q_BTNH, k_BSKH.shape[2]), k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
        results = make_flash(q_BKTGH, v_BKSH).forward(q_BKTGH, k_BKSH, v_BKSH, block_mask)
        out_BKTGH, lse_BKR = (checkpoint_name(result, ATTENTION_OUT) for result in results)
        return ungroup_heads(out_BKTGH), (q_BKTGH, k_BKSH, v_BKSH, block_mask, out_BKTGH, lse_BKR)

    def backward(saved, dout_BTNH):
        q_BKTGH, k_BKSH, v_BKSH, block_mask, out_BKTGH, lse_BKR = saved
        dout_BKTGH = group_heads(dout_BTNH, k_BKSH.shape[1])
        flash = make_flash(q_BKTGH, v_BKSH)
        grads = flash.backward(q_BKTGH, k_BKSH, v_BKSH, block_mask, out_BKTGH, lse_BKR, dout_BKTGH)
        dq_BKTGH, dk_BKSH, dv_BKSH = grads
        return ungroup_heads(dq_BKTGH), dk_BKSH.swapaxes(1, 2), dv_BKSH.swapaxes(1, 2), None

    attend.defvjp(forward, backward)
    return attend


def visible_pairs(length: int, block: int, window: int | None, begin: int = 0) -> np.ndarray:
    """Returns int32[P, 2], the sorted visible pairs (query block, key block).

    begin: position of the first query in the sequence of keys, a multiple of `block`.
    """
    distance = begin + length if window is None else window - 1  # distance to the first visible key
    first = begin // block
    first_key_block = lambda i: max(0, i * block - distance) // block
    return np.array(
        [(i - first, j) for i in range(first, first + length // block) for j in range(first_key_block(i), i + 1)],
        np.int32,
    )


def positioned_block_pairs(starts_Cc: np.ndarray, chunk: int, block: int, window: int | None) -> np.ndarray:
    """Returns int32[C, P, 2], the visible pairs (query block, key block) of each device.

    Without a window, all devices have the same number of pairs in zigzag order. With a window, the first chunk has
    fewer pairs, and pad_block_pairs() pads them.
    """
    device_pairs = []
    for starts_c in starts_Cc:
        chunk_pairs = []
        for number, start in enumerate(starts_c):
            pairs_P2 = visible_pairs(chunk, block, window, int(start))
            chunk_pairs.append(pairs_P2 + np.array([number * (chunk // block), 0], np.int32))
        device_pairs.append(np.concatenate(chunk_pairs))
    return np.stack(pad_block_pairs(device_pairs, [pairs_P2[:, 1].max() for pairs_P2 in device_pairs]))


def pad_block_pairs(lists: Sequence[np.ndarray], last_key_blocks: Sequence[int]) -> list[np.ndarray]:
    """Pads lists of pairs to equal length with the fully masked pair (first query block, last key block)."""
    length = max(map(len, lists))
    padding = lambda pairs, last: np.full((length - len(pairs), 2), (0, last), np.int32)
    return [np.concatenate([pairs, padding(pairs, last)]) for pairs, last in zip(lists, last_key_blocks)]


class OnlineSoftmax(NamedTuple):
    """State of the online softmax over the keys processed so far, float32."""

    acc_BKRH: jax.Array  # sum of exp(score - max) * value
    sum_BKR: jax.Array  # sum of exp(score - max)
    max_BKR: jax.Array  # maximum of the scores


class Gradients(NamedTuple):
    """Gradients from the pairs of blocks processed so far, float32."""

    dq_BKRH: jax.Array
    dk_BKSH: jax.Array
    dv_BKSH: jax.Array


@dataclasses.dataclass(frozen=True)
class FlashAttention:
    """Forward and backward scans over pairs of blocks."""

    groups: int  # G
    value_dim: int  # head dim of values and outputs
    block: int
    softcap: float | None
    window: int | None

    def block_at(self, x: jax.Array, i: jax.Array, size: int) -> jax.Array:
        """Returns block i of x along the third axis."""
        return lax.dynamic_slice_in_dim(x, i * size, size, axis=2)

    def set_block(self, x: jax.Array, i: jax.Array, part: jax.Array) -> jax.Array:
        """Returns x with block i along the third axis replaced by `part`."""
        return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[2], axis=2)

    def mask(self, block_mask: BlockMask, i: jax.Array, j: jax.Array) -> jax.Array:
        """Returns bool [B, 1, r, s], True where a query of block i attends to a key of block j."""
        block_n = lambda x, n: lax.dynamic_slice_in_dim(x, n * self.block, self.block, axis=-1)
        q_Bb, k_Bb = block_n(block_mask.query_segments_BT, i), block_n(block_mask.key_segments_BS, j)
        distance = block_n(block_mask.query_positions_T, i)[:, None] - block_n(block_mask.key_positions_S, j)[None, :]
        in_window = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        return jnp.repeat((q_Bb[:, :, None] == k_Bb[:, None, :]) & in_window[None], self.groups, axis=1)[:, None]

    def forward(self, q_BKTGH, k_BKSH, v_BKSH, block_mask: BlockMask):
        """Returns (out_BKTGH in v.dtype, logsumexp_BKR float32)."""
        softmax = self.accumulate(self.init(q_BKTGH), q_BKTGH, k_BKSH, v_BKSH, block_mask)
        return self.finalize(softmax, q_BKTGH, v_BKSH.dtype)

    def init(self, q_BKTGH) -> OnlineSoftmax:
        """Returns the softmax before the first key."""
        B, K, T, G, _ = q_BKTGH.shape
        zeros_BKR = jnp.zeros((B, K, T * G), F32)
        acc_BKRH = jnp.zeros((B, K, T * G, self.value_dim), F32)
        return OnlineSoftmax(acc_BKRH, zeros_BKR, jnp.full_like(zeros_BKR, MASK_VALUE))

    def finalize(self, softmax: OnlineSoftmax, q_BKTGH, dtype):
        """Returns (out_BKTGH, logsumexp_BKR float32) from the softmax over all keys."""
        out_BKRH = (softmax.acc_BKRH / softmax.sum_BKR[..., None]).astype(dtype)
        return out_BKRH.reshape(*q_BKTGH.shape[:4], self.value_dim), softmax.max_BKR + jnp.log(softmax.sum_BKR)

    def accumulate(self, softmax: OnlineSoftmax, q_BKTGH, k_BKSH, v_BKSH, block_mask: BlockMask) -> OnlineSoftmax:
        """Returns the softmax state after processing these keys."""
        (G, H), q_BKRH = q_BKTGH.shape[3:], self.rows(q_BKTGH)
        size = self.block * G

        def one_pair(softmax, pair):
            i, j = pair
            k_BKsH, v_BKsH = self.block_at(k_BKSH, j, self.block), self.block_at(v_BKSH, j, self.block)
            qk_BKrs = einsum_f32("BKrH,BKsH->BKrs", self.block_at(q_BKRH, i, size), k_BKsH)
            score_BKrs = jnp.where(self.mask(block_mask, i, j), scale_and_cap(qk_BKrs, H, self.softcap)[0], MASK_VALUE)
            old_max_BKr = self.block_at(softmax.max_BKR, i, size)
            max_BKr = jnp.maximum(old_max_BKr, jnp.max(score_BKrs, axis=-1))
            # These are ones for a query without a visible key so far. The rescale at its own key's block makes them 0.
            prob_BKrs = jnp.exp(score_BKrs - max_BKr[..., None]).astype(v_BKSH.dtype)
            rescale_BKr = jnp.exp(old_max_BKr - max_BKr)
            sum_BKr = self.block_at(softmax.sum_BKR, i, size) * rescale_BKr + jnp.sum(prob_BKrs, axis=-1, dtype=F32)
            acc_BKrH = self.block_at(softmax.acc_BKRH, i, size) * rescale_BKr[..., None]
            acc_BKrH += einsum_f32("BKrs,BKsH->BKrH", prob_BKrs, v_BKsH)
            return OnlineSoftmax(
                self.set_block(softmax.acc_BKRH, i, acc_BKrH),
                self.set_block(softmax.sum_BKR, i, sum_BKr),
                self.set_block(softmax.max_BKR, i, max_BKr),
            ), None

        return lax.scan(one_pair, softmax, (block_mask.pairs_P2[:, 0], block_mask.pairs_P2[:, 1]))[0]

    def backward(self, q_BKTGH, k_BKSH, v_BKSH, block_mask: BlockMask, out_BKTGH, lse_BKR, dout_BKTGH):
        """Returns (dq_BKTGH, dk_BKSH, dv_BKSH) in the dtypes of q, k, v."""
        zeros = Gradients(*(jnp.zeros(x.shape, F32) for x in (self.rows(q_BKTGH), k_BKSH, v_BKSH)))
        delta_BKR = self.delta(out_BKTGH, dout_BKTGH)
        grads = self.accumulate_grads(zeros, q_BKTGH, k_BKSH, v_BKSH, block_mask, lse_BKR, delta_BKR, dout_BKTGH)
        dq_BKTGH = grads.dq_BKRH.astype(q_BKTGH.dtype).reshape(q_BKTGH.shape)
        return dq_BKTGH, grads.dk_BKSH.astype(k_BKSH.dtype), grads.dv_BKSH.astype(v_BKSH.dtype)

    def rows(self, q_BKTGH):
        """Returns queries with positions and groups merged, q_BKRH."""
        B, K, T, G, H = q_BKTGH.shape
        return q_BKTGH.reshape(B, K, T * G, H)

    def delta(self, out_BKTGH, dout_BKTGH):
        """Returns float32[B, K, R], sum(out * dout) of each query, which is D in FlashAttention's backward pass."""
        return jnp.sum(self.rows(dout_BKTGH).astype(F32) * self.rows(out_BKTGH).astype(F32), axis=-1)

    def accumulate_grads(self, grads: Gradients, q_BKTGH, k_BKSH, v_BKSH, block_mask, lse_BKR, delta_BKR, dout_BKTGH):
        """Adds the gradients from these keys to grads. lse_BKR: logsumexp over all keys."""
        G, H = q_BKTGH.shape[3:]
        q_BKRH, dout_BKRH = self.rows(q_BKTGH), self.rows(dout_BKTGH)
        size = self.block * G

        def one_pair(grads, pair):
            i, j = pair
            q_BKrH, dout_BKrH = self.block_at(q_BKRH, i, size), self.block_at(dout_BKRH, i, size)
            k_BKsH, v_BKsH = self.block_at(k_BKSH, j, self.block), self.block_at(v_BKSH, j, self.block)
            score_BKrs, dscore_dqk_BKrs = scale_and_cap(einsum_f32("BKrH,BKsH->BKrs", q_BKrH, k_BKsH), H, self.softcap)
            masked_BKrs = score_BKrs - self.block_at(lse_BKR, i, size)[..., None]
            prob_BKrs = jnp.exp(jnp.where(self.mask(block_mask, i, j), masked_BKrs, MASK_VALUE)).astype(q_BKTGH.dtype)
            dprob_BKrs = einsum_f32("BKrH,BKsH->BKrs", dout_BKrH, v_BKsH)
            delta_BKr1 = self.block_at(delta_BKR, i, size)[..., None]
            dqk_BKrs = (prob_BKrs.astype(F32) * (dprob_BKrs - delta_BKr1) * dscore_dqk_BKrs).astype(q_BKTGH.dtype)
            dq_BKrH = self.block_at(grads.dq_BKRH, i, size) + einsum_f32("BKrs,BKsH->BKrH", dqk_BKrs, k_BKsH)
            dk_BKsH = self.block_at(grads.dk_BKSH, j, self.block) + einsum_f32("BKrs,BKrH->BKsH", dqk_BKrs, q_BKrH)
            dv_BKsH = self.block_at(grads.dv_BKSH, j, self.block) + einsum_f32("BKrs,BKrH->BKsH", prob_BKrs, dout_BKrH)
            return Gradients(
                self.set_block(grads.dq_BKRH, i, dq_BKrH),
                self.set_block(grads.dk_BKSH, j, dk_BKsH),
                self.set_block(grads.dv_BKSH, j, dv_BKsH),
            ), None

        return lax.scan(one_pair, grads, (block_mask.pairs_P2[:, 0], block_mask.pairs_P2[:, 1]))[0]
