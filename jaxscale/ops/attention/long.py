"""Exact causal attention for long rows on any platform: memory grows with T, not with its square.

One loop over the pairs of blocks of which one may see the other: scores exist for one pair at a time, forward and
backward. It is compiled once whatever the length, and needs no kernel of the platform's own.

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim
R = T * G: the queries that share a key-value head; r and s are the rows and the keys of one block
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.attention.blockwise import F32, group_heads, product, soften, ungroup_heads
from jaxscale.ops.attention.xla import HIDDEN
from jaxscale.ops.config import ATTENTION_OUT

BLOCK = 512  # positions: scores of a pair are 1 MiB a row and head


def make_attend(*, softcap: float | None = None, window: int | None = None, block: int = BLOCK):
    """attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH with the values of xla.make_attend."""

    @jax.custom_vjp
    def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        return keep(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)[0]

    def fill(x):
        """Positions at the end that nobody reads, up to whole blocks."""
        return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2))

    def keep(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        T, K = k_BSKH.shape[1:3]
        q_BKTGH, k_BKSH, v_BKSH = group_heads(fill(q_BTNH), K), fill(k_BSKH).swapaxes(1, 2), fill(v_BSKH).swapaxes(1, 2)
        ids_BT = fill(segment_ids_BT)
        walk = Walk(q_BKTGH.shape[3], q_BKTGH.shape[4], block, softcap, window)
        results = walk.forward(q_BKTGH, k_BKSH, v_BKSH, ids_BT)
        out_BKTGH, lse_BKR = (checkpoint_name(result, ATTENTION_OUT) for result in results)
        return ungroup_heads(out_BKTGH)[:, :T], (q_BKTGH, k_BKSH, v_BKSH, ids_BT, out_BKTGH, lse_BKR)

    def backward(saved, dout_BTNH):
        q_BKTGH, k_BKSH = saved[:2]
        T = dout_BTNH.shape[1]
        walk = Walk(q_BKTGH.shape[3], q_BKTGH.shape[4], block, softcap, window)
        dq_BKTGH, dk_BKSH, dv_BKSH = walk.backward(*saved, group_heads(fill(dout_BTNH), k_BKSH.shape[1]))
        return ungroup_heads(dq_BKTGH)[:, :T], dk_BKSH.swapaxes(1, 2)[:, :T], dv_BKSH.swapaxes(1, 2)[:, :T], None

    attend.defvjp(keep, backward)
    return attend


@dataclasses.dataclass(frozen=True)
class Walk:
    """The loop over pairs of blocks: (of queries, of keys), the keys of each block of queries in their order."""

    groups: int  # G
    head_dim: int
    block: int
    softcap: float | None
    window: int | None

    def pairs(self, length: int) -> np.ndarray:
        """int32[pairs, 2]: the blocks that may see each other."""
        behind = length if self.window is None else self.window - 1  # how far back a query sees
        oldest = lambda i: max(0, i * self.block - behind) // self.block
        return np.array([(i, j) for i in range(length // self.block) for j in range(oldest(i), i + 1)], np.int32)

    def rows_of(self, x: jax.Array, i: jax.Array, size: int) -> jax.Array:
        """Block i of x along its third axis."""
        return lax.dynamic_slice_in_dim(x, i * size, size, axis=2)

    def put(self, x: jax.Array, i: jax.Array, part: jax.Array) -> jax.Array:
        """x with its block i along the third axis replaced."""
        return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[2], axis=2)

    def seen(self, ids_BT: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """bool [B, 1, r, s]: whether the queries of block i may look at the keys of block j."""
        q_Bb, k_Bb = (lax.dynamic_slice_in_dim(ids_BT, n * self.block, self.block, axis=1) for n in (i, j))
        place = np.arange(self.block)
        behind = (i - j) * self.block + (place[:, None] - place[None, :])
        near = behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)
        return jnp.repeat((q_Bb[:, :, None] == k_Bb[:, None, :]) & near[None], self.groups, axis=1)[:, None]

    def forward(self, q_BKTGH, k_BKSH, v_BKSH, ids_BT):
        """(out_BKTGH in v.dtype, logsumexp_BKR float32)."""
        B, K, T, G, H = q_BKTGH.shape
        q_BKRH = q_BKTGH.reshape(B, K, T * G, H)
        size = self.block * G

        def visit(carry, pair):
            i, j = pair
            sum_BKRH, total_BKR, top_BKR = carry
            k_BKsH, v_BKsH = self.rows_of(k_BKSH, j, self.block), self.rows_of(v_BKSH, j, self.block)
            raw_BKrs = product("BKrH,BKsH->BKrs", self.rows_of(q_BKRH, i, size), k_BKsH)
            score_BKrs = jnp.where(self.seen(ids_BT, i, j), soften(raw_BKrs, H, self.softcap)[0], HIDDEN)
            before_BKr = self.rows_of(top_BKR, i, size)
            top_BKr = jnp.maximum(before_BKr, jnp.max(score_BKrs, axis=-1))
            # Of a row that has seen nothing yet this keeps ones; its own key comes last and shrinks them to 0.
            share_BKrs = jnp.exp(score_BKrs - top_BKr[..., None]).astype(v_BKSH.dtype)
            shrink_BKr = jnp.exp(before_BKr - top_BKr)
            total_BKr = self.rows_of(total_BKR, i, size) * shrink_BKr + jnp.sum(share_BKrs, axis=-1, dtype=F32)
            sum_BKrH = self.rows_of(sum_BKRH, i, size) * shrink_BKr[..., None]
            sum_BKrH += product("BKrs,BKsH->BKrH", share_BKrs, v_BKsH)
            return (
                self.put(sum_BKRH, i, sum_BKrH),
                self.put(total_BKR, i, total_BKr),
                self.put(top_BKR, i, top_BKr),
            ), None

        none_BKR = jnp.zeros((B, K, T * G), F32)
        start = (jnp.zeros((B, K, T * G, H), F32), none_BKR, jnp.full_like(none_BKR, HIDDEN))
        (sum_BKRH, total_BKR, top_BKR), _ = lax.scan(visit, start, tuple(self.pairs(T).T))
        out_BKRH = (sum_BKRH / total_BKR[..., None]).astype(v_BKSH.dtype)
        return out_BKRH.reshape(q_BKTGH.shape), top_BKR + jnp.log(total_BKR)

    def backward(self, q_BKTGH, k_BKSH, v_BKSH, ids_BT, out_BKTGH, lse_BKR, dout_BKTGH):
        """Gradients (dq_BKTGH, dk_BKSH, dv_BKSH) in the dtypes of q, k, v."""
        B, K, T, G, H = q_BKTGH.shape
        q_BKRH, dout_BKRH = (x.reshape(B, K, T * G, H) for x in (q_BKTGH, dout_BKTGH))
        drift_BKR = jnp.sum(dout_BKTGH.astype(F32) * out_BKTGH.astype(F32), axis=-1).reshape(B, K, T * G)
        size = self.block * G

        def visit(carry, pair):
            i, j = pair
            dq_BKRH, dk_BKSH, dv_BKSH = carry
            q_BKrH, dout_BKrH = self.rows_of(q_BKRH, i, size), self.rows_of(dout_BKRH, i, size)
            k_BKsH, v_BKsH = self.rows_of(k_BKSH, j, self.block), self.rows_of(v_BKSH, j, self.block)
            score_BKrs, slope_BKrs = soften(product("BKrH,BKsH->BKrs", q_BKrH, k_BKsH), H, self.softcap)
            above_BKrs = score_BKrs - self.rows_of(lse_BKR, i, size)[..., None]
            share_BKrs = jnp.exp(jnp.where(self.seen(ids_BT, i, j), above_BKrs, HIDDEN)).astype(q_BKTGH.dtype)
            dshare_BKrs = product("BKrH,BKsH->BKrs", dout_BKrH, v_BKsH)
            drift_BKr1 = self.rows_of(drift_BKR, i, size)[..., None]
            draw_BKrs = (share_BKrs.astype(F32) * (dshare_BKrs - drift_BKr1) * slope_BKrs).astype(q_BKTGH.dtype)
            dq_BKrH = self.rows_of(dq_BKRH, i, size) + product("BKrs,BKsH->BKrH", draw_BKrs, k_BKsH)
            dk_BKsH = self.rows_of(dk_BKSH, j, self.block) + product("BKrs,BKrH->BKsH", draw_BKrs, q_BKrH)
            dv_BKsH = self.rows_of(dv_BKSH, j, self.block) + product("BKrs,BKrH->BKsH", share_BKrs, dout_BKrH)
            return (self.put(dq_BKRH, i, dq_BKrH), self.put(dk_BKSH, j, dk_BKsH), self.put(dv_BKSH, j, dv_BKsH)), None

        start = tuple(jnp.zeros(x.shape, F32) for x in (q_BKRH, k_BKSH, v_BKSH))
        (dq_BKRH, dk_BKSH, dv_BKSH), _ = lax.scan(visit, start, tuple(self.pairs(T).T))
        dq_BKTGH = dq_BKRH.astype(q_BKTGH.dtype).reshape(q_BKTGH.shape)
        return dq_BKTGH, dk_BKSH.astype(k_BKSH.dtype), dv_BKSH.astype(v_BKSH.dtype)
