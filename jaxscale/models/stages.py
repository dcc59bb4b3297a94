"""A model in the pieces that the stages of a pipeline run, as functions of its parameters.

B batch  T position  D embed
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.data.batch import Batch
from jaxscale.models.config import BLOCKS
from jaxscale.models.layers import OneStack, gather_params, merge_model
from jaxscale.models.model import loss_of
from jaxscale.models.moe_metrics import moe_sums
from jaxscale.ops.attention.xla import narrowed
from jaxscale.sharding.shardings import no_gather


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Functions of parameters that every device has whole, or its part of by the tensor axis.

    ends: the parameters outside of layers.
    """

    graphdef: nnx.GraphDef
    stacks: dict[str, Any]  # {name of a stack: like its parameters}, of which only the structure matters
    compute_dtype: Any
    aux_weights: Mapping[str, float]
    num_sources: int

    @property
    def num_layers(self) -> int:
        """Layers in the blocks."""
        return jax.tree.leaves(self.stacks[BLOCKS])[0].shape[0]

    def enter(self, ends: Any, rows: Batch, keys_B: jax.Array) -> jax.Array:
        """The residual stream before the first layer, of the device's own positions."""
        segments = narrowed(rows.segment_ids, rows.prefix)
        return self.model(ends).enter(rows.tokens, rows.positions, segments, keys_B)

    def layer(
        self,
        params: Any,
        ends: Any,
        x_BTD: jax.Array,
        rows: Batch,
        keys_B: jax.Array,
        number: jax.Array,
        stack: str = BLOCKS,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(the residual stream after the layer of this number, what it adds to the named sums: {} but for experts).
        params: of the layer. number: in its stack."""
        model = self.model(ends | {stack: params})
        graphdef, weights = nnx.split(getattr(model, stack))
        block = nnx.merge(graphdef, gather_params(weights, no_gather, self.compute_dtype, stacked=True))
        more = {} if stack == BLOCKS else {"stack": stack}
        extra = jax.tree.map(lambda stacked: jnp.asarray(stacked)[number], model.per_layer(keys_B, **more))
        run = model.layer(rows.positions, narrowed(rows.segment_ids, rows.prefix))
        result = run(block, x_BTD, extra)
        if not isinstance(result, tuple):
            return result, {}
        added, parts = moe_sums(in_all_layers(result[1], number, self.num_layers), self.aux_weights)
        return result[0], parts | {"objective": added}

    def leave(self, ends: Any, x_BTD: jax.Array, rows: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(what is minimised, its named parts) from the residual stream after the last layer: sums over the tokens."""
        model = self.model(ends)
        return loss_of(model, model.leave(x_BTD), rows, self.aux_weights, self.num_sources)

    def model(self, params: dict[str, Any]) -> OneStack:
        """The model with these parameters."""
        model = merge_model(self.graphdef, self.stacks | params)
        assert isinstance(model, OneStack), "settings refuse a pipeline for a model of two stacks"
        return model


def in_all_layers(metrics: Any, number: jax.Array, num_layers: int) -> Any:
    """Returns the metrics of one layer with a leading axis of layers; zeros for the other layers."""
    return jax.tree.map(lambda x: jnp.zeros((num_layers, *x.shape), x.dtype).at[number].set(x), metrics)
