"""Context parallelism inside shard_map: devices shard the positions of a sequence.

A causal query attends to all earlier keys, so contiguous shards would give devices unequal work. Zigzag order divides a
sequence into two chunks per device. Each device has one early and one late chunk (first and last, second and second to
last, ...), so the queries of all devices attend to the same number of keys (arXiv:2407.21783, section 3.3.2). With
Ulysses, where each device computes all positions of some heads, shards are contiguous.

B batch  T position in the whole sequence  t local position
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxscale.kernels.collectives import CollectiveBytes, LinkStage, gather_along, link_stages, scatter_along

AXIS = "context"
POSITIONS = 1  # the sharded dimension of [B, T, ...]


class AttentionBytes(NamedTuple):
    """Bytes of the local arrays in the attention of one layer and microbatch, and the number of exchanges."""

    keys: float  # keys and values
    queries: float  # mean of queries and outputs
    float32_ratio: float  # bytes of a float32 divided by bytes of an element
    forward_passes: int  # 2 if the backward pass repeats the exchange
    ring_passes: int  # forward_passes of ring attention, which is not repeated if its output is saved
    tails: float = 0.0  # keys and values within the window before each of the device's chunks
    windowed: float = 0.0  # fraction of layers that read no remote keys except these tails


@dataclasses.dataclass(frozen=True)
class ContextAxis:
    """The devices that shard a sequence. With one device, every method is the identity.

    zigzag: whether positions are in zigzag order. stages: steps of a collective, or () if it has one step. in_pipeline:
    whether the mesh has several pipeline stages, which call these methods at different times.
    """

    size: int = 1
    zigzag: bool = True
    stages: tuple[LinkStage, ...] = ()
    in_pipeline: bool = False

    @property
    def chunks(self) -> int:
        """Number of contiguous chunks per device."""
        return 2 if self.zigzag and self.size > 1 else 1

    @property
    def multiple(self) -> int:
        """Required divisor of the sequence length."""
        return self.size * self.chunks

    def chunk_starts(self, chunk: int) -> np.ndarray:
        """Returns int32[devices, chunks], the first position of each chunk. chunk: number of positions per chunk."""
        device = np.arange(self.size, dtype=np.int32)
        columns = [device] if self.chunks == 1 else [device, 2 * self.size - 1 - device]
        return np.stack(columns, axis=1) * np.int32(chunk)

    def index(self) -> jax.Array | int:
        """Returns the index of the device along the axis."""
        return 0 if self.size == 1 else lax.axis_index(AXIS)

    def local(self, tree: Any) -> Any:
        """Returns the local positions of replicated arrays [B, T, ...]."""
        return tree if self.size == 1 else jax.tree.map(self.local_array, tree)

    def local_array(self, x_BT: jax.Array) -> jax.Array:
        """Returns the local positions of one array."""
        chunk = x_BT.shape[POSITIONS] // self.multiple
        starts = jnp.asarray(self.chunk_starts(chunk))[self.index()]
        chunks = [lax.dynamic_slice_in_dim(x_BT, starts[n], chunk, POSITIONS) for n in range(self.chunks)]
        return jnp.concatenate(chunks, POSITIONS)

    def all_gather(self, tree: Any) -> Any:
        """Returns all positions in sequence order. The backward pass reduce-scatters."""
        return tree if self.size == 1 else jax.tree.map(functools.partial(_all_gather, self), tree)

    def sum(self, x: jax.Array) -> jax.Array:
        """Sums over the devices. Not differentiable."""
        return x if self.size == 1 else lax.psum(x, AXIS)

    def ppermute_next(self, tree: Any) -> Any:
        """Sends values to the next device. The last device sends to the first."""
        return self.ppermute(tree, [(device, (device + 1) % self.size) for device in range(self.size)])

    def ppermute(self, tree: Any, pairs: list[tuple[int, int]]) -> Any:
        """Sends values along (source, destination) pairs. Devices without a source receive zeros."""
        if not self.in_pipeline:
            return jax.tree.map(lambda x: lax.ppermute(x, AXIS, pairs), tree)
        # A ppermute waits for the devices of all stages, including idle ones. An all-gather waits for its group only.
        senders = {receiver: sender for sender, receiver in pairs}
        sender = jnp.asarray([senders.get(device, -1) for device in range(self.size)])[self.index()]
        received = lambda x: lax.dynamic_index_in_dim(lax.all_gather(x, AXIS), sender, keepdims=False)
        return jax.tree.map(lambda x: jnp.where(sender >= 0, received(x), jnp.zeros_like(x)), tree)

    def shard_heads(self, x_BtNH: jax.Array) -> jax.Array:
        """Changes the sharding from positions to heads with an all-to-all. Requires zigzag=False."""
        return lax.all_to_all(x_BtNH, AXIS, split_axis=2, concat_axis=POSITIONS, tiled=True)

    def shard_positions(self, x_BTNH: jax.Array) -> jax.Array:
        """Inverse of shard_heads."""
        return lax.all_to_all(x_BTNH, AXIS, split_axis=POSITIONS, concat_axis=2, tiled=True)

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over the devices. Not differentiable."""
        return x if self.size == 1 else lax.pmax(x, AXIS)

    def bytes_held(self, exchange: str, local: AttentionBytes) -> float:
        """Returns the peak memory of attention, without the local arrays. exchange: gather, ulysses or ring.

        gather: keys and values of all positions, and their gradients. ulysses: queries, keys, values and outputs of
        local heads. ring: keys and values of two other devices; three float32 buffers for their gradients; float32
        gradients of local queries; transposed queries and output gradients; and the arrays of one chunk.
        """
        keys, queries, float32_ratio, *_ = local
        if self.size == 1 or exchange == "gather" and local.windowed == 1:
            return 0.0
        if exchange == "gather":
            return 2 * self.size * keys
        if exchange == "ulysses":
            return keys + 2 * queries
        return 2 * keys + 3.5 * queries + (3 * keys + queries) * float32_ratio

    def bytes_sent(self, exchange: str, local: AttentionBytes) -> list[CollectiveBytes]:
        """Returns the bytes sent by one layer and microbatch, forward and backward. exchange: gather, ulysses or ring.

        Recomputation repeats the collectives of gather and ulysses. Window tails are sent by ppermute, or in a pipeline
        by all-gather and reduce-scatter. A ring of C devices sends keys and values C - 1 times per pass, but XLA merges
        one send of recomputation with the backward pass. Gradients are sent C times, in float32 except for the last
        time.
        """
        keys, passes, remote = local.keys, local.forward_passes, 1 - local.windowed
        send = lambda kind, nbytes: [CollectiveBytes(AXIS, kind, nbytes)]
        gather = lambda local_bytes: (
            send("all-gather", passes * self.size * local_bytes) + send("reduce-scatter", self.size * local_bytes)
        )
        if self.size == 1:
            return []
        if exchange == "ulysses":
            return send("all-to-all", (passes + 1) * (keys + 2 * local.queries))
        tails = local.windowed * local.tails
        sent = gather(tails) if self.in_pipeline else send("collective-permute", (passes + 1) * tails)
        hops = (self.size - 1) * (local.ring_passes + 1 + local.float32_ratio) - local.ring_passes + 2
        ring = exchange == "ring"
        sent += send("collective-permute", remote * hops * keys) if ring else gather(remote * keys)
        return [one for one in sent if one.nbytes]


