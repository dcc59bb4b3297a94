"""Gradients of a batch taken in microbatches by the stages of a pipeline: a scan over the ticks of a schedule.

The mathematics of training.accumulate, and where one device computes what one computed there, its bits: gradients are
summed over the microbatches in their order, but those that a schedule leaves for later. Of a microbatch on its way a
stage keeps the inputs of its layers, and computes each layer again as the gradient comes back. Layers of another kind
that come before all others are the first stage's, whose first chunk has fewer of those: no schedule leaves gradients of
that stage for later.

B rows of a microbatch  T position  D embed  M microbatches  S slots  V chunks of a stage  c layers of a chunk
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.data.batch import Batch
from jaxscale.models.config import BLOCKS, DENSE
from jaxscale.models.stages import Pieces
from jaxscale.optim.optimizers import combine, trainable
from jaxscale.sharding.pipeline_axis import PipelineAxis
from jaxscale.sharding.schedules import IDLE, Backward, Passes, Schedule
from jaxscale.training.accumulate import Reduction, divided, near_mean, row_keys, split_rows


class Carry(NamedTuple):
    """What a device hands from tick to tick."""

    x_BTD: jax.Array  # has come up from the stage before
    dx_BTD: jax.Array  # goes down to the stage before
    kept_ScBTD: jax.Array  # inputs of layers, of the microbatches on their way
    held_SBTD: jax.Array  # gradients of the last chunk's result, until its backward pass; then those held on
    grads: "Parts"  # float32, of what is trained
    sums: dict[str, jax.Array]
    told: dict[str, jax.Array]  # by the layers of this stage: sums too


class Parts(NamedTuple):
    """A tree like the parameters, in parts."""

    ends: Any  # outside of layers
    dense: Any  # {} or {DENSE: those of the layers before all others}
    blocks: Any

    @property
    def whole(self) -> dict:
        """The tree."""
        return {**self.ends, **self.dense, BLOCKS: self.blocks}


class Tick(NamedTuple):
    """A row of the schedule's tables."""

    forward: Passes
    backward: Backward
    enters: Any  # int32[t] in the tables, int32[] in the scan: a microbatch, or IDLE
    leaves: Any
    returns: Any


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How the stages go through a batch."""

    pieces: Pieces
    axis: PipelineAxis
    schedule: Schedule
    groups: Any  # of the parameters: which are trained

    def sums(self, weights: Any, micro: Any, scale: jax.Array | float) -> tuple[dict[str, jax.Array], Any]:
        """(named sums, gradients in float32) of all microbatches, by the device's own stage and not divided.

        weights: of the stage, as products read them. micro: (rows, random keys), [M, B, ...] each. scale: multiplied
        into what is differentiated.
        """
        work = StageWork(self, weights, micro, scale)
        tables = self.schedule
        ticks = Tick(tables.forward, tables.backward, tables.enters, tables.leaves, tables.returns)
        carry, _ = lax.scan(lambda carry, now: (work.tick(carry, now), None), work.begin(), ticks)
        sums = carry.sums if self.axis.cuts_vocab else jax.tree.map(self.axis.sum, carry.sums)
        told = jax.tree.map(self.axis.sum, carry.told)
        added = {name: sums[name] + told[name] if name in sums else told[name] for name in told}
        return sums | added, carry.grads.whole


def accumulate_pipelined(
    pipeline: Pipeline, weights: Any, batch: Batch, key: jax.Array, *, scale: jax.Array, reduction: Reduction
) -> tuple[dict[str, jax.Array], Any]:
    """What accumulate() returns. weights: of the stage. reduction.last: takes gradients of those."""
    near, keys_B = near_mean(scale, batch, reduction), row_keys(key, batch, reduction)
    split = lambda field: split_rows(field, pipeline.schedule.num_microbatches)
    return divided(*pipeline.sums(weights, jax.tree.map(split, (batch, keys_B)), near), near, reduction)


class StageWork:
    """The passes of one device, while the scan is traced."""

    def __init__(self, pipeline: Pipeline, weights: Any, micro: Any, scale: jax.Array | float):
        self.pieces, self.axis, self.schedule = pipeline.pieces, pipeline.axis, pipeline.schedule
        self.micro, self.scale = micro, scale
        (self.ends, self.dense, self.blocks), self.groups = apart(weights), apart(pipeline.groups)
        self.layers_Vc = jnp.asarray(self.axis.layers)[self.axis.stage]
        # In the slots of the first chunk the inputs of the layers before it stand behind those of its own.
        self.num_dense, self.num_first = stacked_layers(self.dense), int((self.axis.layers[0, 0] != IDLE).sum())

    def begin(self) -> Carry:
        """Nothing is on its way."""
        rows = at(self.micro, 0)
        x_BTD = jax.eval_shape(self.pieces.enter, self.ends, *rows)
        (_, parts), _ = jax.eval_shape(self.loss_and_gradients, jnp.zeros(x_BTD.shape, x_BTD.dtype), rows)
        zeros = lambda *shape: jnp.zeros((*shape, *x_BTD.shape), x_BTD.dtype)
        none = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), tree)
        nothing = lambda tree: jax.tree.map(jnp.zeros_like, tree)
        own, first = at(self.blocks, 0), jnp.zeros((), jnp.int32)
        _, told = jax.eval_shape(lambda x_BTD: self.pieces.layer(own, self.ends, x_BTD, *rows, number=first), x_BTD)
        weights = Parts(self.ends, self.dense, self.blocks)
        return Carry(
            zeros(),
            zeros(),
            zeros(self.schedule.num_slots, max(self.layers_Vc.shape[1], self.num_first + self.num_dense)),
            zeros(self.schedule.num_held + self.schedule.num_later),
            Parts(*(none(trainable(*part)) for part in zip(weights, self.groups, strict=True))),
            nothing(parts),
            nothing(told),
        )

    def tick(self, carry: Carry, now: Tick) -> Carry:
        """A forward pass and a backward pass, each if the schedule has one."""
        axis, M, V = self.axis, self.schedule.num_microbatches, self.schedule.num_chunks
        there, back = jax.tree.map(lambda of_stages: of_stages[axis.stage], (now.forward, now.backward))
        joins = lambda here: True if axis.cuts_vocab else here  # at the two ends of the model
        of_ends, of_dense, of_blocks = carry.grads
        dy_BTD = axis.down(carry.dx_BTD)  # on its way while the forward pass runs

        enters, leaves, returns = now.enters != IDLE, now.leaves != IDLE, now.returns != IDLE
        entering = lambda x_BTD: self.pieces.enter(self.ends, *at(self.micro, now.enters))
        entered_BTD = self.when(enters & joins(axis.first), M, entering, carry.x_BTD)
        x_BTD = jnp.where(enters & axis.first, entered_BTD, carry.x_BTD)
        kept_ScBTD = carry.kept_ScBTD
        if self.dense:
            dense_forward = lambda x_BTD, kept_ScBTD: self.dense_forward(x_BTD, kept_ScBTD, there)
            x_BTD, kept_ScBTD = self.when(enters & axis.first, M, dense_forward, x_BTD, kept_ScBTD)
        forward = lambda x_BTD, kept_ScBTD, told: self.forward(x_BTD, kept_ScBTD, told, there)
        y_BTD, kept_ScBTD, told = self.when(there.microbatch != IDLE, M * V, forward, x_BTD, kept_ScBTD, carry.told)
        x_BTD = axis.up(y_BTD)  # on its way while the backward pass runs

        add_loss = lambda sums, of_ends, held: self.add_loss(sums, of_ends, held, y_BTD, now.leaves)
        sums, of_ends, held_SBTD = self.when(
            leaves & joins(axis.last), M, add_loss, carry.sums, of_ends, carry.held_SBTD
        )
        dy_BTD = jnp.where(back.held != IDLE, at(held_SBTD, back.held), dy_BTD)
        backward = lambda dy_BTD, of_blocks: self.backward(dy_BTD, of_blocks, kept_ScBTD, back)
        later = back.keep != IDLE
        dx_BTD, of_blocks = self.when((back.microbatch != IDLE) & ~later, M * V, backward, dy_BTD, of_blocks)
        if most := self.schedule.num_later:  # of a stage; the first leaves none
            of_inputs = lambda dx_BTD, held: self.of_inputs(dy_BTD, held, kept_ScBTD, back)
            dx_BTD, held_SBTD = self.when(later, most, of_inputs, dx_BTD, held_SBTD)
        if self.dense:
            dense_backward = lambda dx_BTD, of_dense: self.dense_backward(dx_BTD, of_dense, kept_ScBTD, back)
            dx_BTD, of_dense = self.when(returns & axis.first, M, dense_backward, dx_BTD, of_dense)
        add_embedding = lambda of_ends: self.add_embedding(of_ends, dx_BTD, now.returns)
        of_ends = self.when(returns & joins(axis.first), M, add_embedding, of_ends)
        # Or XLA would send x_BTD between slices at the beginning of the next tick, when it is waited for.
        x_BTD, dx_BTD = lax.optimization_barrier((x_BTD, dx_BTD))
        return Carry(x_BTD, dx_BTD, kept_ScBTD, held_SBTD, Parts(of_ends, of_dense, of_blocks), sums, told)

    def when(self, active: jax.Array | bool, times: int, f: Callable, *operands: Any) -> Any:
        """f(*operands) where active, else the operands as they are."""
        same = lambda *operands: operands if len(operands) != 1 else operands[0]
        # The program's text says how often each runs, for who counts its work (ahead.hlo_trips).
        with jax.named_scope(f"taken_{times}_of_{self.schedule.num_ticks}"):
            return lax.cond(active, f, same, *operands)

    def forward(self, x_BTD: jax.Array, kept_ScBTD: jax.Array, told: Any, now: Passes) -> tuple[jax.Array, Any, Any]:
        """(the chunk's result, what is kept with the inputs of its layers, what was told with what they tell)"""

        def one(carry, i):
            x_BTD, kept_ScBTD, told = carry
            kept_ScBTD = keep(kept_ScBTD, self.unless_idle(x_BTD, kept_ScBTD, now, i), now, i)
            x_BTD, more = self.layer(self.own(now, i), x_BTD, now, i)
            return (x_BTD, kept_ScBTD, jax.tree.map(jnp.add, told, more)), None

        return lax.scan(one, (x_BTD, kept_ScBTD, told), jnp.arange(self.layers_Vc.shape[1]))[0]

    def unless_idle(self, x_BTD: jax.Array, kept_ScBTD: jax.Array, now: Passes, i: jax.Array) -> jax.Array:
        """What is kept as the input of layer i of the chunk: where there is none, what is there of a dense one."""
        if not self.dense:
            return x_BTD
        return jnp.where(self.layers_Vc[now.chunk, i] == IDLE, kept(kept_ScBTD, now, i), x_BTD)

    def dense_forward(self, x_BTD: jax.Array, kept_ScBTD: jax.Array, now: Passes) -> tuple[jax.Array, jax.Array]:
        """(the result of the layers before all others, what is kept with their inputs)"""

        def one(carry, i):
            x_BTD, kept_ScBTD = carry
            kept_ScBTD = keep(kept_ScBTD, x_BTD, now, self.num_first + i)
            return (self.dense_layer(at(self.dense[DENSE], i), x_BTD, now, i), kept_ScBTD), None

        return lax.scan(one, (x_BTD, kept_ScBTD), jnp.arange(self.num_dense))[0]

    def dense_backward(
        self, dy_BTD: jax.Array, grads: Any, kept_ScBTD: jax.Array, now: Backward
    ) -> tuple[jax.Array, Any]:
        """(gradient of the embeddings, gradients with those of the layers before all others added)"""

        def one(carry, i):
            dy_BTD, grads = carry
            own, x_BTD = at(self.dense[DENSE], i), kept(kept_ScBTD, now, self.num_first + i)
            run = lambda trained, x_BTD: self.dense_layer(combine(trained, own), x_BTD, now, i)
            _, pull = jax.vjp(run, wide(trainable(own, self.groups.dense[DENSE])), x_BTD)
            found, dx_BTD = pull(dy_BTD)
            return (dx_BTD, {DENSE: added_at(grads[DENSE], found, i)}), None

        return lax.scan(one, (dy_BTD, grads), jnp.arange(self.num_dense), reverse=True)[0]

    def dense_layer(self, own: Any, x_BTD: jax.Array, now: Passes | Backward, i: jax.Array) -> jax.Array:
        """The residual stream after layer i of those before all others."""
        return self.pieces.layer(own, self.ends, x_BTD, *at(self.micro, now.microbatch), number=i, stack=DENSE)[0]

    def backward(self, dy_BTD: jax.Array, grads: Any, kept_ScBTD: jax.Array, now: Backward) -> tuple[jax.Array, Any]:
        """(gradient of the chunk's input, gradients with those of its layers added)"""

        def one(carry, i):
            dy_BTD, grads = carry
            place, own, x_BTD = self.place(now, i), self.own(now, i), kept(kept_ScBTD, now, i)
            run = lambda trained, x_BTD: self.scaled_layer(combine(trained, own), x_BTD, now, i)
            _, pull = jax.vjp(run, wide(trainable(own, self.groups.blocks)), x_BTD)
            found, dx_BTD = pull((dy_BTD, jnp.ones(())))
            return (dx_BTD, added_at(grads, found, place)), None

        return lax.scan(one, (dy_BTD, grads), jnp.arange(self.layers_Vc.shape[1]), reverse=True)[0]

    def of_inputs(
        self, dy_BTD: jax.Array, held_SBTD: jax.Array, kept_ScBTD: jax.Array, now: Backward
    ) -> tuple[jax.Array, jax.Array]:
        """(gradient of the chunk's input, held gradients with dy_BTD); those of weights are left to a second pass"""

        def one(dy_BTD, i):
            own, x_BTD = self.own(now, i), kept(kept_ScBTD, now, i)
            _, pull = jax.vjp(lambda x_BTD: self.scaled_layer(own, x_BTD, now, i), x_BTD)
            return *pull((dy_BTD, jnp.ones(()))), None

        held_SBTD = lax.dynamic_update_index_in_dim(held_SBTD, dy_BTD, now.keep, 0)
        return lax.scan(one, dy_BTD, jnp.arange(self.layers_Vc.shape[1]), reverse=True)[0], held_SBTD

    def scaled_layer(self, own: Any, x_BTD: jax.Array, now: Backward, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(layer()'s result, what it adds to what is differentiated)"""
        x_BTD, told = self.layer(own, x_BTD, now, i)
        return x_BTD, jnp.asarray(self.scale * told.get("objective", 0.0), jnp.float32)

    def layer(self, own: Any, x_BTD: jax.Array, now: Passes | Backward, i: jax.Array) -> tuple[jax.Array, Any]:
        """(the residual stream after layer i of the chunk, what it told); as it is where there is no such layer."""
        number, rows = self.layers_Vc[now.chunk, i], at(self.micro, now.microbatch)
        run = lambda x_BTD: self.pieces.layer(own, self.ends, x_BTD, *rows, number=number)
        if (self.axis.layers != IDLE).all():
            return run(x_BTD)
        told = jax.eval_shape(run, x_BTD)[1]
        none = lambda x_BTD: (x_BTD, jax.tree.map(jnp.zeros_like, told))
        return lax.cond(number != IDLE, run, none, x_BTD)

    def place(self, now: Passes | Backward, i: jax.Array) -> Any:
        """Where layer i of the chunk stands among those of the stage."""
        return now.chunk * self.layers_Vc.shape[1] + i

    def own(self, now: Passes | Backward, i: jax.Array) -> Any:
        """Its parameters."""
        return at(self.blocks, self.place(now, i))

    def add_loss(self, sums, of_ends, held_SBTD: jax.Array, y_BTD: jax.Array, microbatch: jax.Array):
        """(sums, gradients outside of the blocks, held gradients) with those of a microbatch's loss."""
        y_BTD = self.axis.from_last(y_BTD) if self.axis.cuts_vocab else y_BTD
        (_, parts), (found, dy_BTD) = self.loss_and_gradients(y_BTD, at(self.micro, microbatch))
        dy_BTD = self.axis.sum(dy_BTD) if self.axis.cuts_vocab else dy_BTD  # of each part of the vocabulary
        held_SBTD = lax.dynamic_update_index_in_dim(held_SBTD, dy_BTD, self.held_at(microbatch), 0)
        return *jax.tree.map(jnp.add, (sums, of_ends), (parts, found)), held_SBTD

    def held_at(self, microbatch: jax.Array) -> jax.Array:
        """Where its gradient is held."""
        return microbatch % self.schedule.num_held

    def loss_and_gradients(self, y_BTD: jax.Array, rows: Any) -> Any:
        """((what is differentiated, named sums), gradients of what is outside of the blocks and of y_BTD)."""

        def scaled(trained, y_BTD):
            total, parts = self.pieces.leave(combine(trained, self.ends), y_BTD, rows[0])
            return total * self.scale, parts | {"objective": total, "real_tokens": jnp.sum(rows[0].weights)}

        trained = wide(trainable(self.ends, self.groups.ends))
        return jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True)(trained, y_BTD)

    def add_embedding(self, of_ends: Any, dx_BTD: jax.Array, microbatch: jax.Array) -> Any:
        """Gradients outside of the blocks with those of a microbatch's embedding."""
        enter = lambda trained: self.pieces.enter(combine(trained, self.ends), *at(self.micro, microbatch))
        _, pull = jax.vjp(enter, wide(trainable(self.ends, self.groups.ends)))
        (found,) = pull(jnp.where(self.axis.first, dx_BTD, jnp.zeros_like(dx_BTD)))
        return jax.tree.map(jnp.add, of_ends, found)


def at(tree: Any, i: jax.Array | np.ndarray | int) -> Any:
    """The i-th entry of each array's first axis."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def added_at(totals: Any, grads: Any, i: jax.Array) -> Any:
    """Sums of gradients of a stack, with those of its i-th layer."""
    add = lambda total, grad: lax.dynamic_update_index_in_dim(total, at(total, i) + grad, i, 0)
    return jax.tree.map(add, totals, grads)


def apart(tree: dict) -> Parts:
    """A tree like the parameters, in its parts."""
    ends = {name: one for name, one in tree.items() if name not in (DENSE, BLOCKS)}
    return Parts(ends, {DENSE: tree[DENSE]} if DENSE in tree else {}, tree[BLOCKS])


def stacked_layers(stacks: dict) -> int:
    """Layers of the stack in a tree of it, or 0 if there is none."""
    return len(jax.tree.leaves(stacks)[0]) if stacks else 0


def keep(kept_ScBTD: jax.Array, x_BTD: jax.Array, now: Passes, i: jax.Array) -> jax.Array:
    """What is kept, with the input of layer i of the chunk."""
    return lax.dynamic_update_slice(kept_ScBTD, x_BTD[None, None], (now.slot, i, 0, 0, 0))


def kept(kept_ScBTD: jax.Array, now: Passes | Backward, i: jax.Array) -> jax.Array:
    """The input of layer i of the chunk, in the forward pass of the microbatch that now goes there or back."""
    return lax.dynamic_slice(kept_ScBTD, (now.slot, i, 0, 0, 0), (1, 1, *kept_ScBTD.shape[2:]))[0, 0]


def wide(tree: Any) -> Any:
    """Weights in float32, so that their gradients are."""
    return jax.tree.map(lambda w: w.astype(jnp.float32), tree)
