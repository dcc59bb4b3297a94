"""Which blocks the splash kernel visits (splash.py): the tables that it reads, made by arithmetic for every device.

Its library makes them by looking at every position of every block, which takes two minutes for rows of 131,072.

C devices  c chunks of a device  q blocks of queries  k blocks of keys  s steps of a kernel
"""

import functools
from typing import NamedTuple

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib


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


def make_tables(
    starts_Cc: np.ndarray, chunk: int, keys: int, window: int | None, sizes: kernel_lib.BlockSizes
) -> KernelTables:
    """The tables of the three kernels, for every device. starts: the place in the row where each chunk begins."""
    spans = functools.partial(key_spans, starts_Cc, chunk, keys, window)
    q_dq, kv_dq, q_dkv, kv_dkv = sizes.block_q_dq, sizes.block_kv_dq, sizes.block_q_dkv, sizes.block_kv_dkv
    assert q_dq and kv_dq and q_dkv and kv_dkv  # block_sizes() gives all of them
    return KernelTables(
        by_queries(*spans(sizes.block_q, sizes.block_kv)),
        by_queries(*spans(q_dq, kv_dq)),
        by_keys(*spans(q_dkv, kv_dkv), keys // kv_dkv),
    )


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
    following_Cq = np.minimum(following_Cq, newest_Cq.max())  # also where all keys lie behind the window
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
