"""Exact causal attention in blocks, the form that XLA:CPU runs fast.

Query blocks see only the keys up to their end, so the masked half is never computed. Between forward and backward only
q, k, v, the result and the logarithm of each softmax sum are kept. The backward works on transposed scores, which makes
each of its products a plain one. A few rows of the batch are taken at a time: their scores stay in the cache.

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim
R = T * G: the queries that share a key-value head; r and s are the rows and the keys of one block
Values and results may have another size than H: that of their own last axis.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale import units
from jaxscale.ops.attention.xla import HIDDEN
from jaxscale.ops.config import ATTENTION_OUT

F32 = jnp.float32
SMALLEST_BLOCK = 128  # 64 and 256 were slower at T=512, H=64 in both dtypes (2 cores, 2026-11-20)
# Of the float32 scores of one block, for the rows that are taken together. One at a time, rows of 256 mean many small
# operations that wait for each other: a step takes 1.17 times as long (T of `bench step`, 2 cores, jax 0.10.2,
# 2026-11-24).
SCORE_BYTES = 2 << 20
MOST_BLOCKS = 8  # each block is compiled on its own: longer rows get longer blocks


def make_attend(*, softcap: float | None = None, window: int | None = None, block_size: int | None = None):
    """attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH with the values of xla.make_attend.

    For rows on one device: the loop over them would gather a batch that is spread.
    """

    @jax.custom_vjp
    def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        return keep(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)[0]

    def keep(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        q_BKTGH, k_BKSH, v_BKSH = group_heads(q_BTNH, k_BSKH.shape[2]), k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
        cfg = BlockSettings(block_size or default_block(q_BTNH.shape[1]), softcap, window)
        seen = seen_by_queries(cfg, segment_ids_BT)
        results = over_rows(functools.partial(forward_blocks, cfg), cfg.step, q_BKTGH, k_BKSH, v_BKSH, seen)
        out_BKTGH, lse_BKTG = (checkpoint_name(result, ATTENTION_OUT) for result in results)
        return ungroup_heads(out_BKTGH), (q_BKTGH, k_BKSH, v_BKSH, out_BKTGH, lse_BKTG, segment_ids_BT)

    def backward(saved, dout_BTNH):
        *arrays, segment_ids_BT = saved
        cfg = BlockSettings(block_size or default_block(dout_BTNH.shape[1]), softcap, window)
        dout_BKTGH = group_heads(dout_BTNH, arrays[1].shape[1])
        seen = seen_by_keys(cfg, segment_ids_BT)
        results = over_rows(functools.partial(backward_blocks, cfg), cfg.step, *arrays, dout_BKTGH, seen)
        dq_BKTGH, dk_BKSH, dv_BKSH = results
        return ungroup_heads(dq_BKTGH), dk_BKSH.swapaxes(1, 2), dv_BKSH.swapaxes(1, 2), None

    attend.defvjp(keep, backward)
    return attend


@dataclasses.dataclass(frozen=True)
class BlockSettings:
    """What is fixed of an attention in blocks."""

    step: int  # positions of a block
    softcap: float | None
    window: int | None

    def keys_of(self, begin: int, end: int) -> tuple[int, int]:
        """The positions that some of those queries may see."""
        return 0 if self.window is None else max(0, begin - self.window + 1), end

    def queries_of(self, begin: int, end: int, length: int) -> tuple[int, int]:
        """The positions, in whole blocks, that may see some of those keys."""
        if self.window is None:
            return begin, length
        return begin, min(length, begin + self.step * -(-(end - begin + self.window - 1) // self.step))


def forward_blocks(cfg: BlockSettings, q_BKTGH, k_BKSH, v_BKSH, seen):
    """(out_BKTGH in v.dtype, logsumexp_BKTG float32). seen: of seen_by_queries."""
    B, K, T, G, H = q_BKTGH.shape
    outs, lses = [], []
    for (begin, end), seen_Brs in zip(blocks(T, cfg.step), seen, strict=True):
        oldest, _ = cfg.keys_of(begin, end)
        q_BKrH = q_BKTGH[:, :, begin:end].reshape(B, K, -1, H)
        raw_BKrs = lax.optimization_barrier(product("BKrH,BKsH->BKrs", q_BKrH, k_BKSH[:, :, oldest:end]))
        seen_BKrs = jnp.repeat(seen_Brs, G, axis=1)[:, None]
        score_BKrs = jnp.where(seen_BKrs, soften(raw_BKrs, H, cfg.softcap)[0], HIDDEN)
        top_BKr1 = jnp.max(score_BKrs, axis=-1, keepdims=True)
        # The barrier: written once in the narrow dtype, then read by the sum and by the product, not computed twice.
        share_BKrs = lax.optimization_barrier(jnp.exp(score_BKrs - top_BKr1).astype(v_BKSH.dtype))
        sum_BKr1 = jnp.sum(share_BKrs, axis=-1, keepdims=True, dtype=F32)
        out_BKrH = product("BKrs,BKsH->BKrH", share_BKrs, v_BKSH[:, :, oldest:end]) / sum_BKr1
        outs.append(out_BKrH.astype(v_BKSH.dtype).reshape(B, K, end - begin, G, -1))
        lses.append((top_BKr1 + jnp.log(sum_BKr1)).reshape(B, K, end - begin, G))
    return jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=2)


def backward_blocks(cfg: BlockSettings, q_BKTGH, k_BKSH, v_BKSH, out_BKTGH, lse_BKTG, dout_BKTGH, seen):
    """Gradients (dq_BKTGH, dk_BKSH, dv_BKSH) in the dtypes of q, k, v. seen: of seen_by_keys."""
    step, (B, K, T, G, H) = cfg.step, q_BKTGH.shape
    q_BKRH, dout_BKRH = (x.reshape(B, K, -1, x.shape[-1]) for x in (q_BKTGH, dout_BKTGH))
    lse_BK1R = lse_BKTG.reshape(B, K, 1, -1)
    drift_BK1R = jnp.sum(dout_BKTGH.astype(F32) * out_BKTGH.astype(F32), axis=-1).reshape(B, K, 1, -1)
    k_BKHS = lax.optimization_barrier(k_BKSH.swapaxes(2, 3))
    dks, dvs, parts = [], [], [[] for _ in blocks(T, step)]
    for (begin, end), seen_Bsr in zip(blocks(T, step), seen, strict=True):
        _, last = cfg.queries_of(begin, end, T)
        first, behind = begin * G, last * G
        q_BKrH, dout_BKrH = q_BKRH[:, :, first:behind], dout_BKRH[:, :, first:behind]
        raw_BKsr = lax.optimization_barrier(product("BKsH,BKrH->BKsr", k_BKSH[:, :, begin:end], q_BKrH))
        score_BKsr, slope_BKsr = soften(raw_BKsr, H, cfg.softcap)
        seen_BKsr = jnp.repeat(seen_Bsr, G, axis=2)[:, None]
        hidden_BKsr = jnp.where(seen_BKsr, score_BKsr - lse_BK1R[..., first:behind], HIDDEN)
        share_BKsr = lax.optimization_barrier(jnp.exp(hidden_BKsr).astype(q_BKTGH.dtype))
        dvs.append(product("BKsr,BKrH->BKsH", share_BKsr, dout_BKrH).astype(v_BKSH.dtype))
        dshare_BKsr = product("BKsH,BKrH->BKsr", v_BKSH[:, :, begin:end], dout_BKrH)
        draw_BKsr = share_BKsr.astype(F32) * (dshare_BKsr - drift_BK1R[..., first:behind]) * slope_BKsr
        draw_BKsr = lax.optimization_barrier(draw_BKsr.astype(q_BKTGH.dtype))
        dks.append(product("BKsr,BKrH->BKsH", draw_BKsr, q_BKrH).astype(k_BKSH.dtype))
        dq_BKHr = product("BKHs,BKsr->BKHr", k_BKHS[..., begin:end], draw_BKsr)
        for i, (start, stop) in list(enumerate(blocks(T, step)))[begin // step : -(-last // step)]:
            parts[i].append(dq_BKHr[..., start * G - first : stop * G - first])
    dq_BKHR = jnp.concatenate([functools.reduce(jnp.add, part) for part in parts], axis=-1)
    dq_BKTGH = dq_BKHR.swapaxes(2, 3).astype(q_BKTGH.dtype).reshape(q_BKTGH.shape)
    return dq_BKTGH, jnp.concatenate(dks, axis=2), jnp.concatenate(dvs, axis=2)


def product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """The einsum with a float32 result: bfloat16 results would make XLA:CPU widen both operands first."""
    return jnp.einsum(spec, left, right, preferred_element_type=F32)


def soften(raw: jax.Array, head_dim: int, softcap: float | None) -> tuple[jax.Array, jax.Array | float]:
    """(score, its derivative by the raw product of query and key)."""
    scale = head_dim**-0.5
    if softcap is None:
        return raw * scale, scale
    tanh = jnp.tanh(raw * (scale / softcap))
    return softcap * tanh, scale * (1 - tanh * tanh)


def seen_by_queries(cfg: BlockSettings, segment_ids_BT: jax.Array) -> list[jax.Array]:
    """Of each block of queries, bool [B, queries, keys]: which keys they may look at.

    Made before the loop over rows: inside it XLA:CPU compares one number at a time, and an attention of 512 positions
    takes 1.4 times as long in float32, 1.8 times in bfloat16 (2 cores, jax 0.10.2, 2026-11-25).
    """
    spans = blocks(segment_ids_BT.shape[1], cfg.step)
    return [may_see(cfg, segment_ids_BT, span, cfg.keys_of(*span)) for span in spans]


def seen_by_keys(cfg: BlockSettings, segment_ids_BT: jax.Array) -> list[jax.Array]:
    """Of each block of keys, bool [B, keys, queries]: which queries may look at them."""
    length = segment_ids_BT.shape[1]
    spans = blocks(length, cfg.step)
    return [may_see(cfg, segment_ids_BT, cfg.queries_of(*span, length), span).swapaxes(1, 2) for span in spans]


def may_see(cfg: BlockSettings, segment_ids_BT: jax.Array, queries: tuple[int, int], keys: tuple[int, int]):
    """bool [B, queries, keys], each given as (begin, end)."""
    behind = np.arange(*queries)[:, None] - np.arange(*keys)[None, :]
    near = (behind >= 0) & (behind < (cfg.window or segment_ids_BT.shape[1]))
    return (segment_ids_BT[:, slice(*queries), None] == segment_ids_BT[:, None, slice(*keys)]) & near[None]


def blocks(length: int, step: int) -> list[tuple[int, int]]:
    """(begin, end) of each block of positions; the last may be shorter."""
    return [(begin, min(begin + step, length)) for begin in range(0, length, step)]


def default_block(length: int) -> int:
    """Positions per block: a multiple of SMALLEST_BLOCK that gives at most MOST_BLOCKS."""
    return SMALLEST_BLOCK * max(1, -(-length // (SMALLEST_BLOCK * MOST_BLOCKS)))


def over_rows(function, step: int, *arrays: Any):
    """function(*arrays), on as many rows at a time as have at most SCORE_BYTES of scores in a block of `step`, or one.

    Their number divides that of all rows.
    """
    B, K, T, G, _ = arrays[0].shape
    size = max(size for size in units.divisors(B) if size == 1 or size * K * G * step * T * 4 <= SCORE_BYTES)
    if size == B:
        return function(*arrays)
    grouped = jax.tree.map(lambda array: array.reshape(B // size, size, *array.shape[1:]), arrays)
    results = lax.map(lambda group: function(*group), grouped)
    return jax.tree.map(lambda array: array.reshape(B, *array.shape[2:]), results)


def group_heads(x_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """As x_BKTGH: the query heads of one key-value head stand together, position by position."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, num_kv_heads, N // num_kv_heads, H).swapaxes(1, 2)


def ungroup_heads(x_BKTGH: jax.Array) -> jax.Array:
    """The inverse of group_heads."""
    B, K, T, G, H = x_BKTGH.shape
    return x_BKTGH.swapaxes(1, 2).reshape(B, T, K * G, H)
