"""The context axis by hand: devices that share the positions of a row, each with its own queries, keys and values.

A causal query sees all keys before it, so that equal runs of positions would be unequal work. In zigzag order a row is
cut into twice as many chunks as there are devices, and each has an early and a late one, the first with the last, the
second with the last but one: all see equally many keys (arXiv:2407.21783, section 3.3.2). Where each device computes
whole rows of some heads, the order is that of the row.

B batch  T position of a whole row  t position of the device's own
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxscale.sharding.torus import LinkStage, gather_along, link_stages, scatter_along

AXIS = "context"
POSITIONS = 1  # the dimension of [B, T, ...] that is cut


@dataclasses.dataclass(frozen=True)
class ContextAxis:
    """The devices that share a row. With one of them every method leaves things as they are.

    zigzag: the order of positions. stages: the devices that share each link, where the axis runs along several.
    in_pipeline: they are in one stage of several, which call these methods each in its own time.
    """

    size: int = 1
    zigzag: bool = True
    stages: tuple[LinkStage, ...] = ()
    in_pipeline: bool = False

    @property
    def chunks(self) -> int:
        """Consecutive runs of positions that a device has."""
        return 2 if self.zigzag and self.size > 1 else 1

    @property
    def multiple(self) -> int:
        """What must divide the positions of a row."""
        return self.size * self.chunks

    def starts(self, chunk: int) -> np.ndarray:
        """int32[devices, chunks]: the place in the row where each chunk of each device begins."""
        device = np.arange(self.size, dtype=np.int32)
        columns = [device] if self.chunks == 1 else [device, 2 * self.size - 1 - device]
        return np.stack(columns, axis=1) * np.int32(chunk)

    def index(self) -> jax.Array | int:
        """The number of the device."""
        return 0 if self.size == 1 else lax.axis_index(AXIS)

    def own(self, tree: Any) -> Any:
        """The device's own positions of arrays [B, T, ...] that every device has whole."""
        return tree if self.size == 1 else jax.tree.map(self.own_of, tree)

    def own_of(self, x_BT: jax.Array) -> jax.Array:
        """The device's own positions of one array."""
        chunk = x_BT.shape[POSITIONS] // self.multiple
        starts = jnp.asarray(self.starts(chunk))[self.index()]
        cut = [lax.dynamic_slice_in_dim(x_BT, starts[n], chunk, POSITIONS) for n in range(self.chunks)]
        return jnp.concatenate(cut, POSITIONS)

    def whole(self, tree: Any) -> Any:
        """All positions in the order of the row, from each device's own. Going back, its own of summed gradients."""
        return tree if self.size == 1 else jax.tree.map(functools.partial(_whole, self), tree)

    def to_next(self, tree: Any) -> Any:
        """What the device before has, the last being before the first."""
        return self.sent(tree, [(device, (device + 1) % self.size) for device in range(self.size)])

    def sent(self, tree: Any, pairs: list[tuple[int, int]]) -> Any:
        """What was sent along these (from, to); zeros where nothing was."""
        if not self.in_pipeline:
            return jax.tree.map(lambda x: lax.ppermute(x, AXIS, pairs), tree)
        # A permutation waits for the devices of all stages, of which some are idle; a gather for its own group.
        senders = {receiver: sender for sender, receiver in pairs}
        sender = jnp.asarray([senders.get(device, -1) for device in range(self.size)])[self.index()]
        received = lambda x: lax.dynamic_index_in_dim(lax.all_gather(x, AXIS), sender, keepdims=False)
        return jax.tree.map(lambda x: jnp.where(sender >= 0, received(x), jnp.zeros_like(x)), tree)

    def heads_for_positions(self, x_BtNH: jax.Array) -> jax.Array:
        """All positions of the device's share of the heads, from its own positions of all heads. Not for zigzag."""
        return lax.all_to_all(x_BtNH, AXIS, split_axis=2, concat_axis=POSITIONS, tiled=True)

    def positions_for_heads(self, x_BTNH: jax.Array) -> jax.Array:
        """The inverse of heads_for_positions."""
        return lax.all_to_all(x_BTNH, AXIS, split_axis=POSITIONS, concat_axis=2, tiled=True)

    def max(self, x: jax.Array) -> jax.Array:
        """The largest among the devices. Not to be differentiated."""
        return x if self.size == 1 else lax.pmax(x, AXIS)


WHOLE_ROWS = ContextAxis()


def make_context_axis(mesh: Mesh, *, zigzag: bool = True, torus_at_once: bool = False) -> ContextAxis:
    """The context axis of this mesh. torus_at_once: as for link_stages."""
    stages = link_stages(mesh, AXIS, torus_at_once=torus_at_once)
    return ContextAxis(mesh.shape[AXIS], zigzag, stages, in_pipeline=mesh.shape["pipeline"] > 1)


def to_row_order(context: ContextAxis, x_BT: jax.Array) -> jax.Array:
    """Positions in the order of the row, from one device after the other."""
    if context.chunks == 1:
        return x_BT
    x = x_BT.reshape(x_BT.shape[0], context.size, 2, -1, *x_BT.shape[2:])
    return jnp.concatenate([x[:, :, 0], x[:, ::-1, 1]], POSITIONS).reshape(x_BT.shape)


def to_device_order(context: ContextAxis, x_BT: jax.Array) -> jax.Array:
    """The inverse of to_row_order."""
    if context.chunks == 1:
        return x_BT
    early, late = jnp.split(x_BT.reshape(x_BT.shape[0], 2 * context.size, -1, *x_BT.shape[2:]), 2, POSITIONS)
    return jnp.stack([early, late[:, ::-1]], 2).reshape(x_BT.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(context: ContextAxis, x_Bt: jax.Array) -> jax.Array:
    # One function with the change of order in it, so that remat policies see a gather: neither is kept.
    return to_row_order(context, gather_along(x_Bt, AXIS, POSITIONS, context.stages))


def _whole_backward(context: ContextAxis, _: None, dx_BT: jax.Array) -> tuple[jax.Array]:
    return (scatter_along(to_device_order(context, dx_BT), AXIS, POSITIONS, context.stages),)


_whole.defvjp(lambda context, x_Bt: (_whole(context, x_Bt), None), _whole_backward)
