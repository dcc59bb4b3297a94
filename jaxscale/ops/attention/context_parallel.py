"""Attention of devices that share a row: each has the queries, keys and values of its own positions.

Keys and values are gathered, or only what a window reaches of the chunk before; or positions are exchanged for heads,
so that each device attends as if alone, with some of the heads (arXiv:2309.14509). The third way is ring.py.

B batch  T query position  S key position  N query heads  K key-value heads  H head dim  C devices  c their chunks
t: own positions; a chunk of them is consecutive
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.ops.attention import flash
from jaxscale.ops.attention.xla import Scope, as_scope
from jaxscale.ops.attention.xla import make_attend as make_plain
from jaxscale.sharding.context_axis import ContextAxis

LEAST_BLOCK = 32  # positions; a chunk without a larger divisor of at most flash.BLOCK is one block


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where the queries of each device stand among the keys."""

    starts_Cc: np.ndarray  # int32: of the first query of each chunk
    chunk: int
    device: jax.Array | int  # which of them this is

    @property
    def places_T(self) -> jax.Array:
        """int32[T]: of this device's queries."""
        starts_c = jnp.asarray(self.starts_Cc)[self.device]
        return (starts_c[:, None] + jnp.arange(self.chunk, dtype=jnp.int32)[None]).reshape(-1)


# attend(q_BTNH, k_BSKH, v_BSKH, scope, standing, **how) -> out_BTNH; the scope has the keys' own segments.
AttendStanding = Callable[..., jax.Array]


def plain_standing(*, softcap: float | None, window: int | None) -> AttendStanding:
    """As XLA compiles it, with all that xla.make_attend can do."""
    attend = make_plain(softcap=softcap, window=window)

    def attend_standing(q_BTNH, k_BSKH, v_BSKH, scope: Scope, standing: Standing, **how):
        return attend(q_BTNH, k_BSKH, v_BSKH, scope._replace(places_T=standing.places_T), **how)

    return attend_standing


def long_standing(*, softcap: float | None, window: int | None) -> AttendStanding:
    """In blocks."""

    def attend_standing(q_BTNH, k_BSKH, v_BSKH, scope: Scope, standing: Standing):
        block = block_of(standing.chunk)
        pairs_P2 = jnp.asarray(standing_pairs(standing.starts_Cc, standing.chunk, block, window))[standing.device]
        places_S = jnp.arange(k_BSKH.shape[1], dtype=jnp.int32)
        assert scope.key_segment_ids_BS is not None  # keys of other devices come with their segments
        sight = flash.Sight(pairs_P2, scope.segment_ids_BT, scope.key_segment_ids_BS, standing.places_T, places_S)
        return flash.make_attend_seen(softcap=softcap, window=window, block=block)(q_BTNH, k_BSKH, v_BSKH, sight)

    return attend_standing


