"""How a device of a ring (ring.py) looks at keys on a TPU: by the splash kernel, pairs of chunks at a time.

In zigzag order a device's late chunk sees the early one of every other device whole. So does its early chunk if the
other comes before it, and else its late chunk the other's late one: two pairs of chunks, equal work, and no mask but
the documents'. Of its own each chunk sees itself as in a row of its own. Each pair is one call of the kernel, which
tells the logarithm of its sums, by which results are joined; going back the kernels get that of all keys.

Between pairs everything is float32. What a call returns is in the dtype of queries or keys, rounded once.

B batch  T position of a device's own  t of a chunk  N query heads  K key-value heads  H head dim
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info_lib

from jaxscale.ops.attention.blockwise import F32
from jaxscale.ops.attention.ring import Held, make_ring
from jaxscale.ops.attention.splash import ANY_CHIP, Blocks, block_sizes, padded_length, seen_within
from jaxscale.ops.attention.splash_tables import KernelTables, Tables, make_tables
from jaxscale.sharding.context_axis import ContextAxis

HIDDEN = kernel_lib.DEFAULT_MASK_VALUE
NOBODY = -1  # the segment of positions that fill up a chunk


def make_attend(
    *,
    softcap: float | None,
    window: int | None,
    context: ContextAxis,
    blocks: Blocks = ANY_CHIP,
    interpret: bool = False,
):
    """attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) -> out_BTNH, of the device's own positions in zigzag order.

    Chunks are filled up to whole blocks. interpret: run where there is no TPU, slowly.
    """

    def attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        chunk = q_BTNH.shape[1] // context.chunks
        filled = padded_length(chunk)
        look = SplashLook(context, filled, chunk, softcap, window, blocks, interpret, v_BTKH.shape[3])
        by_chunk = lambda x: x.reshape(x.shape[0], context.chunks, -1, *x.shape[2:])
        flat = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])

        def fill(x, value=0):
            widths = [(0, 0), (0, 0), (0, filled - chunk)] + [(0, 0)] * (x.ndim - 2)
            return flat(jnp.pad(by_chunk(x), widths, constant_values=value))

        scaled_BTNH = (q_BTNH.astype(F32) * q_BTNH.shape[3] ** -0.5).astype(q_BTNH.dtype)
        q_BNTH, k_BKTH, v_BKTH = (fill(x).swapaxes(1, 2) for x in (scaled_BTNH, k_BTKH, v_BTKH))
        attend_ring = make_ring(context, lambda _: look)
        out_BTNH = attend_ring(q_BNTH, k_BKTH, v_BKTH, fill(segment_ids_BT, NOBODY)).swapaxes(1, 2)
        return flat(by_chunk(out_BTNH)[:, :, :chunk])

    return attend


class Seen(NamedTuple):
    """Attention to the keys that were seen so far, float32."""

    out_BNTH: jax.Array
    logsumexp_BNT: jax.Array


class Pair(NamedTuple):
    """A chunk of queries and one of keys that it sees: their numbers on their devices, and what lies between."""

    queries: int | jax.Array
    keys: int | jax.Array
    ahead: int | jax.Array  # how many chunks queries begin behind the keys; the int 0 of one and the same


@dataclasses.dataclass(frozen=True)
class SplashLook:
    """A ring.Look, of queries [B, N, T, H] that are scaled."""

    context: ContextAxis
    chunk: int  # positions, filled up
    apart: int  # in the row, of the beginnings of two chunks
    softcap: float | None
    window: int | None
    blocks: Blocks
    interpret: bool
    value_dim: int  # of values and results

    def nothing_seen(self, q_BNTH) -> Seen:
        """What queries have seen before their first key."""
        return Seen(jnp.zeros((*q_BNTH.shape[:3], self.value_dim), F32), jnp.full(q_BNTH.shape[:3], HIDDEN, F32))

    def visit(self, seen: Seen, q_BNTH, held: Held, ids_BT, step) -> Seen:
        """What queries have seen with these keys too."""
        for pair in self.pairs(step):
            kernels = self.kernels(pair, q_BNTH)
            q_BNtH, queries_Bt = self.cut(q_BNTH, pair.queries), self.cut(ids_BT, pair.queries, axis=1)
            k_BKtH, v_BKtH, keys_Bt = self.cut_keys(held, pair.keys)
            out_BNtH, logsumexp_BNt = kernels.forward(q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt)
            before = Seen(*(self.cut(x, pair.queries) for x in seen))
            after = joined(before, out_BNtH, logsumexp_BNt)
            seen = Seen(*(self.put(x, pair.queries, part) for x, part in zip(seen, after)))
        return seen

    def settle(self, seen: Seen, q_BNTH):
        """(out_BNTH in q.dtype, logsumexp_BNT)."""
        return seen.out_BNTH.astype(q_BNTH.dtype), seen.logsumexp_BNT

    def drift(self, out_BNTH, dout_BNTH):
        """float32[B, N, T]"""
        return jnp.sum(out_BNTH.astype(F32) * dout_BNTH.astype(F32), axis=-1)

    def pull(self, dq_BNTH, q_BNTH, held: Held, ids_BT, step, logsumexp_BNT, drift_BNT, dout_BNTH):
        """(dq_BNTH with these keys' part, their own dk_BKTH, dv_BKTH), float32."""
        dk_BKTH, dv_BKTH = (jnp.zeros(x.shape, F32) for x in held[:2])
        add = lambda x, n, part: self.put(x, n, self.cut(x, n) + part.astype(F32))
        for pair in self.pairs(step):
            of_queries = q_BNTH, logsumexp_BNT, drift_BNT, dout_BNTH
            q_BNtH, *above = (self.cut(x, pair.queries) for x in of_queries)
            queries_Bt = self.cut(ids_BT, pair.queries, axis=1)
            k_BKtH, v_BKtH, keys_Bt = self.cut_keys(held, pair.keys)
            grads = self.kernels(pair, q_BNTH).backward(q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt, *above)
            dq_BNTH = add(dq_BNTH, pair.queries, grads[0])
            dk_BKTH, dv_BKTH = add(dk_BKTH, pair.keys, grads[1]), add(dv_BKTH, pair.keys, grads[2])
        return dq_BNTH, dk_BKTH, dv_BKTH

    def pairs(self, step: int | jax.Array) -> list[Pair]:
        """The pairs of chunks of which one sees the other, of own queries and the device's that many steps before."""
        device, size = self.context.index(), self.context.size
        last = 2 * size - 1
        if isinstance(step, int) and step == 0:
            return [Pair(0, 0, 0), Pair(1, 1, 0), Pair(1, 0, last - 2 * device)]
        other = (device - step) % size
        half = jnp.int32(other > device)  # of the two chunks on either side that the second pair is of
        return [Pair(1, 0, last - device - other), Pair(half, half, jnp.abs(device - other))]

    def kernels(self, pair: Pair, q_BNTH) -> "Kernels":
        """The kernel's three forms for one pair."""
        sizes = block_sizes(self.chunk, self.blocks, q_BNTH.dtype.itemsize, q_BNTH.shape[3], self.window)
        same = isinstance(pair.ahead, int)
        if same:
            starts, number = np.zeros(1, np.int32), 0
        elif self.window is None:
            starts, number = np.full(1, self.apart, np.int32), 0
        else:
            starts, number = np.arange(2 * self.context.size, dtype=np.int32) * self.apart, pair.ahead
        tables = make_tables(starts[:, None], self.chunk, self.chunk, self.window, sizes)
        compared = same or self.window is not None
        places_t = jnp.asarray(starts)[number] + jnp.arange(self.chunk, dtype=jnp.int32) if compared else None
        return Kernels(tables, number, places_t, sizes, self.softcap, self.window, self.interpret)

    def cut(self, x: jax.Array, number: int | jax.Array, axis: int = 2) -> jax.Array:
        """One of the chunks."""
        return lax.dynamic_slice_in_dim(x, number * self.chunk, self.chunk, axis)

    def cut_keys(self, held: Held, number: int | jax.Array) -> Held:
        """One of the chunks of keys."""
        return Held(*(self.cut(x, number, axis) for x, axis in zip(held, (2, 2, 1))))

    def put(self, x: jax.Array, number: int | jax.Array, part: jax.Array) -> jax.Array:
        """x with one of its chunks replaced."""
        return lax.dynamic_update_slice_in_dim(x, part, number * self.chunk, axis=2)


def joined(before: Seen, out_BNtH, logsumexp_BNt) -> Seen:
    """Attention to both. A query that saw none of the kernel's keys has a mean or nan from it, which weighs nothing."""
    saw_BNt = logsumexp_BNt > HIDDEN / 2
    logsumexp_BNt = jnp.where(saw_BNt, logsumexp_BNt, HIDDEN)
    out_BNtH = jnp.where(saw_BNt[..., None], out_BNtH.astype(F32), 0.0)
    both_BNt = jnp.logaddexp(before.logsumexp_BNT, logsumexp_BNt)
    share = lambda logsumexp: jnp.exp(logsumexp - both_BNt)[..., None]
    return Seen(before.out_BNTH * share(before.logsumexp_BNT) + out_BNtH * share(logsumexp_BNt), both_BNt)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The splash kernel for a chunk of queries and one of keys; its library's own functions, forward and backward."""

    tables: KernelTables
    number: int | jax.Array  # of the row of the tables
    places_t: jax.Array | None  # of queries, counted from the first key; None: all see all, whatever the window
    sizes: kernel_lib.BlockSizes
    softcap: float | None
    window: int | None
    interpret: bool

    def forward(self, q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt):
        """(out_BNtH in q.dtype, logsumexp_BNt float32)."""

        def one_row(q_NtH, k_KtH, v_KtH, *ids):
            out_NtH, (logsumexp_Nt,) = kernel_lib._splash_attention_forward(
                self.info(self.tables.fwd), q_NtH, k_KtH, v_KtH, kernel_lib.SegmentIds(*ids), None,
                is_mqa=False, block_sizes=self.sizes, residual_checkpoint_name=None, save_residuals=True, **self.how(),
            )  # fmt: skip
            return out_NtH, logsumexp_Nt

        with jax.named_scope(self.tables.scope):
            return jax.vmap(one_row)(q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt)

    def backward(self, q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt, logsumexp_BNt, drift_BNt, dout_BNtH):
        """(dq_BNtH, dk_BKtH, dv_BKtH) in the dtypes of q, k, v. logsumexp: of all keys of the row."""
        sizes = self.sizes
        q_dq, kv_dq, q_dkv, kv_dkv = sizes.block_q_dq, sizes.block_kv_dq, sizes.block_q_dkv, sizes.block_kv_dkv
        compute_dkv = sizes.block_kv_dkv_compute
        assert q_dq and kv_dq and q_dkv and kv_dkv and compute_dkv  # block_sizes() gives all of them
        layouts: dict[str, Any] = dict(
            q_layout=sizes.q_layout, k_layout=sizes.k_layout, v_layout=sizes.v_layout, is_mqa=False
        )

        def one_row(q_NtH, k_KtH, v_KtH, queries_t, keys_t, logsumexp_Nt, drift_Nt, dout_NtH):
            ids = kernel_lib.SegmentIds(queries_t, keys_t)
            given = q_NtH, k_KtH, v_KtH, ids, None, logsumexp_Nt, dout_NtH, drift_Nt
            how = self.how() | layouts
            _, dk_KtH, dv_KtH = kernel_lib._splash_attention_bwd_dkv(
                *given, mask_info=self.info(self.tables.dkv), bq=q_dkv, bkv=kv_dkv,
                bkv_compute=compute_dkv, use_fused_bwd_kernel=False, **how,
            )  # fmt: skip
            dq_NtH = kernel_lib._splash_attention_bwd_dq(
                *given, mask_info=self.info(self.tables.dq), bq=q_dq, bkv=kv_dq, **how
            )
            return dq_NtH, dk_KtH, dv_KtH

        with jax.named_scope(self.tables.scope):
            rows = q_BNtH, k_BKtH, v_BKtH, queries_Bt, keys_Bt, logsumexp_BNt, drift_BNt, dout_BNtH
            return jax.vmap(one_row)(*rows)

    def info(self, found: Tables) -> info_lib.MaskInfo:
        """What the kernel reads of its tables."""
        own = lambda table: jnp.asarray(table)[self.number]
        places_t: Any = self.places_t  # the kernel takes a jax.Array where its type says numpy's
        return info_lib.MaskInfo(own(found.block), None, own(found.visited), None, places_t)

    def how(self) -> dict:
        """What all three forms are told."""
        return dict(
            mask_value=HIDDEN,
            attn_logits_soft_cap=self.softcap,
            mask_function=None if self.places_t is None else seen_within(self.window),
            interpret=self.interpret,
        )
