"""Splash attention, JAX's own flash kernel for TPUs (Pallas): scores never leave the chip's fast memory.

Blocks of keys that no query of a block may see are not visited: the upper half, and what lies behind a window. Queries
may be some of a row's, in chunks: the kernel masks by their places.

B batch  T position of a query  S of a key  N query heads  K key-value heads  H head dim
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info_lib

from jaxscale.ops.attention.context_parallel import AttendStanding, Standing
from jaxscale.ops.attention.splash_tables import KernelTables, make_tables
from jaxscale.ops.attention.xla import Scope
from jaxscale.ops.config import ATTENTION_OUT

LANES = 128  # the kernel's blocks are multiples of a TPU register's lanes
# Any head_dim compiles, 8 to 256; float16 does not (libtpu 0.0.42 and 0.0.51, 2026-11-21).
DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """(queries, keys) that each kernel holds at one time, at most: fewer visits, more of the masked half computed."""

    fwd: tuple[int, int]
    dkv: tuple[int, int]  # backward, for keys and values
    dq: tuple[int, int]  # backward, for queries


# MaxText's default (base.yml). It compiles within the fast memory that XLA allows a kernel unasked on any chip.
ANY_CHIP = Blocks((512, 512), (512, 512), (512, 512))
# By the compiler's own schedule of each kernel, as docs/attention_blocks.py reads it: bundles of instructions for a
# causal head of 4,096 positions, the least of 512, 1024 and 2048 each way (libtpu 0.0.51, 2026-11-24; none timed).
# Forward, keys and values, queries, in thousands, and with ANY_CHIP's: v5p 54.9 79.3 61.8 (61.4 87.2 69.0), v6e 39.7
# 50.3 41.7 (42.1 55.6 44.0). On v5e ANY_CHIP's are the best but for 1% of two kernels, and so they are for 2,048.
BLOCKS = {
    "TPU v5": Blocks((1024, 1024), (1024, 1024), (1024, 1024)),
    "TPU v6 lite": Blocks((1024, 512), (1024, 1024), (1024, 512)),
}
LEAST_BLOCKS = 4  # of what a query may see; where larger blocks are fewer, ANY_CHIP's hide less of the mask


def blocks_for(device_kind: str | None) -> Blocks:
    """The row of the table for a chip as JAX names it."""
    return BLOCKS.get(device_kind or "", ANY_CHIP)


def make_attend(
    *, softcap: float | None = None, window: int | None = None, blocks: Blocks = ANY_CHIP, interpret: bool = False
):
    """attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) -> out_BTNH with the values of xla.make_attend.

    interpret: run where there is no TPU, slowly.
    """
    attend_standing = make_attend_standing(softcap=softcap, window=window, blocks=blocks, interpret=interpret)

    def attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        all_in_order = Standing(np.zeros((1, 1), np.int32), q_BTNH.shape[1], 0)
        scope = Scope(segment_ids_BT, key_segment_ids_BS=segment_ids_BT)
        return attend_standing(q_BTNH, k_BTKH, v_BTKH, scope, all_in_order)

    return attend


def make_attend_standing(
    *, softcap: float | None, window: int | None, blocks: Blocks = ANY_CHIP, interpret: bool = False
) -> AttendStanding:
    """For queries of which a Standing tells the places.

    Chunks and keys are filled up to whole blocks, by positions that nobody reads. interpret: as for make_attend.
    """

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
        tables = make_tables(standing.starts_Cc, long_chunk, padded_length(S), window, sizes)
        kernel: Any = make_kernel(tables, longer, sizes, softcap=softcap, window=window, interpret=interpret)
        with jax.named_scope(tables.scope):
            out_BNTH = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids))(q_BNTH, k_BKSH, v_BKSH, segments)
        out = out_BNTH.swapaxes(1, 2).reshape(-1, long_chunk, q_BTNH.shape[2], v_BSKH.shape[3])[:, :chunk]
        return out.reshape(*q_BTNH.shape[:3], -1)

    return attend_standing


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
    places_T: Any = standing.places_T  # the kernel takes a jax.Array where its type says numpy's
    info = lambda found: info_lib.MaskInfo(own(found.block), None, own(found.visited), None, places_T)
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


def block_sizes(
    length: int, most: Blocks, itemsize: int, head_dim: int, window: int | None = None, keys: int | None = None
) -> kernel_lib.BlockSizes:
    """The kernel's blocks for rows of this length. keys: their number, where it is another than that of the queries.

    Values of 4 bytes and heads wider than LANES have ANY_CHIP's, so that they fit (256 need 18 MiB with blocks of 1024,
    and have 16 unasked on v5p); so have short rows and windows, of which large blocks compute more for nothing.
    """
    largest = max(max(sizes) for sizes in dataclasses.astuple(most))
    if itemsize > 2 or head_dim > LANES or min(length, window or length) < LEAST_BLOCKS * largest:
        most = ANY_CHIP
    lengths = (length, keys or length)
    fwd, dkv, dq = (tuple(map(block_size, lengths, sizes)) for sizes in dataclasses.astuple(most))
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
    """The least length that has blocks of a fair size: a multiple of 128 up to 512 positions, of 256 beyond."""
    step = LANES if length <= 4 * LANES else 2 * LANES
    return -(-length // step) * step


def block_size(length: int, most: int) -> int:
    """The largest multiple of 128 that divides the length and is at most `most`."""
    return max(size for size in range(LANES, min(most, length) + 1, LANES) if length % size == 0)
