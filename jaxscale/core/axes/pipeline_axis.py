"""Pipeline parallelism inside shard_map: each stage has some of the layers.

If the layers divide evenly and each stage has one chunk, each stage stores the layers that it runs. Otherwise, and if
leading layers precede the stack that is split over stages, every array with a residual dimension is sharded over fsdp
and pipeline along that dimension, and the stages exchange weights once per step. So any depth fits any number of
stages, and checkpoints contain the same arrays. The first stage runs the leading layers and gets fewer of the others.

The weights of a stage are gathered over data and fsdp, and their gradients reduced, once per step. The bytes sent do
not depend on the number of microbatches.

P stages  V chunks of a stage  L layers  B batch  T position  D embed
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.core.axes.batch_axes import BatchAxes
from jaxscale.core.axes.pipeline_schedules import IDLE, Schedule, ScheduleSize, make_schedule, split_layers
from jaxscale.core.axes.tensor_axis import TensorAxis
from jaxscale.core.config import PipelineConfig
from jaxscale.core.shardings import MeshAxes, Rules, is_axes, mesh_axis_names, weight_dtype
from jaxscale.kernels.collectives import CollectiveBytes

AXIS = "pipeline"
LAYERS, VOCAB, BATCH = "layers", "vocab", "act_batch"  # logical axes
RESIDUAL_AXES = ("embed", "expert_embed", "latent")  # axes along the residual stream or a latent of attention


@dataclasses.dataclass(frozen=True)
class PipelineAxis:
    """The stages of a pipeline. layers: int32[P, V, layers of a chunk] from split_layers()."""

    layers: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((1, 1, 1), np.int32), compare=False)
    shards_vocab: bool = False
    leading_layers: float = 0.0  # work of the layers before the split stack, in units of one of its layers

    @property
    def size(self) -> int:
        """Number of stages."""
        return self.layers.shape[0]

    @property
    def num_chunks(self) -> int:
        """Number of chunks per stage."""
        return self.layers.shape[1]

    @property
    def has_local_layers(self) -> bool:
        """True if each stage stores the layers that it runs."""
        return self.num_chunks == 1 and not self.leading_layers and bool((self.layers != IDLE).all())

    @property
    def layer_slots(self) -> int:
        """Number of layers for which a stage has buffers. All chunks are padded to the longest one."""
        return self.layers[0].size

    @property
    def first_layers(self) -> int:
        """Number of layers of the first chunk."""
        return int((self.layers[0, 0] != IDLE).sum())

    @property
    def chunk_work(self) -> float:
        """Cost of the most expensive chunk in units of one layer, without the output projection."""
        return max(self.layers.shape[2], self.first_layers + self.leading_layers)

    def saved_inputs(self, num_leading: int) -> int:
        """Returns the number of layer inputs saved per chunk. num_leading: number of layers before the split stack."""
        return max(self.layers.shape[2], self.first_layers + num_leading)

    def bytes_held(self, schedule: ScheduleSize, hop: int, num_leading: int) -> int:
        """Returns the bytes of a stage's residual streams: saved inputs, cotangents and four communication buffers.

        hop: bytes of the residual stream of one microbatch. num_leading: see saved_inputs().
        """
        buffers = 4 + schedule.num_pending + schedule.num_deferred
        return (schedule.num_slots * self.saved_inputs(num_leading) + buffers) * hop

    def bytes_sent(self, schedule: ScheduleSize, hop: int, tensor: int) -> list[CollectiveBytes]:
        """Returns the bytes that a step sends, except weights. hop: see bytes_held(). tensor: size of the tensor axis.

        At each tick, a stage sends activations to the next stage and gradients to the previous stage. If the vocabulary
        is sharded, stages also all-reduce embeddings and the gradient of the last stage's output, and broadcast the
        gradient of embeddings and the output of the last stage. A broadcast is an all-reduce with zeros elsewhere.
        """
        if self.size == 1:
            return []
        sent = [CollectiveBytes(AXIS, "collective-permute", 2 * schedule.num_ticks * hop)]
        if self.shards_vocab:
            sent.append(CollectiveBytes(AXIS, "all-reduce", 2 * (1 + tensor) * schedule.num_microbatches * hop))
        return sent

    def weight_bytes_sent(self, weights: tuple[float, float], grads: tuple[float, float]) -> list[CollectiveBytes]:
        """Returns the bytes that to_stage() and from_stage() send. weights, grads: bytes of (layers, other weights)."""
        (layers, tables), (layer_grads, table_grads) = weights, grads
        if self.has_local_layers:
            return [] if self.shards_vocab else [CollectiveBytes(AXIS, "all-reduce", table_grads)]
        gather, scatter = ("all-to-all", "all-to-all") if self.shards_vocab else ("all-gather", "reduce-scatter")
        return [
            CollectiveBytes(AXIS, "all-to-all", layers + layer_grads),
            CollectiveBytes(AXIS, gather, tables),
            CollectiveBytes(AXIS, scatter, table_grads),
        ]

    @property
    def stage(self) -> jax.Array:
        """Stage of this device."""
        return lax.axis_index(AXIS)

    @property
    def first(self) -> jax.Array:
        """True on devices of the first stage."""
        return self.stage == 0

    @property
    def last(self) -> jax.Array:
        """True on devices of the last stage."""
        return self.stage == self.size - 1

    def to_next_stage(self, x_BTD: jax.Array) -> jax.Array:
        """Sends to the next stage. The last stage sends to the first, which computes its next chunk."""
        return lax.ppermute(x_BTD, AXIS, self.neighbours)

    def to_previous_stage(self, x_BTD: jax.Array) -> jax.Array:
        """Sends to the previous stage. The first stage sends to the last."""
        return lax.ppermute(x_BTD, AXIS, [(target, source) for source, target in self.neighbours])

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """Pairs of (stage, next stage). With one chunk per stage, the last stage sends nothing."""
        pairs = [(stage, (stage + 1) % self.size) for stage in range(self.size)]
        return pairs if self.num_chunks > 1 else pairs[:-1]

    def sum(self, x: jax.Array) -> jax.Array:
        """Sums over the stages. Not differentiable."""
        return lax.psum(x, AXIS)

    def broadcast_last(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the last stage's value on every stage. Not differentiable."""
        return self.sum(jnp.where(self.last, x_BTD, jnp.zeros_like(x_BTD)))

    def rules(self, rules: Rules) -> Rules:
        """Returns the sharding rules for these stages. With one stage, the pipeline axis shards the batch."""
        # Gradients are first sharded like parameters, then like moments.
        first = rules.params["embed"] != rules.moments["embed"]
        row_rules = functools.partial(self.row_rules, first=first)
        change = row_rules if self.size == 1 else self.local_rules if self.has_local_layers else self.residual_rules
        return Rules(*(change(table) for table in (rules.params, rules.grads, rules.moments)))

    def local_rules(self, table: Mapping[str, MeshAxes]) -> dict[str, MeshAxes]:
        """Returns the rules with layers sharded over stages, and also the vocabulary if the stages shard it."""
        vocab = {VOCAB: (*mesh_axis_names(table[VOCAB]), AXIS)} if self.shards_vocab else {}
        return dict(table) | {LAYERS: AXIS} | vocab

    def row_rules(self, table: Mapping[str, MeshAxes], *, first: bool) -> dict[str, MeshAxes]:
        """Returns the rules with the batch and residual dimensions also sharded over the pipeline axis.

        first: whether the pipeline axis comes first, rather than last, among the mesh axes of a residual dimension.
        """
        added = lambda names: (AXIS, *names) if first else (*names, AXIS)
        residual = {axis: added(mesh_axis_names(table[axis])) for axis in RESIDUAL_AXES}
        return dict(table) | residual | {BATCH: (AXIS, *mesh_axis_names(table[BATCH]))}

    def residual_rules(self, table: Mapping[str, MeshAxes]) -> dict[str, MeshAxes]:
        """Returns the table with residual dimensions also sharded over the stages."""
        return dict(table) | {axis: (*mesh_axis_names(table[axis]), AXIS) for axis in RESIDUAL_AXES}

    def schedule(self, name: str, num_microbatches: int) -> Schedule:
        """Returns the tables of a schedule for these stages."""
        return make_schedule(name, self.size, self.num_chunks, num_microbatches)

    def to_stage(self, w: jax.Array, axes: tuple[str, ...], *, stacked: bool) -> jax.Array:
        """Returns the part of a stored weight that the stage of this device uses.

        stacked: for a stack that is split over stages. The result is [V * layers of a chunk, ...], padded arbitrarily.
        """
        vocab = self.shards_vocab and VOCAB in axes
        residual = residual_dimension(axes)
        if self.has_local_layers and (stacked or vocab):
            return w
        layers_PL = jnp.asarray(np.maximum(self.layers, 0).reshape(self.size, -1))
        if stacked and residual is None:
            return jnp.take(w, layers_PL[self.stage], axis=0)
        if vocab and residual is None:
            size = w.shape[axes.index(VOCAB)] // self.size
            return lax.dynamic_slice_in_dim(w, self.stage * size, size, axes.index(VOCAB))
        if self.has_local_layers or residual is None:
            return w
        if stacked:
            w = jnp.take(w, layers_PL.reshape(-1), axis=0)
            return lax.all_to_all(w, AXIS, split_axis=0, concat_axis=residual, tiled=True)
        if vocab:
            return lax.all_to_all(w, AXIS, split_axis=axes.index(VOCAB), concat_axis=residual, tiled=True)
        return lax.all_gather(w, AXIS, axis=residual, tiled=True)

    def from_stage(self, grad: jax.Array, axes: tuple[str, ...], *, stacked: bool) -> jax.Array:
        """Returns the gradient of the stored weight, summed over stages. grad: gradient of the result of to_stage()."""
        vocab = self.shards_vocab and VOCAB in axes
        residual = residual_dimension(axes)
        if self.has_local_layers and (stacked or vocab):
            return grad
        if stacked and residual is None:
            layers_PL = jnp.asarray(self.layers.reshape(self.size, -1))
            full = jnp.zeros((self.layers.max() + 1, *grad.shape[1:]), grad.dtype)
            return self.sum(full.at[layers_PL[self.stage]].set(grad, mode="drop", wrap_negative_indices=False))
        if vocab and residual is None:
            return lax.all_gather(grad, AXIS, axis=axes.index(VOCAB), tiled=True)  # each stage has the sum of its shard
        if self.has_local_layers or residual is None:
            return self.sum(grad)
        if stacked:
            grad = lax.all_to_all(grad, AXIS, split_axis=residual, concat_axis=0, tiled=True)
            order = np.argsort(np.where(self.layers == IDLE, self.layers.size, self.layers).reshape(-1), kind="stable")
            return jnp.take(grad, jnp.asarray(order[: self.layers.max() + 1]), axis=0)
        if vocab:
            return lax.all_to_all(grad, AXIS, split_axis=residual, concat_axis=axes.index(VOCAB), tiled=True)
        return lax.psum_scatter(grad, AXIS, scatter_dimension=residual, tiled=True)


