"""Exact causal attention in unrolled blocks, fast on XLA:CPU.

Each query block attends to the keys up to the end of the block, so the masked half is not computed. The backward pass
reads only q, k, v, the output and the logsumexp of the scores. It computes transposed scores, so that no matmul needs a
transposed operand. A few rows of the batch, whose scores fit into the cache, are processed at a time.

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim
R = T * G: the queries of a key-value head; r and s are the queries and the keys of one block
The head dim of values and outputs may differ from H.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale import units
from jaxscale.kernels.attention.xla import MASK_VALUE
from jaxscale.kernels.config import ATTENTION_OUT

F32 = jnp.float32
MIN_BLOCK = 128  # 64 and 256 were slower at T=512, H=64 in both dtypes (2 cores, 2026-11-20)
# Maximum float32 scores of one block, for all rows that are processed together. With one row of 256 at a time, many
# small dependent operations make a step take 1.17 times as long (T of `bench step`, 2 cores, jax 0.10.2, 2026-11-24).
SCORE_BYTES = 2 << 20
MAX_BLOCKS = 8  # blocks are unrolled, so longer sequences have longer blocks


def make_attend(*, softcap: float | None = None, window: int | None = None, block_size: int | None = None):
    """Returns attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH, equivalent to xla.make_attend().

    The batch must not be sharded, because the loop over the batch would all-gather it.
    """

    @jax.custom_vjp
    def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        return forward(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)[0]

    def forward(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        q_BKTGH, k_BKSH, v_BKSH = group_heads(q_BTNH, k_BSKH.shape[2]), k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
        cfg = BlockSettings(block_size or default_block(q_BTNH.shape[1]), softcap, window)
        masks = query_block_masks(cfg, segment_ids_BT)
        run = functools.partial(forward_blocks, cfg)
        results = map_batch_chunks(run, cfg.block_size, q_BKTGH, k_BKSH, v_BKSH, masks)
        out_BKTGH, lse_BKTG = (checkpoint_name(result, ATTENTION_OUT) for result in results)
        return ungroup_heads(out_BKTGH), (q_BKTGH, k_BKSH, v_BKSH, out_BKTGH, lse_BKTG, segment_ids_BT)

    def backward(saved, dout_BTNH):
        *arrays, segment_ids_BT = saved
        cfg = BlockSettings(block_size or default_block(dout_BTNH.shape[1]), softcap, window)
        dout_BKTGH = group_heads(dout_BTNH, arrays[1].shape[1])
        masks = key_block_masks(cfg, segment_ids_BT)
        run = functools.partial(backward_blocks, cfg)
        dq_BKTGH, dk_BKSH, dv_BKSH = map_batch_chunks(run, cfg.block_size, *arrays, dout_BKTGH, masks)
        return ungroup_heads(dq_BKTGH), dk_BKSH.swapaxes(1, 2), dv_BKSH.swapaxes(1, 2), None

    attend.defvjp(forward, backward)
    return attend


@dataclasses.dataclass(frozen=True)
class BlockSettings:
    """Static settings of blockwise attention."""

    block_size: int  # positions
    softcap: float | None
    window: int | None

    def key_range(self, begin: int, end: int) -> tuple[int, int]:
        """Returns (begin, end) of the keys visible to queries begin to end."""
        return 0 if self.window is None else max(0, begin - self.window + 1), end

    def query_range(self, begin: int, end: int, length: int) -> tuple[int, int]:
        """Returns the range (begin, end) of queries that attend to keys in [begin, end), extended to whole blocks."""
        if self.window is None:
            return begin, length
        return begin, min(length, begin + self.block_size * -(-(end - begin + self.window - 1) // self.block_size))


def forward_blocks(cfg: BlockSettings, q_BKTGH, k_BKSH, v_BKSH, masks):
    """Returns (out_BKTGH in v.dtype, logsumexp_BKTG float32). masks: from query_block_masks()."""
    B, K, T, G, H = q_BKTGH.shape
    outs, lses = [], []
    for (begin, end), mask_Brs in zip(block_ranges(T, cfg.block_size), masks, strict=True):
        first_key, _ = cfg.key_range(begin, end)
        q_BKrH = q_BKTGH[:, :, begin:end].reshape(B, K, -1, H)
        qk_BKrs = lax.optimization_barrier(einsum_f32("BKrH,BKsH->BKrs", q_BKrH, k_BKSH[:, :, first_key:end]))
        mask_BKrs = jnp.repeat(mask_Brs, G, axis=1)[:, None]
        score_BKrs = jnp.where(mask_BKrs, scale_and_cap(qk_BKrs, H, cfg.softcap)[0], MASK_VALUE)
        max_BKr1 = jnp.max(score_BKrs, axis=-1, keepdims=True)
        # The barrier writes exp once in v.dtype. Without it XLA computes exp twice, for the sum and for the matmul.
        prob_BKrs = lax.optimization_barrier(jnp.exp(score_BKrs - max_BKr1).astype(v_BKSH.dtype))
        sum_BKr1 = jnp.sum(prob_BKrs, axis=-1, keepdims=True, dtype=F32)
        out_BKrH = einsum_f32("BKrs,BKsH->BKrH", prob_BKrs, v_BKSH[:, :, first_key:end]) / sum_BKr1
        outs.append(out_BKrH.astype(v_BKSH.dtype).reshape(B, K, end - begin, G, -1))
        lses.append((max_BKr1 + jnp.log(sum_BKr1)).reshape(B, K, end - begin, G))
    return jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=2)


class BackwardArrays(NamedTuple):
    """Arrays that the backward passes of all key blocks read."""

    q_BKRH: jax.Array
    dout_BKRH: jax.Array
    lse_BK1R: jax.Array
    delta_BK1R: jax.Array  # sum(out * dout) of each query
    k_BKSH: jax.Array
    v_BKSH: jax.Array
    k_BKHS: jax.Array


def merge_groups(x_BKTGH: jax.Array) -> jax.Array:
    """Returns [B, K, T * G, H]."""
    return x_BKTGH.reshape(*x_BKTGH.shape[:2], -1, x_BKTGH.shape[-1])


def backward_blocks(cfg: BlockSettings, q_BKTGH, k_BKSH, v_BKSH, out_BKTGH, lse_BKTG, dout_BKTGH, masks):
    """Returns (dq_BKTGH, dk_BKSH, dv_BKSH) in the dtypes of q, k, v. masks: from key_block_masks()."""
    T, G = q_BKTGH.shape[2:4]
    ranges = block_ranges(T, cfg.block_size)
    arrays = BackwardArrays(
        merge_groups(q_BKTGH),
        merge_groups(dout_BKTGH),
        lse_BKTG.reshape(*lse_BKTG.shape[:2], 1, -1),
        jnp.sum(dout_BKTGH.astype(F32) * out_BKTGH.astype(F32), axis=-1).reshape(*lse_BKTG.shape[:2], 1, -1),
        k_BKSH,
        v_BKSH,
        lax.optimization_barrier(k_BKSH.swapaxes(2, 3)),
    )
    dks, dvs, dq_parts = [], [], [[] for _ in ranges]
    for keys, mask_Bsr in zip(ranges, masks, strict=True):
        begin, end = cfg.query_range(*keys, T)
        dq_BKHr, dk_BKsH, dv_BKsH = backward_block(cfg, arrays, slice(begin * G, end * G), slice(*keys), mask_Bsr)
        dks.append(dk_BKsH)
        dvs.append(dv_BKsH)
        for i in range(begin // cfg.block_size, -(-end // cfg.block_size)):
            dq_parts[i].append(dq_BKHr[..., slice(*(G * (position - begin) for position in ranges[i]))])
    dq_BKHR = jnp.concatenate([functools.reduce(jnp.add, part) for part in dq_parts], axis=-1)
    dq_BKTGH = dq_BKHR.swapaxes(2, 3).astype(q_BKTGH.dtype).reshape(q_BKTGH.shape)
    return dq_BKTGH, jnp.concatenate(dks, axis=2), jnp.concatenate(dvs, axis=2)


def backward_block(cfg: BlockSettings, arrays: BackwardArrays, queries: slice, keys: slice, mask_Bsr: jax.Array):
    """Returns (float32 dq_BKHr, dk_BKsH, dv_BKsH) of a block of keys and the queries that attend to its keys."""
    q_BKrH, dout_BKrH = arrays.q_BKRH[:, :, queries], arrays.dout_BKRH[:, :, queries]
    dtype, group = q_BKrH.dtype, q_BKrH.shape[2] // mask_Bsr.shape[2]
    qk_BKsr = lax.optimization_barrier(einsum_f32("BKsH,BKrH->BKsr", arrays.k_BKSH[:, :, keys], q_BKrH))
    score_BKsr, dscore_dqk_BKsr = scale_and_cap(qk_BKsr, q_BKrH.shape[-1], cfg.softcap)
    mask_BKsr = jnp.repeat(mask_Bsr, group, axis=2)[:, None]
    masked_BKsr = jnp.where(mask_BKsr, score_BKsr - arrays.lse_BK1R[..., queries], MASK_VALUE)
    prob_BKsr = lax.optimization_barrier(jnp.exp(masked_BKsr).astype(dtype))
    dv_BKsH = einsum_f32("BKsr,BKrH->BKsH", prob_BKsr, dout_BKrH).astype(arrays.v_BKSH.dtype)
    dprob_BKsr = einsum_f32("BKsH,BKrH->BKsr", arrays.v_BKSH[:, :, keys], dout_BKrH)
    dqk_BKsr = prob_BKsr.astype(F32) * (dprob_BKsr - arrays.delta_BK1R[..., queries]) * dscore_dqk_BKsr
    dqk_BKsr = lax.optimization_barrier(dqk_BKsr.astype(dtype))
    dk_BKsH = einsum_f32("BKsr,BKrH->BKsH", dqk_BKsr, q_BKrH).astype(arrays.k_BKSH.dtype)
    return einsum_f32("BKHs,BKsr->BKHr", arrays.k_BKHS[..., keys], dqk_BKsr), dk_BKsH, dv_BKsH


def einsum_f32(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns a float32 einsum. For a bfloat16 result, XLA:CPU would first convert both operands to float32."""
    return jnp.einsum(spec, left, right, preferred_element_type=F32)