def standing_pairs(starts_Cc: np.ndarray, chunk: int, block: int, window: int | None) -> np.ndarray:
    """int32[C, P, 2]: the blocks (of queries, of keys) that may see each other, on each device.

    In zigzag order they are equally many; at the first chunk a window may reach less far. What is then missing is
    filled up with visits of the first queries, which are early, to the last keys, which are late: nothing is seen.
    """
    found = []
    for starts_c in starts_Cc:
        of_chunks = []
        for number, start in enumerate(starts_c):
            pairs_P2 = flash.visible_pairs(chunk, block, window, int(start))
            of_chunks.append(pairs_P2 + np.array([number * (chunk // block), 0], np.int32))
        found.append(np.concatenate(of_chunks))
    return np.stack(filled_up(found, [pairs_P2[:, 1].max() for pairs_P2 in found]))


def filled_up(found: Sequence[np.ndarray], late_keys: Sequence[int]) -> list[np.ndarray]:
    """Lists of pairs, equally long: the shorter with visits of the first block of queries to late keys."""
    most = max(map(len, found))
    fill = lambda pairs, late: np.full((most - len(pairs), 2), (0, late), np.int32)
    return [np.concatenate([pairs, fill(pairs, late)]) for pairs, late in zip(found, late_keys)]


def block_of(chunk: int) -> int:
    """Positions of a block, which divides the chunk."""
    largest = max(size for size in range(1, min(chunk, flash.BLOCK) + 1) if chunk % size == 0)
    return largest if largest >= LEAST_BLOCK else chunk


def gathered(attend: AttendStanding, context: ContextAxis):
    """attend(q_BtNH, k_BtKH, v_BtKH, segments, **how) -> out_BtNH: keys and values of all devices are gathered."""

    def attend_gathered(q_BtNH, k_BtKH, v_BtKH, segments: jax.Array | Scope, **how):
        k_BSKH, v_BSKH = context.all_gather((k_BtKH, v_BtKH))
        chunk = q_BtNH.shape[1] // context.chunks
        standing = Standing(context.chunk_starts(chunk), chunk, context.index())
        return attend(q_BtNH, k_BSKH, v_BSKH, scope_of_all(context, segments), standing, **how)

    return attend_gathered


def of_all_keys(largest: Callable[..., jax.Array], context: ContextAxis) -> Callable[..., jax.Array]:
    """largest(q, k, segments, **how), of own queries and the keys of all devices."""
    if context.size == 1:
        return largest

    def largest_of_all(q_BtNH, k_BtKH, segments: jax.Array | Scope, **how):
        chunk = q_BtNH.shape[1] // context.chunks
        standing = Standing(context.chunk_starts(chunk), chunk, context.index())
        scope = scope_of_all(context, segments)._replace(places_T=standing.places_T)
        return largest(q_BtNH, context.all_gather(k_BtKH), scope, **how)

    return largest_of_all


def scope_of_all(context: ContextAxis, segments: jax.Array | Scope) -> Scope:
    """The scope of own queries and all keys."""
    scope = as_scope(segments)
    return Scope(scope.segment_ids_BT, context.all_gather(scope.prefix_BT), context.all_gather(scope.segment_ids_BT))


def with_neighbours(attend: AttendStanding, far: Callable[..., jax.Array], window: int, context: ContextAxis):
    """attend(q_BtNH, k_BtKH, v_BtKH, segment_ids_Bt, **how) -> out_BtNH, where a query sees `window` keys.

    Each chunk is sent the last keys of the chunk before, where the window reaches no further; else it is `far`.
    """

    def attend_near(q_BtNH, k_BtKH, v_BtKH, segments, **how):
        chunk = q_BtNH.shape[1] // context.chunks
        block = block_of(chunk)
        sent = max(1, window - 1)
        reach = -(-sent // block) * block  # with positions in front that nobody sees, up to whole blocks
        if reach > chunk or not isinstance(segments, jax.Array):
            return far(q_BtNH, k_BtKH, v_BtKH, segments, **how)
        by_chunk = lambda x: x.reshape(x.shape[0] * context.chunks, chunk, *x.shape[2:])
        fields = (k_BtKH, v_BtKH, segments + 1)  # zeros are what comes to a chunk without another before it
        tails = tails_before(tuple(map(by_chunk, fields)), sent, context)
        front = lambda x: jnp.pad(x, [(0, 0), (reach - sent, 0)] + [(0, 0)] * (x.ndim - 2))
        join = lambda tail, x: jnp.concatenate([front(tail), by_chunk(x)], axis=1)
        k_BSKH, v_BSKH, ids_BS = map(join, tails, fields)
        scope = Scope(by_chunk(segments), key_segment_ids_BS=ids_BS - 1)
        standing = Standing(np.array([[reach]], np.int32), chunk, 0)
        return attend(by_chunk(q_BtNH), k_BSKH, v_BSKH, scope, standing, **how).reshape(*q_BtNH.shape[:3], -1)

    return attend_near


def tails_before(fields: tuple[jax.Array, ...], length: int, context: ContextAxis) -> tuple[jax.Array, ...]:
    """The last `length` positions of the chunk before each chunk, for arrays whose rows are chunks; zeros before the
    first of a row."""
    size, chunks = context.size, context.chunks
    tails = jax.tree.map(lambda x: x[:, x.shape[1] - length :].reshape(-1, chunks, length, *x.shape[2:]), fields)
    up = [(device, device + 1) for device in range(size - 1)]
    early = context.ppermute(jax.tree.map(lambda x: x[:, 0], tails), up)
    if chunks == 1:
        return early
    late = context.ppermute(jax.tree.map(lambda x: x[:, 1], tails), [(after, before) for before, after in up])
    last = context.index() == size - 1  # its two chunks are neighbours
    late = jax.tree.map(lambda own, sent: jnp.where(last, own[:, 0], sent), tails, late)
    return jax.tree.map(lambda one, two: jnp.stack([one, two], 1).reshape(-1, *one.shape[1:]), early, late)


def by_heads(attend: Callable[..., jax.Array], context: ContextAxis):
    """attend(q_BtNH, k_BtKH, v_BtKH, segments, **how) -> out_BtNH: each device has some heads of whole rows."""

    def attend_by_heads(q_BtNH, k_BtKH, v_BtKH, segments: jax.Array | Scope, **how):
        q_BTNH, k_BSKH, v_BSKH = map(context.shard_heads, (q_BtNH, k_BtKH, v_BtKH))
        out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, context.all_gather(segments), **how)
        return context.shard_positions(out_BTNH)

    return attend_by_heads
