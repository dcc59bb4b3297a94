"""How a device of a ring (ring.py) looks at keys on any platform: in pairs of blocks (flash.py).

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim  C devices
R = T * G: the queries that share a key-value head
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.ops.attention.blockwise import F32, group_heads, ungroup_heads
from jaxscale.ops.attention.context_parallel import block_of, filled_up
from jaxscale.ops.attention.flash import Pulled, Sight, Softmax, Walk
from jaxscale.ops.attention.ring import Held, make_ring
from jaxscale.sharding.context_axis import ContextAxis


def make_attend(*, softcap: float | None, window: int | None, context: ContextAxis, unrolled: bool = False):
    """attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) -> out_BTNH, of the device's own positions in zigzag order."""

    def attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        def look_of(q_BKTGH) -> WalkLook:
            _, _, T, G, _ = q_BKTGH.shape
            chunk = T // context.chunks
            return WalkLook(context, chunk, Walk(G, v_BTKH.shape[3], block_of(chunk), softcap, window))

        ring = make_ring(context, look_of, unrolled=unrolled)
        q_BKTGH = group_heads(q_BTNH, k_BTKH.shape[2])
        return ungroup_heads(ring(q_BKTGH, k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2), segment_ids_BT))

    return attend


@dataclasses.dataclass(frozen=True)
class WalkLook:
    """A ring.Look, of queries [B, K, T, G, H]."""

    context: ContextAxis
    chunk: int
    walk: Walk

    def nothing_seen(self, q_BKTGH) -> Softmax:
        """The softmax of queries before their first key."""
        return self.walk.nothing_seen(q_BKTGH)

    def visit(self, seen: Softmax, q_BKTGH, held: Held, ids_BT, step) -> Softmax:
        """The softmax with these keys in it too."""
        return self.walk.visit(seen, q_BKTGH, *held[:2], self.sight(step, ids_BT, held.segment_ids_BT))

    def settle(self, seen: Softmax, q_BKTGH):
        """(out_BKTGH, logsumexp_BKR)."""
        return self.walk.settle(seen, q_BKTGH, q_BKTGH.dtype)

    def drift(self, out_BKTGH, dout_BKTGH):
        """float32[B, K, R]"""
        return self.walk.drift(out_BKTGH, dout_BKTGH)

    def pull(self, dq_BKTGH, q_BKTGH, held: Held, ids_BT, step, *above):
        """(dq_BKTGH with these keys' part, their own dk_BKTH, dv_BKTH), float32. above: logsumexp, drift, dout."""
        zeros = Pulled(self.walk.rows(dq_BKTGH), *(jnp.zeros(x.shape, F32) for x in held[:2]))
        sight = self.sight(step, ids_BT, held.segment_ids_BT)
        dq_BKRH, dk_BKTH, dv_BKTH = self.walk.pull(zeros, q_BKTGH, *held[:2], sight, *above)
        return dq_BKRH.reshape(q_BKTGH.shape), dk_BKTH, dv_BKTH

    def sight(self, step: int | jax.Array, ids_BT, key_ids_BT) -> Sight:
        """What own queries see of the keys of the device that many steps before."""
        device, size = self.context.index(), self.context.size
        other = (device - step) % size
        at_home = isinstance(step, int) and step == 0
        tables_XP2, which_CC = met_pairs(size, self.chunk, self.walk.block, self.walk.window, at_home=at_home)
        pairs_P2 = jnp.asarray(tables_XP2)[jnp.asarray(which_CC)[device, other]]
        starts_Cc = jnp.asarray(self.context.chunk_starts(self.chunk))
        places = lambda n: (starts_Cc[n][:, None] + jnp.arange(self.chunk, dtype=jnp.int32)[None]).reshape(-1)
        return Sight(pairs_P2, ids_BT, key_ids_BT, places(device), places(other))


def met_pairs(size: int, chunk: int, block: int, window: int | None, *, at_home: bool) -> tuple[np.ndarray, np.ndarray]:
    """(int32[X, P, 2] different tables of the blocks that may see each other, in the devices' own order of positions,
    int32[C, C] the table for a device of queries and a device of keys).

    at_home: of each device with itself, else with others. In zigzag order one sees two pairs of chunks of any other.
    """
    starts_Cc = ContextAxis(size).chunk_starts(chunk // block)
    blocks = [np.concatenate([start + np.arange(chunk // block) for start in starts_c]) for starts_c in starts_Cc]
    reach = np.inf if window is None else window - 1
    met = {}
    for one, queries in enumerate(blocks):
        for two, keys in enumerate(blocks):
            if (one == two) == at_home:
                behind = (queries[:, None] - keys[None, :]) * block  # of the first positions
                met[one, two] = np.argwhere((behind >= 0) & (behind - block + 1 <= reach)).astype(np.int32)
    different = {pairs.tobytes(): pairs for pairs in met.values()}
    numbers = {key: number for number, key in enumerate(different)}
    which_CC = np.zeros((size, size), np.int32)
    for pair, pairs in met.items():
        which_CC[pair] = numbers[pairs.tobytes()]
    late = 2 * (chunk // block) - 1
    return np.stack(filled_up(list(different.values()), [late] * len(different))), which_CC