def scale_and_cap(qk: jax.Array, head_dim: int, softcap: float | None) -> tuple[jax.Array, jax.Array | float]:
    """Returns (score, d score / d qk). The score is qk scaled, and capped if there is a softcap."""
    scale = head_dim**-0.5
    if softcap is None:
        return qk * scale, scale
    tanh = jnp.tanh(qk * (scale / softcap))
    return softcap * tanh, scale * (1 - tanh * tanh)


def query_block_masks(cfg: BlockSettings, segment_ids_BT: jax.Array) -> list[jax.Array]:
    """Returns the mask of each block of queries, bool [B, queries, keys].

    Masks are computed before the loop over sequences, in which XLA:CPU would not vectorize comparisons. Attention over
    512 positions would take 1.4 to 1.8 times as long (2 cores, jax 0.10.2, 2026-11-25).
    """
    spans = block_ranges(segment_ids_BT.shape[1], cfg.block_size)
    return [block_mask(cfg, segment_ids_BT, span, cfg.key_range(*span)) for span in spans]


def key_block_masks(cfg: BlockSettings, segment_ids_BT: jax.Array) -> list[jax.Array]:
    """Returns the mask of each block of keys, bool [B, keys, queries]."""
    length = segment_ids_BT.shape[1]
    spans = block_ranges(length, cfg.block_size)
    return [block_mask(cfg, segment_ids_BT, cfg.query_range(*span, length), span).swapaxes(1, 2) for span in spans]


