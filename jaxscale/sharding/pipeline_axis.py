"""The pipeline axis by hand: each stage holds some of the layers, and the residual stream goes from one to the next.

Where the layers divide evenly they rest where they are used. Else, and where a stage has several chunks, every array
that lies along the residual stream is cut there, over fsdp and pipeline, and once a step the stages exchange what each
needs: any depth fits any number of stages, and a checkpoint holds the same arrays whatever that is. So it is too where
other layers come before those that the stages share: the first stage runs them, and gets fewer of the others.

P stages  V chunks of a stage  L layers  B batch  T position  D embed
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.sharding.config import PipelineConfig
from jaxscale.sharding.rules import Placement, Rules, names_of
from jaxscale.sharding.schedules import IDLE, Schedule, make_schedule, split_layers
from jaxscale.sharding.tensor_axis import TensorAxis

AXIS = "pipeline"
LAYERS, VOCAB, BATCH = "layers", "vocab", "act_batch"  # logical axes
RESIDUAL = ("embed", "expert_embed", "latent")  # those along the residual stream, or what attention makes of it


@dataclasses.dataclass(frozen=True)
class PipelineAxis:
    """The stages of a run. layers: int32[P, V, layers of a chunk], as split_layers makes them."""

    layers: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((1, 1, 1), np.int32), compare=False)
    cuts_vocab: bool = False
    leading: bool = False  # whether there are layers besides, before all these

    @property
    def size(self) -> int:
        """Stages."""
        return self.layers.shape[0]

    @property
    def num_chunks(self) -> int:
        """Chunks of a stage."""
        return self.layers.shape[1]

    @property
    def rests_in_place(self) -> bool:
        """Whether each stage keeps its own layers between steps."""
        return self.num_chunks == 1 and not self.leading and bool((self.layers != IDLE).all())

    @property
    def stage(self) -> jax.Array:
        """The device's own stage."""
        return lax.axis_index(AXIS)

    @property
    def first(self) -> jax.Array:
        """Whether the device is in the first stage."""
        return self.stage == 0

    @property
    def last(self) -> jax.Array:
        """Whether the device is in the last stage."""
        return self.stage == self.size - 1

    def up(self, x_BTD: jax.Array) -> jax.Array:
        """What the stage before handed on; the first has the last one's, for the next chunk."""
        return lax.ppermute(x_BTD, AXIS, self.neighbours)

    def down(self, x_BTD: jax.Array) -> jax.Array:
        """What the stage behind handed back; the last has the first one's."""
        return lax.ppermute(x_BTD, AXIS, [(there, here) for here, there in self.neighbours])

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """(stage, the next); with one chunk each nothing goes from the last to the first, which get zeros."""
        pairs = [(stage, (stage + 1) % self.size) for stage in range(self.size)]
        return pairs if self.num_chunks > 1 else pairs[:-1]

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over the stages. Not to be differentiated."""
        return lax.psum(x, AXIS)

    def from_last(self, x_BTD: jax.Array) -> jax.Array:
        """The last stage's, on every stage. Not to be differentiated."""
        return self.sum(jnp.where(self.last, x_BTD, jnp.zeros_like(x_BTD)))

    def rules(self, rules: Rules) -> Rules:
        """The rule tables of a run with these stages; with one stage, of a mesh whose pipeline axis shares rows."""
        first = rules.params["embed"] != rules.moments["embed"]  # gradients are cut like parameters, then like moments
        shared = functools.partial(self.shared, first=first)
        change = shared if self.size == 1 else self.resting if self.rests_in_place else self.spread
        return Rules(*(change(table) for table in (rules.params, rules.grads, rules.moments)))

    def resting(self, table: Mapping[str, Placement]) -> dict[str, Placement]:
        """Layers, and the parts of a shared vocabulary, are where they are used."""
        vocab = {VOCAB: (*names_of(table[VOCAB]), AXIS)} if self.cuts_vocab else {}
        return dict(table) | {LAYERS: AXIS} | vocab

    def shared(self, table: Mapping[str, Placement], *, first: bool) -> dict[str, Placement]:
        """The devices of the axis have rows of their own, and their part of everything along the residual stream.

        first: it is cut over them before it is over others; else last, as where stages are spread.
        """
        cut = lambda names: (AXIS, *names) if first else (*names, AXIS)
        embed = {along: cut(names_of(table[along])) for along in RESIDUAL}
        return dict(table) | embed | {BATCH: (AXIS, *names_of(table[BATCH]))}

    def spread(self, table: Mapping[str, Placement]) -> dict[str, Placement]:
        """Everything along the residual stream is cut over the stages as well."""
        return dict(table) | {along: (*names_of(table[along]), AXIS) for along in RESIDUAL}

    def schedule(self, name: str, num_microbatches: int) -> Schedule:
        """The tables of a schedule for these stages."""
        return make_schedule(name, self.size, self.num_chunks, num_microbatches)

    def to_stage(self, w: jax.Array, axes: tuple[str, ...], *, stacked: bool) -> jax.Array:
        """A weight, as it rests, as the device's own stage uses it: [V * layers of a chunk, ...] of a stack.

        What fills up shorter chunks is of no meaning. stacked: it is of the layers that the stages share.
        """
        shared = self.cuts_vocab and VOCAB in axes
        cut = residual_dimension(axes)
        if self.rests_in_place and (stacked or shared):
            return w
        parts_P = jnp.asarray(np.maximum(self.layers, 0).reshape(self.size, -1))
        if stacked and cut is None:
            return jnp.take(w, parts_P[self.stage], axis=0)
        if shared and cut is None:
            own = w.shape[axes.index(VOCAB)] // self.size
            return lax.dynamic_slice_in_dim(w, self.stage * own, own, axes.index(VOCAB))
        if self.rests_in_place or cut is None:
            return w
        if stacked:
            w = jnp.take(w, parts_P.reshape(-1), axis=0)
            return lax.all_to_all(w, AXIS, split_axis=0, concat_axis=cut, tiled=True)
        if shared:
            return lax.all_to_all(w, AXIS, split_axis=axes.index(VOCAB), concat_axis=cut, tiled=True)
        return lax.all_gather(w, AXIS, axis=cut, tiled=True)

    def from_stage(self, grad: jax.Array, axes: tuple[str, ...], *, stacked: bool) -> jax.Array:
        """The sum over the stages of the gradient of what to_stage() returned, cut as the weight rests."""
        shared = self.cuts_vocab and VOCAB in axes
        cut = residual_dimension(axes)
        if self.rests_in_place and (stacked or shared):
            return grad
        if stacked and cut is None:
            places_P = jnp.asarray(self.layers.reshape(self.size, -1))
            whole = jnp.zeros((self.layers.max() + 1, *grad.shape[1:]), grad.dtype)
            return self.sum(whole.at[places_P[self.stage]].set(grad, mode="drop", wrap_negative_indices=False))
        if shared and cut is None:
            return lax.all_gather(grad, AXIS, axis=axes.index(VOCAB), tiled=True)  # each stage has the sum of its part
        if self.rests_in_place or cut is None:
            return self.sum(grad)
        if stacked:
            grad = lax.all_to_all(grad, AXIS, split_axis=cut, concat_axis=0, tiled=True)
            order = np.argsort(np.where(self.layers == IDLE, self.layers.size, self.layers).reshape(-1), kind="stable")
            return jnp.take(grad, jnp.asarray(order[: self.layers.max() + 1]), axis=0)
        if shared:
            return lax.all_to_all(grad, AXIS, split_axis=cut, concat_axis=axes.index(VOCAB), tiled=True)
        return lax.psum_scatter(grad, AXIS, scatter_dimension=cut, tiled=True)


