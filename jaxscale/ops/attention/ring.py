"""Attention of devices that share a row, whose keys and values go round (arXiv:2310.01889): none holds all of them.

Each device passes on what it has while it looks at it. The softmax is kept between one device's keys and the next.
Going back, keys and values go round once more with the logarithm of the sums over all of them, and their gradients
travel with them, from device to device, until they are home.

B batch  T query position  S key position  K key-value heads  G query heads per key-value head  H head dim  C devices
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.attention.blockwise import F32, group_heads, ungroup_heads
from jaxscale.ops.attention.long import Pulled, Sight, Walk
from jaxscale.ops.attention.shared_rows import block_of, filled_up
from jaxscale.ops.config import ATTENTION_OUT
from jaxscale.sharding.context_axis import ContextAxis


def make_attend(*, softcap: float | None, window: int | None, context: ContextAxis):
    """attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) -> out_BTNH, of the device's own positions in zigzag order."""

    @jax.custom_vjp
    def attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        return keep(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)[0]

    def ring_of(q_BKTGH) -> Ring:
        _, _, T, G, H = q_BKTGH.shape
        chunk = T // context.chunks
        return Ring(context, chunk, Walk(G, H, block_of(chunk), softcap, window))

    def keep(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        q_BKTGH, k_BKTH, v_BKTH = group_heads(q_BTNH, k_BTKH.shape[2]), k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
        results = ring_of(q_BKTGH).forward(q_BKTGH, (k_BKTH, v_BKTH, segment_ids_BT))
        out_BKTGH, lse_BKR = (checkpoint_name(result, ATTENTION_OUT) for result in results)
        return ungroup_heads(out_BKTGH), (q_BKTGH, (k_BKTH, v_BKTH, segment_ids_BT), out_BKTGH, lse_BKR)

    def backward(saved, dout_BTNH):
        q_BKTGH, held, out_BKTGH, lse_BKR = saved
        dout_BKTGH = group_heads(dout_BTNH, held[0].shape[1])
        dq_BKTGH, dk_BKTH, dv_BKTH = ring_of(q_BKTGH).backward(q_BKTGH, held, out_BKTGH, lse_BKR, dout_BKTGH)
        return ungroup_heads(dq_BKTGH), dk_BKTH.swapaxes(1, 2), dv_BKTH.swapaxes(1, 2), None

    attend.defvjp(keep, backward)
    return attend


@dataclasses.dataclass(frozen=True)
class Ring:
    """The way of keys and values past all devices. held: (k_BKTH, v_BKTH, segment_ids_BT) of one of them."""

    context: ContextAxis
    chunk: int
    walk: Walk

    def forward(self, q_BKTGH, held):
        """(out_BKTGH in v.dtype, logsumexp_BKR float32)."""
        ids_BT = held[2]

        def look(step, softmax, held):
            return self.walk.visit(softmax, q_BKTGH, *held[:2], self.sight(step, ids_BT, held[2]))

        softmax = self.walk.nothing_seen(q_BKTGH)
        for first, last in self.runs():
            softmax, held = self.go_round(look, softmax, held, first, last)
        return self.walk.settle(softmax, q_BKTGH, held[1].dtype)

    def backward(self, q_BKTGH, held, out_BKTGH, lse_BKR, dout_BKTGH):
        """Gradients (dq_BKTGH, dk_BKTH, dv_BKTH) in the dtypes of q, k, v."""
        ids_BT, drift_BKR = held[2], self.walk.drift(out_BKTGH, dout_BKTGH)

        def look(step, grads, held):
            dq_BKRH, dkv = grads
            dkv = self.context.to_next(dkv)  # beside the products: those of this device come on top of them
            zeros = Pulled(dq_BKRH, *map(jnp.zeros_like, dkv))
            sight = self.sight(step, ids_BT, held[2])
            own = self.walk.pull(zeros, q_BKTGH, *held[:2], sight, lse_BKR, drift_BKR, dout_BKTGH)
            return own.dq_BKRH, (dkv[0] + own.dk_BKSH, dkv[1] + own.dv_BKSH)

        zeros = lambda x: jnp.zeros(x.shape, F32)
        grads = zeros(self.walk.rows(q_BKTGH)), (zeros(held[0]), zeros(held[1]))
        like_k, like_v = held[:2]
        for first, last in self.runs():
            grads, held = self.go_round(look, grads, held, first, last)
        dq_BKRH, dkv = grads
        dk_BKTH, dv_BKTH = self.context.to_next(dkv)
        dq_BKTGH = dq_BKRH.astype(q_BKTGH.dtype).reshape(q_BKTGH.shape)
        return dq_BKTGH, dk_BKTH.astype(like_k.dtype), dv_BKTH.astype(like_v.dtype)

    def runs(self) -> list[tuple[int, int]]:
        """Steps (from, up to) that are compiled together: a device's own keys, those of most others, of the last."""
        size = self.context.size
        return [run for run in ((0, 1), (1, size - 1), (size - 1, size)) if run[0] < run[1]]

    def go_round(self, look: Any, so_far: Any, held: Any, first: int, last: int) -> tuple[Any, Any]:
        """look(step, so_far, held) -> so_far in each step; what is held is on its way to the next device meanwhile."""
        if first == self.context.size - 1:
            return look(first, so_far, held), held

        def step(carry, number):
            so_far, held = carry
            arriving = self.context.to_next(held)
            return (look(number, so_far, held), arriving), None

        if last - first == 1:
            return step((so_far, held), first)[0]
        return lax.scan(step, (so_far, held), jnp.arange(first, last, dtype=jnp.int32))[0]

    def sight(self, step: int | jax.Array, ids_BT, key_ids_BT) -> Sight:
        """What own queries see of the keys of the device that many steps before."""
        device, size = self.context.index(), self.context.size
        other = (device - step) % size
        at_home = isinstance(step, int) and step == 0
        tables_XP2, which_CC = met_pairs(size, self.chunk, self.walk.block, self.walk.window, at_home=at_home)
        pairs_P2 = jnp.asarray(tables_XP2)[jnp.asarray(which_CC)[device, other]]
        starts_Cc = jnp.asarray(self.context.starts(self.chunk))
        places = lambda n: (starts_Cc[n][:, None] + jnp.arange(self.chunk, dtype=jnp.int32)[None]).reshape(-1)
        return Sight(pairs_P2, ids_BT, key_ids_BT, places(device), places(other))


def met_pairs(size: int, chunk: int, block: int, window: int | None, *, at_home: bool) -> tuple[np.ndarray, np.ndarray]:
    """(int32[X, P, 2] different tables of the blocks that may see each other, in the devices' own order of positions,
    int32[C, C] the table for a device of queries and a device of keys).

    at_home: of each device with itself, else with others. In zigzag order one sees two pairs of chunks of any other.
    """
    starts_Cc = ContextAxis(size).starts(chunk // block)
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