def residual_dimension(axes: tuple[str, ...]) -> int | None:
    """Returns the index of the first dimension among RESIDUAL_AXES, or None."""
    return next((d for d, axis in enumerate(axes) if axis in RESIDUAL_AXES), None)


NO_PIPELINE_AXIS = PipelineAxis()


@dataclasses.dataclass(frozen=True)
class StageVocabTensorAxis(TensorAxis):
    """A tensor axis whose vocabulary is also sharded over pipeline stages. The tensor axis is outermost."""

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard the vocabulary."""
        return (*super().vocab_axes, AXIS)

    def reduce_scatter_lookup(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the local positions of the sum over stages and tensor devices. Gradients are those of stage 0."""
        return self.reduce_scatter(_sum_of_stages(x_BTD))


@jax.custom_vjp
def _sum_of_stages(x: jax.Array) -> jax.Array:
    return lax.psum(x, AXIS)


_sum_of_stages.defvjp(lambda x: (_sum_of_stages(x), None), lambda _, dy: (lax.psum(dy, AXIS),))


def make_pipeline_axis(
    size: int, cfg: PipelineConfig, num_layers: int, head_layers: float, leading_layers: float = 0.0
) -> PipelineAxis:
    """Returns the stages of a model. head_layers, leading_layers: cost of the output projection, and of the layers
    before the split stack, in units of one layer."""
    if size == 1:
        return NO_PIPELINE_AXIS
    shards_vocab = cfg.head == "cut"
    layers = split_layers(num_layers, size, cfg.chunks, 0.0 if shards_vocab else head_layers, leading_layers)
    return PipelineAxis(layers, shards_vocab, leading_layers)