def residual_dimension(axes: tuple[str, ...]) -> int | None:
    """The dimension of an array that lies along the residual stream, if one does."""
    return next((d for d, axis in enumerate(axes) if axis in RESIDUAL), None)


ONE_STAGE = PipelineAxis()


@dataclasses.dataclass(frozen=True)
class TensorAndStages(TensorAxis):
    """The tensor axis where the vocabulary is shared by the stages of a pipeline too, tensor devices outermost."""

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """The mesh axes that share the vocabulary."""
        return (*super().vocab_axes, AXIS)

    def scatter_rows(self, x_BTD: jax.Array) -> jax.Array:
        """The device's own positions of the sum over all these devices. The gradient is that of the first stage."""
        return self.scatter(_sum_of_stages(x_BTD))


@jax.custom_vjp
def _sum_of_stages(x: jax.Array) -> jax.Array:
    return lax.psum(x, AXIS)


_sum_of_stages.defvjp(lambda x: (_sum_of_stages(x), None), lambda _, dy: (lax.psum(dy, AXIS),))


def make_pipeline_axis(
    size: int, cfg: PipelineConfig, num_layers: int, head_layers: float, first_layers: float = 0.0
) -> PipelineAxis:
    """The stages of a model. head_layers: the work of its output projection, in layers; first_layers: that of layers of
    another kind, before all others."""
    if size == 1:
        return ONE_STAGE
    cut = cfg.head == "cut"
    layers = split_layers(num_layers, size, cfg.chunks, 0.0 if cut else head_layers, first_layers)
    return PipelineAxis(layers, cut, first_layers > 0)


def stages_share(tensor: TensorAxis, pipeline: PipelineAxis) -> TensorAxis:
    """The tensor axis of a model whose stages share the vocabulary, if they do."""
    return TensorAndStages(tensor.size, tensor.stages, tensor.context) if pipeline.cuts_vocab else tensor
