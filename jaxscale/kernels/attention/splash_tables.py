"""Tables of the visible blocks, which the splash kernel (splash.py) prefetches, computed for every device.

JAX computes them from the mask of every position, which takes two minutes for rows of 131,072.

C devices  c chunks of a device  q query blocks  k key blocks  s steps of a kernel
"""

import functools
from typing import NamedTuple

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib


class BlockTables(NamedTuple):
    """The visible blocks of one kernel, for every device."""

    block: np.ndarray  # int[C, 1, ...]: index of a key block (fwd, dq) or query block (dkv)
    active: np.ndarray  # int8, same shape: 1, or 0 for a padding step


class KernelTables(NamedTuple):
    """Tables of the forward kernel and of the two backward kernels."""

    fwd: BlockTables
    dq: BlockTables
    dkv: BlockTables

    @property
    def scope(self) -> str:
        """Name scope with the number of visible blocks of each kernel, for tools.preflight.hlo_costs."""
        counts = [int(table.active.reshape(len(table.active), -1).sum(axis=1, dtype=np.int64).max()) for table in self]
        return "visits_{}_{}_{}".format(*counts)


def make_tables(
    starts_Cc: np.ndarray, chunk: int, keys: int, window: int | None, sizes: kernel_lib.BlockSizes
) -> KernelTables:
    """Returns the tables of the three kernels. starts: first position of each chunk."""
    ranges = functools.partial(key_block_ranges, starts_Cc, chunk, keys, window)
    q_dq, kv_dq, q_dkv, kv_dkv = sizes.block_q_dq, sizes.block_kv_dq, sizes.block_q_dkv, sizes.block_kv_dkv
    assert q_dq and kv_dq and q_dkv and kv_dkv  # set by block_sizes()
    return KernelTables(
        by_queries(*ranges(sizes.block_q, sizes.block_kv)),
        by_queries(*ranges(q_dq, kv_dq)),
        by_keys(*ranges(q_dkv, kv_dkv), keys // kv_dkv),
    )


def key_block_ranges(
    starts_Cc: np.ndarray, chunk: int, keys: int, window: int | None, block_q: int, block_kv: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int[C, q]: the first and the last visible key block of each query block."""
    start_Cq = (starts_Cc[:, :, None] + np.arange(0, chunk, block_q)[None, None]).reshape(len(starts_Cc), -1)
    first_Cq = np.zeros_like(start_Cq) if window is None else np.maximum(0, start_Cq - window + 1)
    last_Cq = np.minimum(start_Cq + block_q, keys) - 1
    return first_Cq // block_kv, last_Cq // block_kv


def by_queries(first_Cq: np.ndarray, last_Cq: np.ndarray) -> BlockTables:
    """Returns tables [C, 1, q, s]: the key blocks of each query block, ascending."""
    counts_Cq = last_Cq - first_Cq + 1
    step_s = np.arange(counts_Cq.max())
    active_Cqs = step_s < counts_Cq[:, :, None]
    next_Cq = np.concatenate([first_Cq[:, 1:], first_Cq[:, :1]], axis=1)  # prefetched in padding steps
    next_Cq = np.minimum(next_Cq, last_Cq.max())  # in range also where all keys are before the window
    block_Cqs = np.where(active_Cqs, first_Cq[:, :, None] + step_s, next_Cq[:, :, None])
    return BlockTables(smallest_dtype(block_Cqs)[:, None], active_Cqs.astype(np.int8)[:, None])


def by_keys(first_Cq: np.ndarray, last_Cq: np.ndarray, blocks: int) -> BlockTables:
    """Returns tables [C, 1, s, k]: the query blocks of each key block, ascending, in the last steps."""
    key_k = np.arange(blocks)
    visible_Cqk = (first_Cq[:, :, None] <= key_k) & (key_k <= last_Cq[:, :, None])
    steps = visible_Cqk.sum(axis=1).max()
    block_Csk = np.argsort(visible_Cqk, axis=1, kind="stable")[:, -steps:]
    active_Csk = np.take_along_axis(visible_Cqk, block_Csk, axis=1)
    first_C1k = np.argmax(visible_Cqk, axis=1)[:, None]
    block_Csk = np.where(active_Csk, block_Csk, first_C1k)
    return BlockTables(smallest_dtype(block_Csk)[:, None], active_Csk.astype(np.int8)[:, None])


def smallest_dtype(table: np.ndarray) -> np.ndarray:
    """Casts to the smallest integer dtype that fits: tables are in SMEM."""
    fitting = [dtype for dtype in (np.int8, np.int16) if table.max() <= np.iinfo(dtype).max]
    return table.astype([*fitting, np.int32][0])
