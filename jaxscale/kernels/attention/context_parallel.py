"""Context parallelism: attention of devices that each have some positions of a row.

Keys and values are all-gathered, or with a window only received from the chunk before; or Ulysses (arXiv:2309.14509)
exchanges positions for heads, so that each device attends to whole rows with some of the heads. See also ring.py.

B batch  T query position  S key position  N query heads  K key-value heads  H head dim  C devices  c chunks of a device
t: local positions; a chunk of them is consecutive
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.core.axes.context_axis import ContextAxis
from jaxscale.kernels.attention import flash
from jaxscale.kernels.attention.xla import MaskSpec, as_mask_spec
from jaxscale.kernels.attention.xla import make_attend as make_plain

MIN_BLOCK = 32  # positions; a chunk without a larger divisor of at most flash.BLOCK is one block


@dataclasses.dataclass(frozen=True)
class QueryPositions:
    """Positions of each device's queries among the keys."""

    starts_Cc: np.ndarray  # int32: first position of each chunk
    chunk: int
    device: jax.Array | int  # index of this device

    @property
    def positions_T(self) -> jax.Array:
        """int32[T]: positions of this device's queries."""
        starts_c = jnp.asarray(self.starts_Cc)[self.device]
        return (starts_c[:, None] + jnp.arange(self.chunk, dtype=jnp.int32)[None]).reshape(-1)


# attend(q_BTNH, k_BSKH, v_BSKH, spec, positions, **kwargs) -> out_BTNH; spec has key_segment_ids_BS.
PositionedAttend = Callable[..., jax.Array]


def make_xla_positioned(*, softcap: float | None, window: int | None) -> PositionedAttend:
    """Returns the reference attention for queries at given positions; it supports all of xla.make_attend."""
    attend = make_plain(softcap=softcap, window=window)

    def positioned_attend(q_BTNH, k_BSKH, v_BSKH, spec: MaskSpec, positions: QueryPositions, **kwargs):
        return attend(q_BTNH, k_BSKH, v_BSKH, spec._replace(query_positions_T=positions.positions_T), **kwargs)

    return positioned_attend


def make_flash_positioned(*, softcap: float | None, window: int | None) -> PositionedAttend:
    """Returns FlashAttention for queries at given positions."""

    def positioned_attend(q_BTNH, k_BSKH, v_BSKH, spec: MaskSpec, positions: QueryPositions):
        block = chunk_block_size(positions.chunk)
        pairs_CP2 = positioned_block_pairs(positions.starts_Cc, positions.chunk, block, window)
        pairs_P2 = jnp.asarray(pairs_CP2)[positions.device]
        positions_S, positions_T = jnp.arange(k_BSKH.shape[1], dtype=jnp.int32), positions.positions_T
        assert spec.key_segment_ids_BS is not None  # keys of other devices come with their segments
        block_mask = flash.BlockMask(pairs_P2, spec.segment_ids_BT, spec.key_segment_ids_BS, positions_T, positions_S)
        return flash.make_masked_attend(softcap=softcap, window=window, block=block)(q_BTNH, k_BSKH, v_BSKH, block_mask)

    return positioned_attend


