"""Ring attention (arXiv:2310.01889): devices that share a sequence send keys and values around a ring.

Each device attends to a shard of keys and values while it sends the shard to the next device. The softmax is
accumulated over shards. The backward pass sends keys and values around the ring again, together with their gradients,
which return to the device of the keys. RingKernels attend to one shard: ring_flash.py, and ring_splash.py on TPUs.

B batch  T local position of queries and keys  K key-value heads  H head dim
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.core.axes.context_axis import ContextAxis
from jaxscale.kernels.attention.blockwise import F32
from jaxscale.kernels.config import ATTENTION_OUT
from jaxscale.kernels.gradient import custom_vjp


class KVShard(NamedTuple):
    """Keys, values and segment ids of one device, which are sent around the ring."""

    k_BKTH: jax.Array
    v_BKTH: jax.Array
    segment_ids_BT: jax.Array


class RingKernel(Protocol):
    """Attention of local queries to the keys of one device. The order of dimensions depends on the implementation.

    step: number of ring steps from the device of the keys to this device; 0 for local keys, a Python int if static.
    state: online softmax over the keys processed so far. logsumexp and delta, the sum of out * dout, are float32.
    """

    def init(self, q: jax.Array, /) -> Any:
        """Returns the state before the first key."""
        ...

    def accumulate(self, state: Any, q: jax.Array, kv: KVShard, ids_BT: jax.Array, step: int | jax.Array, /) -> Any:
        """Returns the state after processing these keys. ids_BT: segment ids of the queries."""
        ...

    def finalize(self, state: Any, q: jax.Array, /) -> tuple[jax.Array, jax.Array]:
        """Returns (out like q, logsumexp) from the state after all keys."""
        ...

    def delta(self, out: jax.Array, dout: jax.Array, /) -> jax.Array:
        """Returns sum(out * dout) of each query."""
        ...

    def accumulate_grads(
        self,
        dq: jax.Array,
        q: jax.Array,
        kv: KVShard,
        ids_BT: jax.Array,
        step: int | jax.Array,
        logsumexp: jax.Array,
        delta: jax.Array,
        dout: jax.Array,
        /,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (dq including these keys, dk_BKTH, dv_BKTH), float32. logsumexp: logsumexp over all keys."""
        ...


def make_ring_attend(
    context: ContextAxis, make_kernel: Callable[[jax.Array], RingKernel], *, unrolled: bool = False
) -> Callable[..., jax.Array]:
    """Returns attend(q, k_BKTH, v_BKTH, segment_ids_BT) -> out like q, for positions in zigzag order.

    unrolled: whether to unroll the steps. XLA:CPU needs this, because its devices run collectives inside and outside of
    a loop in different orders. On 8 devices, one layer crashed or hung in 12 of 12 runs with a loop, and in 0 of 8 runs
    without a loop (jaxlib 0.10.2 with default flags, 2026-11-24).
    """

    @custom_vjp
    def attend(q, k_BKTH, v_BKTH, segment_ids_BT):
        return forward(q, k_BKTH, v_BKTH, segment_ids_BT)[0]

    def forward(q, *kv):
        results = Ring(context, make_kernel(q), unrolled).forward(q, KVShard(*kv))
        out, logsumexp = (checkpoint_name(result, ATTENTION_OUT) for result in results)
        return out, (q, KVShard(*kv), out, logsumexp)

    def backward(saved, dout):
        q, kv, out, logsumexp = saved
        return *Ring(context, make_kernel(q), unrolled).backward(q, kv, out, logsumexp, dout), None

    attend.defvjp(forward, backward)
    return attend


@dataclasses.dataclass(frozen=True)
class Ring:
    """Forward and backward pass of ring attention on one device."""

    context: ContextAxis
    kernel: RingKernel
    unrolled: bool

    def forward(self, q: jax.Array, kv: KVShard) -> tuple[jax.Array, jax.Array]:
        """Returns (out like q, logsumexp)."""
        ids_BT = kv.segment_ids_BT

        def attend_step(step, state, kv):
            return self.kernel.accumulate(state, q, kv, ids_BT, step)

        state = self.kernel.init(q)
        for begin, end in self.step_ranges():
            state, kv = self.run_steps(attend_step, state, kv, begin, end)
        return self.kernel.finalize(state, q)

    def backward(self, q: jax.Array, kv: KVShard, out, logsumexp, dout) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (dq, dk_BKTH, dv_BKTH) in the dtypes of q, k, v."""
        ids_BT, residuals = kv.segment_ids_BT, (logsumexp, self.kernel.delta(out, dout), dout)

        def backward_step(step, grads, kv):
            dq, dkv = grads
            if dkv is not None:
                dkv = self.context.ppermute_next(dkv)  # sent during the matmuls, whose results are added afterwards
            dq, *local_dkv = self.kernel.accumulate_grads(dq, q, kv, ids_BT, step, *residuals)
            return dq, tuple(local_dkv if dkv is None else map(jnp.add, dkv, local_dkv))

        dtypes = [x.dtype for x in kv[:2]]
        grads = jnp.zeros(q.shape, F32), None
        for begin, end in self.step_ranges():
            grads, kv = self.run_steps(backward_step, grads, kv, begin, end)
        dq, dkv = grads
        assert dkv is not None  # set by step 0
        return dq.astype(q.dtype), *self.context.ppermute_next(tuple(x.astype(dtype) for x, dtype in zip(dkv, dtypes)))

    def step_ranges(self) -> list[tuple[int, int]]:
        """Returns ranges (begin, end) of ring steps: the local keys, the steps in a loop, and the last step."""
        size = self.context.size
        return [steps for steps in ((0, 1), (1, size - 1), (size - 1, size)) if steps[0] < steps[1]]

    def run_steps(self, f: Callable, carry: Any, kv: KVShard, begin: int, end: int) -> tuple[Any, KVShard]:
        """Runs carry = f(step, carry, kv) for each step, while kv is sent to the next device."""
        if begin == self.context.size - 1:
            return f(begin, carry, kv), kv

        def body(carry_kv, step):
            carry, kv = carry_kv
            next_kv = self.context.ppermute_next(kv)
            return (f(step, carry, kv), next_kv), None

        if end - begin == 1:
            return body((carry, kv), begin)[0]
        return lax.scan(body, (carry, kv), jnp.arange(begin, end, dtype=jnp.int32), unroll=self.unrolled)[0]
