"""RingKernel (ring.py) for TPUs: one call of the splash kernel per pair of chunks.

In zigzag order the late chunk of a device attends to the whole early chunk of every other device. In addition, the
early chunk attends to the early chunks of previous devices, and the late chunk to the late chunks of later devices.
So each step has two pairs of chunks, equal work on all devices, and no mask except segments. Local chunks have the
causal mask. A call also returns the logsumexp, which is used to merge results. The backward kernels use the logsumexp
over all keys. Results of pairs are accumulated in float32. A call returns the dtype of queries or keys, rounded once.

B batch  T local position  t position in a chunk  N query heads  K key-value heads  H head dim
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info_lib

from jaxscale.core.axes.context_axis import ContextAxis
from jaxscale.kernels.attention.blockwise import F32
from jaxscale.kernels.attention.ring import KVShard, make_ring_attend
from jaxscale.kernels.attention.splash import (
    DEFAULT_BLOCKS,
    Blocks,
    BlockTables,
    KernelTables,
    block_sizes,
    causal_mask_function,
    make_tables,
    padded_length,
)

MASK_VALUE = kernel_lib.DEFAULT_MASK_VALUE
PADDING_SEGMENT = -1  # differs from all segment ids


def make_attend(
    *,
    softcap: float | None,
    window: int | None,
    context: ContextAxis,
    blocks: Blocks = DEFAULT_BLOCKS,
    interpret: bool = False,
):
    """Returns attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) -> out_BTNH for local positions in zigzag order.

    Chunks are padded to whole blocks. interpret: whether to run in interpreter mode, slowly and without a TPU.
    """

    def attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        chunk = q_BTNH.shape[1] // context.chunks
        padded_chunk = padded_length(chunk)
        kernel = SplashRingKernel(context, padded_chunk, chunk, softcap, window, blocks, interpret, v_BTKH.shape[3])
        by_chunk = lambda x: x.reshape(x.shape[0], context.chunks, -1, *x.shape[2:])
        flat = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])

        def pad(x, value=0):
            widths = [(0, 0), (0, 0), (0, padded_chunk - chunk)] + [(0, 0)] * (x.ndim - 2)
            return flat(jnp.pad(by_chunk(x), widths, constant_values=value))

        scaled_BTNH = (q_BTNH.astype(F32) * q_BTNH.shape[3] ** -0.5).astype(q_BTNH.dtype)
        q_BNTH, k_BKTH, v_BKTH = (pad(x).swapaxes(1, 2) for x in (scaled_BTNH, k_BTKH, v_BTKH))
        attend_ring = make_ring_attend(context, lambda _: kernel)
        out_BTNH = attend_ring(q_BNTH, k_BKTH, v_BKTH, pad(segment_ids_BT, PADDING_SEGMENT)).swapaxes(1, 2)
        return flat(by_chunk(out_BTNH)[:, :, :chunk])

    return attend


class PartialAttention(NamedTuple):
    """Attention to the keys processed so far, float32."""

    out_BNTH: jax.Array
    logsumexp_BNT: jax.Array


class ChunkPair(NamedTuple):
    """A chunk of queries and a chunk of keys visible to them, as indices of the chunks on their devices."""

    queries: int | jax.Array
    keys: int | jax.Array
    distance: int | jax.Array  # distance in chunks; the Python int 0 for a chunk and itself


@dataclasses.dataclass(frozen=True)
class SplashRingKernel:
    """RingKernel for scaled queries [B, N, T, H]."""

    context: ContextAxis
    chunk: int  # positions per chunk, including padding
    chunk_stride: int  # positions per chunk, without padding
    softcap: float | None
    window: int | None
    blocks: Blocks
    interpret: bool
    value_dim: int  # head dim of values and outputs

    def init(self, q_BNTH) -> PartialAttention:
        """Returns the state before the first key."""
        shape = q_BNTH.shape[:3]
        return PartialAttention(jnp.zeros((*shape, self.value_dim), F32), jnp.full(shape, MASK_VALUE, F32))

    def accumulate(self, state: PartialAttention, q_BNTH, kv: KVShard, ids_BT, step) -> PartialAttention:
        """Returns the state after processing these keys."""
        for pair in self.pairs(step):
            kernels = self.kernels(pair, q_BNTH)
            q_BNtH, queries_Bt = self.chunk_at(q_BNTH, pair.queries), self.chunk_at(ids_BT, pair.queries, axis=1)
            k_BKtH, v_BKtH, keys_Bt = self.kv_chunk_at(kv, pair.keys)
            out_BNtH, logsumexp_BNt = kernels.forward(q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt)
            before = PartialAttention(*(self.chunk_at(x, pair.queries) for x in state))
            after = merge_partial(before, out_BNtH, logsumexp_BNt)
            state = PartialAttention(*(self.set_chunk(x, pair.queries, part) for x, part in zip(state, after)))
        return state

    def finalize(self, state: PartialAttention, q_BNTH):
        """Returns (out_BNTH in q.dtype, logsumexp_BNT)."""
        return state.out_BNTH.astype(q_BNTH.dtype), state.logsumexp_BNT

    def delta(self, out_BNTH, dout_BNTH):
        """Returns float32[B, N, T], sum(out * dout) of each query."""
        return jnp.sum(out_BNTH.astype(F32) * dout_BNTH.astype(F32), axis=-1)

    def accumulate_grads(self, dq_BNTH, q_BNTH, kv: KVShard, ids_BT, step, logsumexp_BNT, delta_BNT, dout_BNTH):
        """Returns (dq_BNTH including these keys, dk_BKTH, dv_BKTH), float32."""
        dk_BKTH, dv_BKTH = (jnp.zeros(x.shape, F32) for x in kv[:2])
        add = lambda x, n, part: self.set_chunk(x, n, self.chunk_at(x, n) + part.astype(F32))
        for pair in self.pairs(step):
            query_arrays = q_BNTH, logsumexp_BNT, delta_BNT, dout_BNTH
            q_BNtH, *residuals = (self.chunk_at(x, pair.queries) for x in query_arrays)
            queries_Bt = self.chunk_at(ids_BT, pair.queries, axis=1)
            k_BKtH, v_BKtH, keys_Bt = self.kv_chunk_at(kv, pair.keys)
            grads = self.kernels(pair, q_BNTH).backward(q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt, *residuals)
            dq_BNTH = add(dq_BNTH, pair.queries, grads[0])
            dk_BKTH, dv_BKTH = add(dk_BKTH, pair.keys, grads[1]), add(dv_BKTH, pair.keys, grads[2])
        return dq_BNTH, dk_BKTH, dv_BKTH

    def pairs(self, step: int | jax.Array) -> list[ChunkPair]:
        """Returns the visible pairs of local query chunks and key chunks of the device `step` ring steps before."""
        device, size = self.context.index(), self.context.size
        last = 2 * size - 1
        if isinstance(step, int) and step == 0:
            return [ChunkPair(0, 0, 0), ChunkPair(1, 1, 0), ChunkPair(1, 0, last - 2 * device)]
        source = (device - step) % size
        late = jnp.int32(source > device)  # the second pair has two late chunks (1) or two early chunks (0)
        return [ChunkPair(1, 0, last - device - source), ChunkPair(late, late, jnp.abs(device - source))]

    def kernels(self, pair: ChunkPair, q_BNTH) -> "SplashKernels":
        """Returns the kernels for one pair of chunks."""
        sizes = block_sizes(self.chunk, self.blocks, q_BNTH.dtype.itemsize, q_BNTH.shape[3], self.window)
        is_diagonal = isinstance(pair.distance, int)
        if is_diagonal:
            starts, number = np.zeros(1, np.int32), 0
        elif self.window is None:
            starts, number = np.full(1, self.chunk_stride, np.int32), 0
        else:
            starts, number = np.arange(2 * self.context.size, dtype=np.int32) * self.chunk_stride, pair.distance
        tables = make_tables(starts[:, None], self.chunk, self.chunk, self.window, sizes)
        masked = is_diagonal or self.window is not None
        positions_t = jnp.asarray(starts)[number] + jnp.arange(self.chunk, dtype=jnp.int32) if masked else None
        return SplashKernels(tables, number, positions_t, sizes, self.softcap, self.window, self.interpret)

    def chunk_at(self, x: jax.Array, number: int | jax.Array, axis: int = 2) -> jax.Array:
        """Returns chunk `number` of x."""
        return lax.dynamic_slice_in_dim(x, number * self.chunk, self.chunk, axis)

    def kv_chunk_at(self, kv: KVShard, number: int | jax.Array) -> KVShard:
        """Returns chunk `number` of keys and values."""
        return KVShard(*(self.chunk_at(x, number, axis) for x, axis in zip(kv, (2, 2, 1))))

    def set_chunk(self, x: jax.Array, number: int | jax.Array, part: jax.Array) -> jax.Array:
        """Returns x with chunk `number` replaced."""
        return lax.dynamic_update_slice_in_dim(x, part, number * self.chunk, axis=2)


def merge_partial(before: PartialAttention, out_BNtH, logsumexp_BNt) -> PartialAttention:
    """Merges attention over two sets of keys. Fully masked queries, with kernel output mean or nan, have weight 0."""
    valid_BNt = logsumexp_BNt > MASK_VALUE / 2
    logsumexp_BNt = jnp.where(valid_BNt, logsumexp_BNt, MASK_VALUE)
    out_BNtH = jnp.where(valid_BNt[..., None], out_BNtH.astype(F32), 0.0)
    lse_BNt = jnp.logaddexp(before.logsumexp_BNT, logsumexp_BNt)
    weight = lambda logsumexp: jnp.exp(logsumexp - lse_BNt)[..., None]
    return PartialAttention(before.out_BNTH * weight(before.logsumexp_BNT) + out_BNtH * weight(logsumexp_BNt), lse_BNt)


@dataclasses.dataclass(frozen=True)
class SplashKernels:
    """Splash kernels for a chunk of queries and a chunk of keys. Uses private forward and backward functions of JAX."""

    tables: KernelTables
    row: int | jax.Array  # index of the row in the tables
    positions_t: jax.Array | None  # positions of queries relative to the first key; None: no causal mask or window
    sizes: kernel_lib.BlockSizes
    softcap: float | None
    window: int | None
    interpret: bool

    def forward(self, q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt):
        """Returns (out_BNtH in q.dtype, logsumexp_BNt float32)."""

        def one_row(q_NtH, k_KtH, v_KtH, *ids):
            out_NtH, (logsumexp_Nt,) = kernel_lib._splash_attention_forward(
                self.mask_info(self.tables.fwd), q_NtH, k_KtH, v_KtH, kernel_lib.SegmentIds(*ids), None,
                is_mqa=False, block_sizes=self.sizes, residual_checkpoint_name=None, save_residuals=True,
                **self.kernel_args(),
            )  # fmt: skip
            return out_NtH, logsumexp_Nt

        with jax.named_scope(self.tables.scope):
            return jax.vmap(one_row)(q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt)

    def backward(self, q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt, logsumexp_BNt, delta_BNt, dout_BNtH):
        """Returns (dq_BNtH, dk_BKtH, dv_BKtH) in the dtypes of q, k, v. logsumexp_BNt: over all keys."""
        sizes = self.sizes
        q_dq, kv_dq, q_dkv, kv_dkv = sizes.block_q_dq, sizes.block_kv_dq, sizes.block_q_dkv, sizes.block_kv_dkv
        compute_dkv = sizes.block_kv_dkv_compute
        assert q_dq and kv_dq and q_dkv and kv_dkv and compute_dkv  # set by block_sizes()
        layouts: dict[str, Any] = dict(
            q_layout=sizes.q_layout, k_layout=sizes.k_layout, v_layout=sizes.v_layout, is_mqa=False
        )

        def one_row(q_NtH, k_KtH, v_KtH, queries_t, keys_t, logsumexp_Nt, delta_Nt, dout_NtH):
            ids = kernel_lib.SegmentIds(queries_t, keys_t)
            args = q_NtH, k_KtH, v_KtH, ids, None, logsumexp_Nt, dout_NtH, delta_Nt
            kernel_args = self.kernel_args() | layouts
            _, dk_KtH, dv_KtH = kernel_lib._splash_attention_bwd_dkv(
                *args, mask_info=self.mask_info(self.tables.dkv), bq=q_dkv, bkv=kv_dkv,
                bkv_compute=compute_dkv, use_fused_bwd_kernel=False, **kernel_args,
            )  # fmt: skip
            dq_NtH = kernel_lib._splash_attention_bwd_dq(
                *args, mask_info=self.mask_info(self.tables.dq), bq=q_dq, bkv=kv_dq, **kernel_args
            )
            return dq_NtH, dk_KtH, dv_KtH

        with jax.named_scope(self.tables.scope):
            rows = q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt, logsumexp_BNt, delta_BNt, dout_BNtH
            return jax.vmap(one_row)(*rows)

    def mask_info(self, tables: BlockTables) -> info_lib.MaskInfo:
        """Returns the MaskInfo of this device."""
        local_table = lambda table: jnp.asarray(table)[self.row]
        positions_t: Any = self.positions_t  # typed as a numpy array, but the kernel accepts a jax.Array
        return info_lib.MaskInfo(local_table(tables.block), None, local_table(tables.active), None, positions_t)

    def kernel_args(self) -> dict:
        """Returns the arguments that all three kernels share."""
        return dict(
            mask_value=MASK_VALUE,
            attn_logits_soft_cap=self.softcap,
            mask_function=None if self.positions_t is None else causal_mask_function(self.window),
            interpret=self.interpret,
        )
