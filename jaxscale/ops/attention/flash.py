"""Exact causal attention for long rows on any platform: memory grows with T, not with its square.

One loop over the pairs of blocks of which one may see the other: scores exist for one pair at a time, forward and
backward. It is compiled once whatever the length, and needs no kernel of the platform's own. Queries and keys say where
in the row they stand, so that a device may have some of a row's queries only, and meet its keys in any order.

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim
R = T * G: the queries that share a key-value head; r and s are the rows and the keys of one block
Values and results may have another size than H: Walk.value_dim.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.attention.blockwise import F32, group_heads, product, soften, ungroup_heads
from jaxscale.ops.attention.xla import HIDDEN
from jaxscale.ops.config import ATTENTION_OUT
from jaxscale.ops.gradient import custom_vjp

BLOCK = 512  # positions: scores of a pair are 1 MiB a row and head


class Sight(NamedTuple):
    """What is known of queries and keys before any product: integers."""

    pairs_P2: jax.Array  # blocks (of queries, of keys) of which one may see the other; a query's own key among the last
    query_ids_BT: jax.Array  # segments
    key_ids_BS: jax.Array
    query_places_T: jax.Array  # in the row
    key_places_S: jax.Array


def make_attend(*, softcap: float | None = None, window: int | None = None, block: int = BLOCK):
    """attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH with the values of xla.make_attend."""
    attend_seen = make_attend_seen(softcap=softcap, window=window, block=block)

    def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        T = q_BTNH.shape[1]
        # Positions at the end that nobody reads, up to whole blocks.
        fill = lambda x: jnp.pad(x, [(0, 0), (0, -T % block)] + [(0, 0)] * (x.ndim - 2))
        ids_BT = fill(segment_ids_BT)
        length = ids_BT.shape[1]
        places_T = jnp.arange(length, dtype=jnp.int32)
        pairs_P2 = jnp.asarray(visible_pairs(length, block, window))
        sight = Sight(pairs_P2, ids_BT, ids_BT, places_T, places_T)
        return attend_seen(fill(q_BTNH), fill(k_BSKH), fill(v_BSKH), sight)[:, :T]

    return attend


def make_attend_seen(*, softcap: float | None, window: int | None, block: int):
    """attend(q_BTNH, k_BSKH, v_BSKH, sight) -> out_BTNH, of whole blocks."""

    def walk_of(q_BKTGH, v_BKSH) -> Walk:
        return Walk(q_BKTGH.shape[3], v_BKSH.shape[3], block, softcap, window)

    @custom_vjp
    def attend(q_BTNH, k_BSKH, v_BSKH, sight):
        return keep(q_BTNH, k_BSKH, v_BSKH, sight)[0]

    def keep(q_BTNH, k_BSKH, v_BSKH, sight):
        q_BKTGH, k_BKSH, v_BKSH = group_heads(q_BTNH, k_BSKH.shape[2]), k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
        results = walk_of(q_BKTGH, v_BKSH).forward(q_BKTGH, k_BKSH, v_BKSH, sight)
        out_BKTGH, lse_BKR = (checkpoint_name(result, ATTENTION_OUT) for result in results)
        return ungroup_heads(out_BKTGH), (q_BKTGH, k_BKSH, v_BKSH, sight, out_BKTGH, lse_BKR)

    def backward(saved, dout_BTNH):
        q_BKTGH, k_BKSH, v_BKSH, sight, out_BKTGH, lse_BKR = saved
        dout_BKTGH = group_heads(dout_BTNH, k_BKSH.shape[1])
        grads = walk_of(q_BKTGH, v_BKSH).backward(q_BKTGH, k_BKSH, v_BKSH, sight, out_BKTGH, lse_BKR, dout_BKTGH)
        dq_BKTGH, dk_BKSH, dv_BKSH = grads
        return ungroup_heads(dq_BKTGH), dk_BKSH.swapaxes(1, 2), dv_BKSH.swapaxes(1, 2), None

    attend.defvjp(keep, backward)
    return attend


def visible_pairs(length: int, block: int, window: int | None, begin: int = 0) -> np.ndarray:
    """int32[pairs, 2]: blocks (of queries, of keys) that may see each other, the keys of each block of queries in their
    order.

    begin: the place among the keys of the first of `length` queries, a multiple of the block.
    """
    behind = begin + length if window is None else window - 1  # how far back a query sees
    first = begin // block
    oldest = lambda i: max(0, i * block - behind) // block
    return np.array(
        [(i - first, j) for i in range(first, first + length // block) for j in range(oldest(i), i + 1)], np.int32
    )


class Softmax(NamedTuple):
    """Of the keys that were seen so far, float32."""

    sum_BKRH: jax.Array  # of values, weighted
    total_BKR: jax.Array  # of weights
    top_BKR: jax.Array  # the largest score, whose weight is 1


class Pulled(NamedTuple):
    """Gradients from the pairs so far, float32."""

    dq_BKRH: jax.Array
    dk_BKSH: jax.Array
    dv_BKSH: jax.Array


@dataclasses.dataclass(frozen=True)
class Walk:
    """The loop over pairs of blocks, and what it carries from pair to pair."""

    groups: int  # G
    value_dim: int  # of values and results
    block: int
    softcap: float | None
    window: int | None

    def rows_of(self, x: jax.Array, i: jax.Array, size: int) -> jax.Array:
        """Block i of x along its third axis."""
        return lax.dynamic_slice_in_dim(x, i * size, size, axis=2)

    def put(self, x: jax.Array, i: jax.Array, part: jax.Array) -> jax.Array:
        """x with its block i along the third axis replaced."""
        return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[2], axis=2)

    def seen(self, sight: Sight, i: jax.Array, j: jax.Array) -> jax.Array:
        """bool [B, 1, r, s]: whether the queries of block i may look at the keys of block j."""
        cut = lambda x, n: lax.dynamic_slice_in_dim(x, n * self.block, self.block, axis=-1)
        q_Bb, k_Bb = cut(sight.query_ids_BT, i), cut(sight.key_ids_BS, j)
        behind = cut(sight.query_places_T, i)[:, None] - cut(sight.key_places_S, j)[None, :]
        near = behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)
        return jnp.repeat((q_Bb[:, :, None] == k_Bb[:, None, :]) & near[None], self.groups, axis=1)[:, None]

    def forward(self, q_BKTGH, k_BKSH, v_BKSH, sight: Sight):
        """(out_BKTGH in v.dtype, logsumexp_BKR float32)."""
        softmax = self.visit(self.nothing_seen(q_BKTGH), q_BKTGH, k_BKSH, v_BKSH, sight)
        return self.settle(softmax, q_BKTGH, v_BKSH.dtype)

    def nothing_seen(self, q_BKTGH) -> Softmax:
        """The softmax of queries before their first key."""
        B, K, T, G, _ = q_BKTGH.shape
        none_BKR = jnp.zeros((B, K, T * G), F32)
        return Softmax(jnp.zeros((B, K, T * G, self.value_dim), F32), none_BKR, jnp.full_like(none_BKR, HIDDEN))

    def settle(self, softmax: Softmax, q_BKTGH, dtype):
        """(out_BKTGH, logsumexp_BKR float32) of queries that have seen all keys."""
        out_BKRH = (softmax.sum_BKRH / softmax.total_BKR[..., None]).astype(dtype)
        return out_BKRH.reshape(*q_BKTGH.shape[:4], self.value_dim), softmax.top_BKR + jnp.log(softmax.total_BKR)

    def visit(self, softmax: Softmax, q_BKTGH, k_BKSH, v_BKSH, sight: Sight) -> Softmax:
        """The softmax with these keys in it too."""
        B, K, T, G, H = q_BKTGH.shape
        q_BKRH = q_BKTGH.reshape(B, K, T * G, H)
        size = self.block * G

        def one_pair(softmax, pair):
            i, j = pair
            k_BKsH, v_BKsH = self.rows_of(k_BKSH, j, self.block), self.rows_of(v_BKSH, j, self.block)
            raw_BKrs = product("BKrH,BKsH->BKrs", self.rows_of(q_BKRH, i, size), k_BKsH)
            score_BKrs = jnp.where(self.seen(sight, i, j), soften(raw_BKrs, H, self.softcap)[0], HIDDEN)
            before_BKr = self.rows_of(softmax.top_BKR, i, size)
            top_BKr = jnp.maximum(before_BKr, jnp.max(score_BKrs, axis=-1))
            # Of a row that has seen nothing yet this keeps ones; its own key shrinks them to 0.
            share_BKrs = jnp.exp(score_BKrs - top_BKr[..., None]).astype(v_BKSH.dtype)
            shrink_BKr = jnp.exp(before_BKr - top_BKr)
            total_BKr = self.rows_of(softmax.total_BKR, i, size) * shrink_BKr + jnp.sum(share_BKrs, axis=-1, dtype=F32)
            sum_BKrH = self.rows_of(softmax.sum_BKRH, i, size) * shrink_BKr[..., None]
            sum_BKrH += product("BKrs,BKsH->BKrH", share_BKrs, v_BKsH)
            return Softmax(
                self.put(softmax.sum_BKRH, i, sum_BKrH),
                self.put(softmax.total_BKR, i, total_BKr),
                self.put(softmax.top_BKR, i, top_BKr),
            ), None

        return lax.scan(one_pair, softmax, (sight.pairs_P2[:, 0], sight.pairs_P2[:, 1]))[0]

    def backward(self, q_BKTGH, k_BKSH, v_BKSH, sight: Sight, out_BKTGH, lse_BKR, dout_BKTGH):
        """Gradients (dq_BKTGH, dk_BKSH, dv_BKSH) in the dtypes of q, k, v."""
        zeros = Pulled(*(jnp.zeros(x.shape, F32) for x in (self.rows(q_BKTGH), k_BKSH, v_BKSH)))
        drift_BKR = self.drift(out_BKTGH, dout_BKTGH)
        pulled = self.pull(zeros, q_BKTGH, k_BKSH, v_BKSH, sight, lse_BKR, drift_BKR, dout_BKTGH)
        dq_BKTGH = pulled.dq_BKRH.astype(q_BKTGH.dtype).reshape(q_BKTGH.shape)
        return dq_BKTGH, pulled.dk_BKSH.astype(k_BKSH.dtype), pulled.dv_BKSH.astype(v_BKSH.dtype)

    def rows(self, q_BKTGH):
        """q_BKRH"""
        B, K, T, G, H = q_BKTGH.shape
        return q_BKTGH.reshape(B, K, T * G, H)

    def drift(self, out_BKTGH, dout_BKTGH):
        """float32[B, K, R]: the part of a score's gradient that all keys of a query share."""
        return jnp.sum(self.rows(dout_BKTGH).astype(F32) * self.rows(out_BKTGH).astype(F32), axis=-1)

    def pull(self, pulled: Pulled, q_BKTGH, k_BKSH, v_BKSH, sight: Sight, lse_BKR, drift_BKR, dout_BKTGH) -> Pulled:
        """The gradients with those of these keys added; lse_BKR is that of all keys."""
        G, H = q_BKTGH.shape[3:]
        q_BKRH, dout_BKRH = self.rows(q_BKTGH), self.rows(dout_BKTGH)
        size = self.block * G

        def one_pair(pulled, pair):
            i, j = pair
            q_BKrH, dout_BKrH = self.rows_of(q_BKRH, i, size), self.rows_of(dout_BKRH, i, size)
            k_BKsH, v_BKsH = self.rows_of(k_BKSH, j, self.block), self.rows_of(v_BKSH, j, self.block)
            score_BKrs, slope_BKrs = soften(product("BKrH,BKsH->BKrs", q_BKrH, k_BKsH), H, self.softcap)
            above_BKrs = score_BKrs - self.rows_of(lse_BKR, i, size)[..., None]
            share_BKrs = jnp.exp(jnp.where(self.seen(sight, i, j), above_BKrs, HIDDEN)).astype(q_BKTGH.dtype)
            dshare_BKrs = product("BKrH,BKsH->BKrs", dout_BKrH, v_BKsH)
            drift_BKr1 = self.rows_of(drift_BKR, i, size)[..., None]
            draw_BKrs = (share_BKrs.astype(F32) * (dshare_BKrs - drift_BKr1) * slope_BKrs).astype(q_BKTGH.dtype)
            dq_BKrH = self.rows_of(pulled.dq_BKRH, i, size) + product("BKrs,BKsH->BKrH", draw_BKrs, k_BKsH)
            dk_BKsH = self.rows_of(pulled.dk_BKSH, j, self.block) + product("BKrs,BKrH->BKsH", draw_BKrs, q_BKrH)
            dv_BKsH = self.rows_of(pulled.dv_BKSH, j, self.block) + product("BKrs,BKrH->BKsH", share_BKrs, dout_BKrH)
            return Pulled(
                self.put(pulled.dq_BKRH, i, dq_BKrH),
                self.put(pulled.dk_BKSH, j, dk_BKsH),
                self.put(pulled.dv_BKSH, j, dv_BKsH),
            ), None

        return lax.scan(one_pair, pulled, (sight.pairs_P2[:, 0], sight.pairs_P2[:, 1]))[0]
