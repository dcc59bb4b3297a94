"""RingKernel (ring.py) for any platform: FlashAttention over pairs of blocks (flash.py).

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim  C devices
R = T * G: the queries of a key-value head
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.core.axes.context_axis import ContextAxis
from jaxscale.kernels.attention.blockwise import F32, group_heads, ungroup_heads
from jaxscale.kernels.attention.context_parallel import chunk_block_size
from jaxscale.kernels.attention.flash import BlockMask, FlashAttention, Gradients, OnlineSoftmax, pad_block_pairs
from jaxscale.kernels.attention.ring import KVShard, make_ring_attend


def make_attend(*, softcap: float | None, window: int | None, context: ContextAxis, unrolled: bool = False):
    """Returns attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) -> out_BTNH for local positions in zigzag order."""

    def attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        def make_kernel(q_BKTGH) -> FlashRingKernel:
            _, _, T, G, _ = q_BKTGH.shape
            chunk = T // context.chunks
            flash = FlashAttention(G, v_BTKH.shape[3], chunk_block_size(chunk), softcap, window)
            return FlashRingKernel(context, chunk, flash)

        ring = make_ring_attend(context, make_kernel, unrolled=unrolled)
        q_BKTGH = group_heads(q_BTNH, k_BTKH.shape[2])
        return ungroup_heads(ring(q_BKTGH, k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2), segment_ids_BT))

    return attend


@dataclasses.dataclass(frozen=True)
class FlashRingKernel:
    """RingKernel for queries [B, K, T, G, H]."""

    context: ContextAxis
    chunk: int
    flash: FlashAttention

    def init(self, q_BKTGH) -> OnlineSoftmax:
        """Returns the softmax before the first key."""
        return self.flash.init(q_BKTGH)

    def accumulate(self, state: OnlineSoftmax, q_BKTGH, kv: KVShard, ids_BT, step) -> OnlineSoftmax:
        """Returns the softmax state after processing these keys."""
        return self.flash.accumulate(state, q_BKTGH, *kv[:2], self.block_mask(step, ids_BT, kv.segment_ids_BT))

    def finalize(self, state: OnlineSoftmax, q_BKTGH):
        """Returns (out_BKTGH, logsumexp_BKR)."""
        return self.flash.finalize(state, q_BKTGH, q_BKTGH.dtype)

    def delta(self, out_BKTGH, dout_BKTGH):
        """Returns float32[B, K, R], sum(out * dout) of each query."""
        return self.flash.delta(out_BKTGH, dout_BKTGH)

    def accumulate_grads(self, dq_BKTGH, q_BKTGH, kv: KVShard, ids_BT, step, *residuals):
        """Returns (dq_BKTGH including these keys, dk_BKTH, dv_BKTH). residuals: logsumexp, delta, dout."""
        zeros = Gradients(self.flash.rows(dq_BKTGH), *(jnp.zeros(x.shape, F32) for x in kv[:2]))
        block_mask = self.block_mask(step, ids_BT, kv.segment_ids_BT)
        dq_BKRH, dk_BKTH, dv_BKTH = self.flash.accumulate_grads(zeros, q_BKTGH, *kv[:2], block_mask, *residuals)
        return dq_BKRH.reshape(q_BKTGH.shape), dk_BKTH, dv_BKTH

    def block_mask(self, step: int | jax.Array, ids_BT, key_ids_BT) -> BlockMask:
        """Returns the mask of local queries and the keys from the device `step` ring steps before this device."""
        device, size = self.context.index(), self.context.size
        source = (device - step) % size
        is_local = isinstance(step, int) and step == 0
        block, window = self.flash.block, self.flash.window
        tables_XP2, table_CC = ring_block_pairs(size, self.chunk, block, window, is_local=is_local)
        pairs_P2 = jnp.asarray(tables_XP2)[jnp.asarray(table_CC)[device, source]]
        starts_Cc = jnp.asarray(self.context.chunk_starts(self.chunk))
        positions = lambda n: (starts_Cc[n][:, None] + jnp.arange(self.chunk, dtype=jnp.int32)[None]).reshape(-1)
        return BlockMask(pairs_P2, ids_BT, key_ids_BT, positions(device), positions(source))


def ring_block_pairs(size: int, chunk: int, block: int, window: int | None, *, is_local: bool):
    """Returns (distinct tables of visible pairs, index of the table for each query device and key device).

    Tables are int32[X, P, 2], with pairs (query block, key block) of local block indices. The index is int32[C, C].
    is_local: True if queries and keys are on the same device, False if they are on different devices.
    """
    starts_Cc = ContextAxis(size).chunk_starts(chunk // block)
    blocks = [np.concatenate([start + np.arange(chunk // block) for start in starts_c]) for starts_c in starts_Cc]
    max_distance = np.inf if window is None else window - 1
    pairs_of_devices = {}
    for query_device, queries in enumerate(blocks):
        for key_device, keys in enumerate(blocks):
            if (query_device == key_device) == is_local:
                distance = (queries[:, None] - keys[None, :]) * block  # distance between the first positions of blocks
                visible = (distance >= 0) & (distance - block + 1 <= max_distance)
                pairs_of_devices[query_device, key_device] = np.argwhere(visible).astype(np.int32)
    tables = {pairs.tobytes(): pairs for pairs in pairs_of_devices.values()}
    index = {key: number for number, key in enumerate(tables)}
    table_CC = np.zeros((size, size), np.int32)
    for devices, pairs in pairs_of_devices.items():
        table_CC[devices] = index[pairs.tobytes()]
    last_block = 2 * (chunk // block) - 1
    return np.stack(pad_block_pairs(list(tables.values()), [last_block] * len(tables))), table_CC
