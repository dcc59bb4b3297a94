"""Splash attention, JAX's own flash kernel for TPUs (Pallas): scores never leave the chip's fast memory.

Blocks of keys that no query of a block may see are not visited: the upper half, and what lies behind a window.

B batch  T position  N query heads  K key-value heads  H head dim
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

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

    Rows are filled up to whole blocks, by positions that nobody reads. interpret: run where there is no TPU, slowly.
    """

    def attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        T, N, H = q_BTNH.shape[1:]
        length = padded_length(T)
        fill = lambda x: jnp.pad(x, [(0, 0), (0, length - T)] + [(0, 0)] * (x.ndim - 2))
        scaled_BTNH = (q_BTNH.astype(jnp.float32) * H**-0.5).astype(q_BTNH.dtype)  # the kernel has no scale
        q_BNTH, k_BKTH, v_BKTH = (fill(x).swapaxes(1, 2) for x in (scaled_BTNH, k_BTKH, v_BTKH))
        ids_BT = fill(segment_ids_BT)
        shape = (length, length)
        near = mask_lib.CausalMask(shape) if window is None else mask_lib.LocalMask(shape, (window - 1, 0), offset=0)
        kernel = kernel_lib.make_splash_mha(
            mask_lib.MultiHeadMask([near] * N),
            block_sizes=block_sizes(length, blocks, q_BTNH.dtype.itemsize, H, window),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=softcap,
            residual_checkpoint_name=ATTENTION_OUT,
            interpret=interpret,
        )
        segments = kernel_lib.SegmentIds(q=ids_BT, kv=ids_BT)
        out_BNTH = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids))(q_BNTH, k_BKTH, v_BKTH, segments)
        return out_BNTH.swapaxes(1, 2)[:, :T]

    return attend


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