def positioned_block_pairs(starts_Cc: np.ndarray, chunk: int, block: int, window: int | None) -> np.ndarray:
    """int32[C, P, 2]: visible (query block, key block) of each device.

    In zigzag order all devices have as many, except that a window is cut off at the first chunk; see pad_block_pairs().
    """
    device_pairs = []
    for starts_c in starts_Cc:
        chunk_pairs = []
        for number, start in enumerate(starts_c):
            pairs_P2 = flash.visible_pairs(chunk, block, window, int(start))
            chunk_pairs.append(pairs_P2 + np.array([number * (chunk // block), 0], np.int32))
        device_pairs.append(np.concatenate(chunk_pairs))
    return np.stack(pad_block_pairs(device_pairs, [pairs_P2[:, 1].max() for pairs_P2 in device_pairs]))


def pad_block_pairs(lists: Sequence[np.ndarray], last_key_blocks: Sequence[int]) -> list[np.ndarray]:
    """Pads lists of pairs to one length with (first query block, last key block), which are fully masked."""
    length = max(map(len, lists))
    padding = lambda pairs, last: np.full((length - len(pairs), 2), (0, last), np.int32)
    return [np.concatenate([pairs, padding(pairs, last)]) for pairs, last in zip(lists, last_key_blocks)]


def chunk_block_size(chunk: int) -> int:
    """Positions of a block: the largest divisor of the chunk up to flash.BLOCK, or the chunk."""
    largest = max(size for size in range(1, min(chunk, flash.BLOCK) + 1) if chunk % size == 0)
    return largest if largest >= MIN_BLOCK else chunk


def all_gather_kv(attend: PositionedAttend, context: ContextAxis):
    """Returns attend(q_BtNH, k_BtKH, v_BtKH, segments, **kwargs) -> out_BtNH, which all-gathers keys and values."""

    def attend_gathered(q_BtNH, k_BtKH, v_BtKH, segments: jax.Array | MaskSpec, **kwargs):
        k_BSKH, v_BSKH = context.all_gather((k_BtKH, v_BtKH))
        chunk = q_BtNH.shape[1] // context.chunks
        positions = QueryPositions(context.chunk_starts(chunk), chunk, context.index())
        return attend(q_BtNH, k_BSKH, v_BSKH, gather_mask_spec(context, segments), positions, **kwargs)

    return attend_gathered


def over_all_keys(f: Callable[..., jax.Array], context: ContextAxis) -> Callable[..., jax.Array]:
    """Returns f(q, k, segments, **kwargs) of local queries and the keys of all devices."""
    if context.size == 1:
        return f

    def f_all_keys(q_BtNH, k_BtKH, segments: jax.Array | MaskSpec, **kwargs):
        chunk = q_BtNH.shape[1] // context.chunks
        positions = QueryPositions(context.chunk_starts(chunk), chunk, context.index())
        spec = gather_mask_spec(context, segments)._replace(query_positions_T=positions.positions_T)
        return f(q_BtNH, context.all_gather(k_BtKH), spec, **kwargs)

    return f_all_keys


def gather_mask_spec(context: ContextAxis, segments: jax.Array | MaskSpec) -> MaskSpec:
    """Returns the MaskSpec of local queries and all keys."""
    spec = as_mask_spec(segments)
    return MaskSpec(spec.segment_ids_BT, context.all_gather(spec.prefix_BT), context.all_gather(spec.segment_ids_BT))


def with_neighbour_chunks(attend: PositionedAttend, fallback: Callable, window: int, context: ContextAxis):
    """Returns attend(q_BtNH, k_BtKH, v_BtKH, segment_ids_Bt, **kwargs) -> out_BtNH with a sliding window.

    Each chunk receives the last keys of the chunk before it; `fallback` runs where the window is longer than a chunk.
    """

    def attend_neighbours(q_BtNH, k_BtKH, v_BtKH, segments, **kwargs):
        chunk = q_BtNH.shape[1] // context.chunks
        block = chunk_block_size(chunk)
        tail = max(1, window - 1)
        padded_tail = -(-tail // block) * block  # masked positions in front, up to whole blocks
        if padded_tail > chunk or not isinstance(segments, jax.Array):
            return fallback(q_BtNH, k_BtKH, v_BtKH, segments, **kwargs)
        by_chunk = lambda x: x.reshape(x.shape[0] * context.chunks, chunk, *x.shape[2:])
        fields = (k_BtKH, v_BtKH, segments + 1)  # the first chunk of a row receives zeros: no segment
        tails = previous_tails(tuple(map(by_chunk, fields)), tail, context)
        pad = lambda x: jnp.pad(x, [(0, 0), (padded_tail - tail, 0)] + [(0, 0)] * (x.ndim - 2))
        prepend = lambda tail, x: jnp.concatenate([pad(tail), by_chunk(x)], axis=1)
        k_BSKH, v_BSKH, ids_BS = map(prepend, tails, fields)
        spec = MaskSpec(by_chunk(segments), key_segment_ids_BS=ids_BS - 1)
        positions = QueryPositions(np.array([[padded_tail]], np.int32), chunk, 0)
        return attend(by_chunk(q_BtNH), k_BSKH, v_BSKH, spec, positions, **kwargs).reshape(*q_BtNH.shape[:3], -1)

    return attend_neighbours


def previous_tails(fields: tuple[jax.Array, ...], length: int, context: ContextAxis) -> tuple[jax.Array, ...]:
    """Returns the last `length` positions of the chunk before each chunk, zeros before a row. fields: [chunks, ...]."""
    size, chunks = context.size, context.chunks
    tails = jax.tree.map(lambda x: x[:, x.shape[1] - length :].reshape(-1, chunks, length, *x.shape[2:]), fields)
    to_next = [(device, device + 1) for device in range(size - 1)]
    from_previous = context.ppermute(jax.tree.map(lambda x: x[:, 0], tails), to_next)
    if chunks == 1:
        return from_previous
    from_next = context.ppermute(jax.tree.map(lambda x: x[:, 1], tails), [(after, before) for before, after in to_next])
    is_last = context.index() == size - 1  # its two chunks are neighbours
    from_next = jax.tree.map(lambda local, tail: jnp.where(is_last, local[:, 0], tail), tails, from_next)
    return jax.tree.map(lambda a, b: jnp.stack([a, b], 1).reshape(-1, *a.shape[1:]), from_previous, from_next)


def ulysses(attend: Callable[..., jax.Array], context: ContextAxis):
    """Returns attend(q_BtNH, k_BtKH, v_BtKH, segments, **kwargs) -> out_BtNH; `attend` gets whole rows."""

    def attend_ulysses(q_BtNH, k_BtKH, v_BtKH, segments: jax.Array | MaskSpec, **kwargs):
        q_BTNH, k_BSKH, v_BSKH = map(context.shard_heads, (q_BtNH, k_BtKH, v_BtKH))
        out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, context.all_gather(segments), **kwargs)
        return context.shard_positions(out_BTNH)

    return attend_ulysses