def share_vocab_with_stages(tensor: TensorAxis, pipeline: PipelineAxis) -> TensorAxis:
    """Returns the tensor axis, combined with the pipeline axis for the vocabulary if stages shard the vocabulary."""
    return StageVocabTensorAxis(tensor.size, tensor.stages, tensor.context) if pipeline.shards_vocab else tensor


@jax.named_scope("gather_weights")
def stage_weights(
    params: Any, axes: Any, batch_axes: BatchAxes, pipeline: PipelineAxis, dtype: Any, *, chunked: str
) -> Any:
    """Returns the parameters of the device's stage, gathered over fsdp and cast to the dtype of matmuls.

    chunked: name of the stack of layers that is split over stages. All other parameters are on every stage, except for
    a sharded vocabulary.
    """

    def gathered(path: Any, axes: tuple[str, ...], w: jax.Array) -> jax.Array:
        gather_dtype = weight_dtype(axes, dtype) if residual_dimension(axes) is not None else w.dtype
        gather = lambda w, axes: batch_axes.gather(w, axes, gather_dtype).astype(gather_dtype)
        local = pipeline.to_stage(w.astype(gather_dtype), axes, stacked=path[0].key == chunked)
        return layer_by_layer(gather, local, axes)

    return jax.tree_util.tree_map_with_path(gathered, axes, params, is_leaf=is_axes)


@jax.named_scope("reduce_gradients")
def stage_gradients(grads: Any, axes: Any, batch_axes: BatchAxes, pipeline: PipelineAxis, *, chunked: str) -> Any:
    """Returns the float32 gradients of stage_weights(), summed over all devices and sharded like the moments."""

    def reduced(stacked: bool, grad: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return pipeline.from_stage(layer_by_layer(batch_axes.reduce_full, grad, axes), axes, stacked=stacked)

    stacks = {name: functools.partial(reduced, name == chunked) for name in grads}
    return {name: batch_axes.map(f, grads[name], axes[name]) for name, f in stacks.items()}


def layer_by_layer(f: Callable, w: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns f(w, axes). Applies f to one layer at a time if w is a stack."""
    return lax.map(lambda one: f(one, axes[1:]), w) if axes[:1] == (LAYERS,) else f(w, axes)
