"""Splash attention, JAX's Pallas kernel for TPUs: scores stay in VMEM.

The kernel skips fully masked blocks, which are later keys and keys before a window. Queries may be chunks of a sequence
and are masked by position. The kernel prefetches tables of the visible blocks, which this module computes for every
device. JAX computes the tables from the mask of every position, which takes two minutes for sequences of 131,072.

B batch  T query position  S key position  N query heads  K key-value heads  H head dim
C devices  c chunks per device  q query blocks  k key blocks  s steps of a kernel
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info_lib

from jaxscale.kernels.attention.context_parallel import PositionedAttend, QueryPositions
from jaxscale.kernels.attention.xla import MaskSpec
from jaxscale.kernels.config import ATTENTION_OUT


class BlockTables(NamedTuple):
    """The visible blocks of one kernel, for every device."""

    block: np.ndarray  # int[C, 1, ...]: index of the key block (fwd, dq) or query block (dkv)
    active: np.ndarray  # int8, same shape as block: 1, or 0 for a padding step


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
    """Returns the tables of the forward, dq and dkv kernels. starts_Cc: first position of each chunk."""
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
    """Returns (first visible key block, last visible key block) of each query block, both int[C, q]."""
    start_Cq = (starts_Cc[:, :, None] + np.arange(0, chunk, block_q)[None, None]).reshape(len(starts_Cc), -1)
    first_Cq = np.zeros_like(start_Cq) if window is None else np.maximum(0, start_Cq - window + 1)
    last_Cq = np.minimum(start_Cq + block_q, keys) - 1
    return first_Cq // block_kv, last_Cq // block_kv


def by_queries(first_Cq: np.ndarray, last_Cq: np.ndarray) -> BlockTables:
    """Returns tables [C, 1, q, s] with the key blocks of each query block in ascending order."""
    counts_Cq = last_Cq - first_Cq + 1
    step_s = np.arange(counts_Cq.max())
    active_Cqs = step_s < counts_Cq[:, :, None]
    next_Cq = np.concatenate([first_Cq[:, 1:], first_Cq[:, :1]], axis=1)  # padding steps prefetch these
    next_Cq = np.minimum(next_Cq, last_Cq.max())  # within range even if all keys are before the window
    block_Cqs = np.where(active_Cqs, first_Cq[:, :, None] + step_s, next_Cq[:, :, None])
    return BlockTables(smallest_dtype(block_Cqs)[:, None], active_Cqs.astype(np.int8)[:, None])


def by_keys(first_Cq: np.ndarray, last_Cq: np.ndarray, blocks: int) -> BlockTables:
    """Returns tables [C, 1, s, k] with the query blocks of each key block in ascending order, after padding steps."""
    key_k = np.arange(blocks)
    visible_Cqk = (first_Cq[:, :, None] <= key_k) & (key_k <= last_Cq[:, :, None])
    steps = visible_Cqk.sum(axis=1).max()
    block_Csk = np.argsort(visible_Cqk, axis=1, kind="stable")[:, -steps:]
    active_Csk = np.take_along_axis(visible_Cqk, block_Csk, axis=1)
    first_C1k = np.argmax(visible_Cqk, axis=1)[:, None]
    block_Csk = np.where(active_Csk, block_Csk, first_C1k)
    return BlockTables(smallest_dtype(block_Csk)[:, None], active_Csk.astype(np.int8)[:, None])


def smallest_dtype(table: np.ndarray) -> np.ndarray:
    """Casts a table to the smallest integer dtype that fits, because tables are in SMEM."""
    fitting = [dtype for dtype in (np.int8, np.int16) if table.max() <= np.iinfo(dtype).max]
    return table.astype([*fitting, np.int32][0])


LANES = 128  # divisor of all block sizes


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Maximum (query, key) block sizes of a kernel. Larger blocks need fewer steps but compute more masked scores."""

    fwd: tuple[int, int]
    dkv: tuple[int, int]  # backward kernel for keys and values
    dq: tuple[int, int]  # backward kernel for queries

    # MaxText's default (base.yml), which fits the default VMEM limit of a kernel on any chip.


DEFAULT_BLOCKS = Blocks((512, 512), (512, 512), (512, 512))
# Selected by the compiler's schedule of each kernel, which docs/attention_blocks.py prints: the fewest instruction
# bundles for a causal head of 4,096 positions among sizes of 512, 1024 and 2048 (libtpu 0.0.51, 2026-11-24; not timed).
# Thousands of bundles of the forward, dkv and dq kernels, with DEFAULT_BLOCKS in brackets: v5p 54.9 79.3 61.8 (61.4
# 87.2 69.0), v6e 39.7 50.3 41.7 (42.1 55.6 44.0). On v5e DEFAULT_BLOCKS is within 1% of the best, also at 2,048
# positions.
BLOCKS = {
    "TPU v5": Blocks((1024, 1024), (1024, 1024), (1024, 1024)),
    "TPU v6 lite": Blocks((1024, 512), (1024, 1024), (1024, 512)),
}
MIN_BLOCKS = 4  # minimum blocks per sequence or window; with fewer, DEFAULT_BLOCKS compute fewer masked scores


def blocks_for(device_kind: str | None) -> Blocks:
    """Returns the entry of BLOCKS for a JAX device kind, or DEFAULT_BLOCKS."""
    return BLOCKS.get(device_kind or "", DEFAULT_BLOCKS)