NO_CONTEXT_AXIS = ContextAxis()


def make_context_axis(mesh: Mesh, *, zigzag: bool = True, torus_at_once: bool = False) -> ContextAxis:
    """Returns the context axis of a mesh. torus_at_once: see link_stages()."""
    stages = link_stages(mesh, AXIS, torus_at_once=torus_at_once)
    return ContextAxis(mesh.shape[AXIS], zigzag, stages, in_pipeline=mesh.shape["pipeline"] > 1)


def to_row_order(context: ContextAxis, x_BT: jax.Array) -> jax.Array:
    """Reorders positions from device order to sequence order."""
    if context.chunks == 1:
        return x_BT
    x = x_BT.reshape(x_BT.shape[0], context.size, 2, -1, *x_BT.shape[2:])
    return jnp.concatenate([x[:, :, 0], x[:, ::-1, 1]], POSITIONS).reshape(x_BT.shape)


def to_device_order(context: ContextAxis, x_BT: jax.Array) -> jax.Array:
    """Inverse of to_row_order."""
    if context.chunks == 1:
        return x_BT
    early, late = jnp.split(x_BT.reshape(x_BT.shape[0], 2 * context.size, -1, *x_BT.shape[2:]), 2, POSITIONS)
    return jnp.stack([early, late[:, ::-1]], 2).reshape(x_BT.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_gather(context: ContextAxis, x_Bt: jax.Array) -> jax.Array:
    # One function gathers and reorders, so that remat policies recognize a gather and save neither result.
    return to_row_order(context, gather_along(x_Bt, AXIS, POSITIONS, context.stages))


def _all_gather_backward(context: ContextAxis, _: None, dx_BT: jax.Array) -> tuple[jax.Array]:
    return (scatter_along(to_device_order(context, dx_BT), AXIS, POSITIONS, context.stages),)


_all_gather.defvjp(lambda context, x_Bt: (_all_gather(context, x_Bt), None), _all_gather_backward)
