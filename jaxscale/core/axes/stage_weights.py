"""Weights of a pipeline stage, gathered once per step, and their gradients, reduced once per step.

The bytes sent over data and fsdp are independent of the number of microbatches.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxscale.core.axes.batch_axes import BatchAxes
from jaxscale.core.axes.pipeline_axis import LAYERS, PipelineAxis, residual_dimension
from jaxscale.core.rules import weight_dtype
from jaxscale.core.shardings import is_axes


@jax.named_scope("gather_weights")
def stage_weights(
    params: Any, axes: Any, batch_axes: BatchAxes, pipeline: PipelineAxis, dtype: Any, *, chunked: str
) -> Any:
    """Returns the parameters of the device's stage, gathered over fsdp, in the dtype in which matmuls read them.

    chunked: the stack whose layers are split over stages. Other parameters are on every stage, except a sharded
    vocabulary.
    """

    def gathered(path: Any, axes: tuple[str, ...], w: jax.Array) -> jax.Array:
        gather_dtype = weight_dtype(axes, dtype) if residual_dimension(axes) is not None else w.dtype
        gather = lambda w, axes: batch_axes.gather(w, axes, gather_dtype).astype(gather_dtype)
        local = pipeline.to_stage(w.astype(gather_dtype), axes, stacked=path[0].key == chunked)
        return layer_by_layer(gather, local, axes)

    return jax.tree_util.tree_map_with_path(gathered, axes, params, is_leaf=is_axes)


@jax.named_scope("reduce_gradients")
def stage_gradients(grads: Any, axes: Any, batch_axes: BatchAxes, pipeline: PipelineAxis, *, chunked: str) -> Any:
    """Returns the float32 gradients of stage_weights() summed over all devices, with the moments' sharding."""

    def reduced(stacked: bool, grad: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return pipeline.from_stage(layer_by_layer(batch_axes.reduce_full, grad, axes), axes, stacked=stacked)

    stacks = {name: functools.partial(reduced, name == chunked) for name in grads}
    return {name: batch_axes.map(f, grads[name], axes[name]) for name, f in stacks.items()}


def layer_by_layer(f: Callable, w: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns f(w, axes); of a stack, one layer after the other."""
    return lax.map(lambda one: f(one, axes[1:]), w) if axes[:1] == (LAYERS,) else f(w, axes)
