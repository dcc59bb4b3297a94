"""The splash kernel for queries that are some of a row's, in chunks, and keys that are all of it (splash.py).

The kernel reads which blocks to visit from tables, and masks by the places of its queries. Its library makes tables by
looking at every block of a mask, which takes a minute at 65,536 positions and grows with their square; here they are
made by arithmetic, for every device, and each takes its own as the program runs.

B batch  T position of a query  S of a key  N query heads  K key-value heads  H head dim  C devices
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info_lib

from jaxscale.ops.attention.shared_rows import AttendStanding, Standing
from jaxscale.ops.attention.splash import ANY_CHIP, Blocks, block_sizes, padded_length
from jaxscale.ops.attention.xla import Scope
from jaxscale.ops.config import ATTENTION_OUT


class Tables(NamedTuple):
    """Of the blocks that a kernel visits, for every device."""

    block: np.ndarray  # int[C, 1, ...]: which block of keys (forward, queries) or of queries (keys and values)
    visited: np.ndarray  # int8, of the same shape: 1, or 0 for a step in which nothing is done


class KernelTables(NamedTuple):
    """Of the kernels forward, for the gradients of queries, and for those of keys and values."""

    fwd: Tables
    dq: Tables
    dkv: Tables

    @property
    def scope(self) -> str:
        """For the program's text, which leaves out tables: how many blocks each kernel visits (ahead.hlo_costs)."""
        most = [int(table.visited.reshape(len(table.visited), -1).sum(axis=1, dtype=np.int64).max()) for table in self]
        return "visits_{}_{}_{}".format(*most)


def splash_standing(
    *, softcap: float | None, window: int | None, blocks: Blocks = ANY_CHIP, interpret: bool = False
) -> AttendStanding:
    """In splash's blocks. Chunks and keys are filled up to whole blocks, by positions that nobody reads."""

    def attend_standing(q_BTNH, k_BSKH, v_BSKH, scope: Scope, standing: Standing):
        chunks, chunk = standing.starts_Cc.shape[1], standing.chunk
        long_chunk, S = padded_length(chunk), k_BSKH.shape[1]
        by_chunk = lambda x: x.reshape(x.shape[0] * chunks, chunk, *x.shape[2:])
        fill = lambda x, length: jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        of_queries = lambda x: fill(by_chunk(x), long_chunk).reshape(x.shape[0], chunks * long_chunk, *x.shape[2:])
        of_keys = lambda x: fill(x, padded_length(S))
        scaled_BTNH = (q_BTNH.astype(jnp.float32) * q_BTNH.shape[3] ** -0.5).astype(q_BTNH.dtype)
        q_BNTH = of_queries(scaled_BTNH).swapaxes(1, 2)
        k_BKSH, v_BKSH = (of_keys(x).swapaxes(1, 2) for x in (k_BSKH, v_BSKH))
        segments = kernel_lib.SegmentIds(q=of_queries(scope.segment_ids_BT), kv=of_keys(scope.key_segment_ids_BS))
        sizes = block_sizes(long_chunk, blocks, q_BTNH.dtype.itemsize, q_BTNH.shape[3], window, keys=padded_length(S))
        longer = Standing(standing.starts_Cc, long_chunk, standing.device)
        tables = make_tables(longer, padded_length(S), window, sizes)
        kernel = make_kernel(tables, longer, sizes, softcap=softcap, window=window, interpret=interpret)
        with jax.named_scope(tables.scope):
            out_BNTH = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids))(q_BNTH, k_BKSH, v_BKSH, segments)
        out = out_BNTH.swapaxes(1, 2).reshape(-1, long_chunk, *q_BTNH.shape[2:])[:, :chunk]
        return out.reshape(q_BTNH.shape)

    return attend_standing