def block_mask(cfg: BlockSettings, segment_ids_BT: jax.Array, queries: tuple[int, int], keys: tuple[int, int]):
    """Returns bool [B, queries, keys], True where a query attends to a key. queries, keys: (begin, end)."""
    distance = np.arange(*queries)[:, None] - np.arange(*keys)[None, :]
    in_window = (distance >= 0) & (distance < (cfg.window or segment_ids_BT.shape[1]))
    return (segment_ids_BT[:, slice(*queries), None] == segment_ids_BT[:, None, slice(*keys)]) & in_window[None]


def block_ranges(length: int, block_size: int) -> list[tuple[int, int]]:
    """Returns (begin, end) of each block. The last block may be shorter."""
    return [(begin, min(begin + block_size, length)) for begin in range(0, length, block_size)]


def default_block(length: int) -> int:
    """Returns the block length: the smallest multiple of MIN_BLOCK that gives at most MAX_BLOCKS blocks."""
    return MIN_BLOCK * max(1, -(-length // (MIN_BLOCK * MAX_BLOCKS)))


def map_batch_chunks(function, block_size: int, *arrays: Any):
    """Maps function(*arrays) over equal chunks of the batch, so that scores of a block fit in SCORE_BYTES."""
    B, K, T, G, _ = arrays[0].shape
    size = max(size for size in units.divisors(B) if size == 1 or size * K * G * block_size * T * 4 <= SCORE_BYTES)
    if size == B:
        return function(*arrays)
    grouped = jax.tree.map(lambda array: array.reshape(B // size, size, *array.shape[1:]), arrays)
    results = lax.map(lambda group: function(*group), grouped)
    return jax.tree.map(lambda array: array.reshape(B, *array.shape[2:]), results)


def group_heads(x_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """Returns x_BKTGH, with query heads grouped by key-value head."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, num_kv_heads, N // num_kv_heads, H).swapaxes(1, 2)


def ungroup_heads(x_BKTGH: jax.Array) -> jax.Array:
    """Inverse of group_heads()."""
    B, K, T, G, H = x_BKTGH.shape
    return x_BKTGH.swapaxes(1, 2).reshape(B, T, K * G, H)
