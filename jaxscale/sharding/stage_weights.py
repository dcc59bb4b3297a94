"""The weights that a pipeline's stage computes with, brought together once a step, and their gradients, summed once.

What data and fsdp send does not depend on the number of microbatches.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxscale.sharding.batch_axes import BatchAxes
from jaxscale.sharding.pipeline_axis import LAYERS, PipelineAxis, residual_dimension
from jaxscale.sharding.rules import read_as
from jaxscale.sharding.shardings import is_axes


@jax.named_scope("gather_weights")
def stage_weights(
    params: Any, axes: Any, batch_axes: BatchAxes, pipeline: PipelineAxis, dtype: Any, *, chunked: str
) -> Any:
    """The device's own stage's part of the parameters: whole over fsdp, and what products read in their dtype.

    chunked: name of the stack whose layers the stages share; all else every stage has, but for a shared vocabulary.
    """

    def whole(path: Any, axes: tuple[str, ...], w: jax.Array) -> jax.Array:
        narrow = read_as(axes, dtype) if residual_dimension(axes) is not None else w.dtype
        gather = lambda w, axes: batch_axes.gather(w, axes, narrow).astype(narrow)
        own = pipeline.to_stage(w.astype(narrow), axes, stacked=path[0].key == chunked)
        return layer_by_layer(gather, own, axes)

    return jax.tree_util.tree_map_with_path(whole, axes, params, is_leaf=is_axes)


@jax.named_scope("reduce_gradients")
def stage_gradients(grads: Any, axes: Any, batch_axes: BatchAxes, pipeline: PipelineAxis, *, chunked: str) -> Any:
    """The sums over all devices of the float32 gradients of stage_weights(), with the moments' sharding."""

    def reduced(stacked: bool, grad: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return pipeline.from_stage(layer_by_layer(batch_axes.reduce_whole, grad, axes), axes, stacked=stacked)

    of_one = lambda name: batch_axes.map(functools.partial(reduced, name == chunked), grads[name], axes[name])
    return {name: of_one(name) for name in grads}


def layer_by_layer(f: Callable, w: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """f(w, axes), of a stack one layer after the other."""
    return lax.map(lambda one: f(one, axes[1:]), w) if axes[:1] == (LAYERS,) else f(w, axes)
