"""Attention of devices that share a row, whose keys and values go round (arXiv:2310.01889): none holds all of them.

Each device passes on what it has while it looks at it. The softmax is kept between one device's keys and the next.
Going back, keys and values go round once more with the logarithm of the sums over all of them, and their gradients
travel with them, from device to device, until they are home. How a device looks at the keys of one of them is left to
ring_flash.py, for any platform, and ring_splash.py, the kernel of TPUs.

B batch  T position of a device's own, of queries and of keys  K key-value heads  H head dim
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.attention.blockwise import F32
from jaxscale.ops.config import ATTENTION_OUT
from jaxscale.ops.gradient import custom_vjp
from jaxscale.sharding.context_axis import ContextAxis


class Held(NamedTuple):
    """Of one device, on its way round."""

    k_BKTH: jax.Array
    v_BKTH: jax.Array
    segment_ids_BT: jax.Array


class Look(Protocol):
    """How a device's own queries look at the keys of one device, in an order of dimensions of its own.

    step: how many devices before it that one is; an int where it is known to the compiler, as 0, the device itself, is.
    Seen: all that was seen so far. The logsumexp and the drift, the part of a score's gradient that all keys of a query
    share, are float32.
    """

    def nothing_seen(self, q: jax.Array, /) -> Any:
        """What queries have seen before their first key."""
        ...

    def visit(self, seen: Any, q: jax.Array, held: Held, ids_BT: jax.Array, step: int | jax.Array, /) -> Any:
        """What queries have seen with these keys too. ids_BT: the queries' segments."""
        ...

    def settle(self, seen: Any, q: jax.Array, /) -> tuple[jax.Array, jax.Array]:
        """(out like q, logsumexp) of queries that have seen all keys."""
        ...

    def drift(self, out: jax.Array, dout: jax.Array, /) -> jax.Array:
        """The drift of each query."""
        ...

    def pull(
        self,
        dq: jax.Array,
        q: jax.Array,
        held: Held,
        ids_BT: jax.Array,
        step: int | jax.Array,
        logsumexp: jax.Array,
        drift: jax.Array,
        dout: jax.Array,
        /,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(dq with these keys' part, their own dk_BKTH, dv_BKTH), float32. logsumexp: of all keys."""
        ...


def make_ring(context: ContextAxis, look_of: Callable[[jax.Array], Look], *, unrolled: bool = False):
    """attend(q, k_BKTH, v_BKTH, segment_ids_BT) -> out like q, in zigzag order. look_of(q): how q looks at keys.

    unrolled: compiled one step after the other, without a loop, as XLA:CPU needs it. There nothing keeps a collective
    of a loop and one beside it in one order on all devices (jaxlib 0.10.2 as it is by default, 2026-11-24: with the
    loop, one layer on 8 devices crashed or stood still in 12 of 12 runs; without it none of 8 did).
    """

    @custom_vjp
    def attend(q, k_BKTH, v_BKTH, segment_ids_BT):
        return keep(q, k_BKTH, v_BKTH, segment_ids_BT)[0]

    def keep(q, *held):
        results = Ring(context, look_of(q), unrolled).forward(q, Held(*held))
        out, logsumexp = (checkpoint_name(result, ATTENTION_OUT) for result in results)
        return out, (q, Held(*held), out, logsumexp)

    def backward(saved, dout):
        q, held, out, logsumexp = saved
        return *Ring(context, look_of(q), unrolled).backward(q, held, out, logsumexp, dout), None

    attend.defvjp(keep, backward)
    return attend


@dataclasses.dataclass(frozen=True)
class Ring:
    """The way of keys and values past all devices."""

    context: ContextAxis
    look: Look
    unrolled: bool

    def forward(self, q: jax.Array, held: Held) -> tuple[jax.Array, jax.Array]:
        """(out like q, logsumexp)."""
        ids_BT = held.segment_ids_BT

        def look(step, seen, held):
            return self.look.visit(seen, q, held, ids_BT, step)

        seen = self.look.nothing_seen(q)
        for first, last in self.runs():
            seen, held = self.go_round(look, seen, held, first, last)
        return self.look.settle(seen, q)

    def backward(self, q: jax.Array, held: Held, out, logsumexp, dout) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients (dq, dk_BKTH, dv_BKTH) in the dtypes of q, k, v."""
        ids_BT, above = held.segment_ids_BT, (logsumexp, self.look.drift(out, dout), dout)

        def look(step, grads, held):
            dq, dkv = grads
            if dkv is not None:
                dkv = self.context.ppermute_next(dkv)  # overlaps the products below
            dq, *own = self.look.pull(dq, q, held, ids_BT, step, *above)
            return dq, tuple(own if dkv is None else map(jnp.add, dkv, own))

        dtypes = [x.dtype for x in held[:2]]
        grads = jnp.zeros(q.shape, F32), None
        for first, last in self.runs():
            grads, held = self.go_round(look, grads, held, first, last)
        dq, dkv = grads
        assert dkv is not None  # the first of runs() takes the device's own keys
        return dq.astype(q.dtype), *self.context.ppermute_next(tuple(x.astype(dtype) for x, dtype in zip(dkv, dtypes)))

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
            arriving = self.context.ppermute_next(held)
            return (look(number, so_far, held), arriving), None

        if last - first == 1:
            return step((so_far, held), first)[0]
        numbers = jnp.arange(first, last, dtype=jnp.int32)
        return lax.scan(step, (so_far, held), numbers, unroll=self.unrolled)[0]
