"""Gradients of a batch, computed by the stages of a pipeline with a scan over the ticks of a schedule.

The result equals that of gradients.accumulate(). On one device the results are bitwise equal, because gradients are
summed in the order of microbatches, unless the schedule defers weight gradients. A stage saves the inputs of its layers
for every microbatch in flight, and recomputes each layer in the backward pass. Leading dense layers, which precede the
stack, run on the first stage, whose first chunk has fewer layers. No schedule defers weight gradients of that stage.

B rows of a microbatch  T position  D embed  M microbatches  S slots  V chunks per stage  c layers of a chunk
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.core.axes.pipeline_axis import PipelineAxis
from jaxscale.core.axes.pipeline_schedules import IDLE, Backward, Passes, Schedule
from jaxscale.core.models.config import BLOCKS, DENSE
from jaxscale.core.models.sharded import StageFunctions
from jaxscale.core.optim.optimizer import combine, trainable


class ParamParts(NamedTuple):
    """A tree like the parameters, split into the parts that the pipeline uses separately."""

    ends: Any  # parameters outside of layers: embedding, final norm, head
    dense: Any  # {DENSE: leading dense layers} or {}
    blocks: Any  # layers that are split over stages

    @property
    def whole(self) -> dict:
        """The tree of the parameters."""
        return {**self.ends, **self.dense, BLOCKS: self.blocks}


class Carry(NamedTuple):
    """State of one device between two ticks."""

    activations_in_BTD: jax.Array  # from the previous stage
    cotangents_in_BTD: jax.Array  # from the next stage
    saved_inputs_ScBTD: jax.Array  # inputs of layers, for the microbatches in flight
    pending_cotangents_SBTD: jax.Array  # of the model's last chunk until its backward pass, then deferred ones
    grads: ParamParts  # float32 gradients of the trained parameters
    sums: dict[str, jax.Array]  # named sums of the loss
    metrics: dict[str, jax.Array]  # named sums returned by the layers of this stage


class Tick(NamedTuple):
    """The entries of the schedule's tables for one tick."""

    forward: Passes
    backward: Backward
    enters: Any  # microbatch to embed, or IDLE; int32[t] in the tables, int32[] in the scan
    leaves: Any  # microbatch whose loss is computed, or IDLE
    returns: Any  # microbatch whose gradient reaches the embedding, or IDLE


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Computes loss and gradients of a batch with a pipeline schedule."""

    functions: StageFunctions
    axis: PipelineAxis
    schedule: Schedule
    groups: Any  # tree with the ParamGroup of each parameter

    def sums(self, weights: Any, micro: Any, scale: jax.Array | float) -> tuple[dict[str, jax.Array], Any]:
        """Returns (named sums, float32 gradients) of this stage for all microbatches, not divided by tokens.

        weights: weights of the stage in the compute dtype. micro: (batch, random keys), each [M, B, ...]. scale: factor
        by which the loss is multiplied before differentiation.
        """
        work = StageWork(self, weights, micro, scale)
        tables = self.schedule
        embedded, losses, embed_grads = tables.embed_microbatch, tables.loss_microbatch, tables.embed_grad_microbatch
        ticks = Tick(tables.forward, tables.backward, embedded, losses, embed_grads)
        carry, _ = lax.scan(lambda carry, now: (work.tick(carry, now), None), work.begin(), ticks)
        sums = carry.sums if self.axis.shards_vocab else jax.tree.map(self.axis.sum, carry.sums)
        metrics = jax.tree.map(self.axis.sum, carry.metrics)
        added = {name: sums[name] + metrics[name] if name in sums else metrics[name] for name in metrics}
        return sums | added, carry.grads.whole


class StageWork:
    """Passes of one device, which the scan traces."""

    def __init__(self, pipeline: Pipeline, weights: Any, micro: Any, scale: jax.Array | float):
        self.functions, self.axis, self.schedule = pipeline.functions, pipeline.axis, pipeline.schedule
        self.micro, self.scale = micro, scale
        (self.ends, self.dense, self.blocks), self.groups = split_params(weights), split_params(pipeline.groups)
        self.layers_Vc = jnp.asarray(self.axis.layers)[self.axis.stage]
        # In the slots of the first chunk, inputs of the dense layers follow those of the stack's layers.
        self.num_dense = len(jax.tree.leaves(self.dense)[0]) if self.dense else 0
        self.num_first = self.axis.first_layers

    def begin(self) -> Carry:
        """Returns a carry of zeros."""
        rows = at(self.micro, 0)
        x_BTD = jax.eval_shape(self.functions.embed, self.ends, *rows)
        (_, sums), _ = jax.eval_shape(self.loss_and_gradients, jnp.zeros(x_BTD.shape, x_BTD.dtype), rows)
        zeros = lambda *shape: jnp.zeros((*shape, *x_BTD.shape), x_BTD.dtype)
        zero_grads = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), tree)
        zeros_like = lambda tree: jax.tree.map(jnp.zeros_like, tree)
        params, first = at(self.blocks, 0), jnp.zeros((), jnp.int32)
        run = lambda x_BTD: self.functions.run_layer(params, self.ends, x_BTD, *rows, number=first)
        _, metrics = jax.eval_shape(run, x_BTD)
        weights = ParamParts(self.ends, self.dense, self.blocks)
        return Carry(
            zeros(),
            zeros(),
            zeros(self.schedule.num_slots, self.axis.saved_inputs(self.num_dense)),
            zeros(self.schedule.num_pending + self.schedule.num_deferred),
            ParamParts(*(zero_grads(trainable(*part)) for part in zip(weights, self.groups, strict=True))),
            zeros_like(sums),
            zeros_like(metrics),
        )

    def tick(self, carry: Carry, now: Tick) -> Carry:
        """Runs the forward and backward passes that are scheduled at this tick, if any."""
        fwd, bwd = jax.tree.map(lambda stages: stages[self.axis.stage], (now.forward, now.backward))
        ends, dense, blocks = carry.grads
        dy_BTD = self.axis.to_previous_stage(carry.cotangents_in_BTD)  # sent while the forward pass runs
        enters, leaves, returns = now.enters != IDLE, now.leaves != IDLE, now.returns != IDLE

        x_BTD = self.embed(carry.activations_in_BTD, now.enters, enters)
        x_BTD, saved_ScBTD = self.forward_dense(x_BTD, carry.saved_inputs_ScBTD, fwd, enters)
        y_BTD, saved_ScBTD, metrics = self.forward_chunk(x_BTD, saved_ScBTD, carry.metrics, fwd)
        x_BTD = self.axis.to_next_stage(y_BTD)  # sent while the backward pass runs

        pending_SBTD = carry.pending_cotangents_SBTD
        sums, ends, pending_SBTD = self.add_loss(carry.sums, ends, pending_SBTD, y_BTD, now.leaves, leaves)
        dy_BTD = jnp.where(bwd.pending != IDLE, at(pending_SBTD, bwd.pending), dy_BTD)
        deferred = bwd.defer_to != IDLE
        dx_BTD, blocks = self.backward_chunk(dy_BTD, blocks, saved_ScBTD, bwd, deferred)
        dx_BTD, pending_SBTD = self.backward_inputs(dx_BTD, dy_BTD, pending_SBTD, saved_ScBTD, bwd, deferred)
        dx_BTD, dense = self.backward_dense(dx_BTD, dense, saved_ScBTD, bwd, returns)
        ends = self.add_embedding(ends, dx_BTD, now.returns, returns)
        # Without the barrier, XLA sends x_BTD between slices at the beginning of the next tick, which must wait for it.
        x_BTD, dx_BTD = lax.optimization_barrier((x_BTD, dx_BTD))
        return Carry(x_BTD, dx_BTD, saved_ScBTD, pending_SBTD, ParamParts(ends, dense, blocks), sums, metrics)

    def when(self, active: jax.Array | bool, times: int, f: Callable, *operands: Any) -> Any:
        """Returns f(*operands) if active, else the operands. times: number of ticks per step in which f runs."""
        same = lambda *operands: operands if len(operands) != 1 else operands[0]
        # The scope name contains the number of runs, from which tools.preflight.hlo_trips counts FLOPs and bytes.
        with jax.named_scope(f"taken_{times}_of_{self.schedule.num_ticks}"):
            return lax.cond(active, f, same, *operands)

    def at_end(self, is_end: jax.Array) -> jax.Array | bool:
        """Returns True if this stage runs the embedding or head. All stages do if they shard the vocabulary."""
        return True if self.axis.shards_vocab else is_end

    @property
    def num_passes(self) -> int:
        """Number of forward passes per stage and step, which equals the number of backward passes."""
        return self.schedule.num_microbatches * self.schedule.num_chunks

    def embed(self, x_BTD: jax.Array, microbatch: jax.Array, enters: jax.Array) -> jax.Array:
        """Returns the embedding of the microbatch that enters the first stage, if any, else x_BTD."""
        embed = lambda x_BTD: self.functions.embed(self.ends, *at(self.micro, microbatch))
        active = enters & self.at_end(self.axis.first)
        embedded_BTD = self.when(active, self.schedule.num_microbatches, embed, x_BTD)
        return jnp.where(enters & self.axis.first, embedded_BTD, x_BTD)

    def forward_dense(
        self, x_BTD: jax.Array, saved_ScBTD: jax.Array, now: Passes, enters: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the leading dense layers. Returns (residual stream, saved inputs)."""
        if not self.dense:
            return x_BTD, saved_ScBTD

        def layer(carry, i):
            x_BTD, saved_ScBTD = carry
            saved_ScBTD = save(saved_ScBTD, x_BTD, now, self.num_first + i)
            return (self.dense_layer(at(self.dense[DENSE], i), x_BTD, now, i), saved_ScBTD), None

        run = lambda *carry: lax.scan(layer, carry, jnp.arange(self.num_dense))[0]
        return self.when(enters & self.axis.first, self.schedule.num_microbatches, run, x_BTD, saved_ScBTD)

    def forward_chunk(
        self, x_BTD: jax.Array, saved_ScBTD: jax.Array, metrics: Any, now: Passes
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Runs the layers of a chunk. Returns (residual stream, saved inputs, sums of metrics)."""

        def layer(carry, i):
            x_BTD, saved_ScBTD, metrics = carry
            saved_ScBTD = save(saved_ScBTD, self.unless_idle(x_BTD, saved_ScBTD, now, i), now, i)
            x_BTD, more = self.layer(self.params_of(now, i), x_BTD, now, i)
            return (x_BTD, saved_ScBTD, jax.tree.map(jnp.add, metrics, more)), None

        run = lambda *carry: lax.scan(layer, carry, jnp.arange(self.layers_Vc.shape[1]))[0]
        return self.when(now.microbatch != IDLE, self.num_passes, run, x_BTD, saved_ScBTD, metrics)

    def unless_idle(self, x_BTD: jax.Array, saved_ScBTD: jax.Array, now: Passes, i: jax.Array) -> jax.Array:
        """Returns x_BTD if the chunk has a layer i, else the saved input i, which may be that of a dense layer."""
        if not self.dense:
            return x_BTD
        return jnp.where(self.layers_Vc[now.chunk, i] == IDLE, saved(saved_ScBTD, now, i), x_BTD)

    def add_loss(
        self, sums: Any, grads: Any, pending_SBTD: jax.Array, y_BTD: jax.Array, microbatch: jax.Array, leaves: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        """Adds the loss of a microbatch that leaves the last stage. Returns (sums, gradients, pending cotangents)."""

        def run(sums, grads, pending_SBTD):
            out_BTD = self.axis.broadcast_last(y_BTD) if self.axis.shards_vocab else y_BTD
            (_, more), (found, dy_BTD) = self.loss_and_gradients(out_BTD, at(self.micro, microbatch))
            dy_BTD = self.axis.sum(dy_BTD) if self.axis.shards_vocab else dy_BTD  # over the shards of the vocabulary
            index = microbatch % self.schedule.num_pending
            pending_SBTD = lax.dynamic_update_index_in_dim(pending_SBTD, dy_BTD, index, 0)
            return *jax.tree.map(jnp.add, (sums, grads), (more, found)), pending_SBTD

        active = leaves & self.at_end(self.axis.last)
        return self.when(active, self.schedule.num_microbatches, run, sums, grads, pending_SBTD)

    def loss_and_gradients(self, y_BTD: jax.Array, rows: Any) -> Any:
        """Returns ((scaled loss, named sums), (gradients of the ends, gradient of y_BTD))."""

        def scaled(trained, y_BTD):
            total, sums = self.functions.loss(combine(trained, self.ends), y_BTD, rows[0])
            return total * self.scale, sums | {"objective": total, "real_tokens": jnp.sum(rows[0].weights)}

        trained = to_float32(trainable(self.ends, self.groups.ends))
        return jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True)(trained, y_BTD)

    def backward_chunk(
        self, dy_BTD: jax.Array, grads: Any, saved_ScBTD: jax.Array, now: Backward, deferred: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Runs the backward pass of the chunk. Returns (gradient of the chunk's input, accumulated gradients)."""

        def layer(carry, i):
            dy_BTD, grads = carry
            index, params, x_BTD = self.index_of(now, i), self.params_of(now, i), saved(saved_ScBTD, now, i)
            run = lambda trained, x_BTD: self.scaled_layer(combine(trained, params), x_BTD, now, i)
            _, pull = jax.vjp(run, to_float32(trainable(params, self.groups.blocks)), x_BTD)
            found, dx_BTD = pull((dy_BTD, jnp.ones(())))
            return (dx_BTD, added_at(grads, found, index)), None

        run = lambda *carry: lax.scan(layer, carry, jnp.arange(self.layers_Vc.shape[1]), reverse=True)[0]
        return self.when((now.microbatch != IDLE) & ~deferred, self.num_passes, run, dy_BTD, grads)

    def backward_inputs(
        self,
        dx_BTD: jax.Array,
        dy_BTD: jax.Array,
        pending_SBTD: jax.Array,
        saved_ScBTD: jax.Array,
        now: Backward,
        deferred: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the backward pass of the chunk without weight gradients, if the schedule defers them to a later pass.

        Returns (gradient of the chunk's input, pending cotangents with dy_BTD), else (dx_BTD, pending_SBTD).
        """
        if not (num_deferred := self.schedule.num_deferred):  # maximum of all stages; the first stage defers none
            return dx_BTD, pending_SBTD

        def layer(dy_BTD, i):
            params, x_BTD = self.params_of(now, i), saved(saved_ScBTD, now, i)
            _, pull = jax.vjp(lambda x_BTD: self.scaled_layer(params, x_BTD, now, i), x_BTD)
            return *pull((dy_BTD, jnp.ones(()))), None

        def run(dx_BTD, pending_SBTD):
            pending_SBTD = lax.dynamic_update_index_in_dim(pending_SBTD, dy_BTD, now.defer_to, 0)
            return lax.scan(layer, dy_BTD, jnp.arange(self.layers_Vc.shape[1]), reverse=True)[0], pending_SBTD

        return self.when(deferred, num_deferred, run, dx_BTD, pending_SBTD)

    def backward_dense(
        self, dy_BTD: jax.Array, grads: Any, saved_ScBTD: jax.Array, now: Backward, returns: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Runs the backward pass of the leading dense layers. Returns (gradient of their input, gradients)."""
        if not self.dense:
            return dy_BTD, grads

        def layer(carry, i):
            dy_BTD, grads = carry
            params, x_BTD = at(self.dense[DENSE], i), saved(saved_ScBTD, now, self.num_first + i)
            run = lambda trained, x_BTD: self.dense_layer(combine(trained, params), x_BTD, now, i)
            _, pull = jax.vjp(run, to_float32(trainable(params, self.groups.dense[DENSE])), x_BTD)
            found, dx_BTD = pull(dy_BTD)
            return (dx_BTD, {DENSE: added_at(grads[DENSE], found, i)}), None

        run = lambda *carry: lax.scan(layer, carry, jnp.arange(self.num_dense), reverse=True)[0]
        return self.when(returns & self.axis.first, self.schedule.num_microbatches, run, dy_BTD, grads)

    def add_embedding(self, grads: Any, dx_BTD: jax.Array, microbatch: jax.Array, returns: jax.Array) -> Any:
        """Returns `grads`, plus embedding gradients if the backward pass of a microbatch has reached the embedding."""

        def run(grads):
            enter = lambda trained: self.functions.embed(combine(trained, self.ends), *at(self.micro, microbatch))
            _, pull = jax.vjp(enter, to_float32(trainable(self.ends, self.groups.ends)))
            (found,) = pull(jnp.where(self.axis.first, dx_BTD, jnp.zeros_like(dx_BTD)))
            return jax.tree.map(jnp.add, grads, found)

        return self.when(returns & self.at_end(self.axis.first), self.schedule.num_microbatches, run, grads)

    def dense_layer(self, params: Any, x_BTD: jax.Array, now: Passes | Backward, i: jax.Array) -> jax.Array:
        """Returns the residual stream after leading dense layer i."""
        rows = at(self.micro, now.microbatch)
        return self.functions.run_layer(params, self.ends, x_BTD, *rows, number=i, stack=DENSE)[0]

    def scaled_layer(self, params: Any, x_BTD: jax.Array, now: Backward, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (residual stream after layer i, scaled loss of the layer)."""
        x_BTD, metrics = self.layer(params, x_BTD, now, i)
        return x_BTD, jnp.asarray(self.scale * metrics.get("objective", 0.0), jnp.float32)

    def layer(self, params: Any, x_BTD: jax.Array, now: Passes | Backward, i: jax.Array) -> tuple[jax.Array, Any]:
        """Returns (x_BTD after layer i of the chunk, metrics), or (x_BTD, zeros) if the chunk has no layer i."""
        number, rows = self.layers_Vc[now.chunk, i], at(self.micro, now.microbatch)
        run = lambda x_BTD: self.functions.run_layer(params, self.ends, x_BTD, *rows, number=number)
        if (self.axis.layers != IDLE).all():
            return run(x_BTD)
        metrics = jax.eval_shape(run, x_BTD)[1]
        skip = lambda x_BTD: (x_BTD, jax.tree.map(jnp.zeros_like, metrics))
        return lax.cond(number != IDLE, run, skip, x_BTD)

    def index_of(self, now: Passes | Backward, i: jax.Array) -> Any:
        """Returns the index of the chunk's layer i among the layers of the stage."""
        return now.chunk * self.layers_Vc.shape[1] + i

    def params_of(self, now: Passes | Backward, i: jax.Array) -> Any:
        """Returns the parameters of the chunk's layer i."""
        return at(self.blocks, self.index_of(now, i))


def at(tree: Any, i: jax.Array | np.ndarray | int) -> Any:
    """Returns entry i of each array's first axis."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def added_at(totals: Any, grads: Any, i: jax.Array) -> Any:
    """Returns the totals of a stack of layers with the gradients of layer i added."""
    add = lambda total, grad: lax.dynamic_update_index_in_dim(total, at(total, i) + grad, i, 0)
    return jax.tree.map(add, totals, grads)


def split_params(tree: dict) -> ParamParts:
    """Splits a tree like the parameters into ParamParts."""
    ends = {name: subtree for name, subtree in tree.items() if name not in (DENSE, BLOCKS)}
    return ParamParts(ends, {DENSE: tree[DENSE]} if DENSE in tree else {}, tree[BLOCKS])


def save(saved_ScBTD: jax.Array, x_BTD: jax.Array, now: Passes, i: jax.Array) -> jax.Array:
    """Saves x_BTD as the input of layer i of the chunk."""
    return lax.dynamic_update_slice(saved_ScBTD, x_BTD[None, None], (now.slot, i, 0, 0, 0))


def saved(saved_ScBTD: jax.Array, now: Passes | Backward, i: jax.Array) -> jax.Array:
    """Returns the saved input of layer i of the chunk, for the microbatch of this pass."""
    return lax.dynamic_slice(saved_ScBTD, (now.slot, i, 0, 0, 0), (1, 1, *saved_ScBTD.shape[2:]))[0, 0]


def to_float32(tree: Any) -> Any:
    """Casts weights to float32, so that their gradients are float32."""
    return jax.tree.map(lambda w: w.astype(jnp.float32), tree)