def make_attend(
    *,
    softcap: float | None = None,
    window: int | None = None,
    device_kind: str | None = None,
    blocks: Blocks | None = None,
    interpret: bool = False,
):
    """Returns attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) -> out_BTNH, equivalent to xla.make_attend().

    blocks: None selects blocks for device_kind. interpret: whether to run in interpreter mode, without a TPU.
    """
    blocks = blocks or blocks_for(device_kind)
    positioned_attend = make_positioned_attend(softcap=softcap, window=window, blocks=blocks, interpret=interpret)

    def attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        positions = QueryPositions(np.zeros((1, 1), np.int32), q_BTNH.shape[1], 0)
        spec = MaskSpec(segment_ids_BT, key_segment_ids_BS=segment_ids_BT)
        return positioned_attend(q_BTNH, k_BTKH, v_BTKH, spec, positions)

    return attend


def make_positioned_attend(
    *, softcap: float | None, window: int | None, blocks: Blocks = DEFAULT_BLOCKS, interpret: bool = False
) -> PositionedAttend:
    """Returns splash attention for queries at given positions.

    Chunks and keys are padded to whole blocks. interpret: see make_attend().
    """

    def positioned_attend(q_BTNH, k_BSKH, v_BSKH, spec: MaskSpec, positions: QueryPositions):
        chunks, chunk = positions.starts_Cc.shape[1], positions.chunk
        padded_chunk, S = padded_length(chunk), k_BSKH.shape[1]
        by_chunk = lambda x: x.reshape(x.shape[0] * chunks, chunk, *x.shape[2:])
        pad = lambda x, length: jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        pad_queries = lambda x: pad(by_chunk(x), padded_chunk).reshape(x.shape[0], chunks * padded_chunk, *x.shape[2:])
        pad_keys = lambda x: pad(x, padded_length(S))
        scaled_BTNH = (q_BTNH.astype(jnp.float32) * q_BTNH.shape[3] ** -0.5).astype(q_BTNH.dtype)
        q_BNTH = pad_queries(scaled_BTNH).swapaxes(1, 2)
        k_BKSH, v_BKSH = (pad_keys(x).swapaxes(1, 2) for x in (k_BSKH, v_BSKH))
        segments = kernel_lib.SegmentIds(q=pad_queries(spec.segment_ids_BT), kv=pad_keys(spec.key_segment_ids_BS))
        sizes = block_sizes(padded_chunk, blocks, q_BTNH.dtype.itemsize, q_BTNH.shape[3], window, keys=padded_length(S))
        padded_positions = QueryPositions(positions.starts_Cc, padded_chunk, positions.device)
        tables = make_tables(positions.starts_Cc, padded_chunk, padded_length(S), window, sizes)
        kernel: Any = make_kernel(tables, padded_positions, sizes, softcap=softcap, window=window, interpret=interpret)
        with jax.named_scope(tables.scope):
            out_BNTH = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids))(q_BNTH, k_BKSH, v_BKSH, segments)
        out = out_BNTH.swapaxes(1, 2).reshape(-1, padded_chunk, q_BTNH.shape[2], v_BSKH.shape[3])[:, :chunk]
        return out.reshape(*q_BTNH.shape[:3], -1)

    return positioned_attend


def make_kernel(
    tables: KernelTables,
    positions: QueryPositions,
    sizes: kernel_lib.BlockSizes,
    *,
    softcap: float | None,
    window: int | None,
    interpret: bool,
) -> kernel_lib.SplashAttentionKernel:
    """Returns the splash kernel with the tables of this device."""
    local_table = lambda table: jnp.asarray(table)[positions.device]
    positions_T: Any = positions.positions_T  # typed as a numpy array, but the kernel accepts a jax.Array
    mask_info = lambda t: info_lib.MaskInfo(local_table(t.block), None, local_table(t.active), None, positions_T)
    return kernel_lib.SplashAttentionKernel(
        *map(mask_info, tables),
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=kernel_lib.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=ATTENTION_OUT,
        mask_function=causal_mask_function(window),
        interpret=interpret,
    )


@functools.cache  # jit caches by the identity of this function
def causal_mask_function(window: int | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns mask(query positions, key positions) -> bool."""
    if window is None:
        return lambda queries, keys: queries >= keys
    return lambda queries, keys: (queries >= keys) & (queries - keys < window)


def block_sizes(
    length: int, limits: Blocks, itemsize: int, head_dim: int, window: int | None = None, keys: int | None = None
) -> kernel_lib.BlockSizes:
    """Returns the block sizes for `length` queries. keys: number of keys, if different.

    Float32 values and heads larger than LANES use DEFAULT_BLOCKS to fit into VMEM. With blocks of 1024, a head_dim of
    256 needs 18 MiB, but the default limit of v5p is 16 MiB. Short sequences and windows use them, too, because
    larger blocks compute more masked scores.
    """
    largest = max(max(sizes) for sizes in dataclasses.astuple(limits))
    if itemsize > 2 or head_dim > LANES or min(length, window or length) < MIN_BLOCKS * largest:
        limits = DEFAULT_BLOCKS
    lengths = (length, keys or length)
    fwd, dkv, dq = (tuple(map(block_size, lengths, sizes)) for sizes in dataclasses.astuple(limits))
    return kernel_lib.BlockSizes(
        block_q=fwd[0],
        block_kv=fwd[1],
        block_kv_compute=fwd[1],
        block_q_dkv=dkv[0],
        block_kv_dkv=dkv[1],
        block_kv_dkv_compute=dkv[1],
        block_q_dq=dq[0],
        block_kv_dq=dq[1],
    )


def padded_length(length: int) -> int:
    """Rounds up to a multiple of 128, or of 256 above 512 positions, so that large blocks divide the result."""
    step = LANES if length <= 4 * LANES else 2 * LANES
    return -(-length // step) * step


def block_size(length: int, limit: int) -> int:
    """Returns the largest multiple of 128 up to `limit` that divides the length."""
    return max(size for size in range(LANES, min(limit, length) + 1, LANES) if length % size == 0)
