"""The tensor axis by hand: each device multiplies with its own heads, its part of the MLP and of the vocabulary.

Between products a device holds some positions of the residual stream (arXiv:2205.05198). It gathers all of them before
a product with its columns of a weight; after one with its rows, the sum over the devices leaves it with its own again.
A parameter that every device holds whole is used for its own positions or heads only: its gradient there is a part of
a sum (BatchAxes.reduce_last).

B batch  T position  D embed
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxscale.sharding.context_axis import WHOLE_ROWS, ContextAxis
from jaxscale.sharding.torus import LinkStage, gather_along, link_stages, scatter_along

AXIS = "tensor"
POSITIONS = 1  # the dimension of a residual stream [B, T, D] that is cut


@dataclasses.dataclass(frozen=True)
class TensorAxis:
    """The devices that share a product. With one of them every method leaves things as they are.

    stages: the devices that share each link, where the axis runs along several. context: whose devices have cut the row
    before: "all positions" are a device's own of that axis.
    """

    size: int = 1
    stages: tuple[LinkStage, ...] = ()
    context: ContextAxis = WHOLE_ROWS

    def row_length(self, x_BTD: jax.Array) -> int:
        """Positions of a whole row, from those of the device."""
        return x_BTD.shape[POSITIONS] * self.size * self.context.size

    def own_of_row(self, x_BT: jax.Array) -> jax.Array:
        """The device's own positions of a whole row."""
        return self.own(self.context.own(x_BT))

    def gather(self, x_BTD: jax.Array) -> jax.Array:
        """All positions, from the device's own. Going back, its own of the summed gradients."""
        return x_BTD if self.size == 1 else _gather(self.stages, x_BTD)

    def scatter(self, x_BTD: jax.Array) -> jax.Array:
        """The device's own positions of the sum over the devices. Going back, all positions of the gradient."""
        return x_BTD if self.size == 1 else _scatter(self.stages, x_BTD)

    def gather_last(self, x: jax.Array) -> jax.Array:
        """x with its last axis whole, from the device's part."""
        return x if self.size == 1 else lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)

    def own(self, x_BT: jax.Array) -> jax.Array:
        """The device's own positions, from all of them."""
        if self.size == 1:
            return x_BT
        length = x_BT.shape[POSITIONS] // self.size
        return lax.dynamic_slice_in_dim(x_BT, lax.axis_index(AXIS) * length, length, POSITIONS)

    def among_all(self, x: jax.Array, filling: float) -> jax.Array:
        """x, whose last axis is the device's own part of one, with `filling` in the places of the others."""
        if self.size == 1:
            return x
        own = x.shape[-1]
        whole = jnp.full((*x.shape[:-1], own * self.size), filling, x.dtype)
        return lax.dynamic_update_slice_in_dim(whole, x, lax.axis_index(AXIS) * own, x.ndim - 1)

    def part_of_gradient(self, tree: Any) -> Any:
        """The same numbers, of which every device computes the same: each gets its part of their gradient."""
        part = lambda x: x / self.size + lax.stop_gradient(x - x / self.size)
        return tree if self.size == 1 else jax.tree.map(part, tree)

    def in_halves(self, f: Callable[..., Any], *of_rows: Any) -> Any:
        """f(*of_rows), each half of the rows by itself, for an f that does not mix rows.

        Neither half waits for the other, so that one's products can run while the other's positions are on their way.
        As a whole where nothing travels, or rows are odd.
        """
        rows = len(jax.tree.leaves(of_rows)[0])
        if self.size == 1 or rows % 2:
            return f(*of_rows)
        part = lambda start: jax.tree.map(lambda x: lax.slice_in_dim(x, start, start + rows // 2), of_rows)
        return joined([f(*part(0)), f(*part(rows // 2))])

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """The mesh axes that share the vocabulary."""
        return (AXIS,) if self.size > 1 else ()

    def own_ids(self, ids_BT: jax.Array, num_own: int) -> jax.Array:
        """Token ids as rows of the device's part of a table; num_own, one past its end, for what others hold.

        An id that nobody holds is like one that others hold: data.checks refuses those before a run.
        """
        if not self.vocab_axes:
            return ids_BT
        ids_BT = ids_BT - lax.axis_index(self.vocab_axes) * num_own
        return jnp.where((ids_BT >= 0) & (ids_BT < num_own), ids_BT, num_own)

    def scatter_rows(self, x_BTD: jax.Array) -> jax.Array:
        """scatter() of rows of a table, each of which one of the devices that share the vocabulary has found."""
        return self.scatter(x_BTD)

    def vocab_sum(self, x: jax.Array) -> jax.Array:
        """The sum over the devices that share the vocabulary. Not to be differentiated."""
        return lax.psum(x, self.vocab_axes) if self.vocab_axes else x

    def vocab_max(self, x: jax.Array) -> jax.Array:
        """The largest among the devices that share the vocabulary. Not to be differentiated."""
        return lax.pmax(x, self.vocab_axes) if self.vocab_axes else x

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over the devices. Not to be differentiated."""
        return x if self.size == 1 else lax.psum(x, AXIS)

    def max(self, x: jax.Array) -> jax.Array:
        """The largest among the devices. Not to be differentiated."""
        return x if self.size == 1 else lax.pmax(x, AXIS)


class WholeRows(TensorAxis):
    """The same devices, each of which holds all positions of the residual stream: one position cannot be shared."""

    def gather(self, x_BTD: jax.Array) -> jax.Array:
        """x_BTD as it is."""
        return x_BTD

    def scatter(self, x_BTD: jax.Array) -> jax.Array:
        """The sum over the devices. Not to be differentiated."""
        return self.sum(x_BTD)

    def own(self, x_BT: jax.Array) -> jax.Array:
        """x_BT as it is."""
        return x_BT

    def in_halves(self, f: Callable[..., Any], *of_rows: Any) -> Any:
        """f(*of_rows)."""
        return f(*of_rows)


ONE = TensorAxis()


def joined(parts: list[Any]) -> Any:
    """What an f gives for all rows, from what it gave for some each: arrays [rows, ...], or such an array and a tree of
    sums over its rows."""
    if not isinstance(parts[0], tuple):
        return jnp.concatenate(parts)
    arrays, sums = zip(*parts)
    return jnp.concatenate(arrays), jax.tree.map(lambda *of_parts: sum(of_parts), *sums)


def make_tensor_axis(mesh: Mesh, *, torus_at_once: bool = False, context: ContextAxis = WHOLE_ROWS) -> TensorAxis:
    """The tensor axis of this mesh. torus_at_once: as for link_stages. context: which has cut the rows."""
    return TensorAxis(mesh.shape[AXIS], link_stages(mesh, AXIS, torus_at_once=torus_at_once), context)


def _gathered(stages: tuple[LinkStage, ...], x_BTD: jax.Array) -> jax.Array:
    return gather_along(x_BTD, AXIS, POSITIONS, stages)


def _scattered(stages: tuple[LinkStage, ...], x_BTD: jax.Array) -> jax.Array:
    return scatter_along(x_BTD, AXIS, POSITIONS, stages)


_gather = jax.custom_vjp(_gathered, nondiff_argnums=(0,))
_scatter = jax.custom_vjp(_scattered, nondiff_argnums=(0,))
_gather.defvjp(lambda stages, x_BTD: (_gather(stages, x_BTD), None), lambda stages, _, dy: (_scattered(stages, dy),))
_scatter.defvjp(lambda stages, x_BTD: (_scatter(stages, x_BTD), None), lambda stages, _, dy: (_gathered(stages, dy),))