def make_tables(standing: Standing, keys: int, window: int | None, sizes: kernel_lib.BlockSizes) -> KernelTables:
    """The tables of the three kernels, for every device."""
    spans = functools.partial(key_spans, standing.starts_Cc, standing.chunk, keys, window)
    return KernelTables(
        by_queries(*spans(sizes.block_q, sizes.block_kv)),
        by_queries(*spans(sizes.block_q_dq, sizes.block_kv_dq)),
        by_keys(*spans(sizes.block_q_dkv, sizes.block_kv_dkv), keys // sizes.block_kv_dkv),
    )


def make_kernel(
    tables: KernelTables,
    standing: Standing,
    sizes: kernel_lib.BlockSizes,
    *,
    softcap: float | None,
    window: int | None,
    interpret: bool,
) -> kernel_lib.SplashAttentionKernel:
    """The kernel of this device."""
    own = lambda table: jnp.asarray(table)[standing.device]
    info = lambda found: info_lib.MaskInfo(own(found.block), None, own(found.visited), None, standing.places_T)
    return kernel_lib.SplashAttentionKernel(
        *map(info, tables),
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=kernel_lib.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=ATTENTION_OUT,
        mask_function=seen_within(window),
        interpret=interpret,
    )


@functools.cache  # one function for each, since programs are told apart by it
def seen_within(window: int | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """seen(places of queries, places of keys) -> bool."""
    if window is None:
        return lambda queries, keys: queries >= keys
    return lambda queries, keys: (queries >= keys) & (queries - keys < window)


def key_spans(
    starts_Cc: np.ndarray, chunk: int, keys: int, window: int | None, block_q: int, block_kv: int
) -> tuple[np.ndarray, np.ndarray]:
    """int[C, blocks of queries]: the first and the last block of keys that one of the queries sees."""
    first_Cq = (starts_Cc[:, :, None] + np.arange(0, chunk, block_q)[None, None]).reshape(len(starts_Cc), -1)
    oldest_Cq = np.zeros_like(first_Cq) if window is None else np.maximum(0, first_Cq - window + 1)
    newest_Cq = np.minimum(first_Cq + block_q, keys) - 1
    return oldest_Cq // block_kv, newest_Cq // block_kv


def by_queries(oldest_Cq: np.ndarray, newest_Cq: np.ndarray) -> Tables:
    """Of [C, 1, q, steps]: the blocks of keys of each block of queries in their order."""
    counts_Cq = newest_Cq - oldest_Cq + 1
    step_s = np.arange(counts_Cq.max())
    visited_Cqs = step_s < counts_Cq[:, :, None]
    following_Cq = np.concatenate([oldest_Cq[:, 1:], oldest_Cq[:, :1]], axis=1)  # is fetched while nothing is done
    block_Cqs = np.where(visited_Cqs, oldest_Cq[:, :, None] + step_s, following_Cq[:, :, None])
    return Tables(smallest(block_Cqs)[:, None], visited_Cqs.astype(np.int8)[:, None])


def by_keys(oldest_Cq: np.ndarray, newest_Cq: np.ndarray, blocks: int) -> Tables:
    """Of [C, 1, steps, blocks]: the blocks of queries of each block of keys in their order, at the last steps."""
    key_k = np.arange(blocks)
    seen_Cqk = (oldest_Cq[:, :, None] <= key_k) & (key_k <= newest_Cq[:, :, None])
    steps = seen_Cqk.sum(axis=1).max()
    block_Csk = np.argsort(seen_Cqk, axis=1, kind="stable")[:, -steps:]
    visited_Csk = np.take_along_axis(seen_Cqk, block_Csk, axis=1)
    first_C1k = np.argmax(seen_Cqk, axis=1)[:, None]
    block_Csk = np.where(visited_Csk, block_Csk, first_C1k)
    return Tables(smallest(block_Csk)[:, None], visited_Csk.astype(np.int8)[:, None])


def smallest(table: np.ndarray) -> np.ndarray:
    """The table in the narrowest type that holds it: tables lie in a small memory."""
    narrow = [dtype for dtype in (np.int8, np.int16) if table.max() <= np.iinfo(dtype).max]
    return table.astype([*narrow, np.int32][0])
